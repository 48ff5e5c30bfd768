"""Tables that users bring: nearly empty columns, names of any kind, dates as they are written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")


from causal_qwen.regression.regressor import CausalTextRegressor  # noqa: E402
from causal_qwen.tables.frames import column_kinds, to_numbers  # noqa: E402


def quick(**options: Any) -> Any:
    return CausalTextRegressor(**{"folds": 3, "verbose": False, **options})


def table(rows: int = 90, seed: int = 0) -> Any:
    """y = 3 a + 5 [b is "x"] + noise"""
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(0, 10, rows), rng.choice(["x", "y"], rows)
    y = 3 * a + 5 * (b == "x") + rng.normal(0, 0.3, rows)
    return pd.DataFrame({"a": a, "b": b, "y": y})


# --- dates

DATES = pd.date_range("1990-01-05", periods=200, freq="37D")
WRITTEN = {
    "month first": [f"{d.month}/{d.day}/{d.year}" for d in DATES],
    "with a time": [f"{d.month}/{d.day}/{d.year} 0:00:00" for d in DATES],
    "day first": [f"{d.day}/{d.month}/{d.year}" for d in DATES],
    "dots": [f"{d.day:02}.{d.month:02}.{d.year}" for d in DATES],
    "month in words": [d.strftime("%b %d %Y") for d in DATES],
    "day and month": [d.strftime("%d %B %Y") for d in DATES],
    "short": [d.strftime("%d-%b-%y") for d in DATES],
    "long": [d.strftime("%A, %B %d, %Y") for d in DATES],
    "clock": [d.strftime("%m/%d/%Y 12:00 AM") for d in DATES],
    "year first": [d.strftime("%Y-%m-%d") for d in DATES],
}


@pytest.mark.parametrize("how", WRITTEN)
def test_dates_are_dates_however_they_are_written(how: str) -> None:
    column = pd.Series(WRITTEN[how], name="when")
    assert column_kinds(column.to_frame()) == {"when": "date"}
    days = (DATES - pd.Timestamp(0)).days
    np.testing.assert_array_equal(to_numbers(column), days)


def test_year_month_and_weekday_of_a_date_are_learned(tmp_path: Any) -> None:
    dates = pd.date_range("2001-01-01", periods=400, freq="3D")
    written = [f"{d.day}/{d.month}/{d.year}" for d in dates]  # the last ones could be either
    noise = np.random.default_rng(0).normal(0, 1, 400)
    y = 10.0 * (dates.day_of_week >= 5) + dates.month + noise
    rows = pd.DataFrame({"when": written, "y": y})
    fitted = quick(sources=["boosting"]).fit(rows[:330], "y")
    assert {"when", "year of when", "month of when", "weekday of when"} <= {
        *fitted.source_.table.schema.numbers
    }
    assert np.median(np.abs(fitted.predict(rows[:330]) - y[:330])) < 1.0
    one = rows.iloc[[4]].assign(when="4/3/2001")  # Sunday, the 4th of March, as in training
    same = rows.iloc[[4]].assign(when="2001-03-04")
    np.testing.assert_array_equal(fitted.predict(one), fitted.predict(same))
    fitted.save(tmp_path / "saved")
    loaded = CausalTextRegressor.load(tmp_path / "saved")
    np.testing.assert_array_equal(loaded.predict(one), fitted.predict(one))


def test_dates_whose_day_may_be_the_month_are_named() -> None:
    rows = table(60, seed=1).assign(
        when=[f"{1 + row % 12}/{1 + row % 11}/2001" for row in range(60)]
    )
    with pytest.warns(UserWarning, match=r"'1/1/2001' are read with the month first"):
        quick(sources=["columns"]).fit(rows, "y")


# --- names and rows


@pytest.mark.parametrize("groups", [None, [f"g{row % 9}" for row in range(90)]])
def test_the_order_of_rows_moves_no_prediction(groups: list[str] | None) -> None:
    given = table().assign(note=[f"note {row % 7} of {row}" for row in range(90)])
    order = np.random.default_rng(1).permutation(90)
    mixed = given.iloc[order]
    options = {"sources": ["columns", "words", "kernel", "boosting"]}
    one = quick(**options).fit(given, "y", groups=groups)
    of_mixed = None if groups is None else np.array(groups)[order]
    other = quick(**options).fit(mixed, "y", groups=of_mixed)
    np.testing.assert_allclose(other.predict(given), one.predict(given), rtol=1e-9)
    np.testing.assert_allclose(
        other.predict_interval(given), one.predict_interval(given), rtol=1e-9
    )
    judged = one.suspicious(), other.suspicious()
    np.testing.assert_allclose(*(found.sort_index()["score"] for found in judged), rtol=1e-6)
    np.testing.assert_array_equal(judged[1]["label"], given["y"][judged[1].index])


# --- what the cut had lost


def test_a_table_of_several_columns_is_no_list_of_texts() -> None:
    texts = [f"grade {grade}" for grade in "ABCDEFGHI" * 2]
    fitted = quick(sources=["words"]).fit(texts, np.arange(18.0))
    with pytest.raises(ValueError, match="X has 2 columns"):
        fitted.predict(pd.DataFrame({"a": texts, "b": texts}))
