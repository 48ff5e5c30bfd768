"""Weights: read config.json and the tensors of a checkpoint, in their stored type.

A safetensors file is eight bytes (the header's length), the header (JSON: name -> dtype, shape,
offsets) and the data, which is memory-mapped: a tensor takes memory only when it is used, and the
system can reclaim it. `ml_dtypes` adds bfloat16 to NumPy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

Stored = NDArray[Any]  # float32, float16 or bfloat16
Float32 = NDArray[np.float32]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": bfloat16}


def widen(stored: Stored) -> Float32:
    """Convert to float32; float32 is not copied."""
    return stored.astype(np.float32, copy=False)


def read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; pass the directory of a model.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds {type(fields).__name__}, not an object; download it again.")
    return fields


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Every tensor of one file, memory-mapped."""
    damaged = f"{path} is damaged or truncated; download it again."
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; download the model again.") from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(damaged)
        try:
            header = {**json.loads(file.read(length))}
            header.pop("__metadata__", None)
            edges = [entry["data_offsets"] for entry in header.values()]
            is_inside = all(0 <= begin <= end <= size - 8 - length for begin, end in edges)
        except (ValueError, TypeError, KeyError):  # not JSON, or not a header
            raise ValueError(damaged) from None
    if not is_inside:
        raise ValueError(damaged)
    start = 8 + length
    data = np.memmap(path, np.uint8, "r") if header else np.zeros(0, np.uint8)
    tensors: dict[str, Stored] = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{name} in {path} is stored as {entry['dtype']}; only float32, float16 and "
                "bfloat16 can be read; save the model in one of them."
            )
        begin, end = (start + offset for offset in entry["data_offsets"])
        dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"])
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(damaged)
        # plain arrays over the map: slicing a np.memmap costs microseconds
        tensors[name] = np.asarray(data[begin:end]).view(dtype).reshape(shape)
    return tensors


def read_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint, from one file or from the shards of an index."""
    if (directory / SINGLE).exists():
        return read_safetensors(directory / SINGLE)
    if not (directory / INDEX).exists():
        raise FileNotFoundError(f"{directory} has no {SINGLE}; pass a model saved as safetensors.")
    index = read_json(directory / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
        raise ValueError(f"{directory / INDEX} has no weight_map of file names; download it again.")
    tensors: dict[str, Stored] = {}
    for shard in sorted(set(index.values())):
        tensors |= read_safetensors(directory / shard)
    if lost := sorted(set(index) - set(tensors)):
        raise ValueError(
            f"{lost[0]} is listed in {INDEX} but in none of its files; download them again."
        )
    return tensors


def check_tensors(
    tensors: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise an error that names missing tensors and wrong shapes."""
    if missing := [name for name in expected if name not in tensors]:
        raise ValueError(f"{where} lacks {_listed(missing)}; download it again.")
    wrong = [
        f"{name} of shape {tensors[name].shape} instead of {shape}"
        for name, shape in expected.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise ValueError(f"{where} has {_listed(wrong)}; use the config.json of this model.")


def find_not_finite(tensors: Mapping[str, Stored]) -> str | None:
    """Name of the first tensor that holds NaN or infinity. Reads all data."""
    for name, stored in tensors.items():
        if not np.isfinite(stored).all():
            return name
    return None


def _listed(names: Iterable[str], shown: int = 3) -> str:
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
