"""The text regressor in scikit-learn and on the command line."""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from sklearn.utils.estimator_checks import check_estimator  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from causal_qwen import CausalTextRegressor  # noqa: E402
from causal_qwen.cli.program import app  # noqa: E402
from causal_qwen.modeling.processor import CausalQwenProcessor  # noqa: E402

FEW_TREES = pytest.mark.usefixtures("few_trees")

WORTH = {"A": 100.0, "B": 200.0, "C": 400.0, "D": 800.0}


@pytest.fixture(scope="module")
def backbone(
    tmp_path_factory: pytest.TempPathFactory,
    fresh_model: Callable[..., Any],
    byte_tokenizer: Callable[..., Any],
) -> str:
    path = tmp_path_factory.mktemp("backbone")
    processor = CausalQwenProcessor(byte_tokenizer())
    model = fresh_model(
        vocab_size=len(processor.tokenizer),
        num_token_id=processor.num_token_id,
        initializer_range=0.1,
    )
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def table() -> Any:
    rng = np.random.default_rng(0)
    grade = rng.choice(list(WORTH), 80)
    price = np.array([WORTH[g] for g in grade]) * np.exp(rng.normal(0, 0.1, 80))
    return pd.DataFrame({"grade": grade, "price": price.round(2)})


# --- scikit-learn


OWN_WORDS = "the message names the thing and its cure in our own words"
NOT_ARRAYS = "a list of objects without columns is a list of texts"
EXPECTED_FAILURES = {
    "check_complex_data": OWN_WORDS,
    "check_estimators_empty_data_messages": OWN_WORDS,
    "check_fit2d_1sample": OWN_WORDS,
    "check_fit2d_predict1d": OWN_WORDS,
    "check_requires_y_none": OWN_WORDS,
    "check_fit1d": "numbers of one dimension are refused as texts, with a TypeError",
    "check_sample_weights_not_an_array": NOT_ARRAYS,
    "check_regressor_data_not_an_array": NOT_ARRAYS,
    "check_sample_weight_equivalence_on_dense_data": "a repeated row is in several folds",
}


@pytest.mark.slow
def test_it_passes_the_checks_of_scikit_learn_that_concern_it() -> None:
    estimator = CausalTextRegressor(sources=["columns"], folds=2, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # identifiers among random columns; 12 rows
        found = check_estimator(
            estimator, expected_failed_checks=EXPECTED_FAILURES, on_fail=None, on_skip=None
        )
    of_status: dict[str, set[str]] = {}
    for one in found:
        of_status.setdefault(one["status"], set()).add(one["check_name"])
    assert of_status.get("failed", set()) == set()
    assert of_status["xfail"] == set(EXPECTED_FAILURES)
    assert len(of_status["passed"]) > 35


# --- the command line


def causal_qwen(*arguments: str) -> Any:
    """In this process: a new one would import everything again."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def fit(data: Path, output: Path, backbone: str, *words: str) -> Any:
    """What `fit --json` reports about the target price."""
    options = ("-y", "price", "--model", backbone, "--set", "folds=2", "--json")
    return causal_qwen("fit", str(data), "-o", str(output), *options, *words)


@FEW_TREES
def test_fit_and_predict_on_the_command_line(backbone: str, table: Any, tmp_path: Path) -> None:
    spoiled = table.copy()
    spoiled["price"] = spoiled["price"].astype(object)
    spoiled.loc[3, "price"] = "n/a"
    spoiled.loc[5, "price"] = "cheap"
    spoiled.to_csv(tmp_path / "training.csv", index=False)
    table[["grade"]][:7].to_csv(tmp_path / "test.csv", index=False)
    options = ["--target", "price", "--model", backbone]
    report = causal_qwen(
        "fit", str(tmp_path / "training.csv"), *options, "-o", str(tmp_path / "saved"), "--json"
    )
    assert report["rows"] == 78
    assert report["notes"] == [
        "2 rows without a finite price are skipped: lines 5, 7: price 'n/a'; write "
        "numbers as 1870.5, without units."
    ]
    assert report["errors"]["price"]["together"] < 100
    rows = causal_qwen("predict", str(tmp_path / "saved"), str(tmp_path / "test.csv"), "--json")
    assert len(rows) == 7
    for row in rows:
        assert row["price_low"] < row["price_predicted"] < row["price_high"]
    median = np.array([row["price_predicted"] for row in rows])
    worth = np.array([WORTH[row["grade"]] for row in rows])
    assert np.median(np.abs(np.log(median / worth))) < 0.4


# --- files on the command line


@pytest.fixture
def saved(backbone: str, table: Any, tmp_path: Path) -> str:
    """A regressor that predicts the price of a grade, calibrated."""
    regressor = CausalTextRegressor(model=backbone, folds=2, sources=["model"], verbose=False)
    regressor.fit(table, "price").save(tmp_path / "saved")
    return str(tmp_path / "saved")


USERS_OWN = (
    '\ufeffid,grade,"note, long",code,empty\r\n'
    '007,A,"say ""hi""",1.10,\r\n'
    'NA,"B","two\nlines",-0,""\r\n'
    "1e5,C,café,  x ,NULL"
)


def test_predict_gives_back_the_users_cells_as_they_are_written(saved: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_bytes(USERS_OWN.encode())
    place = saved, str(tmp_path / "mine.csv")
    done = CliRunner().invoke(app, ["predict", *place])
    assert done.exit_code == 0, done.output
    given = done.stdout_bytes
    header, *rows = csv.reader(io.StringIO(given.decode(), newline=""))
    assert header[-3:] == ["price_predicted", "price_low", "price_high"]
    own = list(csv.reader(io.StringIO(USERS_OWN.removeprefix("\ufeff"), newline="")))
    assert [row[:-3] for row in (header, *rows)] == own
    assert all(float(cell) > 0 for row in rows for cell in row[-3:-2])
    rows = causal_qwen("predict", *place, "--json")
    assert [row["id"] for row in rows] == ["007", "NA", "1e5"]
    assert [row["code"] for row in rows] == ["1.10", "-0", "  x "]
    assert [row["note, long"] for row in rows] == ['say "hi"', "two\nlines", "café"]
    causal_qwen("predict", *place, "-o", str(tmp_path / "out.csv"), "--json")
    assert (tmp_path / "out.csv").read_bytes() == given
    read = pd.read_csv(tmp_path / "out.csv")
    assert read["price_predicted"].tolist() == [row["price_predicted"] for row in rows]


@FEW_TREES
def test_amounts_are_targets_and_no_row_of_a_thousand_is_lost(
    backbone: str, table: Any, tmp_path: Path
) -> None:
    large = 100 * table.price.astype(int)
    rows = [f'{grade},"${price:,}"' for grade, price in zip(table.grade, large, strict=True)]
    (tmp_path / "amounts.csv").write_text("\n".join(["grade,price", *rows]))
    table.assign(price=large).to_csv(tmp_path / "digits.csv", index=False)
    report = fit(tmp_path / "amounts.csv", tmp_path / "one", backbone)
    digits = fit(tmp_path / "digits.csv", tmp_path / "two", backbone)
    assert report["rows"] == len(table)
    assert report["errors"] == digits["errors"]
    (note,) = [note for note in report["notes"] if note not in digits["notes"]]
    assert re.fullmatch(rf"price: {len(table)} cells such as '\$[\d,]+' are .* \(\d+\)\.", note)


def test_identifiers_are_left_out_with_a_note_unless_they_are_named(
    backbone: str, table: Any, tmp_path: Path
) -> None:
    numbered = table.assign(ring_id=[f"R{row}" for row in range(len(table))], row=range(len(table)))
    numbered.to_csv(tmp_path / "table.csv", index=False)

    def columns(name: str, *named: str) -> list[str]:
        words = "--source", "model", *(f"--column={column}" for column in named)
        report = fit(tmp_path / "table.csv", tmp_path / name, backbone, *words)
        notes = [note for note in report["notes"] if "left out" in note]
        assert bool(notes) == (name == "all")
        if notes:
            assert notes[0].startswith("left out, as they name rows: 'ring_id', 'row'")
        schema = CausalTextRegressor.load(tmp_path / name).source_.table.schema
        return [*schema.numbers, *schema.categories]

    assert columns("all") == ["grade"]
    assert columns("named", "ring_id", "grade") == ["ring_id", "grade"]


@pytest.mark.slow
def test_the_embedded_model_predicts_prices_from_words_and_digits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With real features: a price that depends on words and digits."""
    monkeypatch.delenv("CAUSAL_QWEN_CACHE")
    rng = np.random.default_rng(0)
    rings = pd.DataFrame(
        {
            "carat": rng.uniform(0.3, 3, 640).round(2),
            "note": rng.choice(["a flawless stone", "a stone with visible flaws"], 640),
        }
    )
    price = 4000 * rings.carat * np.where(rings.note == "a flawless stone", 1.5, 1.0)
    rings["price"] = (price * np.exp(rng.normal(0, 0.05, 640))).round()
    regressor = CausalTextRegressor(text="note").fit(rings[:140], "price")
    regressor.calibrate(rings[140:190], "price")
    assert regressor.score(rings[190:], rings.price[190:]) > 0.8
    low, high = regressor.predict_interval(rings[190:], 0.8)
    assert 0.65 < ((low <= rings.price[190:]) & (rings.price[190:] <= high)).mean() < 0.92
