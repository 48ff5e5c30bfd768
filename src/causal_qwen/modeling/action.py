"""Action: U -> S (a score for every token) and Y (a number), linear in U.

    loc_S   = W loc_U'
    scale_S = |W| scale_U' + |a| mean_c(scale_U')
    Y       ~ Cauchy(w.loc_U' + c, |w|.scale_U')

W is `lm_head.weight` itself. `b_noise` is the exogenous noise that turns U into U'; `a`, the
decision noise, is independent noise per token in proportion to the mean scale of U'.

Families that divide their logits by d divide S: loc_S, scale_S and noise alike, a included.
Families that cap their logits, g(x) = cap tanh(x / cap), cap the centre of S alone: S = g(W loc_U')
+ W (U' - loc_U'). So loc_S is the base model's logit, and noise still acts where g is flat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from causal_qwen.decoding.decision import SCALE_FLOOR
from causal_qwen.decoding.noise import UNoise
from causal_qwen.modeling.abduction import (
    Float32Module,
    float32_linear,
    keep_in_memory,
    whole,
)
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalConfig

EQUALITY_TOLERANCE = 5e-3  # relative differences of equalised scales that rounding can explain
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


class ActionHead(nn.Linear):
    """`lm_head`: W x (+ bias) for locations, |W| x for scales.

    |W| is taken inside `forward`, where sharded or offloaded weights are whole. The products are
    divided by `divisor`, and locations capped by `softcap`, where the base model does it.
    """

    divisor: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: CausalConfig) -> ActionHead:
        head = cls(config.latent_size, config.vocab_size, bias=config.head_bias)
        head.divisor, head.softcap = config.logit_divisor, config.logit_softcap
        return head

    def forward(
        self,
        input: Tensor,
        absolute: bool = False,
        paired: bool = False,
        function: Callable[[Tensor, Tensor | None], Any] | None = None,
        weight: Tensor | None = None,
    ) -> Any:
        """`absolute`: |W| x in float32. `paired`: W x without bias, fast for a few rows x.
        `function` is called with W and the bias, which are whole here. `weight` replaces W.
        """
        weight = self.weight if weight is None else weight
        if function is not None:
            return function(self._divided(weight), self.bias)
        if absolute:
            return self._divided(float32_linear(input, weight.abs().to(input.dtype)))
        if paired:
            return self._divided(self._product(input, weight))
        if self.divisor == 1.0:
            return capped(F.linear(input, weight, self.bias), self.softcap)
        scores = self._divided(F.linear(input, weight))
        if self.bias is not None:
            scores = scores + self.bias
        return capped(scores, self.softcap)

    def _product(self, input: Tensor, weight: Tensor) -> Tensor:
        """Of a few rows, which should cost the reading of W once. For two of them and V = 151,936,
        a CPU with AVX2 takes 16 ms as W X^T and 87 by `linear`, one with AVX-512 48 and 22."""
        is_float32 = input.device.type == "cpu" and input.dtype == torch.float32
        if is_float32 and not HAS_AVX512:
            return torch.mm(weight, input.T).T
        return F.linear(input, weight)

    def _divided(self, product: Tensor) -> Tensor:
        return product if self.divisor == 1.0 else product / self.divisor


def head_weight(head: nn.Module) -> Tensor:
    """W, with the low-rank change of an adapter (LoRA) around the head."""
    weight = whole(_without_adapter(head), "weight")
    if not hasattr(head, "lora_A"):
        return weight
    layer: Any = head
    if not layer.merged and not layer.disable_adapters:
        for name in layer.active_adapters:
            if name in layer.lora_A:
                weight = weight + layer.get_delta_weight(name).to(weight)
    return weight


def head_divisor(head: nn.Module) -> float:
    """What the products of a head are divided by, also of one with an adapter around it."""
    layer: Any = _without_adapter(head)
    return float(layer.divisor)


def _without_adapter(head: nn.Module) -> nn.Module:
    return head.get_base_layer() if hasattr(head, "lora_A") else head  # type: ignore[operator]


def apply_head(head: nn.Module, input: Tensor, **how: Any) -> Any:
    """Call a head of ours; with its whole W where an adapter is around it, because
    |W + B A| x is not |W| x + B A x. Dropout of the adapter is left out."""
    if not hasattr(head, "lora_A"):
        return head(input, **how)
    layer: Any = head
    return layer.get_base_layer()(input, weight=head_weight(head), **how)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """cap tanh(x / cap), in the base model's order of operations: bit for bit its logits."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


class ValueHead(Float32Module, nn.Linear):
    """The number head: one linear function of U, in float32."""

    def forward(
        self,
        input: Tensor,
        absolute: bool = False,
        moved: bool = False,
        weight: Tensor | None = None,
    ) -> Tensor:
        """w.x + c; `absolute`: |w|.x; `moved`: w.x, what a displacement x of U adds. `weight`
        replaces w."""
        weight = self.weight if weight is None else weight
        weight = weight.abs() if absolute else weight
        return float32_linear(input, weight, None if absolute or moved else self.bias)


class ActionNetwork(Float32Module):
    """U -> (S, Y), and the noise of the action."""

    def __init__(self, config: CausalConfig) -> None:
        super().__init__()
        f32 = torch.float32
        self.b_noise = nn.Parameter(
            torch.empty(config.latent_size, dtype=f32), requires_grad=config.b_noise_trainable
        )
        self.decision_noise = nn.Parameter(torch.empty(config.vocab_size, dtype=f32))
        self.value = ValueHead(config.latent_size, 1, dtype=f32)
        self.divisor = config.logit_divisor

    def widen(self, u: Cauchy) -> Cauchy:
        """Add exogenous noise to the scale; the location stays."""
        return Cauchy(u.loc, u.scale + whole(self, "b_noise").abs())

    def displacement(self, u: Cauchy, noise: UNoise) -> Tensor:
        """The shift of loc_U by noise: T kappa b eps ("location") or T kappa scale_U t, plus
        T kappa b eps if there is exogenous noise. (..., C)"""
        b = whole(self, "b_noise").abs()
        moved: Tensor = noise.values * (b if noise.regime == "location" else u.scale)
        return moved if noise.exogenous is None else moved + noise.exogenous * b

    def scaled_noise(self) -> Tensor:
        """a, divided as the logits are. -> (V,)"""
        noise = whole(self, "decision_noise")
        return noise if self.divisor == 1.0 else noise / self.divisor

    def score_scale(self, scale: Tensor, head: nn.Module) -> Tensor:
        """scale_S of every token. (..., C) -> (..., V)"""
        own = self.scaled_noise().abs() * scale.mean(-1, keepdim=True)
        scores: Tensor = apply_head(head, scale, absolute=True) + own
        return scores.clamp_min(SCALE_FLOOR)

    def number(self, u: Cauchy) -> Cauchy:
        """Y: the distribution of the value if the next token is a number. (..., C) -> (...)"""
        scale = apply_head(self.value, u.scale, absolute=True).clamp_min(SCALE_FLOOR)
        return Cauchy(apply_head(self.value, u.loc).squeeze(-1), scale.squeeze(-1))

    @torch.no_grad()
    def restore_equality(self, weight: Tensor) -> None:
        """Restore equal scales of all tokens after W was rounded to another dtype.

        a_k = max_j ||W_j||_1 - ||W_k||_1 is exact only for the weights it was computed from; in
        bfloat16 the sums differ by some 1e-4, enough to decide the exact ties of its logits.
        Noise that training has moved further than that does not change.
        """
        norms = row_norms(weight)
        total = norms + whole(self, "decision_noise").abs()
        if total.max() - total.min() <= EQUALITY_TOLERANCE * total.max():
            keep_in_memory(self)
            self.decision_noise.copy_(total.max() - norms)

    def forward(self, u: Cauchy, head: nn.Module) -> tuple[Cauchy, Cauchy]:
        u = self.widen(u)
        return Cauchy(apply_head(head, u.loc), self.score_scale(u.scale, head)), self.number(u)


def row_norms(weight: Tensor) -> Tensor:
    """||W_k||_1 in float64. (V, C) -> (V,)"""
    return torch.cat([part.abs().sum(-1, dtype=torch.float64) for part in weight.split(8192)])


def score_pair(
    loc: Tensor, shift: Tensor, head: nn.Module, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """(W loc + bias, capped; W shift) while reading W once. (B, C), (N, C) -> (B, V), (N, V)

    The shift is normalised before the half-precision product: Cauchy noise overflows fp16.
    """
    shift, size = _normalized(shift)
    stacked = torch.cat([loc, shift.to(loc.dtype)])  # (B + N, C)
    scores = apply_head(head, stacked, paired=True)
    loc_scores, shift_scores = scores[: len(loc)], scores[len(loc) :]
    if getattr(head, "bias", None) is not None:
        loc_scores = loc_scores + whole(_without_adapter(head), "bias")
    return capped(loc_scores, softcap), shift_scores.float() * size


def score_shift(shift: Tensor, head: nn.Module, dtype: torch.dtype) -> Tensor:
    """W shift alone, as in `score_pair`. (B, C) -> (B, V)"""
    shift, size = _normalized(shift)
    scores: Tensor = apply_head(head, shift.to(dtype), paired=True)
    return scores.float() * size


def _normalized(shift: Tensor) -> tuple[Tensor, Tensor]:
    """Each row divided by its largest coordinate, and that. (B, C) -> (B, C), (B, 1)"""
    shift = shift.float()
    size = shift.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return shift / size, size
