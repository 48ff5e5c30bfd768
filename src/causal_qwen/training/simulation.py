"""Simulation: the causal chain on random features, against a truth that is known.

The backbone is replaced by features z ~ N(0, I) and the world by a law of the model's own kind:

    u = z + gamma t                      an individual, t standard Cauchy
    token = argmax_k W*_k.u              among V tokens, one of which is <NUM>
    value = w*.u' + c*                   where the token is <NUM>, u' a second individual

so that the value is Cauchy(w*.z + c*, |w*|_1 gamma), given z (with u' = u it would depend on
having been chosen). Training sees z, tokens and values only. Classification, gate and regression
have to find the law again.
"""

from __future__ import annotations

from collections.abc import Callable
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


class World:
    """The law that is to be found."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.law = torch.randn(TOKENS, SIZE, generator=generator)
        self.law[NUMBER] *= 2.0  # numbers are common
        self.value = torch.randn(SIZE, generator=generator)

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features (N, C), tokens (N,) and values (N,)."""
        z = torch.randn(count, SIZE, generator=self.generator)
        world = Cauchy(z, torch.full_like(z, GAMMA))
        speaker, teller = world.sample(self.generator), world.sample(self.generator)
        return z, (speaker @ self.law.T).argmax(-1), teller @ self.value + CENTER


class Mind(CausalInitMixin, torch.nn.Module):
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
        self.abduction.loc.requires_grad_(False)  # or w and W_loc could share the value's law

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
    """One thing that training was to find: what is true, and what was found."""

    name: str
    true: float
    found: float
    tolerance: float

    @property
    def is_found(self) -> bool:
        return abs(self.found - self.true) <= self.tolerance


def simulate(
    steps: int = STEPS, seed: int = 0, progress: Callable[[int, float], None] = lambda *_: None
) -> list[Finding]:
    """Train on the world, and compare what was found with what is true."""
    generator = torch.Generator().manual_seed(seed)
    world = World(generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mind = Mind()
    learning = [p for p in mind.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=RATE / 100)
    for step in range(steps):
        loss = mind.loss(*world.draw(BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress(step + 1, loss.item())
    return compare(mind, world)


@torch.no_grad()
def compare(mind: Mind, world: World) -> list[Finding]:
    z, tokens, values = world.draw(20_000)
    s, y = mind.action(mind.abduction(z), mind.head)
    chosen = mind.decision.choose(s)
    best = (z @ world.law.T).argmax(-1)  # what most individuals with these features do
    is_number = tokens == NUMBER
    weight = mind.action.value.weight[0]
    inside = (y.cdf(values.to(y.loc)) - 0.5).abs() <= 0.45
    p_number = mind.decision(s)[:, NUMBER]
    return [
        Finding("top-1 accuracy (the best)", _mean(best == tokens), _mean(chosen == tokens), 0.08),
        Finding("share of numbers", _mean(is_number), _mean(p_number), 0.03),
        Finding("P(<NUM>) where a number stands", *_certainty(world, z, is_number, p_number), 0.1),
        Finding("value: constant c", CENTER, mind.action.value.bias.item(), 0.1),
        Finding("value: scale |w| gamma", *_scales(world, y), 0.1),
        Finding("value: 90% intervals hold", 0.9, _mean(inside[is_number]), 0.03),
        *(
            Finding(f"value: w[{i}]", true, found, 0.1)
            for i, (true, found) in enumerate(
                zip(world.value.tolist(), weight.tolist(), strict=True)
            )
        ),
    ]


def _certainty(world: World, z: Tensor, is_number: Tensor, p_number: Tensor) -> tuple[float, float]:
    """How likely a number was where one came: by asking many individuals, and by the model."""
    some = z[is_number][:500]
    crowd = some.expand(400, *some.shape)
    crowd = Cauchy(crowd, torch.full_like(crowd, GAMMA)).sample(world.generator)
    true = (crowd @ world.law.T).argmax(-1) == NUMBER  # (crowd, 500)
    return _mean(true), _mean(p_number[is_number])


def _scales(world: World, y: Cauchy) -> tuple[float, float]:
    return GAMMA * float(world.value.abs().sum()), float(y.scale.median())


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
