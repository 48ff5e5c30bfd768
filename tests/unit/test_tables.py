"""Rows become sentences: names, units, missing values, templates, and what users give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pd = pytest.importorskip("pandas")

from causal_qwen.regression.sentences import (  # noqa: E402 - pandas is an extra
    ask_for,
    empty_columns,
    join_sentences,
    read_targets,
    read_texts,
    to_sentences,
    used_columns,
)


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


def test_a_sentence_is_made_of_names_values_and_units(rings: Any) -> None:
    columns = ["carat", "cut_grade", "width (mm)", "is_new", "sold"]
    assert to_sentences(rings, columns, units={"carat": "ct"}, question="The price is") == [
        "carat is 0.23 ct, cut grade is very good, width is 3.95 mm, is new is yes, "
        "sold is 2024-05-01. The price is",
        "carat is 2 ct, cut grade is unknown, width is 4 mm, is new is no, "
        "sold is unknown. The price is",
        "carat is unknown, cut grade is Ideal, width is 5000000 mm, is new is yes, "
        "sold is 2025-12-24. The price is",
    ]


def test_free_text_comes_first_in_its_own_words() -> None:
    table = pd.DataFrame({"year": [1999, 2001], "note": ["Some  rust,\nsnake_case kept!", None]})
    assert to_sentences(table, ["year", "note"], text=["note"]) == [
        "Some rust, snake_case kept! year is 1999",
        "year is 2001",
    ]


def test_a_template_is_filled_and_missing_cells_are_unknown(rings: Any) -> None:
    template = "A {carat} carat ring, {cut_grade}"
    columns = used_columns(rings, template=template, without=["price"])
    assert columns == ["carat", "cut_grade"]
    assert to_sentences(rings, columns, template=template) == [
        "A 0.23 carat ring, very good",
        "A 2 carat ring, unknown",
        "A unknown carat ring, Ideal",
    ]


def test_every_column_but_the_targets_is_used(rings: Any) -> None:
    names = used_columns(rings, template=None, without=["price", "sold"])
    assert names == ["carat", "cut_grade", "width (mm)", "is_new"]


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("no column", "names no column"),
        ("{karat} ring", "no column 'karat'; the table has 'carat'"),
        ("{carat} for {price}", "tells the target 'price' itself"),
    ],
)
def test_a_template_that_cannot_work_is_refused(rings: Any, template: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        used_columns(rings, template=template, without=["price"])


def test_columns_without_any_value_are_found(rings: Any) -> None:
    rings["color"], rings["memo"] = None, ["", " ", None]
    assert empty_columns(rings, ["carat", "color", "memo"]) == ["color", "memo"]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_in_a_sentence_is_the_number(value: float) -> None:
    (said,) = to_sentences(pd.DataFrame({"x": [value]}), ["x"])
    assert float(said.removeprefix("x is ")) == pytest.approx(value, rel=1e-9, abs=0)


def test_questions_name_their_targets() -> None:
    assert ask_for(["sale_price"]) == "The sale price is"
    assert ask_for(["a", "b", "c"]) == "The a, b and c are"


@pytest.mark.parametrize(
    ("text", "joined"),
    [("Done.", "Done. Q"), ("Open", "Open. Q"), ("Why?", "Why? Q"), ("价。", "价。 Q")],
)
def test_sentences_are_joined_by_a_full_stop_if_none_is_there(text: str, joined: str) -> None:
    assert join_sentences(text, "Q") == joined
    assert join_sentences(text, "") == text


# --- what users give


@pytest.mark.parametrize("kind", [list, np.array, pd.Series, lambda x: np.array(x).reshape(-1, 1)])
def test_texts_come_in_many_forms(kind: Any) -> None:
    assert read_texts(kind(["a", "b"])) == ["a", "b"]


@pytest.mark.parametrize(
    ("X", "error", "sentence"),
    [
        ("a text", TypeError, "one text; give a list"),
        (["a", 3], TypeError, r"X\[1\] is int"),
        (np.zeros((2, 3)), ValueError, "3 columns; name them in a DataFrame"),
    ],
)
def test_what_is_no_text_is_refused(X: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        read_texts(X)


def test_targets_come_in_many_forms(rings: Any) -> None:
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


@pytest.mark.parametrize(
    ("X", "y", "sentence"),
    [
        (pd.DataFrame({"a": [1]}), "prize", "no column 'prize'; the table has 'a'"),
        (["a text"], "price", "'price' names a column, and X is no table"),
        (["a text"], ["cheap"], "'cheap' names a column"),
        (["a text"], np.array(["cheap"]), "'value' holds what is no number"),
        (["a text"], 3.0, "one per row"),
        (["a text"], {}, "names no target"),
    ],
)
def test_targets_that_are_none_are_refused(X: Any, y: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_targets(X, y)
