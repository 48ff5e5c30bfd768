"""Targets are read from names, tables, arrays and cells as people write them."""

from __future__ import annotations

import datetime
import warnings
from typing import Any

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from causal_qwen.regression.sources import Schema, row_texts  # noqa: E402 - pandas is an extra
from causal_qwen.tables.targets import read_targets  # noqa: E402 - pandas is an extra


def read(X: Any, y: Any) -> dict[str, list[float]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*read as")
        return {name: column.tolist() for name, column in read_targets(X, y)[0].items()}


RINGS = pd.DataFrame({"carat": [1.0, 2.0, 3.0], "price": ["$1,200", "$900", "2,725"]})


def test_amounts_of_a_column_are_read_with_a_note_that_shows_one() -> None:
    with pytest.warns(UserWarning, match="read as") as caught:
        found, is_single = read_targets(RINGS, "price")
    assert found["price"].tolist() == [1200, 900, 2725]
    assert is_single
    (note,) = [str(warning.message) for warning in caught]
    assert note == "price: 3 cells such as '$1,200' are read as numbers (1200)."


def test_a_percentage_keeps_its_number_and_stands_beside_percentages_only() -> None:
    assert read(["a", "b"], ["5%", "0.5%"]) == {"value": [5, 0.5]}
    with pytest.raises(ValueError, match=r"'rate' has .* units, '5%' and '0\.05'"):
        read_targets(pd.DataFrame({"rate": ["5%", "0.05"]}), "rate")
    with pytest.raises(ValueError, match=r"'\$5' and '€5'"):
        read_targets(pd.DataFrame({"cost": ["$5", "€5"]}), "cost")


def test_missing_cells_are_nan_and_others_are_named() -> None:
    found = read(["a"] * 5, pd.Series([1, None, "NA", "", pd.NA], dtype=object))
    np.testing.assert_array_equal(found["value"], [1, *[np.nan] * 4])
    frame = pd.DataFrame({"p": ["1", "1.5k", "5 kg"]}, index=[10, 11, 12])
    with pytest.raises(ValueError, match=r"'p' .* rows 11, 12, such as '1\.5k'"):
        read_targets(frame, "p")


@pytest.mark.parametrize(
    "cells",
    [
        ["2024-05-01", "2024-05-02"],
        ["5/6/2024", None],
        [datetime.date(2024, 5, 1)],
        pd.to_datetime(["2024-05-01"]),
        np.array(["2024-05-01"], "datetime64[D]"),
        [pd.Timestamp("2024-05-01"), None],
    ],
)
def test_dates_are_refused_with_the_cure(cells: Any) -> None:
    with pytest.raises(ValueError, match=r"'sold' has no number in .* the days since"):
        read_targets(None, {"sold": cells})


# --- the spellings of targets, and what the language model reads


@pytest.fixture
def rings() -> Any:
    return pd.DataFrame(
        {
            "carat": [0.23, 2.0, np.nan],
            "cut": ["very_good", None, "Ideal"],
            "price": [326, 18_000, 1],
        }
    )


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


def test_a_row_without_texts_is_read_as_its_columns(rings: Any) -> None:
    assert row_texts(rings, Schema(["carat"], ["cut"], [])) == [
        "carat is 0.23, cut is very good",
        "carat is 2, cut is unknown",
        "carat is unknown, cut is Ideal",
    ]


def test_texts_beside_other_columns_are_read_verbatim_and_alone_by_their_names() -> None:
    table = pd.DataFrame({"note": ["Some  rust,\nkept!", None], "more": ["x_y", ""], "n": [1, 2]})
    both = Schema(["n"], [], ["note", "more"])
    assert row_texts(table, both) == ["Some rust, kept! x_y", ""]
    alone = ["note is Some rust, kept!, more is x y", "note is unknown, more is unknown"]
    assert row_texts(table[["note", "more"]], both) == alone
