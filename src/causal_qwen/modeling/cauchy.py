"""The Cauchy distribution, the only one in this model.

A linear image of independent Cauchy coordinates is Cauchy again,

    U_c ~ Cauchy(loc_c, scale_c)   =>   a.U + b ~ Cauchy(a.loc + b, |a|.scale),

so every distribution downstream of U has a closed form. A Cauchy has no
mean and no variance: the point estimate is the median, which is `loc`.

Formulas that cancel or overflow in their textbook form are implemented stably here, once each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Cauchy(NamedTuple):
    """Independent Cauchy variables: `loc` and `scale > 0` of one common shape."""

    loc: Tensor
    scale: Tensor

    def affine(self, weight: Tensor, bias: Tensor | None = None) -> Cauchy:
        """The marginals of W U + b: (..., C) -> (..., K). They share U: not independent."""
        return Cauchy(F.linear(self.loc, weight, bias), F.linear(self.scale, weight.abs()))

    def sf(self, threshold: Tensor | float) -> Tensor:
        """P(X > threshold) = atan2(scale, threshold - loc) / pi.

        Not 1/2 + atan(.)/pi, which cancels to 0 in float32 as soon as P < 6e-8.
        """
        return torch.atan2(self.scale, threshold - self.loc) / math.pi

    def log_sf(self, threshold: Tensor | float) -> Tensor:
        """log P(X > threshold), accurate in both tails, with finite gradients."""
        return _log_tail(self.scale, threshold - self.loc)

    def log_cdf(self, threshold: Tensor | float) -> Tensor:
        """log P(X <= threshold) = log(1 - sf), accurate in both tails."""
        return _log_tail(self.scale, self.loc - threshold)

    def cdf(self, value: Tensor | float) -> Tensor:
        return torch.atan2(self.scale, self.loc - value) / math.pi

    def log_prob(self, value: Tensor | float) -> Tensor:
        """log density. `hypot` keeps scale**2 + (x - loc)**2 from overflowing or vanishing."""
        distance = torch.hypot(self.scale, value - self.loc)
        return self.scale.log() - math.log(math.pi) - 2 * distance.log()

    def nll(self, value: Tensor | float) -> Tensor:
        return -self.log_prob(value)

    def icdf(self, probability: Tensor | float) -> Tensor:
        """The inverse CDF: loc + scale tan(pi (p - 1/2)).

        For p near 0 or 1 it is the cotangent of the *small* angle: pi (p - 1/2) rounds to pi/2.
        """
        p = torch.as_tensor(probability, dtype=self.loc.dtype, device=self.loc.device)
        small = torch.minimum(p, 1 - p) * math.pi
        tail = torch.where(p < 0.5, -1.0, 1.0) / small.tan()
        middle = (math.pi * (p - 0.5)).tan()
        return self.loc + self.scale * torch.where(small < math.pi / 4, tail, middle)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """The central interval that holds the variable with probability `level`."""
        if not 0 < level < 1:
            raise ValueError(f"level={level} is outside (0, 1).")
        half = self.scale / math.tan(math.pi * (1 - level) / 2)  # symmetric, in any precision
        return self.loc - half, self.loc + half

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One draw of every variable."""
        uniform = torch.rand(
            self.loc.shape, dtype=self.loc.dtype, device=self.loc.device, generator=generator
        )
        half_cell = torch.finfo(self.loc.dtype).eps / 4  # rand() may return 0: icdf -inf
        return self.icdf(uniform.clamp_min(half_cell))

    def crps(self, value: Tensor | float) -> Tensor:
        """Continuous ranked probability score: (s/pi) (2 z atan z - ln(1 + z^2) + 2 ln 2)."""
        z = (value - self.loc) / self.scale
        log_1p_z2 = 2 * torch.hypot(z, torch.ones_like(z)).log()
        bracket = 2 * z * z.atan() - log_1p_z2 + 2 * math.log(2)
        return self.scale / math.pi * bracket


def _log_tail(scale: Tensor, distance: Tensor) -> Tensor:
    """log(atan2(scale, distance) / pi): the log-probability of the tail beyond `distance`.

    Below 1/2 the angle itself is accurate; above it, its complement is. Either form alone is
    biased in float32. The unused branch is fed a harmless value so that its gradient is not NaN.
    atan2 does not change when both arguments are divided; its gradient squares them, and would
    overflow beyond 1e19.
    """
    size = torch.maximum(scale, distance.abs()).detach()
    size = torch.where(size.isfinite(), size, 1.0)
    scale, distance = scale / size, distance / size
    tail = torch.atan2(scale, distance) / math.pi
    rest = torch.atan2(scale, -distance) / math.pi
    is_small = tail < 0.5
    half = torch.full_like(tail, 0.5)
    return torch.where(
        is_small,
        torch.where(is_small, tail, half).log(),
        torch.log1p(-torch.where(is_small, half, rest)),
    )
