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
from causal_qwen.training.summaries import Sample, Spread

LEVELS = (0.0, 0.25, 0.5, 0.9, 1.0)
numbers = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=60)


def streamed(values: list[float], parts: int) -> Sample:
    found = Sample()
    for part in torch.tensor(values).tensor_split(parts):
        found.add(part)
    return found


@given(numbers, numbers, st.integers(1, 5))
def test_few_numbers_have_exact_quantiles_also_merged(
    one: list[float], two: list[float], parts: int
) -> None:
    found = streamed(one, parts)
    found.merge(streamed(two, 2))
    both = sorted(one + two)
    assert found.at(*LEVELS) == [both[int(level * (len(both) - 1))] for level in LEVELS]


def test_many_numbers_have_quantiles_of_a_fair_sample_in_bounded_memory() -> None:
    parts = [Sample(), Sample()]
    with mock.patch.object(summaries, "MOST", 4096):
        for place in range(40):
            draws = torch.randn(1000, generator=torch.Generator().manual_seed(place))
            parts[place % 3 == 0].add(draws)
        parts[0].merge(parts[1])
    assert parts[0].count == 40_000
    assert 1000 < len(parts[0].kept) <= 4096
    assert parts[0].at(0.25, 0.5, 0.75) == pytest.approx([-0.674, 0, 0.674], abs=0.08)


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


def test_nothing_has_no_quantile() -> None:
    assert all(math.isnan(value) for value in Spread().compute().values())
