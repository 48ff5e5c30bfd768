"""Saved regressor: a fitted regressor -> its directory, and back.

The files and their checks are in `saved` and `saved_sources`; a directory is written completely or
not at all, and what does not fit together is refused when it is read.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import open_model
from causal_qwen.conversion.placement import resolve_device
from causal_qwen.outputs import MANIFEST, damaged_files, file_sha256, new_directory
from causal_qwen.regression.backbone import OpenModel, loaded_record, saved_record
from causal_qwen.regression.checks import CURE, wrong
from causal_qwen.regression.explanation import baseline_cells, baseline_frame
from causal_qwen.regression.fitted import Limits, Target
from causal_qwen.regression.inputs import name_features, source_texts
from causal_qwen.regression.reading import check_backbone, open_reader
from causal_qwen.regression.saved import (
    FORMAT,
    MODEL,
    SETTINGS,
    TENSORS,
    Settings,
    read_settings,
    read_tensors,
    settings_sha256,
)
from causal_qwen.regression.saved_sources import (
    OBJECTS,
    load_skops,
    read_objects,
    source_settings,
    source_tensors,
    to_source_model,
    write_objects,
)
from causal_qwen.regression.settings import check_settings
from causal_qwen.tables.rows import TEXT

if TYPE_CHECKING:
    from causal_qwen.regression.regressor import CausalTextRegressor

Regressor = TypeVar("Regressor", bound="CausalTextRegressor")


def save_regressor(regressor: CausalTextRegressor, path: Path, overwrite: bool) -> None:
    settings = {
        "format": FORMAT,
        "parameters": _parameters(regressor),
        "columns": regressor.columns_,
        "is_single": regressor.is_single_,
        "targets": {name: list(target.space) for name, target in regressor.targets_.items()},
        "limits": {name: _json_bounds(one.limits) for name, one in regressor.targets_.items()},
        "seed": regressor.seed_,
        "backbone": saved_record(regressor.backbone_, path)
        if hasattr(regressor, "backbone_")
        else None,
        "sources": None,
    }
    tensors: dict[str, Tensor] = {}
    for place, (target, one) in enumerate(regressor.targets_.items()):
        found = one.tensors()
        if regressor.source_ is not None:
            found |= source_tensors(regressor.source_.targets[target])
        tensors |= {f"{place}.{name}": tensor.contiguous() for name, tensor in found.items()}
    if regressor.source_ is not None:
        load_skops()  # here: a signal ends an import at once, and would leave a begun directory
    with new_directory(path, overwrite) as directory:
        (directory / TENSORS).write_bytes(safetensors_bytes(tensors))  # with the umask
        settings["tensors_sha256"] = file_sha256(directory / TENSORS)
        if regressor.source_ is not None:
            write_objects(file := directory / OBJECTS, regressor.source_)
            text_columns = getattr(regressor, "text_columns_", [])
            settings["sources"] = source_settings(
                regressor.source_,
                text_columns,
                baseline_cells(regressor.baseline_),
                file_sha256(file),
            )
        settings["settings_sha256"] = settings_sha256(settings)
        (directory / SETTINGS).write_text(json.dumps(settings, indent=1), encoding="utf-8")
        if hasattr(regressor, "model_"):
            with quiet():
                regressor.model_.save_pretrained(directory / MODEL)
            regressor.processor_.save_pretrained(directory / MODEL)


def _parameters(regressor: CausalTextRegressor) -> dict[str, Any]:
    """JSON's values. A splitter and a generator have none; `seed_` is what was drawn."""
    found = regressor.get_params() | {"cv": None, "device": "auto"}  # another machine has others
    if not isinstance(regressor.random_state, numbers.Integral):
        found["random_state"] = None
    else:
        found["random_state"] = int(regressor.random_state)
    if not isinstance(regressor.sources, str):
        found["sources"] = list(regressor.sources)
    if not isinstance(regressor.support, str):
        found["support"] = _json_bounds(regressor.support)
    is_unused = regressor.source_ is not None and not regressor.source_.uses_model
    if is_unused and isinstance(regressor.model, OpenModel) and not regressor.model.name:
        return found | {"model": None}
    return found | {"model": regressor.model and os.fspath(regressor.model)}


def load_regressor(
    kind: type[Regressor],
    directory: Path,
    model: str | os.PathLike[str] | None,
    device: str = "auto",
) -> Regressor:
    resolve_device(device)  # else the error would name the file
    saved = read_settings(directory)
    regressor = kind(**saved.parameters | {"device": device})
    try:
        check_settings(regressor)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{directory / SETTINGS}: {error}") from None
    if model is not None:
        regressor.set_params(model=model)
    regressor.columns_, regressor.is_single_ = saved.columns, saved.is_single
    regressor.seed_ = saved.seed
    name_features(regressor)
    tensors = read_tensors(directory, saved)
    if saved.is_edited:
        raise ValueError(f"{directory / SETTINGS} was edited after it was saved; {CURE}.")
    has_manifest = (directory / MANIFEST).is_file()
    has_hashes = saved.is_edited is not None or saved.tensors_sha256 is None  # 0.3.0 wrote neither
    if not has_manifest and not has_hashes:
        warnings.warn(
            f"{directory} has no {MANIFEST}, so an edited value is found only if it is "
            "impossible; restore the file, or fit again.",
            stacklevel=3,
        )
    if has_manifest and (damage := damaged_files(directory, hashes=True)):
        raise ValueError(f"{directory / damage[0]}; {CURE}.")
    regressor.targets_ = {
        name: Target.from_tensors(space, of_target, Limits(*saved.limits[name]))
        for (name, space), of_target in zip(saved.spaces.items(), tensors, strict=True)
    }
    if saved.backbone is not None:
        regressor.backbone_ = loaded_record(saved.backbone, directory, model)
        check_backbone(regressor)
    if saved.sources is not None:
        _load_sources(regressor, directory, saved, tensors)
    elif saved.backbone is not None:
        _check_chains(regressor, directory / TENSORS)
    else:
        if not (directory / MODEL).is_dir():
            raise FileNotFoundError(f"{directory / MODEL} is missing; restore it, or fit again.")
        regressor.processor_, regressor.model_ = open_model(
            directory / MODEL, device, regressor.dtype
        )
    return regressor


def _load_sources(
    regressor: CausalTextRegressor,
    directory: Path,
    saved: Settings,
    tensors: list[dict[str, Tensor]],
) -> None:
    """The transformers and experts, tried on an empty row: their files may not match."""
    record = saved.sources
    assert record is not None
    if record.text_columns is not None:
        regressor.text_columns_ = record.text_columns
    chains = [one.chain for one in regressor.targets_.values() if one.chain is not None]
    objects = read_objects(directory / OBJECTS, record)
    regressor.source_ = to_source_model(record, saved.spaces, chains, tensors, objects)
    regressor.evidence_, regressor.baseline_ = {}, baseline_frame(record.baseline)
    try:
        _try_empty_row(regressor)
    except (LookupError, ValueError, TypeError, AttributeError):
        files = f"{OBJECTS} and {TENSORS}"
        raise ValueError(
            f"{directory / SETTINGS}: the sources do not match {files}; {CURE}."
        ) from None


def _try_empty_row(regressor: CausalTextRegressor) -> None:
    import pandas

    assert regressor.source_ is not None
    row = pandas.DataFrame({name: [None] for name in regressor.columns_ or [TEXT]}, dtype=object)
    z = None
    if regressor.source_.uses_model:
        if regressor.columns_ is not None:
            source_texts(regressor, row)
        size = open_reader(regressor)[1].config.hidden_size
        z = dict.fromkeys(regressor.source_.poolings, np.zeros((1, size), dtype=np.float32))
    table = regressor.source_.table
    for transformer in table.transformers.values():
        for part, _, names in transformer.transformers_:
            if part == "numbers" and names != list(table.ranges):  # those seen in training
                raise ValueError(f"{names} are read, not {list(table.ranges)}")
    table.beyond(row)
    regressor.source_.predict(row, z)


def _check_chains(regressor: CausalTextRegressor, file: Path) -> None:
    size = open_reader(regressor)[1].config.hidden_size
    for name, target in regressor.targets_.items():
        assert target.chain is not None  # `read_tensors` has found one
        if (found := target.chain.abduction.loc.weight.shape[1]) != size:
            raise wrong(file, f"the hidden size of {name}", str(found), f"the backbone's {size}")


def _json_bounds(values: Sequence[float]) -> list[float | None]:
    """Infinity, which JSON does not have, is null."""
    plain = [value if isinstance(value, bool) else float(value) for value in values]
    return [value if math.isfinite(value) else None for value in plain]
