"""Calibration: weights and a few texts -> decision noise, thresholds, gamma and noise gains.

Conversion copies the base model's scores; these four make the causal model behave like it:

    a_k    = max_j ||W_j||_1 - ||W_k||_1     every token has the same scale for a constant scale_U
    C      the 90th percentile of the best score
    gamma  = b, so that the median of sum_k P_k is 1
    kappa  so that at T = 1 noise is as lively as softmax sampling with top-p 0.9
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from causal_qwen.generation.streaming import end_ids
from causal_qwen.modeling.abduction import inverse_activation
from causal_qwen.modeling.action import row_norms
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import CausalModel

TOP_QUANTILE = 0.9
POSITIONS = 128  # positions at which sum_k P_k is measured
NEW_TOKENS = 40
TOP_P = 0.9
TRUNCATION = 0.05  # saved min_density: the far tails of Cauchy noise break a text
SHARED_MARGIN = 0.35  # shared noise makes a text repeat itself: aim for a calmer text
SHARED_GAIN_FACTOR = 4.0  # its search is untruncated; without tails, shared noise can be larger
SHARED_RANGE = (0.02, 3.0)  # of the search, in units of the scores' own spread
FRESH_RANGE = (0.5, 40.0)  # truncated noise adds up like a Gaussian: it takes a larger gain
NOISE_STEPS = 6
TYPICAL_NOISE = (0.465, 8.1)  # found gains, shared and fresh, in these units: embedded model

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
PROMPTS = (
    "The old lighthouse keeper opened the door and",
    "My grandmother's recipe for soup begins with",
    "The best way to learn a new language is",
    "On Monday morning the whole office",
    "Deep in the forest there lived",
    "The history of chess begins",
    "If I could travel anywhere in the world,",
    "The mayor promised the citizens that",
    "When the rain finally stopped,",
    "To build a small wooden boat, you first",
    "Scientists announced yesterday that",
    "She looked at the painting for a long time and",
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
    texts: Sequence[Tensor] | None = None,
    prompts: Sequence[Tensor] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Set a, C, gamma, b and the noise gains of a model with its base model's scores.

    texts and prompts are token ids; without texts, the model's own samples are used. Config
    fields that are numbers instead of "auto" are used unchanged.
    """
    was_training = model.training
    model.eval()
    config = model.config
    texts = own_samples(model) if texts is None else texts
    progress("decision noise")
    set_decision_noise(model)
    progress("thresholds and scales")
    loc = sample_scores(model, texts)  # (N, V)
    per_token = row_norms(model.lm_head.weight) + model.action.decision_noise.abs()
    threshold, gamma, b_noise = (
        None if isinstance(value, str) else float(value)  # "auto"
        for value in (config.ovr_threshold_init, config.gamma_init, config.b_noise_init)
    )
    if threshold is None:
        threshold = float(loc.amax(-1).quantile(TOP_QUANTILE))
    if gamma is None:
        gamma = solve_gamma(loc, per_token, threshold, b_noise)
    b_noise = gamma if b_noise is None else b_noise
    model.decision.threshold.fill_(threshold)
    model.abduction.scale.bias.fill_(inverse_activation(gamma, config.scale_activation))
    model.action.b_noise.fill_(b_noise)
    progress("noise gains")
    gains = calibrate_noise(model, prompts, texts)
    model.train(was_training)
    sum_p_median = float(sum_p(loc, per_token, threshold, gamma + b_noise).median())
    return Calibration(threshold, gamma, b_noise, sum_p_median, *gains)


@torch.no_grad()
def set_decision_noise(model: CausalModel) -> None:
    """a_k = max_j ||W_j||_1 - ||W_k||_1 ("equalize"), or 0 ("zero")."""
    noise = torch.zeros_like(model.action.decision_noise)
    if model.config.decision_noise == "equalize":
        norms = row_norms(model.lm_head.weight)
        noise = (norms.max() - norms).to(noise)
    model.action.decision_noise.copy_(noise)


def sample_scores(model: CausalModel, texts: Sequence[Tensor]) -> Tensor:
    """loc_S at up to POSITIONS positions of the texts, evenly spaced. -> (N, V)"""
    hidden = torch.cat([model.model(ids.reshape(1, -1)).last_hidden_state[0] for ids in texts])
    every = max(len(hidden) // POSITIONS, 1)
    scores: Tensor = model.lm_head(model.abduct(hidden[::every][:POSITIONS]).loc)
    return scores.float()


def sum_p(loc: Tensor, per_token: Tensor, threshold: float, scale: float) -> Tensor:
    """sum_k P_k of every position for a constant scale_U' = scale. (N, V), (V,) -> (N,)"""
    return Cauchy(loc, (scale * per_token).to(loc)).sf(threshold).sum(-1)


def solve_gamma(loc: Tensor, per_token: Tensor, threshold: float, b_noise: float | None) -> float:
    """gamma for which the median of sum_k P_k is 1, with scale_U' = gamma + b (b = gamma if None).

    sum_k P_k grows with the scale while fewer than half of the tokens exceed C, so bisection on
    the scale's logarithm finds the root.
    """
    low, high = -25.0, 5.0
    for _ in range(26):
        middle = (low + high) / 2
        gamma = math.exp(middle)
        total = gamma * 2 if b_noise is None else gamma + b_noise
        if sum_p(loc, per_token, threshold, total).median() > 1:
            high = middle
        else:
            low = middle
    return math.exp(low)


class LogProbRecorder(LogitsProcessor):
    """Records the base model's log-probability of each chosen token; does not change the scores."""

    def __init__(self, prompt_length: int, eos: set[int]) -> None:
        self.prompt_length = prompt_length
        self.eos = torch.tensor(sorted(eos) or [-1])
        self.previous: Tensor | None = None
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.record(input_ids)
        self.previous = scores.log_softmax(-1)
        return scores

    def record(self, input_ids: Tensor) -> None:
        if self.previous is not None:
            self.log_probs.append(self.previous.gather(-1, input_ids[:, -1:]).squeeze(-1))

    def per_row(self, sequences: Tensor) -> tuple[Tensor, Tensor]:
        """Sum and number of log-probabilities up to and including end-of-text. -> (B,), (B,)"""
        self.record(sequences)
        log_probs = torch.stack(self.log_probs, dim=-1).double()  # (B, new tokens)
        is_eos = torch.isin(sequences[:, self.prompt_length :], self.eos.to(sequences.device))
        is_valid = (is_eos.cumsum(-1) - is_eos.long()) == 0
        return log_probs.where(is_valid, 0.0).sum(-1), is_valid.sum(-1)


@torch.no_grad()
def calibrate_noise(
    model: CausalModel,
    prompts: Sequence[Tensor] | None = None,
    texts: Sequence[Tensor] | None = None,
) -> tuple[float, float]:
    """Find and save the gains of shared and of fresh noise, and the truncation.

    At its gain and T = 1, noise is as lively as softmax with top-p 0.9. Liveliness is the mean
    log-probability of the generated tokens under softmax(loc_S). Shared noise lowers it less than
    fresh noise, so each has its own gain. The fresh gain is that of truncated noise; the shared
    one is searched untruncated and multiplied by SHARED_GAIN_FACTOR. All three go to the model's
    generation config; repeat after training. Without prompts, the gains are TYPICAL_NOISE in units
    of the model's scores.
    """
    was_training = model.training
    model.eval()
    unit = gain_unit(model, texts or prompts or own_samples(model))
    if prompts is None:
        shared, fresh = (relative * unit for relative in TYPICAL_NOISE)
    else:
        batch = pad_left(prompts, model)
        softmax: dict[str, Any] = {
            "causal_mode": "compatible",
            "do_sample": True,
            "top_p": TOP_P,
            "top_k": 0,
        }
        target = liveliness(model, batch, **softmax)
        shared = find_gain(model, batch, unit, target + SHARED_MARGIN, "causal")
        fresh = find_gain(model, batch, unit, target, "sampling", FRESH_RANGE, TRUNCATION)
    shared *= SHARED_GAIN_FACTOR
    saved = model.generation_config
    saved.noise_gain, saved.fresh_noise_gain, saved.min_density = shared, fresh, TRUNCATION
    model.train(was_training)
    return shared, fresh


def find_gain(
    model: CausalModel,
    batch: dict[str, Tensor],
    unit: float,
    target: float,
    causal_mode: str,
    span: tuple[float, float] = SHARED_RANGE,
    min_density: float = 0.0,
) -> float:
    """The noise gain at which the mode's liveliness falls to `target`, by bisection.

    Every gain uses the same individuals: common random numbers make the curve smooth.
    """
    low, high = (math.log(edge * unit) for edge in span)
    options = {"causal_mode": causal_mode, "individual": list(range(len(batch["input_ids"])))}
    for _ in range(NOISE_STEPS):
        middle = (low + high) / 2
        if liveliness(model, batch, min_density, noise_gain=math.exp(middle), **options) > target:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def gain_unit(model: CausalModel, texts: Sequence[Tensor]) -> float:
    """The gain at which the typical noise of a score is as large as the scores' own spread."""
    spread = sample_scores(model, texts).std(-1).mean()
    scale = model.abduct(model.model(texts[0].reshape(1, -1)).last_hidden_state).scale
    return float(spread / (scale.mean() * row_norms(model.lm_head.weight).mean()))


def liveliness(
    model: CausalModel, batch: dict[str, Tensor], min_density: float = 0.0, **options: Any
) -> float:
    """Mean log-probability per generated token under softmax(loc_S)."""
    recorder = LogProbRecorder(batch["input_ids"].shape[1], end_ids(model))
    sequences = _generate(
        model,
        batch,
        logits_processor=LogitsProcessorList([recorder]),
        temperature=1.0,
        min_density=min_density,
        repetition_penalty=1.0,
        **options,
    )
    total, count = recorder.per_row(sequences)
    return float(total.sum() / count.sum())


def own_samples(model: CausalModel) -> list[Tensor]:
    """Texts for a model without a tokenizer: its own samples, from random prompts."""
    batch = pad_left(random_prompts(model), model)
    return list(_generate(model, batch, causal_mode="compatible", do_sample=True))


def random_prompts(model: CausalModel) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (len(PROMPTS), 4), generator=generator)
    return list(ids.to(model.device))


def _generate(model: CausalModel, batch: dict[str, Tensor], **options: Any) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sequences: Tensor = model.generate(
            **batch, max_new_tokens=NEW_TOKENS, pad_token_id=_pad_id(model), **options
        )
    return sequences


def pad_left(prompts: Sequence[Tensor], model: CausalModel) -> dict[str, Tensor]:
    """One batch of prompts of different lengths."""
    length = max(len(ids) for ids in prompts)
    ids = torch.full((len(prompts), length), _pad_id(model), device=model.device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = prompt.to(ids)
        mask[row, length - len(prompt) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def _pad_id(model: CausalModel) -> int:
    pad = model.generation_config.pad_token_id
    return pad if pad is not None else min(end_ids(model), default=0)
