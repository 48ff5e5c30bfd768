"""Files of regressors and individuals: a damaged one gives the same object or one sentence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _damage_tables import damage_arrays, damage_bytes, damage_json
from _fuzz import seeds
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

pytest.importorskip("sklearn")

from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.regression.backbone import OpenModel
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.regression.saved import PARAMETERS

TEXTS = [f"a ring of grade {grade}" for grade in "ABCDEFGHABCDEFGH"]


@pytest.fixture(scope="module")
def opened(byte_tokenizer: Callable[..., Any], fresh_model: Callable[..., Any]) -> OpenModel:
    processor = CausalQwenProcessor(byte_tokenizer())
    size, number = len(processor.tokenizer), processor.num_token_id
    model = fresh_model(vocab_size=size, num_token_id=number, initializer_range=0.1)
    model.name_or_path = "in-memory"
    return OpenModel(processor, model)


@pytest.fixture(scope="module")
def original(opened: OpenModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated regressor of two targets, saved."""
    directory = tmp_path_factory.mktemp("original") / "saved"
    y = {"price": np.arange(16.0) + 1, "tax": -np.arange(16.0)}
    regressor = CausalTextRegressor(
        model=opened,
        sources=["model"],
        folds=2,
        value_space="linear",
        cache=False,
        verbose=False,
        size=(64, 1),
    )
    regressor.fit(TEXTS, y).calibrate(TEXTS, y).save(directory)
    return directory


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "copy")
    return tmp_path / "copy"


def state(directory: Path, opened: OpenModel) -> Any:
    """All that a loaded regressor consists of."""
    found = CausalTextRegressor.load(directory, model=opened)
    tensors = {
        (name, key): tensor.numpy().tobytes()
        for name, target in found.targets_.items()
        for key, tensor in target.tensors().items()
    }
    spaces = {name: target.space for name, target in found.targets_.items()}
    return found.get_params(), found.columns_, found.is_single_, found.backbone_, spaces, tensors


def expect_same_or_one_sentence(load: Callable[[], Any], expected: Any, named: str) -> bool:
    """Whether it was refused."""
    try:
        found = load()
    except (ValueError, OSError) as error:
        sentence = str(error)
        assert named in sentence
        assert "\n" not in sentence
        assert len(sentence) < 600
        return True
    assert found == expected
    return False


# --- regressors


def test_a_saved_regressor_loads_identically(original: Path, opened: OpenModel) -> None:
    parameters, columns, is_single, *_ = state(original, opened)
    assert parameters["size"] == (64, 1)
    assert (columns, is_single) == (None, False)


def test_every_parameter_has_a_check() -> None:
    assert set(PARAMETERS) == set(CausalTextRegressor().get_params())


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(30, 60))
def test_damaged_settings_are_refused_or_load_identically(
    seed: int, copy: Path, original: Path, opened: OpenModel
) -> None:
    file = copy / "regressor.json"
    file.write_text(damage_json(file.read_text("utf-8"), seed), "utf-8")
    expect_same_or_one_sentence(
        lambda: state(copy, opened), state(original, opened), "copy/regressor."
    )


@pytest.mark.parametrize("has_hash", [True, False])
@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(20, 60))
def test_damaged_tensors_are_refused(
    seed: int, has_hash: bool, copy: Path, opened: OpenModel
) -> None:
    """Without a hash as in version 0.3: what is finite and of the right shape cannot be refused."""
    settings = json.loads((copy / "regressor.json").read_text("utf-8"))
    if not has_hash:
        (copy / "manifest.json").unlink()
        del settings["tensors_sha256"], settings["settings_sha256"]
        (copy / "regressor.json").write_text(json.dumps(settings), "utf-8")
    file = copy / "regressor.safetensors"
    before = load_file(file)
    after = damage_arrays(before, seed)
    save_file(after, file)
    is_undetectable = not has_hash and (
        set(before) - set(after) in ({"0.score_weights"}, {"1.score_weights"})
        or all(np.isfinite(array).all() for array in after.values())
    )
    try:
        loaded = state(copy, opened)
    except ValueError as error:
        loaded, sentence = None, str(error)
    assert is_undetectable if loaded else "regressor.safetensors" in sentence


@pytest.mark.parametrize("name", ["regressor.json", "regressor.safetensors"])
@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(12, 60))
def test_damaged_bytes_are_refused_or_load_identically(
    name: str, seed: int, copy: Path, original: Path, opened: OpenModel
) -> None:
    content = (copy / name).read_bytes()
    if name == "regressor.json":  # a changed letter may be another valid setting
        content = content[: random.Random(seed).randrange(len(content))]
    else:
        content = damage_bytes(content, seed)
    (copy / name).write_bytes(content)
    expect_same_or_one_sentence(lambda: state(copy, opened), state(original, opened), name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "format is 3, and this version reads 2; install a newer version"),
        ({"format": "x"}, "format is 'x', not 1 or 2; restore the file, or fit again"),
        ({"is_single": True}, "is_single is true, not false, for 2 targets"),
        ({"is_single": 0}, "is_single is 0, not true or false"),
        ({"columns": "a"}, "columns is 'a', not a list of names or null"),
        ({"targets": {}}, "targets is {}, not an object with at least one target"),
        ({"targets": {"price": ["cubic", 0, 1]}}, "targets.price is ['cubic', 0, 1], not"),
        ({"targets": {"price": ["linear", 0, 0]}}, "a spread above 0"),
        ({"backbone": None}, "backbone is None, not an object"),
        ({"mystery": 1}, "'mystery' is unknown"),
        ({"parameters": {"folds": 1}}, "folds=1 must be at least 2"),
        ({"parameters": {"folds": 2.5}}, "parameters.folds is 2.5, not a whole number"),
        ({"parameters": {"folds": True}}, "parameters.folds is True, not a whole number"),
        ({"parameters": {"backbone": "thawed"}}, "backbone='thawed' is unknown"),
        ({"parameters": {"flods": 5}}, "'flods' is unknown in parameters"),
        ({"parameters": {"held_out": 10**400}}, "parameters.held_out is 1000"),
        ({"parameters": {"backbone": "scratch"}}, "tensor 0.a"),
    ],
)
def test_the_sentence_names_file_field_value_and_cure(
    change: dict[str, Any], message: str, copy: Path, opened: OpenModel
) -> None:
    file = copy / "regressor.json"
    settings = json.loads(file.read_text("utf-8"))
    parameters = settings["parameters"] | change.pop("parameters", {})
    file.write_text(json.dumps({**settings, **change, "parameters": parameters}), "utf-8")
    with pytest.raises(ValueError, match="regressor") as caught:
        CausalTextRegressor.load(copy, model=opened)
    assert message in str(caught.value)
    assert str(copy) in str(caught.value)


EDITS: dict[str, tuple[dict[str, Any], str]] = {  # of a table's regressor, and the sentence
    "a template without a column": ({"template": "a ring"}, "template='a ring' has no column"),
    "a template of another column": (
        {"template": "{grade} {cut}"},
        "parameters.template is '{grade} {cut}', not one of the columns 'grade'",
    ),
    "a template with the target": ({"template": "{grade} {price}"}, "contains the target 'price'"),
    "a template for texts": ({"columns": None}, "template and text are for tables"),
    "no columns": ({"columns": [], "template": None}, "columns is [], not"),
    "a column twice": ({"columns": ["grade", "grade"], "template": None}, "columns is ['grade', "),
    "the target as a column": ({"columns": ["price"], "template": None}, "columns is ['price']"),
}


@pytest.fixture(scope="module")
def of_table(opened: OpenModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regressor of the rows of a table, saved; its manifest is deleted, and its hash, too."""
    table = pytest.importorskip("pandas").DataFrame({"grade": list("ABCDEFGH"), "price": range(8)})
    directory = tmp_path_factory.mktemp("of_table") / "saved"
    options: dict[str, Any] = {"folds": 2, "value_space": "linear", "cache": False}
    options["sources"] = ["model"]
    regressor = CausalTextRegressor(model=opened, template="{grade}", verbose=False, **options)
    regressor.fit(table, "price").save(directory)
    (directory / "manifest.json").unlink()
    settings = json.loads((directory / "regressor.json").read_text("utf-8"))
    del settings["tensors_sha256"], settings["settings_sha256"]
    (directory / "regressor.json").write_text(json.dumps(settings), "utf-8")
    return directory


@pytest.mark.parametrize("what", EDITS)
def test_an_edited_template_or_column_is_refused_without_a_manifest(
    what: str, of_table: Path, tmp_path: Path, opened: OpenModel
) -> None:
    change, message = EDITS[what]
    copy = Path(shutil.copytree(of_table, tmp_path / "copy"))
    assert CausalTextRegressor.load(copy, model=opened).columns_ == ["grade"]
    settings = json.loads((copy / "regressor.json").read_text("utf-8"))
    for name, value in change.items():
        (settings if name in settings else settings["parameters"])[name] = value
    (copy / "regressor.json").write_text(json.dumps(settings), "utf-8")
    with pytest.raises(ValueError, match=r"copy/regressor\.json") as caught:
        CausalTextRegressor.load(copy, model=opened)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["abduction.loc.weight", "abduction.scale.bias"])
def test_a_prediction_that_is_not_finite_is_refused(
    name: str, of_table: Path, tmp_path: Path, opened: OpenModel
) -> None:
    """Finite weights, of the right shape, whose product overflows."""
    import pandas

    copy = Path(shutil.copytree(of_table, tmp_path / "copy"))
    arrays = load_file(copy / "regressor.safetensors")
    arrays[f"0.{name}"] = np.full_like(arrays[f"0.{name}"], 1e308)
    save_file(arrays, copy / "regressor.safetensors")
    regressor = CausalTextRegressor.load(copy, model=opened)
    table = pandas.DataFrame({"grade": ["A", "B"]}, index=pandas.Index([2, 3], name="line"))
    for predict in (regressor.predict, regressor.predict_interval, regressor.predict_distribution):
        with pytest.raises(
            ValueError, match=r"'price' is not finite in lines 2 and 3; .*fit again"
        ):
            predict(table)


def test_a_regressor_without_its_manifest_loads_with_a_warning(
    copy: Path, opened: OpenModel
) -> None:
    """If its settings have no hash of their own; those that have one are known to be whole."""
    (copy / "manifest.json").unlink()
    CausalTextRegressor.load(copy, model=opened)
    file = copy / "regressor.json"
    settings = json.loads(file.read_text("utf-8"))
    del settings["settings_sha256"]
    file.write_text(json.dumps(settings), "utf-8")
    with pytest.warns(UserWarning, match=r"copy has no manifest\.json, so an edited value"):
        CausalTextRegressor.load(copy, model=opened)


def test_deep_nesting_and_missing_files_are_refused(copy: Path, opened: OpenModel) -> None:
    (copy / "regressor.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"regressor\.json is damaged"):
        CausalTextRegressor.load(copy, model=opened)
    (copy / "regressor.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match=r"regressor\.json is damaged"):
        CausalTextRegressor.load(copy, model=opened)
    (copy / "regressor.safetensors").unlink()
    (copy / "regressor.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no regressor\.json"):
        CausalTextRegressor.load(copy, model=opened)


def test_a_missing_tensor_file_is_named(copy: Path, opened: OpenModel) -> None:
    (copy / "regressor.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"regressor\.safetensors is missing"):
        CausalTextRegressor.load(copy, model=opened)


# --- individuals


@pytest.fixture
def ada(tmp_path: Path) -> Path:
    Individual.draw(24, seed=7, min_density=0.05, temperature=2.0, name="ada").save(
        tmp_path / "ada"
    )
    return tmp_path / "ada"


def load_all(path: Path) -> Any:
    found = Individual.load(path)
    fields = (found.seed, found.min_density, found.temperature, found.name, found.offset)
    return (*fields, found.persistence, found.noise.tobytes(), found.noise.shape)


def rewrite(path: Path, change: Callable[[Any, dict[str, str]], Any]) -> None:
    """Save an individual's file again with other arrays and metadata."""
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    arrays = load_file(path)
    arrays, metadata = change(arrays, metadata)
    save_file(arrays, path, metadata)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(30, 60))
def test_a_damaged_individual_is_refused_or_loads_identically(seed: int, ada: Path) -> None:
    expected = load_all(ada)
    ada.write_bytes(damage_bytes(ada.read_bytes(), seed))
    expect_same_or_one_sentence(lambda: load_all(ada), expected, "ada")


@pytest.mark.parametrize("has_hash", [True, False])
@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(20, 60))
def test_damaged_fields_of_an_individual_are_refused(seed: int, has_hash: bool, ada: Path) -> None:
    def change(arrays: Any, metadata: dict[str, str]) -> Any:
        own = {} if not has_hash else {"sha256": metadata["sha256"]}
        return arrays, {"individual": damage_json(metadata["individual"], seed), **own}

    expected = load_all(ada)
    rewrite(ada, change)
    is_refused = expect_same_or_one_sentence(lambda: load_all(ada), expected, "ada")
    assert is_refused or not has_hash  # files of version 0.3 have no hash and no persistence


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(20, 60))
def test_damaged_noise_is_refused(seed: int, ada: Path) -> None:
    expected = load_all(ada)
    rewrite(ada, lambda arrays, metadata: (damage_arrays(arrays, seed), metadata))
    assert expect_same_or_one_sentence(lambda: load_all(ada), expected, "ada")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "no 'individual'"),
        ({"individual": "[1]"}, r"its fields are \[1\], not seed, min_density"),
        ({"individual": "{"}, "holds no individual"),
        ({"format": "2"}, "it has format '2', and this version reads 1"),
    ],
)
def test_an_individual_of_another_format_is_refused(
    metadata: dict[str, str], message: str, ada: Path
) -> None:
    rewrite(ada, lambda arrays, _: (arrays, metadata or {"other": "1"}))
    with pytest.raises(ValueError, match=message):
        Individual.load(ada)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1), ("seed", 2**64), ("seed", 1.5), ("seed", True), ("temperature", "2"),
        ("temperature", -1), ("temperature", 10**400), ("min_density", 2), ("name", 3),
        ("offset", 2**63), ("offset", 0.5), ("min_density", None),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_type_or_range_is_named(field: str, value: Any, ada: Path) -> None:
    def change(arrays: Any, metadata: dict[str, str]) -> Any:
        fields = json.loads(metadata["individual"]) | {field: value}
        return arrays, {"individual": json.dumps(fields)}

    rewrite(ada, change)
    with pytest.raises(ValueError, match=f"ada holds no individual .*{field}"):
        Individual.load(ada)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("NaN", "nan, which is not finite"),
        ("-Infinity", "-inf, which is not finite"),
        ("1" + "0" * 400, "too large"),
    ],
)
@pytest.mark.parametrize("field", ["temperature", "min_density"])
def test_a_number_that_is_not_finite_is_called_so(
    field: str, value: str, why: str, ada: Path
) -> None:
    def change(arrays: Any, metadata: dict[str, str]) -> Any:
        fields = json.loads(metadata["individual"]) | {field: "HERE"}
        return arrays, {"individual": json.dumps(fields).replace('"HERE"', value)}

    rewrite(ada, change)
    with pytest.raises(ValueError, match=f"{field} is .*{why}"):
        Individual.load(ada)


def test_an_individual_is_saved_with_the_users_permissions(ada: Path) -> None:
    plain = ada.with_name("plain")
    plain.write_text("x")
    assert ada.stat().st_mode == plain.stat().st_mode
    Individual.draw(8, seed=np.int64(3)).save(ada, overwrite=True)  # type: ignore[arg-type]
    assert Individual.load(ada).seed == 3
