"""The scale of residuals: its basis, what it follows, and the chain that it belongs to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from causal_qwen.regression.head import Chain, fit_scale, principal_basis

N, H = 300, 24


def simulate(seed: int = 0, rows: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Nearly collinear features far from 0, a linear truth, and its coefficients' image."""
    g = torch.Generator().manual_seed(seed)
    causes = torch.randn(rows, 6, generator=g, dtype=torch.float64)
    mixing = torch.randn(6, H, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    noise = 0.1 * torch.randn(rows, H, generator=g, dtype=torch.float64)
    return causes @ mixing + noise + 40.0, causes[:, 0] - 0.5 * causes[:, 1], causes


def test_components_are_uncorrelated_and_of_unit_variance() -> None:
    z, _, _ = simulate()
    weights = torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    directions, offset, variance = principal_basis(z, weights)
    t = z @ directions.T - offset
    share = (weights / weights.sum()).unsqueeze(-1)
    torch.testing.assert_close(
        (share * t).sum(0), torch.zeros(t.shape[1]).double(), atol=1e-9, rtol=0
    )
    torch.testing.assert_close(t.T @ (share * t), torch.eye(t.shape[1]).double(), atol=1e-7, rtol=0)
    assert variance.sum().item() == pytest.approx(H)  # of H standardised features


def test_the_scale_follows_the_noise() -> None:
    z, _, causes = simulate(rows=1200)
    g = torch.Generator().manual_seed(2)
    residuals = (causes[:, 2] * 0.7 - 1.5).exp() * torch.randn(1200, generator=g)
    slope, level, noise = fit_scale(z, residuals, torch.ones(1200))
    scale = (z @ slope + level).exp() + noise
    high, low = scale[causes[:, 2] > 1].median(), scale[causes[:, 2] < -1].median()
    assert 3 < high / low < math.exp(0.7 * 3) * 1.5  # about 8 in truth; penalties shrink it


def test_the_scale_of_equal_noise_is_nearly_constant() -> None:
    z, _, _ = simulate()
    residuals = 3 * torch.from_numpy(np.random.default_rng(0).standard_cauchy(N))
    slope, level, noise = fit_scale(z, residuals, torch.ones(N))
    scale = (z @ slope + level).exp() + noise
    assert scale.median() == pytest.approx(3, rel=0.25)
    assert scale.max() < 2 * scale.min()


def test_the_chain_computes_what_the_fitted_head_computes() -> None:
    z, y, _ = simulate()
    z, weight = z[:, :4], np.array([0.5, 0.0, 0.7])
    slope, level, noise = fit_scale(z, y, torch.ones(N))
    found = Chain.of(weight, 0.3, (slope, level, noise))(z)
    np.testing.assert_allclose(found.loc, z[:, :3].numpy() @ weight + 0.3)
    torch.testing.assert_close(found.scale, (z @ slope + level).exp() + noise, rtol=1e-9, atol=1e-9)
