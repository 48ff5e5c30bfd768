"""Conformal: one number after `fit`: its limits, and intervals with a coverage guarantee.

Split conformal on rows that training has not seen. Their scores are residuals in units of the
predicted scale, in the space of the number head,

    score_i = (y_i - loc_i) / scale_i,

so that intervals stay wide where the predicted scale is large, and map back exactly. With n
exchangeable rows, loc +- scale * (the ceil((n + 1) level)-th smallest |score|) contains a new value
with probability at least `level`, and at most `level` + 1 / (n + 1) if no scores are equal. If n is
too small there is no such score: the interval is infinite, and a warning gives the rows needed.

`Limits` keeps medians near the labels, calibrated intervals above their floor alone, and a scale
near those of unseen rows: in symlog space a large scale reaches astronomic values.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.value_space import ValueSpace
from causal_qwen.regression.head import Chain
from causal_qwen.terminal import counted

Array = NDArray[np.float64]

LEVEL = 0.9  # intervals of which cross-validation must be able to calibrate
FEW = 0.005  # share of credible labels below 0 that are overlooked
ROUNDING = 1e-9  # (n + 1) level is rounded up only if it is not a whole number


@dataclass(frozen=True)
class Conformal:
    """The scores of the calibration rows, in ascending order, and the weight of each.

    A weight is the credibility of a row's label (`credibility`). All weights 1 is plain split
    conformal.
    """

    scores: Array
    weights: Array

    @classmethod
    def fit(cls, scores: Array, weights: Array) -> Conformal:
        order = np.argsort(scores, kind="stable")
        return cls(scores[order], weights[order])

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
            return self._infinite(f"level {level}")
        return float(sizes[order][np.searchsorted(passed, rank - ROUNDING)])

    def quantile(self, p: float) -> float:
        """The p-quantile of new values, in predicted scales from the median."""
        if not 0 < p < 1:
            raise ValueError(f"p={p} is outside (0, 1).")
        total = float(self.weights.sum())
        rank = (total + 1) * p  # among the scores, counted from 1
        if not 1 - ROUNDING <= rank <= total + ROUNDING:
            return math.copysign(self._infinite(f"quantile {p}"), p - 0.5)
        counts = self.weights > 0  # a row without weight is no point of the curve
        return float(np.interp(rank, np.cumsum(self.weights)[counts], self.scores[counts]))

    def reaches_level(self, level: float) -> bool:
        """Whether there are rows enough for a finite interval."""
        total = float(self.weights.sum())
        return math.ceil((total + 1) * level - ROUNDING) <= total + ROUNDING

    def _infinite(self, what: str) -> float:
        count = int(self.weights.sum() + ROUNDING)
        warnings.warn(
            f"{counted(count, 'calibration row')}: too few for {what}, which becomes infinite.",
            stacklevel=4,
        )
        return math.inf


class Limits(NamedTuple):
    """What predictions may be: near the labels, of a usual scale, not negative if they are not."""

    low: float = -math.inf
    high: float = math.inf
    least_scale: float = 0.0
    most_scale: float = math.inf
    floor: float = -math.inf

    @classmethod
    def find(cls, values: Array, trust: Array) -> Limits:
        """The range of credible labels stretched by its width on either side: a symlog scale would
        otherwise reach astronomic medians. Where labels are not negative, no number is."""
        credible = values[trust >= 0.5]
        low, high = float(credible.min()), float(credible.max())
        is_positive = (credible < 0).mean() <= FEW and (credible > 0).any()
        floor = 0.0 if is_positive else -math.inf
        return cls(max(2 * low - high, floor), 2 * high - low, floor=floor)

    def clip(self, values: Array, is_calibrated: bool = False) -> Array:
        """Medians near the labels; calibrated ends above the floor alone."""
        return np.clip(values, *((self.floor, None) if is_calibrated else (self.low, self.high)))


@dataclass
class Target:
    """A named number: its scale, its own chain (frozen) and its calibration."""

    space: ValueSpace
    chain: Chain
    limits: Limits
    conformal: Conformal = field(init=False)

    def scores(self, values: Array, y_dist: Cauchy) -> Array:
        """Residuals in predicted scales, in the head's space."""
        encoded = np.asarray(self.space.encode(torch.tensor(values, dtype=torch.float64)))
        return (encoded - y_dist.loc.numpy()) / y_dist.scale.numpy()

    def decode(self, encoded: ArrayLike) -> Array:
        """Values within the limits."""
        encoded = torch.as_tensor(encoded, dtype=torch.float64)
        return self.limits.clip(self.space.clamped(encoded).numpy())

    def median(self, y_dist: Cauchy) -> Array:
        """The calibrated median, if there are rows enough to calibrate it."""
        if not self.conformal.reaches_level(LEVEL):
            return self.decode(y_dist.loc)
        return self.limits.clip(self._at(y_dist, self.conformal.quantile(0.5)))

    def interval(self, y_dist: Cauchy, level: float = LEVEL) -> Array:
        """Low and high. -> (N, 2)"""
        radius = self.conformal.radius(level)
        return np.stack([self._at(y_dist, end) for end in (-radius, radius)], -1)

    def quantiles(self, y_dist: Cauchy, quantiles: Sequence[float]) -> Array:
        """-> (N, quantiles)"""
        return np.stack([self._at(y_dist, self.conformal.quantile(p)) for p in quantiles], -1)

    def _at(self, y_dist: Cauchy, scales: float) -> Array:
        """The end of a calibrated interval, so many predicted scales away from the median."""
        value = y_dist.loc + scales * y_dist.scale
        value = value if math.isinf(scales) else self.space.clamped(value)
        return self.limits.clip(value.numpy(), is_calibrated=True)


def warn_of_wrong_labels(name: str, share: float) -> None:
    if share > 0:
        warnings.warn(
            f"{share:.0%} of the labels of {name!r} look wrong and count by their credibility; "
            "`suspicious` (causal-qwen audit) lists them.",
            stacklevel=4,
        )
