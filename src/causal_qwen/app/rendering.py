"""Rendering: texts, counterfactuals, forecasts and token views -> HTML. No torch.

Every text of a visitor or a model is escaped here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from causal_qwen.analysis.rendering import to_html
from causal_qwen.app.served import Forecast, Speaker
from causal_qwen.panel import answer_bars

if TYPE_CHECKING:
    from causal_qwen.analysis.token_view import TokenView

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


def individuals_table(them: Sequence[Speaker]) -> str:
    return _page(_table(Speaker._fields, them))


def comparison(result: Any) -> str:
    """Both texts and their steps."""
    return _page(f"<div class='scroll'>{readable(to_html(result))}</div>")


def panel(found: dict[str, Any]) -> str:
    """Shares as bars; of two versions, both, and who switched."""
    asked = [found["first"], found["second"]] if "first" in found else [found]
    parts = [answer_bars(one["question"], one["options"], one["n"], one["mass"]) for one in asked]
    if len(asked) > 1:
        moved = [(one["n"], one["from"], one["to"]) for one in found["switches"]]
        words = f"{found['switched']:.1%} of the same individuals changed their answer"
        parts += [f"<p>{words}; kappa {found['kappa']:.2f} (0 is chance).</p>"]
        parts += [_table(("individuals", "from", "to"), moved)] if moved else []
    return _page(f"<div class='scroll'>{''.join(parts)}</div>")


def forecast_picture(name: str, forecast: Forecast) -> str:
    """The median, and intervals as bars."""
    ends = np.array([forecast.median, *np.ravel(list(forecast.intervals.values()))])
    low, high = ends[np.isfinite(ends)].min(), ends[np.isfinite(ends)].max()

    def place(value: float) -> float:
        """In percent of the width."""
        share = (np.clip(value, low, high) / 2 - low / 2) / (high / 2 - low / 2 or 1.0)
        return round(100 * float(share), 1)

    bars = [
        f"<div class='bar'><i style='left:{place(start)}%;right:{100 - place(end):.1f}%'></i>"
        f"<b style='left:{place(forecast.median)}%'></b></div>"
        f"<p class='note'>{level:.0%} interval: {_number(start)} to {_number(end)}</p>"
        for level, (start, end) in sorted(forecast.intervals.items())
    ]
    return _page(
        f"<p class='note'>{_escape(name)}</p><p><span class='median'>"
        f"{_number(forecast.median)}</span> <span class='note'>median</span></p>{''.join(bars)}"
    )


def token_buttons(tokens: Sequence[str], pressed: int | None = None) -> str:
    """The tokens of a text as buttons, and one for the next token."""
    buttons = (
        f"<button type='button' data-index='{index}' "
        f"aria-pressed='{str(index == pressed).lower()}'>{_escape(name)}</button>"
        for index, name in enumerate([*map(_visible, tokens), "next?"])
    )
    return _page(f"<div class='tokens'>{''.join(buttons)}</div>")


def token_view(view: TokenView) -> str:
    """Scores, thresholds and probabilities of the best candidates."""
    actual = "the next token" if view.actual is None else f"“{_visible(view.actual)}”"
    scores = [
        [
            _visible(x.token),
            *(f"{x.share:.1%}", f"{x.softmax:.1%}", f"{x.probability:.2g}"),
            *(f"{x.loc:.2f}", f"{x.threshold:.2f}"),
        ]
        for x in view.candidates
    ]
    chosen = next((row for row, x in enumerate(view.candidates) if x.is_actual), None)
    heads = ("token", "share", "softmax", "P_k", "loc S", "threshold")
    return _page(
        f"<p>How <b>{_escape(actual)}</b> was chosen after "
        f"<b>“{_escape(_visible(view.before))}”</b>: token k has the score S<sub>k</sub> ~ "
        "Cauchy(loc, scale). share: how many of 1,000 individuals choose it. softmax: its "
        "probability among all tokens; P<sub>k</sub> = "
        "P(S<sub>k</sub> &gt; threshold), on its own, is how surely it passes its threshold.</p>"
        f"{_table(heads, scores, chosen)}"
        f"<p class='sum'>ΣP = <b>{view.total:.3f}</b> over {view.vocabulary:,} tokens.</p>"
    )


def _page(content: str) -> str:
    return f"<div class='cq'>{content}</div>"


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], chosen: int | None = None
) -> str:
    """`chosen` is the highlighted row."""

    def line(tag: str, cells: Sequence[object]) -> str:
        return "".join(f"<{tag}>{_escape(str(cell))}</{tag}>" for cell in cells)

    kinds = {chosen: "chosen"}
    body = (
        f"<tr class='{kinds.get(place)}'>{line('td', cells)}</tr>"
        for place, cells in enumerate(rows)
    )
    head = f"<thead><tr>{line('th', heads)}</tr></thead>"
    return f"<div class='scroll'><table>{head}<tbody>{''.join(body)}</tbody></table></div>"


def readable(text: str) -> str:
    """Control characters, which HTML cannot hold, become a replacement character."""
    return CONTROL.sub("\ufffd", text)


def _escape(text: str) -> str:
    return escape(readable(text))


def _visible(token: str) -> str:
    """A token with visible spaces; ⋯ for a character that continues in the next token."""
    return token.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·") or "⋯"


def _number(value: float) -> str:
    """Three digits, or all before the point below ten million."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e7 else f"{value:.3g}"
