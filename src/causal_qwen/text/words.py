"""Words: which tokens continue a word, and which leave one open. Does not import torch.

    CONTINUES   the token begins with a letter: after a letter, it continues the word
    OPEN        it ends with a letter or an apostrophe: a letter would continue the word
    PART        it holds a part of a character, as tokens of emoji do
    LETTER      it has a letter of any script

The letters of words are those of scripts that put spaces between them, with the marks on them.
Special tokens have no bit.
"""

from __future__ import annotations

import unicodedata

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from causal_qwen.options import CONTINUES, LETTER, OPEN, PART
from causal_qwen.text.segmentation import INCOMPLETE

APOSTROPHES = "'\u2019"
LETTERS = ("L", "Mn", "Mc")  # general categories: letters, and marks on them
UNSPACED = (  # how the names of the letters of scripts without spaces begin
    *("CJK ", "IDEOGRAPHIC ", "HIRAGANA ", "KATAKANA ", "KATAKANA-", "HALFWIDTH KATAKANA"),
    *("COMBINING KATAKANA", "HENTAIGANA ", "BOPOMOFO ", "YI ", "NUSHU ", "TANGUT "),
    *("THAI ", "LAO ", "KHMER ", "MYANMAR ", "TIBETAN ", "TAI ", "NEW TAI ", "CHAM "),
    *("JAVANESE ", "BALINESE "),
    "VARIATION SELECTOR",  # a mark, on emoji
)


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
