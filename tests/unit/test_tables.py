"""Rows become sentences: names, units, missing values, templates; checks of the input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pd = pytest.importorskip("pandas")

from causal_qwen.regression.sentences import (  # noqa: E402 - pandas is an extra
    template_columns,
    to_sentences,
)
from causal_qwen.tables.targets import read_targets  # noqa: E402


@pytest.fixture
def rings() -> Any:
    return pd.DataFrame(
        {
            "carat": [0.23, 2.0, np.nan],
            "cut_grade": ["very_good", None, "Ideal"],
            "width (mm)": [3.95, 4, 5e6],
            "is_new": [True, False, True],
            "sold": pd.to_datetime(["2024-05-01", None, "2025-12-24"]),
            "price": [326, 18_000, 1],
        }
    )


def test_a_sentence_lists_names_values_and_units(rings: Any) -> None:
    columns = ["carat", "cut_grade", "width (mm)", "is_new", "sold"]
    assert to_sentences(rings, columns, units={"carat": "ct"}, question="The price is") == [
        "carat is 0.23 ct, cut grade is very good, width is 3.95 mm, is new is yes, "
        "sold is 2024-05-01. The price is",
        "carat is 2 ct, cut grade is unknown, width is 4 mm, is new is no, "
        "sold is unknown. The price is",
        "carat is unknown, cut grade is Ideal, width is 5000000 mm, is new is yes, "
        "sold is 2025-12-24. The price is",
    ]


def test_free_text_comes_first_and_verbatim() -> None:
    table = pd.DataFrame({"year": [1999, 2001], "note": ["Some  rust,\nsnake_case kept!", None]})
    assert to_sentences(table, ["year", "note"], text=["note"]) == [
        "Some rust, snake_case kept! year is 1999",
        "year is 2001",
    ]


def test_a_template_is_filled_and_missing_cells_are_unknown(rings: Any) -> None:
    template = "A {carat} carat ring, {cut_grade}"
    columns = template_columns(template, ["price"])
    assert columns == ["carat", "cut_grade"]
    assert to_sentences(rings, columns, template=template) == [
        "A 0.23 carat ring, very good",
        "A 2 carat ring, unknown",
        "A unknown carat ring, Ideal",
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("no column", "template"),
        ("{carat} for {price}", "target 'price'"),
    ],
)
def test_a_template_without_columns_or_with_a_target_is_refused(
    template: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        template_columns(template, ["price"])


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_in_a_sentence_parses_to_the_same_value(value: float) -> None:
    (sentence,) = to_sentences(pd.DataFrame({"x": [value]}), ["x"])
    assert float(sentence.removeprefix("x is ")) == pytest.approx(value, rel=1e-9, abs=0)


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
