"""Live view of generation in the terminal.

In a terminal: the growing text, a bar with tokens/s and the remaining time, and the last tokens
with their probabilities and runners-up; attention or figures of U, S and P on request.
Elsewhere, or with `quiet`: the text alone.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from typing import IO, Any

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from causal_qwen.engine import Engine, Step
from causal_qwen.engine.weights import Float32
from causal_qwen.terminal import make_progress

LAST = 10  # tokens in the table


class AttentionView:
    """Attention of the last layer from the newest position, averaged over heads."""

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
    out: IO[str] | None = None,
    **options: Any,
) -> list[Step]:
    """Generate and show. -> the steps"""
    console = Console(file=out or sys.stdout, highlight=False)
    view = AttentionView(engine.model.config.num_hidden_layers - 1) if attention else None
    stream = engine.stream(
        prompt, max_new_tokens=max_new_tokens, summarize=summary, observe=view, **options
    )
    encoding, is_chat = options.get("encode_numbers"), bool(options.get("chat"))
    steps = _with_facts(stream, view, _prompt_tokens(engine, prompt, encoding, is_chat))
    if quiet or not console.is_terminal:
        return _plain(steps, prompt, console.file, quiet)
    return _live(steps, prompt, console, max_new_tokens)


def as_record(prompt: str, steps: list[Step]) -> dict[str, Any]:
    """The generated text, for JSON."""
    return {
        "prompt": prompt,
        "text": "".join(step.text for step in steps),
        "numbers": [step.value for step in steps if step.value is not None],
        "tokens": [asdict(step) for step in steps],
    }


def _with_facts(
    steps: Iterator[Step], view: AttentionView | None, tokens: list[str]
) -> Iterator[tuple[Step, str]]:
    """Each step with its figures and attention as lines of text; `tokens` are the prompt's."""
    for step in steps:
        lines = []
        if step.summary is not None:
            lines.append("  ".join(f"{name} {value:.4g}" for name, value in step.summary.items()))
        if view is not None:
            lines.append(f"attention {view.strongest(tokens)}")
        yield step, "\n".join(lines)
        tokens.append(step.token)


def _plain(
    steps: Iterator[tuple[Step, str]], prompt: str, file: IO[str], quiet: bool
) -> list[Step]:
    """Write the text as it grows; then, unless quiet, the facts of each token."""
    done, lines = list[Step](), []
    first = list(islice(steps, 1))  # errors are raised before anything is written
    file.write("" if quiet else prompt)
    for step, facts in chain(first, steps):
        done.append(step)
        file.write(step.text)
        file.flush()
        if facts and not quiet:
            lines.append(f"{step.token!r} {facts}\n")
    file.write("\n" + "".join(lines))
    return done


def _live(
    steps: Iterator[tuple[Step, str]], prompt: str, console: Console, total: int
) -> list[Step]:
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


def _prompt_tokens(engine: Engine, prompt: str, encoding: str | None, is_chat: bool) -> list[str]:
    """The tokens that the attention weights refer to."""
    if engine.reader is None:
        return []
    text = engine.reader.as_chat(prompt) if is_chat else prompt
    ids, values = engine.reader.encode(text, encoding, add_special_tokens=not is_chat)
    return [engine.reader.show(token, value) for token, value in zip(ids, values, strict=True)]


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
