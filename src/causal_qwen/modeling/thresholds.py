"""Thresholds: S -> P_k = P(S_k > C_k + h), one probability per token (one-vs-rest).

h is the bar of the context, one number for all tokens of a position:

    none          h = 0                   the documents'
    competition   h = logsumexp(loc_S)    S_k - h is centred on log softmax_k(loc_S)

The bar moves with the level of the scores, which differs by 7 and more between contexts. Hazard: h
is that of *all* tokens and of the unmoved individual; noise and logits processors must not move it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from causal_qwen.decoding.decision import choose
from causal_qwen.modeling.abduction import Float32Module, whole
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalConfig


class Decision(Float32Module):
    """The thresholds C_k + h, and the probabilities and choices that they imply."""

    word_edges: Tensor  # (V,)

    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.config = config
        self.threshold = nn.Parameter(
            torch.empty(config.vocab_size, dtype=torch.float32),
            requires_grad=config.threshold_trainable,
        )
        # bits of `text.segmentation`, from the tokenizer: candidates are cut by them. No parameter.
        self.register_buffer("word_edges", torch.zeros(config.vocab_size, dtype=torch.uint8))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """A state dict of an earlier version has no word edges: then they stay as they are."""
        state_dict.setdefault(f"{prefix}word_edges", self.word_edges)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def has_bar(self) -> bool:
        return self.config.threshold_context != "none"

    def bar(self, loc_S: Tensor) -> Tensor | None:
        """h, at least in float32; None without one. (..., V) -> (..., 1)"""
        if not self.has_bar:
            return None
        return loc_S.to(torch.promote_types(loc_S.dtype, torch.float32)).logsumexp(-1, keepdim=True)

    def level(self, loc_S: Tensor) -> Tensor:
        """C_k + h, what a score must exceed, to be shown. (..., V) -> (V,) or (..., V)"""
        bar = self.bar(loc_S)
        threshold = whole(self, "threshold")
        return threshold if bar is None else threshold + bar

    def forward(self, s: Cauchy) -> Tensor:
        """P_k of every token. (..., V) -> (..., V)"""
        return over_bar(s, self.bar(s.loc)).sf(self.threshold)

    def log_normalized(self, s: Cauchy, bar: Tensor | None = None) -> Tensor:
        """log(P_k / sum P): one-vs-rest probabilities as one distribution. (..., V)

        `bar` is given where `s` was changed since, by noise or for want of candidates.
        """
        bar = self.bar(s.loc) if bar is None else bar
        return over_bar(s, bar).log_sf(whole(self, "threshold")).log_softmax(-1)

    def choose(self, s: Cauchy) -> Tensor:
        """argmax_k P_k. (..., V) -> (...)"""
        chosen: Tensor = choose(s.loc, s.scale, whole(self, "threshold"), self.bar(s.loc))
        return chosen


def over_bar(s: Cauchy, bar: Tensor | None) -> Cauchy:
    """S - h: scores over the bar. (..., V), (..., 1) -> (..., V)"""
    return s if bar is None else Cauchy(s.loc - bar, s.scale)
