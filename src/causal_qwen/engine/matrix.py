"""Matrix: a weight as it is stored, and its product with activations.

Decoding reads every weight once per token, so memory bandwidth limits its speed. Products of few
vectors with float32 weights are left to BLAS's own threads. Weights of 16 and 8 bits are widened to
float32 tile by tile, into a buffer that stays in cache, by threads of ours. Tiles are large because
each NumPy call ends by acquiring the GIL, for which threads compete. A row of int8 weights has a
scale, which multiplies its dot product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from causal_qwen.engine import threads
from causal_qwen.engine.kernels import Kernel
from causal_qwen.engine.weights import SCALE, Float32, Stored, widen

MIN_PARALLEL = 2**20  # multiplications from which waking other threads pays off
WAKE_UP = 2**19  # multiplications that the first thread does while the others wake up
TILE_SIZE = 2**20  # weights of a tile: widened, they stay in cache
MAX_VECTORS = 4  # rows of x up to which there is one product of W for each; with more, matmul
MAX_BATCH = 8  # rows of x up to which W is read for a few vectors, by BLAS's threads or a kernel
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

    def compiled(self, vectors: int) -> Kernel | None:
        """The kernel, if it multiplies with so many vectors."""
        most = MAX_VECTORS if self.scales is None else MAX_BATCH
        return self.kernel if vectors <= most else None

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

        parts = threads.COUNT if len(chosen) * self.shape[1] >= MIN_PARALLEL else 1
        threads.run([partial(work, share) for share in threads.shares(len(chosen), parts)])
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
    flat = x.reshape(-1, x.shape[-1])  # (M, K)
    outs = [np.empty((len(flat), matrix.shape[0]), np.float32) for matrix in matrices]
    if all(_has_threads(matrix, len(flat)) for matrix in matrices):
        for matrix, out in zip(matrices, outs, strict=True):
            _multiply(matrix, flat, out, slice(None))
    else:
        _divide(matrices, flat, outs)
    return [out.reshape(*x.shape[:-1], out.shape[1]) for out in outs]


def _has_threads(matrix: Matrix, vectors: int) -> bool:
    """Whether BLAS or the kernel divides a product with so many vectors among threads of its own.

    Those spin between two products; ours sleep at a lock, and to wake one takes 0.1 to 0.4 ms.
    """
    if matrix.stored.dtype == np.float32:
        return vectors <= MAX_BATCH
    kernel = matrix.compiled(vectors)
    return kernel is not None and kernel.has_threads


def _divide(matrices: Sequence[Matrix], x: Float32, outs: Sequence[Float32]) -> None:
    """Every W x, its rows divided among our threads. (M, K) -> outs (M, N)"""
    size = len(x) * sum(matrix.stored.size for matrix in matrices)
    parts = threads.COUNT if size >= MIN_PARALLEL else 1
    lead = WAKE_UP // max(x.size * len(matrices), 1)  # rows
    rows = [threads.shares(matrix.shape[0], parts, lead) for matrix in matrices]

    def work(part: int) -> None:
        for matrix, out, shares in zip(matrices, outs, rows, strict=True):
            _multiply(matrix, x, out, shares[part])

    threads.run([partial(work, part) for part in range(parts)])


def _multiply(matrix: Matrix, x: Float32, out: Float32, rows: slice) -> None:
    """`rows` of W, widened tile by tile where they are not float32; x (M, K) -> out (M, N)"""
    if matrix.stored.dtype == np.float32:
        _product(matrix.stored[rows], x, out[:, rows])
        return
    if (kernel := matrix.compiled(len(x))) is not None:
        scales = None if matrix.scales is None else matrix.scales[rows]
        kernel(matrix.stored[rows], scales, x, out[:, rows])
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
        return
    whole = slice(0, len(weight))
    for tile in tiles(whole, weight.shape[1]) if len(x) > 1 else (whole,):  # read once, for all x
        if len(x) > MAX_VECTORS:
            out[:, tile] = (weight[tile] @ x.T).T
        else:
            np.matvec(weight[tile], x, out=out[:, tile])


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
