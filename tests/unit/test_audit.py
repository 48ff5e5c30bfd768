"""The audit of labels: wrong ones come first, with the number that was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from causal_qwen.regression.audit import (  # noqa: E402
    Judged,
    doubtful,
    summary,
    suspicion_table,
)
from causal_qwen.regression.regressor import CausalTextRegressor  # noqa: E402

WRONG = [3, 17, 41, 60]


@pytest.fixture(scope="module")
def corrupted(rings: Any) -> Any:
    """The same table with four prices a hundred times too high, and names for its rows."""
    table = rings[:90].set_index(pd.Index([f"ring {row}" for row in range(90)]))
    table.iloc[WRONG, table.columns.get_loc("price")] *= 100
    return table


@pytest.fixture(scope="module")
def auditor(corrupted: Any) -> CausalTextRegressor:
    with pytest.warns(UserWarning, match="look wrong"):
        return CausalTextRegressor(sources=["columns"], verbose=False).fit(corrupted, "price")


def judged(credibility: list[float], score: list[float]) -> Judged:
    columns = {name: np.arange(float(len(score))) for name in ("label", "expected", "low", "high")}
    return columns | {"credibility": np.array(credibility), "score": np.array(score)}


def test_wrong_training_labels_come_first(auditor: Any, corrupted: Any, rings: Any) -> None:
    table = auditor.suspicious()
    assert list(table) == ["row", "label", "expected", "low", "high", "credibility", "score"]
    assert set(table["row"][: len(WRONG)]) == {f"ring {row}" for row in WRONG}
    assert doubtful(table) >= len(WRONG)
    assert len(table) == 90
    assert (table["low"] <= table["expected"]).all()
    assert (table["expected"] <= table["high"]).all()
    first = table.iloc[0]
    assert first["label"] == corrupted["price"][first["row"]]
    true = rings["price"][int(first["row"].split()[1])]
    assert 0.5 < first["expected"] / true < 2


def test_expected_numbers_are_those_of_experts_that_have_not_seen_the_row(auditor: Any) -> None:
    table = auditor.suspicious().set_index("row")
    evidence = auditor.evidence_["price"]
    expected = table["expected"][[f"ring {row}" for row in range(90)]].to_numpy()
    np.testing.assert_allclose(expected, evidence.unseen, rtol=1e-9)


def test_unseen_rows_are_judged_beside_the_calibration_rows(priced: Any, rings: Any) -> None:
    table = rings[90:].copy()
    table.loc[[100, 105], "price"] *= 1000
    found = priced.suspicious(table, "price")
    assert len(found) == 20
    assert {*found.index[:2]} == {*found["row"].iloc[:2]} == {100, 105}
    assert (found["credibility"].iloc[:2] < 0.01).all()
    assert doubtful(found) == 2
    assert summary(found) == "2 of 20 labels look wrong (credibility below 0.5)."


def test_without_evidence_rows_are_ordered_by_the_size_of_the_score() -> None:
    table = suspicion_table({"price": judged([1, 1, 1, 1], [0.5, -9, np.nan, 2])}, pd.RangeIndex(4))
    assert table["row"].tolist() == [1, 3, 0]  # row 2 was in no test set
    assert summary(table).startswith("None of 3 labels")
