"""Abduction: z -> U. From the context, a distribution over individuals.

    loc_U = W_loc z + b_loc          scale_U = act(W_scale z + b_scale)

Initially W_loc = I, b_loc = 0, W_scale = 0 and act(b_scale) = gamma: U is centred on the base
model's features, with one scale everywhere.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalConfig

ABS_FLOOR = 1e-6


class Float32Module(nn.Module):
    """A module whose parameters are never narrowed below float32.

    `model.to(torch.bfloat16)` would round the decision noise by 0.4% and break the equality of
    scales that the promise "behaves as its base" needs. Wider dtypes and other devices apply.
    """

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        def move_without_narrowing(tensor: Tensor) -> Tensor:
            moved: Tensor = fn(tensor)
            if moved.is_floating_point() and moved.dtype.itemsize < 4:
                return tensor.to(moved.device)
            return moved

        return super()._apply(move_without_narrowing, recurse)  # type: ignore[no-untyped-call]


def whole(module: nn.Module, name: str) -> Tensor:
    """A tensor of `module`, also one that accelerate offloads, and loads for its `forward` alone.

    Every tensor that is read outside its module's `forward` is read by this function.
    """
    tensor: Tensor = getattr(module, name)
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is None or not tensor.is_meta:
        return tensor
    hook.pre_forward(module)
    try:
        tensor = getattr(module, name)
    finally:
        hook.post_forward(module, None)
    return tensor


def keep_in_memory(module: nn.Module) -> None:
    """End the offloading of the module's own parameters: a change would not reach the copy."""
    if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return
    from accelerate.hooks import remove_hook_from_module  # type: ignore[import-untyped]

    loaded = {name: whole(module, name) for name, _ in module.named_parameters(recurse=False)}
    remove_hook_from_module(module)
    for name, tensor in loaded.items():
        setattr(module, name, tensor)


def float32_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map in the weight's own precision, float32 or wider, also under autocast."""
    with torch.autocast(device_type=input.device.type, enabled=False):
        return F.linear(input.to(weight.dtype), weight, bias)


class LocationNetwork(nn.Linear):
    """loc_U, in the model's dtype: identity weights return z bit for bit."""

    def reset(self, strategy: str, std: float) -> None:
        if strategy == "identity":
            init.eye_(self.weight)
        elif strategy == "xavier":
            init.xavier_uniform_(self.weight)
        else:
            init.normal_(self.weight, mean=0.0, std=std)
        init.zeros_(self.bias)


class ScaleNetwork(Float32Module, nn.Linear):
    """scale_U before its activation, always in float32."""

    def forward(self, input: Tensor) -> Tensor:
        return float32_linear(input, self.weight, self.bias)

    @property
    def is_constant(self) -> bool:
        """The same for every z, as after a conversion."""
        return not bool(whole(self, "weight").any())

    def reset(self, gamma: float, activation: str) -> None:
        init.zeros_(self.weight)
        init.constant_(self.bias, inverse_activation(gamma, activation))


class AbductionNetwork(nn.Module):
    """z (..., H) -> U: Cauchy with loc and scale (..., C)."""

    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        self.activation = config.scale_activation
        self.loc = LocationNetwork(config.hidden_size, config.latent_size)
        self.scale = ScaleNetwork(config.hidden_size, config.latent_size, dtype=torch.float32)

    @property
    def loc_net(self) -> LocationNetwork:  # the documents' names
        return self.loc

    @property
    def scale_net(self) -> ScaleNetwork:
        return self.scale

    def forward(self, hidden_states: Tensor) -> Cauchy:
        return Cauchy(self.loc(hidden_states), activate(self.scale(hidden_states), self.activation))


def activate(raw: Tensor, activation: str) -> Tensor:
    if activation == "exp":
        return raw.exp()
    if activation == "softplus":
        return F.softplus(raw)
    return raw.abs() + ABS_FLOOR


def inverse_activation(gamma: float, activation: str) -> float:
    """The bias b_scale for which act(b_scale) = gamma."""
    if activation == "exp":
        return math.log(gamma)
    if activation == "softplus":
        return gamma + math.log(-math.expm1(-gamma))  # log(e^gamma - 1) without overflow
    return max(gamma - ABS_FLOOR, 0.0)
