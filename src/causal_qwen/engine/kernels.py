"""Kernels: products of int8 and bfloat16 weights with a few vectors, compiled by numba (optional).

NumPy widens a tile into a buffer and reads it again; a compiled loop widens in registers, so that
only the stored bytes are read. numba divides the rows among threads that spin from one product to
the next.

    pip install numba           Engine.from_pretrained(path, dtype="int8", kernel="numba")
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from causal_qwen.engine import threads
from causal_qwen.engine.weights import Float32, Stored
from causal_qwen.options import check_choice

KERNELS = ("numpy", "numba")
SPINNING = ("tbbpool", "omppool")  # numba's threads that spin; those of its own queue sleep
Loop = Callable[..., None]
prange = range  # numba's, in what it compiles: a loop that is divided among threads


def find_kernel(name: str) -> Kernel | None:
    """The compiled kernel, or None for NumPy."""
    return None if check_choice("kernel", name, KERNELS) == "numpy" else numba_kernel()


def can_compile(stored: Stored) -> bool:
    return stored.dtype in (np.int8, bfloat16)


class Kernel:
    """Loops over the rows of a matrix: int8 with one vector or fours of them, bfloat16 with one."""

    def __init__(self, compile_loop: Callable[[Loop], Loop], has_threads: bool = False) -> None:
        self.use(compile_loop, has_threads)

    def use(self, compile_loop: Callable[[Loop], Loop], has_threads: bool = False) -> None:
        loops = (dot_one, dot_fours, dot_one_bfloat16)
        self.one, self.fours, self.one_bfloat16 = [compile_loop(loop) for loop in loops]
        self.has_threads = has_threads  # divides the rows itself

    def __call__(self, weights: Stored, scales: Float32 | None, x: Float32, out: Float32) -> None:
        """(N, K), (N,) or None, (M, K) -> out (M, N)"""
        near = threads.scratch(*x.shape)  # at a cache line: no load of it takes two
        np.copyto(near, x)
        self._multiply(weights, scales, near, out)

    def _multiply(self, weights: Stored, scales: Float32 | None, x: Float32, out: Float32) -> None:
        if scales is None:
            for vector, products in zip(x, out, strict=True):
                self.one_bfloat16(weights.view(np.uint16), vector, products)
            return
        rest = len(x) % 4
        for first in range(rest):
            self.one(weights, scales, x[first], out[first])
        if len(x) > rest:
            self.fours(weights, scales, x[rest:], out[rest:])


@cache
def numba_kernel() -> Kernel:
    """Compiled at the first call, then cached on disk."""
    try:
        import numba
    except ImportError:
        raise ImportError(
            "kernel='numba' needs numba: pip install numba, or leave the option out."
        ) from None
    has_threads = threads.COUNT > 1 and any(map(_can_import, SPINNING))
    kernel = Kernel(partial(_compile, numba, has_threads), has_threads)
    if hasattr(os, "register_at_fork"):  # GNU's threads do not survive a fork
        os.register_at_fork(after_in_child=partial(kernel.use, partial(_compile, numba, False)))
    return kernel


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(f"numba.np.ufunc.{name}")
    except ImportError:
        return False
    return True


def _compile(numba: Any, is_parallel: bool, loop: Loop) -> Loop:
    """numba caches by name: a loop for one thread has another than one for all."""
    assert isinstance(loop, FunctionType)
    own = FunctionType(loop.__code__, {"np": np, "prange": numba.prange}, loop.__name__)
    own.__module__, own.__qualname__ = __name__, loop.__name__ + "_parallel" * is_parallel
    options = {"nogil": True, "fastmath": True, "cache": True, "parallel": is_parallel}
    compiled: Loop = numba.njit(**options)(own)
    return compiled


def dot_one(weights: Stored, scales: Float32, x: Float32, out: Float32) -> None:
    for n in prange(weights.shape[0]):
        row, total = weights[n], np.float32(0)
        for k in range(row.shape[0]):
            total += np.float32(row[k]) * x[k]
        out[n] = total * scales[n]


def dot_fours(weights: Stored, scales: Float32, x: Float32, out: Float32) -> None:
    """A multiple of four vectors. Two rows at a time are multiplied with four of them: eight sums
    for six numbers read, all in registers; the rows stay in cache for the next four.

    The last pair overlaps the one before if N is odd (if N is 1, both are row 0, which is -1, too).
    """
    for pair in prange((weights.shape[0] + 1) // 2):
        n = min(2 * pair, weights.shape[0] - 2)
        row, next_row = weights[n], weights[n + 1]
        for m in range(0, x.shape[0], 4):
            a = b = c = d = np.float32(0)
            e = f = g = h = np.float32(0)
            for k in range(row.shape[0]):
                one, other = np.float32(row[k]), np.float32(next_row[k])
                a += one * x[m, k]
                b += one * x[m + 1, k]
                c += one * x[m + 2, k]
                d += one * x[m + 3, k]
                e += other * x[m, k]
                f += other * x[m + 1, k]
                g += other * x[m + 2, k]
                h += other * x[m + 3, k]
            s, t = scales[n], scales[n + 1]
            out[m, n], out[m + 1, n], out[m + 2, n], out[m + 3, n] = s * a, s * b, s * c, s * d
            out[m, n + 1], out[m + 1, n + 1] = t * e, t * f
            out[m + 2, n + 1], out[m + 3, n + 1] = t * g, t * h


def dot_one_bfloat16(words: Stored, x: Float32, out: Float32) -> None:
    """A bfloat16 is the upper half of a float32."""
    for n in prange(words.shape[0]):
        row, total = words[n], np.float32(0)
        for k in range(row.shape[0]):
            total += np.uint32(np.uint32(row[k]) << np.uint32(16)).view(np.float32) * x[k]
        out[n] = total
