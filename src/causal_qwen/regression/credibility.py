"""Credibility: residuals of unseen rows -> the probability that each label is right.

    r ~ (1 - share) t_nu(scale) + share Cauchy(wide)

Right labels scatter by Student's t with its own tails, wrong ones by a Cauchy that is at least four
times as wide. The mixture is fitted by EM, and used only where it explains the residuals clearly
better than a t alone (`EVIDENCE` in log-likelihood); otherwise every label is credible. So on
clean tables weighting by credibility changes nothing.

Nor is it used where the share of wrong labels is at its upper bound: if half of the labels look
wrong, there are two kinds of rows (4 and 6 cylinders), not mistakes. Nor where half of the labels
have one value, as the zeros of a count: residuals are then no scale for the others.

A wrong label near the right one (two rows swapped that are alike) cannot be found, and need not be.
Where a number follows from its columns almost exactly, residuals are rounding or interpolation, of
any shape: below `NEGLIGIBLE` interquartile ranges of the labels they are no mistakes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

Array = NDArray[np.float64]

EVIDENCE = 5.0  # nats
ROWS = 30  # fewer residuals are no evidence
FREEDOM_ALONE = (2.5, 3.0, 4.0, 6.0, 10.0, 30.0)
FREEDOM_MIXED = (3.0, 6.0, 30.0)
STEPS = 60
SHARES = 1e-4, 0.45  # of wrong labels
APART = 4.0  # the least ratio of the two scales
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
    x, w, least = residuals / scale, weights / weights.mean(), least / scale
    alone = max(_fit_alone(x, w, nu, least) for nu in FREEDOM_ALONE)
    mixed, share, probability = max(
        (_fit_mixed(x, w, nu, least) for nu in FREEDOM_MIXED), key=lambda found: found[0]
    )
    if mixed - alone < EVIDENCE or share == SHARES[1]:
        return trusting
    return Credibility(probability, share)


def _fit_alone(x: Array, weights: Array, nu: float, least: float) -> float:
    """The log-likelihood of the best scale."""

    def loss(log_scale: float) -> float:
        return -float(weights @ stats.t.logpdf(x, nu, scale=np.exp(log_scale)))

    bounds = max(-3.0, float(np.log(max(least, 1e-3)))), 3.0
    return -float(optimize.minimize_scalar(loss, bounds=bounds, method="bounded").fun)


def _fit_mixed(x: Array, weights: Array, nu: float, least: float) -> tuple[float, float, Array]:
    """Log-likelihood, share of wrong labels, and the probability of every label to be right."""
    share, narrow = 0.1, 1.0
    wide = max(10.0, float(np.quantile(np.abs(x), 0.95)))
    for _ in range(STEPS):
        right = (1 - share) * stats.t.pdf(x, nu, scale=narrow)
        wrong = share * stats.cauchy.pdf(x, scale=wide)
        probability = right / (right + wrong)
        of_right, of_wrong = weights * probability, weights * (1 - probability)
        share = float(np.clip(of_wrong.sum() / weights.sum(), *SHARES))
        pull = (nu + 1) / (nu + (x / narrow) ** 2)
        narrow = max(float(np.sqrt(of_right @ (pull * x**2) / of_right.sum())), least)
        pull = 2 / (1 + (x / wide) ** 2)
        spread = float(np.sqrt(of_wrong @ (pull * x**2) / max(of_wrong.sum(), 1e-9)))
        wide = max(spread, APART * narrow)
    likelihood = (1 - share) * stats.t.pdf(x, nu, scale=narrow)
    likelihood += share * stats.cauchy.pdf(x, scale=wide)
    return float(weights @ np.log(likelihood)), share, probability
