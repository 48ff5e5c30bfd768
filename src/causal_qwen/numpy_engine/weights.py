"""Weights: read config.json and the tensors of a checkpoint, in their stored type.

A safetensors file is eight bytes (the header's length), the header (JSON: name -> dtype, shape,
offsets) and the data, which is memory-mapped: the system can reclaim what is not in use. The
reference parser checks the header: data without overlaps and holes, of exactly the file's size.
`ml_dtypes` adds bfloat16 to NumPy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from causal_qwen.options import WORD_EDGES

Stored = NDArray[Any]  # float32, float16, bfloat16, or int8 with a tensor of scales; uint8 of bits
Float32 = NDArray[np.float32]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": bfloat16, "I8": np.int8}
BITS = {"U8": np.uint8}
TILE = 2**16  # numbers checked at once
SCALE = "_scale"  # after the name of an int8 matrix: the tensor of its scales, one per row
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def widen(stored: Stored) -> Float32:
    """Convert to float32; float32 is not copied."""
    return stored.astype(np.float32, copy=False)


def read_json(path: Path) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; pass the directory of a model.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again.") from None
    return fields


def read_optional_json(path: Path) -> dict[str, Any]:
    """An empty dictionary if there is no such file; a file that cannot be read is an error."""
    return read_json(path) if path.exists() else {}


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Every tensor of one file, memory-mapped."""
    try:
        with safe_open(path, framework="np"):  # raises unless the header fits the file
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or truncated ({error}); download it again.") from None
    # a plain array over the map: slicing a np.memmap costs microseconds
    data = np.asarray(np.memmap(path, np.uint8, "r"))
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    tensors: dict[str, Stored] = {}
    for name, entry in header.items():
        # the one tensor of bits; a file may widen them with the others
        known = DTYPES | BITS if name == WORD_EDGES else DTYPES
        if entry["dtype"] not in known:
            raise ValueError(
                f"{name} in {path} is stored as {entry['dtype']}; only float32, float16, bfloat16 "
                "and int8 can be read; save the model in one of them."
            )
        begin, end = entry["data_offsets"]
        stored = data[start + begin : start + end].view(known[entry["dtype"]])
        tensors[name] = stored.reshape(entry["shape"])
    return tensors


def read_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint, from one file or from the shards of an index."""
    if (directory / SINGLE).exists():
        return read_safetensors(directory / SINGLE)
    if not (directory / INDEX).exists():
        raise FileNotFoundError(f"{directory} has no {SINGLE}; pass a model saved as safetensors.")
    tensors: dict[str, Stored] = {}
    for name in sorted({*read_json(directory / INDEX)["weight_map"].values()}):
        tensors |= read_safetensors(directory / name)
    return tensors


# ---------------------------------------------------------------- checks


def check_complete(tensors: Mapping[str, Stored], expected: Iterable[str], where: str) -> None:
    """Raise an error that names missing tensors."""
    if missing := [name for name in expected if name not in tensors]:
        raise ValueError(f"{where} lacks {listed(missing)}; download it again.")


def check_finite(tensors: Mapping[str, Stored], where: str) -> None:
    """Refuse NaN and infinity. Reads all data."""
    broken = [name for name, stored in tensors.items() if not _is_finite(stored)]
    if broken:
        raise ValueError(f"{where} holds NaN or infinity in {listed(broken)}; download it again.")


def _is_finite(stored: Stored) -> bool:
    if stored.dtype in (np.int8, np.uint8):
        return True
    flat = stored.reshape(-1)
    tiles = (flat[start : start + TILE] for start in range(0, len(flat), TILE))
    return all(np.isfinite(widen(tile)).all() for tile in tiles)


def listed(names: Iterable[str], shown: int = 3) -> str:
    """The first names and the count of the others."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
