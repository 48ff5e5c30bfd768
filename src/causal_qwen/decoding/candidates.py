"""Candidates: the tokens among which an individual chooses, for NumPy and torch arrays alike.

    keep_min_p         tokens with at least min_p of the largest probability
    keep_whole_words   of these, inside of a word, no other way to continue it than the likeliest
    avoid_repeats      of these, tokens that do not say n of the last tokens again, nor the last one

A token that is no candidate has the score -inf. All depend on the scores and the text so far, not
on the noise: every world of a counterfactual has its own candidates, and those of an observed text
are known. Noise need be added to candidates alone (`move_candidates`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from causal_qwen.decoding.arrays import Array, array_namespace
from causal_qwen.options import CONTINUES, OPEN

FEW = 1024  # candidates of a text, on average: their rows of W alone are multiplied
REACH = 64  # tokens that are not said again: loops are near, and what is far may be named again


def keep_min_p(scores: Array, p: float) -> Array:
    """Tokens with at least p times the largest probability. (..., V)"""
    xp = array_namespace(scores)
    bar = xp.max(scores, axis=-1, keepdims=True) + xp.asarray(math.log(p), dtype=scores.dtype)
    return xp.where(scores < bar, -math.inf, scores)


def keep_whole_words(
    scores: Array, texts: Sequence[Any], is_asked: Sequence[bool], edges: Array
) -> Array:
    """Without the tokens that would continue the last word of the text, except for the likeliest
    token. (B, V), B texts of ids, B flags, (V,) bits of `text.words` -> (B, V)

    Tokens that begin a word, end it or are none stay. The likeliest token stays in every row: none
    loses all candidates. Bits that are all 0 change nothing.
    """
    xp = array_namespace(scores)
    rows = zip(texts, is_asked, strict=True)
    last = [int(text[-1]) if asked and len(text) else -1 for text, asked in rows]  # -1: all stay
    ids = xp.asarray(last, dtype=xp.int64, device=scores.device)
    is_open = (ids >= 0) & ((edges[ids] & OPEN) != 0)  # (B,)
    is_other = (scores > -math.inf) & (scores < xp.max(scores, axis=-1, keepdims=True))
    is_cut = is_open[:, None] & is_other & ((edges & CONTINUES) != 0)  # few: fast to choose by
    return xp.where(is_cut, -math.inf, scores)


def avoid_repeats(
    scores: Array, texts: Sequence[Any], lengths: Sequence[int], number: int | None = None
) -> Array:
    """Without the tokens that would end a sequence of n tokens which the last REACH tokens of the
    text have already, and without the last token itself unless it is the likeliest again; a row in
    which no other token is left keeps them. (B, V), B texts of ids, B times n -> (B, V)

    n = 0 keeps all. Where the model allows one token only, as inside of a name, it is said again.
    `number` is <NUM>: two of them have two values, and are never the same.
    """
    xp = array_namespace(scores)
    kept = xp.asarray(scores, copy=True)
    for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        if not n or not len(text):
            continue
        ids = repeating_tokens(np.asarray(text[-REACH:]), n, number)
        last = int(text[-1])
        is_left = last != number and scores[row, last] > -math.inf  # mostly not: no search of V
        if is_left and last != int(xp.argmax(scores[row])):
            ids = np.append(ids, last)
        if len(ids):
            others = xp.asarray(scores[row], copy=True)
            others[xp.asarray(ids)] = -math.inf
            if xp.max(others) > -math.inf:
                kept[row] = others
    return kept


def cut_by_text(
    scores: Array,
    texts: Sequence[Any],
    is_asked: Sequence[bool],
    lengths: Sequence[int],
    edges: Array | None,
    number: int | None = None,
) -> Array:
    """`keep_whole_words` in the rows that ask for it, then `avoid_repeats`. (B, V) -> (B, V)"""
    if edges is not None and any(is_asked):
        scores = keep_whole_words(scores, texts, is_asked, edges)
    return avoid_repeats(scores, texts, lengths, number) if any(lengths) else scores


def move_candidates(scores: Array, shift: Array, rows_of: Callable[[Array], Array]) -> Array | None:
    """Scores + W shift, by the rows of W of the candidates alone: a whole product costs the reading
    of W. None where candidates are many. (B, V), (B, C), token ids (n,) -> (n, C); -> (B, V)"""
    xp = array_namespace(scores)
    rows, tokens = xp.nonzero(scores > -math.inf)
    if len(tokens) > FEW * len(scores):
        return None
    moved = xp.asarray(scores, copy=True)
    product = xp.sum(xp.astype(rows_of(tokens), xp.float32) * shift[rows], axis=-1)
    moved[rows, tokens] += xp.astype(product, scores.dtype)
    return moved


class Cuts(NamedTuple):
    """What makes the candidates of one text, all resolved."""

    min_p: float = 0.0
    edges: Array | None = None  # (V,) where words are kept whole
    n: int = 0  # of `avoid_repeats`
    number: int | None = None  # <NUM>


def candidates_along(scores: Array, text: Any, cuts: Cuts) -> Array:
    """Candidates where the last N tokens of a text were chosen. (N, V), (T,) ids -> (N, V)"""
    if cuts.min_p:
        scores = keep_min_p(scores, cuts.min_p)
    first, count = len(text) - len(scores), len(scores)
    texts = [text[: first + i] for i in range(count)]
    return cut_by_text(scores, texts, [True] * count, [cuts.n] * count, cuts.edges, cuts.number)


def repeating_tokens(
    text: NDArray[np.int64], n: int, number: int | None = None
) -> NDArray[np.int64]:
    """Tokens that followed the last n - 1 tokens of a text before. (T,) -> (k,)"""
    earlier = len(text) - n + 1  # places where n tokens begin
    if earlier < 1:
        return np.zeros(0, np.int64)
    if number is not None:
        text = np.where(text == number, -1 - np.arange(len(text)), text)
    last = text[len(text) - n + 1 :]
    is_same = np.ones(earlier, bool)
    for place, token in enumerate(last):
        is_same &= text[place : place + earlier] == token
    found: NDArray[np.int64] = np.unique(text[n - 1 :][is_same])
    return found[found >= 0]
