"""Ridge: features, values and weights -> a linear function, its penalty chosen by leave-one-out.

    minimise  sum_i w_i (y_i - x_i.a - c)^2 + penalty |a|^2 + (penalty / m) c^2,   m = mean |x_i|^2

Residuals without row i come from the leverages, so that every penalty costs one product once the
Gram matrix of the smaller side (rows or features) is diagonalised. The
products of a subset of rows are a submatrix of those of all rows, so a `Design` computes them once.

The *robust* fit iterates the weights w_i / (1 + (r_i / 2s)^2), r_i the leave-one-out residuals and
s their median size: the stationary points of these weights are those of a Cauchy likelihood with
scale 2s, in which no single row can outweigh the others. Outliers hide in residuals of rows that
were fitted; hence leave-one-out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PENALTIES = tuple(10.0**power for power in (-4, -3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5, 1))
ROBUST_STEPS = 3
WIDTH = 2.0  # scale of the Cauchy, in median sizes of residuals
LEAST_WEIGHT = 1e-6  # of a row, relative to the largest


class Ridge(NamedTuple):
    """y = x.coefficients + intercept"""

    coefficients: Array  # (H,)
    intercept: float
    unseen: Array  # (N,): leave-one-out predictions of the rows it was fitted on

    def __call__(self, x: Any) -> Array:
        """(N, H), dense or sparse -> (N,)"""
        return np.asarray(x @ self.coefficients) + self.intercept


@dataclass(frozen=True)
class Design:
    """Features of some rows, and the products of all pairs of rows."""

    x: Any  # (N, H), dense or a SciPy sparse matrix
    products: Array | None = None  # (N, N); None where there are fewer features than rows

    @classmethod
    def of(cls, x: Any) -> Design:
        return cls(x, _dense(x @ x.T) if x.shape[0] <= x.shape[1] else None)

    def take(self, rows: Any) -> Design:
        """Some rows, by their numbers."""
        if self.products is None:
            return Design.of(self.x[rows])
        return Design(self.x[rows], self.products[np.ix_(rows, rows)])


def fit_ridge(x: Any, y: Array, weights: Array, *, robust: bool = False) -> Ridge:
    """x (N, H), dense or a SciPy sparse matrix, or a `Design`; y, weights (N,)"""
    gram = _Gram(x if isinstance(x, Design) else Design.of(x))
    if not robust:
        return gram.solve(y, weights, float(np.average(y, weights=weights)))
    found = gram.solve(y, weights, float(np.median(y)), robust=True)
    for _ in range(ROBUST_STEPS):
        found = gram.solve(
            y, weights * tail_weights(y - found.unseen), found.intercept, robust=True
        )
    return found


def tail_weights(residuals: Array) -> Array:
    """1 / (1 + (r / 2s)^2), s the median size of the residuals."""
    scale = WIDTH * np.median(np.abs(residuals))
    return 1 / (1 + (residuals / max(scale, 1e-12)) ** 2)


class _Gram:
    """Features with a constant column, and the products of the smaller side with itself."""

    def __init__(self, design: Design) -> None:
        self.x = x = design.x
        self.rows, self.features = x.shape
        squares = x.multiply(x) if hasattr(x, "multiply") else x * x
        self.level = max(float(squares.sum()) / self.rows, 1e-12)  # m, of the constant column, too
        self.is_dual = design.products is not None
        if design.products is not None:
            self.products = design.products + self.level

    def solve(self, y: Array, weights: Array, center: float, *, robust: bool = False) -> Ridge:
        """The penalty with the smallest leave-one-out loss: squared, or the Cauchy's."""
        weights = np.maximum(weights / weights.max(), LEAST_WEIGHT)
        root, target = np.sqrt(weights), y - center
        solutions = self._dual(root, target) if self.is_dual else self._primal(root, target)
        best: tuple[float, Array, Array] | None = None
        for solution, unseen in solutions:
            residuals = target - unseen
            if robust:
                scale = max(float(np.median(np.abs(residuals))), 1e-12)
                losses = np.log(scale) + np.log1p((residuals / scale) ** 2)
            else:
                losses = residuals**2
            loss = float(np.average(losses, weights=weights))
            if best is None or loss < best[0]:
                best = loss, solution, unseen
        assert best is not None
        _, solution, unseen = best
        if self.is_dual:
            solution = np.append(self.x.T @ solution, np.sqrt(self.level) * solution.sum())
        intercept = center + float(np.sqrt(self.level) * solution[-1])
        return Ridge(solution[:-1], intercept, unseen + center)

    def _dual(self, root: Array, target: Array) -> Iterator[tuple[Array, Array]]:
        """Row weights of every penalty, with leave-one-out predictions."""
        values, vectors = np.linalg.eigh(root[:, None] * self.products * root)
        turned = vectors.T @ (root * target)
        for penalty in PENALTIES:
            scaled = vectors / (values.clip(0) + penalty * self.level)
            dual = scaled @ turned
            unseen = target - dual / (scaled * vectors).sum(1) / root
            yield root * dual, unseen

    def _primal(self, root: Array, target: Array) -> Iterator[tuple[Array, Array]]:
        """Coefficients of every penalty, with leave-one-out predictions."""
        constant = np.full((self.rows, 1), np.sqrt(self.level))
        weighted = root[:, None] * np.hstack([_dense(self.x), constant])
        values, vectors = np.linalg.eigh(weighted.T @ weighted)
        turned = weighted @ vectors  # (N, H + 1)
        projected = turned.T @ (root * target)
        for penalty in PENALTIES:
            shrunk = 1 / (values.clip(0) + penalty * self.level)
            fitted = turned @ (shrunk * projected)
            left = 1 - (turned**2 @ shrunk).clip(0, 1 - 1e-9)
            unseen = target - (root * target - fitted) / left / root
            yield vectors @ (shrunk * projected), unseen


def _dense(matrix: Any) -> Array:
    return np.asarray(matrix.toarray() if hasattr(matrix, "toarray") else matrix, dtype=np.float64)
