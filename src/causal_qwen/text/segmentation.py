"""Segmentation: split a text at its numbers for a tokenizer, and join it again.

Shared by the processor and the NumPy engine. Does not import torch or transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tokenizers import Tokenizer

from causal_qwen.options import PLACEHOLDER

NUMBER_END = re.compile(r"[0-9][.,]?$")  # a number after this would extend it
CONTINUATION = re.compile(r"[0-9]|[.,][0-9]|[eE][+-]?[0-9]")  # after a number, this extends it
OPEN_END = re.compile(r"(?<=[0-9])([.,]|[eE][+-]?)$")  # digits may follow
INCOMPLETE = "\ufffd"  # a character whose bytes have not all been generated


def split_at_numbers(text: str, encode_numbers: str) -> Iterator[tuple[str, int, float | None]]:
    """(text, its start, its value or None) of every piece and number."""
    if encode_numbers == "text":
        yield text, 0, None
        return
    from causal_qwen.text.numerals import encode  # compiles the grammar: slow to import

    found, end = encode(text), 0
    for (start, stop), value in zip(found.spans, found.values, strict=True):
        yield text[end:start], end, None
        yield text[start:stop], start, value
        end = stop
    yield text[end:], end, None


def interleave(texts: list[str], numbers: list[str]) -> str:
    """Text, number, text, ..., text, with a space where digits would extend a number.

    An encoded text never needs it (numbers are whole runs of digits); a generated one may.
    """
    parts = [texts[0]]
    for place, (number, text) in enumerate(zip(numbers, texts[1:], strict=True)):
        before = texts[place]
        joins_numbers = place > 0 and before in ("", ".")  # 5 and 7 are not 57
        if joins_numbers or NUMBER_END.search(before):
            parts.append(" ")
        parts += number, " " if CONTINUATION.match(text) else "", text
    return "".join(parts)


def stable_prefix(text: str) -> str:
    """The part of a growing text that further tokens cannot change: digits may still follow a
    final "." or "e", and bytes may still complete a character."""
    return OPEN_END.sub("", text.rstrip(INCOMPLETE))


def without_placeholder(tokenizer: Tokenizer) -> Tokenizer:
    """A copy of the tokenizer that encodes a typed `<NUM>` as text."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] != PLACEHOLDER]
    state["truncation"] = state["padding"] = None
    return Tokenizer.from_str(json.dumps(state))


def special_affixes(plain: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids of the special tokens before and after every text."""
    bare = plain.encode("a", add_special_tokens=False).ids
    whole = plain.encode("a").ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []
