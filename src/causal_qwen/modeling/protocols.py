"""Protocols: the interface of a causal model and its processor that other rooms use.

`CausalQwenForCausalLM` and `CausalQwenProcessor` satisfy them; so does a wrapped or adapted model.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from causal_qwen.decoding.noise import DecodingNoise
from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.modeling.abduction import AbductionNetwork
from causal_qwen.modeling.action import ActionHead, ActionNetwork
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalConfig
from causal_qwen.modeling.thresholds import Decision


class CausalModel(Protocol):
    """The chain: backbone, abduction, action, decision; and what Hugging Face's models have."""

    config: CausalConfig
    generation_config: Any
    model: Any  # the backbone
    lm_head: ActionHead
    abduction: AbductionNetwork
    action: ActionNetwork
    decision: Decision
    training: bool
    name_or_path: str

    @property
    def device(self) -> torch.device: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...
    def abduct(self, hidden_states: Tensor) -> Cauchy: ...
    def act(self, u: Cauchy) -> tuple[Cauchy, Cauchy]: ...
    def resolve_settings(self, *args: Any, **call: Any) -> DecodingSettings: ...
    def decoding_noise(
        self, settings: DecodingSettings, prompts: int = 1, copies: int = 1
    ) -> DecodingNoise: ...


class Processor(Protocol):
    """Text <-> ids and values; and what Hugging Face's processors have."""

    tokenizer: Any
    num_token_id: int
    encode_numbers: str
    chat_template: Any

    def __call__(self, text: Any = None, **kwargs: Any) -> Any: ...
    def decode(self, ids: Any, values: Any = None, **kwargs: Any) -> str: ...
    def ask(self, text: str) -> str: ...
    def check(self, config: Any) -> None: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...
    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> Any: ...
