"""Shared by all benchmarks: options, interleaved timing, memory, Markdown tables, page and JSON.

Does not import torch: peak memory of the NumPy engine is measured in a process that imports this.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import time
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

RESULTS = Path("docs/results")
Row = dict[str, Any]
MOST = 10  # rows of a page
KEY_ROWS = {  # of the first table of a page that has any; a newer row is further down
    "calibration": "",
    "decode": r"constant .* (standard|causal) \|",
    "engine": r"NumPy (float32|bfloat16|int8|int8 numba) \|",
    "individuals": r"^\| (softmax (min-p 0.1|top-p 0.9|T=0.7) \||softmax, cand|`samp|"
    r"individuals \(|individuals, T|shared Gumbel, cand|shared Gumbel, min-p 0.1 \|).*\| 240 \|",
    "loss": r"^(?!.*earlier).*\| ours",
    "numbers": r"MdAE|coverage|CRPS",
    "vllm": r"`(standard|causal)`",
}


# ---------------------------------------------------------------- options


def page_path(name: str) -> Callable[[str], Path]:
    """Read the `--output` of a benchmark: a page, or a directory for the page of this name.

    A path that does not exist yet is a directory if it has no suffix.
    """

    def read(text: str) -> Path:
        path = Path(text)
        return path / f"{name}.md" if path.is_dir() or not path.suffix else path

    return read


def page_directory(text: str) -> Path:
    """The `--output` of `reproduce`: a directory that exists or can be created."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a file; name a directory.")
    return path


def make_parser(
    description: str | None,
    name: str,
    quick: str,
    rounds: int | None = None,
    has_check: bool = False,
) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have, and `--check` for those of speed."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    output = page_path(name) if name else page_directory
    default = RESULTS / (f"{name}.md" if name else "reproduced")
    parser.add_argument("--output", type=output, default=default, help="a page or its directory")
    parser.add_argument("--quick", action="store_true", help=quick)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="timed rounds of each peer")
    if has_check:
        parser.add_argument("--check", action="store_true", help="compare with the page only")
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None, **quick: Any
) -> argparse.Namespace:
    """Parse; `--quick` replaces the defaults by `quick`, and explicit options override both."""
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**quick)
    return parser.parse_args(arguments)


# ---------------------------------------------------------------- measuring


def time_peers(
    peers: dict[str, Callable[[], Any]], rounds: int, once: Container[str] = ()
) -> dict[str, list[float]]:
    """Seconds of every peer in every round; within a round all peers run, in rotating order.

    A float that a peer returns is its own measurement. One round warms up. Peers in `once` run in
    the first round only.
    """
    names = list(peers)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if name in once and turn != 0:
                continue
            gc.collect()
            start = time.perf_counter()
            measured = peers[name]()
            elapsed = time.perf_counter() - start
            if turn >= 0:
                times[name].append(measured if isinstance(measured, float) else elapsed)
    return times


def paired_ratio(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """[median, low, high] of the ratio of rounds that belong together; 95% bootstrap interval."""
    paired = np.asarray(times) / np.asarray(base[: len(times)])
    return interval(paired, np.median)


def interval(values: ArrayLike, statistic: Callable[..., Any] = np.mean) -> list[float]:
    """[statistic, low, high] with its 95% bootstrap interval."""
    x = np.asarray(values, dtype=np.float64)
    draws = statistic(np.random.default_rng(0).choice(x, (2000, len(x))), axis=1)
    return [float(statistic(x)), *np.quantile(draws, (0.025, 0.975)).tolist()]


def resident_bytes(peak: bool = False) -> int:
    """Resident memory of this process, now or at its peak (Linux).

    Not getrusage's maximum: a process started by a large one inherits the parent's.
    """
    field = "VmHWM:" if peak else "VmRSS:"
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith(field))


def call_in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a process of its own, so that its peak memory is its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


# ---------------------------------------------------------------- writing


def span(key: str, digits: int = 2, unit: str = "f") -> str:
    """A column's format for [value, low, high] under `key`: "value (low to high)"."""
    value, low, high = (f"{{{key}[{place}]:.{digits}{unit}}}" for place in range(3))
    return f"{value} ({low} to {high})"


def table(
    columns: dict[str, str], rows: Iterable[Row] | dict[str, Row], missing: str = ""
) -> list[str]:
    """A Markdown table: title -> format of a row. A dict's keys are the rows' `name`.

    A cell whose figure is absent or None shows `missing`.
    """

    def cell(form: str, row: Row) -> str:
        try:
            return form.format_map(row).replace("|", "/")
        except (KeyError, TypeError):
            return missing

    if isinstance(rows, dict):
        rows = [{"name": name, **row} for name, row in rows.items()]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(cell(f, row) for f in columns.values())} |" for row in rows]
    return lines


def renew(rows: list[Row], output: Path, *keys: str) -> list[Row]:
    """Rows of the last run beside `output`, replaced by `rows` where `keys` are equal."""
    both = [*load(output, []), *rows]
    return list({tuple(row.get(key) for key in keys): row for row in both}.values())


def load(output: Path, missing: Any) -> Any:
    """The JSON beside a page, or `missing` if there is none."""
    path = output.with_suffix(".json")
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else missing


def log(*parts: Any) -> None:
    print(*(json.dumps(p) if isinstance(p, (dict, list)) else p for p in parts), flush=True)


def save(lines: list[str], results: Any, output: Path) -> None:
    """Print all lines; write the JSON, which has every figure, and the page, which has the key
    rows of one table."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(shortened(lines, output.stem)) + "\n", encoding="utf-8")
    output.with_suffix(".json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("\n".join(lines))


def shortened(lines: list[str], name: str) -> list[str]:
    """Title, command and one table of at most MOST rows, the last of those that match KEY_ROWS."""
    title, paragraph = lines[0], lines[2]
    tables = [
        list(group)
        for is_table, group in groupby(lines, lambda line: line.startswith("|"))
        if is_table
    ]
    wanted = re.compile(KEY_ROWS.get(name, ""))
    found = [[row for row in rows[2:] if wanted.search(row)] for rows in tables]
    best = max(range(len(tables)), key=lambda place: (len(found[place]) > 0, -place))
    key = (found[best] or tables[best][2:])[-MOST:]
    page = [title, "", paragraph, "", *tables[best][:2], *key]
    rest = sum(map(len, tables)) - 2 * len(tables) - len(key)
    return [*page, "", f"{rest} more rows: [{name}.json]({name}.json)."] if rest else page
