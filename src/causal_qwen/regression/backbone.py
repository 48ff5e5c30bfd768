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
from causal_qwen.terminal import status

Pair = tuple[Any, Any]  # processor and model


class OpenModel:
    """A loaded processor and model, shared instead of loaded again.

        processor, model = open_model(path)
        CausalTextRegressor(model=OpenModel(processor, model))

    It is never copied: clones and deep copies share it; a pickle or a saved regressor holds the
    name of its directory.
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
                "an OpenModel made in memory has no directory to save by name: write it with "
                "save_pretrained, and open that."
            )
        return self.name

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenModel:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (os.fspath(self),)


def open_shared(source: Any, verbose: bool, device: str, dtype: str) -> Pair:
    """The backbone, to be read only: opened once for all regressors. An `OpenModel` keeps its
    device and dtype."""
    if isinstance(source, OpenModel):
        return source.processor, source.model
    if source is None:
        with status(verbose) as progress:
            path = default_model(progress)
    else:
        path = Path(source)
    stats = [(file.name, file.stat()) for file in sorted(path.glob("*")) if file.is_file()]
    # which change when a directory is overwritten
    identities = tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)
    return _open_cached(path, identities, device, dtype)


@lru_cache(maxsize=1)
def _open_cached(path: Path, identities: tuple[Any, ...], device: str, dtype: str) -> Pair:
    return open_model(path, device, dtype)
