"""Rendering: texts, counterfactuals, forecasts and token views -> HTML and SVG.

Plain strings in the theme's colours, readable in light and dark mode, as wide as the screen. Every
text of a visitor or a model is escaped here. Does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from causal_qwen.analysis.rendering import ComparedWorlds, to_html
from causal_qwen.individuals.individual import Individual
from causal_qwen.playground.served import LEVELS, MAX_MAGNITUDE, Array, Forecast, drag_range
from causal_qwen.text.numerals import encode, render

if TYPE_CHECKING:
    from causal_qwen.analysis.token_view import TokenView

WIDTH, LEFT, RIGHT = 360, 14, 346  # of every picture, and between which it is drawn
LABEL_WIDTH = 140  # of the text below an interval
MAX_REACH = 8  # times the span of medians, to each side: farther tails would dwarf it
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
CURSOR = "<span class='cursor'>▍</span>"  # the text is still growing
Card = tuple[str, str, str, str]  # title, note, prompt, generated text


def cards(shown: Iterable[Card], is_done: bool) -> str:
    """Texts side by side, or stacked on a narrow screen."""
    cursor = "" if is_done else CURSOR
    articles = (
        f"<article class='card'><h4>{_escape(title)}</h4><div class='note'>{_escape(note)}</div>"
        f"<div class='text'><span class='prompt'>{_escape(prompt)}</span>"
        f"<span class='new'>{_escape(text)}</span>{cursor}</div></article>"
        for title, note, prompt, text in shown
    )
    return _page(f"<div class='grid'>{''.join(articles)}</div>")


def note(text: str) -> str:
    return _page(f"<p class='note'>{_escape(text)}</p>")


def individuals_table(individuals: Sequence[Individual]) -> str:
    rows = [
        (str(x.name), "-" if x.seed is None else x.seed, f"{x.temperature:g}", f"{x.persistence:g}")
        for x in individuals
    ]
    return _page(_table(("name", "seed", "temperature", "persistence"), rows))


def comparison(result: ComparedWorlds) -> str:
    """Both texts and their steps."""
    return _page(f"<div class='scroll'>{readable(to_html(result))}</div>")


# ---------------------------------------------------------------- numbers


def draggable_text(text: str, version: int) -> str:
    """A text whose numbers can be dragged.

    `version` makes two drawings of one text differ: the browser keeps what is equal, but the first
    drawing's numbers may have been dragged since.
    """
    if not text.strip():
        return note("")
    found, parts = encode(text), []
    for index, (piece, surface) in enumerate(zip(found.pieces, found.surfaces, strict=False)):
        low, high, step = map(repr, drag_range(text, index))
        value = repr(found.values[index])
        parts.append(
            f"{_escape(piece)}<span class='drag' role='slider' tabindex='0' "
            f"aria-label='number {index + 1}, drag to change' aria-valuemin='{low}' "
            f"aria-valuemax='{high}' aria-valuenow='{value}' data-index='{index}' data-low='{low}' "
            f"data-high='{high}' data-step='{step}' data-value='{value}'>{_escape(surface)}</span>"
        )
    hint = "Drag a number left or right, or use the arrow keys."
    return _page(
        f"<p class='sentence' data-version='{version}'>{''.join(parts)}"
        f"{_escape(found.pieces[-1])} …</p>"
        f"<p class='note'>{hint if parts else 'This text has no number to drag.'}</p>"
    )


def forecast_picture(name: str, forecast: Forecast) -> str:
    """Median and intervals of one text."""
    median, base = float(forecast.median[0]), 30
    intervals = {level: ends[0] for level, ends in forecast.intervals.items()}
    found = [one for one in (median, *np.ravel(list(intervals.values()))) if math.isfinite(one)]
    low, high = min(found), max(found)
    space = min(max((high - low) / 10, abs(high) / 1000, 1e-9), MAX_MAGNITUDE)
    x = _scale(low - space, high + space, LEFT, RIGHT)
    parts = [
        _line("axis", LEFT, base, RIGHT, base),
        _line("mark", x(median), 12, x(median), base),
    ]
    for row, (level, (start, end)) in enumerate(sorted(intervals.items())):
        middle = min(max((x(start) + x(end)) / 2, LABEL_WIDTH / 2), WIDTH - LABEL_WIDTH / 2)
        bar = {"x": x(start), "width": max(x(end) - x(start), 2.0)}
        top = base + 14 + 30 * row
        parts += [
            _tag("rect", class_="bar", y=top, height=7, rx=3, **bar),
            _label(middle, top + 20, f"{level:.0%}: {_range(start, end)}", "middle"),
        ]
    return _page(
        f"<p class='note'>{_escape(name)}</p>"
        f"<p><span class='median'>{_number(median)}</span> <span class='note'>median · "
        f"{LEVELS[-1]:.0%} interval {_range(*intervals[LEVELS[-1]])}</span></p>"
        + _svg(base + 78, "Median and intervals", *parts)
    )


def sweep_picture(
    values: Sequence[float], sweep: Forecast, index: int, value: float, median: float
) -> str:
    """The prediction for `values` of the text's `index`-th number; the dot is its present value."""
    base, top, left = 138, 12, 48
    span = max(float(np.ptp(sweep.median)), abs(median) / 1000, 1e-9)
    reach = min(MAX_REACH * span, MAX_MAGNITUDE)
    ends = sweep.intervals[LEVELS[-1]]
    lows = np.clip(ends[:, 0], sweep.median.min() - reach, None)
    highs = np.clip(ends[:, 1], None, sweep.median.max() + reach)
    low, high = min(float(lows.min()), median), max(float(highs.max()), median)
    x, y = _scale(values[0], values[-1], left, RIGHT), _scale(low, high, base, top)

    def line(heights: Array) -> list[str]:
        pairs = zip(values, heights, strict=True)
        return [f"{x(across):.1f},{y(height):.1f}" for across, height in pairs]

    return _page(
        f"<p class='note'>Prediction for other values of number {index + 1}: the line is the "
        f"median, the band the {LEVELS[-1]:.0%} interval.</p>"
        + _svg(
            170,
            "Prediction against a number of the text",
            _tag("polygon", class_="area", points=" ".join(line(highs) + line(lows)[::-1])),
            _tag("polyline", class_="line", points=" ".join(line(sweep.median))),
            _line("axis", left, base, RIGHT, base),
            _tag("circle", class_="dot", cx=x(value), cy=y(median), r=5),
            _label(left - 6, top + 6, _number(high), "end", ""),
            _label(left - 6, base, _number(low), "end", ""),
            _label(left, base + 16, _number(values[0])),
            _label(RIGHT, base + 16, _number(values[-1]), "end"),
            _label(WIDTH / 2, base + 16, f"number {index + 1}, now {render(value)}", "middle"),
        )
    )


# ---------------------------------------------------------------- tokens


def token_buttons(tokens: Sequence[str], pressed: int | None = None) -> str:
    """The tokens of a text as buttons, and one for the next token."""
    buttons = (
        f"<button type='button' data-index='{index}' "
        f"aria-pressed='{str(index == pressed).lower()}'>{_escape(name)}</button>"
        for index, name in enumerate([*map(_visible, tokens), "next?"])
    )
    return _page(f"<div class='tokens'>{''.join(buttons)}</div>")


def token_view(view: TokenView) -> str:
    """Scores, thresholds and probabilities of the best candidates; the most unusual parts of U."""
    actual = "the next token" if view.actual is None else f"“{_visible(view.actual)}”"
    scores = [
        [
            _short(x.token, 10),
            *_cells(x, softmax=".1%", probability=".2g", loc=".2f", scale=".1e", threshold=".2f"),
        ]
        for x in view.candidates
    ]
    formats = {"loc": ".2f", "typical": ".2f", "distance": "+.1f", "scale": ".1e"}
    coordinates = [
        _cells(x, position="d", **formats, contribution="+.2f") for x in view.coordinates
    ]
    chosen = next((row for row, x in enumerate(view.candidates) if x.is_actual), None)
    score_heads = ("token", "softmax", "P_k", "loc S", "scale S", "threshold")
    heads = ("c", "loc U", "typical", "distance", "scale U", "adds")
    return _page(
        f"<p>How <b>{_escape(actual)}</b> was chosen after "
        f"<b>“{_escape(_visible(view.before))}”</b>: token k has the score S<sub>k</sub> ~ "
        "Cauchy(loc, scale). softmax is its probability among all tokens; P<sub>k</sub> = "
        "P(S<sub>k</sub> &gt; threshold), on its own, is how surely it passes its threshold.</p>"
        + f"<div class='pair'><div>{_scores_picture(view)}</div>"
        + f"{_table(score_heads, scores, chosen=chosen)}</div>"
        + f"<p class='sum'>ΣP = <b>{view.total:.3f}</b> over {view.vocabulary:,} tokens.</p>"
        "<p><b>The most unusual coordinates of U</b></p>"
        + _table(heads, coordinates, left=())
        + "<p class='note'>c: the coordinate. distance: from the median over ordinary text, in "
        "interquartile ranges. adds: its contribution to the score of "
        f"“{_escape(_visible(view.candidates[0].token))}”.</p>"
    )


def _scores_picture(view: TokenView) -> str:
    """loc S with its interval, and the threshold, of every candidate."""
    rows, left, line = view.candidates, 104, 22
    low = min(min(one.low, one.threshold) for one in rows)
    high = max(max(one.high, one.threshold) for one in rows)
    x = _scale(low, high, left + 8, RIGHT - 8)
    height = line * len(rows) + 26
    legend = f"● loc S, with its {view.level:.0%} · | threshold"
    parts = [_label(RIGHT, height - 6, legend, "end")]
    for row, one in enumerate(rows):
        y = line * row + 12
        kind, threshold = "dot" if one.is_actual else "bar", x(one.threshold)
        parts += [
            _label(left - 8, y + 4, _short(one.token), "end", ""),
            _line("axis", left, y, RIGHT, y),
            _line("line", x(one.low), y, x(one.high), y),
            _tag("circle", class_=kind, cx=x(one.loc), cy=y, r=5),
            _line("mark", threshold, y - 7, threshold, y + 7),
        ]
    return _svg(height, "Scores and thresholds", *parts)


# ---------------------------------------------------------------- elements


def _tag(name: str, *content: str, **attributes: Any) -> str:
    """An element; `class_` is written class, `data_x` data-x, and floats have one decimal."""
    written = "".join(
        f" {key.strip('_').replace('_', '-')}='"
        f"{f'{value:.1f}' if isinstance(value, float) else _escape(str(value))}'"
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{''.join(content)}</{name}>"


def _svg(height: float, title: str, *content: str) -> str:
    box = f"0 0 {WIDTH} {height}"
    return _tag("svg", *content, viewBox=box, role="img", aria_label=title)


def _line(class_: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return _tag("line", class_=class_, x1=x1, y1=y1, x2=x2, y2=y2)


def _label(x: float, y: float, text: str, anchor: str = "start", class_: str = "soft") -> str:
    return _tag("text", _escape(text), class_=class_, x=x, y=y, text_anchor=anchor)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """[low, high] -> [start, end]; values outside are clamped."""
    unit = (end - start) / ((high - low) or 1.0)
    return lambda value: start + (min(max(float(value), low), high) - low) * unit


def _page(content: str) -> str:
    return f"<div class='cq'>{content}</div>"


def _table(
    heads: Sequence[str],
    rows: Sequence[Sequence[object]],
    left: Sequence[int] = (0,),
    chosen: int | None = None,
) -> str:
    """`left` are the columns of text, `chosen` is the highlighted row."""

    def row(tag: str, cells: Sequence[object], class_: str = "") -> str:
        written = (
            _tag(tag, _escape(str(cell)), class_="left" if column in left else "")
            for column, cell in enumerate(cells)
        )
        return _tag("tr", *written, class_=class_)

    body = (row("td", cells, "chosen" if i == chosen else "") for i, cells in enumerate(rows))
    table = _tag("table", _tag("thead", row("th", heads)), _tag("tbody", *body))
    return f"<div class='scroll'>{table}</div>"


def _cells(item: object, **formats: str) -> list[str]:
    return [format(getattr(item, name), spec) for name, spec in formats.items()]


def readable(text: str) -> str:
    """Control characters, which HTML cannot hold, become a replacement character."""
    return CONTROL.sub("\ufffd", text)


def _escape(text: str) -> str:
    return escape(readable(text))


def _visible(token: str) -> str:
    """A token with visible spaces; ⋯ for a character that continues in the next token."""
    return token.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·") or "⋯"


def _short(token: str, letters: int = 13) -> str:
    shown = _visible(token)
    return shown if len(shown) <= letters else shown[: letters - 1] + "…"


def _range(low: float, high: float) -> str:
    return f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    """Three digits, or all before the point below ten million."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e7 else f"{value:.3g}"
