"""Rendering: a counterfactual as rows, as a terminal table and as HTML. Does not import torch."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from causal_qwen.text.numerals import render

if TYPE_CHECKING:
    from causal_qwen.analysis.counterfactual import Counterfactual, World

WORLDS = {"factual": "red", "counterfactual": "green"}  # colours of what differs
HEADINGS = (
    "step",
    *("factual", "share", "softmax"),
    *("counterfactual", "share", "softmax"),
    *("ΔU", "scale ratio", "value"),
)
COLOURED = (1, 4)  # the columns of the worlds
END = " (ends here)"
STEPS_SHOWN = 60
# The background has the colour, half transparent: readable on light and dark pages.
STYLES = {
    name: f"background:rgba({colour},.3);font-weight:bold"
    for name, colour in (("red", "226,72,60"), ("green", "40,160,90"))
}


def title(result: Counterfactual) -> str:
    return f"{result.edit} · {result.semantics} · {result.individual!r}"


def caption(result: Counterfactual) -> str:
    step = result.divergence
    where = "the worlds never diverge" if step is None else f"first divergence at step {step}"
    return (
        f"{where}; ΔU: how far loc_U moved; scale ratio: by what factor scale_U changed; "
        "share: of 256 individuals, those who would choose the token; softmax: its probability"
    )


def split_text(result: Counterfactual, world: World) -> tuple[str, str, str]:
    """The prompt, the text that both worlds share, and the text after their divergence."""
    step = len(world.tokens) if result.divergence is None else result.divergence
    tokens = [*world.tokens[:-1], END] if world.is_ended else world.tokens
    gap = "" if result.is_text else " "
    return world.prompt + gap, gap.join([*tokens[:step], ""]), gap.join(tokens[step:])


def table(result: Counterfactual) -> tuple[tuple[str, ...], list[list[str]], list[bool]]:
    """Headings, cells, and which rows differ; without numbers, without the column of values."""
    rows, differs = [], []
    worlds = (result.factual, result.counterfactual)
    for step in range(max(len(world.tokens) for world in worlds)):
        cells = [str(step)]
        for world in worlds:
            has_step = step < len(world.tokens)
            cells.append(repr(world.tokens[step])[1:-1] if has_step else "")
            cells.append(f"{world.share[step]:.2f}" if has_step else "")
            cells.append(f"{math.exp(world.log_prob[step]):.3f}" if has_step else "")
        is_paired = step < len(result.shift_U)
        for figures in (result.shift_U, result.scale_ratio):
            cells.append(f"{figures[step]:.3g}" if is_paired else "")
        numbers = [world.number[step] for world in worlds if step < len(world.number)]
        cells.append(" | ".join(_number(*one) for one in numbers if not np.isnan(one[0])))
        ids = [world.new_ids[step : step + 1] for world in worlds]
        differs.append(ids[0] != ids[1] or cells[1] != cells[4])
        rows.append(cells)
    width = len(HEADINGS) - (not any(row[-1] for row in rows))
    return HEADINGS[:width], [row[:width] for row in rows], differs


def _number(median: float, low: float, high: float) -> str:
    return f"{render(median)} ({render(low)} to {render(high)})"


def to_rich(result: Counterfactual) -> Any:
    """Two texts and a table of steps, for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    texts = Table("", "text", title=title(result), show_header=False, expand=False)
    for name, colour in WORLDS.items():
        prompt, same, other = split_text(result, getattr(result, name))
        texts.add_row(name, Text.assemble((prompt, "dim"), same, (other, f"bold {colour}")))
    headings, rows, differs = table(result)
    steps = Table(*headings, caption=caption(result), title_justify="left")
    for row, is_other in list(zip(rows, differs, strict=True))[:STEPS_SHOWN]:
        cells = [Text(cell) for cell in row]
        for column, colour in zip(COLOURED, WORLDS.values(), strict=True):
            cells[column].stylize(colour if is_other else "")
        steps.add_row(*cells, style="bold" if is_other else "")
    return Group(texts, steps)


def to_html(result: Counterfactual) -> str:
    """The same as an HTML fragment, for notebooks and pages."""
    texts, rows = "", ""
    for name, colour in WORLDS.items():
        prompt, same, other = map(html.escape, split_text(result, getattr(result, name)))
        texts += (
            f"<tr><th style='text-align:left'>{name}</th><td style='text-align:left'>"
            f"<span style='opacity:.6'>{prompt}</span>{same}"
            f"<span style='{STYLES[colour]}'>{other}</span></td></tr>"
        )
    headings, steps, differs = table(result)
    for row, is_other in zip(steps, differs, strict=True):
        styles = dict(zip(COLOURED, STYLES.values(), strict=True)) if is_other else {}
        cells = "".join(
            f"<td style='white-space:pre;{styles.get(column, '')}'>{html.escape(cell)}</td>"
            for column, cell in enumerate(row)
        )
        rows += f"<tr>{cells}</tr>"
    heads = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    return (
        f"<div class='counterfactual'><p><b>{html.escape(title(result))}</b></p>"
        f"<table>{texts}</table><table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table><p>{html.escape(caption(result))}</p></div>"
    )
