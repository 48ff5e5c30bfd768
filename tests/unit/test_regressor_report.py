"""The report of a fitted regressor: pictures and figures that can be checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner  # noqa: E402

from causal_qwen.cli.program import app  # noqa: E402
from causal_qwen.regression.conformal import Conformal  # noqa: E402
from causal_qwen.regression.regressor import CausalTextRegressor  # noqa: E402
from causal_qwen.regression.report import coverage, write_regressor_report  # noqa: E402


def test_coverage_counts_scores_inside_the_intervals() -> None:
    scores = np.array([-3.0, -0.5, 0.5, 0.7, 1.5])
    fitted = Conformal(np.array([-2.0, -1.0, 0.0, 1.0]), np.ones(4))
    found = coverage(scores, fitted, np.array([0.4, 0.8, 0.9]))
    assert found[:2].tolist() == [0.6, 0.8]
    assert np.isnan(found[2])  # 4 rows do not reach 90%


def test_the_page_has_a_picture_and_errors_of_the_given_rows(
    priced: Any, rings: Any, tmp_path: Path
) -> None:
    page = write_regressor_report(priced, tmp_path / "out", "a <b>", rings[90:], "price")
    text = page.read_text()
    assert "<h1>a &lt;b&gt;</h1>" in text
    assert text.count("<img ") == 1
    error = np.median(
        np.abs(
            rings["price"][90:]
            - priced.suspicious(rings[90:], "price").set_index("row")["expected"]
        )
    )
    assert f"{error:.6g}" in text
    assert "20 rows: median error" in text


def test_the_command_recognises_a_regressor(
    priced: Any, rings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CausalTextRegressor, "load", lambda path, device="auto": priced)
    (tmp_path / "priced").mkdir()
    (tmp_path / "priced" / "regressor.skops").write_text("{}")
    new = rings[90:].assign(shop="Müller")
    new.to_csv(tmp_path / "new.csv", index=False, sep="|", encoding="latin-1")
    words = ["report", str(tmp_path / "priced"), str(tmp_path / "new.csv"), "--json"]
    words += ["--set", "encoding=latin-1", "--set", "separator=|"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    record = json.loads(done.stdout)
    assert record["page"] == str(tmp_path / "priced-report" / "index.html")
    assert [path.name for path in (tmp_path / "priced").iterdir()] == ["regressor.skops"]
