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
from causal_qwen.regression.regressor import CausalTextRegressor  # noqa: E402


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
    text = (tmp_path / "priced-report" / "index.html").read_text()
    error = np.median(np.abs(rings["price"][90:] - priced.predict(rings[90:])))
    assert f"20 rows: median error {error:.6g}" in text
    assert text.count("<img ") == 1
    assert [path.name for path in (tmp_path / "priced").iterdir()] == ["regressor.skops"]
