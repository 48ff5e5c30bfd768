"""Ridge: scikit-learn's solution, honest leave-one-out predictions, and labels that are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

pytest.importorskip("sklearn")

from sklearn.linear_model import Ridge

from causal_qwen.regression.experts import Design, fit_ridge

SHAPES = st.sampled_from([(14, 4), (9, 9), (6, 20)])  # more rows, as many, more features


def simulate(rows: int, size: int, seed: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, size))
    y = x[:, 0] - 2 * x[:, -1] + 3 + rng.normal(size=rows)
    return x, y, rng.uniform(0.2, 2.0, rows)


def scikit_learn(x: Any, y: Any, weights: Any, penalty: float, like: Any, center: float) -> Any:
    """The same function by scikit-learn: penalties in units of the mean square m of `like`'s rows,
    the constant as one more column of size m."""
    level = (like**2).sum() / len(like)
    ridge = Ridge(alpha=penalty * level, fit_intercept=False, solver="cholesky")

    def wider(rows: Any) -> Any:
        return np.hstack([rows, np.full((len(rows), 1), np.sqrt(level))])

    ridge.fit(wider(x), y - center, sample_weight=weights)
    return lambda rows: ridge.predict(wider(rows)) + center


@given(SHAPES, st.integers(0, 999), st.sampled_from([0.01, 0.3, 3.0]))
def test_the_solution_is_scikit_learns(shape: tuple[int, int], seed: int, penalty: float) -> None:
    x, y, weights = simulate(*shape, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("causal_qwen.regression.experts.PENALTIES", (penalty,))
        found = fit_ridge(x, y, weights)
    center = np.average(y, weights=weights)
    expected = scikit_learn(x, y, weights / weights.max(), penalty, x, center)
    fresh = np.random.default_rng(seed).normal(size=(5, shape[1]))
    np.testing.assert_allclose(found.predict(fresh), expected(fresh), rtol=1e-6, atol=1e-8)


@given(SHAPES, st.integers(0, 999), st.sampled_from([0.01, 0.3, 3.0]))
def test_unseen_predictions_are_those_of_fits_without_the_row(
    shape: tuple[int, int], seed: int, penalty: float
) -> None:
    x, y, weights = simulate(*shape, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("causal_qwen.regression.experts.PENALTIES", (penalty,))
        found = fit_ridge(x, y, weights).unseen
    center = np.average(y, weights=weights)
    for row in range(len(y)):
        others = np.arange(len(y)) != row
        fit = scikit_learn(
            x[others], y[others], (weights / weights.max())[others], penalty, x, center
        )
        assert found[row] == pytest.approx(fit(x[row : row + 1])[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("size", [5, 300])
def test_the_robust_fit_is_not_moved_by_a_fifth_of_wrong_labels(size: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, size)) / np.sqrt(size)
    truth = 5 * x[:, :5].sum(1)
    y = truth + 0.1 * rng.normal(size=200)
    spoiled = np.where(np.arange(200) < 40, 10 * y + 20, y)
    clean = np.median(np.abs(fit_ridge(x, y, np.ones(200), robust=True).unseen - truth))
    robust = np.median(np.abs(fit_ridge(x, spoiled, np.ones(200), robust=True).unseen - truth))
    plain = np.median(np.abs(fit_ridge(x, spoiled, np.ones(200)).unseen - truth))
    assert robust < max(2 * clean, 0.1)
    assert plain > 3 * robust


@given(SHAPES, st.integers(0, 999), st.booleans())
def test_a_part_of_a_design_gives_the_function_of_its_rows(
    shape: tuple[int, int], seed: int, robust: bool
) -> None:
    x, y, weights = simulate(*shape, seed)
    rows = np.random.default_rng(seed).permutation(shape[0])[: shape[0] - 2]
    whole = Design.of(sparse.csr_array(x))
    found = fit_ridge(whole.take(rows), y[rows], weights[rows], robust=robust)
    expected = fit_ridge(x[rows], y[rows], weights[rows], robust=robust)
    np.testing.assert_allclose(found.predict(x), expected.predict(x), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.unseen, expected.unseen, rtol=1e-6, atol=1e-9)
