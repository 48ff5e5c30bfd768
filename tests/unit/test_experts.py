"""Experts: the weights of a stack, and predictions of rows that no expert has seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sklearn.model_selection import KFold

from causal_qwen.regression.experts import (
    Expert,
    Growing,
    Problem,
    fit_stack,
    stack_weights,
)

ROWS = 240


def predictions(seed: int = 0, rows: int = 2000) -> Any:
    return np.random.default_rng(seed).normal(size=(rows, 3))


def test_stack_weights_recover_known_weights_despite_wrong_labels() -> None:
    found = predictions()
    rng = np.random.default_rng(1)
    y = found @ [0.7, 0.3, 0.0] + 0.5 + 0.05 * rng.standard_cauchy(2000)
    for labels in (y, np.where(np.arange(2000) % 5 == 0, 10 * y + 30, y)):
        mix = stack_weights(found, labels, np.ones(2000))
        np.testing.assert_allclose(mix.weights, [0.7, 0.3, 0.0], atol=0.03)
        assert mix.intercept == pytest.approx(0.5, abs=0.03)
        np.testing.assert_allclose(mix(found), found @ mix.weights + mix.intercept)


def simulate() -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, 4)) / 2
    return x, x @ [1.0, 1.0, 0.0, 0.0] + 0.1 * rng.normal(size=ROWS)


def test_the_chain_of_a_stack_is_the_weighted_sum_of_its_experts() -> None:
    x, y = simulate()
    splits = list(KFold(3, shuffle=True, random_state=0).split(x))
    stack, evidence = fit_stack({"linear": x}, y, np.ones(ROWS), splits)
    coordinates = stack.coordinates({"linear": x})
    assert coordinates.shape == (ROWS, len(stack.experts) + 1)
    found = stack.chain(torch.from_numpy(coordinates))
    assert np.median(np.abs(found.loc.numpy() - y)) < 0.1
    assert evidence.credibility.share == 0
    assert np.median(np.abs(evidence.unseen[:, 0] - y)) < 0.1


def test_an_unseen_prediction_does_not_depend_on_the_label_of_its_row() -> None:
    x, y = simulate()
    splits = list(KFold(3, shuffle=True, random_state=0).split(x))
    moved = y.copy()
    moved[7] += 0.2
    one, two = (
        fit_stack({"linear": x}, labels, np.ones(ROWS), splits)[1].unseen for labels in (y, moved)
    )
    (fold,) = [test for _, test in splits if 7 in test]
    np.testing.assert_allclose(one[fold], two[fold], rtol=1e-9)
    assert not np.allclose(np.delete(one, fold), np.delete(two, fold), rtol=1e-9)


def test_trees_that_grow_in_stages_are_those_of_one_fit() -> None:
    x, y = simulate()
    problem = Problem({"boosting": x}, 0, y, np.ones(ROWS), [])
    for loss in ("squared_error", "absolute_error"):
        one, two = (
            Growing(Expert("boosting", loss), problem, np.ones(ROWS), np.arange(ROWS))
            for _ in range(2)
        )
        one.grow(5)
        np.testing.assert_array_equal(one.grow(12).predict(x), two.grow(12).predict(x))
        assert not np.array_equal(one.grow(13).predict(x), two.grow(12).predict(x))


def test_the_language_model_is_kept_only_where_it_makes_unseen_labels_likelier() -> None:
    x, y = simulate()
    z = np.random.default_rng(1).normal(size=(ROWS, 4)) / 2
    splits = list(KFold(3, shuffle=True, random_state=0).split(x))
    for labels, sources in ((y, {"linear"}), (y + z[:, 0], {"linear", "model"})):
        stack, _ = fit_stack({"linear": x, "model": z}, labels, np.ones(ROWS), splits)
        assert {expert.source for expert, _ in stack.experts} == sources


def test_one_far_label_of_a_small_table_does_not_move_the_others() -> None:
    x, y = (part[:25] for part in simulate())
    far = np.where(np.arange(25) == 7, y + 40, y)
    splits = list(KFold(5, shuffle=True, random_state=0).split(x))
    stack, evidence = fit_stack({"linear": x}, far, np.ones(25), splits)
    found = stack.chain(torch.from_numpy(stack.coordinates({"linear": x})))
    assert evidence.credibility.share == 0  # so few residuals are no evidence
    assert np.median(np.abs(found.loc.numpy() - y)) < 0.2
