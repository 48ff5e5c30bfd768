"""Models: what the name of a model stands for, and the model itself, ready for a command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from causal_qwen.cli.checks import check_model
from causal_qwen.terminal import status


def unless_embedded(model: str) -> str | None:
    """A model's name; None stands for the embedded one, however it was named."""
    from causal_qwen.paths import EMBEDDED

    if not model or (model == EMBEDDED and not Path(model).exists()):
        return None
    check_model(model)
    return model


def path_of(model: str) -> str:
    """A model's name as it is; the embedded one's directory, converted once."""
    if (named := unless_embedded(model)) is not None:
        return named
    from causal_qwen.conversion.convert import default_model

    with status() as progress:
        return str(default_model(progress))


def directory_of(model: str) -> Path:
    """A model's files on this disk, for NumPy: torch is only needed to convert the embedded one."""
    from causal_qwen.paths import embedded_directory, is_converted, model_directory

    if (named := unless_embedded(model)) is not None:
        return model_directory(named)
    embedded = embedded_directory()
    return embedded if is_converted(embedded) else Path(path_of(model))


def load(model: str, numbers: str | None = None) -> tuple[Any, Any]:
    """A processor and its model, ready to speak."""
    path = path_of(model)
    with status() as progress:
        progress("loading the model")
        from causal_qwen.conversion.convert import open_model

        processor, causal = open_model(path)
    processor.encode_numbers = numbers or processor.encode_numbers
    return processor, causal


def model_first(first: str, second: str, model: str) -> tuple[str, str]:
    """MODEL and what comes after it, where MODEL may be left out or be given as --model."""
    if second and model:
        raise ValueError(f"Two models were given, {first} and {model}: leave one out.")
    if not second and not model and Path(first).is_dir():
        return first, ""  # a model, and nothing after it
    return (first, second) if second else (model, first)
