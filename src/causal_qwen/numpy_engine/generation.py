"""Generation: z of the last position -> the next token of every row, in one of the four modes.

    Chooser     z, and loc_S where the engine has computed it -> tokens and values
    Generator   a chooser that also reads its tokens, with the backbone in NumPy

The settings, the noise and the decision rules are those of `causal_qwen.decoding`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from causal_qwen.decoding.candidates import keep_min_p
from causal_qwen.decoding.decision import one_vs_rest_log_probs
from causal_qwen.decoding.noise import RANDOM_SEEDS, DecodingNoise
from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.decoding.step import Position, Rules, choose_tokens
from causal_qwen.numpy_engine.fast import Bools
from causal_qwen.numpy_engine.heads import Cauchy, CausalHeads, Float64, ValueSpace, warn_if_clamped
from causal_qwen.numpy_engine.qwen2 import Ints, KeyValueCache, Observer, Qwen2
from causal_qwen.numpy_engine.sampling import (
    NEVER,
    draw,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
)
from causal_qwen.numpy_engine.weights import Float32


@dataclass(frozen=True)
class Limits:
    """When a text ends."""

    max_new_tokens: int = 50
    min_new_tokens: int = 0
    stops: tuple[int, ...] = ()  # end-of-text ids
    pad: int = 0  # the id after a row's end

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 0:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 0.")


@dataclass
class DecodeStep:
    """One step of all rows: the scores and the chosen tokens."""

    tokens: Ints  # (B,)
    values: NDArray[np.float64]  # (B,) the value of a chosen <NUM>, 0 elsewhere
    loc_scores: Float32  # (B, V) loc_S, before candidates were cut and noise was added
    is_last: bool = False
    u: Cauchy | None = None  # (B, C)
    y: NDArray[np.float64] | None = None  # (B,) the value that <NUM> would have


@dataclass
class Scored:
    """The scores of the last position of every row."""

    loc_scores: Float32  # (B, V)
    shift_u: Float32 | None = None  # (B, C), what noise adds to loc_U
    u: Cauchy | None = None  # (B, C)
    values: Float64 | None = None  # (B,) the value that <NUM> would have


class Chooser:
    """The rows of one call: their tokens so far, and how the next ones are chosen."""

    def __init__(
        self,
        heads: CausalHeads | None,
        fields: Mapping[str, Any],
        settings: DecodingSettings,
        limits: Limits,
        ids: ArrayLike,
        values: ArrayLike,
        *,
        padding: ArrayLike = 0,
        seed: int | None = None,
    ) -> None:
        """`padding` tokens on the left of every row do not count."""
        self.heads, self.settings, self.limits = heads, settings, limits
        self.num_token_id: int | None = fields.get("num_token_id")
        self.space = ValueSpace.of(fields, settings.value_field)
        self.ids: Ints = np.asarray(ids, np.int64)  # (B, T)
        self.values: NDArray[np.float64] = np.asarray(values, np.float64)
        self.hidden = np.broadcast_to(padding, len(self.ids))  # (B,)
        self.noise = DecodingNoise(settings, len(self.ids), 1, heads.size if heads else 0, _seeds)
        self.seed = _seeds(1)[0] if seed is None else seed  # of softmax sampling
        self.is_done = np.zeros(len(self.ids), bool)
        self.chosen = 0  # new tokens of every row

    def choose(self, z: Float32, loc_scores: Float32) -> DecodeStep:
        """The next token of every row, which is appended. z (B, H), loc_S (B, V)"""
        try:
            step = self._choose(self._scored(z, loc_scores))
        except FloatingPointError:
            raise ValueError("Logits or scales overflow float32; use another checkpoint.") from None
        step.tokens = np.where(self.is_done, self.limits.pad, step.tokens)
        step.values = np.where(step.tokens == self.num_token_id, step.values, 0.0)
        warn_if_clamped(step.values)
        self.ids = np.concatenate((self.ids, step.tokens[:, None]), axis=1)
        self.values = np.concatenate((self.values, step.values[:, None]), axis=1)
        self.is_done = self.is_done | np.isin(step.tokens, np.asarray(self.limits.stops, np.int64))
        self.chosen += 1
        return step

    def _scored(self, z: Float32, loc_scores: Float32) -> Scored:
        heads = self.heads
        if heads is None:
            return Scored(loc_scores)
        u = heads.abduct(z)
        y = heads.number(u).loc
        noise = self.noise.at(self._positions().tolist())
        if noise is None:
            return Scored(loc_scores, u=u, values=self.space.decode(y))
        moved = heads.displacement(u, noise)
        return Scored(loc_scores, moved, u, self.space.decode(y + moved @ heads.value_weight))

    def _choose(self, scored: Scored) -> DecodeStep:
        heads, settings = self.heads, self.settings
        loc_scores, u = scored.loc_scores, scored.u
        scores = self._candidates(loc_scores)
        if heads is None or u is None or scored.values is None:
            tokens = self._by_softmax(scores)
            return DecodeStep(tokens, np.zeros(len(tokens)), loc_scores)
        if settings.mode == "compatible":
            if settings.normalization == "ovr":
                scores = self._cut(self._one_vs_rest(heads, scores, u, heads.bar(loc_scores)))
            tokens = self._by_softmax(scores)
        else:
            if not np.isfinite(u.scale).all():
                raise FloatingPointError("scale_U is not finite.")
            tokens = self._by_rule(heads, scores, scored, u)
        return DecodeStep(tokens, scored.values, loc_scores, u=u, y=scored.values)

    def _by_rule(self, heads: CausalHeads, scores: Float32, scored: Scored, u: Cauchy) -> Ints:
        """(B, V) -> (B,)"""
        mode, noise = self.settings.mode, self.noise
        bar = None if mode == "causal" else heads.bar(scored.loc_scores)
        at = Position(u.scale, scored.shift_u, bar=bar)
        rules = Rules(mode, self.settings.min_p, noise.kept_words(), noise.avoided_repeats())
        chosen: Ints = choose_tokens(scores, at, rules, self._texts(), heads)
        return chosen

    def _positions(self) -> Ints:
        """The position of the last token, among the row's tokens that are not padding. -> (B,)"""
        return self.ids.shape[1] - 1 - self.hidden

    def _texts(self) -> list[Ints]:
        """The tokens of every row that are not padding. -> (T,) each"""
        rows = zip(self.ids, self._positions(), strict=True)
        return [row[len(row) - 1 - position :] for row, position in rows]

    def _candidates(self, scores: Float32) -> Float32:
        """Scores with -inf for tokens that may not be chosen. (B, V)"""
        settings, limits = self.settings, self.limits
        if not np.isfinite(scores.max(-1)).all():  # max propagates NaN
            raise FloatingPointError("The logits are not finite.")
        if settings.repetition_penalty != 1:
            scores = penalize_repetition(scores, self.ids, settings.repetition_penalty)
        if self.chosen < limits.min_new_tokens and limits.stops:
            scores = scores.copy()
            scores[:, list(limits.stops)] = NEVER
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

    def _by_softmax(self, scores: Float32) -> Ints:
        """Greedy, or drawn. (B, V) -> (B,)"""
        if not self.settings.do_sample or self.settings.temperature == 0:
            return scores.argmax(-1)
        return np.array([draw(row, self.seed + i, self.chosen) for i, row in enumerate(scores)])

    def _one_vs_rest(
        self, heads: CausalHeads, scores: Float32, u: Cauchy, bar: Float64 | None
    ) -> Float32:
        """log(P_k / sum P); -inf stays -inf. (B, V)"""
        scale = heads.score_scales(heads.widen(u).scale)
        log_p = one_vs_rest_log_probs(scores, scale, heads.threshold, bar)
        return np.where(scores == NEVER, NEVER, log_p).astype(np.float32)


class Generator(Chooser):
    """One call: iterate over it to choose the next token of every row."""

    def __init__(
        self,
        model: Qwen2,
        heads: CausalHeads | None,
        fields: Mapping[str, Any],
        settings: DecodingSettings,
        limits: Limits,
        ids: ArrayLike,
        values: ArrayLike,
        *,
        padding: Bools | None = None,
        seed: int | None = None,
        observe: Observer | None = None,
    ) -> None:
        hidden = 0 if padding is None else padding.sum(axis=1)
        super().__init__(heads, fields, settings, limits, ids, values, padding=hidden, seed=seed)
        self.model, self.observe = model, observe
        rows, length = self.ids.shape
        room = model.config.context - length
        if room < 0 or length == 0:
            what = "has no token" if room >= 0 else f"has {length} tokens"
            raise ValueError(
                f"The prompt {what}; this model reads 1 to {model.config.context}: "
                f"{'write a few words' if room >= 0 else 'shorten it'}."
            )
        self.steps = min(limits.max_new_tokens, room)
        self.cache = KeyValueCache(model.config, rows, length + self.steps)
        if padding is not None and padding.any():
            self.cache.padding = np.zeros((rows, length + self.steps), bool)
            self.cache.padding[:, :length] = padding

    def __iter__(self) -> Iterator[DecodeStep]:
        new = self.ids
        while self.chosen < self.steps:
            with self.model.limit_blas(len(self.ids)):
                z = self._read(new)
                step = self.choose(z, self._score(z))
            new = step.tokens[:, None]
            step.is_last = self.chosen == self.steps or bool(self.is_done.all())
            yield step
            if step.is_last:
                return

    def _read(self, new: Ints) -> Float32:
        """The model's state after `new` tokens (B, T), the last of the text. -> (B, H)"""
        x = self.model.embed(new)
        if self.heads is not None and self.num_token_id is not None:
            values = self.values[:, self.values.shape[1] - new.shape[1] :]
            x = self.heads.embed_values(x, values, new == self.num_token_id)
        return self.model.forward(x, self.cache, self.observe)[:, -1]

    def _score(self, z: Float32) -> Float32:
        """loc_S. (B, H) -> (B, V)"""
        return self.model.logits(z) if self.heads is None else self.heads.score(self.heads.loc_u(z))


def _seeds(rows: int) -> list[int]:
    seeds: list[int] = np.random.default_rng().integers(RANDOM_SEEDS, size=rows).tolist()
    return seeds
