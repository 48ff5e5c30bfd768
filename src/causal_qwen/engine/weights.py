"""Weights: a checkpoint directory -> its config, and its tensors as they are stored.

A safetensors file is eight bytes (the header's length), the header (JSON: name -> dtype, shape,
where the bytes are) and the bytes. They are mapped, not read: a tensor costs memory when it is
used, and the system may take that memory back.

NumPy has no bfloat16; `ml_dtypes` teaches it one, and casts it as fast as memory allows.
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
    """The same numbers in float32; no copy of what already is."""
    return stored.astype(np.float32, copy=False)


def read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: give a model's directory.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch it again.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds {type(fields).__name__}, not an object: fetch it again.")
    return fields


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Every tensor of one file, memory-mapped."""
    damaged = f"{path} is damaged or truncated: fetch it again."
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist, and its model needs it.") from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(damaged)
        try:
            header = {**json.loads(file.read(length))}
            header.pop("__metadata__", None)
            edges = [entry["data_offsets"] for entry in header.values()]
            is_inside = all(0 <= begin <= end <= size - 8 - length for begin, end in edges)
        except (ValueError, TypeError, KeyError):  # no JSON, or not that of a header
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
                "bfloat16 can be read: save the model in one of them."
            )
        begin, end = (start + offset for offset in entry["data_offsets"])
        dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"])
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(damaged)
        # plain arrays over the map: slicing a memmap costs microseconds, and we slice a lot
        tensors[name] = np.asarray(data[begin:end]).view(dtype).reshape(shape)
    return tensors


def read_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint, in one file or else in shards listed by an index."""
    if (directory / SINGLE).exists():
        return read_safetensors(directory / SINGLE)
    if not (directory / INDEX).exists():
        raise FileNotFoundError(
            f"{directory} holds no {SINGLE}: give a model saved as safetensors."
        )
    index = read_json(directory / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
        raise ValueError(f"{directory / INDEX} has no weight_map of file names: fetch it again.")
    tensors: dict[str, Stored] = {}
    for shard in sorted(set(index.values())):
        tensors |= read_safetensors(directory / shard)
    if lost := sorted(set(index) - set(tensors)):
        raise ValueError(f"{lost[0]} is listed in {INDEX} and in none of its files.")
    return tensors


def check_tensors(
    tensors: Mapping[str, Stored], expected: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Every expected tensor is there and has its shape; the error names those that have not."""
    if missing := [name for name in expected if name not in tensors]:
        raise ValueError(f"{where} lacks {_listed(missing)}: it is incomplete; fetch it again.")
    wrong = [
        f"{name} of shape {tensors[name].shape} instead of {shape}"
        for name, shape in expected.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise ValueError(f"{where} has {_listed(wrong)}: its config.json is another model's.")


def find_not_finite(tensors: Mapping[str, Stored]) -> str | None:
    """The first tensor that holds NaN or infinity, by name; reads everything."""
    for name, stored in tensors.items():
        if not np.isfinite(stored).all():
            return name
    return None


def _listed(names: Iterable[str], shown: int = 3) -> str:
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
