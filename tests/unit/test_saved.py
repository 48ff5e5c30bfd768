"""Files of regressors and individuals: a damaged one gives the same object or one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _damage_tables import damage_arrays, damage_bytes, damage_json
from _fuzz import seeds
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

pandas = pytest.importorskip("pandas")
skops_io = pytest.importorskip("skops.io")

from causal_qwen.individuals import Individual  # noqa: E402
from causal_qwen.regression.regressor import CausalTextRegressor  # noqa: E402


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"version": 7}, "has another version, which this causal-qwen does not load; fit again"),
        ([1, 2], "has another version"),
        ({"version": 1, "fitted": shutil.rmtree}, "objects of the type shutil.rmtree"),
    ],
)
def test_a_foreign_file_is_not_loaded(content: Any, message: str, tmp_path: Path) -> None:
    skops_io.dump(content, tmp_path / "regressor.skops")
    with pytest.raises(ValueError, match=r"/regressor\.skops has") as caught:
        CausalTextRegressor.load(tmp_path)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no regressor\.skops; is it a saved"):
        CausalTextRegressor.load(tmp_path)


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
    expect_same_or_one_sentence(lambda: load_all(ada), expected, "ada")


@pytest.mark.parametrize(
    "change",
    [{}, {"individual": "{"}, {"sha256": "0"}, {"individual": '{"seed": 6}'}],
    ids=["none", "no JSON", "another hash", "another seed"],
)
def test_an_individual_with_changed_fields_is_refused(change: dict[str, str], ada: Path) -> None:
    rewrite(ada, lambda arrays, metadata: (arrays, {**metadata, **change} if change else {"a": ""}))
    with pytest.raises(ValueError, match="ada holds no individual"):
        Individual.load(ada)
