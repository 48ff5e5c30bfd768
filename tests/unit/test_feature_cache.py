"""The feature cache: whatever happens to its file, features are right and the work goes on."""

from __future__ import annotations

import sqlite3
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _damage_tables import damage_file
from _fuzz import seeds

from causal_qwen.regression import feature_cache
from causal_qwen.regression.feature_cache import (
    CACHE_FILE,
    FeatureCache,
    check_cache,
)

TEXTS = [f"text {i}" for i in range(40)]
Z = {text: np.random.default_rng(i).normal(size=24).astype(np.float32)
     for i, text in enumerate(TEXTS)}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(feature_cache, "cache_directory", lambda: tmp_path)
    return tmp_path / CACHE_FILE


def fill(path: Path) -> list[str]:
    """Store z of all texts; -> the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = FeatureCache(path, "backbone")
        for some in (TEXTS[:5], TEXTS[5:]):
            cache.write({text: Z[text] for text in some})
        cache.close()
    return [str(warning.message) for warning in caught]


def read(path: Path) -> tuple[set[str], list[str]]:
    """The texts that are found, all of them with the right z; and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = FeatureCache(path, "backbone")
        found = dict(cache.read(TEXTS))
        cache.close()
    for text, z in found.items():
        np.testing.assert_array_equal(z, Z[text])
    return set(found), [str(warning.message) for warning in caught]


def test_stored_features_are_found_again(path: Path) -> None:
    assert fill(path) == []
    assert read(path) == (set(TEXTS), [])
    assert dict(FeatureCache(path, "other").read(TEXTS)) == {}
    assert check_cache() is None


def test_a_damaged_row_is_not_used_and_named_by_the_check(path: Path) -> None:
    fill(path)
    with sqlite3.connect(path) as connection:
        zeros = bytes(24 * 4)
        keys = [key for (key,) in connection.execute("SELECT key FROM states LIMIT 3")]
        connection.execute("UPDATE states SET z = ? WHERE key = ?", (zeros, keys[0]))
        connection.execute("UPDATE states SET z = 'text' WHERE key = ?", (keys[1],))
        connection.execute(  # the z and checksum of another text
            "UPDATE states SET (z, checksum) = (SELECT z, checksum FROM states WHERE key = ?) "
            "WHERE key = ?",
            (keys[0], keys[2]),
        )
    assert len(read(path)[0]) == len(TEXTS) - 3
    assert check_cache() == f"{path} has 3 damaged rows, which are computed again."
    fill(path)
    assert read(path) == (set(TEXTS), [])


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(25, 60))
def test_a_damaged_file_never_gives_a_wrong_feature(path: Path, seed: int) -> None:
    fill(path)
    damage_file(path, seed)
    problem = check_cache()
    assert problem is None or str(path) in problem
    _, notes = read(path)  # a row whose key is damaged is only missing
    assert all(str(path) in note for note in notes)
    assert len(notes) <= 2
    fill(path)
    read(path)


def test_a_truncated_file_and_one_of_others_are_begun_anew(path: Path) -> None:
    fill(path)
    half = path.read_bytes()[: path.stat().st_size // 2]
    for content in (half, b"notes, of more than a hundred characters " * 9):
        path.write_bytes(content)
        _, notes = read(path)
        assert len(notes) == 1
        assert "damaged and begun anew" in notes[0]
        assert fill(path) == []
        assert read(path) == (set(TEXTS), [])


def test_a_file_that_cannot_be_used_is_bypassed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_cache, "LOCK_TIMEOUT", 0.01)
    fill(path)
    other = sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    (note,) = fill(path)
    assert "locked" in note
    assert read(path)[0] == set()
    assert "locked" in str(check_cache())
    other.close()
    assert read(path) == (set(TEXTS), [])
    (path.parent / "file").write_text("x")
    (note,) = fill(path.parent / "file" / CACHE_FILE)
    assert "is not used" in note

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    path.write_bytes(b"damaged " * 99)
    monkeypatch.setattr(Path, "unlink", refuse)
    found, (note,) = read(path)
    assert found == set()
    assert "is not used" in note
