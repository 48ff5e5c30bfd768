"""Candidates: the tokens among which an individual chooses, for NumPy and torch arrays alike.

    keep_min_p      tokens with at least min_p of the largest probability
    avoid_repeats   of these, tokens that do not say n of the last tokens again, nor the last one

A token that is no candidate has the score -inf. Both depend on the scores and the text so far, not
on the noise: every world of a counterfactual has its own candidates, and those of an observed text
are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.decoding.arrays import Array, array_namespace

REACH = 64  # tokens that are not said again: loops are near, and what is far may be named again


def keep_min_p(scores: Array, p: float) -> Array:
    """Tokens with at least p times the largest probability. (..., V)"""
    xp = array_namespace(scores)
    bar = xp.max(scores, axis=-1, keepdims=True) + xp.asarray(math.log(p), dtype=scores.dtype)
    return xp.where(scores < bar, -math.inf, scores)


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
        if last not in (number, int(xp.argmax(scores[row]))):
            ids = np.append(ids, last)
        if len(ids):
            others = xp.asarray(scores[row], copy=True)
            others[xp.asarray(ids)] = -math.inf
            if xp.max(others) > -math.inf:
                kept[row] = others
    return kept


def candidates_along(
    scores: Array, text: Any, min_p: float | None, n: int, number: int | None = None
) -> Array:
    """Candidates where the last N tokens of a text were chosen. (N, V), (T,) ids -> (N, V)"""
    if min_p:
        scores = keep_min_p(scores, min_p)
    first, count = len(text) - len(scores), len(scores)
    return avoid_repeats(scores, [text[: first + i] for i in range(count)], [n] * count, number)


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
