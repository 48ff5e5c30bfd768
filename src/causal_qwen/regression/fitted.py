"""Fitted: what is known of one number after `fit`: its scale, chain, limits and calibration.

    space, chain, rows that cross-validation has not seen -> Target, TargetEvidence

Residuals of unseen rows in units of the predicted scale calibrate the intervals (`conformal`), each
by the credibility of its label. `Limits` keeps medians near the labels, calibrated intervals inside
the support alone, whose coverage would suffer otherwise, and a scale near those of unseen rows: in
symlog space a large scale reaches astronomic values.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.value_space import ValueSpace
from causal_qwen.regression.conformal import Conformal
from causal_qwen.regression.experts import Evidence, with_spread
from causal_qwen.regression.head import Chain
from causal_qwen.regression.prediction import NumberPrediction
from causal_qwen.regression.source_model import TargetModel

Array = NDArray[np.float64]
Support = str | tuple[float, float]

LEVEL = 0.9  # intervals of which cross-validation must be able to calibrate
SUPPORTS = ("auto", "real", "positive", "count")
FEW = 0.005  # share of credible labels on the other side of a support's bound
STRETCH = 2.0  # by which a predicted scale may leave the range of those of unseen rows


class Limits(NamedTuple):
    """What predictions may be: near the labels, of a usual scale, in the support."""

    low: float = -math.inf
    high: float = math.inf
    is_whole: bool = False
    least_scale: float = 0.0
    most_scale: float = math.inf
    floor: float = -math.inf
    ceiling: float = math.inf

    def clip(self, values: Array) -> Array:
        """Medians, and all that promises no coverage."""
        return np.clip(self._rounded(values), self.low, self.high)

    def clip_calibrated(self, values: Array) -> Array:
        """Rounding keeps coverage: a whole number inside an interval stays inside."""
        return np.clip(self._rounded(values), self.floor, self.ceiling)

    def _rounded(self, values: Array) -> Array:
        return np.round(values) if self.is_whole else values


NO_LIMITS = Limits()


@dataclass
class Target:
    """A named number: its scale, its own chain (frozen) and its calibration."""

    space: ValueSpace
    chain: Chain | None = None
    conformal: Conformal | None = None
    limits: Limits = NO_LIMITS


class TargetEvidence(NamedTuple):
    """Training rows of one target, each as cross-validation saw it (NaN where it did not)."""

    values: Array
    unseen: Array  # the median by experts that have not seen the row
    scores: Array  # (value - median) / scale, in the head's space
    credibility: Array  # the probability that the label is right
    peers: dict[str, Array]  # medians of single methods
    scales: Array  # predicted, in the head's space

    def take(self, rows: NDArray[np.int64]) -> TargetEvidence:
        arrays = {name: part[rows] for name, part in self._asdict().items() if name != "peers"}
        return TargetEvidence(**arrays, peers={name: one[rows] for name, one in self.peers.items()})

    def errors(self) -> dict[str, float]:
        """The median absolute error of every method on unseen rows; ours is "together"."""
        middle = float(np.median(self.values))
        every = {"training median": np.full(len(self.values), middle), **self.peers}
        every["together"] = self.unseen
        return {n: float(np.nanmedian(np.abs(p - self.values))) for n, p in every.items()}


def fit_target(
    model: TargetModel, values: Array, weights: Array, evidence: Evidence, support: Support
) -> tuple[Target, TargetEvidence]:
    """Limits, calibration by cross-validation, and what is reported of a target.

    A row calibrates by its weight (1 on average) times the credibility of its label.
    """
    space, trust = model.space, evidence.credibility.probability
    counts = weights > 0
    share = trust * weights / weights[counts].mean()
    tested = np.isfinite(evidence.unseen).all(1)
    _, y_dist = model.stack.chain(torch.from_numpy(with_spread(evidence.unseen[tested])))
    scale = y_dist.scale[torch.from_numpy(counts[tested])]
    limits = find_limits(support, values[counts], trust[counts])._replace(
        least_scale=float(scale.min()) / STRETCH,
        most_scale=float(scale.max()) * STRETCH,
    )
    target = Target(space, model.stack.chain, limits=limits)
    encoded = space.encode(torch.from_numpy(values)).numpy()
    target.conformal = Conformal.fit(y_dist, encoded[tested], share[tested])
    unseen, scores, scales = np.full((3, len(values)), np.nan)
    unseen[tested] = limits.clip(space.clamped(y_dist.loc).numpy())
    scores[tested] = (encoded[tested] - y_dist.loc.numpy()) / y_dist.scale.numpy()
    scales[tested] = y_dist.scale.numpy()
    peers = {
        peer: limits.clip(space.clamped(torch.from_numpy(found)).numpy())
        for peer, found in evidence.peers.items()
    }
    return target, TargetEvidence(values, unseen, scores, trust, peers, scales)


def find_limits(support: Support, values: Array, trust: Array) -> Limits:
    """The support, and the range of credible labels stretched by its width on either side: a
    symlog scale would otherwise reach astronomic medians."""
    credible = values[trust >= 0.5]
    floor, ceiling = (-math.inf, math.inf) if isinstance(support, str) else support
    floor = 0.0 if support in ("positive", "count") else floor
    if not ((credible >= floor) & (credible <= ceiling)).any():
        raise ValueError(
            f"support={support!r} has none of the labels, which are {credible.min():g} to "
            f"{credible.max():g}; give another support."
        )
    low, high = float(credible.min()), float(credible.max())
    width = high - low
    is_positive = (credible < 0).mean() <= FEW and (credible > 0).any()
    is_whole = bool((credible == np.round(credible)).all())
    floor = 0.0 if support == "auto" and is_positive else floor
    bounds = max(low - width, floor), min(high + width, ceiling)
    is_count = support == "count" and is_whole
    return Limits(*bounds, is_whole=is_count, floor=floor, ceiling=ceiling)


def conformal_of(target: Target, calibrated: bool | None) -> Conformal | None:
    if calibrated and target.conformal is None:
        raise ValueError(
            "calibrated=True needs calibrate(X, y) on rows that fit has not seen; "
            "calibrated=False gives the Cauchy's own intervals."
        )
    return None if calibrated is False else target.conformal


def value_at(y_dist: Cauchy, target: Target, scales: float) -> Array:
    """The end of a calibrated interval, so many predicted scales away from the median."""
    if np.isinf(scales):
        return target.limits.clip_calibrated(np.full(len(y_dist.loc), scales))
    value = target.space.clamped(y_dist.loc + scales * y_dist.scale)
    return target.limits.clip_calibrated(value.numpy())


def median_of(number: NumberPrediction, target: Target) -> Array:
    """The calibrated median, if there are rows enough to calibrate it."""
    conformal = target.conformal
    if conformal is None or not conformal.reaches_level(LEVEL):
        return target.limits.clip(np.asarray(number.median))
    return target.limits.clip(value_at(number.y, target, conformal.quantile(0.5)))


def interval_of(
    number: NumberPrediction, target: Target, level: float, calibrated: bool | None = None
) -> Array:
    """Low and high. -> (N, 2)"""
    conformal = conformal_of(target, calibrated)
    if conformal is None:
        return target.limits.clip(np.stack(number.interval(level), -1))
    radius = conformal.radius(level)
    return np.stack([value_at(number.y, target, end) for end in (-radius, radius)], -1)


def quantiles_of(
    number: NumberPrediction,
    target: Target,
    quantiles: Sequence[float],
    calibrated: bool | None = None,
) -> Array:
    """-> (N, quantiles)"""
    conformal = conformal_of(target, calibrated)
    if conformal is None:
        return target.limits.clip(np.asarray(number.quantile(list(quantiles))))
    return np.stack([value_at(number.y, target, conformal.quantile(p)) for p in quantiles], -1)


def say_credibility(name: str, share: float) -> None:
    if share > 0:
        warnings.warn(
            f"{share:.0%} of the labels of {name!r} look wrong and count by their credibility; "
            "`suspicious` (causal-qwen audit) lists them.",
            stacklevel=4,
        )
