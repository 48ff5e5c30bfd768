"""What makes the figures of different days comparable: the machine, a history, a check.

Every row names its day, its processor and the memory's speed, which is read in every round. A
*case* is what tells rows apart, the processor included; its *speeds* are ratios with intervals,
larger is better. Every run appends them to `<page>.history.jsonl`; `--check` compares them with the
page's instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _results import Row, load, renew, save, time_peers

from causal_qwen.numpy_engine.fast import THREADS

MACHINE = ("date", "cpu", "bandwidth_gb_s")
MACHINE_COLUMNS = {
    "day": "{date}",
    "processor": "{cpu}",
    "GB/s of the memory": "{bandwidth_gb_s:.1f}",
}
BLOCK = 2**29  # bytes, far beyond the caches
Speeds = dict[str, list[float]]  # what -> [ratio, low, high]


# ---------------------------------------------------------------- the machine


def cpu() -> str:
    """The instructions that torch uses, by which processors are told apart."""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def memory_reader(times: int = 4) -> Callable[[], float]:
    """Seconds in which all threads together read BLOCK bytes from memory, at best."""
    parts = np.array_split(np.ones(BLOCK // 4, np.float32), THREADS)

    def read() -> float:
        start = time.perf_counter()
        readers = [threading.Thread(target=part.max) for part in parts]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return time.perf_counter() - start

    return lambda: min(read() for _ in range(times))


def time_beside_memory(
    peers: dict[str, Callable[[], Any]], rounds: int, once: Container[str] = ()
) -> tuple[dict[str, list[float]], Row]:
    """`time_peers`, and the machine on which it ran."""
    memory = "memory"
    times = time_peers(peers | {memory: memory_reader()}, rounds, once)
    return times, machine(BLOCK / float(np.median(times.pop(memory))) / 1e9)


def machine(bandwidth: float) -> Row:
    """Where and when a row was measured."""
    return dict(zip(MACHINE, (time.strftime("%Y-%m-%d"), cpu(), bandwidth), strict=True))


# ---------------------------------------------------------------- the history


def faster(times: Sequence[float]) -> list[float]:
    """A ratio of times as one of speeds, with its interval."""
    middle, low, high = times
    return [1 / middle, 1 / high, 1 / low]


def speeds_of(
    rows: list[Row], case: Sequence[str], ratios: Callable[[Row], Speeds]
) -> dict[tuple[Any, ...], Row]:
    """Case -> its fields, the memory's speed, and all its ratios."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        fields = {key: row.get(key) for key in (*case, *MACHINE)}
        own = found.setdefault(tuple(row.get(key) for key in (*case, "cpu")), {**fields})
        own["ratios"] = own.get("ratios", {}) | ratios(row)
    return found


def remember(speeds: dict[tuple[Any, ...], Row], output: Path) -> None:
    """Append a run to the history beside the page."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.with_suffix(".history.jsonl").open("a", encoding="utf-8") as file:
        for row in speeds.values():
            file.write(json.dumps(row) + "\n")


def regressions(
    now: dict[tuple[Any, ...], Row], before: dict[tuple[Any, ...], Row]
) -> tuple[list[str], int]:
    """Ratios whose whole interval is below that of the page; how many were compared."""
    slower, count = [], 0
    for case, row in now.items():
        known = before.get(case, {}).get("ratios", {})
        for name, ratio in row["ratios"].items():
            if name not in known:
                continue
            count += 1
            if ratio[2] < known[name][1]:
                where = " ".join(str(part) for part in case)
                ours, page = ("{:.2f} ({:.2f} to {:.2f})".format(*r) for r in (ratio, known[name]))
                slower.append(f"{where}, {name}: {ours}, on the page {page}")
    return slower, count


def conclude(
    rows: list[Row],
    options: argparse.Namespace,
    page: Callable[[list[Row]], list[str]],
    case: Sequence[str],
    ratios: Callable[[Row], Speeds],
    key: Sequence[str] = (),
) -> None:
    """Renew these rows of the page, or compare them with it.

    Rows are of one place on the page if case, processor and `key` are equal.
    """
    before = load(options.output, [])
    if options.check:
        slower, count = regressions(speeds_of(rows, case, ratios), speeds_of(before, case, ratios))
        if slower:
            sys.exit("\n".join(["Slower than on the page:", *slower]))
        found = f"{count} ratios compared with {options.output}; none is below its interval there."
        print(found if count else f"{options.output} has no row of this processor to compare with.")
        return
    remember(speeds_of(rows, case, ratios), options.output)
    rows = renew(rows, options.output, *case, *key, "cpu")
    save(page(rows), rows, options.output)
