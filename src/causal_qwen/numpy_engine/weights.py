"""Weights: read config.json and the tensors of a checkpoint, in their stored type.

A safetensors file is eight bytes (the header's length), the header (JSON: name -> dtype, shape,
offsets) and the data, which is memory-mapped: the system can reclaim what is not in use. The
reference parser checks the header: data without overlaps and holes, of exactly the file's size.
`ml_dtypes` adds bfloat16 to NumPy.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from causal_qwen.options import WORD_EDGES

Stored = NDArray[Any]  # float32, float16, bfloat16, or int8 with a tensor of scales; uint8 of bits
Float32 = NDArray[np.float32]
Shapes = Mapping[str, tuple[int, ...]]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": bfloat16, "I8": np.int8}
BITS = {"U8": np.uint8}
INFINITY = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}  # its bits
TILE = 2**16  # numbers checked at once: they stay in cache
SCALE = "_scale"  # after the name of an int8 matrix: the tensor of its scales, one per row
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


TIED_DIFFERS = (
    "has an lm_head.weight of its own and tie_word_embeddings=true in config.json; set it to false."
)


class Entry(NamedTuple):
    """One tensor of a file: its type as in `DTYPES`, its shape, and the place of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


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


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of one file, without its data."""
    try:
        with safe_open(path, framework="np"):  # raises unless the header fits the file
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or truncated ({error}); download it again.") from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: Entry(entry["dtype"], tuple(entry["shape"]), start + begin, start + end)
        for name, entry in header.items()
        for begin, end in [entry["data_offsets"]]
    }


def weight_files(directory: Path) -> list[Path]:
    """The single file of a checkpoint, or the shards of its index."""
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    if not (directory / INDEX).exists():
        raise FileNotFoundError(f"{directory} has no {SINGLE}; pass a model saved as safetensors.")
    shards = read_json(directory / INDEX)["weight_map"].values()
    return [directory / name for name in sorted({*shards})]


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Every tensor of one file, memory-mapped."""
    header = read_header(path)
    data = np.memmap(path, np.uint8, "r")
    tensors: dict[str, Stored] = {}
    for name, (dtype, shape, begin, end) in header.items():
        # the one tensor of bits; a file may widen them with the others
        known = DTYPES | BITS if name == WORD_EDGES else DTYPES
        if dtype not in known:
            raise ValueError(
                f"{name} in {path} is stored as {dtype}; only float32, float16, bfloat16 and int8 "
                "can be read; save the model in one of them."
            )
        # plain arrays over the map: slicing a np.memmap costs microseconds
        tensors[name] = np.asarray(data[begin:end]).view(known[dtype]).reshape(shape)
    return tensors


def read_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint, from one file or from the shards of an index."""
    tensors: dict[str, Stored] = {}
    for path in weight_files(directory):
        tensors |= read_safetensors(path)
    return tensors


# ---------------------------------------------------------------- checks


def check_shapes(tensors: Mapping[str, Stored], expected: Shapes, where: str) -> None:
    """Raise an error that names missing tensors and wrong shapes."""
    if missing := [name for name in expected if name not in tensors]:
        raise ValueError(f"{where} lacks {listed(missing)}; download it again.")
    wrong = [
        f"{name} of shape {tensors[name].shape} instead of {shape}"
        for name, shape in expected.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise ValueError(f"{where} has {listed(wrong)}; use the config.json of this model.")


def check_tied(tensors: Mapping[str, Stored], where: str) -> None:
    """Refuse a stored head that is not the embeddings that config.json ties it to."""
    head, embeddings = tensors.get("lm_head.weight"), tensors["model.embed_tokens.weight"]
    if head is not None and not np.array_equal(head, embeddings):
        raise ValueError(f"{where} {TIED_DIFFERS}")


def check_finite(tensors: Mapping[str, Stored], where: str) -> None:
    """Refuse NaN and infinity. Reads all data."""
    broken = []
    for name, stored in tensors.items():
        if stored.dtype in (np.int8, np.uint8):
            continue
        words = _as_words(stored)
        if not (np.isfinite(stored).all() if words is None else is_finite(*words)):
            broken.append(name)
    if broken:
        raise ValueError(f"{where} holds NaN or infinity in {listed(broken)}; download it again.")


def _as_words(stored: Stored) -> tuple[NDArray[Any], int] | None:
    """The numbers as unsigned integers, and the bits of infinity."""
    kind = next((name for name, dtype in DTYPES.items() if stored.dtype == dtype), None)
    if kind is None:
        return None
    words = np.uint32 if stored.dtype.itemsize == 4 else np.uint16
    return np.ascontiguousarray(stored).view(words), INFINITY[kind]


def is_finite(words: NDArray[Any], infinity: int) -> bool:
    """Whether no exponent is all ones: with integers, much faster than `isfinite` of bfloat16.

    float32 has a faster test: a finite sum of squares has finite terms. It may overflow.
    """
    flat = words.reshape(-1)
    if flat.dtype == np.uint32:
        numbers = flat.view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(np.dot(numbers, numbers)):
                return True
    magnitude = flat.dtype.type(np.iinfo(flat.dtype).max >> 1)  # all bits but the sign
    tiles = (flat[start : start + TILE] for start in range(0, len(flat), TILE))
    return all((tile & magnitude).max() < infinity for tile in tiles)


def release(stored: Stored) -> None:
    """Give back the memory of a mapped tensor; what is read again is mapped again.

    Pages that a check has read count as this process's memory until then.
    """
    base: Any = stored
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.base if isinstance(base, np.ndarray) else None
    if base is None or not hasattr(base, "madvise"):  # in memory; Windows
        return
    first = stored.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (first + stored.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0:
        base.madvise(mmap.MADV_DONTNEED, start, size)


def listed(names: Iterable[str], shown: int = 3) -> str:
    """The first names and the count of the others."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
