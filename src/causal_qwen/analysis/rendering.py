"""Rendering: a counterfactual as rows, as a terminal table and as HTML. Does not import torch."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from causal_qwen.text.numerals import render

if TYPE_CHECKING:
    from causal_qwen.analysis.counterfactual import Counterfactual, World

HEADINGS = (
    "step",
    *("factual", "softmax", "P"),
    *("counterfactual", "softmax", "P"),
    *("ΔU", "scale ratio", "value"),
)
END = " (ends here)"
STEPS_SHOWN = 60
# The background has the colour, half transparent: readable on light and dark pages.
RED, GREEN = (
    f"background:rgba({colour},.3);font-weight:bold" for colour in ("226,72,60", "40,160,90")
)


class StepRow(NamedTuple):
    """One step of both worlds, as the text of its cells."""

    cells: list[str]  # as HEADINGS
    is_same: bool


def title(result: Counterfactual) -> str:
    return f"{result.edit} · {result.semantics} · {result.individual!r}"


def caption(result: Counterfactual) -> str:
    step = result.divergence
    where = "the worlds never diverge" if step is None else f"first divergence at step {step}"
    return (
        f"{where}; ΔU: how far loc_U moved; scale ratio: by what factor scale_U changed; "
        "softmax: the token's probability; P: one-vs-rest, that its score passes its threshold"
    )


def split_text(result: Counterfactual, world: World) -> tuple[str, str, str]:
    """The prompt, the text that both worlds share, and the text after their divergence."""
    step = len(world.tokens) if result.divergence is None else result.divergence
    tokens = [*world.tokens[:-1], END] if world.is_ended else world.tokens
    gap = "" if result.is_text else " "
    return world.prompt + gap, gap.join([*tokens[:step], ""]), gap.join(tokens[step:])


def table(result: Counterfactual) -> tuple[tuple[str, ...], list[StepRow]]:
    """Headings and rows; without numbers in the texts, without the column of values."""
    rows = step_rows(result)
    if any(row.cells[-1] for row in rows):
        return HEADINGS, rows
    return HEADINGS[:-1], [StepRow(row.cells[:-1], row.is_same) for row in rows]


def step_rows(result: Counterfactual) -> list[StepRow]:
    rows = []
    worlds = (result.factual, result.counterfactual)
    for step in range(max(len(world.tokens) for world in worlds)):
        cells = [str(step)]
        for world in worlds:
            has_step = step < len(world.tokens)
            cells.append(repr(world.tokens[step])[1:-1] if has_step else "")
            cells.append(f"{math.exp(world.log_prob[step]):.3g}" if has_step else "")
            cells.append(f"{world.probability[step]:.3g}" if has_step else "")
        is_paired = step < len(result.shift_U)
        for figures in (result.shift_U, result.scale_ratio):
            cells.append(f"{figures[step]:.3g}" if is_paired else "")
        cells.append(
            " | ".join(_number(world, step) for world in worlds if _has_number(world, step))
        )
        ids = [world.new_ids[step] if step < len(world.new_ids) else None for world in worlds]
        rows.append(StepRow(cells, ids[0] == ids[1] and cells[1] == cells[4]))
    return rows


def _has_number(world: World, step: int) -> bool:
    return step < len(world.number) and not np.isnan(world.number[step, 0])


def _number(world: World, step: int) -> str:
    median, low, high = world.number[step]
    return f"{render(median)} ({render(low)} to {render(high)})"


def to_rich(result: Counterfactual) -> Any:
    """Two texts and a table of steps, for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    texts = Table("", "text", title=title(result), show_header=False, expand=False)
    worlds = {
        "factual": (result.factual, "red"),
        "counterfactual": (result.counterfactual, "green"),
    }
    for name, (world, colour) in worlds.items():
        texts.add_row(name, rich_text(result, world, colour))
    headings, rows = table(result)
    steps = Table(*headings, caption=caption(result), title_justify="left")
    for row in rows[:STEPS_SHOWN]:
        cells = [Text(cell) for cell in row.cells]
        if not row.is_same:
            cells[1].stylize("red")
            cells[headings.index("counterfactual")].stylize("green")
        steps.add_row(*cells, style="" if row.is_same else "bold")
    return Group(texts, steps)


def rich_text(result: Counterfactual, world: World, colour: str, mark: str = "") -> Any:
    """A world's text; what follows the divergence is coloured, behind a `mark`."""
    from rich.text import Text

    prompt, same, other = split_text(result, world)
    text = Text.assemble((prompt, "dim"), same)
    return text.append(mark, "bold").append(other, f"bold {colour}") if other else text


def to_html(result: Counterfactual) -> str:
    """The same as an HTML fragment, for notebooks and pages."""
    texts = ""
    for name, world, colour in (
        ("factual", result.factual, RED),
        ("counterfactual", result.counterfactual, GREEN),
    ):
        prompt, same, other = (html.escape(part) for part in split_text(result, world))
        texts += (
            f"<tr><th style='text-align:left'>{name}</th><td style='text-align:left'>"
            f"<span style='opacity:.6'>{prompt}</span>{same}"
            f"<span style='{colour}'>{other}</span></td></tr>"
        )
    headings, steps = table(result)
    heads = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    rows = []
    for row in steps:
        styles = [""] * len(headings)
        if not row.is_same:
            styles[1], styles[headings.index("counterfactual")] = RED, GREEN
        cells = "".join(
            f"<td style='white-space:pre;{style}'>{html.escape(cell)}</td>"
            for cell, style in zip(row.cells, styles, strict=True)
        )
        rows.append(f"<tr>{cells}</tr>")
    return (
        f"<div class='counterfactual'><p><b>{html.escape(title(result))}</b></p>"
        f"<table>{texts}</table><table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table><p>{html.escape(caption(result))}</p></div>"
    )
