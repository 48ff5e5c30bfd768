"""Feature cache: text -> z of a backbone, in an SQLite file of the cache directory.

Every row has a checksum of its key and its values; a row that does not match it is computed again.
A file that cannot be used does not stop the work. One warning names it, and it is

    begun anew   if it is damaged, or of an earlier version
    bypassed     if it is locked, read-only, on a full disk, or not ours: left as it is

Does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from causal_qwen.paths import cache_directory
from causal_qwen.terminal import counted

CACHE_FILE = "features.sqlite"  # in the cache directory
APPLICATION, SCHEMA = 0x43515746, 2  # in SQLite's header: "CQWF", and the version of the rows
HEADER, MAGIC = struct.Struct(">16s44xi4xi"), b"SQLite format 3\0"  # user_version, application_id
LOCK_TIMEOUT = 10.0  # seconds to wait for another process that writes
DAMAGE = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
COMPANIONS = ("", "-journal", "-wal", "-shm")  # of an SQLite file
# A damaged schema makes a message that is no UTF-8.
FAILURES = (sqlite3.Error, OSError, UnicodeDecodeError)

Kind = Literal["absent", "ours", "older", "newer", "foreign"]
Features = NDArray[np.float32]


class FeatureCache:
    """z of the texts of one backbone. Without a path it stores and finds nothing."""

    def __init__(self, path: Path | None, backbone: str) -> None:
        self.path, self.backbone = path, backbone
        self.connection: sqlite3.Connection | None = None
        self.can_write = True
        if path is not None:
            self._open(path)

    def read(self, texts: Sequence[str]) -> Iterator[tuple[str, Features]]:
        """The texts that are stored, with their z."""
        damaged = 0
        for text in texts:
            if self.connection is None:
                break
            try:
                query = "SELECT z, checksum FROM features WHERE key = ?"
                row = self.connection.execute(query, (key := self._key(text),)).fetchone()
            except FAILURES as error:
                self._fail(error)
                continue
            if row is not None and is_whole(key.encode(), *row):
                yield text, np.frombuffer(row[0], np.float32)
            elif row is not None:
                damaged += 1
        if damaged:
            self._warn(f"has {_recomputed(damaged)}")

    def write(self, found: Mapping[str, Features]) -> None:
        if self.connection is None or not self.can_write:
            return
        rows = []
        for text, z in found.items():
            key, blob = self._key(text), z.tobytes()
            rows.append((key, blob, checksum(key.encode(), blob)))
        try:
            with self.connection:
                query = "INSERT OR REPLACE INTO features VALUES (?, ?, ?)"
                self.connection.executemany(query, rows)
        except FAILURES as error:
            self._fail(error)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _open(self, path: Path) -> None:
        try:
            if (kind := identify(path)) == "older":
                self._warn("is of an earlier version, and is begun anew")
                delete(path)
            if kind in ("foreign", "newer"):
                why = "is not a feature cache" if kind == "foreign" else "is of a newer version"
                self._warn(f"{why} and is not used; move it away, or use --no-cache")
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            self.connection = connect(path)
            if kind != "ours":
                self.connection.executescript(
                    f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION}; "
                    f"PRAGMA user_version = {SCHEMA}; "
                    "CREATE TABLE IF NOT EXISTS features (key TEXT PRIMARY KEY, z BLOB NOT NULL, "
                    "checksum BLOB NOT NULL) WITHOUT ROWID; COMMIT;"
                )
        except FAILURES as error:
            self.close()
            self._warn(f"cannot be used ({_reason(error)}), and features are not stored")

    def _fail(self, error: Exception) -> None:
        """Begin a new file if this one is damaged; else do without it, or without writing."""
        assert self.path is not None
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in DAMAGE or isinstance(error, UnicodeDecodeError):
            self.close()
            try:
                delete(self.path)
            except OSError as reason:
                self._warn(f"is damaged and cannot be deleted ({_reason(reason)})")
            else:
                self._warn(f"is damaged ({_reason(error)}), and is begun anew")
                self._open(self.path)
            return
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            self.close()
        self.can_write = False
        self._warn(f"cannot be written ({_reason(error)}), and features are not stored")

    def _warn(self, what: str) -> None:
        warnings.warn(f"the feature cache {self.path} {what}.", stacklevel=2)

    def _key(self, text: str) -> str:
        return self.backbone + hashlib.sha256(text.encode()).hexdigest()


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}{'?mode=ro' if read_only else ''}"
    connection = sqlite3.connect(uri, timeout=LOCK_TIMEOUT, uri=True)
    connection.text_factory = bytes  # a damaged text is no error
    return connection


def checksum(key: bytes, blob: bytes) -> bytes:
    return hashlib.blake2b(key + blob, digest_size=16).digest()


def is_whole(key: bytes, blob: Any, stored: Any) -> bool:
    return isinstance(blob, bytes) and checksum(key, blob) == stored


def identify(path: Path) -> Kind:
    """What a file is, by its header."""
    if not path.exists():
        return "absent"
    if not path.is_file():
        return "foreign"
    if path.stat().st_size == 0:
        return "absent"
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        return "foreign"
    _, version, application = HEADER.unpack(header)
    if application != APPLICATION:
        return "foreign"
    return "ours" if version == SCHEMA else "newer" if version > SCHEMA else "older"


def delete(path: Path) -> list[str]:
    """Delete an SQLite file with its companions; -> their names."""
    files = [path.with_name(path.name + companion) for companion in COMPANIONS]
    deleted = [str(file) for file in files if file.is_file()]
    for file in files:
        file.unlink(missing_ok=True)
    return deleted


def check_cache(path: Path | None = None) -> str | None:
    """What is wrong with the feature cache, in one sentence; None if it is whole or absent."""
    path = path or cache_directory() / CACHE_FILE
    try:
        if (kind := identify(path)) == "absent":
            return None
        if kind == "older":
            return f"{path} is of an earlier version; it is begun anew at its next use."
        if kind != "ours":
            return f"{path} is not a feature cache of this version; move it away."
        with contextlib.closing(connect(path, read_only=True)) as connection:
            rows = connection.execute("SELECT CAST(key AS TEXT), z, checksum FROM features")
            damaged = sum(not is_whole(key or b"", *row) for key, *row in rows)
    except FAILURES as error:
        return f"{path} cannot be read: {_reason(error)}; `causal-qwen cache --clear` deletes it."
    return f"{path} has {_recomputed(damaged)}." if damaged else None


def cache_record(path: Path | None = None) -> dict[str, Any]:
    """Where the feature cache is, its bytes and rows, and its problem."""
    path = path or cache_directory() / CACHE_FILE
    rows = 0
    with contextlib.suppress(*FAILURES):
        if identify(path) == "ours":
            with contextlib.closing(connect(path, read_only=True)) as connection:
                rows = connection.execute("SELECT count(*) FROM features").fetchone()[0]
    return {
        "path": str(path),
        "size": path.stat().st_size if path.is_file() else 0,
        "rows": rows,
        "problem": check_cache(path),
    }


def clear_cache(path: Path | None = None) -> list[str]:
    """Delete the feature cache; -> the names of its files. Refuses other files."""
    path = path or cache_directory() / CACHE_FILE
    if (kind := identify(path)) in ("foreign", "newer"):
        why = "not a feature cache" if kind == "foreign" else "a feature cache of a newer version"
        raise ValueError(f"{path} is {why} and is not deleted; delete it yourself if it is yours.")
    return delete(path)


def _recomputed(damaged: int) -> str:
    is_or_are = counted(damaged, "damaged row, which is", "damaged rows, which are")
    return f"{is_or_are} computed again"


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "its table is not the one that was written"
    return str(getattr(error, "strerror", None) or error)
