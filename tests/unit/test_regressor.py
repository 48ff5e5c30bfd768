"""The text regressor on a tiny backbone: fitting, prediction, calibration, saving, errors."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from sklearn.metrics import r2_score  # noqa: E402

from causal_qwen.conversion.opening import open_model  # noqa: E402
from causal_qwen.modeling.processor import CausalQwenProcessor  # noqa: E402
from causal_qwen.regression import features as features_module  # noqa: E402
from causal_qwen.regression.backbone import _open_cached  # noqa: E402
from causal_qwen.regression.regressor import CausalTextRegressor, OpenModel  # noqa: E402

ROWS = 90
QUICK: dict[str, Any] = {"sources": ["model"], "folds": 2, "verbose": False}


@pytest.fixture(scope="module")
def backbone(
    tmp_path_factory: pytest.TempPathFactory,
    fresh_model: Callable[..., Any],
    byte_tokenizer: Callable[..., Any],
) -> Path:
    """A tiny random model with a byte tokenizer, on disk."""
    path = tmp_path_factory.mktemp("backbone")
    processor = CausalQwenProcessor(byte_tokenizer())
    size, number = len(processor.tokenizer), processor.num_token_id
    model = fresh_model(
        vocab_size=size, num_token_id=number, max_position_embeddings=256, initializer_range=0.1
    )
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def make(backbone: Path) -> Callable[..., Any]:
    def make(*args: Any, **options: Any) -> Any:
        return CausalTextRegressor(*args, **{**QUICK, "model": str(backbone), **options})

    return make


@pytest.fixture(scope="module")
def table() -> Any:
    """Prices by grade; a random byte model distinguishes letters, if little else."""
    rng = np.random.default_rng(0)
    grade = rng.choice(list("ABCD"), ROWS)
    price = np.array([{"A": 100, "B": 200, "C": 400, "D": 800}[g] for g in grade])
    price = price * np.exp(rng.normal(0, 0.1, ROWS))
    frame = {"city": rng.choice(["Ulm", "Bonn"], ROWS), "grade": grade, "price": price.round(1)}
    return pd.DataFrame(frame)


@pytest.fixture(scope="module")
def fitted_once(backbone: Path, table: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path_factory.mktemp("cache")))
        return CausalTextRegressor(**QUICK, model=str(backbone)).fit(table[:60], "price")


@pytest.fixture
def fitted(fitted_once: Any) -> Any:
    """On 60 rows; a test may change it."""
    return copy.deepcopy(fitted_once)


def count_texts_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of texts in every call of the backbone."""
    counts: list[int] = []
    real = features_module.pooled_hidden

    def counting(model: Any, encoded: Any, poolings: Any) -> Any:
        counts.append(len(encoded))
        return real(model, encoded, poolings)

    monkeypatch.setattr(features_module, "pooled_hidden", counting)
    return counts


# --- learning and predicting


def test_it_predicts_held_out_rows_of_a_table(fitted: Any, table: Any) -> None:
    test = table[60:]
    error = np.abs(np.log(fitted.predict(test) / test["price"]))
    assert np.median(error) < 0.3  # the training median is off by 0.7
    assert fitted.score(test, test["price"]) == r2_score(test["price"], fitted.predict(test))


def test_texts_and_tables_of_the_same_words_predict_the_same(
    make: Callable[..., Any], table: Any
) -> None:
    texts = [f"city is {c}, grade is {g}" for c, g in zip(table.city, table.grade, strict=True)]
    of_table = make().fit(table[:60], "price").predict(table[60:])
    of_texts = make().fit(texts[:60], table.price[:60]).predict(texts[60:])
    np.testing.assert_allclose(of_texts, of_table, rtol=1e-6)


def test_every_target_has_its_own_head(make: Callable[..., Any], table: Any) -> None:
    table = table.assign(tax=table.price * -0.1)
    both = make().fit(table[:60], ["price", "tax"])
    alone = make().fit(table[:60].drop(columns="tax"), "price")
    test = table[60:]
    assert both.predict(test).shape == (30, 2)
    np.testing.assert_allclose(both.predict(test)[:, 0], alone.predict(test), rtol=1e-6)
    assert (both.predict(test)[:, 1] < 0).all()
    low, high = both.predict_interval(test)
    assert low.shape == high.shape == (30, 2)
    assert both.predict_quantiles(test, [0.1, 0.5, 0.9]).shape == (30, 2, 3)
    assert set(both.predict_distribution(test)) == {"price", "tax"}
    expected = r2_score(test[["price", "tax"]], both.predict(test))
    assert both.score(test, test[["price", "tax"]]) == pytest.approx(expected)


def test_median_quantiles_and_intervals_agree(fitted: Any, table: Any) -> None:
    test = table[60:]
    low, high = fitted.predict_interval(test, 0.8)
    quantiles = fitted.predict_quantiles(test, [0.1, 0.5, 0.9])
    np.testing.assert_allclose(quantiles[:, 1], fitted.predict(test))
    assert (np.diff(quantiles) > 0).all()
    assert ((low < quantiles[:, 1]) & (quantiles[:, 1] < high)).all()


# --- the cache of features


def test_a_text_is_read_once_and_then_cached(
    make: Callable[..., Any], table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_texts_read(monkeypatch)
    make().fit(table[:60], "price").predict(table[:60])
    distinct = len(table[:60].drop_duplicates(["city", "grade"]))
    assert sum(counts) == distinct == 8
    make().fit(table[30:], "price")  # other rows, the same texts
    assert sum(counts) == distinct
    make(cache=False).fit(table[:60], "price")
    assert sum(counts) == 2 * distinct


# --- saving


def test_loading_with_a_changed_backbone_is_refused(
    fitted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted.save(tmp_path / "saved")
    monkeypatch.setattr(features_module, "fingerprint", lambda *_: "another")
    with pytest.raises(ValueError, match="language model or max_length has changed"):
        CausalTextRegressor.load(tmp_path / "saved")


def test_a_backbone_is_found_by_a_relative_name_and_where_it_has_moved(
    make: Callable[..., Any],
    backbone: Path,
    table: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(backbone, tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    regressor = make(model="models").fit(table[:60], "price")
    regressor.save("saved")
    expected = regressor.predict(table)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert np.array_equal(CausalTextRegressor.load(tmp_path / "saved").predict(table), expected)
    shutil.move(tmp_path / "models", tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="models"):
        CausalTextRegressor.load(tmp_path / "saved")
    again = CausalTextRegressor.load(tmp_path / "saved", model=tmp_path / "moved")
    assert np.array_equal(again.predict(table), expected)


# --- OpenModel


@pytest.fixture
def opened(backbone: Path) -> OpenModel:
    return OpenModel(*open_model(backbone))


def test_an_open_model_predicts_the_same_as_its_directory(
    opened: OpenModel, make: Callable[..., Any], table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make().fit(table[:60], "price").predict(table)

    def refuse(path: Any) -> Any:
        raise AssertionError(f"{path} is opened although a model is given")

    monkeypatch.setattr("causal_qwen.regression.backbone.open_model", refuse)
    _open_cached.cache_clear()
    shared = make(model=opened, cache=False).fit(table[:60], "price")
    assert np.array_equal(shared.predict(table), expected)


def test_pickles_and_saved_regressors_contain_the_name_of_the_open_model(
    opened: OpenModel, make: Callable[..., Any], table: Any, tmp_path: Path, backbone: Path
) -> None:
    shared = make(model=opened).fit(table[:60], "price")
    pickled = pickle.dumps(shared)
    weights = sum(p.numel() * p.element_size() for p in opened.model.parameters())
    assert len(pickled) < weights
    again = pickle.loads(pickled)
    assert again.model == str(backbone)
    assert np.array_equal(again.predict(table), shared.predict(table))
    shared.save(tmp_path / "saved")
    assert CausalTextRegressor.load(tmp_path / "saved").model == str(backbone)
    loaded = CausalTextRegressor.load(tmp_path / "saved", model=opened)
    assert loaded.model is opened
    assert np.array_equal(loaded.predict(table), shared.predict(table))


def test_a_model_made_in_memory_can_be_used_but_not_saved(
    fresh_model: Callable[..., Any], byte_tokenizer: Callable[..., Any], table: Any, tmp_path: Path
) -> None:
    processor = CausalQwenProcessor(byte_tokenizer())
    size = {"vocab_size": len(processor.tokenizer), "num_token_id": processor.num_token_id}
    in_memory = OpenModel(processor, fresh_model(initializer_range=0.1, **size))
    shared = CausalTextRegressor(model=in_memory, **QUICK)
    assert np.isfinite(shared.fit(table[:60], "price").predict(table)).all()
    for keep in (pickle.dumps, lambda one: one.save(tmp_path / "saved")):
        with pytest.raises(ValueError, match="save_pretrained"):
            keep(shared)
    assert not (tmp_path / "saved").exists()


# --- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: np.nan}, "'price' .* row 3:"),
        ({3: np.nan, 5: np.inf}, "'price' .* rows 3, 5"),
        (dict.fromkeys(range(7), np.nan), r"7 rows \(0, 1, 2, 3, 4, \.\.\.\)"),
        (dict.fromkeys(range(ROWS), 5.0), "'price' is constant"),
    ],
)
def test_constant_or_nonfinite_targets_are_refused_and_named(
    make: Callable[..., Any], table: Any, change: dict[int, float], message: str
) -> None:
    spoiled = table.copy()
    for row, value in change.items():
        spoiled.loc[row, "price"] = value
    with pytest.raises(ValueError, match=message):
        make().fit(spoiled, "price")
