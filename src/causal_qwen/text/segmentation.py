"""Segmentation: split a text at its numbers for a tokenizer, and join it again; and the bits of
tokens, by which candidates keep words whole.

    CONTINUES   the token begins with a letter: after a letter, it continues the word
    OPEN        it ends with a letter or an apostrophe: a letter would continue the word
    PART        it holds a part of a character, as tokens of emoji do
    LETTER      it has a letter of any script

The letters of words are those of scripts that put spaces between them, with the marks on them.
Special tokens have no bit. Does not import torch or transformers.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from causal_qwen.options import CONTINUES, LETTER, OPEN, PART, PLACEHOLDER

NUMBER_END = re.compile(r"[0-9][.,]?$")  # a number after this would extend it
CONTINUATION = re.compile(r"[0-9]|[.,][0-9]|[eE][+-]?[0-9]")  # after a number, this extends it
OPEN_END = re.compile(r"(?<=[0-9])([.,]|[eE][+-]?)$")  # digits may follow
INCOMPLETE = "\ufffd"  # a character whose bytes have not all been generated
APOSTROPHES = "'\u2019"
LETTERS = ("L", "Mn", "Mc")  # general categories: letters, and marks on them
UNSPACED = (  # how the names of the letters of scripts without spaces begin
    *("CJK ", "IDEOGRAPHIC ", "HIRAGANA ", "KATAKANA ", "KATAKANA-", "HALFWIDTH KATAKANA"),
    *("COMBINING KATAKANA", "HENTAIGANA ", "BOPOMOFO ", "YI ", "NUSHU ", "TANGUT "),
    *("THAI ", "LAO ", "KHMER ", "MYANMAR ", "TIBETAN ", "TAI ", "NEW TAI ", "CHAM "),
    *("JAVANESE ", "BALINESE "),
    "VARIATION SELECTOR",  # a mark, on emoji
)


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


# ---------------------------------------------------------------- bits of tokens


def word_edges(tokenizer: Tokenizer, size: int) -> NDArray[np.uint8]:
    """The bits of every token; 0 for ids that the tokenizer does not have. -> (size,)

    A token is decoded after a full stop: at the beginning of a text, decoders drop its space.
    """
    stop = tokenizer.encode(".", add_special_tokens=False).ids[-1:]
    before = tokenizer.decode(stop, skip_special_tokens=False)
    texts = tokenizer.decode_batch([[*stop, k] for k in range(size)], skip_special_tokens=False)
    edges = np.fromiter((edges_of(text.removeprefix(before)) for text in texts), np.uint8, size)
    added = tokenizer.get_added_tokens_decoder()
    edges[[k for k, token in added.items() if token.special and k < size]] = 0
    return edges


def edges_of(piece: str) -> int:
    """The bits of one token's text."""
    if not piece or INCOMPLETE in piece:
        return PART * bool(piece)
    is_open = is_letter(piece[-1]) or piece[-1] in APOSTROPHES
    has_letter = any(map(str.isalpha, piece))
    return CONTINUES * is_letter(piece[0]) + OPEN * is_open + LETTER * has_letter


def is_letter(character: str) -> bool:
    """Of a script that puts spaces between words; or a mark on such a letter."""
    if not unicodedata.category(character).startswith(LETTERS):
        return False
    return not unicodedata.name(character, "").startswith(UNSPACED)
