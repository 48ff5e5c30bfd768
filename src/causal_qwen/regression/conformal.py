"""Conformal: intervals with a coverage guarantee, whatever the distribution of the residuals.

Split conformal on rows that training has not seen. Their scores are residuals in units of the
predicted scale, in the space of the number head,

    score_i = (y_i - loc_i) / scale_i,

so that intervals stay wide where the predicted scale is large, and map back exactly. With n
exchangeable rows, loc +- scale * (the ceil((n + 1) level)-th smallest |score|) contains a new value
with probability at least `level`, and at most `level` + 1 / (n + 1) if no scores are equal. If n is
too small there is no such score: the interval is infinite, and a warning gives the rows needed.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.terminal import counted

ROUNDING = 1e-9  # (n + 1) level is rounded up only if it is not a whole number


class TooFewRows(UserWarning):
    """There are too few calibration rows for the requested level."""


@dataclass(frozen=True)
class Conformal:
    """The scores of the calibration rows, in ascending order, and the weight of each.

    A weight is the credibility of a row's label (`credibility`): a label that is wrong by all
    appearances says nothing about how far right ones are from their predictions. All weights 1 is
    plain split conformal.
    """

    scores: NDArray[np.float64]
    weights: NDArray[np.float64]

    @classmethod
    def fit(cls, y_dist: Cauchy, y: ArrayLike, weights: ArrayLike | None = None) -> Conformal:
        """From predictions for calibration rows and their values, both in the head's space."""
        loc, scale = (np.asarray(part, dtype=np.float64) for part in y_dist)
        scores = (np.asarray(y, dtype=np.float64) - loc) / scale
        order = np.argsort(scores, kind="stable")
        given = np.ones(len(scores)) if weights is None else np.asarray(weights, np.float64)
        return cls(scores[order], given[order])

    def __len__(self) -> int:
        """The rows that count."""
        return int(self.weights.sum() + ROUNDING)

    def radius(self, level: float) -> float:
        """Half the width, in predicted scales, of intervals of coverage `level`."""
        if not 0 < level < 1:
            raise ValueError(f"level={level} is outside (0, 1).")
        sizes = np.abs(self.scores)
        order = np.argsort(sizes, kind="stable")
        passed = np.cumsum(self.weights[order])
        total = self.weights.sum()
        rank = math.ceil((total + 1) * level - ROUNDING)
        if not self.reaches_level(level):
            _warn(f"level {level}", len(self), rows_needed(level))
            return math.inf
        return float(sizes[order][np.searchsorted(passed, rank - ROUNDING)])

    def quantile(self, p: float) -> float:
        """The p-quantile of new values, in predicted scales from the median."""
        if not 0 < p < 1:
            raise ValueError(f"p={p} is outside (0, 1).")
        passed = np.cumsum(self.weights)
        total = self.weights.sum()
        rank = (total + 1) * p  # among the scores, counted from 1
        if not self.reaches_quantile(p):
            _warn(f"quantile {p}", len(self), rows_needed(max(p, 1 - p)))
            return math.copysign(math.inf, p - 0.5)
        counts = self.weights > 0  # a row without weight is no point of the curve
        return float(np.interp(rank, passed[counts], self.scores[counts]))

    def reaches_level(self, level: float) -> bool:
        """Whether there are rows enough for a finite interval."""
        total = float(self.weights.sum())
        return math.ceil((total + 1) * level - ROUNDING) <= total + ROUNDING

    def reaches_quantile(self, p: float) -> bool:
        total = float(self.weights.sum())
        return 1 - ROUNDING <= (total + 1) * p <= total + ROUNDING


def rows_needed(level: float) -> int:
    """The fewest calibration rows for which ceil((n + 1) level) <= n."""
    return math.ceil(level / (1 - level) - ROUNDING)


def _warn(what: str, rows: int, needed: int) -> None:
    warnings.warn(
        f"{counted(rows, 'calibration row is', 'calibration rows are')} too few for {what}, which "
        f"becomes infinite; calibrate on at least {needed}.",
        TooFewRows,
        stacklevel=4,
    )
