"""Models: the documents' networks as modules of their own, and their name for the whole model.

A network here is initialised from a bare config: decision noise 0, as in the documents. The
networks of a model are `model.abduction_network`, `action_network`, `ovr_classifier`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F
from transformers import initialization as init

from causal_qwen.generation.documented_calls import ActionView, ClassifierView
from causal_qwen.model import CausalQwenForCausalLM, CausalQwenOutput
from causal_qwen.modeling.abduction import AbductionNetwork as Abduction
from causal_qwen.modeling.action import ActionHead
from causal_qwen.modeling.action import ActionNetwork as Action
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.modeling.thresholds import Decision

__all__ = [
    "AbductionNetwork",
    "ActionNetwork",
    "CauchyMath",
    "CausalMVPOutput",
    "CausalQwen2Config",
    "CausalQwenMVPForCausalLM",
    "OvRClassifier",
]

CausalQwenMVPForCausalLM = CausalQwenForCausalLM
CausalMVPOutput = CausalQwenOutput


class CauchyMath:
    """The two halves of `causal_qwen.modeling.cauchy.Cauchy.affine`."""

    @staticmethod
    def cauchy_linear_stable_loc(
        loc_input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """W loc + b. (..., C), (K, C) -> (..., K)"""
        return F.linear(loc_input, weight, bias)

    @staticmethod
    def cauchy_linear_stable_scale(scale_input: Tensor, weight: Tensor) -> Tensor:
        """|W| scale. (..., C), (K, C) -> (..., K)"""
        return F.linear(scale_input, weight.abs())


class AbductionNetwork(Abduction):
    """z (..., H) -> (loc_U, scale_U), each (..., C)."""

    def __init__(self, config: CausalQwen2Config) -> None:
        super().__init__(config)
        self.loc.reset(config.abduction_init_strategy, config.initializer_range)
        self.scale.reset(config.initial_gamma, config.scale_activation)


class ActionNetwork(ActionView):
    """(loc_U, scale_U) -> (loc_S, scale_S) through its own `lm_head`."""

    def __init__(self, config: CausalQwen2Config) -> None:
        network = Action(config)
        init.constant_(network.b_noise, config.initial_b_noise)
        init.zeros_(network.decision_noise)
        head = ActionHead(config.latent_size, config.vocab_size, bias=config.head_bias)
        init.normal_(head.weight, mean=0.0, std=config.initializer_range)
        if config.head_bias:
            init.zeros_(head.bias)
        super().__init__(network, head)


class OvRClassifier(ClassifierView):
    """(loc_S, scale_S) -> P_k = P(S_k > C_k)."""

    def __init__(self, config: CausalQwen2Config) -> None:
        decision = Decision(config)
        init.constant_(decision.threshold, config.initial_threshold)
        super().__init__(decision)
