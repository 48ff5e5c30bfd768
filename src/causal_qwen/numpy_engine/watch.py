"""Watch: generate, and show the text as it grows.

In a terminal: the live view (`live_view`). Elsewhere, or with `quiet`: the text alone, then the
attention or the figures of every token if they are asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from typing import IO, Any

import numpy as np

from causal_qwen.numpy_engine import Engine, Step
from causal_qwen.numpy_engine.weights import Float32


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
    out = out or sys.stdout
    view = AttentionView(engine.model.config.num_hidden_layers - 1) if attention else None
    stream = engine.stream(
        prompt, max_new_tokens=max_new_tokens, summarize=summary, observe=view, **options
    )
    encoding, is_chat = options.get("encode_numbers"), bool(options.get("chat"))
    steps = _with_facts(stream, view, _prompt_tokens(engine, prompt, encoding, is_chat))
    if quiet or not out.isatty():
        return _plain(steps, prompt, out, quiet)
    from rich.console import Console  # for screens alone

    from causal_qwen.numpy_engine.live_view import show

    return show(steps, prompt, Console(file=out, highlight=False), max_new_tokens)


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


def _prompt_tokens(engine: Engine, prompt: str, encoding: str | None, is_chat: bool) -> list[str]:
    """The tokens that the attention weights refer to."""
    if engine.reader is None:
        return []
    text = engine.reader.as_chat(prompt) if is_chat else prompt
    ids, values = engine.reader.encode(text, encoding, add_special_tokens=not is_chat)
    return [engine.reader.show(token, value) for token, value in zip(ids, values, strict=True)]
