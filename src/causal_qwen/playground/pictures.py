"""Pictures: texts, worlds, forecasts and decisions -> HTML and SVG.

Plain strings with the theme's own colours, so that they are as readable in the dark as by day, and
as wide as the screen. Every text that comes from a visitor or a model is escaped here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from itertools import zip_longest

import numpy as np

from causal_qwen.analysis.counterfactual import ENDS, Counterfactual, World
from causal_qwen.individuals.individual import Individual
from causal_qwen.playground.inside import LEVEL, Anatomy
from causal_qwen.playground.oracles import LEVELS, Forecast, Sweep
from causal_qwen.playground.wording import FARTHEST, Dial
from causal_qwen.text.numerals import encode, render

CSS = """
.cq { --accent: #0f766e; --warm: #b3541e; color: var(--body-text-color); line-height: 1.5;
  --soft: color-mix(in srgb, var(--body-text-color) 68%, transparent); }
.dark .cq { --accent: #4fd1c0; --warm: #f2a66b; }
.cq.stale { opacity: .4; }
.cq p { margin: .35em 0; }
.cq .grid { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); }
.cq .card { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: .7rem .9rem;
  background: var(--background-fill-primary); overflow-wrap: anywhere; min-height: 7.5rem; }
.cq .card h4 { margin: 0; font-size: 1rem; color: var(--body-text-color); }
.cq .note, .cq .prompt { color: var(--soft); }
.cq .note { font-size: .875rem; }
.cq .said { white-space: pre-wrap; margin-top: .5rem; }
.cq .cursor { color: var(--accent); }
.cq .wide { overflow-x: auto; }
.cq table, .cq thead, .cq tbody, .cq tr { border: 0 !important; }
.cq table { border-collapse: collapse; font-size: .875rem; width: 100%;
  margin: .5rem 0; }
.cq th, .cq td { text-align: right; padding: .25rem .5rem; white-space: pre;
  border: 0 !important; border-bottom: 1px solid var(--border-color-primary) !important;
  color: var(--body-text-color); }
.cq th { font-weight: 600; white-space: nowrap; }
.cq .word { text-align: left; font-family: var(--font-mono); }
.cq tr.here td { background: color-mix(in srgb, var(--accent) 16%, transparent); }
.cq mark { background: color-mix(in srgb, var(--warm) 28%, transparent); color: inherit;
  border-radius: 3px; outline: 1px solid var(--warm); padding: 0 .15em; }
.cq .changed { color: var(--warm); font-weight: 600; }
.cq svg { display: block; width: 100%; max-width: 32rem; height: auto; margin: .5rem 0; }
.cq svg text { font: 12px var(--font); fill: var(--body-text-color); }
.cq svg .soft { fill: var(--soft); }
.cq svg .axis { stroke: var(--soft); stroke-opacity: .45; }
.cq svg .line { stroke: var(--accent); fill: none; stroke-width: 2; }
.cq svg .area { fill: var(--accent); opacity: .16; }
.cq svg .bar { fill: var(--accent); opacity: .75; }
.cq svg .minus { fill: var(--warm); opacity: .75; }
.cq svg .now { stroke: var(--warm); stroke-width: 2; }
.cq svg .dot { fill: var(--warm); }
.cq .tokens { display: flex; flex-wrap: wrap; gap: .3rem; }
.cq .tokens button { margin: 0; padding: .3rem .45rem; min-height: 2.1rem;
  font: .95rem var(--font-mono);
  border: 1px solid var(--border-color-primary); border-radius: 6px; white-space: pre;
  cursor: pointer; background: var(--background-fill-primary); color: var(--body-text-color); }
.cq .tokens button:hover, .cq .tokens button:focus-visible { border-color: var(--accent); }
.cq .tokens button[aria-pressed="true"] { border-color: var(--accent);
  box-shadow: 0 0 0 1px var(--accent);
  background: color-mix(in srgb, var(--accent) 18%, transparent); }
.cq .read { font-size: 1.05rem; line-height: 2.2; white-space: pre-wrap; overflow-wrap: anywhere; }
.cq .drag { cursor: ew-resize; touch-action: none; user-select: none; color: var(--accent);
  font-weight: 600; padding: .25rem .4rem; border-radius: 6px; border-bottom: 2px dotted;
  background: color-mix(in srgb, var(--accent) 12%, transparent); }
.cq .drag:hover, .cq .drag:focus { outline: 2px solid var(--accent); }
.cq .big { font-size: 1.35rem; font-weight: 600; }
.cq .pair { display: grid; gap: .25rem 2rem; align-items: start; }
@media (min-width: 60rem) { .cq .pair { grid-template-columns: 2fr 3fr; } }
@media (max-width: 30rem) {
  .cq svg text { font-size: 14px; }
  .cq table { font-size: .7rem; }
  .cq th, .cq td { padding: .2rem .15rem; }
  .cq th { white-space: normal; vertical-align: bottom; }
}
"""

WIDTH = 360  # of every picture, in its own units
LEFT, RIGHT = 14, 14
HALF_LABEL = 70  # of the words below an interval
DENSITY_ENDS = (0.03, 0.97)
REACH = 8  # widths of the middle half to each side, at most: farther tails would dwarf it
POINTS = 120
PLAIN = 1e7  # numbers below this are written out
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
CURSOR = "<span class='cursor'>▍</span>"  # more comes
Card = tuple[str, str, str, str]  # title, note, prompt, what was said


def cards(shown: Sequence[Card], is_done: bool) -> str:
    """Texts side by side, or below each other where the screen is narrow."""
    cursor = "" if is_done else CURSOR
    return _page(
        "<div class='grid'>"
        + "".join(
            f"<article class='card'><h4>{_escape(title)}</h4>"
            f"<div class='note'>{_escape(note)}</div>"
            f"<div class='said'><span class='prompt'>{_escape(prompt)}</span>"
            f"<span class='new'>{_escape(said)}</span>{cursor}</div></article>"
            for title, note, prompt, said in shown
        )
        + "</div>"
    )


def note(text: str) -> str:
    return _page(f"<p class='note'>{_escape(text)}</p>")


def people_table(people: Sequence[Individual]) -> str:
    """Who is there."""
    rows = [
        (
            one.name or "",
            "-" if one.seed is None else str(one.seed),
            f"{one.temperature:g}",
            f"{one.min_density:g}",
        )
        for one in people
    ]
    return _page(_table(("name", "seed", "temperature", "truncation"), rows))


# ---------------------------------------------------------------- counterfactuals


def two_worlds(result: Counterfactual) -> str:
    """Both texts with their first divergence marked, and step by step what changed in U and P."""
    factual, other = result.factual, result.counterfactual
    step = result.divergence
    if step is None:
        verdict = "Both worlds say the same."
    else:
        verdict = f"The worlds part at word piece {step + 1}, marked."
    columns = "".join(
        f"<article class='card'><h4>{title}</h4><div class='said'>{_marked(world, step)}</div>"
        "</article>"
        for title, world in (("as it was", factual), ("after the edit", other))
    )
    return _page(
        f"<p class='note'>{_escape(result.edit)} · {_escape(str(result.individual.name))} · "
        f"{_escape(verdict)}</p><div class='grid worlds'>{columns}</div>"
        f"{_pair(_shift_picture(result), _steps_table(result))}"
        "<p class='note'>P: the chance of this word piece to pass its threshold, one against the "
        "rest. ΔU: how far the location of U moved. scale ratio: how many times wider U became.</p>"
    )


def _marked(world: World, step: int | None) -> str:
    tokens = world.spoken
    before = tokens if step is None else tokens[:step]
    parts = [f"<span class='prompt'>{_escape(world.prompt)}</span>", _escape("".join(before))]
    if step is not None and step < len(tokens):
        after = tokens[step:]
        end = next((i for i, token in enumerate(after, start=1) if token), len(after))
        lead, word = _apart("".join(after[:end]))  # a character may be several tokens
        parts.append(f"{lead}<mark>{_escape(word)}</mark>")
        parts.append(f"<span class='changed'>{_escape(''.join(after[end:]))}</span>")
    elif step is not None:
        parts.append(f"<mark>{ENDS.strip()}</mark>")
    return "".join(parts)


def _apart(token: str) -> tuple[str, str]:
    """The blanks before a token, and what can be seen of it: of mere blanks, signs for them."""
    seen = token.lstrip()
    return (token[: len(token) - len(seen)], seen) if seen else ("", _visible(token))


def _steps_table(result: Counterfactual) -> str:
    one, other = result.factual, result.counterfactual
    rows = []
    pairs = zip_longest(
        zip(one.tokens, one.probability.tolist(), strict=True),
        zip(other.tokens, other.probability.tolist(), strict=True),
        result.shift_U.tolist(),
        result.scale_ratio.tolist(),
    )
    for step, (left, right, shift, ratio) in enumerate(pairs):
        cells = [str(step + 1)]
        for said in (left, right):
            cells += ["", ""] if said is None else [_short(said[0], 10), f"{said[1]:.2g}"]
        cells += ["" if x is None else f"{x:.3g}" for x in (shift, ratio)]
        rows.append(cells)
    heads = ("", "as it was", "P", "after the edit", "P", "ΔU", "scale ratio")
    return _table(heads, rows, words=(1, 3), here=result.divergence)


def _shift_picture(result: Counterfactual) -> str:
    """ΔU at every step, as bars."""
    shift = result.shift_U
    if not len(shift):
        return ""
    height, base, top = 104, 82, 22
    wide = (WIDTH - LEFT - RIGHT) / len(shift)
    most = float(shift.max()) or 1.0
    bars = []
    for step, size in enumerate(shift.tolist()):
        tall = (base - top) * size / most
        kind = "minus" if step == result.divergence else "bar"
        bars.append(
            f"<rect class='{kind}' x='{LEFT + step * wide:.1f}' y='{base - tall:.1f}' "
            f"width='{max(wide - 2, 1):.1f}' height='{tall:.1f}'><title>step {step + 1}: "
            f"{size:.3g}</title></rect>"
        )
    labels = (
        f"<text x='{LEFT}' y='11'>ΔU at every step, up to {most:.3g}</text>"
        f"<text class='soft' x='{LEFT}' y='{base + 16}'>first word piece</text>"
        f"<text class='soft' x='{WIDTH - RIGHT}' y='{base + 16}' text-anchor='end'>last</text>"
    )
    return _svg(height, "How far U moved at every step", _axis(base) + "".join(bars) + labels)


# ---------------------------------------------------------------- numbers


def sentence(text: str, dials: Sequence[Dial], turn: int) -> str:
    """A text whose numbers can be dragged. `turn` makes two drawings of one text differ, since the
    browser leaves alone what is the same, and a dragged number is not."""
    if not text.strip():
        return note("")
    found = encode(text)
    parts = []
    for place, dial in enumerate(dials):
        value = found.values[place]
        parts.append(
            f"{_escape(found.pieces[place])}<span class='drag' role='slider' tabindex='0' "
            f"aria-label='number {place + 1}, drag it' aria-valuemin='{dial.low!r}' "
            f"aria-valuemax='{dial.high!r}' aria-valuenow='{value!r}' data-place='{place}' "
            f"data-low='{dial.low!r}' data-high='{dial.high!r}' data-step='{dial.step!r}' "
            f"data-value='{value!r}'>{_escape(found.surfaces[place])}</span>"
        )
    hint = "Drag a number to the left or to the right, or use the arrow keys."
    return _page(
        f"<p class='read' data-turn='{turn}'>{''.join(parts)}{_escape(found.pieces[-1])} …</p>"
        f"<p class='note'>{hint if dials else 'No number stands in this text to be dragged.'}</p>"
    )


def forecast_picture(name: str, found: Forecast) -> str:
    """The density with its median and intervals."""
    one = found.density
    wide = found.intervals[LEVELS[-1]]
    seen = [float(one.quantile(p)) for p in DENSITY_ENDS] + [x for x in wide if math.isfinite(x)]
    reach = min(REACH * (float(one.quantile(0.75)) - float(one.quantile(0.25))), FARTHEST)
    low, high = max(min(seen), found.median - reach), min(max(seen), found.median + reach)
    values = np.linspace(low, high, POINTS)
    log_density = one.log_prob(values)
    density = np.exp(log_density - log_density.max())  # the highest point is 1
    height, base, top = 190, 112, 12
    scale = (WIDTH - LEFT - RIGHT) / ((high - low) or 1.0)

    def x(value: float) -> float:
        return LEFT + (min(max(value, low), high) - low) * scale

    points = [
        f"{x(v):.1f},{base - d * (base - top):.1f}"
        for v, d in zip(values.tolist(), density.tolist(), strict=True)
    ]
    parts = [
        f"<polygon class='area' points='{x(low)},{base} {' '.join(points)} {x(high)},{base}'/>",
        f"<polyline class='line' points='{' '.join(points)}'/>",
        _axis(base),
        f"<line class='now' x1='{x(found.median):.1f}' x2='{x(found.median):.1f}' y1='{top}' "
        f"y2='{base}'/>",
    ]
    for row, (level, (start, end)) in enumerate(sorted(found.intervals.items())):
        y = base + 14 + 30 * row
        middle = min(max((x(start) + x(end)) / 2, HALF_LABEL), WIDTH - HALF_LABEL)
        parts.append(
            f"<rect class='bar' x='{x(start):.1f}' y='{y}' height='7' rx='3' "
            f"width='{max(x(end) - x(start), 2):.1f}'/>"
            f"<text class='soft' x='{middle:.1f}' y='{y + 20}' text-anchor='middle'>"
            f"{level:.0%}: {_number(start)} to {_number(end)}</text>"
        )
    ends = _number(wide[0]), _number(wide[1])
    return _page(
        f"<p class='note'>{_escape(name)}</p>"
        f"<p><span class='big'>{_number(found.median)}</span> <span class='note'>median · "
        f"{LEVELS[-1]:.0%} between {ends[0]} and {ends[1]}</span></p>"
        + _svg(height, "Density, median and intervals", "".join(parts))
    )


def sweep_picture(sweep: Sweep, place: int, value: float, median: float) -> str:
    """How the prediction moves with the text's `place`-th number; the dot is where it is now."""
    height, base, top, left = 170, 138, 12, 48
    across = float(sweep.values[0]), float(sweep.values[-1])
    is_finite = np.isfinite(sweep.low) & np.isfinite(sweep.high)
    least, most = float(sweep.median.min()), float(sweep.median.max())
    ends = [np.clip(end, -FARTHEST, FARTHEST) for end in (sweep.low, sweep.high)]
    reach = min(REACH * max(most - least, float(np.min(ends[1] - ends[0]))), FARTHEST)
    low = max(float(np.min(sweep.low[is_finite], initial=least)), least - reach)
    high = min(float(np.max(sweep.high[is_finite], initial=most)), most + reach)
    low, high = min(low, median), max(high, median)

    def at(v: float, y: float) -> str:
        where = left + (WIDTH - left - RIGHT) * (v - across[0]) / ((across[1] - across[0]) or 1.0)
        inside = min(max(y, low), high)
        return f"{where:.1f},{base - (base - top) * (inside - low) / ((high - low) or 1.0):.1f}"

    there = [at(v, y) for v, y in zip(sweep.values, sweep.high, strict=True)]
    back = [at(v, y) for v, y in zip(sweep.values[::-1], sweep.low[::-1], strict=True)]
    middle = " ".join(at(v, y) for v, y in zip(sweep.values, sweep.median, strict=True))
    x, y = at(min(max(value, across[0]), across[1]), median).split(",")
    parts = (
        f"<polygon class='area' points='{' '.join(there + back)}'/>"
        f"<polyline class='line' points='{middle}'/>{_axis(base, left)}"
        f"<circle class='dot' cx='{x}' cy='{y}' r='5'/>"
        f"<text x='{left - 6}' y='{top + 6}' text-anchor='end'>{_number(high)}</text>"
        f"<text x='{left - 6}' y='{base}' text-anchor='end'>{_number(low)}</text>"
        f"<text class='soft' x='{left}' y='{base + 16}'>{_number(across[0])}</text>"
        f"<text class='soft' x='{WIDTH - RIGHT}' y='{base + 16}' text-anchor='end'>"
        f"{_number(across[1])}</text>"
        f"<text class='soft' x='{WIDTH / 2}' y='{base + 16}' text-anchor='middle'>"
        f"number {place + 1}, now {render(value)}</text>"
    )
    return _page(
        f"<p class='note'>if number {place + 1} of the text were another: the line is the median, "
        f"the band the {LEVELS[-1]:.0%} interval</p>"
        + _svg(height, "Prediction against a number of the text", parts)
    )


# ---------------------------------------------------------------- inside


def token_buttons(tokens: Sequence[str], pressed: int | None = None) -> str:
    """The tokens of a text, and after them the one that is not there yet; all can be clicked."""
    names = [*map(_visible, tokens), "next?"]
    return _page(
        "<div class='tokens'>"
        + "".join(
            f"<button type='button' data-place='{place}' "
            f"aria-pressed='{str(place == pressed).lower()}'>{_escape(name)}</button>"
            for place, name in enumerate(names)
        )
        + "</div>"
    )


def anatomy(found: Anatomy) -> str:
    """Scores, thresholds and chances of the best candidates; U where it is most unusual."""
    said = "the next token" if found.said is None else f"“{_visible(found.said)}”"
    rows = [
        (
            _short(one.token, 10),
            f"{one.loc:.2f}",
            f"{one.scale:.1e}",
            f"{one.threshold:.2f}",
            f"{one.probability:.2g}",
            f"{one.softmax:.1%}",
        )
        for one in found.candidates
    ]
    here = next((i for i, one in enumerate(found.candidates) if one.is_said), None)
    people = [
        (
            str(one.place),
            f"{one.loc:.2f}",
            f"{one.usual:.2f}",
            f"{one.distance:+.1f}",
            f"{one.scale:.1e}",
            f"{one.push:+.2f}",
        )
        for one in found.coordinates
    ]
    best = _visible(found.candidates[0].token)
    return _page(
        f"<p>How <b>{_escape(said)}</b> was chosen after "
        f"<b>“{_escape(_visible(found.before))}”</b>: "
        f"every token k scores S<sub>k</sub> ~ Cauchy(loc, scale) and is wanted with "
        f"P<sub>k</sub> = P(S<sub>k</sub> &gt; C<sub>k</sub>).</p>"
        + _pair(
            _scores_picture(found),
            _table(("token", "loc S", "scale S", "C_k", "P_k", "softmax"), rows, here=here),
        )
        + f"<p class='sum'>ΣP = <b>{found.total:.3f}</b> over {found.vocabulary:,} tokens.</p>"
        "<p><b>U where it is most unusual</b></p>"
        + _pair(
            _unusual_picture(found),
            _table(("c", "loc U", "usual", "distance", "scale U", "push"), people, words=()),
        )
        + "<p class='note'>c: the coordinate. distance: from the median over ordinary text, in "
        f"interquartile ranges. push: what it adds to the score of “{_escape(best)}”.</p>"
    )


def _scores_picture(found: Anatomy) -> str:
    """loc S with its interval, and the threshold, of every candidate."""
    rows = found.candidates
    low = min(min(one.low, one.threshold) for one in rows)
    high = max(max(one.high, one.threshold) for one in rows)
    margin = 0.04 * ((high - low) or 1.0)
    low, high = low - margin, high + margin
    names, line = 104, 22
    height = line * len(rows) + 26

    def x(value: float) -> float:
        return names + (WIDTH - RIGHT - names) * (value - low) / (high - low)

    parts = []
    for row, one in enumerate(rows):
        y = line * row + 12
        parts.append(
            f"<text x='{names - 8}' y='{y + 4}' text-anchor='end'>{_escape(_short(one.token))}"
            f"</text><line class='axis' x1='{names}' x2='{WIDTH - RIGHT}' y1='{y}' y2='{y}'/>"
            f"<line class='line' x1='{x(one.low):.1f}' x2='{x(one.high):.1f}' y1='{y}' y2='{y}'/>"
            f"<circle class='{'dot' if one.is_said else 'bar'}' cx='{x(one.loc):.1f}' cy='{y}' "
            f"r='5'/><line class='now' x1='{x(one.threshold):.1f}' x2='{x(one.threshold):.1f}' "
            f"y1='{y - 7}' y2='{y + 7}'/>"
        )
    parts.append(
        f"<text class='soft' x='{WIDTH - RIGHT}' y='{height - 6}' text-anchor='end'>"
        f"● loc S, with its {LEVEL:.0%} · | threshold C_k</text>"
    )
    return _svg(height, "Scores and thresholds", "".join(parts))


def _unusual_picture(found: Anatomy) -> str:
    """Distances from the usual, to the left and to the right."""
    rows = found.coordinates
    most = max((abs(one.distance) for one in rows), default=1.0) or 1.0
    names, line = 60, 18
    middle, half = (names + WIDTH - RIGHT) / 2, (WIDTH - RIGHT - names) / 2
    parts = []
    for row, one in enumerate(rows):
        y = line * row + 4
        size = half * abs(one.distance) / most
        x = middle if one.distance > 0 else middle - size
        parts.append(
            f"<text x='{names - 8}' y='{y + 10}' text-anchor='end'>{one.place}</text>"
            f"<rect class='{'bar' if one.distance > 0 else 'minus'}' x='{x:.1f}' y='{y}' "
            f"width='{size:.1f}' height='12'/>"
        )
    bottom = line * len(rows) + 4
    parts.append(f"<line class='axis' x1='{middle}' x2='{middle}' y1='0' y2='{bottom}'/>")
    return _svg(bottom, "The most unusual coordinates of U", "".join(parts))


# ---------------------------------------------------------------- pieces


def _page(content: str) -> str:
    return f"<div class='cq'>{content}</div>"


def _pair(picture: str, table: str) -> str:
    """Side by side where there is room."""
    return f"<div class='pair'><div>{picture}</div>{table}</div>"


def _svg(height: float, what: str, content: str) -> str:
    box = f"viewBox='0 0 {WIDTH} {height}'"
    return f"<svg {box} role='img' aria-label='{_escape(what)}'>{content}</svg>"


def _axis(y: float, left: float = LEFT) -> str:
    return f"<line class='axis' x1='{left}' x2='{WIDTH - RIGHT}' y1='{y}' y2='{y}'/>"


def _table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: Sequence[int] = (0,),
    here: int | None = None,
) -> str:
    """`words` are the columns of text, `here` the row that is meant."""

    def cell(tag: str, place: int, content: str) -> str:
        kind = " class='word'" if place in words else ""
        return f"<{tag}{kind}>{_escape(content)}</{tag}>"

    head = "".join(cell("th", place, content) for place, content in enumerate(heads))
    body = "".join(
        f"<tr class='{'here' if number == here else ''}'>"
        + "".join(cell("td", place, content) for place, content in enumerate(row))
        + "</tr>"
        for number, row in enumerate(rows)
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='wide'>{table}</div>"


def readable(text: str) -> str:
    """A text without control characters, which no page can hold: a sign stands for them."""
    return CONTROL.sub("\ufffd", text)


def _escape(text: str) -> str:
    return escape(readable(text))


def _visible(token: str) -> str:
    """A token whose blanks can be seen; of a character that goes on in the next, a sign."""
    return token.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·") or "⋯"


def _short(token: str, letters: int = 13) -> str:
    shown = _visible(token)
    return shown if len(shown) <= letters else shown[: letters - 1] + "…"


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:,.0f}" if 999.5 <= abs(value) < PLAIN else f"{value:.3g}"
