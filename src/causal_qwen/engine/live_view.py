"""Watch: every token being born, live in the terminal.

On a terminal: the text as it grows, a progress bar with tokens/s and the time left, and the last
tokens with their probabilities and runners-up; attention or figures of U, S and P on request.
Elsewhere, or quietly: the text alone, as it comes.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from typing import Any, TextIO

import numpy as np
from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    JustifyMethod,
    RenderableType,
    RenderResult,
)
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from causal_qwen.engine import Engine, Step
from causal_qwen.engine.weights import Float32

LAST = 10  # tokens in the table


class AttentionView:
    """Where the last layer looked when the newest token was chosen, averaged over heads."""

    def __init__(self, layer: int) -> None:
        self.name = f"attention.{layer}"
        self.weights: Float32 = np.zeros(0, np.float32)

    def __call__(self, name: str, array: Float32) -> None:
        if name == self.name:
            self.weights = array[0, :, -1].mean(0)  # (S,)

    def strongest(self, tokens: list[str], count: int = 6) -> str:
        best = np.argsort(-self.weights)[:count]
        return "  ".join(f"{tokens[i]!r} {self.weights[i]:.0%}" for i in best if i < len(tokens))


def watch(
    engine: Engine,
    prompt: str,
    *,
    max_new_tokens: int = 50,
    quiet: bool = False,
    attention: bool = False,
    summary: bool = False,
    out: TextIO | None = None,
    **options: Any,
) -> list[Step]:
    """Generate and show. -> the steps"""
    console = Console(file=out or sys.stdout, highlight=False)
    view = AttentionView(engine.model.config.num_hidden_layers - 1) if attention else None
    steps = engine.stream(
        prompt, max_new_tokens=max_new_tokens, summarize=summary, observe=view, **options
    )
    way, chat = options.get("encode_numbers"), bool(options.get("chat"))
    known = _prompt_tokens(engine, prompt, way, chat)
    if quiet or not console.is_terminal:
        return _plain(steps, prompt, console, quiet, view, known)
    return _live(steps, prompt, console, view, known, max_new_tokens)


def as_record(prompt: str, steps: list[Step]) -> dict[str, Any]:
    """What was said, for machines."""
    return {
        "prompt": prompt,
        "text": "".join(step.text for step in steps),
        "numbers": [step.value for step in steps if step.value is not None],
        "tokens": [asdict(step) for step in steps],
    }


def _plain(
    steps: Iterator[Step],
    prompt: str,
    console: Console,
    quiet: bool,
    view: AttentionView | None,
    known: list[str],
) -> list[Step]:
    """The text as it comes; unless quiet, one line per token follows."""
    done = []
    file = console.file
    first = list(islice(steps, 1))  # what is wrong is said before anything is written
    file.write("" if quiet else prompt)
    lines = []
    for step in chain(first, steps):
        done.append(step)
        file.write(step.text)
        file.flush()
        if step.summary is not None or view is not None:
            lines.append(f"{step.token!r} {_facts(step, view, known)}")
        known.append(step.token)
    file.write("\n" + "".join(f"{line}\n" for line in lines if not quiet))
    return done


def _live(
    steps: Iterator[Step],
    prompt: str,
    console: Console,
    view: AttentionView | None,
    known: list[str],
    total: int,
) -> list[Step]:
    bar = Progress(
        TextColumn("{task.completed}/{task.total} tokens"),
        BarColumn(),
        TextColumn("{task.fields[rate]:.1f} tokens/s"),
        TimeRemainingColumn(),
    )
    task = bar.add_task("", total=total, rate=0.0)
    said, done = Text(prompt, style="dim"), list[Step]()
    recent: deque[Step] = deque(maxlen=max(min(LAST, console.height // 2 - 2), 1))
    page = _Page(said, bar)
    begun = 0.0
    with Live(page, console=console, refresh_per_second=12):
        try:
            for step in steps:
                begun = begun or time.perf_counter()  # the first token reads the whole prompt
                done.append(step)
                recent.append(step)
                said.append(step.text, style=_colour(step.probability))
                passed = time.perf_counter() - begun
                rate = (len(done) - 1) / passed if passed > 0 else 0.0
                bar.update(task, advance=1, rate=rate)
                facts = Text(_facts(step, view, known), style="cyan")
                page.below = Group(_table(recent), facts, bar)
                known.append(step.token)
            bar.update(task, total=len(done))
        finally:
            page.is_whole = True
    return done


class _Page:
    """The text with what stands below it: of a text too long for the screen the end, and all of it
    when everything is said."""

    def __init__(self, said: Text, below: RenderableType) -> None:
        self.said, self.below, self.is_whole = said, below, False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        below = self.below
        lines = self.said.wrap(console, options.max_width)
        room = console.height - len(console.render_lines(below, options, pad=False))
        yield from lines if self.is_whole else lines[-max(room, 1) :]
        yield below


def _prompt_tokens(engine: Engine, prompt: str, way: str | None, chat: bool) -> list[str]:
    """What the model reads, token by token: the places that attention weights stand for."""
    if engine.reader is None:
        return []
    text = engine.reader.as_chat(prompt) if chat else prompt
    ids, values = engine.reader.encode(text, way, add_special_tokens=not chat)
    return [engine.reader.show(token, value) for token, value in zip(ids, values, strict=True)]


def _facts(step: Step, view: AttentionView | None, tokens: list[str]) -> str:
    parts = []
    if step.summary is not None:
        parts.append("  ".join(f"{name} {value:.4g}" for name, value in step.summary.items()))
    if view is not None:
        parts.append(f"looked at {view.strongest(tokens)}")
    return "\n".join(parts)


def _table(steps: deque[Step]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for column in ("token", "probability", "runners-up"):
        justify: JustifyMethod = "right" if column == "probability" else "left"
        shown.add_column(column, justify=justify, no_wrap=column != "runners-up")
    for step in steps:
        others = "  ".join(f"{token!r} {chance:.1%}" for token, chance in step.runners_up)
        chance = Text(f"{step.probability:.1%}", style=_colour(step.probability))
        one_line = Text(others, style="dim", no_wrap=True, overflow="ellipsis")
        shown.add_row(Text(repr(step.token)), chance, one_line)
    return shown


def _colour(probability: float) -> str:
    """Sure words are green, surprising ones red."""
    return "green" if probability > 0.5 else "yellow" if probability > 0.1 else "red"
