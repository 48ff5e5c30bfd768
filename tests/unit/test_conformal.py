"""Split conformal: the rank that guarantees coverage, and the warning if there is none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.regression.conformal import Conformal, Limits


def fitted(residuals: list[float], scale: float = 1.0) -> Conformal:
    return Conformal.fit(np.array(residuals) / scale, np.ones(len(residuals)))


def test_the_radius_is_the_ranked_score() -> None:
    conformal = fitted([-9.0, 1.0, -2.0, 3.0, 4.0, -5.0, 6.0, 7.0, -8.0])  # |score| 1 to 9
    assert conformal.radius(0.5) == 5  # ceil(10 * 0.5)
    assert conformal.radius(0.51) == 6
    assert conformal.radius(0.9) == 9


@given(st.integers(1, 200), st.floats(0.01, 0.995))
def test_coverage_is_guaranteed_for_every_size_and_level(rows: int, level: float) -> None:
    """Exchangeable without ties: P(new |score| <= the k-th of n) = k / (n + 1)."""
    conformal = fitted(np.arange(1.0, rows + 1).tolist())
    if not conformal.reaches_level(level):
        assert rows + 1 < level / (1 - level) + 2
        return
    k = conformal.radius(level)
    assert level - 1e-6 <= k / (rows + 1) <= level + 1 / (rows + 1) + 1e-6


def test_light_tails_make_raw_cauchy_intervals_too_wide_and_calibrated_ones_right() -> None:
    noise = np.random.default_rng(0).normal(size=4000)
    scale = 0.62  # a Cauchy fitted to standard normal residuals
    conformal = fitted(noise[:2000].tolist(), scale)
    raw = scale * math.tan(math.pi * 0.95 / 2)
    assert raw > 3.9 * 1.96  # four times too wide
    assert scale * conformal.radius(0.95) == pytest.approx(1.96, rel=0.06)
    assert np.mean(np.abs(noise[2000:]) <= scale * conformal.radius(0.95)) == pytest.approx(
        0.95, abs=0.015
    )


def test_quantiles_of_skewed_residuals_are_one_sided() -> None:
    residuals = np.random.default_rng(1).exponential(size=999)
    conformal = fitted(residuals.tolist())
    for p in (0.05, 0.5, 0.9):
        assert conformal.quantile(p) == pytest.approx(np.sort(residuals)[round(1000 * p) - 1])


def weighted(residuals: list[float], weights: list[float]) -> Conformal:
    return Conformal.fit(np.array(residuals), np.array(weights))


def test_a_row_of_weight_0_counts_as_no_row() -> None:
    residuals = np.random.default_rng(0).normal(size=60)
    weights = (np.arange(60) % 3 > 0).astype(float)
    some, kept = (
        weighted(residuals.tolist(), weights.tolist()),
        fitted(residuals[weights > 0].tolist()),
    )
    for level in (0.5, 0.8, 0.95):
        assert some.radius(level) == kept.radius(level)
        assert some.quantile(level) == pytest.approx(kept.quantile(level))


def test_wrong_labels_without_credibility_do_not_widen_intervals() -> None:
    rng = np.random.default_rng(1)
    right, wrong = rng.normal(size=400), 100 + rng.normal(size=100)
    both = np.r_[right, wrong].tolist()
    found = weighted(both, [1.0] * 400 + [0.01] * 100)
    assert found.radius(0.9) == pytest.approx(1.645, rel=0.1)
    assert fitted(both).radius(0.9) > 90


# ---------------------------------------------------------------- of a fitted regressor


def test_a_calibrated_interval_may_leave_the_range_of_the_labels_and_a_median_may_not() -> None:
    limits = Limits.find(np.array([-1.0, 0.0, 2.0]), np.ones(3))
    assert limits.clip(np.array([-9.0, 9.0])).tolist() == [-4.0, 5.0]
    assert limits.clip(np.array([-9.0, 9.0]), is_calibrated=True).tolist() == [-9.0, 9.0]
    positive = Limits.find(np.array([1.0, 2.0]), np.ones(2))
    assert positive.clip(np.array([-9.0, 9.0]), is_calibrated=True).tolist() == [0.0, 9.0]
