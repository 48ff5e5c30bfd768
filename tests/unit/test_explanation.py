"""Explanations: contributions add up to the prediction, and are exact where it is a sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from causal_qwen.regression.explanation import (  # noqa: E402
    explain_rows,
)
from causal_qwen.regression.sources import Schema, typical_row  # noqa: E402

ROWS = pd.DataFrame({"a": [3.0, 1.0], "b": [5.0, 2.0], "c": [7.0, 0.0], "d": [1.0, 1.0]})
BASE = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}


def explained(predict: Any, permutations: int = 2, seed: int = 0) -> Any:
    return explain_rows(ROWS, BASE, (), predict, permutations, seed)


def test_contributions_to_a_sum_are_exact_in_any_order() -> None:
    for seed in range(3):
        found = explained(lambda rows: rows["a"] + 10 * rows["b"] + rows["c"] ** 2, seed=seed)
        first = found.table[found.table["row"] == 0].set_index("part")["median"]
        assert first.to_dict() == pytest.approx({"b": 40, "c": 48, "a": 2, "d": 0})
    assert found.rows["prediction"].tolist() == [102, 21]
    assert found.rows["baseline"].tolist() == [12, 12]


def test_few_parts_are_tried_in_every_order() -> None:
    rows, base = ROWS[["a", "b"]], {"a": 1.0, "b": 1.0}
    found = explain_rows(rows, base, (), lambda given: given["a"] * given["b"], 2, 0)
    first = found.table[found.table["row"] == 0].set_index("part")
    assert first["median"].to_dict() == pytest.approx({"b": 8, "a": 6})  # means of both orders


def test_the_words_of_a_text_have_contributions_of_their_own() -> None:
    rows = pd.DataFrame({"note": ["a fine old ring"], "a": [2.0]})
    base = {"note": "", "a": 0.0}

    def predict(given: Any) -> Any:
        return given["a"] + 5 * given["note"].str.contains("fine")

    found = explain_rows(rows, base, ["note"], predict, 4, 0)
    assert found.table.set_index("part")["median"].to_dict() == pytest.approx(
        {"note: fine": 5, "a": 2, "note: a": 0, "note: old": 0, "note: ring": 0}
    )


def test_the_baseline_is_a_typical_row() -> None:
    frame = pd.DataFrame(
        {
            "carat": [1.0, np.nan, 2.0, 9.0],
            "cut": ["Ideal", "Fair", "Ideal", None],
            "note": ["x", "y", "z", "w"],
            "none": [None] * 4,
        }
    )
    row = typical_row(frame, Schema(["carat"], ["cut"], ["note"]))
    assert row == {"carat": 2.0, "cut": "Ideal", "note": "", "none": None}


def test_a_regressor_explains_its_medians(priced: Any, rings: Any) -> None:
    found = priced.explain(rings[95:97], permutations=4)
    np.testing.assert_allclose(found.rows["prediction"], priced.predict(rings[95:97]))
    total = found.table.groupby("row")["median"].sum()
    np.testing.assert_allclose(total, found.rows["prediction"] - found.rows["baseline"])
    assert found.table["part"][0] == "carat"
