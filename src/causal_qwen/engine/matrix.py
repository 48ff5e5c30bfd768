"""Matrix: a weight as it is stored, and its product with activations.

Decoding reads every weight once per token, so the product's speed is the memory's. It must read
rows that lie one after the other, once, and nothing else. In float32, W x with W (N, K) is one dot
product per row (`np.vecdot`): a core then reads nearly as fast as memory allows, where BLAS's
matrix-vector product takes twice as long on one core; it has the large ones, on all cores. In
bfloat16 a tile of rows is widened into a buffer that stays in cache. Two neighbouring bfloat16 are
one 32-bit word, and each is a float32 but for the other one's bits:

    word << 16           the even columns' weights        W x = W_even x_even + W_odd x_odd
    word & 0xFFFF0000    the odd columns' weights

Both are one vectorised pass; a strided copy of the 16-bit halves takes twice as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from causal_qwen.engine import threads
from causal_qwen.engine.weights import Float32, Stored, widen

MANY, SOME = 2**22, 2**19  # weights from which threads are worth waking: float32, others
CACHED = 2**18  # weights of a tile: widened, they stay in a core's cache
TILE = 512  # rows of a tile at most
FEW = 8  # rows of x up to which W is read once, tile by tile; more make a matrix product
LONG, PART = 1024, 768  # sums of more than LONG terms are taken in parts: see _dot
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
    step = min(max(CACHED // columns, 16), TILE)
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


def project(x: Float32, *matrices: Matrix) -> list[Float32]:
    """W x for every given W; they share x, and one round of threads. (..., K) -> (..., N) each"""
    flat = np.ascontiguousarray(x.reshape(-1, x.shape[-1]), np.float32)  # (M, K)
    outs = [np.empty((len(flat), matrix.shape[0]), np.float32) for matrix in matrices]
    is_wide = matrices[0].stored.dtype == np.float32
    if is_wide and len(flat) > FEW:
        for matrix, out in zip(matrices, outs, strict=True):
            _dot(flat, matrix.stored, out)  # BLAS has threads of its own
    elif is_wide and len(flat) == 1 and min(matrix.stored.size for matrix in matrices) >= MANY:
        for matrix, out in zip(matrices, outs, strict=True):
            np.dot(matrix.stored, flat[0], out=out[0])  # ... which are awake sooner than ours
    elif len(flat) * sum(matrix.stored.size for matrix in matrices) < (MANY if is_wide else SOME):
        for matrix, out in zip(matrices, outs, strict=True):
            _multiply(matrix, flat, out, slice(0, matrix.shape[0]))
    else:

        def work(share: int) -> None:
            for matrix, out in zip(matrices, outs, strict=True):
                _multiply(matrix, flat, out, threads.shares(matrix.shape[0])[share])

        threads.run([partial(work, share) for share in range(threads.COUNT)])
    return [out.reshape(*x.shape[:-1], out.shape[1]) for out in outs]


def _multiply(matrix: Matrix, x: Float32, out: Float32, rows: slice) -> None:
    """`rows` of W as it is stored; x (M, K) -> out (M, N)"""
    if matrix.words is not None:
        _multiply_bfloat16(matrix.words, x, out, rows)
    elif matrix.stored.dtype == np.float32:
        _several(matrix.stored, x, out, rows)
    else:
        _multiply_widened(matrix.stored, x, out, rows)


def _several(weight: Float32, x: Float32, out: Float32, rows: slice) -> None:
    """`rows` of W, each read once for all x. (N, K), (M, K) -> out (M, N)"""
    if len(x) == 1:
        np.vecdot(weight[rows], x[0], out=out[0, rows])
        return
    for tile in tiles(rows, weight.shape[1]):
        for row in range(len(x)):
            np.vecdot(weight[tile], x[row], out=out[row, tile])


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


def _multiply_bfloat16(words: NDArray[np.uint32], x: Float32, out: Float32, rows: slice) -> None:
    """`rows` of W, whose columns lie two to a word; (N, K/2), (M, K) -> out (M, N)"""
    even, odd = np.ascontiguousarray(x[:, 0::2]), np.ascontiguousarray(x[:, 1::2])
    for tile in tiles(rows, words.shape[1]):
        buffer = threads.scratch(tile.stop - tile.start, words.shape[1])
        weight = buffer.view(np.float32)
        np.left_shift(words[tile], _HALF, out=buffer)
        first = _product(weight, even)
        np.bitwise_and(words[tile], _HIGH, out=buffer)
        np.add(first, _product(weight, odd), out=out[:, tile])


def _product(weight: Float32, x: Float32) -> Float32:
    """A tile, in cache: (N, K), (M, K) -> (M, N)"""
    out = np.empty((len(x), len(weight)), np.float32)
    if len(x) > FEW:
        _dot(x, weight, out, LONG // 2)
    else:
        _several(weight, x, out, slice(0, len(weight)))
    return out


def _multiply_widened(stored: Stored, x: Float32, out: Float32, rows: slice) -> None:
    """`rows` of W of any stored type, widened in plain sight; (N, K), (M, K) -> out (M, N)"""
    for tile in tiles(rows, stored.shape[1]):
        out[:, tile] = x @ widen(stored[tile]).T
