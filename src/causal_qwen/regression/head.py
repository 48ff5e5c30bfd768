"""Head: fixed features z and values y -> a regularised linear head, and the causal chain.

    minimise  mean_i loss(outputs_i, y_i) + 1/2 sum_p penalty_p |W_p|^2,    outputs = W z + bias

with z standardised, by full-batch Adam. Cross-validation chooses the penalty and the number of
steps: all candidates of all folds are trained at once, and the best on the rows that its fold did
not see is trained again on all rows.

Features of a language model are nearly collinear. In the basis of their principal components t_j
(unit variance; s_j^2 the variance of the component), with weights
theta_j sqrt(s_j^2 / (s_j^2 + penalty)), the squared loss has the identity as its Hessian whatever
the penalty; other losses are close to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from causal_qwen.decoding.decision import SCALE_FLOOR
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.regression.features import Progress

PENALTIES = tuple(10.0**power for power in (-3, -2.5, -2, -1.5, -1, -0.5, 0, 1))
SCALE_PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)  # strong: a constant scale is the default
FOLDS, STEPS = 5, 200
LEARNING_RATE, BETA1, BETA2 = 0.1, 0.9, 0.99
NOISES = (0.03, 0.1, 0.3, 1.0)  # of the location, in interquartile ranges of the values
ANNEALING_STEPS = 80  # in which a location's noise falls from 1 to its final value
PATIENCE = 40  # steps without a better candidate
NEGLIGIBLE = 1e-7  # components with less than this share of the largest variance are dropped

Array = NDArray[np.float64]
Loss = Callable[[Tensor, Tensor], Tensor]  # outputs (N, K, P), values (N, 1) -> (N, K)


class Output(NamedTuple):
    """One output of a head: its first bias, and a factor of its penalty (inf: a constant)."""

    start: float = 0.0
    penalty_factor: float = 1.0


class Basis(NamedTuple):
    """z -> t, uncorrelated and of unit variance. t = z @ directions.T - offset"""

    directions: Tensor  # (R, H)
    offset: Tensor  # (R,)
    variance: Tensor  # (R,): s_j^2, of the components of the standardised features

    def __call__(self, z: Tensor) -> Tensor:
        return z @ self.directions.T - self.offset


class LinearHead(NamedTuple):
    """outputs = t weight^T + bias, and the choices of cross-validation."""

    basis: Basis
    weight: Tensor  # (P, R)
    bias: Tensor  # (P,)
    penalty: float
    steps: int
    loss: float  # mean over all rows, each by the fold that did not see it
    unseen: Tensor  # (N, P): outputs for every row by the fold that did not see it

    def __call__(self, z: Tensor) -> Tensor:
        """(N, H) -> (N, P)"""
        return self.basis(z) @ self.weight.T + self.bias


def principal_basis(z: Tensor, weights: Tensor) -> Basis:
    """The principal components of standardised features (N, H), rows weighted by `weights` (N,)."""
    x, share = z.double(), (weights.double() / weights.double().sum()).unsqueeze(-1)
    center = (share * x).sum(0)
    spread = (share * (x - center) ** 2).sum(0).sqrt()
    spread = torch.where(spread > 0, spread, 1.0)
    standard = (x - center) / spread
    variance, vectors = torch.linalg.eigh(standard.T @ (share * standard))
    is_kept = variance > NEGLIGIBLE * variance[-1].clamp_min(torch.finfo(variance.dtype).tiny)
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
    training_loss: Callable[[int], Loss] | None = None,
) -> LinearHead:
    """The head of `outputs` that minimises `loss` on features (N, H) and values (N,).

    `training_loss(step)` is minimised at each step instead of `loss`, which still selects.
    """
    weights = torch.ones(len(y)) if weights is None else weights
    loss_at = training_loss or (lambda step: loss)
    basis = principal_basis(z, weights)
    t = basis(z.double()).float()
    y, weights = y.float().unsqueeze(-1), weights.float()
    fold = torch.randperm(len(t), generator=torch.Generator().manual_seed(seed))
    fold = fold % min(folds, len(t))  # (N,)

    is_seen = fold.unsqueeze(-1) != fold.unique()  # (N, F)
    seen = is_seen.float() * weights.unsqueeze(-1)
    variance, candidates = basis.variance.float(), torch.tensor(penalties)
    search = _ParallelHeads(t, variance, candidates, outputs, is_seen.shape[1])
    best, last, chosen, unseen = math.inf, 1, 0, None
    for step in range(steps):
        found = search.outputs()  # (N, K F, P)
        rows = loss(found, y).view(len(t), len(penalties), -1)  # (N, K, F)
        own = fold.view(-1, 1, 1).expand(-1, len(penalties), 1)
        held_out = (rows.detach().gather(-1, own).squeeze(-1) * weights.unsqueeze(-1)).sum(0)
        lowest = float(held_out.min()) / float(weights.sum())
        if step and lowest < best:
            best, last, chosen = lowest, step, int(held_out.argmin())
            of_chosen = found.detach().view(*rows.shape, -1)[:, chosen]  # (N, F, P)
            unseen = of_chosen[torch.arange(len(t)), fold]
        elif step - last >= PATIENCE:
            break
        rows = loss_at(step)(found, y).view(rows.shape) if training_loss else rows
        search.step((rows * seen.unsqueeze(1)).sum(0) / seen.sum(0), steps)

    final = _ParallelHeads(t, variance, candidates[chosen : chosen + 1], outputs, 1)
    for step in range(last):
        rows = loss_at(step)(final.outputs(), y).view(len(t), 1, 1)
        final.step((rows * weights.view(-1, 1, 1)).sum(0) / weights.sum(), steps)
    weight, bias = (part[0].detach().double() for part in final.heads())
    unseen = final.outputs()[:, 0].detach() if unseen is None else unseen
    return LinearHead(basis, weight, bias, penalties[chosen], last, best, unseen.double())


class _ParallelHeads:
    """Heads of several penalties and folds, trained side by side by normalised gradients."""

    def __init__(
        self, t: Tensor, variance: Tensor, penalties: Tensor, outputs: Sequence[Output], folds: int
    ) -> None:
        self.t = t
        factors = torch.tensor([output.penalty_factor for output in outputs])
        strength = penalties.repeat_interleave(folds).view(-1, 1, 1) * factors.view(1, -1, 1)
        self.shrinkage = variance / (variance + strength)  # (K F, P, R), 0 for constants
        theta = torch.zeros(*self.shrinkage.shape[:2], len(variance) + 1)  # the bias last
        theta[..., -1] = torch.tensor([output.start for output in outputs])
        self.theta = theta.requires_grad_()
        self.momentum, self.squares = torch.zeros_like(theta), torch.zeros_like(theta[..., :1])
        self.done = 0

    def heads(self) -> tuple[Tensor, Tensor]:
        """Weights (K F, P, R) and biases (K F, P)."""
        return self.theta[..., :-1] * self.shrinkage.sqrt(), self.theta[..., -1]

    def outputs(self) -> Tensor:
        """(N, K F, P)"""
        weight, bias = self.heads()
        return (self.t @ weight.flatten(0, 1).T).view(len(self.t), *bias.shape) + bias

    def step(self, losses: Tensor, steps: int) -> None:
        """One step of a cosine schedule. Heads share nothing, so their losses (K, F) are summed.

        As Adam, but with one step size per output of a head: its Hessian is nearly a multiple of
        the identity, and a step size per weight would let the weakest components move fastest.
        """
        rate = LEARNING_RATE * (1 + math.cos(math.pi * self.done / steps)) / 2
        self.done += 1
        penalty = ((1 - self.shrinkage) * self.theta[..., :-1] ** 2).sum() / 2
        (gradient,) = torch.autograd.grad(losses.sum() + penalty, self.theta)
        with torch.no_grad():
            self.momentum.lerp_(gradient, 1 - BETA1)
            self.squares.lerp_((gradient**2).sum(-1, keepdim=True), 1 - BETA2)
            norm = (self.squares / (1 - BETA2**self.done)).sqrt().clamp_min(1e-12)
            self.theta -= rate / (1 - BETA1**self.done) * self.momentum / norm


# ---------------------------------------------------------------- the causal chain


def fit_chain(
    z: Tensor,
    y: Tensor,
    weights: Tensor | None = None,
    *,
    folds: int = FOLDS,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> tuple[Chain, float]:
    """The chain that makes y likely, and its loss on unseen rows.

    Both parts minimise the Cauchy's negative log-likelihood. The location does so under a fixed
    noise that cross-validation chooses (a free scale would follow the residuals of memorised rows,
    and all others become outliers), to which it falls (`annealed`): with little noise from the
    start, the head may settle among outliers. The scale is then fitted to unseen residuals.
    """
    weights = torch.ones(len(y)) if weights is None else weights
    options: dict[str, Any] = {"weights": weights, "folds": folds, "seed": seed}
    best = math.inf
    for done, noise in enumerate(NOISES, start=1):
        loss, training_loss = partial(location_loss, noise), partial(annealed, location_loss, noise)
        found = fit_head(z, y, loss, [Output()], training_loss=training_loss, **options)
        apart = y - found.unseen[:, 0]
        width = apart.abs().median().clamp_min(1e-9).expand_as(apart)  # a Cauchy's scale
        losses = Cauchy(torch.zeros_like(apart), width).nll(apart)
        if (mean := float((losses * weights).sum() / weights.sum())) < best:
            best, location, residuals = mean, found, apart
        progress(done, len(NOISES) + 1)
    scale = fit_scale(z, residuals, **options)
    progress(len(NOISES) + 1, len(NOISES) + 1)
    basis, weight, bias = location.basis, location.weight[0], location.bias[0]
    # the coordinates are the components t
    return Chain.of(basis.directions, -basis.offset, weight, bias, scale), scale.loss


def fit_scale(z: Tensor, residuals: Tensor, **options: Any) -> LinearHead:
    """The scale of residuals: a part that depends on z, and a constant. Both start from the median
    size of a residual, which is a Cauchy's scale. `options` are those of `fit_head`."""
    median = max(float(residuals.abs().median()), 1e-6)
    outputs = [
        Output(math.log(0.8 * median)),
        Output(math.log(0.2 * median), penalty_factor=math.inf),
    ]
    return fit_head(z, residuals, scale_loss, outputs, penalties=SCALE_PENALTIES, **options)


def annealed(loss: Callable[[float, Tensor, Tensor], Tensor], noise: float, step: int) -> Loss:
    """The loss of a step, under a noise that falls from 1 to `noise`."""
    return partial(loss, max(noise, noise ** (step / ANNEALING_STEPS)))


def location_loss(noise: float, outputs: Tensor, y: Tensor) -> Tensor:
    """The Cauchy's NLL under a fixed noise, scaled to be r^2 / 2 for small residuals r."""
    scale = torch.full_like(outputs[..., 0], noise)
    lowest = math.log(math.pi * noise)
    return (Cauchy(outputs[..., 0], scale).nll(y) - lowest) * noise**2 / 2


def scale_loss(outputs: Tensor, residuals: Tensor) -> Tensor:
    """The NLL of residuals: |w|.(scale_U + b) is |w| e^(a.z + d) + |w| |b|."""
    scale = outputs[..., 0].exp() + outputs[..., 1].exp()
    return Cauchy(torch.zeros_like(scale), scale).nll(residuals)


@dataclass(frozen=True)
class Chain:
    """z -> U -> Y in float64: abduction and action, whose C coordinates have one scale.

    loc_U = directions z + offset      scale_U = exp(slope.z + level)
    U' = Cauchy(loc_U, scale_U + noise)      Y = weight.U' + bias
    """

    directions: Array  # (C, H)
    offset: Array  # (C,)
    slope: Array  # (H,)
    level: float
    noise: float  # exogenous
    weight: Array  # (C,)
    bias: float

    @classmethod
    def of(cls, directions: Any, offset: Any, weight: Any, bias: Any, scale: LinearHead) -> Chain:
        """|weight|.scale_U' is the output of the scale's head."""
        weight = np.asarray(weight, dtype=np.float64)
        weight = np.where(np.abs(weight).sum() > 0, weight, 1e-9)
        norm = math.log(np.abs(weight).sum())
        return cls(
            np.asarray(directions, dtype=np.float64),
            np.asarray(offset, dtype=np.float64),
            (scale.weight[0] @ scale.basis.directions).numpy(),
            float(scale.bias[0] - scale.weight[0] @ scale.basis.offset) - norm,
            math.exp(float(scale.bias[1]) - norm),
            weight,
            float(bias),
        )

    def __call__(self, z: Tensor) -> tuple[Cauchy, Cauchy]:
        """U' (N, C) and Y (N,)"""
        x = z.double().numpy()
        loc = x @ self.directions.T + self.offset
        scale = np.exp(x @ self.slope + self.level) + self.noise
        wide = torch.from_numpy(scale).unsqueeze(-1).expand(loc.shape)
        total = np.maximum(scale * np.abs(self.weight).sum(), SCALE_FLOOR)
        y = Cauchy(torch.from_numpy(loc @ self.weight + self.bias), torch.from_numpy(total))
        return Cauchy(torch.from_numpy(loc), wide), y
