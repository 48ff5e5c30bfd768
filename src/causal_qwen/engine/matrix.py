"""Matrix: a weight as it is stored, and its product with activations.

Decoding reads every weight once per token, so the product's speed is the memory's. It must read
rows that lie one after the other, once, and nothing else: W x with W (N, K) row by row is one BLAS
call in float32. In bfloat16 a tile of rows is widened into a buffer that stays in cache. Two
neighbouring bfloat16 are one 32-bit word, and each is a float32 but for the other one's bits:

    word << 16           the even columns' weights        W x = W_even x_even + W_odd x_odd
    word & 0xFFFF0000    the odd columns' weights

Both are one vectorised pass; a strided copy of the 16-bit halves takes twice as long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from causal_qwen.engine import threads
from causal_qwen.engine.weights import Float32, Stored, widen

TILE = 512  # rows that are widened at once
FEW = 8  # rows of x up to which W is read once, tile by tile; more make a matrix product
LONG, PART = 768, 128  # sums of more than LONG terms are taken in parts: see _dot
_HIGH = np.uint32(0xFFFF0000)
_HALF = np.uint32(16)


class Matrix:
    """W (N, K), as stored. `absolute` products use |W|."""

    def __init__(self, stored: Stored) -> None:
        if stored.ndim != 2:
            raise ValueError(f"A matrix has two axes; this weight has the shape {stored.shape}.")
        self.stored = np.ascontiguousarray(stored)
        self.shape: tuple[int, int] = (stored.shape[0], stored.shape[1])
        has_pairs = stored.dtype == np.uint16 and stored.shape[1] % 2 == 0
        self.words: NDArray[np.uint32] | None = self.stored.view(np.uint32) if has_pairs else None

    def rows(self, ids: NDArray[np.integer]) -> Float32:
        """Some rows in float32: an embedding's lookup. (...) -> (..., K)"""
        return widen(self.stored[ids])

    def __call__(self, x: Float32) -> Float32:
        """W x. (..., K) -> (..., N)"""
        return project(x, self)[0]

    def absolute(self, x: Float32, rows: NDArray[np.integer] | None = None) -> Float32:
        """|W| x of one vector, for all or some rows. (K,) -> (N,)"""
        chosen = np.arange(self.shape[0]) if rows is None else rows
        out = np.empty(len(chosen), np.float32)

        def work(share: slice) -> None:
            for start in range(share.start, share.stop, TILE):
                tile = slice(start, min(start + TILE, share.stop))
                part = self.stored[tile] if rows is None else self.stored[chosen[tile]]
                np.dot(np.abs(widen(part)), x, out=out[tile])

        threads.run([partial(work, share) for share in threads.shares(len(chosen))])
        return out

    def row_norms(self) -> Float32:
        """||W_k||_1 of every row. -> (N,)"""
        return self.absolute(np.ones(self.shape[1], np.float32))


def project(x: Float32, *matrices: Matrix) -> list[Float32]:
    """W x for every given W; they share x, and one round of threads. (..., K) -> (..., N) each"""
    flat = np.ascontiguousarray(x.reshape(-1, x.shape[-1]), np.float32)  # (M, K)
    outs = [np.empty((len(flat), matrix.shape[0]), np.float32) for matrix in matrices]
    if all(matrix.stored.dtype == np.float32 for matrix in matrices):
        for matrix, out in zip(matrices, outs, strict=True):
            _multiply_float32(matrix.stored, flat, out)
    else:
        even, odd = np.ascontiguousarray(flat[:, 0::2]), np.ascontiguousarray(flat[:, 1::2])

        def work(share: int) -> None:
            for matrix, out in zip(matrices, outs, strict=True):
                rows = threads.shares(matrix.shape[0])[share]
                if matrix.words is not None:
                    _multiply_bfloat16(matrix.words, even, odd, out, rows)
                else:
                    _multiply_widened(matrix.stored, flat, out, rows)

        tasks: list[Callable[[], None]] = [partial(work, share) for share in range(threads.COUNT)]
        threads.run(tasks)
    return [out.reshape(*x.shape[:-1], out.shape[1]) for out in outs]


def _multiply_float32(weight: Float32, x: Float32, out: Float32) -> None:
    """(N, K), (M, K) -> out (M, N)"""
    if len(x) == 1:
        np.dot(weight, x[0], out=out[0])
    elif len(x) <= FEW:
        for start in range(0, len(weight), TILE):
            tile = slice(start, start + TILE)
            for row in range(len(x)):
                np.dot(weight[tile], x[row], out=out[row, tile])
    else:
        _dot(x, weight, out)


def _dot(x: Float32, weight: Float32, out: Float32, long: int = LONG) -> None:
    """x W^T. (M, K), (N, K) -> out (M, N)

    BLAS adds the terms of a product of matrices one after the other. At a text's first token some
    activations are in the thousands, and every small term after such a one is rounded to its size:
    in parts, fewer are. (Products with one vector use many accumulators and need no help.)
    """
    if weight.shape[1] <= long:
        np.dot(x, weight.T, out=out)
        return
    for start in range(0, len(weight), TILE):  # sums that stay in cache
        rows = weight[start : start + TILE]
        total = np.dot(x[:, :PART], rows[:, :PART].T)
        part = np.empty_like(total)
        for first in range(PART, weight.shape[1], PART):
            columns = slice(first, first + PART)
            total += np.dot(x[:, columns], rows[:, columns].T, out=part)
        out[:, start : start + TILE] = total


def _multiply_bfloat16(
    words: NDArray[np.uint32], even: Float32, odd: Float32, out: Float32, rows: slice
) -> None:
    """`rows` of W, whose columns lie two to a word; (N, K/2), (M, K/2) twice -> out (M, N)"""
    for start in range(rows.start, rows.stop, TILE):
        tile = slice(start, min(start + TILE, rows.stop))
        buffer = threads.scratch(tile.stop - tile.start, words.shape[1])
        weight = buffer.view(np.float32)
        np.left_shift(words[tile], _HALF, out=buffer)
        first = _several(weight, even)
        np.bitwise_and(words[tile], _HIGH, out=buffer)
        np.add(first, _several(weight, odd), out=out[:, tile])


def _several(weight: Float32, x: Float32) -> Float32:
    """Half of the columns: (N, K/2), (M, K/2) -> (M, N)"""
    out = np.empty((len(x), len(weight)), np.float32)
    if len(x) <= FEW:
        for row in range(len(x)):
            np.dot(weight, x[row], out=out[row])
    else:
        _dot(x, weight, out, LONG // 2)
    return out


def _multiply_widened(stored: Stored, x: Float32, out: Float32, rows: slice) -> None:
    """`rows` of W of any stored type, widened in plain sight; (N, K), (M, K) -> out (M, N)"""
    for start in range(rows.start, rows.stop, TILE):
        tile = slice(start, min(start + TILE, rows.stop))
        out[:, tile] = x @ widen(stored[tile]).T
