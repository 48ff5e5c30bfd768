"""Protocols: the interface of a causal model and its processor that other rooms use.

`CausalQwenForCausalLM` and `CausalQwenProcessor` satisfy them; so does a wrapped or adapted model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from causal_qwen.decoding.noise import DecodingNoise, UNoise
from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.modeling.abduction import AbductionNetwork
from causal_qwen.modeling.action import ActionHead, ActionNetwork
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalConfig
from causal_qwen.modeling.thresholds import Decision


class CausalModel(Protocol):
    """The chain: backbone, abduction, action, decision, and Hugging Face's `generate`."""

    config: CausalConfig
    base_class: Any  # the plain class of its family
    generation_config: Any
    model: Any  # the backbone
    lm_head: ActionHead
    abduction: AbductionNetwork
    action: ActionNetwork
    decision: Decision
    calibration: Any  # results of conversion, or None
    training: bool
    name_or_path: str

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...  # what is left of `nn.Module` and Hugging Face's
    def resolve_settings(self, *args: Any, **call: Any) -> DecodingSettings: ...
    def decoding_noise(
        self, settings: DecodingSettings, prompts: int = 1, copies: int = 1
    ) -> DecodingNoise: ...
    def abduct(self, hidden_states: Tensor) -> Cauchy: ...
    def act(self, u: Cauchy) -> tuple[Cauchy, Cauchy]: ...
    def displace(self, u: Cauchy, noise: UNoise) -> tuple[Tensor, Tensor]: ...
    def score_moved(self, u: Cauchy, shift: Tensor) -> tuple[Tensor, Tensor]: ...
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...


class Processor(Protocol):
    """Text <-> ids and values."""

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
