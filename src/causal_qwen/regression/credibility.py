"""Credibility: residuals of unseen rows -> the probability that each label is right.

    r ~ right + above + below

Right labels scatter by Student's t, with a scale and tails of their own on either side of its
mode: prices and delays are skewed. Wrong ones scatter by Cauchys at least three times as wide, one
centred above and one below. The mixture is used only where it explains the residuals clearly better
than such a t alone (`EVIDENCE`, nats), with tails as heavy as a Cauchy's on one side, or of two
degrees of freedom on both (`TAILS`); otherwise every label is credible. Nor is it used where the
share of wrong labels is at its upper bound: if half of the labels look wrong, there are two kinds
of rows (4 and 6 cylinders), not mistakes.

Where a number follows from its columns almost exactly, residuals are rounding or interpolation, of
any shape: below `NEGLIGIBLE` interquartile ranges of the labels they are no mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize
from threadpoolctl import threadpool_limits
from torch import Tensor

Array = NDArray[np.float64]

EVIDENCE = 4.5  # nats
ROWS = 30  # fewer residuals are no evidence
MOST = 5000  # residuals that the mixture is fitted to
TAILS = ((1.0, 2.5), (2.5, 1.0), (2.0, 2.0))  # least degrees of freedom below and above, alone
HEAVY, PRIOR = 2.5, 2.0  # nats against an e-fold of heavier tails, which one row could show
FREEDOM = 2.0, 30.0  # of right labels among wrong ones
LARGEST_SHARE = 0.45  # of wrong labels
APART = 3.0  # the least ratio of the two scales
NARROWEST = 0.3  # scale of right labels, at least, if they are more than half, in that of all
NORMAL_MEDIAN = 0.6745  # of |x|
NEGLIGIBLE = 0.01  # scale of right labels, at least, in interquartile ranges of the labels


class Credibility(NamedTuple):
    probability: Array  # (N,): that the label is right
    share: float  # of wrong labels; 0 if the residuals are no evidence of any


def find_credibility(residuals: Array, weights: Array, least: float = 0.0) -> Credibility:
    """Residuals in any unit, (N,); rows of weight 0 are not counted, but judged. `least`: the
    scale of right labels, at least, in the same unit."""
    scale = max(float(np.median(np.abs(residuals[weights > 0]))) / NORMAL_MEDIAN, least)
    trusting = Credibility(np.ones(len(residuals)), 0.0)
    if (weights > 0).sum() < ROWS or not scale > 0:
        return trusting
    x, w, least = residuals / scale, weights / weights.mean(), max(least / scale, NARROWEST)
    some = slice(None, None, -(-len(x) // MOST))
    with threadpool_limits(1, user_api="openmp"):  # several would mostly wait for each other
        mixed, parameters = _fit_mixed(x[some], w[some], least)
        alone = max(_fit_alone(x[some], w[some], least, tails) for tails in TAILS)
    right, wrong = (
        part.numpy() for part in _mixture(torch.from_numpy(x), torch.from_numpy(parameters))
    )
    probability = 1 / (1 + np.exp(np.clip(wrong - right, -700, 700)))
    above, below = np.exp(parameters[[5, 8]])
    share = float((above + below) / (1 + above + below))
    if mixed - alone < EVIDENCE or share >= LARGEST_SHARE:
        return trusting
    return Credibility(probability, share)


def _log_right(x: Tensor, parameters: Tensor) -> Tensor:
    """The log-density of a t with two sides, continuous at its mode: mode, logarithms of both
    scales and of both degrees of freedom."""
    scales, freedoms = parameters[1:3].exp(), parameters[3:5].exp()
    height = torch.lgamma((freedoms + 1) / 2) - torch.lgamma(freedoms / 2)
    area = scales / 2 * (math.pi * freedoms).sqrt() * (-height).exp()
    is_above = x >= parameters[0]
    scale, freedom = (torch.where(is_above, one[1], one[0]) for one in (scales, freedoms))
    scaled = ((x - parameters[0]) / scale) ** 2 / freedom
    return -(freedom + 1) / 2 * scaled.log1p() - area.sum().log()


def _mixture(x: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Log-densities of right and of wrong labels. Of the Cauchys above and below: the logarithms of
    their odds and of their scales, in the least ones, and their centres."""
    least = APART * parameters[1:3].max().exp()
    parts = [_log_right(x, parameters[:5])]
    for odds, scale, centre in (parameters[5:8], parameters[8:11]):
        wide = least * scale.exp()
        parts.append(odds - (math.pi * wide).log() - (((x - centre) / wide) ** 2).log1p())
    total = parameters[[5, 8]].exp().sum().log1p()
    return parts[0] - total, torch.logaddexp(*parts[1:]) - total


def _minimize(loss: Callable[[Tensor], Tensor], start: Any, bounds: Any) -> Any:
    """By L-BFGS, with the gradient of the loss."""

    def with_gradient(parameters: Array) -> tuple[float, Array]:
        given = torch.tensor(parameters, requires_grad=True)
        with torch.enable_grad():
            value = loss(given)
        (gradient,) = torch.autograd.grad(value, given)
        return value.item(), gradient.numpy()

    begin = np.array(start, dtype=np.float64)
    return optimize.minimize(with_gradient, begin, jac=True, method="L-BFGS-B", bounds=bounds)


def _fit_alone(x: Array, weights: Array, least: float, tails: tuple[float, float]) -> float:
    """The log-likelihood of a t with two sides, whose tails are no heavier than these."""
    lowest = np.log(least)
    bounds = [(-3.0, 3.0), *[(lowest, 3.0)] * 2, *((np.log(nu), np.log(30.0)) for nu in tails)]
    start = [np.median(x), *[max(-0.2, lowest)] * 2, *[np.log(3.0)] * 2]
    at, w = torch.from_numpy(x), torch.from_numpy(weights)

    def loss(parameters: Tensor) -> Tensor:
        heavy = (math.log(HEAVY) - parameters[3:5]).clamp_min(0).sum()
        return PRIOR * heavy - w @ _log_right(at, parameters)

    return -float(_minimize(loss, start, bounds).fun)


def _fit_mixed(x: Array, weights: Array, least: float) -> tuple[float, Array]:
    """The log-likelihood of the mixture, and its parameters; started from wrong labels around the
    right ones, from some on either side, and from single ones far away."""
    lowest = np.log(least)
    right = [(-3.0, 3.0), *[(lowest, 3.0)] * 2, *[tuple(np.log(FREEDOM))] * 2]
    wrong = [(np.log(1e-5), -0.2), (0.0, 12.0)]
    bounds = [*right, *wrong, (0.0, None), *wrong, (None, 0.0)]
    start = [np.median(x), *[max(-0.2, lowest)] * 2, *[np.log(6.0)] * 2]
    wide = np.log(max(10.0, np.quantile(np.abs(x), 0.95)) / APART)
    low, high = np.quantile(x, (0.07, 0.93))
    around = np.log(0.05), wide
    aside, single = (np.log(0.15), 0.0), (np.log(1 / len(x)), 0.0)
    at, w = torch.from_numpy(x), torch.from_numpy(weights)

    def loss(parameters: Tensor) -> Tensor:
        return -(w @ torch.logaddexp(*_mixture(at, parameters)))

    found = [
        _minimize(loss, [*start, *first], bounds)
        for first in (
            (*around, 0.0, *around, 0.0),
            (*aside, max(high, 0.0), *aside, min(low, 0.0)),
            (*single, max(x.max(), 0.0), *single, min(x.min(), 0.0)),
        )
    ]
    best = min(found, key=lambda one: float(one.fun))
    return -float(best.fun), best.x
