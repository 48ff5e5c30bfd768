"""Blocks: matrices of 4 bits as GGUF files store them (Q4_K), read by loops that numba compiles.

A block is 256 weights of a row: w = d s q - m t, with q in 4 bits, and s and t in 6 bits for every
32 weights. A product with few vectors reads the blocks themselves; for more, tiles are widened.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.numpy_engine.fast import Loop, Matrix, compile_loop, prange, scratch
from causal_qwen.numpy_engine.weights import Float32

Bytes = NDArray[np.uint8]
Q4_K = 12  # the type's number in a file
HALVES: Float32 = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)


class BlockMatrix(Matrix):
    """W (N, K). `stored` are the bytes of its blocks, (N, K / 256 * 144)."""

    def __init__(self, stored: Bytes) -> None:
        self.stored, self.scales = stored, None
        self.shape = (len(stored), stored.shape[1] // 144 * 256)
        self.dtype = stored.dtype
        self.kernel = BlockKernel()

    def rows(self, ids: Any) -> Float32:
        from gguf import GGMLQuantizationType, quants

        data = np.ascontiguousarray(self.stored[ids])
        found: Float32 = quants.dequantize(data, GGMLQuantizationType(Q4_K))
        return found

    def widened(self, rows: slice) -> Float32:
        weight = scratch(rows.stop - rows.start, self.shape[1])
        _loops()[1](self.stored[rows], HALVES, weight)
        return weight

    def absolute(self, x: Float32, rows: NDArray[np.integer] | None = None) -> Float32:
        every = np.arange(self.shape[0]) if rows is None else rows
        parts = np.array_split(every, max(len(every) // 1024, 1))
        return np.concatenate([np.abs(self.rows(part)) @ x for part in parts])


class BlockKernel:
    """As `fast.Kernel`."""

    has_threads = True

    def __call__(self, blocks: Bytes, _: None, x: Float32, out: Float32) -> None:
        for vector, products in zip(x, out, strict=True):
            near = np.ascontiguousarray(vector)
            _loops()[0](blocks, HALVES, near, near.reshape(-1, 32).sum(1), products)


@cache
def _loops() -> tuple[Loop, Loop]:
    return compile_loop(dot_q4), compile_loop(widen_q4, is_alone=False)


def dot_q4(blocks: Bytes, halves: Float32, x: Float32, sums: Float32, out: Float32) -> None:
    """`sums` are those of every 32 coordinates of x."""
    for n in prange(blocks.shape[0]):
        row, total = blocks[n], np.float32(0)
        for b in range(row.shape[0] // 144):
            o = 144 * b
            d = halves[row[o] | np.uint16(row[o + 1]) << 8]
            m = halves[row[o + 2] | np.uint16(row[o + 3]) << 8]
            for p in range(4):  # 64 weights: the low halves of 32 bytes, then the high ones
                j = o + 2 * p
                if p < 2:
                    s1, t1 = row[j + 4] & 63, row[j + 8] & 63
                    s2, t2 = row[j + 5] & 63, row[j + 9] & 63
                else:
                    s1 = (row[j + 8] & 15) | ((row[j] >> 6) << 4)
                    t1 = (row[j + 8] >> 4) | ((row[j + 4] >> 6) << 4)
                    s2 = (row[j + 9] & 15) | ((row[j + 1] >> 6) << 4)
                    t2 = (row[j + 9] >> 4) | ((row[j + 5] >> 6) << 4)
                f1, f2, part = d * np.float32(s1), d * np.float32(s2), np.float32(0)
                q, at = o + 16 + 32 * p, 256 * b + 64 * p
                for k in range(32):
                    byte = row[q + k]
                    part += f1 * np.float32(byte & 15) * x[at + k]
                    part += f2 * np.float32(byte >> 4) * x[at + 32 + k]
                least = np.float32(t1) * sums[at // 32] + np.float32(t2) * sums[at // 32 + 1]
                total += part - m * least
        out[n] = total


def widen_q4(blocks: Bytes, halves: Float32, out: Float32) -> None:
    for n in range(blocks.shape[0]):
        row = blocks[n]
        for b in range(row.shape[0] // 144):
            o = 144 * b
            d = halves[row[o] | np.uint16(row[o + 1]) << 8]
            m = halves[row[o + 2] | np.uint16(row[o + 3]) << 8]
            for j in range(8):
                if j < 4:
                    s, t = row[o + 4 + j] & 63, row[o + 8 + j] & 63
                else:
                    s = (row[o + 8 + j] & 15) | ((row[o + j] >> 6) << 4)
                    t = (row[o + 8 + j] >> 4) | ((row[o + 4 + j] >> 6) << 4)
                scale, least = d * np.float32(s), m * np.float32(t)
                q, at, shift = o + 16 + 32 * (j // 2), 256 * b + 32 * j, 4 * (j % 2)
                for k in range(32):
                    out[n, at + k] = scale * np.float32((row[q + k] >> shift) & 15) - least
