"""Matrix: a weight as it is stored, and its product with activations.

Decoding reads every weight once per token, so memory bandwidth limits its speed. Rows are read in
order, once: W x with W (N, K) is one dot product per row (`np.vecdot`); BLAS's matrix-vector
product takes twice as long on one core. Weights of 16 and 8 bits are widened to float32 tile by
tile, into a buffer that stays in cache. Tiles are large because each NumPy call ends by acquiring
the GIL, for which threads compete. A row of int8 weights has a scale, which multiplies its dot
product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from causal_qwen.engine import threads
from causal_qwen.engine.kernels import Kernel
from causal_qwen.engine.weights import SCALE, Float32, Stored, widen

MIN_PARALLEL = 2**20  # multiplications from which waking other threads pays off
WAKE_UP = 2**19  # multiplications that the first thread does while the others wake up
TILE_SIZE = 2**20  # weights of a tile: widened, they stay in cache
MAX_VECTORS = 3  # rows of x up to which vecdot is used; with more, matmul
MAX_BATCH = 8  # rows of x up to which there are few calls: one matmul per tile, or a kernel
CACHE_LINE = 16  # floats
TERMS_PER_SUM, ROWS_PER_SUM = 384, 512  # terms added at once, for this many rows of W: see _dot


class Matrix:
    """W (N, K), as stored; int8 weights have `scales` (N,). `absolute` products use |W|."""

    def __init__(self, stored: Stored, scales: Stored | None = None) -> None:
        if stored.ndim != 2:
            raise ValueError(f"A matrix has two axes; this weight has the shape {stored.shape}.")
        if (stored.dtype == np.int8) != (scales is not None):
            raise ValueError(
                f"A matrix of {stored.dtype} weights has {'no' if scales is None else 'row'} "
                "scales; int8 weights need them, and only they."
            )
        self.stored = np.ascontiguousarray(stored)
        self.scales = None if scales is None else widen(scales).reshape(len(stored))
        self.shape: tuple[int, int] = (stored.shape[0], stored.shape[1])
        self.kernel: Kernel | None = None  # a compiled product with few vectors

    @classmethod
    def of(cls, parameters: Mapping[str, Stored], name: str) -> Matrix:
        return cls(parameters[name], parameters.get(name + SCALE))

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

        threads.run([partial(work, share) for share in threads.shares(len(chosen))])
        return out if self.scales is None else out * self.scales[chosen]

    def row_norms(self) -> Float32:
        """||W_k||_1 of every row. -> (N,)"""
        return self.absolute(np.ones(self.shape[1], np.float32))


def tiles(rows: slice, columns: int) -> Iterator[slice]:
    """Split `rows` of a matrix into parts that stay in cache when widened."""
    count, most = rows.stop - rows.start, max(TILE_SIZE // columns, 16)
    for part in threads.shares(count, max(-(-count // most), 1)):
        yield slice(rows.start + part.start, rows.start + part.stop)


def project(x: Float32, *matrices: Matrix) -> list[Float32]:
    """W x for every W, in one round of threads. (..., K) -> (..., N) each"""
    flat = _aligned(x.reshape(-1, x.shape[-1]))  # (M, K)
    outs = [np.empty((len(flat), matrix.shape[0]), np.float32) for matrix in matrices]
    size = len(flat) * sum(matrix.stored.size for matrix in matrices)
    parts = threads.COUNT if size >= MIN_PARALLEL else 1
    lead = WAKE_UP // max(flat.size * len(matrices), 1)  # rows
    rows = [threads.shares(matrix.shape[0], parts, lead) for matrix in matrices]

    def work(part: int) -> None:
        for matrix, out, shares in zip(matrices, outs, rows, strict=True):
            _multiply(matrix, flat, out, shares[part])

    threads.run([partial(work, part) for part in range(parts)])
    return [out.reshape(*x.shape[:-1], out.shape[1]) for out in outs]


def _aligned(x: Float32) -> Float32:
    """A copy that begins at a cache line: it is read once per row of W, and no load of it then
    takes two lines. NumPy's own arrays begin 16 bytes after one."""
    room = np.empty(x.size + CACHE_LINE, np.float32)
    start = -(room.ctypes.data // room.itemsize) % CACHE_LINE
    copy = room[start : start + x.size].reshape(x.shape)
    np.copyto(copy, x)
    return copy


def _multiply(matrix: Matrix, x: Float32, out: Float32, rows: slice) -> None:
    """`rows` of W, widened tile by tile where they are not float32; x (M, K) -> out (M, N)"""
    if matrix.stored.dtype == np.float32:
        _product(matrix.stored[rows], x, out[:, rows])
        return
    most = MAX_BATCH if matrix.scales is not None else MAX_VECTORS
    if matrix.kernel is not None and len(x) <= most:
        scales = None if matrix.scales is None else matrix.scales[rows]
        matrix.kernel(matrix.stored[rows], scales, x, out[:, rows])
        return
    for tile in tiles(rows, matrix.shape[1]):
        weight = threads.scratch(tile.stop - tile.start, matrix.shape[1])
        np.copyto(weight, matrix.stored[tile])
        _product(weight, x, out[:, tile])
    if matrix.scales is not None:
        out[:, rows] *= matrix.scales[rows]


def _product(weight: Float32, x: Float32, out: Float32) -> None:
    """(N, K), (M, K) -> out (M, N)"""
    if len(x) > MAX_BATCH:
        _dot(x, weight, out)
    elif len(x) > MAX_VECTORS:
        for tile in tiles(slice(0, len(weight)), weight.shape[1]):
            out[:, tile] = (weight[tile] @ x.T).T
    elif len(x) == 1:
        np.vecdot(weight, x[0], out=out[0])
    else:
        for tile in tiles(slice(0, len(weight)), weight.shape[1]):  # from memory once, for all x
            for row in range(len(x)):
                np.vecdot(weight[tile], x[row], out=out[row, tile])


def _dot(x: Float32, weight: Float32, out: Float32) -> None:
    """x W^T. (M, K), (N, K) -> out (M, N)

    BLAS adds the terms of a matrix product one after the other. At the first token of a text some
    activations are in the thousands, and every small term added after such a one is rounded to its
    precision. Partial sums reduce this error. (Products with one vector use many accumulators.)
    """
    for start in range(0, len(weight), ROWS_PER_SUM):
        rows, sums = (
            weight[start : start + ROWS_PER_SUM],
            out[:, start : start + ROWS_PER_SUM],
        )  # sums in cache
        np.matmul(x[:, :TERMS_PER_SUM], rows[:, :TERMS_PER_SUM].T, out=sums)
        part = np.empty(sums.shape, np.float32)
        for first in range(TERMS_PER_SUM, weight.shape[1], TERMS_PER_SUM):
            columns = slice(first, first + TERMS_PER_SUM)
            sums += np.matmul(x[:, columns], rows[:, columns].T, out=part)
