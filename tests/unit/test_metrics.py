"""Samples of streams have the quantiles and spread of all numbers at once."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from causal_qwen.training import metrics
from causal_qwen.training.metrics import Sample


def test_few_numbers_have_exact_quantiles_and_spread_also_merged() -> None:
    values = np.random.default_rng(0).normal(100.0, 3.0, 10_001).astype(np.float32)
    found, other = Sample(), Sample()
    for place, part in enumerate(torch.from_numpy(values).split(977)):
        (found if place % 2 else other).add(part)
    found.join(other.kept, other.keys)
    for level in (0.0, 0.25, 0.5, 0.9, 1.0):
        assert found.quantile(level) == np.sort(values)[int(level * 10_000)]
    low, high = np.quantile(values, (0.25, 0.75))
    wide = values.astype(np.float64)
    expected = {"mean": wide.mean(), "median": np.median(wide), "std": wide.std(ddof=1)}
    assert found.spread() == pytest.approx({**expected, "iqr": high - low}, rel=1e-6)


def test_many_numbers_have_quantiles_of_a_fair_sample_in_bounded_memory() -> None:
    parts = [Sample(), Sample()]
    with mock.patch.object(metrics, "MOST", 4096):
        for place in range(40):
            draws = torch.randn(1000, generator=torch.Generator().manual_seed(place))
            parts[place % 3 == 0].add(draws)
        parts[0].join(parts[1].kept, parts[1].keys)
    assert len(parts[0].kept) == 4096
    found = [parts[0].quantile(level) for level in (0.25, 0.5, 0.75)]
    assert found == pytest.approx([-0.674, 0, 0.674], abs=0.08)
