"""Calibration: weights and a few texts -> decision noise, thresholds, gamma and noise gains.

Conversion copies the base model's scores; these four make the causal model behave like it:

    a_k    = max_j ||W_j||_1 - ||W_k||_1     every token has the same scale for a constant scale_U
    C      over the bar of the context: where P over its sum is nearest to softmax
           without one: the 90th percentile of the best score
    gamma  = b, so that the median of sum_k P_k is 1.25, or 1 without a bar
    kappa  so that noise changes as many choices of real text as softmax sampling with min-p
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from causal_qwen.individuals import draw_noise, to_cauchy
from causal_qwen.modeling.abduction import inverse_activation
from causal_qwen.modeling.action import row_norms
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import CausalModel

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
# Defaults of individuals, saved by calibration, chosen on a grid:
MIN_P = 0.1
PERSISTENCE = 1.0
WHOLE_WORDS = True
AVOID_REPEATS = 2

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


@dataclass(frozen=True)
class Calibration:
    """The calibrated values, for the conversion report."""

    threshold: float
    gamma: float
    b_noise: float
    sum_p_median: float
    noise_gain: float
    fresh_noise_gain: float


@torch.no_grad()
def calibrate(
    model: CausalModel,
    texts: Sequence[Tensor],
    progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Set a, C, gamma, b and the noise gains of a model with its base model's scores.

    texts are token ids. Config fields that are numbers instead of "auto" are used unchanged.
    """
    progress("decision noise")
    set_decision_noise(model)
    progress("thresholds and scales")
    hidden = read_texts(model, texts)
    threshold, gamma, b_noise, sum_p_median = calibrate_scales(model, hidden)
    progress("noise gains")
    gains = calibrate_gains(model, hidden)
    return Calibration(threshold, gamma, b_noise, sum_p_median, *gains)


@torch.no_grad()
def read_texts(model: CausalModel, texts: Sequence[Tensor]) -> Tensor:
    """The backbone's states at all positions of the texts. -> (N, H)"""
    was_training = model.training
    model.eval()
    rows = (ids.reshape(1, -1).to(model.device) for ids in texts)
    hidden = torch.cat([model.model(ids).last_hidden_state[0] for ids in rows])
    model.train(was_training)
    return hidden


def evenly_spaced(hidden: Tensor, positions: int) -> Tensor:
    """Up to so many of the states. (N, H) -> (n, H)"""
    return hidden[:: max(len(hidden) // positions, 1)][:positions]


@torch.no_grad()
def calibrate_scales(model: CausalModel, hidden: Tensor) -> tuple[float, float, float, float]:
    """Set C, gamma and b from states (N, H). -> them, and the median of sum_k P_k"""
    config = model.config
    loc = model.lm_head(model.abduct(evenly_spaced(hidden, POSITIONS)).loc).float()  # (N, V)
    bar, target = model.decision.bar(loc), 1.0
    if bar is not None:
        loc, target = loc - bar, BAR_SUM
    per_token = row_norms(model.lm_head.weight) + model.action.decision_noise.abs()
    per_token = per_token / config.logit_divisor
    threshold, gamma, b_noise = (
        None if isinstance(value, str) else float(value)  # "auto"
        for value in (config.ovr_threshold_init, config.gamma_init, config.b_noise_init)
    )
    if threshold is None and bar is not None:
        threshold = best_threshold(loc, per_token, gamma, b_noise)
    elif threshold is None:
        threshold = float(loc.amax(-1).quantile(TOP_QUANTILE))
    if gamma is None:
        gamma = solve_gamma(loc, per_token, threshold, b_noise, target=target)
    b_noise = gamma if b_noise is None else b_noise
    model.decision.threshold.fill_(threshold)
    model.abduction.scale.bias.fill_(inverse_activation(gamma, config.scale_activation))
    model.action.b_noise.fill_(b_noise)
    sum_p_median = float(sum_p(loc, per_token, threshold, gamma + b_noise).median())
    return threshold, gamma, b_noise, sum_p_median


@torch.no_grad()
def set_decision_noise(model: CausalModel) -> None:
    """a_k = max_j ||W_j||_1 - ||W_k||_1 ("equalize"), or 0 ("zero")."""
    noise = torch.zeros_like(model.action.decision_noise)
    if model.config.decision_noise == "equalize":
        norms = row_norms(model.lm_head.weight)
        noise = (norms.max() - norms).to(noise)
    model.action.decision_noise.copy_(noise)


def sum_p(
    loc: Tensor,
    per_token: Tensor,
    threshold: float,
    scale: float,
    weight: Tensor | float = 1.0,
) -> Tensor:
    """sum_k P_k of every position for a constant scale_U' = scale. (N, V), (V,) -> (N,)

    `weight` (V,) is the number of tokens for which each one stands.
    """
    return (weight * Cauchy(loc, (scale * per_token).to(loc)).sf(threshold)).sum(-1)


def best_threshold(
    loc: Tensor, per_token: Tensor, gamma: float | None, b_noise: float | None
) -> float:
    """C for which P over its sum is nearest to softmax, with the gamma that belongs to it.

    loc are scores over the bar, log softmax (N, V). The distance is the cross-entropy of softmax
    and P / sum P. All likely tokens are looked at, and a sample of the others.
    """
    likely = loc.topk(min(TOP_TOKENS, loc.shape[1])).indices.unique()
    is_rest = torch.ones(loc.shape[1], dtype=torch.bool, device=loc.device)
    is_rest[likely] = False
    rest = is_rest.nonzero().flatten()
    sample = rest[::REST_STEP]
    tokens = torch.cat([likely, sample])
    weight = torch.ones(len(tokens), device=loc.device)
    weight[len(likely) :] = len(rest) / max(len(sample), 1)
    loc, per_token = loc[:, tokens], per_token[tokens]
    softmax, found = weight * loc.exp(), {}
    for threshold in map(math.log, BAR_SHARES):
        own = gamma or solve_gamma(loc, per_token, threshold, b_noise, weight, BAR_SUM)
        scale = own + (own if b_noise is None else b_noise)
        total = sum_p(loc, per_token, threshold, scale, weight)
        is_crowded = bool(total.quantile(BAR_MAJORITY) > BAR_MOST)
        log_p = Cauchy(loc, (scale * per_token).to(loc)).log_sf(threshold)
        distance = (softmax * (total.log()[:, None] - log_p)).sum(-1).mean()
        found[threshold] = is_crowded, float(distance)
    return min(found, key=found.__getitem__)


def solve_gamma(
    loc: Tensor,
    per_token: Tensor,
    threshold: float,
    b_noise: float | None,
    weight: Tensor | float = 1.0,
    target: float = 1.0,
) -> float:
    """gamma for which the median of sum_k P_k is `target`, with scale_U' = gamma + b (b = gamma if
    None); the lowest if it is larger for every gamma.

    sum_k P_k grows with the scale while fewer than half of the tokens exceed C, so bisection on
    the scale's logarithm finds the root.
    """
    low, high = -25.0, 5.0
    for _ in range(26):
        middle = (low + high) / 2
        gamma = math.exp(middle)
        total = gamma * 2 if b_noise is None else gamma + b_noise
        if sum_p(loc, per_token, threshold, total, weight).median() > target:
            high = middle
        else:
            low = middle
    return math.exp(low)


@torch.no_grad()
def calibrate_gains(model: CausalModel, hidden: Tensor) -> tuple[float, float]:
    """Find and save the noise gains, and the other defaults of individuals. states (N, H)

    With noise of gain kappa the choice among the candidates, at positions of the texts, leaves the
    likeliest token as often as under softmax sampling with the same `min_p`. Texts are read, not
    generated: a model's own loops would pass for good text.
    """
    u = model.abduct(evenly_spaced(hidden, NOISE_POSITIONS))
    exogenous = model.action.b_noise.abs()
    loc = model.lm_head(u.loc).float()  # (N, V)
    chance = exogenous.expand_as(u.scale)
    shared = find_gain(model, loc, u.scale, chance, PERSISTENCE)
    fresh = find_gain(model, loc, chance, chance)
    saved = model.generation_config
    saved.noise_gain, saved.fresh_noise_gain = shared, fresh
    saved.causal_min_p, saved.min_density = MIN_P, 0.0
    saved.persistence = PERSISTENCE
    saved.whole_words, saved.avoid_repeats = WHOLE_WORDS, AVOID_REPEATS
    return shared, fresh


def find_gain(
    model: CausalModel, loc: Tensor, own: Tensor, chance: Tensor, persistence: float = 1.0
) -> float:
    """The gain at which noise changes as many choices among scores loc (N, V) as softmax sampling
    does: a mixture, of the scale `own` (N, C) in a share `persistence` of draws, else `chance`."""
    draws = [to_cauchy(draw_noise(seed, own.shape[-1])) for seed in range(DRAWS)]
    t = torch.from_numpy(np.stack(draws, axis=-1)).to(loc)  # (C, R)
    is_own = torch.arange(DRAWS, device=loc.device) < persistence * DRAWS
    weight = model.lm_head.weight
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # FSDP

    def noise(place: int, keep: Tensor) -> Tensor:
        scale = torch.where(is_own, own[place, :, None], chance[place, :, None])  # (C, R)
        return weight[keep].to(loc) @ (scale.to(loc) * t) / model.config.logit_divisor

    return equal_gain(loc, noise)


def equal_gain(loc: Tensor, noise: Callable[[int, Tensor], Tensor]) -> float:
    """The gain at which noise changes as many choices among scores loc (N, V) as softmax sampling
    with min-p. `noise` draws for the candidates of one of the N positions. (K,) -> (K, R)

    The choice moves from the likeliest candidate to candidate k when the gain exceeds the lead
    over k divided by what the noise adds to k more than to the likeliest. The smallest such gain
    decides, so the gain for a share of changed choices is that quantile of the smallest gains.
    """
    critical, changed = [], []
    for place, scores in enumerate(loc):
        keep = (scores >= scores.max() + math.log(MIN_P)).nonzero().flatten()  # (K,)
        candidates = scores[keep]
        best = candidates.argmax()
        changed.append(1 - candidates.softmax(-1)[best])
        added = noise(place, keep)  # (K, R) at gain 1
        gained = added - added[best]
        gain = (candidates[best] - candidates)[:, None] / gained
        critical.append(gain.where(gained > 0, math.inf).amin(0))
    smallest, rate = torch.cat(critical).sort().values, float(torch.stack(changed).mean())
    finite = int(smallest.isfinite().sum())
    return float(smallest[min(int(rate * len(smallest)), finite - 1)]) if finite else 1.0
