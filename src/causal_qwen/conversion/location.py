"""Location: the files of a model, by its name. Imports torch only to convert the embedded one."""

from __future__ import annotations

from pathlib import Path

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
        from causal_qwen.numpy_engine.weights import read_json

        read_json(Path(name) / "config.json")


def path_of(model: str) -> str:
    """The name of a model; for the embedded one its directory, converted at the first use."""
    if (named := unless_embedded(model)) is not None:
        return named
    from causal_qwen.conversion.convert import default_model

    with status() as progress:
        return str(default_model(progress))


def directory_of(model: str) -> Path:
    """The local files of a model."""
    if (named := unless_embedded(model)) is not None:
        return model_directory(named)
    embedded = embedded_directory()
    return embedded if is_converted(embedded) else Path(path_of(model))
