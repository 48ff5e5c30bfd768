"""Generation: a prompt -> tokens, one after the other, in one of the four modes.

    standard    argmax_k P_k, scale noise                what does this distribution of people do?
    sampling    location noise, then argmax_k P_k        the same after the person was moved
    causal      u = loc_U + T kappa scale_U t; argmax (W u - C)     what does this one person do?
    compatible  loc_S are logits                         what would Qwen do?

Which mode, which noise and which candidates: as in the torch side's `generate`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from causal_qwen.engine.heads import Cauchy, CausalHeads, ValueSpace
from causal_qwen.engine.qwen2 import Bools, Ints, KeyValueCache, Observer, Qwen2
from causal_qwen.engine.sampling import (
    NEVER,
    draw,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
)
from causal_qwen.engine.weights import Float32
from causal_qwen.individuals.individual import Individual, NoiseGains, resolve_individuals
from causal_qwen.options import MODES, NOISY_MODES, NORMALIZATIONS, check_choice

RANDOM_SEEDS = 2**62


@dataclass(frozen=True)
class Options:
    """One call's decision rule, everything resolved."""

    mode: str
    max_new_tokens: int = 50
    min_new_tokens: int = 0
    temperature: float = 1.0
    do_sample: bool = False  # by softmax, in "compatible" only
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None  # of softmax sampling
    individual: Any = None  # a seed, one per row, the noise e itself, or Individuals
    exogenous: Any = None  # who draws T kappa b eps beside the individual's own noise, in "causal"
    noise_gain: float = 1.0  # kappa, of shared noise
    fresh_noise_gain: float | None = None  # the same, of fresh noise; None is noise_gain
    fresh_noise: bool = False
    min_density: float = 0.0
    normalization: str = "softmax"
    value_field: str | None = None
    stops: tuple[int, ...] = ()
    pad: int = 0
    named: Mapping[str, Any] = field(default_factory=dict)  # what an Individual brings itself

    @classmethod
    def resolve(
        cls,
        saved: Mapping[str, Any],
        default_mode: str,
        has_heads: bool,
        mode: str | None = None,
        noise_gain: float | None = None,
        fresh_noise: bool | None = None,
        **given: Any,
    ) -> Options:
        """What was asked, before what generation_config.json says, before the defaults."""
        named = {name: given.get(name) for name in ("temperature", "min_density")}
        named["fresh_noise"] = fresh_noise
        for name in ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty"):
            if given.get(name) is None:
                given[name] = saved.get(name)
        for name in ("min_density", "individual", "exogenous", "normalization", "value_field"):
            if given.get(name) is None:
                given[name] = saved.get(name)
        asked_for_noise = given["individual"] is not None
        mode = _resolve_mode(mode, saved.get("causal_mode"), default_mode, has_heads, given)
        fresh = saved.get("fresh_noise") if fresh_noise is None else fresh_noise
        fresh = mode == "sampling" if fresh is None else bool(fresh)
        fresh_gain = saved.get("fresh_noise_gain") if noise_gain is None else noise_gain
        options = cls(
            mode=mode,
            noise_gain=saved.get("noise_gain", 1.0) if noise_gain is None else noise_gain,
            fresh_noise_gain=fresh_gain,
            fresh_noise=fresh,
            named=named,
            **{name: value for name, value in given.items() if value is not None},
        )
        options._check(asked_for_noise)
        return options

    def _check(self, asked_for_noise: bool) -> None:
        _at_least("max_new_tokens", self.max_new_tokens, 0)
        _at_least("temperature", self.temperature, 0)
        _at_least("noise_gain", self.noise_gain, 0)
        _at_least("min_density", self.min_density, 0, 1)
        if self.top_k is not None:
            _at_least("top_k", self.top_k, 0)
        if self.top_p is not None:
            _at_least("top_p", self.top_p, 0, 1)
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0.")
        if asked_for_noise and self.mode not in NOISY_MODES:
            raise ValueError(
                f"individual= has no part in mode={self.mode!r}; use 'causal' or 'sampling'."
            )
        if self.exogenous is not None and self.mode != "causal":
            raise ValueError(f"exogenous= belongs to mode='causal', not to {self.mode!r}.")
        check_choice("normalization", self.normalization, NORMALIZATIONS)
        if self.normalization == "ovr" and self.mode != "compatible":
            raise ValueError(f"normalization='ovr' belongs to 'compatible', not to {self.mode!r}.")


def _resolve_mode(
    mode: str | None,
    saved: str | None,
    default: str,
    has_heads: bool,
    given: Mapping[str, Any],
) -> str:
    explicit = mode
    mode = mode or saved or default
    check_choice("mode", mode, MODES)
    if not has_heads:
        if explicit not in (None, "compatible"):
            raise ValueError(
                f"mode={explicit!r} needs causal heads, and this checkpoint is plain Qwen2: make "
                "one with `causal-qwen convert`, or use 'compatible'."
            )
        return "compatible"
    if mode == "standard" and given.get("do_sample"):
        if explicit == "standard":
            raise ValueError(
                "mode='standard' is deterministic and contradicts do_sample=True; use 'sampling'."
            )
        return "sampling"
    return mode


def _at_least(name: str, value: Any, least: float, most: float = math.inf) -> None:
    is_number = isinstance(value, numbers.Real) and math.isfinite(value)
    if not is_number or not least <= value <= most:
        wanted = f"in [{least}, {most}]" if most < math.inf else f"of at least {least}"
        raise ValueError(f"{name}={value!r} must be a number {wanted}.")


@dataclass
class Moment:
    """One step of all rows: what was known, and what was chosen."""

    tokens: Ints  # (B,)
    values: NDArray[np.float64]  # (B,) the value of a chosen <NUM>, 0 elsewhere
    loc_scores: Float32  # (B, V) loc_S, before candidates were cut or noise moved anybody
    is_last: bool = False  # nothing follows
    u: Cauchy | None = None  # (B, C)
    y: NDArray[np.float64] | None = None  # (B,) the value, should the token have been a number


class Speaker:
    """Who speaks on every row: the noise of the noisy modes."""

    def __init__(self, options: Options, rows: int, size: int) -> None:
        self.gains = NoiseGains(options.noise_gain, options.fresh_noise_gain)
        self.people: list[Individual] = []  # one per row
        self.chance: list[Individual] | None = None  # one per row, of the exogenous noise
        self._shared: Float32 | None = None  # (B, C)
        if options.mode not in NOISY_MODES:
            return
        who = options.individual
        if who is None:
            who = np.random.default_rng().integers(RANDOM_SEEDS, size=rows).tolist()
        self.people = resolve_individuals(
            who,
            rows,
            1,
            size,
            fresh=options.fresh_noise,
            min_density=options.min_density,
            temperature=options.temperature,
            explicit=options.named,
        )
        if options.exogenous is not None:
            self.chance = resolve_individuals(options.exogenous, rows, 1, size, fresh=True)

    @property
    def has_noise(self) -> bool:
        return any(person.temperature > 0 for person in self.people)

    def noise(self, places: Ints) -> Float32:
        """T kappa t of every row at its last position `places` (B,). -> (B, C)"""
        if self._shared is not None:
            return self._shared
        sent = self.gains.noise(self.people, places.tolist()).astype(np.float32)
        if not any(person.is_fresh for person in self.people):
            self._shared = sent
        return sent

    def exogenous_noise(self, places: Ints) -> Float32 | None:
        """T kappa eps of every row. (B,) -> (B, C)"""
        if self.chance is None:
            return None
        return self.gains.exogenous(self.people, self.chance, places.tolist()).astype(np.float32)


class Generator:
    """One call: reads the prompt, then chooses and reads, token by token."""

    def __init__(
        self,
        model: Qwen2,
        heads: CausalHeads | None,
        fields: Mapping[str, Any],
        options: Options,
        ids: ArrayLike,
        values: ArrayLike,
        padding: Bools | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.model, self.heads, self.options, self.observe = model, heads, options, observe
        self.num_token_id: int | None = fields.get("num_token_id")
        self.space = ValueSpace.of(fields, options.value_field)
        self.ids: Ints = np.asarray(ids, np.int64)  # (B, T)
        self.values: NDArray[np.float64] = np.asarray(values, np.float64)
        room = model.config.context - self.ids.shape[1]
        if room < 0 or self.ids.shape[1] == 0:
            what = "has no token" if room >= 0 else f"has {self.ids.shape[1]} tokens"
            raise ValueError(
                f"The prompt {what}; this model reads 1 to {model.config.context}: "
                f"{'write a few words' if room >= 0 else 'shorten it'}."
            )
        self.steps = min(options.max_new_tokens, room)
        self.speaker = Speaker(options, len(self.ids), heads.size if heads else 0)
        seed = options.seed
        if seed is None:
            seed = int(np.random.default_rng().integers(RANDOM_SEEDS))
        self.seed = seed
        capacity = self.ids.shape[1] + self.steps
        self.cache = KeyValueCache(model.config, len(self.ids), capacity)
        if padding is not None and padding.any():
            self.cache.padding = np.zeros((len(self.ids), capacity), bool)
            self.cache.padding[:, : self.ids.shape[1]] = padding

    def __iter__(self) -> Iterator[Moment]:
        stops, new = np.asarray(self.options.stops, np.int64), self.ids
        is_done = np.zeros(len(self.ids), bool)
        for step in range(self.steps):
            z = self._read(new)  # (B, H)
            moment = self._choose(z, step)
            moment.tokens = np.where(is_done, self.options.pad, moment.tokens)
            moment.values = np.where(moment.tokens == self.num_token_id, moment.values, 0.0)
            new = moment.tokens[:, None]
            self.ids = np.concatenate((self.ids, new), axis=1)
            self.values = np.concatenate((self.values, moment.values[:, None]), axis=1)
            is_done = is_done | np.isin(moment.tokens, stops)
            moment.is_last = step + 1 == self.steps or bool(is_done.all())
            yield moment
            if moment.is_last:
                return

    def _read(self, new: Ints) -> Float32:
        """The model's state after `new` tokens (B, T), the last of the text. -> (B, H)"""
        x = self.model.embed(new)
        if self.heads is not None and self.num_token_id is not None:
            values = self.values[:, self.values.shape[1] - new.shape[1] :]
            x = self.heads.embed_values(x, values, new == self.num_token_id)
        return self.model.forward(x, self.cache, self.observe)[:, -1]

    def _choose(self, z: Float32, step: int) -> Moment:
        heads, options = self.heads, self.options
        if heads is None:
            loc_scores = self.model.logits(z)
            tokens = self._by_softmax(self._candidates(loc_scores, step), step)
            return Moment(tokens, np.zeros(len(z)), loc_scores)

        u = heads.abduct(z)
        y = heads.number(u).loc
        shift: Float32 | None = None
        if self.speaker.has_noise:
            regime = "location" if options.mode == "sampling" else "individual"
            places = self._places()
            noise, exogenous = self.speaker.noise(places), self.speaker.exogenous_noise(places)
            moved = heads.displacement(u, noise, regime, exogenous)
            loc_scores, shift = heads.score_pair(u.loc, moved)
            y = y + moved @ heads.value_weight
        else:
            loc_scores = heads.score(u.loc)
        scores = self._candidates(loc_scores, step)
        value = self.space.decode(y)
        if options.mode == "compatible":
            if options.normalization == "ovr":
                scores = np.where(scores == NEVER, NEVER, self._one_vs_rest(scores, u))
            tokens = self._by_softmax(scores, step)
        else:
            if not np.isfinite(u.scale).all():
                raise FloatingPointError("scale_U is not finite.")
            scores = scores if shift is None else scores + shift
            tokens = self._by_individual(scores, u)
        return Moment(tokens, value, loc_scores, u=u, y=value)

    def _places(self) -> Ints:
        """The position of the last token read, among the row's own tokens. -> (B,)"""
        if self.cache.padding is None:
            return np.full(len(self.ids), self.ids.shape[1] - 1)
        hidden = self.cache.padding[:, : self.ids.shape[1]].sum(axis=1)
        return self.ids.shape[1] - 1 - hidden

    def _candidates(self, scores: Float32, step: int) -> Float32:
        """Who may be chosen: the others' scores become -inf. (B, V)"""
        options = self.options
        if not np.isfinite(scores.max(-1)).all():  # a maximum hides no NaN
            raise FloatingPointError("The logits are not finite.")
        if options.repetition_penalty != 1:
            scores = penalize_repetition(scores, self.ids, options.repetition_penalty)
        if step < options.min_new_tokens and options.stops:
            scores = scores.copy()
            scores[:, list(options.stops)] = NEVER
        is_greedy = options.mode == "compatible" and not options.do_sample
        if is_greedy or options.normalization == "ovr":
            return scores
        return self._cut(scores)

    def _cut(self, scores: Float32) -> Float32:
        options = self.options
        if options.mode == "compatible" and options.temperature not in (0, 1):
            scores = scores / np.float32(options.temperature)
        if options.top_k:
            scores = keep_top_k(scores, options.top_k)
        if options.top_p is not None and options.top_p < 1:
            scores = keep_top_p(scores, options.top_p)
        return scores

    def _by_softmax(self, scores: Float32, step: int) -> Ints:
        """Greedy, or drawn. (B, V) -> (B,)"""
        options = self.options
        if not options.do_sample or options.temperature == 0:
            return scores.argmax(-1)
        if options.normalization == "ovr":
            scores = self._cut(scores)
        return np.array([draw(row, self.seed + i, step) for i, row in enumerate(scores)])

    def _by_individual(self, scores: Float32, u: Cauchy) -> Ints:
        """The choice of the causal modes. (B, V), U (B, C) -> (B,)"""
        heads = self.heads
        assert heads is not None
        if self.options.mode == "causal":
            margin = scores.astype(np.float64) - heads.threshold.astype(np.float64)
            return margin.argmax(-1)
        if self.options.mode == "standard":
            u = heads.widen(u)
        rows = zip(scores, u.scale, strict=True)
        return np.array([heads.choose(row, scale) for row, scale in rows])

    def _one_vs_rest(self, scores: Float32, u: Cauchy) -> Float32:
        """log(P_k / sum P). (B, V)"""
        heads = self.heads
        assert heads is not None
        scale = np.stack([heads.score_scale(row) for row in heads.widen(u).scale])
        chance = Cauchy(scores, scale).sf(heads.threshold)
        return np.log(chance / chance.sum(-1, keepdims=True)).astype(np.float32)
