"""Edits: replace a word or a number of a text."""

from __future__ import annotations

import re

from causal_qwen.text.names import CJK
from causal_qwen.text.numerals import encode, render

WORD_CHARACTER = rf"[^\W{CJK}]"  # of a script that separates words by spaces
DIGITS = 15  # of an inserted number: enough for every value that a drag can reach


def find_numbers(text: str) -> list[tuple[str, float]]:
    """Every number of a text: its characters and its value."""
    found = encode(text)
    return list(zip(found.surfaces, found.values, strict=True))


def replace_number(text: str, index: int, value: float) -> str:
    """The text with another value for its `index`-th number, counted from 0."""
    start, end = number_span(text, index)
    return text[:start] + render(value, DIGITS) + text[end:]


def replace_word(text: str, word: str, other: str) -> str | None:
    """The text with the first whole `word` replaced, case-sensitive; None if it has none."""
    before = rf"(?<!{WORD_CHARACTER})" if re.match(WORD_CHARACTER, word) else ""
    after = rf"(?!{WORD_CHARACTER})" if re.search(rf"{WORD_CHARACTER}\Z", word) else ""
    found = re.search(before + re.escape(word) + after, text)
    return None if found is None else text[: found.start()] + other + text[found.end() :]


def number_span(text: str, index: int) -> tuple[int, int]:
    spans = encode(text).spans
    if not 0 <= index < len(spans):
        found = "1 number" if len(spans) == 1 else f"{len(spans)} numbers"
        raise ValueError(f"Number {index + 1} cannot change: the text has {found}.")
    return spans[index]
