"""Matrix: a weight as it is stored, and its product with activations.

Decoding reads every weight once per token, so the product's speed is the memory's. It must read
rows that lie one after the other, once, and nothing else: W x with W (N, K) is one dot product per
row (`np.vecdot`), where BLAS's matrix-vector product takes twice as long on one core. Sixteen bits
are widened to float32 tile by tile, into a buffer that stays in cache. Tiles are large: after each
of its calls NumPy asks for the interpreter, and two threads that ask at once wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from causal_qwen.engine import threads
from causal_qwen.engine.weights import Float32, Stored, widen

MANY = 2**20  # multiplications from which other threads are worth waking
LATE = 2**19  # ... which a thread has done when they are awake
CACHED = 2**20  # weights of a tile: widened, they stay in cache
FEW = 8  # rows of x up to which a product is one of vectors; more make a product of matrices
PART, SUMS = 384, 512  # terms that are added up at once, and for how many rows of W: see _dot


class Matrix:
    """W (N, K), as stored. `absolute` products use |W|."""

    def __init__(self, stored: Stored) -> None:
        if stored.ndim != 2:
            raise ValueError(f"A matrix has two axes; this weight has the shape {stored.shape}.")
        self.stored = np.ascontiguousarray(stored)
        self.shape: tuple[int, int] = (stored.shape[0], stored.shape[1])

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
            for tile in tiles(share, self.shape[1]):
                part = self.stored[tile] if rows is None else self.stored[chosen[tile]]
                np.vecdot(np.abs(widen(part)), x, out=out[tile])

        threads.run([partial(work, share) for share in threads.shares(len(chosen))])
        return out

    def row_norms(self) -> Float32:
        """||W_k||_1 of every row. -> (N,)"""
        return self.absolute(np.ones(self.shape[1], np.float32))


def tiles(rows: slice, columns: int) -> Iterator[slice]:
    """`rows` of a matrix in parts that stay in cache once they are widened."""
    count, most = rows.stop - rows.start, max(CACHED // columns, 16)
    for part in threads.shares(count, max(-(-count // most), 1)):
        yield slice(rows.start + part.start, rows.start + part.stop)


def project(x: Float32, *matrices: Matrix) -> list[Float32]:
    """W x for every given W; they share x, and one round of threads. (..., K) -> (..., N) each"""
    flat = np.ascontiguousarray(x.reshape(-1, x.shape[-1]), np.float32)  # (M, K)
    outs = [np.empty((len(flat), matrix.shape[0]), np.float32) for matrix in matrices]
    size = len(flat) * sum(matrix.stored.size for matrix in matrices)
    parts = threads.COUNT if size >= MANY else 1
    lead = LATE // max(flat.size * len(matrices), 1)  # rows
    rows = [threads.shares(matrix.shape[0], parts, lead) for matrix in matrices]

    def work(part: int) -> None:
        for matrix, out, shares in zip(matrices, outs, rows, strict=True):
            _multiply(matrix, flat, out, shares[part])

    threads.run([partial(work, part) for part in range(parts)])
    return [out.reshape(*x.shape[:-1], out.shape[1]) for out in outs]


def _multiply(matrix: Matrix, x: Float32, out: Float32, rows: slice) -> None:
    """`rows` of W, widened tile by tile where they are not float32; x (M, K) -> out (M, N)"""
    if matrix.stored.dtype == np.float32:
        _product(matrix.stored[rows], x, out[:, rows])
        return
    for tile in tiles(rows, matrix.shape[1]):
        weight = threads.scratch(tile.stop - tile.start, matrix.shape[1])
        np.copyto(weight, matrix.stored[tile])
        _product(weight, x, out[:, tile])


def _product(weight: Float32, x: Float32, out: Float32) -> None:
    """(N, K), (M, K) -> out (M, N)"""
    if len(x) > FEW:
        _dot(x, weight, out)
    elif len(x) == 1:
        np.vecdot(weight, x[0], out=out[0])
    else:
        for tile in tiles(slice(0, len(weight)), weight.shape[1]):  # from memory once, for all x
            for row in range(len(x)):
                np.vecdot(weight[tile], x[row], out=out[row, tile])


def _dot(x: Float32, weight: Float32, out: Float32) -> None:
    """x W^T. (M, K), (N, K) -> out (M, N)

    BLAS adds the terms of a product of matrices one after the other. At a text's first token some
    activations are in the thousands, and every small term after such a one is rounded to its size:
    in parts, fewer are. (Products with one vector use many accumulators and need no help.)
    """
    for start in range(0, len(weight), SUMS):
        rows, sums = weight[start : start + SUMS], out[:, start : start + SUMS]  # sums in cache
        np.matmul(x[:, :PART], rows[:, :PART].T, out=sums)
        part = np.empty(sums.shape, np.float32)
        for first in range(PART, weight.shape[1], PART):
            columns = slice(first, first + PART)
            sums += np.matmul(x[:, columns], rows[:, columns].T, out=part)
