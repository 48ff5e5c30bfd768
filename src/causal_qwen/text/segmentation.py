"""Pieces: a text in pieces of words and numbers, for a tokenizer, and back.

What the processor and the NumPy engine share: neither torch nor transformers is needed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tokenizers import Tokenizer

from causal_qwen.text.numerals import PLACEHOLDER, encode

RUNS_INTO = re.compile(r"[0-9][.,]?$")
RUNS_ON = re.compile(r"[0-9]|[.,][0-9]|[eE][+-]?[0-9]")
MAY_RUN_ON = re.compile(r"(?<=[0-9])([.,]|[eE][+-]?)$")
INCOMPLETE = "\ufffd"  # a character some of whose bytes are still to come


def split_at_numbers(text: str, way: str) -> Iterator[tuple[str, int, float | None]]:
    """(text, where it starts, its value or None) of every piece and number."""
    if way == "text":
        yield text, 0, None
        return
    found, end = encode(text), 0
    for piece, (start, close), value in zip(found.pieces, found.spans, found.values, strict=False):
        yield piece, end, None
        yield text[start:close], start, value
        end = close
    yield found.pieces[-1], end, None


def interleave(texts: list[str], numbers: list[str]) -> str:
    """Text, number, text, ..., text, with a space where digits would run into a number.

    Nothing that was read looks like that (numbers are whole runs), but a model may say it.
    """
    parts = [texts[0]]
    for place, (number, text) in enumerate(zip(numbers, texts[1:], strict=True)):
        is_stuck = not texts[place] if place else False  # 5 and 7 are not 57
        if is_stuck or RUNS_INTO.search(texts[place]) or (place and texts[place] == "."):
            parts.append(" ")
        parts += number, " " if RUNS_ON.match(text) else "", text
    return "".join(parts)


def stable_prefix(text: str) -> str:
    """As much of a growing text as stays: digits to come may part "." or "e" from a number, and
    bytes to come may complete a character."""
    return MAY_RUN_ON.sub("", text.rstrip(INCOMPLETE))


def without_placeholder(tokenizer: Tokenizer) -> Tokenizer:
    """A copy of the tokenizer that reads a typed `<NUM>` as text."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] != PLACEHOLDER]
    state["truncation"] = state["padding"] = None
    return Tokenizer.from_str(json.dumps(state))


def special_affixes(plain: Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after every text."""
    bare = plain.encode("a", add_special_tokens=False).ids
    whole = plain.encode("a").ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []
