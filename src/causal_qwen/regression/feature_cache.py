"""Feature cache: text -> z of a backbone, in an SQLite file of the cache directory.

Every row has a checksum of its key and its values; a row that does not match it is computed again.
A file that cannot be used does not stop the work. One warning names it, and it is

    set aside   if it is damaged, or of version 0.3, which had no checksums: renamed to
                features.sqlite.old-1, -2, ...; a new file is begun
    bypassed    if it is locked, read-only, on a full disk, or not ours: left as it is

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
APPLICATION, SCHEMA = 0x43515746, 1  # in SQLite's header: "CQWF", and the version of the table
HEADER, MAGIC = struct.Struct(">16s44xi4xi"), b"SQLite format 3\0"  # user_version, application_id
LOCK_TIMEOUT = 10.0  # seconds to wait for another process that writes
DAMAGE = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
COMPANIONS = ("", "-journal", "-wal", "-shm")  # of an SQLite file
CLEAR = "causal-qwen cache --clear"

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
            except sqlite3.Error as error:
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
        except sqlite3.Error as error:
            self._fail(error)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _open(self, path: Path) -> None:
        try:
            if (kind := identify(path)) == "older":
                self._set_aside(path, "has no checksums: version 0.3 wrote it")
                kind = "absent"
            if kind in ("foreign", "newer"):
                why = "is not a feature cache" if kind == "foreign" else "is of a newer version"
                self._warn(f"{why} and is not used; move it away, or use --no-cache")
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            self.connection = connect(path)
            if kind == "absent":
                self.connection.executescript(
                    f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION}; "
                    f"PRAGMA user_version = {SCHEMA}; "
                    "CREATE TABLE IF NOT EXISTS features (key TEXT PRIMARY KEY, z BLOB NOT NULL, "
                    "checksum BLOB NOT NULL) WITHOUT ROWID; COMMIT;"
                )
        except (sqlite3.Error, OSError) as error:
            self.close()
            self._warn(f"cannot be used ({_reason(error)}), and features are not stored")

    def _fail(self, error: sqlite3.Error) -> None:
        """Begin a new file if this one is damaged; else do without it, or without writing."""
        assert self.path is not None
        if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in DAMAGE:
            self.close()
            try:
                self._set_aside(self.path, f"is damaged ({error})")
            except OSError as reason:
                self._warn(f"is damaged ({error}) and cannot be set aside ({_reason(reason)})")
            else:
                self._open(self.path)
            return
        if _is_locked(error):
            self.close()
        self.can_write = False
        self._warn(f"cannot be written ({error}), and features are not stored")

    def _set_aside(self, path: Path, why: str) -> None:
        number = 1 + max((int(old.name.rpartition("-")[2]) for old in set_aside(path)), default=0)
        aside = path.with_name(f"{path.name}.old-{number}")
        for companion in COMPANIONS:
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + companion).rename(f"{aside}{companion}")
        self._warn(f"{why}; it is now {aside.name}, which `{CLEAR}` deletes")

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
    """What a file is, by its header; of version 0.3 by its only table."""
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
    if application == APPLICATION:
        return "ours" if version == SCHEMA else "newer" if version > SCHEMA else "older"
    if application:
        return "foreign"
    with contextlib.closing(connect(path, read_only=True)) as connection:
        try:
            columns = connection.execute(
                "SELECT name, (SELECT group_concat(name) FROM pragma_table_info(master.name)) "
                "FROM sqlite_master AS master"
            ).fetchall()
        except sqlite3.DatabaseError as error:
            if _is_locked(error):
                raise
            return "older"  # damaged, of our name, in our directory
    return "older" if columns == [(b"features", b"key,z")] else "foreign"


def set_aside(path: Path) -> list[Path]:
    """The files that were set aside, without their companions."""
    return [
        old for old in sorted(path.parent.glob("*.old-*"))
        if old.name.startswith(f"{path.name}.old-") and old.name.rpartition("-")[2].isdecimal()
    ]  # fmt: skip


def check_cache(path: Path | None = None) -> str | None:
    """What is wrong with the feature cache, in one sentence; None if it is whole or absent."""
    path = path or cache_directory() / CACHE_FILE
    try:
        if (kind := identify(path)) == "absent":
            return None
        if kind == "older":
            return f"{path} is damaged or has no checksums; it is set aside at its next use."
        if kind != "ours":
            return f"{path} is not a feature cache of this version; move it away."
        with contextlib.closing(connect(path, read_only=True)) as connection:
            rows = connection.execute("SELECT CAST(key AS TEXT), z, checksum FROM features")
            damaged = sum(not is_whole(key or b"", *row) for key, *row in rows)
    except (sqlite3.Error, OSError) as error:
        return f"{path} cannot be read: {_reason(error)}; `{CLEAR}` deletes it."
    return f"{path} has {_recomputed(damaged)}." if damaged else None


def cache_record(path: Path | None = None) -> dict[str, Any]:
    """Where the feature cache is, its bytes and rows, older files beside it, and its problem."""
    path = path or cache_directory() / CACHE_FILE
    rows = 0
    with contextlib.suppress(sqlite3.Error, OSError):
        if identify(path) == "ours":
            with contextlib.closing(connect(path, read_only=True)) as connection:
                rows = connection.execute("SELECT count(*) FROM features").fetchone()[0]
    return {
        "path": str(path),
        "size": path.stat().st_size if path.is_file() else 0,
        "rows": rows,
        "set_aside": [str(old) for old in set_aside(path)],
        "problem": check_cache(path),
    }


def clear_cache(path: Path | None = None) -> list[str]:
    """Delete the feature cache and older files beside it; -> their names. Refuses other files."""
    path = path or cache_directory() / CACHE_FILE
    if (kind := identify(path)) in ("foreign", "newer"):
        why = "not a feature cache" if kind == "foreign" else "a feature cache of a newer version"
        raise ValueError(f"{path} is {why} and is not deleted; delete it yourself if it is yours.")
    deleted = []
    for file in (path, *set_aside(path)):
        for companion in COMPANIONS:
            if (one := file.with_name(file.name + companion)).is_file():
                one.unlink()
                deleted.append(str(one))
    return deleted


def _is_locked(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _recomputed(damaged: int) -> str:
    is_or_are = counted(damaged, "damaged row, which is", "damaged rows, which are")
    return f"{is_or_are} computed again"


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
