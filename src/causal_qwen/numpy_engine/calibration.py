"""Calibration: scores at positions of a few texts -> threshold, gamma and noise gains.

Conversion copies the base model's scores; these make the causal model behave like it:

    a_k    = max_j ||W_j||_1 - ||W_k||_1     every token has the same scale for a constant scale_U
    C      over the bar of the context: where P over its sum is nearest to softmax
           without one: the 90th percentile of the best score
    gamma  = b, so that the median of sum_k P_k is 1.25, or 1 without a bar
    kappa  so that noise changes as many choices of real text as softmax sampling with min-p

N positions, V tokens, C coordinates of an individual, K candidates, R draws of noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from causal_qwen.individuals import draw_noise, to_cauchy
from causal_qwen.numpy_engine.heads import Float64
from causal_qwen.numpy_engine.sampling import softmax
from causal_qwen.numpy_engine.weights import Float32

TOP_QUANTILE = 0.9
POSITIONS = 128  # positions at which sum_k P_k is measured
# With a bar, a token that passes it has a P near 1, and half of the positions have one: a median of
# 1.25 leaves a quarter for all others. At 1 the bar would rise until fewer than half have one.
BAR_SUM = 1.25
BAR_SHARES = (0.9, 0.7, 0.5, 0.35, 0.25, 0.18, 0.13, 0.09, 0.06)  # exp(C) tried: softmax_k at C
# Sums are near 0, 1, 2 ...: where half of the positions have two tokens over the bar, the median of
# another text jumps to 2. So this share of the positions must have a sum of at most 1.5.
BAR_MAJORITY, BAR_MOST = 0.65, 1.5
TOP_TOKENS = 32  # of every position, looked at in the search for C
REST_STEP = 32  # of the other tokens, every so many
NOISE_POSITIONS = 256  # positions at which choices are counted
DRAWS = 64  # of noise, at each of them
MIN_P = 0.1
FIELDS: dict[str, Any] = {  # of a converted model's configuration
    "threshold_context": "competition",
    "compat_loss_weight": 10.0,  # benchmarks/learning.py
}
DEFAULTS: dict[str, Any] = {  # of individuals, saved by calibration, chosen on a grid
    "causal_min_p": MIN_P,
    "min_density": 0.0,
    "persistence": 1.0,
    "whole_words": True,
    "avoid_repeats": 2,
}

TEXTS = (
    "The harbour was quiet when the first boat came in. Two men threw the ropes to a boy on the "
    "quay, who tied them fast and asked how many fish they had caught during the night.",
    "To bake a simple loaf, mix five cups of flour with two spoons of salt, add warm water and "
    "yeast, knead the dough for ten minutes and let it rest under a cloth until it has doubled.",
    "Question: A shop sells pencils in boxes of twelve. If Maria buys four boxes and gives away "
    "nine pencils, how many does she keep? Answer: She starts with 48 pencils and keeps 39.",
    "Light from the sun needs about eight minutes to reach the earth. During that time it crosses "
    "some 150 million kilometres of almost empty space, and only a small part of it meets the sea.",
    "def average(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
    "Dear Mr. Lind, thank you for your letter of last week. We are sorry that the chair arrived "
    "with a broken leg, and we will send you a new one as soon as our workshop has finished it.",
)


class Scales(NamedTuple):
    """The threshold and scales that make P like softmax."""

    threshold: float
    gamma: float
    b_noise: float
    sum_p_median: float


def evenly_spaced(hidden: Any, positions: int) -> Any:
    """Up to so many of the states. (N, H) -> (n, H)"""
    return hidden[:: max(len(hidden) // positions, 1)][:positions]


def over_the_bar(loc: Float32) -> Float32:
    """log softmax: scores over the bar of their context. (N, V)"""
    over = loc - loc.max(-1, keepdims=True)
    for row in over:
        row -= np.log(np.exp(row).sum(dtype=np.float64)).astype(np.float32)
    return over


def find_scales(loc: Float32, per_token: Float32, has_bar: bool) -> Scales:
    """From scores (N, V) and the scale of each token for scale_U' = 1 (V,)."""
    if has_bar:
        loc, target = over_the_bar(loc), BAR_SUM
        threshold = best_threshold(loc, per_token)
    else:
        target = 1.0
        threshold = float(np.quantile(loc.max(-1), TOP_QUANTILE))
    gamma = solve_gamma(loc, per_token, threshold, target=target)
    median = lower_median(sum_p(loc, per_token, threshold, 2 * gamma))
    return Scales(threshold, gamma, gamma, median)


def lower_median(sums: Float64) -> float:
    return float(np.quantile(sums, 0.5, method="lower"))


def sum_p(
    loc: Float32,
    per_token: Float32,
    threshold: float,
    scale: float,
    weight: Float32 | float = 1.0,
) -> Float64:
    """sum_k P_k of every position for a constant scale_U' = scale. (N, V), (V,) -> (N,)

    `weight` (V,) is the number of tokens for which each one stands.
    """
    scales, weights = (scale * per_token).astype(np.float32), np.broadcast_to(weight, loc.shape[1:])
    chances = (np.arctan2(scales, np.float32(threshold) - row) for row in loc)  # times pi
    return np.array([np.dot(p, weights) for p in chances], np.float64) / math.pi


def sampled_tokens(loc: Float32) -> tuple[np.ndarray, Float32]:
    """All likely tokens and some of the others, and for how many each one stands. -> (M,), (M,)"""
    count, size = min(TOP_TOKENS, loc.shape[1]), loc.shape[1]
    likely = np.unique(np.argpartition(loc, size - count, axis=-1)[:, size - count :])
    rest = np.setdiff1d(np.arange(size), likely)
    sample = rest[::REST_STEP]
    weight = np.ones(len(likely) + len(sample), np.float32)
    weight[len(likely) :] = len(rest) / max(len(sample), 1)
    return np.concatenate([likely, sample]), weight


def best_threshold(loc: Float32, per_token: Float32) -> float:
    """C for which P over its sum is nearest to softmax, with the gamma that belongs to it.

    loc are scores over the bar, log softmax (N, V). The distance is the cross-entropy of softmax
    and P / sum P.
    """
    tokens, weight = sampled_tokens(loc)
    loc, per_token = loc[:, tokens], per_token[tokens]
    expected, found = weight * np.exp(loc), {}
    for threshold in map(math.log, BAR_SHARES):
        scale = 2 * solve_gamma(loc, per_token, threshold, weight, BAR_SUM)
        total = sum_p(loc, per_token, threshold, scale, weight)
        is_crowded = bool(np.quantile(total, BAR_MAJORITY) > BAR_MOST)
        p = np.arctan2(scale * per_token, threshold - loc) / math.pi
        distance = (expected * np.log(total[:, None] / p)).sum(-1).mean()
        found[threshold] = is_crowded, float(distance)
    return min(found, key=found.__getitem__)


def solve_gamma(
    loc: Float32,
    per_token: Float32,
    threshold: float,
    weight: Float32 | float = 1.0,
    target: float = 1.0,
) -> float:
    """gamma for which the median of sum_k P_k is `target`, with scale_U' = gamma + b = 2 gamma; the
    lowest if it is larger for every gamma.

    sum_k P_k grows with the scale while fewer than half of the tokens exceed C, so bisection on
    the scale's logarithm finds the root.
    """

    def is_above(gamma: float) -> bool:
        return lower_median(sum_p(loc, per_token, threshold, 2 * gamma, weight)) > target

    low, high = -25.0, 5.0
    while high - low > 4e-5:
        middle = (low + high) / 2
        if is_above(math.exp(middle)):
            high = middle
        else:
            low = middle
    return math.exp(low)


def find_gain(loc: Float32, scale: Any, rows: Callable[[np.ndarray], Any]) -> float:
    """kappa of noise with the scale `scale` (N, C), or one number for all.

    `rows` are those of W, of the candidates of a position. (K,) -> (K, C)
    """

    def noise(place: int, keep: np.ndarray) -> Any:
        own = scale if np.ndim(scale) == 0 else scale[place, :, None]
        weight = rows(keep)
        return weight @ (own * noise_draws(weight.shape[1]))

    return equal_gain(loc, noise)


@lru_cache(1)
def noise_draws(size: int) -> Float32:
    """Standard Cauchy noise of individuals that calibration asks. -> (C, R)"""
    draws = [to_cauchy(draw_noise(seed, size)) for seed in range(DRAWS)]
    return np.stack(draws, axis=-1).astype(np.float32)


def equal_gain(loc: Float32, noise: Callable[[int, np.ndarray], Any]) -> float:
    """The gain at which noise changes as many choices among scores loc (N, V) as softmax sampling
    with min-p. `noise` draws for the candidates of one of the N positions. (K,) -> (K, R)

    The choice moves from the likeliest candidate to candidate k when the gain exceeds the lead
    over k divided by what the noise adds to k more than to the likeliest. The smallest such gain
    decides, so the gain for a share of changed choices is that quantile of the smallest gains.
    """
    critical, changed = [], []
    for place, scores in enumerate(loc):
        keep = np.flatnonzero(scores >= scores.max() + math.log(MIN_P))  # (K,)
        candidates = scores[keep]
        best = int(candidates.argmax())
        changed.append(1 - softmax(candidates)[best])
        added = noise(place, keep)  # (K, R) at gain 1
        gained = added - added[best]
        lead = np.broadcast_to((candidates[best] - candidates)[:, None], gained.shape)
        gain = np.full(gained.shape, np.inf)
        np.divide(lead, gained, out=gain, where=gained > 0)
        critical.append(gain.min(0))
    smallest, rate = np.sort(np.concatenate(critical)), float(np.mean(changed))
    finite = int(np.isfinite(smallest).sum())
    return float(smallest[min(int(rate * len(smallest)), finite - 1)]) if finite else 1.0
