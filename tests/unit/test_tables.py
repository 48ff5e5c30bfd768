"""Rows as the language model reads them, and the spellings of targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from causal_qwen.regression.sources import Schema, row_texts  # noqa: E402 - pandas is an extra
from causal_qwen.tables.targets import read_targets  # noqa: E402


@pytest.fixture
def rings() -> Any:
    return pd.DataFrame(
        {
            "carat": [0.23, 2.0, np.nan],
            "cut": ["very_good", None, "Ideal"],
            "price": [326, 18_000, 1],
        }
    )


def test_a_row_without_texts_is_read_as_its_columns(rings: Any) -> None:
    assert row_texts(rings, Schema(["carat"], ["cut"], [])) == [
        "carat is 0.23, cut is very_good",
        "carat is 2, cut is unknown",
        "carat is unknown, cut is Ideal",
    ]


def test_texts_are_read_verbatim() -> None:
    table = pd.DataFrame({"note": ["Some  rust,\nkept!", None], "more": ["x", "y"], "n": [1, 2]})
    assert row_texts(table, Schema(["n"], [], ["note", "more"])) == ["Some rust, kept! x", "y"]


# --- texts and targets


def test_targets_are_read_from_names_series_arrays_and_dicts(rings: Any) -> None:
    def read(y: Any, X: Any = rings) -> tuple[dict[str, list[float]], bool]:
        found, is_single = read_targets(X, y)
        assert all(column.dtype == np.float64 for column in found.values())
        return {name: column.tolist() for name, column in found.items()}, is_single

    price = [326.0, 18_000.0, 1.0]
    assert read("price") == ({"price": price}, True)
    assert read(["price"]) == ({"price": price}, False)
    assert read(rings["price"]) == ({"price": price}, True)
    assert read(price) == ({"value": price}, True)
    assert read(rings[["price"]]) == ({"price": price}, False)
    assert read({"a": price, "b": price}) == ({"a": price, "b": price}, False)
    assert read(np.array([price, price]).T) == ({"value 1": price, "value 2": price}, False)
