"""Shown: what a command says while it works, and the tables in which it ends.

Work is told on the standard error stream, moving on a terminal and in plain lines elsewhere;
results have the standard output to themselves.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

FIRST_LINE, NEXT_LINE = 2.0, 5.0  # seconds: what takes less than the first is not worth a line


@contextmanager
def status(is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Names the stages of a work: a spinner on a terminal, a line for each elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not is_shown:
        yield lambda what: None
        return
    if not console.is_terminal:
        yield lambda what: console.print(f"{what} ...", highlight=False, soft_wrap=True)
        return
    spinner = console.status("")

    def say(what: str) -> None:
        spinner.update(f"{what} ...")
        spinner.start()  # when there is something to say, and not before

    try:
        yield say
    finally:
        spinner.stop()


@contextmanager
def progress_bar(what: str, is_shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Counts (done, total): a bar on a terminal; elsewhere a line now and then if it takes long."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    console = Console(stderr=True)
    if not is_shown:
        yield lambda done, total: None
        return
    if not console.is_terminal:
        yield _lines(what, lambda line: console.print(line, highlight=False, soft_wrap=True))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str, say: Callable[[str], None]) -> Callable[[int, int], None]:
    due = time.monotonic() + FIRST_LINE

    def count(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + NEXT_LINE
            say(f"{what}: {done} of {total}")

    return count


def print_json(record: Any) -> None:
    """One line for machines; what is not finite is null, for JSON has no other word for it."""
    print(json.dumps(_finite(record), ensure_ascii=False, allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table of results: words to the left, numbers to the right; no heading without columns."""
    from rich.console import Console
    from rich.table import Table

    rows = [list(row) for row in rows]
    table = Table(title=title, show_header=any(columns))
    for place in range(max(map(len, rows), default=0)):
        is_number = all(isinstance(row[place], float | int) for row in rows)
        name = columns[place] if place < len(columns) else ""
        table.add_column(name, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)
