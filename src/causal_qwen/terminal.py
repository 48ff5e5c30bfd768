"""Progress and results in the terminal, and counts in the words of messages.

Progress goes to stderr: animated in a terminal, plain lines elsewhere. Results go to stdout.
"""

from __future__ import annotations

import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

FIRST_LINE, NEXT_LINE = 2.0, 5.0  # seconds; shorter work prints no line


def escape_unencodable() -> None:
    """Let stdout and stderr print any text in any encoding: characters that the encoding lacks
    become escapes such as \\u4f60."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def counted(count: int, one: str, many: str = "") -> str:
    """ "1 row" and "2 rows"; with `many`, "1 row is" and "2 rows are"."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def make_progress(*notes: str, console: Console | None = None, transient: bool = False) -> Progress:
    """A bar with description, done/total, `notes` (templates such as "{task.fields[rate]}") and
    the remaining time."""
    from rich import progress

    middle = [progress.TextColumn(note) for note in notes]
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        *middle,
        progress.TimeRemainingColumn(),
        console=console,
        transient=transient,
    )


@contextmanager
def status(is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """A function that shows the current stage: a spinner in a terminal, one line each elsewhere."""
    from rich.console import Console

    console = Console(stderr=True, quiet=not is_shown, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield lambda stage: console.print(f"{stage} ...")
        return
    spinner = console.status("", spinner="line" if console.options.ascii_only else "dots")

    def show(stage: str) -> None:
        spinner.update(f"{stage} ...")
        spinner.start()  # not before the first stage

    try:
        yield show
    finally:
        spinner.stop()


@contextmanager
def progress_bar(what: str, is_shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, total): a bar in a terminal, a line every few seconds elsewhere."""
    from rich.console import Console

    console = Console(stderr=True, quiet=not is_shown, highlight=False, soft_wrap=True)
    if console.is_terminal:
        with make_progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    due = time.monotonic() + FIRST_LINE

    def count(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + NEXT_LINE
            console.print(f"{what}: {done} of {total}")

    yield count


def print_json(record: Any) -> None:
    """Print one line of JSON; NaN and infinities become null, because JSON has no such numbers.
    Elsewhere than in UTF-8, characters outside ASCII are JSON's escapes."""
    is_ascii = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print(json.dumps(finite(record), ensure_ascii=is_ascii, allow_nan=False), flush=True)


def finite(value: Any) -> Any:
    """NaN and infinities as None, for JSON."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_facts(title: str, facts: dict[str, Any], as_json: bool) -> None:
    """A record as JSON, or as a table of names and values."""
    if as_json:
        print_json(facts)
        return
    shown = {k: "; ".join(v) if isinstance(v, tuple) else v for k, v in facts.items()}
    print_table(title, (), [(name.replace("_", " "), value) for name, value in shown.items()])


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table with numbers right-aligned; without `columns` it has no header."""
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
