"""Thresholds: S -> P_k = P(S_k > C_k), one probability per token (one-vs-rest).

The rules that choose a token by them are in `causal_qwen.decoding.decision`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from causal_qwen.decoding.decision import choose
from causal_qwen.modeling.abduction import Float32Module
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalConfig


class Decision(Float32Module):
    """The thresholds C_k, and the probabilities and choices that they imply."""

    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.threshold = nn.Parameter(
            torch.empty(config.vocab_size, dtype=torch.float32),
            requires_grad=config.threshold_trainable,
        )

    def forward(self, s: Cauchy) -> Tensor:
        """P_k of every token. (..., V) -> (..., V)"""
        return s.sf(self.threshold)

    def log_normalized(self, s: Cauchy) -> Tensor:
        """log(P_k / sum P): one-vs-rest probabilities as one distribution. (..., V)"""
        return s.log_sf(self.threshold).log_softmax(-1)

    def choose(self, s: Cauchy) -> Tensor:
        """argmax_k P_k. (..., V) -> (...)"""
        chosen: Tensor = choose(s.loc, s.scale, self.threshold)
        return chosen
