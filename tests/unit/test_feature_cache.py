"""The feature cache: whatever happens to its file, features are right and the work goes on."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _damage_tables import damage_file
from _fuzz import seeds

from causal_qwen.regression import feature_cache
from causal_qwen.regression.feature_cache import (
    FeatureCache,
    cache_record,
    check_cache,
    clear_cache,
    connect,
)

TEXTS = [f"text {i}" for i in range(40)]
Z = {text: np.random.default_rng(i).normal(size=24).astype(np.float32)
     for i, text in enumerate(TEXTS)}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "features.sqlite"


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


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.parent.iterdir())


def test_stored_features_are_found_again(path: Path) -> None:
    assert fill(path) == []
    assert read(path) == (set(TEXTS), [])
    assert dict(FeatureCache(path, "other").read(TEXTS)) == {}
    assert check_cache(path) is None


def test_one_damaged_row_is_counted_in_the_singular(path: Path) -> None:
    fill(path)
    with sqlite3.connect(path) as connection:
        connection.execute(
            "UPDATE features SET z = 'x' WHERE key = (SELECT min(key) FROM features)"
        )
    assert check_cache(path) == f"{path} has 1 damaged row, which is computed again."
    assert read(path)[1] == [f"the feature cache {check_cache(path)}"]


def test_a_damaged_row_is_not_used_and_one_warning_names_the_file(path: Path) -> None:
    fill(path)
    with sqlite3.connect(path) as connection:
        zeros = bytes(24 * 4)
        keys = [key for (key,) in connection.execute("SELECT key FROM features LIMIT 3")]
        connection.execute("UPDATE features SET z = ? WHERE key = ?", (zeros, keys[0]))
        connection.execute("UPDATE features SET z = 'text' WHERE key = ?", (keys[1],))
        connection.execute(  # the z and checksum of another text
            "UPDATE features SET (z, checksum) = (SELECT z, checksum FROM features WHERE key = ?) "
            "WHERE key = ?",
            (keys[0], keys[2]),
        )
    found, notes = read(path)
    assert len(found) == len(TEXTS) - 3
    assert notes == [f"the feature cache {path} has 3 damaged rows, which are computed again."]
    assert check_cache(path) == f"{path} has 3 damaged rows, which are computed again."
    fill(path)
    assert read(path) == (set(TEXTS), [])


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(25, 60))
def test_a_damaged_file_never_gives_a_wrong_feature(path: Path, seed: int) -> None:
    fill(path)
    damage_file(path, seed)
    problem = check_cache(path)
    assert problem is None or str(path) in problem
    found, notes = read(path)  # a row whose key is damaged is only missing
    assert all(str(path) in note for note in notes)
    assert len(notes) <= 2
    assert problem is not None or found == set(TEXTS) or path.stat().st_size == 0
    fill(path)
    read(path)


def test_a_truncated_file_is_begun_anew(path: Path) -> None:
    fill(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    _, notes = read(path)
    assert len(notes) == 1
    assert "is damaged" in notes[0]
    assert names(path) == ["features.sqlite"]
    assert fill(path) == []
    assert read(path) == (set(TEXTS), [])


def test_one_flipped_byte_of_the_schema_stops_nothing(path: Path) -> None:
    fill(path)
    whole = path.read_bytes()
    begin, end = whole.index(b"CREATE TABLE"), whole.index(b"WITHOUT ROWID") + 13
    for place in range(begin, end):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x8A]) + whole[place + 1 :])
        problem = check_cache(path)
        assert problem is None or str(path) in problem
        assert cache_record(path)["path"] == str(path)
        found, notes = read(path)
        assert found in (set(), set(TEXTS))
        assert all(str(path) in note for note in notes)
        assert bool(notes) == (found == set())
        fill(path)
        assert read(path) == (set(TEXTS), [])


def test_a_damaged_file_that_cannot_be_deleted_is_bypassed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    found, (note,) = read(path)
    assert found == set()
    assert "cannot be deleted (Operation not permitted)" in note
    assert names(path) == ["features.sqlite"]


def test_rows_of_an_earlier_version_are_not_read(path: Path) -> None:
    """Version 1 may hold the hidden states of another request."""
    fill(path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    assert "earlier version" in str(check_cache(path))
    found, (note,) = read(path)
    assert found == set()
    assert "earlier version" in note
    assert fill(path) == []
    assert read(path) == (set(TEXTS), [])


def make_text(path: Path) -> None:
    path.write_text("somebody's notes, of more than a hundred characters " * 9)


def make_database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE features (key, z)")
        connection.execute("CREATE TABLE accounts (name)")
    connection.close()


def make_other_application(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA application_id = 7")
        connection.execute("CREATE TABLE features (key, z)")
    connection.close()


def make_newer(path: Path) -> None:
    fill(path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()


@pytest.mark.parametrize("make", [make_text, make_database, make_other_application, make_newer])
def test_a_file_of_others_is_neither_used_nor_changed_nor_deleted(
    path: Path, make: Callable[[Path], None]
) -> None:
    make(path)
    before = path.read_bytes()
    (note,) = fill(path)
    assert "is not used" in note
    assert str(path) in note
    assert read(path)[0] == set()
    assert "move it away" in str(check_cache(path))
    with pytest.raises(ValueError, match="is not deleted"):
        clear_cache(path)
    assert path.read_bytes() == before
    assert names(path) == ["features.sqlite"]


def test_a_locked_file_is_bypassed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "LOCK_TIMEOUT", 0.01)
    fill(path)
    other = sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    (note,) = fill(path)
    assert "locked" in note
    found, (note,) = read(path)
    assert found == set()
    assert "locked" in note
    assert "locked" in str(check_cache(path))
    other.close()
    assert read(path) == (set(TEXTS), [])


@pytest.mark.parametrize(
    ("pragma", "reason"), [("max_page_count = 3", "full"), ("query_only = 1", "readonly")]
)
def test_a_full_or_read_only_file_is_read_and_not_written(
    path: Path, pragma: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = FeatureCache(path, "backbone")
    cache.write({TEXTS[0]: Z[TEXTS[0]]})
    cache.close()

    def limited(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.execute(f"PRAGMA {pragma}")
        return connection

    monkeypatch.setattr(feature_cache, "connect", limited)
    (note,) = fill(path)
    assert reason in note
    assert str(path) in note
    found, notes = read(path)
    assert TEXTS[0] in found
    assert notes == []


def test_a_place_where_no_file_can_be_is_bypassed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (note,) = fill(tmp_path / "file" / "features.sqlite")
    assert "features are not stored" in note
    (tmp_path / "features.sqlite").mkdir()
    (note,) = fill(tmp_path / "features.sqlite")
    assert "is not used" in note


def test_clearing_deletes_our_files_and_no_others(path: Path) -> None:
    assert clear_cache(path) == []
    fill(path)
    mine = ["features.sqlite.old", "notes"]
    for name in mine:
        (path.parent / name).write_text("precious")
    assert clear_cache(path) == [str(path)]
    assert names(path) == mine


def test_the_record_counts_rows_and_bytes(path: Path) -> None:
    assert cache_record(path) == {
        "path": str(path), "size": 0, "rows": 0, "problem": None
    }  # fmt: skip
    fill(path)
    record = cache_record(path)
    assert record["rows"] == len(TEXTS)
    assert record["size"] == path.stat().st_size


def test_two_processes_fill_one_cache(path: Path) -> None:
    with FeatureCacheOf(path) as one, FeatureCacheOf(path) as two:
        for place, text in enumerate(TEXTS):
            (one, two)[place % 2].write({text: Z[text]})
    assert read(path) == (set(TEXTS), [])


class FeatureCacheOf:
    def __init__(self, path: Path) -> None:
        self.cache = FeatureCache(path, "backbone")

    def __enter__(self) -> FeatureCache:
        return self.cache

    def __exit__(self, *_: object) -> None:
        self.cache.close()


@pytest.mark.slow
def test_the_check_runs_without_torch() -> None:
    code = (
        "import sys; from causal_qwen.regression.feature_cache import check_cache; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
