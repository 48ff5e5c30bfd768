"""The audit of labels: wrong ones come first, with the number that was expected."""

from __future__ import annotations

from typing import Any

import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from causal_qwen.regression.audit import doubtful, summary  # noqa: E402
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


def test_without_evidence_rows_are_ordered_by_the_size_of_the_score(priced: Any) -> None:
    table = priced.suspicious()
    assert (table["credibility"] == 1).all()
    assert table["score"].abs().is_monotonic_decreasing
    assert summary(table) == "0 of 90 labels look wrong (credibility below 0.5)."
