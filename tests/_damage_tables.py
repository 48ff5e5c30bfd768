"""Damaged and hostile inputs, as functions of a seed: CSV files, saved objects, feature caches.

Used by the unit tests with fixed seeds, and by `make fuzz` with fresh ones.
"""

from __future__ import annotations

import random
from pathlib import Path


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
