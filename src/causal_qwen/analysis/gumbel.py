"""Gumbel: the baseline. The same questions asked of softmax sampling by the Gumbel-max trick.

    token = argmax_k (loc_S,k / T + g_k),     g_k = -log(-log e_k),  e uniform in (0, 1)

is a draw from softmax(loc_S / T), and the noise g, one number per (position, token), can be kept
and used again in another world. Given an observed token, its noise is drawn in hindsight, from
the top down: first the maximum, then everything else below it. Here a speaker has V numbers per
position and no law; an `Individual` has C numbers and one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation import LogitsProcessor, LogitsProcessorList

from causal_qwen.analysis.token_sequence import TokenSequence, observe
from causal_qwen.individuals.noise import Noise, draw_noise
from causal_qwen.modeling.protocols import CausalModel


@dataclass(frozen=True, eq=False)
class GumbelIndividual:
    """The Gumbel noise of a speaker: at every position its own, or (`fresh=False`) one for all.

    `known` (N, V) is noise that was found in hindsight, for the first N positions from `offset`
    on (NaN where nothing was observed); the rest is drawn from the seed.
    """

    seed: int
    size: int  # V
    fresh: bool = True
    temperature: float = 1.0
    offset: int = 0
    known: Noise | None = field(default=None, repr=False)

    @classmethod
    def draw(
        cls, model: CausalModel, *, seed: int, fresh: bool = True, temperature: float = 1.0
    ) -> GumbelIndividual:
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature!r} must be a number above 0.")
        return cls(seed, model.config.vocab_size, fresh, temperature)

    def at(self, position: int) -> Noise:
        """g at a position. -> (V,)"""
        place = position - self.offset if self.fresh else 0
        if self.known is not None and place < len(self.known):
            known: Noise = self.known[place]
            if not np.isnan(known[0]):
                return known
        return -np.log(-np.log(draw_noise(self.seed, self.size, place)))

    def shift(self, by: int) -> GumbelIndividual:
        """The same noise, `by` positions later."""
        return replace(self, offset=self.offset + by) if self.fresh else self


class GumbelProcessor(LogitsProcessor):
    """Adds every row's noise to its logits, so that the largest is the speaker's choice.

    `padding` is the number of padding tokens on the left of every row.
    """

    def __init__(self, people: Sequence[GumbelIndividual], padding: Sequence[int]) -> None:
        self.people = people
        self.padding = padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = input_ids.shape[1] - 1
        noise = np.stack(
            [one.at(last - pad) for one, pad in zip(self.people, self.padding, strict=True)]
        )
        heat = torch.tensor([[one.temperature] for one in self.people], dtype=torch.float64)
        return scores.double() / heat.to(scores.device) + torch.from_numpy(noise).to(scores.device)


def generate(
    model: CausalModel, people: Sequence[GumbelIndividual], attention_mask: Tensor, **options: Any
) -> Any:
    """`model.generate` with one Gumbel speaker per row; options, and processors, as there."""
    for one in people:
        if one.size != model.config.vocab_size:
            raise ValueError(
                f"A Gumbel speaker of {one.size} tokens cannot speak for a vocabulary of "
                f"{model.config.vocab_size}."
            )
    padding = (attention_mask == 0).sum(-1).tolist()
    others = options.pop("logits_processor", None) or []
    return model.generate(
        attention_mask=attention_mask,
        causal_mode="compatible",
        do_sample=False,
        logits_processor=LogitsProcessorList([*others, GumbelProcessor(people, padding)]),
        **options,
    )


def infer_gumbel(
    model: CausalModel,
    sequence: TokenSequence,
    start: int,
    n: int,
    seed: int = 0,
    temperature: float = 1.0,
) -> list[GumbelIndividual]:
    """`n` speakers, drawn from all that would have said the tokens from `start` on.

    Top down: the maximum of loc_k + g_k is Gumbel(logsumexp loc) whichever token has it; the
    others are Gumbels below it, -log(exp(-max) + exp(-loc_k - g)).
    """
    output = observe(model, sequence, start)
    logits = output.logits[0].double().cpu().numpy() / temperature  # (N, V)
    said = sequence.ids[start:].numpy()
    people = []
    for draw in range(n):
        rng = np.random.default_rng([seed, draw])
        free = rng.gumbel(size=logits.shape)
        top = rng.gumbel(size=len(said)) + np.logaddexp.reduce(logits, axis=-1)
        below = -np.logaddexp(-top[:, None], -(logits + free))
        below[np.arange(len(said)), said] = top
        known = np.full((start - 1 + len(said), logits.shape[1]), np.nan)
        known[start - 1 :] = below - logits
        people.append(GumbelIndividual(seed + draw, logits.shape[1], True, temperature, 0, known))
    return people
