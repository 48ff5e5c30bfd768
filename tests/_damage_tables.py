"""Damaged and hostile inputs, as functions of a seed: CSV files, saved objects, feature caches.

Used by the unit tests with fixed seeds, and by `make fuzz` with fresh ones.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any


def damage_bytes(content: bytes, seed: int) -> bytes:
    """Cut, overwritten, zeroed, extended or emptied somewhere."""
    rng = random.Random(seed)
    at = rng.randrange(len(content)) if content else 0
    end = min(len(content), at + rng.choice([1, 8, 200, 5000]))
    match rng.randrange(6):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + rng.randbytes(end - at) + content[end:]
        case 2:
            return content[:at] + bytes(end - at) + content[end:]
        case 3:
            return content[:at] + content[end:]
        case 4:
            return content + rng.randbytes(rng.choice([1, 100, 5000]))
        case _:
            return content[:at] + rng.randbytes(rng.choice([1, 100])) + content[at:]


def damage_file(path: Path, seed: int) -> None:
    path.write_bytes(damage_bytes(path.read_bytes(), seed))


# ---------------------------------------------------------------- saved objects

NEVER_VALID = ({"unexpected": 1}, [[1]], float("nan"), 10**400, -(10**400))


def damage_json(text: str, seed: int) -> str:
    """A key dropped or added, or a value replaced by one that no field may have."""
    rng = random.Random(seed)
    tree = json.loads(text)
    nodes: list[Any] = [tree]
    for node in nodes:  # grows as it goes
        nodes += [child for child in _children(node) if isinstance(child, dict | list)]
    node = rng.choice([node for node in nodes if node])
    key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
    kind = rng.randrange(3) if isinstance(node, dict) else 2
    if kind == 0:
        del node[key]
    elif kind == 1:
        node["unexpected"] = 7
    else:
        node[key] = rng.choice(NEVER_VALID)
    return json.dumps(tree)


def _children(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node


def damage_arrays(arrays: dict[str, Any], seed: int) -> dict[str, Any]:
    """One array dropped, renamed, of another type or shape, or with a value that is not finite."""
    rng = random.Random(seed)
    arrays = {name: array.copy() for name, array in arrays.items()}
    name = rng.choice(sorted(arrays))
    array = arrays.pop(name)
    match rng.randrange(7):
        case 0:
            return arrays
        case 1:
            return {**arrays, f"{name}x": array}
        case 2:
            return {**arrays, name: array.astype(rng.choice(["float32", "int64", "float16"]))}
        case 3:
            return {**arrays, name: array[..., None]}
        case 4:
            return {**arrays, name: array[:-1].copy()}
        case 5:
            return {**arrays, name: array, "7.stray": array}
        case _:
            array.flat[rng.randrange(array.size)] = rng.choice([math.nan, math.inf, -1e300])
            return {**arrays, name: array}
