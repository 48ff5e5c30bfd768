"""Model: vLLM's Qwen2 with an individual U before the scores.

    z -> U (abduction) -> loc_S = W loc_U, which is what vLLM calls logits

The layers up to z are vLLM's, the heads those of `causal_qwen.modeling`. With tensor parallelism
every device gets a copy of the whole W, whose rows the choice reads, when the weights are loaded:
before vLLM takes the rest of the memory for its cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from causal_qwen.modeling.abduction import AbductionNetwork
from causal_qwen.modeling.action import ActionHead, ActionNetwork
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.thresholds import Decision
from causal_qwen.options import WORD_EDGES

UNREAD = "model.value_direction"  # where values enter, which vLLM's requests do not carry
BIAS = "lm_head.bias"  # a tied head of vLLM has none

_loaded: weakref.WeakValueDictionary[str, CausalQwenForCausalLM] = weakref.WeakValueDictionary()


class CausalQwenForCausalLM(Qwen2ForCausalLM):
    """Qwen2 of vLLM; `compute_logits` keeps U, and the level of the scores, of its last rows."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.config
        if config.latent_size != config.hidden_size:  # then it is not tied
            self.lm_head = ParallelLMHead(config.vocab_size, config.latent_size, prefix="lm_head")
        self.score_bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.head_bias else None
        self.abduction = AbductionNetwork(config)
        self.action = ActionNetwork(config)
        self.decision = Decision(config)
        self.u: Cauchy | None = None  # of the rows of the last call, (B, C)
        self.bar: Tensor | None = None  # h there, (B, 1), if a row needs it
        self.needs_bar = False  # the processor, which knows the rows of a step before it, says so
        self._law: Any = None
        _loaded[vllm_config.instance_id] = self

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """loc_S of every row. z (B, H) -> (B, V)"""
        u = self.abduction(hidden_states)
        scores: Tensor | None = self.logits_processor(self.lm_head, u.loc)
        if scores is not None and self.score_bias is not None:
            scores = scores + self.score_bias
        self.u, self.bar = u, None
        if scores is not None and self.needs_bar:
            self.bar = self.decision.bar(scores)  # of the untouched scores
        return scores

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        renamed = {BIAS: "score_bias"}
        loaded: set[str] = super().load_weights(
            (renamed.get(name, name), tensor) for name, tensor in self._parameters_of(weights)
        )
        self._law = self._make_law() if self.lm_head.tp_size > 1 else None
        return loaded

    def _parameters_of(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights that vLLM loads; it knows parameters, and the word edges are a buffer."""
        for name, tensor in weights:
            if name == WORD_EDGES:
                self.decision.word_edges.copy_(tensor)
            elif name != UNREAD:
                yield name, tensor

    @property
    def law(self) -> Any:
        """The parts that decide, as `DecisionProcessor` needs them: W without vLLM's padding."""
        if self._law is None:
            self._law = self._make_law()
        return self._law

    def _make_law(self) -> Any:
        config, weight = self.config, self.lm_head.weight.detach()
        if self.lm_head.tp_size > 1:
            weight = tensor_model_parallel_all_gather(weight, dim=0)
        head = ActionHead(config.latent_size, config.vocab_size, bias=False, device="meta")
        head.weight = nn.Parameter(weight[: config.vocab_size], requires_grad=False)
        if weight.dtype != torch.float32:  # W was rounded
            self.action.restore_equality(head.weight)
        return SimpleNamespace(
            config=config,
            lm_head=head,
            action=self.action,
            decision=self.decision,
            groups=weakref.WeakValueDictionary(),  # of rows, by their rule
        )


def loaded_model(vllm_config: Any) -> CausalQwenForCausalLM:
    """The model of this process that was made with a configuration of vLLM."""
    return _loaded[vllm_config.instance_id]
