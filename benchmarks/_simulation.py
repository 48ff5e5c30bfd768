"""Simulation: the causal chain trained on random features, against known true parameters.

The backbone is replaced by features z ~ N(0, I), and the data come from a model of the same kind:

    u = z + gamma t                      an individual, t standard Cauchy
    token = argmax_k W*_k.u              among V tokens, one of which is <NUM>
    value = w*.u' + c*                   where the token is <NUM>, u' a second individual

so that the value is Cauchy(w*.z + c*, |w*|_1 gamma), given z (with u' = u it would depend on
the choice of the token). Training sees z, tokens and values only; classification, gate and
regression have to recover the parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from causal_qwen.model import CausalInitMixin
from causal_qwen.modeling.abduction import AbductionNetwork
from causal_qwen.modeling.action import ActionHead, ActionNetwork
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.modeling.loss import causal_loss
from causal_qwen.modeling.thresholds import Decision

SIZE, TOKENS, NUMBER = 12, 16, 0
GAMMA, CENTER = 0.05, 3.0
BATCH, STEPS, RATE = 512, 1500, 0.02


class GroundTruth:
    """The true parameters, and data drawn from them."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.weight = torch.randn(TOKENS, SIZE, generator=generator)  # W*
        self.weight[NUMBER] *= 2.0  # numbers are frequent
        self.value = torch.randn(SIZE, generator=generator)  # w*

    def individuals(self, z: Tensor) -> Tensor:
        return Cauchy(z, torch.full_like(z, GAMMA)).sample(self.generator)

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features (N, C), tokens (N,) and values (N,)."""
        z = torch.randn(count, SIZE, generator=self.generator)
        u, other = self.individuals(z), self.individuals(z)
        return z, (u @ self.weight.T).argmax(-1), other @ self.value + CENTER

    def number_probability(self, z: Tensor, samples: int = 400) -> float:
        """The true mean of P(<NUM> | z), by Monte Carlo over individuals."""
        u = self.individuals(z.expand(samples, *z.shape))
        return _mean((u @ self.weight.T).argmax(-1) == NUMBER)


class CausalChain(CausalInitMixin, torch.nn.Module):
    """The chain behind the backbone: abduction, action, decision."""

    def __init__(self) -> None:
        super().__init__()
        self.config = CausalQwen2Config(
            vocab_size=TOKENS,
            hidden_size=SIZE,
            num_attention_heads=1,
            num_key_value_heads=1,
            num_token_id=NUMBER,
            value_space="linear",
            compat_loss_weight=1.0,
            gate_alpha=0.1,
            gamma_init=0.3,
        )
        self.abduction, self.action = AbductionNetwork(self.config), ActionNetwork(self.config)
        self.head, self.decision = ActionHead(SIZE, TOKENS, bias=False), Decision(self.config)
        parts = (self.abduction.loc, self.abduction.scale, self.action.value)
        for module in (*parts, self.action, self.decision):
            self._init_weights(module)
        torch.nn.init.normal_(self.head.weight, std=0.1)
        self.abduction.loc.requires_grad_(False)  # otherwise w and W_loc are not identifiable

    def loss(self, z: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
        return causal_loss(
            self.abduction(z.unsqueeze(0)),
            tokens.unsqueeze(0),
            action=self.action,
            head=self.head,
            decision=self.decision,
            config=self.config,
            targets=values.unsqueeze(0).double(),
        ).total


@dataclass(frozen=True)
class Finding:
    """A true quantity and its value after training."""

    name: str
    true: float
    found: float
    tolerance: float

    @property
    def off(self) -> float:
        return self.found - self.true

    @property
    def is_found(self) -> bool:
        return abs(self.off) <= self.tolerance

    @property
    def allowed(self) -> str:
        return f"±{self.tolerance:g}"

    @property
    def verdict(self) -> str:
        """A quarter of the tolerance is as good as found; the rest is only tolerated."""
        if not self.is_found:
            return "OUTSIDE"
        return "found" if abs(self.off) <= self.tolerance / 4 else "within tolerance"


def simulate(
    steps: int = STEPS, seed: int = 0, progress: Callable[[int, float], None] = lambda *_: None
) -> list[Finding]:
    """Train on simulated data, and compare with the true parameters."""
    truth = GroundTruth(torch.Generator().manual_seed(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CausalChain()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=RATE / 100)
    for step in range(steps):
        loss = model.loss(*truth.draw(BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress(step + 1, loss.item())
    return compare(model, truth)


@torch.no_grad()
def compare(model: CausalChain, truth: GroundTruth) -> list[Finding]:
    z, tokens, values = truth.draw(20_000)
    s, y = model.action(model.abduction(z), model.head)
    chosen = model.decision.choose(s)
    best = (z @ truth.weight.T).argmax(-1)  # the choice of most individuals with these features
    is_number = tokens == NUMBER
    inside = (y.cdf(values.to(y.loc)) - 0.5).abs() <= 0.45
    p_number = model.decision(s)[:, NUMBER]
    certainty = truth.number_probability(z[is_number][:500])
    scale = GAMMA * float(truth.value.abs().sum())
    value = model.action.value
    weights = zip(truth.value.tolist(), value.weight[0].tolist(), strict=True)
    return [
        Finding("top-1 accuracy (optimum)", _mean(best == tokens), _mean(chosen == tokens), 0.08),
        Finding("share of numbers", _mean(is_number), _mean(p_number), 0.03),
        Finding("P(<NUM>) at numbers", certainty, _mean(p_number[is_number]), 0.1),
        Finding("value: constant c", CENTER, value.bias.item(), 0.1),
        Finding("value: scale |w| gamma", scale, float(y.scale.median()), 0.1),
        Finding("value: coverage of 90% intervals", 0.9, _mean(inside[is_number]), 0.03),
        *(Finding(f"value: w[{i}]", *pair, 0.1) for i, pair in enumerate(weights)),
    ]


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def summary(findings: Sequence[Finding]) -> str:
    """How many were found, how many are only tolerated, and which is the farthest off."""
    count = Counter(one.verdict for one in findings)
    worst = max(findings, key=lambda one: abs(one.off) / one.tolerance)
    return (
        f"{count['found']} of {len(findings)} found, {count['within tolerance']} within tolerance, "
        f"{count['OUTSIDE']} outside. Farthest: {worst.name}, off by {worst.off:+.3f} with "
        f"{worst.allowed} allowed."
    )
