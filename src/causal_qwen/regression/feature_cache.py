"""Feature cache: text -> z of a backbone, in an SQLite file of the cache directory.

Every row has a checksum of its key and its values; a row that does not match it is computed again.
The cache stops nothing: with one warning a damaged file is begun anew, and one that is locked,
read-only or on a full disk is not used. Does not import torch.
"""

from __future__ import annotations

import hashlib
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.paths import cache_directory
from causal_qwen.terminal import counted

CACHE_FILE = "features.sqlite"  # in the cache directory
LOCK_TIMEOUT = 10.0  # seconds to wait for another process that writes
DAMAGE = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# A damaged schema makes a message that is no UTF-8.
FAILURES = (sqlite3.Error, OSError, UnicodeDecodeError)
TABLE = (
    "CREATE TABLE IF NOT EXISTS states "
    "(key TEXT PRIMARY KEY, z BLOB NOT NULL, checksum BLOB NOT NULL) WITHOUT ROWID"
)


class FeatureCache:
    """z of the texts of one backbone. Without a path it stores and finds nothing."""

    def __init__(self, path: Path | None, backbone: str) -> None:
        self.path, self.backbone = path, backbone
        self.connection: sqlite3.Connection | None = None
        if path is not None:
            try:
                self._open(path)
            except FAILURES as error:
                self._fail(error)

    def read(self, texts: Sequence[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """The texts that are stored, with their z."""
        for text in texts:
            if self.connection is None:
                return
            key = self._key(text)
            try:
                query = "SELECT z, checksum FROM states WHERE key = ?"
                row = self.connection.execute(query, (key,)).fetchone()
            except FAILURES as error:
                self._fail(error)
                continue
            if row is not None and is_whole(key.encode(), *row):
                yield text, np.frombuffer(row[0], np.float32)

    def write(self, found: Mapping[str, NDArray[np.float32]]) -> None:
        if self.connection is None:
            return
        pairs = [(self._key(text), z.tobytes()) for text, z in found.items()]
        rows = [(key, blob, checksum(key.encode(), blob)) for key, blob in pairs]
        try:
            with self.connection:
                query = "INSERT OR REPLACE INTO states VALUES (?, ?, ?)"
                self.connection.executemany(query, rows)
        except FAILURES as error:
            self._fail(error)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.connection = sqlite3.connect(path, timeout=LOCK_TIMEOUT)
        self.connection.execute(TABLE)

    def _fail(self, error: Exception) -> None:
        """Begin a new file if this one is damaged; else do without it."""
        assert self.path is not None
        self.close()
        what = "is not used"
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in DAMAGE or isinstance(error, UnicodeDecodeError):
            try:
                delete(self.path)
                self._open(self.path)
                what = "is damaged and begun anew"
            except FAILURES:
                self.close()
        warnings.warn(f"the feature cache {self.path} {what} ({error}).", stacklevel=3)

    def _key(self, text: str) -> str:
        return self.backbone + hashlib.sha256(text.encode()).hexdigest()


def checksum(key: bytes, blob: bytes) -> bytes:
    return hashlib.blake2b(key + blob, digest_size=16).digest()


def is_whole(key: bytes, blob: Any, stored: Any) -> bool:
    return isinstance(blob, bytes) and checksum(key, blob) == stored


def delete(path: Path) -> list[str]:
    """Delete an SQLite file with its companions; -> their names."""
    files = [path.with_name(path.name + end) for end in ("", "-journal", "-wal", "-shm")]
    deleted = [str(file) for file in files if file.is_file()]
    for file in files:
        file.unlink(missing_ok=True)
    return deleted


def cache_record() -> dict[str, Any]:
    """Where the feature cache is, its bytes and rows, and its problem in one sentence."""
    path = cache_directory() / CACHE_FILE
    record = {"path": str(path), "size": 0, "rows": 0, "problem": None}
    if not path.is_file():
        return record
    record["size"] = path.stat().st_size
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, timeout=LOCK_TIMEOUT, uri=True)) as connection:
            connection.text_factory = bytes  # a damaged text is no error
            rows = connection.execute("SELECT CAST(key AS TEXT), z, checksum FROM states")
            whole = [is_whole(key or b"", *row) for key, *row in rows]
    except FAILURES as error:
        problem = f"{path} cannot be read: {error}; `causal-qwen cache --clear` deletes it."
        return record | {"problem": problem}
    if damaged := whole.count(False):
        rows_are = counted(damaged, "damaged row, which is", "damaged rows, which are")
        record["problem"] = f"{path} has {rows_are} computed again."
    return record | {"rows": len(whole)}


def check_cache() -> str | None:
    """What is wrong with the feature cache; None if it is whole or absent."""
    problem: str | None = cache_record()["problem"]
    return problem


def clear_cache() -> list[str]:
    """Delete the feature cache; -> the names of its files."""
    return delete(cache_directory() / CACHE_FILE)
