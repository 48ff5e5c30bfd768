"""Commands on tables: what `fit` says, what `predict`, `audit` and `what-if` show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from typer.testing import CliRunner, Result  # noqa: E402

from causal_qwen.cli.program import app  # noqa: E402
from causal_qwen.regression.regressor import CausalTextRegressor  # noqa: E402


def run(*words: Any) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture
def file(rings: Any, tmp_path: Path) -> Path:
    path = tmp_path / "rings.csv"
    rings.to_csv(path, index=False)
    return path


@pytest.fixture
def fitted(priced: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which every command finds the regressor of the session."""
    monkeypatch.setattr(CausalTextRegressor, "load", lambda path, device="auto": priced)
    return "priced"


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[CausalTextRegressor]:
    """The regressors that `fit` would write."""
    found: list[CausalTextRegressor] = []
    monkeypatch.setattr(
        CausalTextRegressor, "save", lambda self, path, overwrite=False: found.append(self)
    )
    return found


FIT = ("--source", "columns", "-y", "price", "--set", "verbose=false", "-o", "new", "--json")


# ---------------------------------------------------------------- fit


def test_fit_reports_sources_and_the_errors_of_single_methods(
    file: Path, saved: list[Any], rings: Any
) -> None:
    report = json.loads(run("fit", file, *FIT).stdout)
    assert report["rows"] == 110
    assert report["sources"]["price"] == pytest.approx({"linear": 1.0})
    errors = report["errors"]["price"]
    median = rings["price"].median()
    assert errors["training median"] == pytest.approx((rings["price"] - median).abs().median())
    assert errors["together"] < errors["training median"]
    assert len(saved) == 1


def test_later_rows_test_what_earlier_ones_taught(
    rings: Any, tmp_path: Path, saved: list[Any]
) -> None:
    path = tmp_path / "dated.csv"
    days = pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(110)[::-1], unit="D")
    rings.assign(day=days.strftime("%Y-%m-%d")).to_csv(path, index=False)
    run("fit", path, *FIT, "--time", "day")
    judged = set(saved[0].suspicious()["line"])
    assert judged == set(range(2, 92))  # not the earliest rows, which are the file's last


# ---------------------------------------------------------------- predict


def test_rows_beyond_the_training_range_are_marked(fitted: str, rings: Any, tmp_path: Path) -> None:
    path = tmp_path / "large.csv"
    rings[:5].assign(carat=[0.5, 0.6, 9.0, 0.7, 0.8]).to_csv(path, index=False)
    done = run("predict", fitted, path, "--json")
    beyond = [row["beyond_training"] for row in json.loads(done.stdout)]
    assert [one > 0 for one in beyond] == [False, False, True, False, False]


# ---------------------------------------------------------------- report


def test_a_report_is_a_page_with_a_picture(
    priced: Any, rings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CausalTextRegressor, "load", lambda path, device="auto": priced)
    (tmp_path / "priced").mkdir()
    pytest.importorskip("matplotlib")
    (tmp_path / "priced" / "regressor.skops").write_text("{}")
    new = rings[90:].assign(shop="Müller")
    new.to_csv(tmp_path / "new.csv", index=False, sep="|", encoding="latin-1")
    words = ["report", str(tmp_path / "priced"), str(tmp_path / "new.csv"), "--json"]
    words += ["--set", "encoding=latin-1", "--set", "separator=|"]
    record = json.loads(run(*words).stdout)
    assert record["page"] == str(tmp_path / "priced-report" / "index.html")
    text = (tmp_path / "priced-report" / "index.html").read_text()
    error = np.median(np.abs(rings["price"][90:] - priced.predict(rings[90:])))
    assert f"20 rows: median error {error:.6g}" in text
    assert text.count("<img ") == 1
    assert [path.name for path in (tmp_path / "priced").iterdir()] == ["regressor.skops"]


# ---------------------------------------------------------------- audit and what-if


def test_an_audit_lists_the_wrong_rows_by_their_lines(
    rings: Any, file: Path, tmp_path: Path
) -> None:
    table = rings.copy()
    table.loc[[7, 50, 80], "price"] *= 100
    table.to_csv(file, index=False)
    output = tmp_path / "found.csv"
    words = ("audit", file, "-y", "price", "--source", "columns", "-o", output)
    done = run(*words, "--json")
    record = json.loads(done.stdout)
    assert record["rows"] == 110
    assert record["doubtful"] >= 3
    assert {row["line"] for row in record["worst"][:3]} == {9, 52, 82}
    assert pd.read_csv(output)["line"][:3].tolist() == [row["line"] for row in record["worst"][:3]]
    assert "labels look wrong" in run(*words, "--force").stdout
    every = json.loads(run("audit", file, "-y", "price", "--json").stdout)  # by all sources
    assert {row["line"] for row in every["worst"][:3]} == {9, 52, 82}


def test_an_audit_by_groups_judges_a_label_by_other_groups(rings: Any, tmp_path: Path) -> None:
    """A shop's own mistake, repeated in all of its rows, is found only from outside."""
    table = rings.assign(shop=[f"shop {row % 10}" for row in range(110)])
    table.loc[table["shop"] == "shop 3", "price"] *= 100
    path = tmp_path / "shops.csv"
    table.to_csv(path, index=False)
    words = ("audit", path, "-y", "price", "--source", "columns", "--group", "shop", "--json")
    record = json.loads(run(*words).stdout)
    wrong = {row + 2 for row in range(110) if row % 10 == 3}
    assert {row["line"] for row in record["worst"][: len(wrong)]} == wrong


def test_an_audit_by_time_lists_only_rows_that_earlier_ones_can_judge(
    rings: Any, file: Path, tmp_path: Path
) -> None:
    table = rings.assign(day=range(110)).sample(frac=1, random_state=0)
    table.to_csv(file, index=False)
    day = dict(zip(range(2, 112), table["day"], strict=True))  # of a line
    output = tmp_path / "found.csv"
    words = ("audit", file, "-y", "price", "--source", "columns", "-o", output)
    run(*words, "--time", "day")
    judged = {day[line] for line in pd.read_csv(output)["line"]}
    assert judged == set(range(110 - 5 * (110 // 6), 110))  # five folds of a sixth each
    with pytest.raises(ValueError, match="group and time"):
        run(*words, "--force", "--time", "day", "--group", "cut")


def test_what_if_answers_in_one_sentence(fitted: str, file: Path, rings: Any) -> None:
    words = ("what-if", fitted, file, "--row", 96, "--set", "carat=1.9", "--set", "cut=Ideal")
    done = run(*words)
    assert done.stdout.startswith(f"observed {rings['price'][95]}; had carat been 1.9 instead of ")
    record = json.loads(run(*words, "--observed", rings["price"][95] + 50, "--json").stdout)
    assert record["observed"] == rings["price"][95] + 50
    assert record["low"] < record["median"] < record["high"]
    assert record["changes"]["cut"]["after"] == "Ideal"
