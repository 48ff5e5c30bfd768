"""Linear heads on fixed features: the basis, the optimum, robustness, and the chain they become."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.regression.features import hidden_at_end
from causal_qwen.regression.head import (
    STEPS,
    Chain,
    Output,
    ValueLoss,
    _ParallelHeads,
    fit_chain,
    fit_head,
    init_number_head,
    location_loss,
    principal_basis,
    scale_loss,
    train_model,
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


def test_a_model_initialised_from_a_chain_computes_the_same(make_model: Callable[..., Any]) -> None:
    model = make_model()
    g = torch.Generator().manual_seed(0)
    z = torch.randn(60, 20, generator=g) @ torch.randn(20, model.config.hidden_size, generator=g)
    chain, _ = fit_chain(z, z[:, 0])
    assert len(chain.weight) == 20 < model.config.latent_size
    chain.copy_to(model)
    y = model.action.number(model.action.widen(model.abduct(z)))
    _, expected = chain(z)
    torch.testing.assert_close(y.loc.double(), expected.loc, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(y.scale.double(), expected.scale, rtol=1e-3, atol=1e-4)


def y_at_end(model: Any, encoded: Any) -> Cauchy:
    z = hidden_at_end(model, encoded)
    number: Cauchy = model.action.number(model.action.widen(model.abduct(z)))
    return number


def token_loss(model: Any, rows: int = 120) -> ValueLoss:
    """Texts of three tokens; the middle one determines the value. A fifth has no weight."""
    ids = torch.randint(1, 10, (rows, 3), generator=torch.Generator().manual_seed(0))
    weights = (torch.arange(rows) % 5 > 0).float()
    y = torch.where(weights > 0, (ids[:, 1] % 3 - 1).float(), 100.0)
    return ValueLoss(model, [(row, [0.0] * 3) for row in ids.tolist()], y, weights)


def test_training_changes_backbone_and_head_and_ignores_rows_without_weight(
    make_model: Callable[..., Any],
) -> None:
    model = make_model()
    loss = token_loss(model)
    init_number_head(model)
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    options = {"batch_size": 16, "held_out": 0.1, "patience": 30, "seed": 0}
    seen = []
    report = train_model(
        model,
        loss,
        120,
        learning_rate=1e-2,
        epochs=20,
        progress=lambda *at: seen.append(at),
        **options,
    )
    assert not torch.equal(before, model.model.layers[0].mlp.up_proj.weight)
    assert seen[-1] == (20 * 7, 20 * 7)
    assert report.epochs[report.kept - 1] == min(report.epochs) < report.before
    error = (y_at_end(model, loss.encoded).loc - loss.y).abs()[loss.weights > 0]
    assert error.median() < 0.3


def test_training_that_raises_the_validation_loss_is_undone(
    make_model: Callable[..., Any],
) -> None:
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss = token_loss(model)
    own = ValueLoss(model, loss.encoded, y_at_end(model, loss.encoded).loc.detach(), loss.weights)
    options = {"batch_size": 16, "held_out": 0.2, "patience": 2, "seed": 0}
    report = train_model(model, own, 120, learning_rate=1.0, epochs=2, **options)
    assert report.kept == 0
    assert len(report.epochs) == 2
    assert min(report.epochs) > report.before
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
