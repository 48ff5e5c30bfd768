"""Head: predictions of experts and their residuals -> the scale of a Cauchy, and the causal chain.

    minimise  mean_i nll(residual_i; scale_i) + 1/2 penalty |W|^2,   scale = e^(W z + level) + noise

with z standardised, by full-batch Adam. The noise has no penalty and no slope: it is a constant.
Cross-validation chooses the penalty and the number of steps: all candidates of all folds are
trained at once, and the best on the rows that its fold did not see is trained again on all rows.

Predictions of several experts are nearly collinear. In the basis of their principal components t_j
(unit variance; s_j^2 the variance of the component), with weights
theta_j sqrt(s_j^2 / (s_j^2 + penalty)), the squared loss has the identity as its Hessian whatever
the penalty; other losses are close to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from causal_qwen.decoding.decision import SCALE_FLOOR
from causal_qwen.modeling.cauchy import Cauchy

PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)  # strong: a constant scale is the default
FOLDS, STEPS = 5, 200
LEARNING_RATE, BETA1, BETA2 = 0.1, 0.9, 0.99
PATIENCE = 40  # steps without a better candidate
NEGLIGIBLE = 1e-7  # components with less than this share of the largest variance are dropped

Array = NDArray[np.float64]


def principal_basis(z: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The principal components of standardised features (N, H), rows weighted by `weights` (N,):
    directions (R, H) and offset (R,) of t = z @ directions.T - offset, uncorrelated and of unit
    variance, and s_j^2 (R,)."""
    x, share = z.double(), (weights.double() / weights.double().sum()).unsqueeze(-1)
    center = (share * x).sum(0)
    spread = (share * (x - center) ** 2).sum(0).sqrt()
    spread = torch.where(spread > 0, spread, 1.0)
    standard = (x - center) / spread
    variance, vectors = torch.linalg.eigh(standard.T @ (share * standard))
    is_kept = variance > NEGLIGIBLE * variance[-1].clamp_min(torch.finfo(variance.dtype).tiny)
    variance, vectors = variance[is_kept], vectors[:, is_kept]
    directions = (vectors / variance.sqrt()).T / spread
    return directions, directions @ center, variance


def fit_scale(
    z: Tensor, residuals: Tensor, weights: Tensor, seed: int = 0
) -> tuple[Tensor, float, float]:
    """The scale of residuals (N,) by features (N, H), e^(slope.z + level) + noise: slope (H,),
    level and noise. Both parts start from the median size of a residual, a Cauchy's scale."""
    median = max(float(residuals.abs().median()), 1e-6)
    starts = math.log(0.8 * median), math.log(0.2 * median)
    directions, offset, variance = principal_basis(z, weights)
    t, variance = (z.double() @ directions.T - offset).float(), variance.float()
    y, weights = residuals.float().unsqueeze(-1), weights.float()
    fold = torch.randperm(len(t), generator=torch.Generator().manual_seed(seed))
    fold = fold % min(FOLDS, len(t))  # (N,)

    is_seen = fold.unsqueeze(-1) != fold.unique()  # (N, F)
    seen, penalties = is_seen.float() * weights.unsqueeze(-1), torch.tensor(PENALTIES)
    search = _ParallelHeads(t, variance, penalties, starts, is_seen.shape[1])
    own = fold.view(-1, 1, 1).expand(-1, len(penalties), 1)
    best, last, chosen = math.inf, 1, 0
    for step in range(STEPS):
        rows = scale_loss(search.outputs(), y).view(len(t), len(penalties), -1)  # (N, K, F)
        held_out = (rows.detach().gather(-1, own).squeeze(-1) * weights.unsqueeze(-1)).sum(0)
        lowest = float(held_out.min()) / float(weights.sum())
        if step and lowest < best:
            best, last, chosen = lowest, step, int(held_out.argmin())
        elif step - last >= PATIENCE:
            break
        search.step((rows * seen.unsqueeze(1)).sum(0) / seen.sum(0))

    final = _ParallelHeads(t, variance, penalties[chosen : chosen + 1], starts, 1)
    for _ in range(last):
        rows = scale_loss(final.outputs(), y).view(len(t), 1, 1)
        final.step((rows * weights.view(-1, 1, 1)).sum(0) / weights.sum())
    weight, bias = (part[0].detach().double() for part in final.heads())
    level = float(bias[0] - weight[0] @ offset)
    return weight[0] @ directions, level, math.exp(float(bias[1]))


def scale_loss(outputs: Tensor, residuals: Tensor) -> Tensor:
    """The NLL of residuals: |w|.(scale_U + b) is |w| e^(a.z + d) + |w| |b|."""
    scale = outputs[..., 0].exp() + outputs[..., 1].exp()
    return Cauchy(torch.zeros_like(scale), scale).nll(residuals)


class _ParallelHeads:
    """Heads of several penalties and folds, trained side by side by normalised gradients."""

    def __init__(
        self, t: Tensor, variance: Tensor, penalties: Tensor, starts: Sequence[float], folds: int
    ) -> None:
        self.t = t
        factors = torch.tensor([1.0, math.inf])
        strength = penalties.repeat_interleave(folds).view(-1, 1, 1) * factors.view(1, -1, 1)
        self.shrinkage = variance / (variance + strength)  # (K F, P, R), 0 for the constant
        theta = torch.zeros(*self.shrinkage.shape[:2], len(variance) + 1)  # the bias last
        theta[..., -1] = torch.tensor(starts)
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

    def step(self, losses: Tensor) -> None:
        """One step of a cosine schedule. Heads share nothing, so their losses (K, F) are summed.

        As Adam, but with one step size per output of a head: its Hessian is nearly a multiple of
        the identity, and a step size per weight would let the weakest components move fastest.
        """
        rate = LEARNING_RATE * (1 + math.cos(math.pi * self.done / STEPS)) / 2
        self.done += 1
        penalty = ((1 - self.shrinkage) * self.theta[..., :-1] ** 2).sum() / 2
        (gradient,) = torch.autograd.grad(losses.sum() + penalty, self.theta)
        with torch.no_grad():
            self.momentum.lerp_(gradient, 1 - BETA1)
            self.squares.lerp_((gradient**2).sum(-1, keepdim=True), 1 - BETA2)
            norm = (self.squares / (1 - BETA2**self.done)).sqrt().clamp_min(1e-12)
            self.theta -= rate / (1 - BETA1**self.done) * self.momentum / norm


# ---------------------------------------------------------------- the causal chain


@dataclass(frozen=True)
class Chain:
    """z -> U -> Y in float64: abduction and action. The m coordinates of U have one scale.

    loc_U = z, without its last column      scale_U = exp(slope.z + level)
    U' = Cauchy(loc_U, scale_U + noise)      Y = weight.U' + bias, a Cauchy
    """

    slope: Array  # (m + 1,)
    level: float
    noise: float  # exogenous
    weight: Array  # (m,)
    bias: float

    @classmethod
    def of(cls, weight: Array, bias: float, scale: tuple[Tensor, float, float]) -> Chain:
        """|weight|.scale_U' is what `fit_scale` gave."""
        weight = np.where(np.abs(weight).sum() > 0, weight, 1e-9)
        slope, level, noise = scale
        norm = math.log(np.abs(weight).sum())
        return cls(slope.numpy(), level - norm, noise * math.exp(-norm), weight, float(bias))

    def __call__(self, z: Tensor) -> Cauchy:
        """(N, m + 1) -> Y (N,)"""
        x = z.double().numpy()
        scale = np.exp(x @ self.slope + self.level) + self.noise
        total = np.maximum(scale * np.abs(self.weight).sum(), SCALE_FLOOR)
        loc = x[:, :-1] @ self.weight + self.bias
        return Cauchy(torch.from_numpy(loc), torch.from_numpy(total))
