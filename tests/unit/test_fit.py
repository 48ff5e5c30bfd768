"""Linear heads on fixed features: the basis, the optimum, robustness, and the chain they become."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.regression.head import (
    STEPS,
    Chain,
    Output,
    _ParallelHeads,
    fit_chain,
    fit_head,
    location_loss,
    principal_basis,
    scale_loss,
)

N, H = 300, 24


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[..., 0] - y) ** 2 / 2


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
    basis = principal_basis(z, weights)
    t = basis(z)
    share = (weights / weights.sum()).unsqueeze(-1)
    torch.testing.assert_close(
        (share * t).sum(0), torch.zeros(t.shape[1]).double(), atol=1e-9, rtol=0
    )
    torch.testing.assert_close(t.T @ (share * t), torch.eye(t.shape[1]).double(), atol=1e-7, rtol=0)
    assert basis.variance.sum().item() == pytest.approx(H)  # of H standardised features


@pytest.mark.parametrize("penalty", [0.03, 3.0])
def test_the_optimum_is_the_ridge_solution(penalty: float) -> None:
    """Without stopping early, against the closed form."""
    z, y, _ = simulate()
    y = y + torch.randn(N, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    basis = principal_basis(z, torch.ones(N).double())
    search = _ParallelHeads(
        basis(z).float(), basis.variance.float(), torch.tensor([penalty]), [Output()], 1
    )
    for _ in range(STEPS):
        losses = squared(search.outputs(), y.float().unsqueeze(-1)).mean(0)
        search.step(losses, STEPS)
    standard = (z - z.mean(0)) / z.std(0, correction=0)
    gram = standard.T @ standard / N + penalty * torch.eye(H)
    ridge = standard @ torch.linalg.solve(gram, standard.T @ (y - y.mean()) / N) + y.mean()
    assert (search.outputs()[:, 0, 0] - ridge).abs().max() < 0.01 * ridge.std()


def test_a_third_of_gross_errors_does_not_move_the_fit() -> None:
    z, truth, _ = simulate()
    g = np.random.default_rng(0)
    is_wrong = g.random(N) < 0.3
    y = truth + 0.1 * torch.from_numpy(g.normal(size=N))
    y = torch.where(torch.from_numpy(is_wrong), 10 * y + 8, y)
    fresh, expected, _ = simulate(seed=5)
    _, ours = fit_chain(z, y)[0](fresh)
    mean = fit_head(z, y, squared, [Output()])(fresh)[:, 0]
    assert (ours.loc - expected).abs().median() < 0.15
    assert (mean - expected).abs().median() > 1.5


def test_the_scale_follows_the_noise() -> None:
    z, truth, causes = simulate(rows=1200)
    g = torch.Generator().manual_seed(2)
    y = truth + (causes[:, 2] * 0.7 - 1.5).exp() * torch.randn(1200, generator=g)
    scale = fit_chain(z, y)[0](z)[1].scale
    high, low = scale[causes[:, 2] > 1].median(), scale[causes[:, 2] < -1].median()
    assert 3 < high / low < math.exp(0.7 * 3) * 1.5  # about 8 in truth; penalties shrink it


def test_outputs_for_unseen_rows_do_not_depend_on_their_values() -> None:
    """A changed value changes the out-of-fold output of its own row only through the penalty."""
    z, y, _ = simulate(rows=60)
    moved = y.clone()
    moved[7] += 100
    options = {"penalties": [0.1], "steps": 2, "folds": 60}  # every row is a fold of its own
    before, after = (fit_head(z, v, squared, [Output()], **options) for v in (y, moved))
    assert before.unseen[7] == after.unseen[7]
    assert not torch.equal(before.unseen[8], after.unseen[8])


def test_the_location_loss_is_a_cauchy_that_starts_as_a_square() -> None:
    r = torch.tensor([0.0, 1e-3, 0.5, 20.0], dtype=torch.float64)
    found = location_loss(0.3, torch.zeros(4, 1, dtype=torch.float64), r)
    np.testing.assert_allclose(found, 0.045 * ((r / 0.3) ** 2).log1p(), rtol=1e-6, atol=1e-12)
    assert found[1].item() == pytest.approx(r[1].item() ** 2 / 2, rel=1e-4)


def test_the_chain_computes_what_the_fitted_heads_compute() -> None:
    z, y, _ = simulate()
    location = fit_head(z, y, squared, [Output()])
    starts = [Output(-1.0), Output(-2.0, penalty_factor=math.inf)]
    scale = fit_head(z, y - location.unseen[:, 0], scale_loss, starts)
    assert scale.weight[1].abs().max() == 0  # a constant
    basis, w, bias = location.basis, location.weight[0], location.bias[0]
    u, found = Chain.of(basis.directions, -basis.offset, w, bias, scale)(z)
    torch.testing.assert_close(found.loc, location(z)[:, 0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.scale, scale(z).exp().sum(-1), rtol=1e-9, atol=1e-9)
    weight = location.weight[0]
    image = Cauchy(u.loc @ weight + location.bias, u.scale @ weight.abs())  # Y is U's linear image
    torch.testing.assert_close(image, found)
