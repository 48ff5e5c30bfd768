"""Generation: z of the last position -> the next token, in one of the four modes.

    Chooser     z and loc_S of the last position -> the token and its value
    Generator   a chooser that also reads its tokens, with the backbone in NumPy

One text at a time; an engine that decodes several has a chooser for each. The settings, the noise
and the decision rules are those of `causal_qwen.decoding`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from causal_qwen.decoding.decision import one_vs_rest_log_probs
from causal_qwen.decoding.noise import RANDOM_SEEDS, DecodingNoise
from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.decoding.step import Position, Rules, choose_tokens, keep_min_p
from causal_qwen.numpy_engine.heads import Cauchy, CausalHeads, Float64, ValueSpace
from causal_qwen.numpy_engine.qwen2 import KeyValueCache, Qwen2
from causal_qwen.numpy_engine.sampling import (
    NEVER,
    draw,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    softmax,
)
from causal_qwen.numpy_engine.weights import Float32


@dataclass(frozen=True)
class Limits:
    """When a text ends."""

    max_new_tokens: int = 50
    min_new_tokens: int = 0
    stops: tuple[int, ...] = ()  # end-of-text ids


@dataclass
class DecodeStep:
    """The scores of a position, and the token that was chosen."""

    token: int
    value: float  # of a chosen <NUM>, 0 of another token
    loc_scores: Float32  # (V,) loc_S, before candidates were cut and noise was added
    u: Cauchy | None = None  # (C,)
    y: float = 0.0  # the value that <NUM> would have
    is_last: bool = False

    @cached_property
    def probabilities(self) -> Float64:
        """softmax(loc_S). (V,)"""
        return softmax(self.loc_scores)

    def likeliest(self, count: int) -> list[tuple[int, float]]:
        """The tokens with the largest softmax(loc_S), and their probabilities."""
        likely = self.probabilities
        count = min(count, len(likely))
        best = np.argpartition(-likely, count - 1)[:count] if count else np.zeros(0, int)
        return [(int(k), float(likely[k])) for k in best[np.argsort(-likely[best])]]


class Chooser:
    """The tokens of a text so far, and how the next one is chosen."""

    def __init__(
        self,
        heads: CausalHeads | None,
        fields: Mapping[str, Any],
        settings: DecodingSettings,
        limits: Limits,
        ids: Sequence[int],
        values: Sequence[float],
        seed: int | None = None,
    ) -> None:
        self.heads, self.settings, self.limits = heads, settings, limits
        self.num_token_id: int | None = fields.get("num_token_id")
        self.space = ValueSpace.of(fields, settings.value_field)
        self.ids, self.values = [*ids], [*values]
        self.noise = DecodingNoise(settings, 1, 1, heads.size if heads else 0, _seeds)
        self.seed = _seeds(1)[0] if seed is None else seed  # of softmax sampling
        self.chosen = 0  # new tokens

    def choose(self, z: Float32, loc_scores: Float32) -> DecodeStep:
        """The next token, which is appended. z (H,), loc_S (V,)"""
        try:
            step = self._choose(z, loc_scores)
        except FloatingPointError:
            raise ValueError("Logits or scales overflow float32; use another checkpoint.") from None
        self.ids.append(step.token)
        self.values.append(step.value)
        self.chosen += 1
        return step

    def _choose(self, z: Float32, loc_scores: Float32) -> DecodeStep:
        scores, heads = self._candidates(loc_scores), self.heads
        if heads is None:
            return DecodeStep(self._by_softmax(scores), 0.0, loc_scores)
        u = heads.abduct(z)
        y, moved = heads.number(u).loc, None
        if (noise := self.noise.at([len(self.ids) - 1])) is not None:
            moved = heads.displacement(u, noise)  # (1, C)
            y = y + moved[0] @ heads.value_weight
        if self.settings.mode == "compatible":
            if self.settings.normalization == "ovr":
                scores = self._cut(self._one_vs_rest(heads, scores, u, loc_scores))
            token = self._by_softmax(scores)
        else:
            token = self._by_rule(heads, scores, u, moved, loc_scores)
        is_number = token == self.num_token_id
        value = self.space.decode(y)
        return DecodeStep(token, float(value) * is_number, loc_scores, u, float(value))

    def _by_rule(
        self, heads: CausalHeads, scores: Float32, u: Cauchy, moved: Any, loc_scores: Float32
    ) -> int:
        if not np.isfinite(u.scale).all():
            raise FloatingPointError("scale_U is not finite.")
        mode, noise = self.settings.mode, self.noise
        bar = None if mode == "causal" else heads.bar(loc_scores[None])
        rules = Rules(mode, self.settings.min_p, noise.kept_words(), noise.avoided_repeats())
        at = Position(u.scale[None], moved, bar=bar)
        return int(choose_tokens(scores[None], at, rules, [self.ids], heads)[0])

    def _candidates(self, scores: Float32) -> Float32:
        """Scores with -inf for tokens that may not be chosen. (V,)"""
        settings, limits = self.settings, self.limits
        if not np.isfinite(scores.max()):  # max propagates NaN
            raise FloatingPointError("The logits are not finite.")
        if settings.repetition_penalty != 1:
            scores = penalize_repetition(scores, np.array(self.ids), settings.repetition_penalty)
        if self.chosen < limits.min_new_tokens and limits.stops:
            scores = scores.copy()
            scores[list(limits.stops)] = NEVER
        is_greedy = settings.mode == "compatible" and not settings.do_sample
        if is_greedy or settings.normalization == "ovr":
            return scores
        return self._cut(scores)

    def _cut(self, scores: Float32) -> Float32:
        """Temperature (in softmax sampling), then top-k, top-p and min-p, as in HF."""
        settings = self.settings
        if settings.mode == "compatible" and settings.temperature not in (0, 1):
            scores = scores / np.float32(settings.temperature)
        if settings.top_k:
            scores = keep_top_k(scores, settings.top_k)
        if settings.top_p is not None and settings.top_p < 1:
            scores = keep_top_p(scores, settings.top_p)
        if settings.min_p and settings.mode == "compatible":  # elsewhere `_by_rule` cuts
            scores = keep_min_p(scores, settings.min_p)
        return scores

    def _by_softmax(self, scores: Float32) -> int:
        """Greedy, or drawn."""
        if not self.settings.do_sample or self.settings.temperature == 0:
            return int(scores.argmax())
        return draw(scores, self.seed, self.chosen)

    def _one_vs_rest(
        self, heads: CausalHeads, scores: Float32, u: Cauchy, loc_scores: Float32
    ) -> Float32:
        """log(P_k / sum P); -inf stays -inf. (V,)"""
        scale = heads.score_scale(heads.widen(u).scale)
        log_p = one_vs_rest_log_probs(scores, scale, heads.threshold, heads.bar(loc_scores))
        return np.where(scores == NEVER, NEVER, log_p).astype(np.float32)


class Generator(Chooser):
    """One call: iterate over it to choose the next tokens."""

    def __init__(
        self,
        model: Qwen2,
        heads: CausalHeads | None,
        fields: Mapping[str, Any],
        settings: DecodingSettings,
        limits: Limits,
        *prompt: Any,
    ) -> None:
        super().__init__(heads, fields, settings, limits, *prompt)
        self.model, ids = model, self.ids
        room = model.config.context - len(ids)
        if room < 0 or not len(ids):
            raise ValueError(
                f"The prompt has {len(ids)} tokens; this model reads 1 to {model.config.context}."
            )
        self.steps = min(limits.max_new_tokens, room)
        self.cache = KeyValueCache(model.config, capacity=len(ids) + self.steps)

    def __iter__(self) -> Iterator[DecodeStep]:
        new = len(self.ids)
        while self.chosen < self.steps:
            with self.model.limit_blas(1):
                z = self.read(new)
                step = self.choose(z, self.score(z))
            new = 1
            step.is_last = self.chosen == self.steps or step.token in self.limits.stops
            yield step
            if step.is_last:
                return

    def read(self, new: int) -> Float32:
        """The model's state after the last `new` tokens of the text. -> (H,)"""
        ids, values = np.array([self.ids[-new:]]), np.array([self.values[-new:]])
        x = self.model.embed(ids)
        if self.heads is not None and self.num_token_id is not None:
            x = self.heads.embed_values(x, values, ids == self.num_token_id)
        return self.model.forward(x, self.cache)[0, -1]

    def score(self, z: Float32) -> Float32:
        """loc_S. (H,) -> (V,)"""
        return self.model.logits(z) if self.heads is None else self.heads.score(self.heads.loc_u(z))


def _seeds(rows: int) -> list[int]:
    seeds: list[int] = np.random.default_rng().integers(RANDOM_SEEDS, size=rows).tolist()
    return seeds
