"""Backbone: the model behind a regressor, opened once and shared.

`CausalTextRegressor(model=...)` takes a directory, an `OpenModel`, or None for the embedded model.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from causal_qwen.conversion.convert import default_model
from causal_qwen.conversion.opening import open_model
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.paths import EMBEDDED
from causal_qwen.terminal import status

Pair = tuple[Any, Any]  # processor and model


class OpenModel:
    """A loaded processor and model, shared instead of loaded again.

        processor, model = open_model(path)
        CausalTextRegressor(model=OpenModel(processor, model))

    It is never copied: scikit-learn's clones and deep copies share it; a pickle or a saved
    regressor holds the name of its directory.
    """

    def __init__(self, processor: Processor, model: CausalModel) -> None:
        self.processor, self.model = processor, model

    @property
    def name(self) -> str:
        """The directory or hub name it was loaded from; empty for a model made in memory."""
        return str(self.model.name_or_path)

    def __fspath__(self) -> str:
        if not self.name:
            raise ValueError(
                "the OpenModel was made in memory and has no directory to save by name: write the "
                "model and its processor with save_pretrained, and open that directory."
            )
        return self.name

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenModel:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (os.fspath(self),)

    def __repr__(self) -> str:
        return f"OpenModel({self.name!r})"


Source = str | os.PathLike[str] | OpenModel | None
Record = dict[str, str | None]  # name, path and fingerprint of a backbone


def record_of(source: Source) -> Record:
    """Name and place of a backbone, which stay valid in another working directory.

    The place is None for the embedded model and for a hub model.
    """
    if isinstance(source, OpenModel):
        return {"name": source.name, "path": None}
    name = EMBEDDED if source is None else os.fspath(source)
    is_local = source is not None and Path(name).is_dir()
    return {"name": name, "path": os.path.abspath(name) if is_local else None}


def saved_record(record: Record, directory: Path) -> Record:
    """With the way from the regressor's directory, beside which the backbone may be moved."""
    path = record["path"]
    return {**record, "relative": path and os.path.relpath(path, os.path.abspath(directory))}


def loaded_record(record: Record, directory: Path) -> Record:
    """With the place where the backbone is now: where it was, or as far from the regressor."""
    beside = os.path.join(directory, record["relative"] or ".")
    if record["path"] is None or os.path.isdir(record["path"]) or not os.path.isdir(beside):
        return record
    return {**record, "path": os.path.abspath(beside)}


def located(source: Source, record: Record | None) -> Source:
    """The backbone at its recorded place, unless another one has been set since."""
    if record is None or source is None or isinstance(source, OpenModel):
        return source
    path = record["path"] if record["name"] == os.fspath(source) else None
    if path is not None and not os.path.isdir(path):
        raise FileNotFoundError(
            f"the backbone {record['name']} is not at {path}; pass model= with the directory to "
            "which it has moved."
        )
    return path or source


def open_shared(source: Source, verbose: bool, device: str = "cpu", dtype: str = "auto") -> Pair:
    """The backbone, to be read only: opened once for all regressors. An `OpenModel` keeps its
    device and dtype."""
    if isinstance(source, OpenModel):
        return source.processor, source.model
    path = _path(source, verbose)
    stats = [(file.name, file.stat()) for file in sorted(path.glob("*")) if file.is_file()]
    # which change when a directory is overwritten
    identities = tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)
    return _open_cached(path, identities, device, dtype)


def _path(source: Source, verbose: bool) -> Path:
    if source is None:
        with status(verbose) as progress:
            return default_model(progress)
    return Path(source)


@lru_cache(maxsize=1)
def _open_cached(path: Path, identities: tuple[Any, ...], device: str, dtype: str) -> Pair:
    return open_model(path, device, dtype)
