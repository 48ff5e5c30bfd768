"""Shares: how many of many individuals choose each token next.

    share_k = P_t(k = argmax over the candidates of loc_S + T kappa W (scale_U t))

They sum to 1, and need one forward pass for any number of individuals: a product of the rows of W
of the candidates with their noise. The share of some seeds is the frequency of their choices in
`causal` mode. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from causal_qwen.decoding.noise import DecodingNoise, UNoise
from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.decoding.step import Rules, candidate_tokens, choose_for_many
from causal_qwen.engines.engine import Engine, Tokens, View
from causal_qwen.individuals import Individual, parse_individual
from causal_qwen.numpy_engine.sampling import softmax

Who = int | str | Individual

Array = NDArray[Any]


class People:
    """Individuals and their noise, which is drawn once where none has chance."""

    def __init__(
        self,
        resolve: Callable[..., DecodingSettings],
        size: int,
        people: int | Sequence[Who],
        **options: Any,
    ) -> None:
        """`resolve` is that of an engine or a model, `size` its C."""
        given = range(people) if isinstance(people, int) else people
        if not len(given):
            raise ValueError("There is nobody to ask; name at least one individual.")
        self.names = [_name_of(one) for one in given]
        who = [parse_individual(one) if isinstance(one, str) else one for one in given]
        self.settings = resolve(causal_mode="causal", individual=who, **options)
        if unused := [n for n in ("top_k", "top_p") if options.get(n) is not None]:
            raise ValueError(f"{unused[0]}= is not for shares; cut candidates by min_p.")
        self._noise = DecodingNoise(self.settings, len(who), 1, size, no_draws)
        self._kept: UNoise | None = None

    def __len__(self) -> int:
        return len(self.names)

    def noise(self, position: int) -> UNoise:
        """What moves every individual at a position. -> (N, C)"""
        if self._kept is not None:
            return self._kept
        everyone = self._noise.individuals
        found = self._noise.at([position] * len(everyone))
        if found is None:
            found = UNoise(np.zeros((len(everyone), everyone[0].size)))
        own, chance = (
            None if part is None else part.astype(np.float32)
            for part in (found.values, found.exogenous)
        )
        noise = UNoise(own, found.regime, chance)
        if chance is None and not any(one.is_fresh for one in everyone):
            self._kept = noise
        return noise

    def rules(self) -> Rules:
        """Of the first, as of all."""
        words, lengths = self._noise.kept_words()[:1], self._noise.avoided_repeats()[:1]
        return Rules("causal", self.settings.min_p, words, lengths)

    def choose(self, view: View, prompt: Tokens, tokens: Any = None) -> Array:
        """The token of everybody, among the candidates or some tokens. -> (N,)"""
        if tokens is None:
            tokens = candidate_tokens(view.scores, self.rules(), prompt.ids, view.law)
        shifts, _ = view.move(self.noise(len(prompt.ids) - 1))
        return np.asarray(choose_for_many(view.scores, shifts, tokens, view.law))

    def values(self, view: View, prompt: Tokens) -> Array:
        """The number of everybody, should the next token be <NUM>. -> (N,)"""
        return np.asarray(view.move(self.noise(len(prompt.ids) - 1))[1], np.float64)


class Share(NamedTuple):
    """A token, the share of individuals that choose it, and its standard error."""

    token: str
    share: float
    error: float
    softmax: float
    id: int


@dataclass(frozen=True)
class Shares:
    """The next token of `n` individuals, the most frequent first."""

    prompt: str
    n: int
    tokens: list[Share]

    def __getitem__(self, token: str) -> float:
        """The share of a token; 0 for one that nobody chooses."""
        return sum(one.share for one in self.tokens if one.token == token)

    def to_dict(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "n": self.n, "tokens": [t._asdict() for t in self.tokens]}

    def __str__(self) -> str:
        lines = [f"{'token':<20}{'share':>8}{'±':>8}{'softmax':>10}"]
        lines += [
            f"{one.token!r:<20}{one.share:>8.3f}{one.error:>8.3f}{one.softmax:>10.3f}"
            for one in self.tokens
        ]
        return "\n".join([*lines, f"of {self.n} individuals"])


def count_shares(engine: Engine, tokens: Tokens, prompt: str, people: People) -> Shares:
    """What everybody would say next."""
    view, n = engine.look(tokens), len(people)
    ids, counts = np.unique(people.choose(view, tokens), return_counts=True)
    likely = softmax_of(view)
    found = [
        Share(engine.show(k), p, math.sqrt(p * (1 - p) / n), float(likely[k]), k)
        for k, p in zip(ids.tolist(), (counts / n).tolist(), strict=True)
    ]
    return Shares(prompt, n, sorted(found, key=lambda one: -one.share))


def softmax_of(view: View) -> Array:
    """(V,)"""
    return softmax(np.asarray(view.scores))


def _name_of(who: Who) -> int | str:
    if isinstance(who, Individual):
        return who.name or (repr(who) if who.seed is None else who.seed)
    return who


def no_draws(rows: int) -> list[int]:
    raise AssertionError("everybody is named")
