"""Fit: fixed features z and values y -> a linear head, as strongly regularised as helps.

    minimise  mean_i loss(outputs_i, y_i) + 1/2 sum_p penalty_p |W_p|^2,    outputs = W z + bias

with z standardised, by full-batch Adam. The penalty and the number of steps are chosen by
cross-validation: every candidate of every fold is trained at once, and what is best on the rows
that its fold did not see is trained again on all rows.

Features of a language model are nearly collinear, and plain gradients would crawl. In the basis of
their principal components t_j (unit variance; s_j^2 the variance of the component), with weights
theta_j sqrt(s_j^2 / (s_j^2 + penalty)), the squared loss has the identity for its Hessian whatever
the penalty; other losses are close to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from causal_qwen.modeling.abduction import AbductionNetwork
from causal_qwen.modeling.action import ActionNetwork
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.regression.features import Encoded, hidden_at_end

PENALTIES = tuple(10.0**power for power in (-3, -2.5, -2, -1.5, -1, -0.5, 0, 1))
SCALE_PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)  # a scale that varies must earn it
FOLDS, STEPS = 5, 200
RATE, MOMENTUM, MEMORY = 0.1, 0.9, 0.99
NOISES = (0.03, 0.1, 0.3, 1.0)  # of the location, in interquartile ranges of the values
COOLING = 80  # steps in which a location's noise falls to its own
PATIENCE = 40  # steps without a better candidate
NEGLIGIBLE = 1e-7  # components with less than this share of the largest variance

Loss = Callable[[Tensor, Tensor], Tensor]  # outputs (N, K, P), values (N, 1) -> (N, K)


class Output(NamedTuple):
    """One output of a head: where its bias starts, and how much more than others it is penalised.

    A caution of infinity makes it a constant.
    """

    start: float = 0.0
    caution: float = 1.0


class Basis(NamedTuple):
    """z -> t, uncorrelated and of unit variance. t = z @ directions.T - offset"""

    directions: Tensor  # (R, H)
    offset: Tensor  # (R,)
    variance: Tensor  # (R,): s_j^2, of the components of the standardised features

    def __call__(self, z: Tensor) -> Tensor:
        return z @ self.directions.T - self.offset


class LinearHead(NamedTuple):
    """outputs = t weight^T + bias, and how it was chosen."""

    basis: Basis
    weight: Tensor  # (P, R)
    bias: Tensor  # (P,)
    penalty: float
    steps: int
    loss: float  # on rows that were not seen, mean over all of them
    unseen: Tensor  # (N, P): what was said about every row by the fold that had not seen it

    def __call__(self, z: Tensor) -> Tensor:
        """(N, H) -> (N, P)"""
        return self.basis(z) @ self.weight.T + self.bias


def principal_basis(z: Tensor, weights: Tensor) -> Basis:
    """The principal components of standardised features (N, H), rows counted by `weights` (N,)."""
    share = (weights / weights.sum()).unsqueeze(-1)
    center = (share * z).sum(0)
    spread = (share * (z - center) ** 2).sum(0).sqrt()
    spread = torch.where(spread > 0, spread, 1.0)
    standard = (z - center) / spread
    variance, vectors = torch.linalg.eigh(standard.T @ (share * standard))
    is_kept = variance > NEGLIGIBLE * variance[-1].clamp_min(torch.finfo(z.dtype).tiny)
    variance, vectors = variance[is_kept], vectors[:, is_kept]
    directions = (vectors / variance.sqrt()).T / spread
    return Basis(directions, directions @ center, variance)


def fit_head(
    z: Tensor,
    y: Tensor,
    loss: Loss,
    outputs: Sequence[Output],
    *,
    weights: Tensor | None = None,
    penalties: Sequence[float] = PENALTIES,
    folds: int = FOLDS,
    steps: int = STEPS,
    seed: int = 0,
    lesson: Callable[[int], Loss] | None = None,
) -> LinearHead:
    """The head of `outputs` that minimises `loss` on features (N, H) and values (N,).

    `lesson(step)` is what is minimised on the way, where that is not `loss` itself.
    """
    weights = torch.ones(len(y)) if weights is None else weights
    basis = principal_basis(z.double(), weights.double())
    t, y, weights = basis(z.double()).float(), y.float().unsqueeze(-1), weights.float()
    fold = torch.randperm(len(t), generator=torch.Generator().manual_seed(seed))
    fold = fold % min(folds, len(t))  # (N,)

    is_seen = fold.unsqueeze(-1) != fold.unique()  # (N, F)
    seen = is_seen.float() * weights.unsqueeze(-1)
    candidates = torch.tensor(penalties)
    search = _Search(t, basis.variance.float(), candidates, outputs, is_seen.shape[1])
    best, last, chosen, unseen = math.inf, 1, 0, None
    for step in range(steps):
        found = search.outputs()  # (N, K F, P)
        rows = loss(found, y).view(len(t), len(penalties), -1)  # (N, K, F)
        own = fold.view(-1, 1, 1).expand(-1, len(penalties), 1)
        held_out = (rows.detach().gather(-1, own).squeeze(-1) * weights.unsqueeze(-1)).sum(0)
        lowest = float(held_out.min()) / float(weights.sum())
        if step and lowest < best:
            best, last, chosen = lowest, step, int(held_out.argmin())
            mine = found.detach().view(*rows.shape, -1)[:, chosen]  # (N, F, P)
            unseen = mine[torch.arange(len(t)), fold]
        elif step - last >= PATIENCE:
            break
        taught = rows if lesson is None else lesson(step)(found, y).view(rows.shape)
        search.step((taught * seen.unsqueeze(1)).sum(0) / seen.sum(0), steps)

    final = _Search(t, basis.variance.float(), candidates[chosen : chosen + 1], outputs, 1)
    for step in range(last):
        taught = (lesson(step) if lesson else loss)(final.outputs(), y).view(len(t), 1, 1)
        final.step((taught * weights.view(-1, 1, 1)).sum(0) / weights.sum(), steps)
    weight, bias = (part[0].detach().double() for part in final.heads())
    unseen = final.outputs()[:, 0].detach() if unseen is None else unseen
    return LinearHead(basis, weight, bias, penalties[chosen], last, best, unseen.double())


class _Search:
    """Heads of several penalties and folds, trained side by side by normalised gradients."""

    def __init__(
        self,
        t: Tensor,
        variance: Tensor,
        penalties: Tensor,
        outputs: Sequence[Output],
        folds: int,
    ) -> None:
        self.t = t
        cautions = torch.tensor([output.caution for output in outputs])
        strength = penalties.repeat_interleave(folds).view(-1, 1, 1) * cautions.view(1, -1, 1)
        self.keep = variance / (variance + strength)  # (K F, P, R), 0 for constants
        theta = torch.zeros(*self.keep.shape[:2], len(variance) + 1)  # the bias last
        theta[..., -1] = torch.tensor([output.start for output in outputs])
        self.theta = theta.requires_grad_()
        self.momentum, self.size = torch.zeros_like(theta), torch.zeros_like(theta[..., :1])
        self.done = 0

    def heads(self) -> tuple[Tensor, Tensor]:
        """Weights (K F, P, R) and biases (K F, P)."""
        return self.theta[..., :-1] * self.keep.sqrt(), self.theta[..., -1]

    def outputs(self) -> Tensor:
        """(N, K F, P)"""
        weight, bias = self.heads()
        return (self.t @ weight.flatten(0, 1).T).view(len(self.t), *bias.shape) + bias

    def step(self, losses: Tensor, steps: int) -> None:
        """One step along a cosine. Heads share nothing, so their losses (K, F) may be summed.

        As in Adam, but every output of a head has one pace: its Hessian is nearly a multiple of
        the identity, and a pace of their own would let the weakest components overtake.
        """
        rate = RATE * (1 + math.cos(math.pi * self.done / steps)) / 2
        self.done += 1
        penalty = ((1 - self.keep) * self.theta[..., :-1] ** 2).sum() / 2
        (gradient,) = torch.autograd.grad(losses.sum() + penalty, self.theta)
        with torch.no_grad():
            self.momentum.lerp_(gradient, 1 - MOMENTUM)
            self.size.lerp_((gradient**2).sum(-1, keepdim=True), 1 - MEMORY)
            pace = (self.size / (1 - MEMORY**self.done)).sqrt().clamp_min(1e-12)
            self.theta -= rate / (1 - MOMENTUM**self.done) * self.momentum / pace


# ---------------------------------------------------------------- the causal chain


def fit_chain(
    z: Tensor,
    y: Tensor,
    *,
    weights: Tensor | None = None,
    folds: int = FOLDS,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Chain, float]:
    """The chain that makes y likely, and its loss on rows that it has not seen.

    Both parts minimise the Cauchy's negative log-likelihood. The location does so under a
    noise that is chosen by cross-validation: left free, the scale follows the residuals of rows
    that are being learned by heart, and with a scale of almost 0 all other rows count as outliers.
    It is reached from above (`cooled`): under little noise from the start, the head may settle
    among outliers. The scale is then fitted to the residuals of unseen rows.
    """
    weights = torch.ones(len(y)) if weights is None else weights
    options: dict[str, Any] = {"weights": weights, "folds": folds, "seed": seed}
    found = []
    for place, noise in enumerate(NOISES):
        loss, lesson = partial(location_loss, noise), partial(cooled, location_loss, noise)
        location = fit_head(z, y, loss, [Output()], lesson=lesson, **options)
        residuals = y - location.unseen[:, 0]
        found.append((_spread_loss(residuals, weights), location, residuals))
        progress(place + 1, len(NOISES) + 1)
    _, location, residuals = min(found, key=lambda one: one[0])
    middle = float(residuals.abs().median().clamp_min(1e-6))
    starts = [Output(math.log(0.8 * middle)), Output(math.log(0.2 * middle), caution=math.inf)]
    scale = fit_head(z, residuals, scale_loss, starts, penalties=SCALE_PENALTIES, **options)
    progress(len(NOISES) + 1, len(NOISES) + 1)
    return to_chain(location, scale), scale.loss


def cooled(loss: Callable[[float, Tensor, Tensor], Tensor], noise: float, step: int) -> Loss:
    """The loss of a step, under a noise that falls from 1 to its own."""
    return partial(loss, max(noise, noise ** (step / COOLING)))


def location_loss(noise: float, outputs: Tensor, y: Tensor) -> Tensor:
    """The Cauchy's likelihood under a fixed noise, scaled to be r^2 / 2 for small residuals r."""
    scale = torch.full_like(outputs[..., 0], noise)
    lowest = math.log(math.pi * noise)
    return (Cauchy(outputs[..., 0], scale).nll(y) - lowest) * noise**2 / 2


def scale_loss(outputs: Tensor, residuals: Tensor) -> Tensor:
    """The likelihood of residuals: |w|.(scale_U + b) is |w| e^(a.z + d) + |w| |b|."""
    scale = outputs[..., 0].exp() + outputs[..., 1].exp()
    return Cauchy(torch.zeros_like(scale), scale).nll(residuals)


def _spread_loss(residuals: Tensor, weights: Tensor) -> float:
    """How unlikely residuals are under the Cauchy that fits them: median |r| is its scale."""
    scale = residuals.abs().median().clamp_min(1e-9)
    losses = Cauchy(torch.zeros_like(residuals), scale.expand_as(residuals)).nll(residuals)
    return float((losses * weights).sum() / weights.sum())


class Chain(torch.nn.Module):
    """z -> U -> Y: the model's own abduction and action, of C coordinates."""

    def __init__(self, hidden_size: int, causal_size: int) -> None:
        super().__init__()
        config = CausalQwen2Config(
            vocab_size=1,
            hidden_size=hidden_size,
            causal_size=causal_size,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
        self.abduction, self.action = AbductionNetwork(config), ActionNetwork(config)
        self.requires_grad_(False).double()  # components are small differences of large features

    def forward(self, z: Tensor) -> tuple[Cauchy, Cauchy]:
        """U' (N, C) and Y (N,)"""
        u = self.action.widen(self.abduction(z.double()))
        return u, self.action.number(u)


@torch.no_grad()
def to_chain(location: LinearHead, scale: LinearHead) -> Chain:
    """Two fitted heads as one causal chain, whose coordinates are the components t.

    All of them are equally uncertain, so that |w| of them is what the scale's head says.
    """
    basis = location.basis
    chain = Chain(basis.directions.shape[1], len(basis.offset))
    abduction, action = chain.abduction, chain.action
    law = location.weight[0]
    law = torch.where(law.abs().sum() > 0, law, 1e-9)
    size = law.abs().sum()
    abduction.loc.weight.copy_(basis.directions)
    abduction.loc.bias.copy_(-basis.offset)
    slope = scale.weight[0] @ scale.basis.directions
    constant = scale.bias[0] - scale.weight[0] @ scale.basis.offset - size.log()
    abduction.scale.weight.copy_(slope.expand_as(basis.directions))
    abduction.scale.bias.copy_(constant.expand_as(basis.offset))
    action.b_noise.copy_((scale.bias[1].exp() / size).expand_as(basis.offset))
    action.decision_noise.zero_()
    action.value.weight.copy_(law)
    action.value.bias.copy_(location.bias)
    return chain


# ---------------------------------------------------------------- the whole model


@dataclass(frozen=True)
class Lesson:
    """What a model is taught: texts, their values on the head's scale, and their weights."""

    model: CausalModel
    encoded: list[Encoded]
    y: Tensor  # (N,)
    weights: Tensor  # (N,)

    def __call__(self, places: list[int]) -> tuple[Tensor, Tensor]:
        """The summed loss of these rows, and their weight."""
        number = number_of(self.model, [self.encoded[place] for place in places])
        weights = self.weights[places]
        return (number.nll(self.y[places]) * weights).sum(), weights.sum()


@torch.no_grad()
def start_from_chain(model: CausalModel, chain: Chain) -> None:
    """Give the model's own heads the fitted chain's parameters; spare coordinates say nothing."""
    for mine, fitted in zip(_parameters(model), _parameters(chain), strict=True):
        mine.zero_()
        mine[tuple(slice(size) for size in fitted.shape)].copy_(fitted)


@torch.no_grad()
def start_from_nothing(model: CausalModel) -> None:
    """A number head that says about the median, as unsure as standardised values are spread."""
    size = model.action.value.weight.mul_(0.1).abs().sum()
    model.action.value.bias.zero_()
    model.abduction.scale.weight.zero_()
    model.abduction.scale.bias.fill_(math.log(0.4)).sub_(size.log())
    model.action.b_noise.fill_(0.1).div_(size)


def teach(
    model: torch.nn.Module,
    lesson: Callable[[list[int]], tuple[Tensor, Tensor]],
    rows: int,
    *,
    rate: float,
    epochs: int,
    batch_size: int,
    held_out: float,
    patience: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Train a model on the rows of a lesson, which tells the loss of some of them.

    What was best on the held-out share is restored in the end.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)
    exam, course = order.split([count := max(int(rows * held_out), 1), rows - count])
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=rate, weight_decay=0.01)
    steps = epochs * math.ceil(len(course) / batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, max(steps, 2), pct_start=0.1)
    best, best_epoch, kept = _mean_loss(lesson, exam, batch_size), -1, _copy(model)
    for epoch in range(epochs):
        model.train()
        shuffled = course[torch.randperm(len(course), generator=generator)].split(batch_size)
        for step, places in enumerate(shuffled):
            loss, weight = lesson(places.tolist())
            optimizer.zero_grad()
            (loss / weight.clamp_min(1e-9)).backward()
            torch.nn.utils.clip_grad_norm_(learning, 1.0)
            optimizer.step()
            schedule.step()
            progress(epoch * len(shuffled) + step + 1, steps)
        model.eval()
        now = _mean_loss(lesson, exam, batch_size)
        if now < best:
            best, best_epoch, kept = now, epoch, _copy(model)
        elif epoch - best_epoch >= patience:
            break
    model.load_state_dict(kept)
    model.eval()


def number_of(model: CausalModel, encoded: Sequence[Encoded]) -> Cauchy:
    """Y at the end of every text. -> (B,)"""
    u = model.action.widen(model.abduct(hidden_at_end(model, encoded)))
    y: Cauchy = model.action.number(u)
    return y


@torch.no_grad()
def _mean_loss(lesson: Any, places: Tensor, batch_size: int) -> float:
    parts = [torch.stack(lesson(some.tolist())) for some in places.split(batch_size)]
    loss, weight = torch.stack(parts).sum(0).tolist()
    return float(loss / max(weight, 1e-9))


def _copy(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _parameters(chain: Any) -> list[Tensor]:
    abduction, action = chain.abduction, chain.action
    linear = (abduction.loc, abduction.scale, action.value)
    return [p.data for layer in linear for p in (layer.weight, layer.bias)] + [action.b_noise.data]
