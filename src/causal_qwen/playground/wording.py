"""Wording: a word or a number of a text, changed."""

from __future__ import annotations

import re
from typing import NamedTuple

from causal_qwen.text.numerals import CJK, encode, render

FARTHEST = 1e300  # to which a number can be dragged
LETTER = rf"[^\W{CJK}]"  # of a script that sets blanks between words
LONGEST = 15  # digits, enough for whatever was dragged to its place


class Dial(NamedTuple):
    """From where to where a number can be dragged, and by which steps."""

    low: float
    high: float
    step: float


def numbers_of(text: str) -> list[tuple[str, float]]:
    """Every number of a text: as it is written, and its value."""
    found = encode(text)
    return list(zip(found.surfaces, found.values, strict=True))


def change_number(text: str, place: int, value: float) -> str:
    """The text with another value for its `place`-th number, counted from 0."""
    start, end = _span(text, place)
    return text[:start] + render(value, LONGEST) + text[end:]


def number_in(text: str) -> float:
    """The number that somebody wrote into a field of its own."""
    found = numbers_of(text.strip())
    if len(found) != 1 or found[0][0] != text.strip():
        raise ValueError(f"{text.strip()!r} is no number; write one such as 12 or -0.5.")
    return found[0][1]


def change_word(text: str, word: str, other: str) -> str | None:
    """The text with its first `word`, whole and in this spelling, replaced; None without one."""
    before = rf"(?<!{LETTER})" if re.match(LETTER, word) else ""
    after = rf"(?!{LETTER})" if re.search(rf"{LETTER}\Z", word) else ""
    found = re.search(before + re.escape(word) + after, text)
    return None if found is None else text[: found.start()] + other + text[found.end() :]


def dial_of(text: str, place: int) -> Dial:
    """0 to twice the number, with as many decimals as it is written with; 0 goes both ways."""
    start, end = _span(text, place)
    value = encode(text).values[place]
    decimals = len(re.sub(r"[^\d].*", "", text[start:end].partition(".")[2]))
    far = max(min(2 * value, FARTHEST), -FARTHEST)
    low, high = (-10.0, 10.0) if value == 0 else sorted((0.0, far))
    written, fine = 10.0**-decimals, float(render((high - low) / 1000, 1))
    is_small = written > (high - low) / 2  # written with an exponent
    return Dial(low, high, (fine or high - low) if is_small else max(written, fine))


def dials_of(text: str) -> list[Dial]:
    """The dials of all numbers of a text."""
    return [dial_of(text, place) for place in range(len(encode(text).spans))]


def on_dial(dial: Dial, share: float) -> float:
    """The value at a share of the way, 0 to 1, that the steps reach."""
    steps = round(share * (dial.high - dial.low) / dial.step)
    return float(render(dial.low + steps * dial.step, LONGEST - 3))


def _span(text: str, place: int) -> tuple[int, int]:
    spans = encode(text).spans
    if not 0 <= place < len(spans):
        raise ValueError(
            f"Number {place + 1} is asked to change, but the text holds {len(spans)} numbers."
        )
    return spans[place]
