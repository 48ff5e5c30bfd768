"""Kernels: products of int8 and bfloat16 weights with a few vectors, compiled by numba (optional).

NumPy widens a tile into a buffer and reads it again; a compiled loop widens in registers, so that
only the stored bytes are read. The engine's own threads call it, a share of the rows each.

    pip install numba           Engine.from_pretrained(path, dtype="int8", kernel="numba")
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from ml_dtypes import bfloat16

from causal_qwen.engine.weights import Float32, Stored
from causal_qwen.options import check_choice

KERNELS = ("numpy", "numba")
FIRST_LEVEL = 2**13  # floats that stay in a core's first cache
Kernel = Callable[[Stored, Float32 | None, Float32, Float32], None]  # W, scales, x, out


def find_kernel(name: str) -> Kernel | None:
    """The compiled kernel, or None for NumPy."""
    return None if check_choice("kernel", name, KERNELS) == "numpy" else numba_kernel()


def can_compile(stored: Stored) -> bool:
    return stored.dtype in (np.int8, bfloat16)


@cache
def numba_kernel() -> Kernel:
    """(N, K), (N,) or None, (M, K), out (M, N). Compiled at the first call, then cached on disk."""
    try:
        from numba import njit
    except ImportError:
        raise ImportError(
            "kernel='numba' needs numba: pip install numba, or leave the option out."
        ) from None
    compile_loop = njit(nogil=True, fastmath=True, cache=True)
    loops = (dot_one, dot_four, dot_eight, dot_one_bfloat16)
    return by_loops(*(compile_loop(loop) for loop in loops))


def by_loops(
    one: Callable[..., None],
    four: Callable[..., None],
    eight: Callable[..., None],
    one_bfloat16: Callable[..., None],
) -> Kernel:
    """A kernel of four loops: int8 with one, four and eight vectors, bfloat16 with one."""

    def multiply(weights: Stored, scales: Float32 | None, x: Float32, out: Float32) -> None:
        if scales is None:
            for vector, products in zip(x, out, strict=True):
                one_bfloat16(weights.view(np.uint16), vector, products)
            return
        if len(x) == 8 and x.size <= FIRST_LEVEL:
            eight(weights, x, out)
        else:
            rest = len(x) % 4
            for first in range(rest):
                one(weights, x[first], out[first])
            for first in range(rest, len(x), 4):
                four(weights, x[first : first + 4], out[first : first + 4])
        out *= scales

    return multiply


def dot_one(weights: Stored, x: Float32, out: Float32) -> None:
    for n in range(weights.shape[0]):
        row, total = weights[n], np.float32(0)
        for k in range(row.shape[0]):
            total += np.float32(row[k]) * x[k]
        out[n] = total


def dot_four(weights: Stored, x: Float32, out: Float32) -> None:
    """Four vectors and two rows at once: eight sums for six numbers read, all in registers.

    The last pair overlaps the one before if N is odd (if N is 1, both are row 0, which is -1, too).
    """
    for start in range(0, weights.shape[0], 2):
        n = min(start, weights.shape[0] - 2)
        row, next_row = weights[n], weights[n + 1]
        a = b = c = d = np.float32(0)
        e = f = g = h = np.float32(0)
        for k in range(row.shape[0]):
            one, other = np.float32(row[k]), np.float32(next_row[k])
            a += one * x[0, k]
            b += one * x[1, k]
            c += one * x[2, k]
            d += one * x[3, k]
            e += other * x[0, k]
            f += other * x[1, k]
            g += other * x[2, k]
            h += other * x[3, k]
        out[0, n], out[1, n], out[2, n], out[3, n] = a, b, c, d
        out[0, n + 1], out[1, n + 1], out[2, n + 1], out[3, n + 1] = e, f, g, h


def dot_eight(weights: Stored, x: Float32, out: Float32) -> None:
    """Eight vectors at once: every weight is read and widened once."""
    for n in range(weights.shape[0]):
        row = weights[n]
        a = b = c = d = np.float32(0)
        e = f = g = h = np.float32(0)
        for k in range(row.shape[0]):
            weight = np.float32(row[k])
            a += weight * x[0, k]
            b += weight * x[1, k]
            c += weight * x[2, k]
            d += weight * x[3, k]
            e += weight * x[4, k]
            f += weight * x[5, k]
            g += weight * x[6, k]
            h += weight * x[7, k]
        out[0, n], out[1, n], out[2, n], out[3, n] = a, b, c, d
        out[4, n], out[5, n], out[6, n], out[7, n] = e, f, g, h


def dot_one_bfloat16(words: Stored, x: Float32, out: Float32) -> None:
    """A bfloat16 is the upper half of a float32."""
    for n in range(words.shape[0]):
        row, total = words[n], np.float32(0)
        for k in range(row.shape[0]):
            total += np.uint32(np.uint32(row[k]) << np.uint32(16)).view(np.float32) * x[k]
        out[n] = total
