"""What every benchmark does with its results: paired ratios, and a page with its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def paired_ratio(times: ArrayLike, base: ArrayLike) -> tuple[float, float, float]:
    """The median ratio of rounds that belong together, and its 95% bootstrap interval."""
    paired = np.asarray(times) / np.asarray(base)
    draws = np.random.default_rng(0).choice(paired, (2000, len(paired)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return float(np.median(paired)), float(low), float(high)


def resident_bytes(peak: bool = False) -> int:
    """What this process holds in memory now, or has held at its worst (Linux).

    Not getrusage's maximum: a process that was started by a large one inherits that one's.
    """
    field = "VmHWM:" if peak else "VmRSS:"
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith(field))


def save(lines: list[str], results: Any, output: Path) -> None:
    """Write the page and its JSON, and print the page."""
    page = "\n".join(lines)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page + "\n", encoding="utf-8")
    output.with_suffix(".json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(page)
