"""The backbone of a regressor is found from any directory, and asked of the hub only by its id."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.regression.regressor import CausalTextRegressor

TEXTS = [f"grade {letter}" for letter in "ABCDEFGH" * 3]
VALUES = np.arange(24.0) % 8 + 1


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


def fitted() -> Any:
    return CausalTextRegressor(
        model="models/tiny", sources=["model"], folds=2, cache=False, verbose=False
    ).fit(TEXTS, VALUES)


def test_a_relative_name_is_found_from_another_directory(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regressor = fitted()
    expected = regressor.predict(TEXTS)
    regressor.save("saved")
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(CausalTextRegressor.load(project / "saved").predict(TEXTS), expected)


def test_a_backbone_that_has_moved_is_named_when_loading(project: Path, tmp_path: Path) -> None:
    fitted().save("saved")
    shutil.move(project / "models" / "tiny", tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"models/tiny"):
        CausalTextRegressor.load(project / "saved")
    again = CausalTextRegressor.load(project / "saved", model=tmp_path / "elsewhere")
    assert again.predict(TEXTS[:1]).shape == (1,)
