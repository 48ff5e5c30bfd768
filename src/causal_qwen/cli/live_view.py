"""Live view: a text in a terminal as it grows, on any engine.

The text, a bar with tokens/s and the remaining time, and the last tokens with their probabilities
and runners-up.
"""

from __future__ import annotations

import math
import time
from collections import deque

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from causal_qwen.session import TextStream
from causal_qwen.terminal import make_progress

LAST = 10  # tokens in the table
RUNNERS_UP = 3
Shown = tuple[str, float, tuple[tuple[str, float], ...]]  # a token, its probability, runners-up


def shown(stream: TextStream) -> Shown:
    """The newest token of a stream that was opened with `alternatives`."""
    engine, choice = stream.session.engine, stream.choice
    token = engine.show(choice.id, choice.value)
    own = token, choice.log_prob
    others = [(other, math.exp(log_p)) for other, log_p in choice.top if (other, log_p) != own]
    return token, math.exp(choice.log_prob or 0.0), tuple(others[:RUNNERS_UP])


def show(stream: TextStream, prompt: str, console: Console) -> None:
    """Generate, on the screen."""
    total = stream.growing.row.max_new_tokens
    bar = make_progress("{task.fields[rate]:.1f} tokens/s")
    task = bar.add_task("tokens", total=total, rate=0.0)
    text, done, begun = Text(prompt, style="dim"), 0, 0.0
    recent: deque[Shown] = deque(maxlen=max(min(LAST, console.height // 2 - 2), 1))
    page = _Page(text, bar)
    with Live(page, console=console, refresh_per_second=12):
        try:
            for addition in stream:
                begun = begun or time.perf_counter()  # the first token includes the prompt
                recent.append(newest := shown(stream))
                text.append(addition, style=_colour(newest[1]))
                passed = time.perf_counter() - begun
                bar.update(task, advance=1, rate=done / passed if passed > 0 else 0.0)
                done += 1
                page.below = Group(_table(recent), bar)
            bar.update(task, total=done)
        finally:
            page.is_complete = True


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


def _table(tokens: deque[Shown]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("token", no_wrap=True)
    table.add_column("probability", justify="right", no_wrap=True)
    table.add_column("runners-up")
    for token, probability, runners_up in tokens:
        others = "  ".join(f"{other!r} {chance:.1%}" for other, chance in runners_up)
        chance = Text(f"{probability:.1%}", style=_colour(probability))
        one_line = Text(others, style="dim", no_wrap=True, overflow="ellipsis")
        table.add_row(Text(repr(token)), chance, one_line)
    return table


def _colour(probability: float) -> str:
    """Green for likely tokens, red for unlikely ones."""
    return "green" if probability > 0.5 else "yellow" if probability > 0.1 else "red"
