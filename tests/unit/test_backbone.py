"""The backbone of a regressor is found from any directory, and asked of the hub only by its id."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.regression.regressor import CausalTextRegressor

pytestmark = pytest.mark.usefixtures("quick_head")

TEXTS = [f"grade {letter}" for letter in "ABCDEFGH" * 4]
VALUES = np.arange(32.0) % 8 + 1


@pytest.fixture
def project(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fresh_model: Callable[..., Any],
    byte_tokenizer: Callable[..., Any],
) -> Path:
    """A directory, the working one, with a tiny model in models/tiny."""
    place = tmp_path / "project"
    processor = CausalQwenProcessor(byte_tokenizer())
    size, number = len(processor.tokenizer), processor.num_token_id
    fresh_model(vocab_size=size, num_token_id=number).save_pretrained(place / "models" / "tiny")
    processor.save_pretrained(place / "models" / "tiny")
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What the hub was asked for, and whether only its cache on this machine."""
    names: list[tuple[str, bool]] = []

    def download(name: str, **options: Any) -> str:
        names.append((name, bool(options.get("local_files_only"))))
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return names


def fitted() -> Any:
    return CausalTextRegressor(
        model="models/tiny", sources=["model"], folds=2, value_space="symlog", cache=False
    ).fit(TEXTS, VALUES)


def test_relative_name_is_found_from_another_directory(
    project: Path, tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    regressor = fitted()
    expected = regressor.predict(TEXTS)
    regressor.save("saved")
    again = pickle.dumps(regressor)
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(CausalTextRegressor.load(project / "saved").predict(TEXTS), expected)
    assert np.array_equal(regressor.predict(TEXTS), expected)
    assert np.array_equal(pickle.loads(again).predict(TEXTS), expected)
    assert not asked


def test_regressor_that_moved_with_its_backbone_finds_it(
    project: Path, tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    regressor = fitted()
    regressor.save("saved")
    expected = regressor.predict(TEXTS)
    monkeypatch.chdir(tmp_path)
    shutil.move(project, tmp_path / "moved")
    again = CausalTextRegressor.load(tmp_path / "moved" / "saved")
    assert np.array_equal(again.predict(TEXTS), expected)
    assert not asked


def test_backbone_that_is_gone_is_an_error_and_no_request(
    project: Path, tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted().save("saved")
    shutil.move(project / "models" / "tiny", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"models/tiny .* pass model="):
        CausalTextRegressor.load(project / "saved")
    assert not asked
    again = CausalTextRegressor.load(project / "saved", model=tmp_path / "elsewhere")
    assert again.predict(TEXTS[:1]).shape == (1,)


def test_hub_id_is_asked_of_the_hub(project: Path, asked: list[tuple[str, bool]]) -> None:
    regressor = fitted().set_params(model="org/tiny")
    regressor.backbone_ |= {"name": "org/tiny", "path": None}
    regressor.save("saved")
    with pytest.raises(FileNotFoundError, match="org/tiny is neither"):
        CausalTextRegressor.load("saved")
    assert asked == [("org/tiny", False)]


def test_model_set_after_fitting_is_the_one_that_is_opened(project: Path) -> None:
    regressor = fitted()
    shutil.copytree(project / "models" / "tiny", project / "copy")
    shutil.rmtree(project / "models")
    regressor.set_params(model="copy")
    assert regressor.predict(TEXTS[:1]).shape == (1,)
