"""Live view: a generation in a terminal, as it runs.

The growing text, a bar with tokens/s and the remaining time, and the last tokens with their
probabilities and runners-up; attention or figures of U, S and P on request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from causal_qwen.numpy_engine import Step
from causal_qwen.terminal import make_progress

LAST = 10  # tokens in the table


def show(
    steps: Iterator[tuple[Step, str]], prompt: str, console: Console, total: int
) -> list[Step]:
    """Steps with their facts, on the screen. -> the steps"""
    bar = make_progress("{task.fields[rate]:.1f} tokens/s")
    task = bar.add_task("tokens", total=total, rate=0.0)
    text, done = Text(prompt, style="dim"), list[Step]()
    recent: deque[Step] = deque(maxlen=max(min(LAST, console.height // 2 - 2), 1))
    page = _Page(text, bar)
    begun = 0.0
    with Live(page, console=console, refresh_per_second=12):
        try:
            for step, facts in steps:
                begun = begun or time.perf_counter()  # the first token includes the prompt
                done.append(step)
                recent.append(step)
                text.append(step.text, style=_colour(step.probability))
                passed = time.perf_counter() - begun
                rate = (len(done) - 1) / passed if passed > 0 else 0.0
                bar.update(task, advance=1, rate=rate)
                page.below = Group(_table(recent), Text(facts, style="cyan"), bar)
            bar.update(task, total=len(done))
        finally:
            page.is_complete = True
    return done


class _Page:
    """The text above `below`: the end that fits the screen, and all of it once complete."""

    def __init__(self, text: Text, below: RenderableType) -> None:
        self.text, self.below, self.is_complete = text, below, False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        below = self.below
        lines = self.text.wrap(console, options.max_width)
        room = console.height - len(console.render_lines(below, options, pad=False))
        yield from lines if self.is_complete else lines[-max(room, 1) :]
        yield below


def _table(steps: deque[Step]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("token", no_wrap=True)
    table.add_column("probability", justify="right", no_wrap=True)
    table.add_column("runners-up")
    for step in steps:
        others = "  ".join(f"{token!r} {chance:.1%}" for token, chance in step.runners_up)
        chance = Text(f"{step.probability:.1%}", style=_colour(step.probability))
        one_line = Text(others, style="dim", no_wrap=True, overflow="ellipsis")
        table.add_row(Text(repr(step.token)), chance, one_line)
    return table


def _colour(probability: float) -> str:
    """Green for likely tokens, red for unlikely ones."""
    return "green" if probability > 0.5 else "yellow" if probability > 0.1 else "red"
