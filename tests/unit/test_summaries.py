"""Summaries of streams equal those of all numbers at once."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.training import summaries
from causal_qwen.training.summaries import Quantiles, Spread

LEVELS = (0.0, 0.25, 0.5, 0.9, 1.0)
numbers = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=60)


def lower(values: list[float], level: float) -> float:
    return sorted(values)[int(level * (len(values) - 1))]


def streamed(values: list[float], parts: int) -> Quantiles:
    found = Quantiles()
    for part in torch.tensor(values).tensor_split(parts):
        found.add(part)
    return found


@given(numbers, st.integers(1, 5))
def test_few_numbers_have_exact_quantiles(values: list[float], parts: int) -> None:
    assert streamed(values, parts).at(*LEVELS) == [lower(values, level) for level in LEVELS]


@given(numbers, st.integers(1, 5), st.integers(0, 20))
def test_many_numbers_have_quantiles_right_to_a_bin(
    values: list[float], parts: int, exact: int
) -> None:
    with mock.patch.object(summaries, "EXACT", exact):
        found = streamed(values, parts)
    assert (found.bins is None) == (len(values) <= exact)
    for level, value in zip(LEVELS, found.at(*LEVELS), strict=True):
        assert value == pytest.approx(lower(values, level), rel=2**-11, abs=1e-38)


@given(numbers, numbers, st.integers(0, 40), st.integers(0, 40))
def test_merged_parts_equal_the_whole(
    one: list[float], two: list[float], first: int, second: int
) -> None:
    """Whether a part has kept its numbers or counted them."""
    with mock.patch.object(summaries, "EXACT", first):
        left = streamed(one, 2)
    with mock.patch.object(summaries, "EXACT", second):
        right = streamed(two, 3)
        left.merge(right)
    assert left.count == len(one) + len(two)
    for level, value in zip(LEVELS, left.at(*LEVELS), strict=True):
        assert value == pytest.approx(lower(one + two, level), rel=2**-11, abs=1e-38)


@pytest.mark.parametrize("center", [0.0, 1e6])
def test_spread_of_a_stream_equals_numpys(center: float) -> None:
    values = np.random.default_rng(0).normal(center, 3.0, 10_001).astype(np.float32)
    found, other = Spread(), Spread()
    for place, part in enumerate(torch.from_numpy(values).split(977)):
        (found if place % 2 else other).add(part)
    found.merge(other)
    low, high = np.quantile(values, (0.25, 0.75))
    wide = values.astype(np.float64)
    expected = {"mean": wide.mean(), "median": np.median(wide), "std": wide.std(ddof=1)}
    assert found.compute() == pytest.approx({**expected, "iqr": high - low}, rel=1e-3, abs=1e-2)
    assert found.compute()["std"] == pytest.approx(wide.std(ddof=1), rel=1e-9)


def test_memory_of_a_stream_is_bounded() -> None:
    found = Quantiles()
    with mock.patch.object(summaries, "EXACT", 1000):
        for _ in range(20):
            found.add(torch.randn(999))
    assert not found.kept
    assert found.bins is not None
    assert len(found.bins) == 2**20
    assert int(found.bins.sum()) == found.count == 20 * 999


def test_nothing_has_no_quantile() -> None:
    assert all(math.isnan(value) for value in Spread().compute().values())
