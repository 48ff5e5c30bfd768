"""Damage a checkpoint directory: `damage(directory, seed)`, the same for the same seed.

Only damage that a reader can notice without checksums: of a weights file the header is changed, and
values only to NaN and infinity. A model that still loads must have exactly its old weights.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

WEIGHTS = "model.safetensors"
STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 0.5, "", "x", [], {}, [None], {"x": 1}),
    *(10**9, 4 * 10**9, 2**63, 10**30, 1e308, -1e308, float("nan"), float("inf"), "1e9"),
)


def damage(directory: Path, seed: int) -> str:
    """Change one file of the directory. Returns what was done."""
    chance = random.Random(seed)
    how = chance.choice(KINDS)
    return f"{how.__name__}: {how(directory, chance)}"


# ---------------------------------------------------------------- bytes


def truncate(directory: Path, chance: random.Random) -> str:
    file = _any_file(directory, chance)
    data = file.read_bytes()
    size = chance.choice((0, 1, 7, 8, len(data) // 2, len(data) - 1, chance.randrange(len(data))))
    file.write_bytes(data[:size])
    return f"{file.name} to {size} of {len(data)} bytes"


def append(directory: Path, chance: random.Random) -> str:
    file = _any_file(directory, chance)
    extra = chance.choice((b"\0", b"x" * 100, b"\xff\xfe", b"{}"))
    file.write_bytes(file.read_bytes() + extra)
    return f"{extra!r} to {file.name}"


def zero(directory: Path, chance: random.Random) -> str:
    file, data, end = _changeable(directory, chance)
    start = chance.randrange(end)
    stop = min(end, start + chance.choice((1, 4, 64)))
    data[start:stop] = bytes(stop - start)
    file.write_bytes(data)
    return f"bytes {start} to {stop} of {file.name}"


def flip(directory: Path, chance: random.Random) -> str:
    file, data, end = _changeable(directory, chance)
    place, bit = chance.randrange(end), chance.randrange(8)
    data[place] ^= 1 << bit
    file.write_bytes(data)
    return f"bit {bit} of byte {place} of {file.name}"


def delete(directory: Path, chance: random.Random) -> str:
    file = directory / chance.choice(("config.json", WEIGHTS, "tokenizer.json"))
    file.unlink()
    return file.name


def replace_by_directory(directory: Path, chance: random.Random) -> str:
    file = _any_file(directory, chance)
    file.unlink()
    file.mkdir()
    return file.name


def replace_by_dangling_link(directory: Path, chance: random.Random) -> str:
    file = _any_file(directory, chance)
    file.unlink()
    file.symlink_to(directory / "nowhere")
    return file.name


# ---------------------------------------------------------------- JSON


def drop_key(directory: Path, chance: random.Random) -> str:
    file, fields = _json_file(directory, chance)
    owner, key = chance.choice(_places(fields))
    del owner[key]
    file.write_text(json.dumps(fields), encoding="utf-8")
    return f"{key!r} of {file.name}"


def change_value(directory: Path, chance: random.Random) -> str:
    file, fields = _json_file(directory, chance)
    owner, key = chance.choice(_places(fields))
    owner[key] = chance.choice(STRANGE)
    file.write_text(json.dumps(fields), encoding="utf-8")
    return f"{key!r} of {file.name} to {owner[key]!r}"


def change_size(directory: Path, chance: random.Random) -> str:
    """The sizes of config.json: zero, negative, huge, one more, text."""
    file = directory / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    names = [name for name in fields if name.endswith(("_size", "_heads", "_layers", "_dim"))]
    name = chance.choice(names)
    fields[name] = chance.choice((0, -1, 10**9, 4 * 10**9, 2**63, 10**30, "x", 1.5, None))
    file.write_text(json.dumps(fields), encoding="utf-8")
    return f"{name} to {fields[name]!r}"


def not_an_object(directory: Path, chance: random.Random) -> str:
    file = directory / chance.choice(("config.json", "generation_config.json"))
    text = chance.choice(("[]", "7", "null", '"x"', "[" * 100_000, "9" * 10_000, "{} {}"))
    file.write_text(text, encoding="utf-8")
    return f"{file.name} to {text[:20]}"


# ---------------------------------------------------------------- tensors


def drop_tensor(directory: Path, chance: random.Random) -> str:
    tensors = load_file(directory / WEIGHTS)
    name = chance.choice(sorted(tensors))
    del tensors[name]
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    return name


def drop_layer(directory: Path, chance: random.Random) -> str:
    tensors = load_file(directory / WEIGHTS)
    layer = chance.choice(sorted({name.split(".")[2] for name in tensors if ".layers." in name}))
    kept = {n: t for n, t in tensors.items() if not n.startswith(f"model.layers.{layer}.")}
    save_file(kept, directory / WEIGHTS, {"format": "pt"})
    return f"layer {layer}"


def rename_tensor(directory: Path, chance: random.Random) -> str:
    tensors = load_file(directory / WEIGHTS)
    name = chance.choice(sorted(tensors))
    tensors[f"{name}x"] = tensors.pop(name)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    return name


def add_tensor(directory: Path, chance: random.Random) -> str:
    tensors = load_file(directory / WEIGHTS)
    name = chance.choice(("extra.weight", "model.layers.9.mlp.up_proj.weight", "model.layers.0.x"))
    save_file({**tensors, name: np.ones(3, np.float32)}, directory / WEIGHTS, {"format": "pt"})
    return name


def reshape_tensor(directory: Path, chance: random.Random) -> str:
    tensors = load_file(directory / WEIGHTS)
    name = chance.choice(sorted(name for name, tensor in tensors.items() if tensor.ndim == 2))
    tensors[name] = tensors[name].reshape(*chance.choice(((-1,), (1, -1, 1), (-1, 1))))
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    return name


def put_not_finite(directory: Path, chance: random.Random) -> str:
    tensors = load_file(directory / WEIGHTS)
    name = chance.choice(sorted(name for name in tensors if tensors[name].dtype.kind == "f"))
    value = chance.choice((np.nan, np.inf, -np.inf))
    tensors[name].reshape(-1)[chance.randrange(tensors[name].size)] = value
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    return f"{value} in {name}"


def change_header(directory: Path, chance: random.Random) -> str:
    """Overlaps, holes, other types, impossible shapes and offsets."""
    header, data = _read_header(directory / WEIGHTS)
    name = chance.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    key = chance.choice(("dtype", "shape", "data_offsets"))
    begin, end = entry["data_offsets"]
    choices: dict[str, tuple[Any, ...]] = {
        "dtype": ("F16", "F64", "I32", "F8_E4M3", "X", 7, None),
        "shape": ([], [-1], [2**62, 2**62], [0], ["3"], None, "x"),
        "data_offsets": (
            *([begin + 4, end + 4], [0, end - begin], [begin, end - 4], [end, begin]),
            *([-8, -4], [2**62, 2**63], [begin], None, "x"),
        ),
    }
    entry[key] = chance.choice(choices[key])
    _write_header(directory / WEIGHTS, header, data)
    return f"{key} of {name} to {entry[key]!r}"


def shift_data(directory: Path, chance: random.Random) -> str:
    """A hole before every tensor."""
    header, data = _read_header(directory / WEIGHTS)
    hole = chance.choice((4, 64, 4096))
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [offset + hole for offset in entry["data_offsets"]]
    _write_header(directory / WEIGHTS, header, bytes(hole) + data)
    return f"{hole} bytes before the data"


def change_length(directory: Path, chance: random.Random) -> str:
    """The length of the header."""
    data = bytearray((directory / WEIGHTS).read_bytes())
    length = chance.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(data)))
    data[:8] = length.to_bytes(8, "little")
    (directory / WEIGHTS).write_bytes(data)
    return str(length)


KINDS: tuple[Callable[[Path, random.Random], str], ...] = (
    *(truncate, append, zero, flip, delete, replace_by_directory, replace_by_dangling_link),
    *(drop_key, change_value, change_value, change_value, change_size, change_size, not_an_object),
    *(drop_tensor, drop_layer, rename_tensor, add_tensor, reshape_tensor, put_not_finite),
    *(change_header, change_header, shift_data, change_length),
)


# ---------------------------------------------------------------- small parts


def copy_of(directory: Path, place: Path) -> Path:
    """A fresh copy to damage."""
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(directory, place))


def _files(directory: Path) -> list[Path]:
    return sorted(file for file in directory.iterdir() if file.suffix in (".json", ".safetensors"))


def _any_file(directory: Path, chance: random.Random) -> Path:
    return chance.choice(_files(directory))


def _changeable(directory: Path, chance: random.Random) -> tuple[Path, bytearray, int]:
    """A file, its bytes, and how many of them may change: not the data of tensors."""
    file = _any_file(directory, chance)
    data = bytearray(file.read_bytes())
    is_weights = file.name == WEIGHTS
    return file, data, 8 + int.from_bytes(data[:8], "little") if is_weights else len(data)


def _json_file(directory: Path, chance: random.Random) -> tuple[Path, dict[str, Any]]:
    file = chance.choice([file for file in _files(directory) if file.suffix == ".json"])
    return file, json.loads(file.read_text(encoding="utf-8"))


def _places(fields: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Every key, with the object that has it."""
    found = [(fields, key) for key in fields]
    for value in fields.values():
        if isinstance(value, dict) and len(value) < 50:
            found += _places(value)
    return found


def _read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _write_header(file: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
