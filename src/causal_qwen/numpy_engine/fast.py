"""Fast: the products, attention and activations of the engine, divided among cores.

Decoding reads every weight once per token, so memory bandwidth limits its speed.

    Matrix     a weight as it is stored, and its product with activations. Products of one vector
               with float32 weights are left to BLAS's own threads. Weights of 16 and 8 bits are
               widened to float32 tile by tile, into a buffer that stays in cache.
    Kernel     the same by loops that numba compiles (optional): they widen in registers.
    attend     causal attention in blocks; `qwen2.attention_forward` is its definition.
    run        tasks, one per core. NumPy releases the GIL inside its loops. BLAS is limited to one
               thread meanwhile: its idle threads spin on the cores that these threads need.

The number of threads is that of BLAS (OPENBLAS_NUM_THREADS, OMP_NUM_THREADS), by default one per
core.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from types import FunctionType
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from causal_qwen.numpy_engine.weights import SCALE, Float32, Stored, widen
from causal_qwen.options import check_choice

Task = Callable[[], None]
Bools = NDArray[np.bool_]

_BLAS = ThreadpoolController().select(user_api="blas").lib_controllers
THREADS: int = max((library.num_threads for library in _BLAS), default=os.cpu_count() or 1)
_LOCAL = threading.local()
MIN_PARALLEL = 2**20  # multiplications from which waking other threads pays off
TILE_SIZE = 2**20  # weights of a tile: widened, they stay in cache
TERMS_PER_SUM, ROWS_PER_SUM = 384, 512  # terms added at once, for this many rows of W: see _dot
SCORES = 2**19  # attention scores that exist at once, per thread: they stay in cache
LOWEST = np.finfo(np.float32).min  # the score of a masked key; finite, to avoid 0/0
KERNELS = ("numpy", "numba")
SPINNING = ("tbbpool", "omppool")  # numba's threads that spin; those of its own queue sleep
Loop = Callable[..., None]
prange = range  # numba's, in what it compiles: a loop that is divided among threads

# ---------------------------------------------------------------- weights


class Matrix:
    """W (N, K), as stored; int8 weights have `scales` (N,). `absolute` products use |W|."""

    def __init__(self, stored: Stored, scales: Stored | None = None) -> None:
        self.stored = np.ascontiguousarray(stored)
        self.scales = None if scales is None else widen(scales).reshape(len(stored))
        self.shape: tuple[int, int] = (stored.shape[0], stored.shape[1])
        self.kernel: Any = None  # a `Kernel`: a compiled product with one vector

    @classmethod
    def of(cls, parameters: Mapping[str, Stored], name: str) -> Matrix:
        return cls(parameters[name], parameters.get(name + SCALE))

    def widened(self, rows: slice) -> Float32:
        """Rows in float32, without their scales, in this thread's buffer."""
        weight = scratch(rows.stop - rows.start, self.shape[1])
        np.copyto(weight, self.stored[rows])
        return weight

    def rows(self, ids: NDArray[np.integer]) -> Float32:
        """Rows in float32, as in an embedding lookup. (...) -> (..., K)"""
        rows = widen(self.stored[ids])
        return rows if self.scales is None else rows * self.scales[ids][..., None]

    def __call__(self, x: Float32) -> Float32:
        """W x. (..., K) -> (..., N)"""
        return project(x, self)[0]

    def absolute(self, x: Float32, rows: NDArray[np.integer] | None = None) -> Float32:
        """|W| x of one vector, for all or some rows. (K,) -> (N,)"""
        chosen = np.arange(self.shape[0]) if rows is None else rows
        out = np.empty(len(chosen), np.float32)

        def work(share: slice) -> None:
            for tile in tiles(share, self.shape[1]):
                part = self.stored[tile] if rows is None else self.stored[chosen[tile]]
                np.vecdot(np.abs(widen(part)), x, out=out[tile])

        parts = THREADS if len(chosen) * self.shape[1] >= MIN_PARALLEL else 1
        run([partial(work, share) for share in shares(len(chosen), parts)])
        return out if self.scales is None else out * self.scales[chosen]

    def row_norms(self) -> Float32:
        """||W_k||_1 of every row. -> (N,)"""
        return self.absolute(np.ones(self.shape[1], np.float32))


def tiles(rows: slice, columns: int) -> Iterator[slice]:
    """Split `rows` of a matrix into parts that stay in cache when widened."""
    count, most = rows.stop - rows.start, max(TILE_SIZE // columns, 16)
    for part in shares(count, max(-(-count // most), 1)):
        yield slice(rows.start + part.start, rows.start + part.stop)


def project(x: Float32, *matrices: Matrix) -> list[Float32]:
    """W x for every W, in one round of tasks. (..., K) -> (..., N) each"""
    flat = x.reshape(-1, x.shape[-1])  # (M, K)
    outs = [np.empty((len(flat), matrix.shape[0]), np.float32) for matrix in matrices]
    if len(flat) == 1 and all(map(_has_threads, matrices)):
        for matrix, out in zip(matrices, outs, strict=True):
            _multiply(matrix, flat, out, slice(None))
    else:
        _divide(matrices, flat, outs)
    return [out.reshape(*x.shape[:-1], out.shape[1]) for out in outs]


def _has_threads(matrix: Matrix) -> bool:
    """Whether BLAS or the kernel divides a product with one vector among threads of its own.

    Those spin between two products; ours sleep, and to wake one takes 0.1 to 0.4 ms.
    """
    if matrix.stored.dtype == np.float32:
        return True
    return matrix.kernel is not None and bool(matrix.kernel.has_threads)


def _divide(matrices: Sequence[Matrix], x: Float32, outs: Sequence[Float32]) -> None:
    """Every W x, its rows divided among our threads. (M, K) -> outs (M, N)"""
    size = len(x) * sum(matrix.stored.size for matrix in matrices)
    parts = THREADS if size >= MIN_PARALLEL else 1
    rows = [shares(matrix.shape[0], parts) for matrix in matrices]

    def work(part: int) -> None:
        for matrix, out, shares in zip(matrices, outs, rows, strict=True):
            _multiply(matrix, x, out, shares[part])

    run([partial(work, part) for part in range(parts)])


def _multiply(matrix: Matrix, x: Float32, out: Float32, rows: slice) -> None:
    """`rows` of W, widened tile by tile where they are not float32; x (M, K) -> out (M, N)"""
    if matrix.stored.dtype == np.float32:
        _product(matrix.stored[rows], x, out[:, rows])
        return
    if matrix.kernel is not None and len(x) == 1:
        scales = None if matrix.scales is None else matrix.scales[rows]
        matrix.kernel(matrix.stored[rows], scales, x[0], out[0, rows])
        return
    for tile in tiles(rows, matrix.shape[1]):
        _product(matrix.widened(tile), x, out[:, tile])
    if matrix.scales is not None:
        out[:, rows] *= matrix.scales[rows]


def _product(weight: Float32, x: Float32, out: Float32) -> None:
    """(N, K), (M, K) -> out (M, N)"""
    if len(x) == 1:
        np.matvec(weight, x, out=out)
    else:
        _dot(x, weight, out)


def _dot(x: Float32, weight: Float32, out: Float32) -> None:
    """x W^T. (M, K), (N, K) -> out (M, N)

    BLAS adds the terms of a matrix product one after the other. At the first token of a text some
    activations are in the thousands, and every small term added after such a one is rounded to its
    precision. Partial sums reduce this error. (Products with one vector use many accumulators.)
    """
    for start in range(0, len(weight), ROWS_PER_SUM):
        part_of = slice(start, start + ROWS_PER_SUM)
        rows, sums = weight[part_of], out[:, part_of]  # in cache
        np.matmul(x[:, :TERMS_PER_SUM], rows[:, :TERMS_PER_SUM].T, out=sums)
        part = np.empty(sums.shape, np.float32)
        for first in range(TERMS_PER_SUM, weight.shape[1], TERMS_PER_SUM):
            columns = slice(first, first + TERMS_PER_SUM)
            sums += np.matmul(x[:, columns], rows[:, columns].T, out=part)


# ---------------------------------------------------------------- compiled products


def find_kernel(name: str) -> Kernel | None:
    """The compiled kernel, or None for NumPy."""
    return None if check_choice("kernel", name, KERNELS) == "numpy" else numba_kernel()


def can_compile(stored: Stored) -> bool:
    return stored.dtype in (np.int8, bfloat16)


class Kernel:
    """Loops over the rows of a matrix of int8 or bfloat16, with one vector."""

    def __init__(self, compile_loop: Callable[[Loop], Loop], has_threads: bool = False) -> None:
        self.use(compile_loop, has_threads)

    def use(self, compile_loop: Callable[[Loop], Loop], has_threads: bool = False) -> None:
        self.one, self.one_bfloat16 = compile_loop(dot_one), compile_loop(dot_one_bfloat16)
        self.has_threads = has_threads  # divides the rows itself

    def __call__(self, weights: Stored, scales: Float32 | None, x: Float32, out: Float32) -> None:
        """(N, K), (N,) or None, (K,) -> out (N,)"""
        if scales is None:
            self.one_bfloat16(weights.view(np.uint16), x, out)
        else:
            self.one(weights, scales, x, out)


@cache
def numba_kernel() -> Kernel:
    """Compiled at the first call, then cached on disk."""
    try:
        import numba
    except ImportError:
        raise ImportError(
            "kernel='numba' needs numba: pip install numba, or leave the option out."
        ) from None
    has_threads = _has_spinning()
    kernel = Kernel(partial(_compile, numba, has_threads), has_threads)
    if hasattr(os, "register_at_fork"):  # GNU's threads do not survive a fork
        os.register_at_fork(after_in_child=partial(kernel.use, partial(_compile, numba, False)))
    return kernel


def _has_spinning() -> bool:
    return THREADS > 1 and any(map(_can_import, SPINNING))


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


def dot_one_bfloat16(words: Stored, x: Float32, out: Float32) -> None:
    """A bfloat16 is the upper half of a float32."""
    for n in prange(words.shape[0]):
        row, total = words[n], np.float32(0)
        for k in range(row.shape[0]):
            total += np.uint32(np.uint32(row[k]) << np.uint32(16)).view(np.float32) * x[k]
        out[n] = total


# ---------------------------------------------------------------- attention, activations


def softmax_in_place(scores: Float32) -> Float32:
    """exp(s) / sum exp(s) over the last axis; the largest is subtracted first."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def is_masked(new: int, seen: int) -> Bools:
    """Keys that the last positions may not see: later ones. -> (T, S)"""
    masked: Bools = np.arange(seen) > np.arange(seen - new, seen)[:, None]
    return masked


def attend(query: Float32, key: Float32, value: Float32) -> Float32:
    """Causal attention without repeated keys and without a (T, S) mask.

    query (B, Q, T, D) of the last T positions, key and value (B, K, S, D) of all -> (B, T, Q D).
    The G query heads of one key-value head are rows of one product with its keys.
    """
    batch, heads, new, size = query.shape
    key_value_heads, seen = key.shape[1:3]
    group = heads // key_value_heads
    grouped = query.reshape(batch, key_value_heads, group, new, size)
    grouped = grouped * np.float32(size**-0.5)
    if new == 1:
        out = _attend_from_one(grouped[:, :, :, 0], key, value)
        return out.reshape(batch, 1, heads * size)

    out = np.empty((batch, new, key_value_heads, group, size), np.float32)
    step = int(np.clip(SCORES // (group * seen), 16, new))
    jobs = [
        (row, head, start)
        for row in range(batch)
        for head in range(key_value_heads)
        for start in range(0, new, step)
    ]

    def work(share: int) -> None:
        for row, head, start in jobs[share::THREADS]:  # interleaved: later blocks have more keys
            stop = min(start + step, new)
            last = seen - new + stop  # keys up to the block's last query
            rows = grouped[row, head, :, start:stop].reshape(-1, size)  # (G T', D)
            scores: Float32 = rows @ key[row, head, :last].T  # (G T', S')
            own = scores.reshape(group, stop - start, last)[:, :, start - stop :]
            np.copyto(own, LOWEST, where=is_masked(stop - start, stop - start))  # its triangle
            mixed = softmax_in_place(scores) @ value[row, head, :last]  # (G T', D)
            out[row, start:stop, head] = mixed.reshape(group, -1, size).swapaxes(0, 1)

    run([partial(work, share) for share in range(min(THREADS, len(jobs)))])
    return out.reshape(batch, new, heads * size)


def _attend_from_one(query: Float32, key: Float32, value: Float32) -> Float32:
    """Attention of one position. (B, K, G, D), scaled, and (B, K, S, D) twice -> (B, K, G, D)

    One matrix-vector product per query head reads keys and values in place; a matrix product would
    copy them first.
    """
    scores: Float32 = np.matvec(key[:, :, None], query)  # (B, K, G, S)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    mixed: Float32 = np.vecmat(scores, value[:, :, None])  # (B, K, G, D)
    mixed /= scores.sum(axis=-1, keepdims=True)
    return mixed


def swiglu(gate: Float32, up: Float32) -> Float32:
    """silu(gate) * up = gate / (1 + exp(-gate)) * up, into `gate`'s memory. (..., I)

    exp(-gate) overflows to infinity below -88, where silu is 0, and so is gate / inf.
    """
    flat, other = gate.reshape(-1), up.reshape(-1)

    def work(share: slice) -> None:
        for start in range(share.start, share.stop, 2**15):  # temporaries that stay in cache
            part = slice(start, min(start + 2**15, share.stop))
            with np.errstate(over="ignore"):
                decay = np.exp(-flat[part])
            decay += 1
            flat[part] /= decay
            flat[part] *= other[part]

    parts = 1 if flat.size <= 2**17 else THREADS  # else too little to divide
    run([partial(work, share) for share in shares(flat.size, parts)])
    return flat.reshape(gate.shape)


# ---------------------------------------------------------------- threads


_POOL: ThreadPoolExecutor | None = None


def run(tasks: Sequence[Task]) -> None:
    """Run all tasks, which run none themselves: the first in this thread, the others in a pool."""
    global _POOL
    if len(tasks) == 1 or THREADS == 1:
        for task in tasks:
            task()
        return
    _POOL = _POOL or ThreadPoolExecutor(THREADS - 1, "causal-qwen-engine")
    with blas_alone():
        others = [_POOL.submit(task) for task in tasks[1:]]
        try:
            tasks[0]()
        finally:
            wait(others)
        for other in others:
            other.result()  # raises its error


def shares(size: int, parts: int | None = None) -> list[slice]:
    """Split range(size) into nearly equal parts, one per thread."""
    parts = THREADS if parts is None else parts
    edges = [size * part // parts for part in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def scratch(rows: int, columns: int) -> NDArray[np.float32]:
    """A (rows, columns) buffer of this thread; its memory is reused and stays in cache."""
    kept: NDArray[np.float32] | None = getattr(_LOCAL, "scratch", None)
    if kept is None or kept.size < rows * columns:
        kept = _LOCAL.scratch = np.empty(rows * columns, np.float32)
    return kept[: rows * columns].reshape(rows, columns)


class _BlasLimit:
    """How many callers limit BLAS to one thread, and its thread counts before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.callers = 0
        self.given: list[int] = []  # per library

    def enter(self) -> None:
        with self.lock:
            if not self.callers:
                self.given = [library.num_threads for library in _BLAS]
                self.set([1] * len(_BLAS))
            self.callers += 1

    def leave(self) -> None:
        with self.lock:
            self.callers -= 1
            if not self.callers:
                self.set(self.given)

    def set(self, counts: list[int]) -> None:
        for library, count in zip(_BLAS, counts, strict=True):
            # threadpoolctl accepts calls from one thread only; the lock above makes others safe
            set_count = getattr(library, "_real_set_num_threads", library.set_num_threads)
            set_count(count)


_BLAS_LIMIT = _BlasLimit()


@contextmanager
def blas_alone() -> Iterator[None]:
    """Limit BLAS to one thread; the last caller to leave restores the counts."""
    _BLAS_LIMIT.enter()
    try:
        yield
    finally:
        _BLAS_LIMIT.leave()


def _reset_after_fork() -> None:
    """A forked process has neither the pool's threads nor the callers' limits."""
    global _BLAS_LIMIT, _POOL
    before, _BLAS_LIMIT, _POOL = _BLAS_LIMIT, _BlasLimit(), None
    if before.callers:
        before.set(before.given)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
