"""The feature cache: whatever happens to its files, features are right and the work goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _damage_tables import damage_bytes
from _fuzz import seeds

from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.regression.features import MIDDLE, features, store, stored

Z = np.random.default_rng(0).normal(size=24).astype(np.float32)
TEXTS = ["a ring", "a lamp"]


@pytest.fixture(scope="module")
def read(byte_tokenizer: Callable[..., Any], make_model: Callable[..., Any]) -> Any:
    """Texts -> z, by a tiny model."""
    processor = CausalQwenProcessor(byte_tokenizer())
    size, number = len(processor.tokenizer), processor.num_token_id
    model = make_model(vocab_size=size, num_token_id=number)
    return lambda texts, cache: features(
        texts, model, processor, MIDDLE[:1], max_length=64, cache=cache
    )


def test_a_stored_state_is_found_again(tmp_path: Path) -> None:
    assert stored(tmp_path / "a" / "file") is None
    store(tmp_path / "a" / "file", Z)
    np.testing.assert_array_equal(stored(tmp_path / "a" / "file"), Z)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(25, 60))
def test_a_damaged_file_never_gives_a_wrong_feature(tmp_path: Path, seed: int) -> None:
    store(tmp_path / "file", Z)
    content = (tmp_path / "file").read_bytes()
    damaged = damage_bytes(content, seed)
    (tmp_path / "file").write_bytes(damaged)
    found = stored(tmp_path / "file")
    assert (found is None) == (damaged != content)
    store(tmp_path / "file", Z)
    np.testing.assert_array_equal(stored(tmp_path / "file"), Z)


def test_files_that_are_exchanged_or_cut_are_computed_again(read: Any, tmp_path: Path) -> None:
    expected = read(TEXTS, tmp_path)
    one, other = (file for file in tmp_path.rglob("*") if file.is_file())
    for content in (other.read_bytes(), one.read_bytes()[:-4], b""):
        one.write_bytes(content)
        np.testing.assert_allclose(read(TEXTS, tmp_path), expected, rtol=1e-4, atol=1e-5)
        assert stored(one) is not None


def test_a_cache_that_cannot_be_written_is_not_used(read: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.warns(UserWarning, match="feature cache .* is not used"):
        found = read(TEXTS, tmp_path / "file" / "features")
    np.testing.assert_array_equal(found, read(TEXTS, None))
