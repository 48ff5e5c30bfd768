"""Weights: read config.json and the tensors of a checkpoint, in their stored type.

A safetensors file is eight bytes (the header's length), the header (JSON: name -> dtype, shape,
offsets) and the data, which is memory-mapped: the system can reclaim what is not in use. The
reference parser checks the header: data without overlaps and holes, of exactly the file's size.
`ml_dtypes` adds bfloat16 to NumPy.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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


@contextlib.contextmanager
def file_named(path: str | os.PathLike[str]) -> Iterator[None]:
    """What the parser of a damaged file raises, as one sentence that names the file."""
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:  # KeyError, struct.error, ZeroDivisionError, SafetensorError, ...
        words = " ".join(str(error).split())
        if isinstance(error, ValueError) and _names(words, Path(path)):
            raise
        if isinstance(error, ValueError) and words.endswith("."):  # a sentence that has the cure
            raise ValueError(f"{path}: {words}") from error
        reason = f"no {words}" if isinstance(error, KeyError) else words or type(error).__name__
        raise ValueError(f"{path} is damaged ({reason}); download it again.") from error


def _names(words: str, path: Path) -> bool:
    """Whether a sentence names a file or its directory, which may be "." or an ordinary word."""
    directory = re.escape(str(path.parent))
    return str(path) in words or re.search(rf"(^|\b(of|in) ){directory}[ /\\]", words) is not None


def read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; pass the directory of a model.") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}); download it again.") from None
    except (ValueError, RecursionError) as error:  # not JSON, not text, too many digits or levels
        raise ValueError(f"{path} is not valid JSON ({error}); download it again.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds {type(fields).__name__}, not an object; download it again.")
    return fields


def read_optional_json(path: Path) -> dict[str, Any]:
    """An empty dictionary if there is no such file; a file that cannot be read is an error."""
    return read_json(path) if os.path.lexists(path) else {}


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of one file, without its data."""
    try:
        with safe_open(path, framework="np"):  # raises unless the header fits the file
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; download the model again.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or truncated ({error}); download it again.") from None
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: Entry(entry["dtype"], tuple(entry["shape"]), start + begin, start + end)
        for name, entry in header.items()
        for begin, end in [entry["data_offsets"]]
    }


def read_headers(directory: Path) -> dict[Path, dict[str, Entry]]:
    """File -> its tensors, for the single file of a checkpoint or the shards of its index."""
    if os.path.lexists(directory / SINGLE):
        return {directory / SINGLE: read_header(directory / SINGLE)}
    if not os.path.lexists(directory / INDEX):
        raise FileNotFoundError(f"{directory} has no {SINGLE}; pass a model saved as safetensors.")
    shards = read_weight_map(directory / INDEX)
    headers = {
        directory / name: read_header(directory / name) for name in sorted({*shards.values()})
    }
    found: dict[str, Path] = {}
    for path, header in headers.items():
        if twice := sorted(found.keys() & header.keys()):
            raise ValueError(
                f"{path} and {found[twice[0]].name} both hold {listed(twice)}; download them again."
            )
        found |= dict.fromkeys(header, path)
    if lost := sorted(set(shards) - set(found)):
        raise ValueError(
            f"{listed(lost)} of {directory / INDEX} is in none of its files; download them again."
        )
    return headers


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor -> its file beside the index."""
    shards = read_json(index).get("weight_map")
    is_map = isinstance(shards, dict) and all(isinstance(name, str) for name in shards.values())
    if not isinstance(shards, dict) or not is_map:
        raise ValueError(f"{index} has no weight_map of file names; download it again.")
    for name in shards.values():
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise ValueError(f"{index} names the file {name!r}, which is not beside it.")
    return shards


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Every tensor of one file, memory-mapped."""
    return _map_tensors(path, read_header(path))


def _map_tensors(path: Path, header: Mapping[str, Entry]) -> dict[str, Stored]:
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
    for path, header in read_headers(directory).items():
        tensors |= _map_tensors(path, header)
    bare = [n for n, one in tensors.items() if one.dtype == np.int8 and n + SCALE not in tensors]
    if bare:
        raise ValueError(
            f"{directory} stores {listed(bare)} as int8 without scales; save the model in float32, "
            "float16 or bfloat16."
        )
    return tensors


# ---------------------------------------------------------------- checks


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise an error that names missing tensors and wrong shapes."""
    if missing := [name for name in expected if name not in shapes]:
        raise ValueError(f"{where} lacks {listed(missing)}; download it again.")
    wrong = [
        f"{name} of shape {shapes[name]} instead of {shape}"
        for name, shape in expected.items()
        if shapes[name] != shape
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
