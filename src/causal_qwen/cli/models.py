"""Models: from the name of a model to its files, or to the loaded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from causal_qwen.paths import EMBEDDED, embedded_directory, is_converted, model_directory
from causal_qwen.terminal import status


def unless_embedded(model: str) -> str | None:
    """The name of a model, or None for the embedded one."""
    if not model or (model == EMBEDDED and not Path(model).exists()):
        return None
    check_model(model)
    return model


def check_model(name: str) -> None:
    """Refuse a local directory without a readable config.json; other names are the hub's."""
    if Path(name).is_dir():
        from causal_qwen.engine.weights import read_json

        read_json(Path(name) / "config.json")


def path_of(model: str) -> str:
    """The name of a model; for the embedded one its directory, converted at the first use."""
    if (named := unless_embedded(model)) is not None:
        return named
    from causal_qwen.conversion.convert import default_model

    with status() as progress:
        return str(default_model(progress))


def directory_of(model: str) -> Path:
    """The local files of a model. Imports torch only to convert the embedded one."""
    if (named := unless_embedded(model)) is not None:
        return model_directory(named)
    embedded = embedded_directory()
    return embedded if is_converted(embedded) else Path(path_of(model))


def load(
    model: str, numbers: str | None = None, device: str = "auto", dtype: str = "auto"
) -> tuple[Any, Any]:
    """-> processor, model"""
    path = path_of(model)
    with status() as progress:
        progress("loading the model")
        from causal_qwen.conversion.convert import open_model

        processor, causal = open_model(path, device, dtype)
    processor.encode_numbers = numbers or processor.encode_numbers
    return processor, causal


def split_model(first: str, second: str, model: str) -> tuple[str, str]:
    """The arguments [MODEL] OTHER, where MODEL may be left out or given as --model."""
    if second and model:
        raise ValueError(f"Two models were given, {first} and {model}: leave one out.")
    if not second and not model and Path(first).is_dir():
        return first, ""  # a model, and nothing after it
    return (first, second) if second else (model, first)
