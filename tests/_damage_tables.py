"""Damaged and hostile inputs, as functions of a seed: CSV files, saved objects, feature caches.

Used by the unit tests with fixed seeds, and by `make fuzz` with fresh ones.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any


def damage_bytes(content: bytes, seed: int) -> bytes:
    """Cut, overwritten, zeroed, extended or emptied somewhere; never what it was."""
    damaged = _damage_bytes(content, random.Random(seed))
    return damaged if damaged != content else content + b"\0"  # zeros may be zeroed


def _damage_bytes(content: bytes, rng: random.Random) -> bytes:
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


# ---------------------------------------------------------------- CSV files

CELLS = (
    *("", "007", "1.10", "NA", "nan", "-0", "1e5", "1,870", "a; b", "x|y", "tab\there", " pad "),
    *(
        'say "hi"',
        '"',
        "two\nlines",
        "carriage\rreturn",
        "both\r\n",
        "café",
        "价格",
        "👍",
        "\u2028",
    ),
    *("True", "null", "'", "=1+1", "#", "\\", "9" * 40, "long " * 50),
)
NEEDS_QUOTES = re.compile(r'[",\r\n]')


def random_csv(seed: int) -> tuple[bytes, dict[str, list[str]]]:
    """A valid file and its columns: any quoting, line end, width, last line end and BOM."""
    rng = random.Random(seed)
    names = rng.sample(["id", "price", "note, long", "grade", 'the "best"', "größe", "a\nb"], 4)
    names = names[: rng.randint(1, 4)]
    rows = [[rng.choice(CELLS) for _ in names] for _ in range(rng.randint(1, 12))]
    share, end = rng.choice([0.0, 0.3, 1.0]), rng.choice(["\n", "\r\n", "\r"])

    def write(cells: list[str]) -> str:
        must = len(cells) == 1  # an empty line would be no cell
        return ",".join(
            '"' + cell.replace('"', '""') + '"'
            if must or NEEDS_QUOTES.search(cell) or rng.random() < share
            else cell
            for cell in cells
        )

    text = rng.choice(["", "\ufeff"]) + end.join(write(cells) for cells in [names, *rows])
    text += rng.choice(["", end, end * 2])
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    return text.encode(), columns


def damaged_csv(seed: int) -> bytes:
    """A file with wrong widths, bytes, encodings, separators, quotes or NULs somewhere."""
    rng = random.Random(seed)
    content, _ = random_csv(seed)
    match rng.randrange(6):
        case 0:
            lines = content.splitlines(keepends=True)
            at = rng.randrange(len(lines))
            lines[at] = rng.choice([b"1,870," + lines[at], lines[at].replace(b",", b"", 1)])
            return b"".join(lines)
        case 1:
            return content.replace(b",", rng.choice([b";", b"\t", b"|"]))
        case 2:
            return content.decode().encode(rng.choice(["utf-16", "utf-16-le", "utf-32"]))
        case 3:
            return content.decode().encode("latin-1", errors="replace")
        case 4:
            at = rng.randrange(len(content))
            return content[:at] + rng.choice([b"\0", b'"', b"\xff", b"\r", b","]) + content[at:]
        case _:
            return damage_bytes(content, seed)
