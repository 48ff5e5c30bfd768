"""Credibility: wrong labels are found by their residuals, and clean tables lose no label."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("scipy")

from causal_qwen.regression.credibility import NEGLIGIBLE, find_credibility

CLEAN = {
    "normal": lambda rng, size: rng.normal(size=size),
    "t4": lambda rng, size: rng.standard_t(4, size=size),
    "laplace": lambda rng, size: rng.laplace(size=size),
    "uniform": lambda rng, size: rng.uniform(-1, 1, size=size),
}
SKEWED = {
    "exponential": lambda rng, size: rng.exponential(size=size) - np.log(2),
    "lognormal": lambda rng, size: rng.lognormal(size=size) - 1,
    "wide lognormal": lambda rng, size: rng.lognormal(0, 1.5, size=size) - 1,
    "pareto": lambda rng, size: 0.6 - rng.pareto(1.5, size=size),
    "t2": lambda rng, size: rng.standard_t(2, size=size),
}


@pytest.mark.parametrize("rows", [100, 800])
@pytest.mark.parametrize("law", CLEAN)
def test_every_label_of_a_clean_table_is_credible(law: str, rows: int) -> None:
    for seed in range(2):
        residuals = 7.0 * CLEAN[law](np.random.default_rng(seed), rows)
        found = find_credibility(residuals, np.ones(rows))
        assert found.share == 0
        assert (found.probability == 1).all()


@pytest.mark.parametrize("rows", [100, 800])
@pytest.mark.parametrize("law", SKEWED)
def test_skewed_and_heavy_tailed_labels_are_no_mistakes(law: str, rows: int) -> None:
    accused = []
    for seed in range(5):
        residuals = 7.0 * SKEWED[law](np.random.default_rng(seed), rows)
        accused.append((find_credibility(residuals, np.ones(rows)).probability < 0.5).mean())
    assert np.median(accused) <= 0.02


@pytest.mark.parametrize("share", [0.05, 0.2, 0.35])
def test_the_share_of_wrong_labels_is_found_and_they_are_not_credible(share: float) -> None:
    rng = np.random.default_rng(0)
    is_wrong = rng.random(600) < share
    residuals = np.where(is_wrong, 30 * rng.standard_t(3, 600), rng.standard_t(6, 600))
    found = find_credibility(1e4 * residuals, np.ones(600))
    assert found.share == pytest.approx(share, abs=0.05)
    assert np.median(found.probability[~is_wrong]) > 0.97
    assert np.median(found.probability[is_wrong]) < 0.02
    assert (found.probability[is_wrong & (np.abs(residuals) > 20)] < 0.05).all()


@pytest.mark.parametrize("sides", [(5.0,), (5.0, -8.0)])
def test_wrong_labels_apart_from_skewed_right_ones_are_found(sides: tuple[float, ...]) -> None:
    """Tenfold labels and those of the other sign lie on one side; others on both."""
    rng = np.random.default_rng(0)
    is_wrong, at = rng.random(600) < 0.1, 5 * rng.choice(sides, 600)
    skewed = rng.exponential(size=600) - np.log(2)
    found = find_credibility(np.where(is_wrong, at + skewed, skewed), np.ones(600))
    assert found.share == pytest.approx(is_wrong.mean(), abs=0.02)
    assert ((found.probability < 0.5) == is_wrong).mean() > 0.99


def test_rows_without_weight_are_judged_but_not_counted() -> None:
    rng = np.random.default_rng(1)
    residuals, weights = rng.normal(size=400), np.ones(400)
    residuals[:80], weights[:80] = 50.0, 0.0
    assert find_credibility(residuals, weights).share == 0
    counted = find_credibility(residuals, np.ones(400))
    assert counted.share == pytest.approx(0.2, abs=0.03)
    weights[:10] = 1.0
    judged = find_credibility(residuals, weights)
    assert judged.share == pytest.approx(10 / 330, abs=0.02)
    assert (judged.probability[:80] < 0.01).all()


def test_the_unit_of_the_residuals_does_not_matter() -> None:
    rng = np.random.default_rng(2)
    residuals = np.where(rng.random(300) < 0.2, 40 * rng.normal(size=300), rng.normal(size=300))
    one, other = (find_credibility(k * residuals, np.ones(300)) for k in (1.0, 1e-5))
    np.testing.assert_allclose(one.probability, other.probability, atol=1e-3)


def test_negligible_residuals_of_any_shape_are_no_mistakes_but_far_ones_are() -> None:
    rng = np.random.default_rng(0)
    tiny = np.where(rng.random(300) < 0.25, 2e-3, 1e-4) * rng.normal(size=300)
    assert find_credibility(tiny, np.ones(300)).share > 0.1  # their shape alone
    assert find_credibility(tiny, np.ones(300), NEGLIGIBLE).share == 0
    tiny[:5] = 3.0
    for residuals in (tiny, np.where(np.abs(tiny) < 1, 0.0, tiny)):
        found = find_credibility(residuals, np.ones(300), NEGLIGIBLE)
        assert np.flatnonzero(found.probability < 0.5).tolist() == [0, 1, 2, 3, 4]


def test_labels_of_two_kinds_are_no_mistakes() -> None:
    rng = np.random.default_rng(0)
    residuals = np.where(rng.random(300) < 0.5, 8.0, 0.2) * rng.normal(size=300)
    assert find_credibility(residuals, np.ones(300)).share == 0
