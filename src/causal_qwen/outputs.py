"""Output directories: written whole or not at all, and described by a manifest.

A directory is written in `.NAME.causal-qwen/new`, beside its final place, and renamed once it is
complete. That temporary directory holds a lock, which marks it as ours and which the system
releases when the process ends. `manifest.json`, written last, lists size and hash of every file.
Does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from causal_qwen._version import __version__
from causal_qwen.families import CARD, is_causal

MANIFEST = "manifest.json"
FORMAT = "causal-qwen"  # of a manifest; other programs write files of that name, too
LOCK = "causal-qwen.lock"
PARTIAL = ".causal-qwen-"  # begins the name of a file that is being written
STALE_SECONDS = 3600
LISTED = 10  # files that a message names
EDITABLE = "generation_config.json"  # users edit it: another size is no damage if it is JSON
# `save_pretrained` writes no manifest: such directories are ours if
# they have no other files than these, and a config.json of our model type or a regressor's file.
KNOWN = re.compile(
    r"(model/)?("
    r"config\.json|generation_config\.json|causal_qwen_auto\.py"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|merges\.txt|tokenizer\.model"
    r"|(processor|preprocessor)_config\.json|chat_template\.(jinja|json)"
    r"|README\.md"
    r")|regressor\.skops|manifest\.json"
)


class Entry(NamedTuple):
    """A file in a manifest."""

    size: int
    sha256: str


# ---------------------------------------------------------------- writing


def check_not_inside(output: str | os.PathLike[str], *inputs: str | os.PathLike[str]) -> None:
    """Refuse an output that is or contains one of the inputs, which would be deleted."""
    for one in inputs:
        if Path(one).exists() and Path(one).resolve().is_relative_to(Path(output).resolve()):
            raise ValueError(f"{output} contains {one}, which is read; name another output.")


def check_output_file(
    file: str | os.PathLike[str], overwrite: bool, *inputs: str | os.PathLike[str]
) -> None:
    """Refuse a file that exists, unless `overwrite`; and one of the inputs, whatever is asked."""
    if any(Path(one).exists() and Path(one).resolve() == Path(file).resolve() for one in inputs):
        raise ValueError(f"{file} is the file which is read; name another output.")
    if Path(file).is_file() and not overwrite:
        raise FileExistsError(
            f"{file} exists; choose another, or overwrite it (--force; overwrite=True)."
        )


def check_output_directory(directory: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuse an output that is not empty (unless `overwrite`, and all in it was written by this
    program), a file, a broken link, a mount point, or above the working directory."""
    place = Path(directory)
    if place.is_symlink() and not place.exists():
        raise FileNotFoundError(
            f"{directory} is a symbolic link to {os.readlink(place)}, which does not exist; create "
            "that directory, or name another."
        )
    place = place.resolve()  # "new/../full" is "full", even if there is no "new"
    if place.is_file():
        raise NotADirectoryError(f"{directory} is a file; name a directory.")
    if not place.is_dir():
        return
    if os.path.ismount(place):
        raise ValueError(f"{directory} is a mount point; name a directory in it.")
    if any(place.iterdir()) and not overwrite:
        raise FileExistsError(
            f"{directory} exists and is not empty; choose another, or overwrite it "
            "(--force; overwrite=True)."
        )
    if Path.cwd().is_relative_to(place):
        raise ValueError(
            f"{directory} contains the working directory, which would be deleted; name another."
        )
    _check_ours(place, directory)


@contextlib.contextmanager
def new_directory(output: Path, overwrite: bool) -> Iterator[Path]:
    """Write into a temporary directory; on success add a manifest and rename it to `output`, else
    delete it. Refuses an `output` that another process writes or that has appeared meanwhile."""
    check_output_directory(output, overwrite)
    target = output.resolve()  # of a symbolic link, the directory behind it
    with _temporary(target, output) as temporary:
        check_output_directory(output, overwrite)  # again: another process may have just written it
        new = temporary / "new"
        new.mkdir()
        yield new
        write_manifest(new)
        _replace(target, new, temporary / "old", overwrite, output)


@contextlib.contextmanager
def lock(file: Path, output: Path) -> Iterator[None]:
    """Hold a lock file, which stays; refuse an `output` whose lock another process holds."""
    from filelock import FileLock, Timeout  # slow to import

    try:
        held = FileLock(file, timeout=0).acquire()
    except (Timeout, FileNotFoundError):  # not found: the other process has just removed it
        raise _busy(output) from None
    with held:
        yield


def _busy(output: Path) -> BlockingIOError:
    return BlockingIOError(
        f"{output} is being written by another process; wait for it, or name another directory."
    )


def unlock(file: Path) -> None:
    """Remove a lock file that is held; Windows keeps a file that is open."""
    with contextlib.suppress(OSError):
        file.unlink()


@contextlib.contextmanager
def _temporary(target: Path, output: Path) -> Iterator[Path]:
    """The locked temporary directory beside `target`, without what a killed process left there."""
    place = target.parent / f".{target.name}.causal-qwen"
    new, old = place / "new", place / "old"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if isinstance(error, FileExistsError) and not os.path.lexists(place):
            raise _busy(output) from None  # the other process has just removed it
        raise PermissionError(f"{output} cannot be written: {error.strerror}.") from error
    names = []
    with contextlib.suppress(FileNotFoundError):  # another process has just removed it
        names = os.listdir(place)
    if names and LOCK not in names:
        raise FileExistsError(f"{place} was not made by this program; move it away.")
    try:
        with lock(place / LOCK, output):
            _restore(old, target)
            try:
                shutil.rmtree(new, ignore_errors=True)
                yield place
            finally:
                shutil.rmtree(new, ignore_errors=True)
                if os.listdir(place) == [LOCK]:  # it marks what is left, if anything
                    unlock(place / LOCK)
    finally:
        with contextlib.suppress(OSError):  # another process has taken it over
            place.rmdir()


def _restore(old: Path, target: Path) -> None:
    """Move what was overwritten back, or delete it if all of it is ours and has been replaced."""
    if not old.exists():
        return
    if not target.exists():
        old.rename(target)
    elif not any(foreign_files(old)):
        shutil.rmtree(old, ignore_errors=True)


def _replace(target: Path, new: Path, old: Path, overwrite: bool, output: Path) -> None:
    """Rename `new` to `target`. What is there is moved to `old` first, out of others' reach, and
    comes back if a file in it is not ours."""
    is_there = target.is_dir()
    try:
        if is_there:
            shutil.copymode(target, new)
        if is_there and overwrite:
            target.rename(old)
            _check_ours(old, output)
        with contextlib.suppress(OSError):
            target.rmdir()  # if empty; only Windows needs it
        new.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(
                f"{output} has appeared while its content was being computed; it is left as it is "
                "and the new content is discarded: name another directory."
            ) from error
        raise
    finally:  # after an interrupt, too
        _restore(old, target)


# ---------------------------------------------------------------- what we wrote


def foreign_files(directory: Path) -> Iterator[str]:
    """Files that this program did not write: not in the manifest, or symbolic links."""
    manifest = read_manifest(directory)
    names = {MANIFEST, *(manifest or {})}
    is_ours = manifest is not None or _is_saved_model(directory)
    for name in _files(directory):
        is_known = name in names or (manifest is None and KNOWN.fullmatch(name))
        if not (is_ours and is_known) or (directory / name).is_symlink():
            yield name


def _check_ours(place: Path, output: str | os.PathLike[str]) -> None:
    foreign = list(islice(foreign_files(place), LISTED + 1))
    if foreign:
        more = ", and more" if len(foreign) > LISTED else ""
        raise FileExistsError(
            f"{output} has files that this program did not write: {', '.join(foreign[:LISTED])}"
            f"{more}; move them away, or name another directory."
        )


def _is_saved_model(directory: Path) -> bool:
    if (directory / "regressor.skops").is_file():
        return True
    config = _read_json(directory / "config.json")
    return isinstance(config, dict) and is_causal(config.get("model_type"))


def _files(directory: Path) -> Iterator[str]:
    """Relative names of all files, links and (with a slash) empty directories, in order."""
    for folder, folders, names in os.walk(directory):
        folders.sort()
        here = Path(folder).relative_to(directory)
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in sorted([*names, *links]):
            yield (here / name).as_posix()
        if not folders and not names and here != Path():
            yield f"{here.as_posix()}/"


# ---------------------------------------------------------------- manifest


def write_manifest(directory: Path, files: Iterable[str] | None = None) -> None:
    """Record size and hash of `files`, by default of all files in the directory. They get the mode
    of the user's umask: safetensors writes files that only their owner can read."""
    found = [name for name in files or _files(directory) if (directory / name).is_file()]
    names = [name for name in found if name not in (MANIFEST, LOCK)]
    record = {
        "format": FORMAT,
        "version": __version__,
        "files": {
            name: Entry((directory / name).stat().st_size, file_sha256(directory / name))._asdict()
            for name in names
        },
    }
    write_text(directory / MANIFEST, json.dumps(record, indent=1))
    for name in names:
        with contextlib.suppress(OSError):  # not on every file system
            shutil.copymode(directory / MANIFEST, directory / name)


def read_manifest(directory: Path) -> dict[str, Entry] | None:
    """Name -> entry; None without a readable manifest of ours."""
    record = _read_json(directory / MANIFEST)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return None
    try:
        return {
            str(name): Entry(int(entry["size"]), str(entry["sha256"]))
            for name, entry in record["files"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def damaged_files(directory: Path, *, hashes: bool = False) -> list[str]:
    """What differs from the manifest: sizes, which is fast, and with `hashes` every byte."""
    manifest = read_manifest(directory)
    if manifest is None:
        return [f"{MANIFEST} is missing or damaged"]
    found = []
    for name, entry in manifest.items():
        file = directory / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            found.append(f"{name} is missing")
        elif size != entry.size and (hashes or not _is_edited(file)):
            found.append(f"{name} has {size} bytes instead of {entry.size}")
        elif hashes and file_sha256(file) != entry.sha256:
            found.append(f"{name} has changed since it was written")
    return found


def check_complete(directory: Path) -> None:
    """Refuse a directory without a file that its manifest lists."""
    for name in read_manifest(directory) or {}:
        if not os.path.lexists(directory / name):
            raise FileNotFoundError(
                f"{directory / name} is missing, and {MANIFEST} lists it; restore it, or save the "
                "directory again."
            )


def damaged_parts(directory: Path, *, hashes: bool = False) -> list[str]:
    """`damaged_files` of a directory and of those in it that have a manifest, as checkpoints do."""
    parts = [path.parent for path in sorted(directory.glob(f"*/{MANIFEST}"))]
    if (directory / MANIFEST).exists() or not parts:  # a run that has not ended has only parts
        parts = [directory, *parts]
    return [
        words if part == directory else f"{part.name}/{words}"
        for part in parts
        for words in damaged_files(part, hashes=hashes)
    ]


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], overwrite: bool = True) -> Iterator[Path]:
    """A file to write beside `path`; it takes the place of `path` on success, else it is deleted.
    Without `overwrite`, refuses a `path` that exists, or that has appeared meanwhile.

    An existing file keeps its permissions, a new one has those of the user's umask. A link stays
    a link to the new content; a device or a pipe is written directly.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a file.")
    check_output_file(path, overwrite)
    is_device = Path(path).exists() and not Path(path).is_file()
    place = Path(os.path.realpath(path))
    partial = place.with_name(f"{PARTIAL}{os.urandom(8).hex()}")
    try:
        if is_device:
            yield Path(path)
            return
        _remove_stale(place.parent)
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        if place.exists():
            partial.chmod(place.stat().st_mode & 0o777)
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        check_output_file(path, overwrite)
        partial.replace(place)
    except FileExistsError:
        raise
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _remove_stale(directory: Path) -> None:
    """Delete what killed processes left of files that they wrote."""
    for file in directory.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):  # another process has just removed it
            if time.time() - file.stat().st_mtime > STALE_SECONDS:
                file.unlink()


def write_text(file: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole_file(file) as partial:
        partial.write_text(text, encoding="utf-8")


def _is_edited(file: Path) -> bool:
    return file.name == CARD or (file.name == EDITABLE and isinstance(_read_json(file), dict))


def file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
