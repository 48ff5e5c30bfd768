"""Gumbel: the baseline, softmax sampling by the Gumbel-max trick.

    token = argmax_k (loc_S,k / T + g_k),     g_k = -log(-log e_k),  e uniform in (0, 1)

is a draw from softmax(loc_S / T); the noise g, one number per (position, token), can be kept and
reused after an edit. A Gumbel individual has V numbers per position, an `Individual` C numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation import LogitsProcessor, LogitsProcessorList

from causal_qwen.generation.mixin import CUTS
from causal_qwen.individuals import Noise, draw_noise
from causal_qwen.modeling.protocols import CausalModel


@dataclass(frozen=True, eq=False)
class GumbelIndividual:
    """Gumbel noise of its own at every position, or (`fresh=False`) the same at all positions."""

    seed: int
    size: int  # V
    fresh: bool = True
    temperature: float = 1.0
    offset: int = 0

    @classmethod
    def draw(
        cls, model: CausalModel, *, seed: int, fresh: bool = True, temperature: float = 1.0
    ) -> GumbelIndividual:
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature!r} must be a number above 0.")
        return cls(seed, model.config.vocab_size, fresh, temperature)

    def at(self, position: int) -> Noise:
        """g at a position. -> (V,)"""
        index = position - self.offset if self.fresh else 0
        return -np.log(-np.log(draw_noise(self.seed, self.size, index)))

    def shift(self, by: int) -> GumbelIndividual:
        """The same noise, `by` positions later."""
        return replace(self, offset=self.offset + by) if self.fresh else self

    def generate(self, model: CausalModel, **options: Any) -> Any:
        """One text, as `counterfactual` asks for it."""
        return generate(model, [self], **options)


class GumbelProcessor(LogitsProcessor):
    """Adds every row's noise to its logits, so that their argmax is the individual's choice.

    `padding` is the number of padding tokens on the left of every row.
    """

    def __init__(self, individuals: Sequence[GumbelIndividual], padding: Sequence[int]) -> None:
        self.individuals, self.padding = individuals, padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = input_ids.shape[1] - 1
        rows = zip(self.individuals, self.padding, strict=True)
        noise = torch.from_numpy(np.stack([one.at(last - pad) for one, pad in rows]))
        temperature = torch.tensor(
            [[one.temperature] for one in self.individuals], dtype=torch.float64
        )
        return scores.double() / temperature.to(scores.device) + noise.to(scores.device)


def generate(
    model: CausalModel,
    individuals: Sequence[GumbelIndividual],
    attention_mask: Tensor,
    **options: Any,
) -> Any:
    """`model.generate` with one Gumbel individual per row; the options are the same.

    top_k, top_p, min_p and their kin restrict the candidates, as they do for an `Individual`.
    """
    size = model.config.vocab_size
    for one in individuals:
        if one.size != size:
            raise ValueError(
                f"The Gumbel individual has noise for {one.size} tokens and the model's vocabulary "
                f"is {size}; draw it with GumbelIndividual.draw(model, seed={one.seed})."
            )
    padding = (attention_mask == 0).sum(-1).tolist()
    others = options.pop("logits_processor", None) or []
    cuts = {"top_k": 0} | {name: options.pop(name) for name in CUTS if name in options}
    processors = [*others, *model.warpers(**cuts), GumbelProcessor(individuals, padding)]
    return model.generate(
        attention_mask=attention_mask,
        causal_mode="compatible",
        do_sample=False,
        logits_processor=LogitsProcessorList(processors),
        **options,
    )
