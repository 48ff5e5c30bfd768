"""Outputs: files and directories that are written whole or not at all. Does not import torch.

Each is written beside its place and renamed once it is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

LOCK = "causal-qwen.lock"
PARTIAL = ".causal-qwen-"  # begins the name of what is being written
STALE_SECONDS = 24 * 3600
LISTED = 10  # files that a message names
CURE = "choose another, or overwrite it (--force; overwrite=True)"
OURS = re.compile(  # what this program writes into a directory: models, regressors, runs
    r"((model|checkpoint-\d+|individuals|report)/)*("
    r"config\.json|generation_config\.json|causal_qwen_auto\.py|manifest\.json"
    r"|(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|merges\.txt"
    r"|tokenizer\.model|(processor|preprocessor)_config\.json|chat_template\.(jinja|json)"
    r"|README\.md|regressor\.skops|model-\w+\.gguf|Modelfile|causal-qwen\.lock"
    r"|(run|metrics|trainer_state|adapter_config)\.json|training_args\.bin"
    r"|(optimizer|scheduler|rng_state\w*)\.pt(h)?|authors\.safetensors"
    r")|individuals/[\w-]+\.safetensors|report/[\w-]+\.(png|html)"
)


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
        raise FileExistsError(f"{file} exists; {CURE}.")


def check_output_directory(directory: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuse an output that is a file, above the working directory, or not empty: unless
    `overwrite`, and all in it was written by this program."""
    place = Path(directory).resolve()
    if place.is_file():
        raise NotADirectoryError(f"{directory} is a file; name a directory.")
    if not place.is_dir() or not any(place.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{directory} exists and is not empty; {CURE}.")
    if Path.cwd().is_relative_to(place):
        raise ValueError(
            f"{directory} contains the working directory, which would be deleted; name another."
        )
    if foreign := foreign_files(place):
        raise FileExistsError(
            f"{directory} has files that this program did not write: "
            f"{', '.join(foreign[:LISTED])}; move them away, or name another directory."
        )


def foreign_files(directory: Path) -> list[str]:
    """The files in a directory that this program does not write, and symbolic links."""
    found = (path for path in sorted(directory.rglob("*")) if path.is_symlink() or path.is_file())
    names = ((path, path.relative_to(directory).as_posix()) for path in found)
    return [name for path, name in names if path.is_symlink() or not OURS.fullmatch(name)]


@contextlib.contextmanager
def new_directory(output: Path, overwrite: bool) -> Iterator[Path]:
    """A directory to fill; on success it is renamed to `output`, else it is deleted."""
    check_output_directory(output, overwrite)
    target = output.resolve()  # of a symbolic link, the directory behind it
    with _writing(output):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        place = TemporaryDirectory(prefix=PARTIAL, dir=target.parent, ignore_cleanup_errors=True)
    with place:
        new, old = Path(place.name, "new"), Path(place.name, "old")
        new.mkdir()
        yield new
        _share(new)
        check_output_directory(output, overwrite)  # again: another process may have written it
        try:
            with _writing(output):
                if target.is_dir():
                    target.rename(old)
                new.rename(target)
        finally:
            if old.exists() and not target.exists():
                old.rename(target)


def _share(directory: Path) -> None:
    """Give files the mode of the user's umask: safetensors writes some that only their owner can
    read."""
    (usual := directory.parent / "mode").touch()
    for file in directory.rglob("*"):
        if file.is_file():
            shutil.copymode(usual, file)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], overwrite: bool = True) -> Iterator[Path]:
    """A file to write beside `path`; it takes the place of `path` on success, else it is deleted.

    A link stays a link to the new content; a device or a pipe is written directly.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a file.")
    check_output_file(path, overwrite)
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        with _writing(path):
            yield place
        return
    partial = place.with_name(f"{PARTIAL}{os.urandom(8).hex()}")
    try:
        with _writing(path):
            _remove_stale(place.parent)
            yield partial
            check_output_file(path, overwrite)  # again: another process may have written it
            partial.replace(place)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the output in errors of the system."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a sentence of ours, of this file or of one that is read
            raise
        raise OSError(f"{path} cannot be written: {error.strerror or error}.") from error


def _remove_stale(directory: Path) -> None:
    """Delete what processes that were killed a day ago left; not what they were replacing."""
    for path in directory.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):  # another process has just removed it
            if time.time() - path.stat().st_mtime < STALE_SECONDS or (path / "old").exists():
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_text(file: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole_file(file) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory that is written for a long time; refuse one that is held."""
    from filelock import FileLock, Timeout  # slow to import

    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(directory / LOCK, timeout=0).acquire()
    except Timeout:
        raise BlockingIOError(
            f"{directory} is being written by another process; wait for it, or name another."
        ) from None
    with held:
        yield
