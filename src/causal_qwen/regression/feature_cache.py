"""Feature cache: text -> z of a backbone, in an SQLite file of the cache directory.

Every row has a checksum of its key and its values; a row that does not match it is computed again.
The cache stops nothing: with one warning a damaged file is begun anew, and one that is locked,
read-only or on a full disk is not used. Does not import torch.
"""

from __future__ import annotations

import hashlib
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
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
READ = "SELECT z, checksum FROM states WHERE key = ?"
WRITE = "INSERT OR REPLACE INTO states VALUES (?, ?, ?)"


class FeatureCache:
    """z of the texts of one backbone. Without a path it stores and finds nothing."""

    def __init__(self, path: Path | None, backbone: str) -> None:
        self.path, self.backbone = path, backbone
        self.connection: Any = None
        if path is not None:
            self._try(self._open)

    def read(self, texts: Sequence[str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """The texts that are stored, with their z."""
        for text in texts if self.connection is not None else ():
            key = self._key(text)
            row = self._try(partial(self._find, key))
            if row is not None and is_whole(key.encode(), *row):
                yield text, np.frombuffer(row[0], np.float32)

    def write(self, found: Mapping[str, NDArray[np.float32]]) -> None:
        pairs = [(self._key(text), z.tobytes()) for text, z in found.items()]
        rows = [(key, blob, checksum(key.encode(), blob)) for key, blob in pairs]

        def insert() -> None:
            with self.connection:
                self.connection.executemany(WRITE, rows)

        self._try(insert)

    def _find(self, key: str) -> Any:
        return self.connection.execute(READ, (key,)).fetchone()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _open(self) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.connection = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT)
        self.connection.execute(TABLE)

    def _try(self, action: Callable[[], Any]) -> Any:
        """If it fails, begin a new file where this one is damaged; else do without it."""
        if self.path is None or (self.connection is None and action != self._open):
            return None
        try:
            return action()
        except FAILURES as error:
            self.close()
            what, code = "is not used", getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in DAMAGE or isinstance(error, UnicodeDecodeError):
                try:
                    for end in ("", "-journal", "-wal", "-shm"):  # its companions
                        self.path.with_name(self.path.name + end).unlink(missing_ok=True)
                    self._open()
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


def check_cache() -> str | None:
    """What is wrong with the feature cache; None if it is whole or absent."""
    path = cache_directory() / CACHE_FILE
    if not path.is_file():
        return None
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, timeout=LOCK_TIMEOUT, uri=True)) as connection:
            connection.text_factory = bytes  # a damaged text is no error
            rows = connection.execute("SELECT CAST(key AS TEXT), z, checksum FROM states")
            damaged = sum(not is_whole(key or b"", *row) for key, *row in rows)
    except FAILURES as error:
        return f"{path} cannot be read: {error}; delete it."
    rows_are = counted(damaged, "damaged row, which is", "damaged rows, which are")
    return f"{path} has {rows_are} computed again." if damaged else None
