"""Step: the scores of the last position -> the token of every row. Every engine decides here.

    loc_S -> end_loops          tokens that do not say a phrase a third time in a row
          -> keep_min_p         of these, tokens with at least min_p of the largest probability
          -> keep_whole_words   inside of a word, no other way to continue it than the likeliest
          -> avoid_repeats      tokens that do not say n of the last tokens again, nor the last one
          -> + W (noise), of the candidates alone                      what the individual adds
          -> the rule of the mode                                      the token

A token that is no candidate has the score -inf, also where an engine has cut before (penalties,
top-k, top-p). Candidates depend on the scores and the text so far, not on the noise, which is added
to them alone. Scores are NumPy's or torch's; their columns are all V tokens, or the few of `tokens`
(K,), which is much less to read: the candidates of any row after min-p, in the order of their ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from causal_qwen.decoding.decision import (
    NO_CHOICE,
    Array,
    Law,
    array_namespace,
    choose_individual,
    decide,
    in_any_row,
)
from causal_qwen.options import CONTINUES, LETTER, OPEN, PART

FEW = 1024  # candidates of a text, on average, whose rows of W alone are multiplied; of a whole
# batch, which alone are read
REACH = 64  # tokens that are not said again: loops are near, and what is far may be named again
TOGETHER = 2**24  # scores of individuals that are computed at once


class Position(NamedTuple):
    """The last position of every row."""

    scale: Array  # scale_U (B, C)
    shift_u: Array | None = None  # what noise adds to loc_U (B, C)
    shift: Array | None = None  # W shift_u, if it is known (B, V)
    bar: Array | None = None  # h (B, 1)


class Rules(NamedTuple):
    """How rows choose: one mode, and what cuts their candidates."""

    mode: str
    min_p: float | None = None
    whole_words: Sequence[bool] = ()  # of every row
    avoid_repeats: Sequence[int] = ()


def choose_tokens(
    scores: Array, at: Position, rules: Rules, texts: Sequence[Any], law: Law
) -> Array:
    """loc_S (B, V), the texts so far, B sequences of ids -> the chosen tokens (B,)"""
    tokens, scores = candidates(scores, rules, texts, law)
    scores = add_noise(scores, at, law, tokens)
    return decide(rules.mode, scores, at.scale, law, at.bar, tokens)


def choose_for_many(scores: Array, shifts: Array, tokens: Array, law: Law) -> Array:
    """The choices of many individuals at one position, among some tokens: one product of their rows
    of W. loc_S (V,), what noise adds to loc_U (N, C), (K,) -> (N,)"""
    xp, rows = array_namespace(scores), law.rows(tokens)  # None of a quantised W
    wide = None if rows is None else xp.astype(rows, xp.float32).T  # (C, K)
    size, parts = max(TOGETHER // len(tokens if wide is not None else scores), 1), []
    for first in range(0, len(shifts), size):
        some = shifts[first : first + size]
        moved = law.score_shift(some)[:, tokens] if wide is None else some @ wide
        parts.append(choose_individual(scores[tokens] + moved, law.threshold[tokens]))
    return tokens[xp.concat(parts)]


def candidate_tokens(scores: Array, rules: Rules, text: Any, law: Law) -> Array:
    """Who may be chosen after one text. loc_S (V,) -> (K,)"""
    xp = array_namespace(scores)
    tokens, kept = candidates(scores[None], rules, [text], law)
    places = xp.nonzero(kept[0] > -math.inf)[0]
    return places if tokens is None else tokens[places]


def candidates(
    scores: Array, rules: Rules, texts: Sequence[Any], law: Law, are_few: bool = True
) -> tuple[Array | None, Array]:
    """Who may be chosen: K tokens with their scores if they are few, or None and all scores, -inf
    for the others. (B, V) -> (K,), (B, K) or None, (B, V)"""
    xp, tokens = array_namespace(scores), None
    if any(rules.avoid_repeats):
        scores = end_loops(scores, texts, rules.avoid_repeats, law.word_edges)
    if rules.min_p:
        if xp.any(xp.isnan(xp.max(scores, axis=-1))):
            raise ValueError(NO_CHOICE)
        if are_few and law.has_rows:
            tokens, scores = few_candidates(scores, rules.min_p)
        else:
            scores = keep_min_p(scores, rules.min_p)
    if any(rules.whole_words) or any(rules.avoid_repeats):
        asked = rules.whole_words, rules.avoid_repeats
        scores = cut_by_text(scores, texts, *asked, law.word_edges, law.num_token_id, tokens)
    return tokens, scores


def add_noise(scores: Array, at: Position, law: Law, tokens: Array | None = None) -> Array:
    """loc_S + W shift_u: by the rows of W of the candidates alone where they are few. (B, K)"""
    if at.shift is not None:
        return scores + (at.shift if tokens is None else at.shift[:, tokens])
    if at.shift_u is None:
        return scores
    moved = move_candidates(scores, at.shift_u, law.rows, tokens)
    return scores + law.score_shift(at.shift_u) if moved is None else moved


# ---------------------------------------------------------------- who may be chosen


def keep_min_p(scores: Array, p: float) -> Array:
    """Tokens with at least p times the largest probability. (..., V)"""
    return array_namespace(scores).where(scores < _least_kept(scores, p), -math.inf, scores)


def few_candidates(scores: Array, p: float) -> tuple[Array | None, Array]:
    """`keep_min_p`, and of the columns those that a row keeps, with their tokens, if they are few.
    (B, V) -> (K,), (B, K); or None, (B, V)"""
    tokens = in_any_row(scores >= _least_kept(scores, p))
    if not 0 < len(tokens) <= FEW:
        return None, keep_min_p(scores, p)
    return tokens, keep_min_p(scores[:, tokens], p)


def _least_kept(scores: Array, p: float) -> Array:
    """(..., V) -> (..., 1)"""
    xp = array_namespace(scores)
    return xp.max(scores, axis=-1, keepdims=True) + xp.asarray(math.log(p), dtype=scores.dtype)


def keep_whole_words(
    scores: Array,
    texts: Sequence[Any],
    is_asked: Sequence[bool],
    edges: Array,
    tokens: Array | None = None,
) -> Array:
    """Without the tokens that would continue the last word of the text, except for the likeliest
    token. (B, K), B texts of ids, B flags, (V,) bits of `text.segmentation` -> (B, K)

    Where the likeliest token continues a character that is begun, it alone stays. Tokens that begin
    a word, end it or are none stay. The likeliest token stays in every row: none loses all
    candidates. Bits that are all 0 change nothing.
    """
    xp = array_namespace(scores)
    rows = zip(texts, is_asked, strict=True)
    last = [int(text[-1]) if asked and len(text) else -1 for text, asked in rows]  # -1: all stay
    ids = xp.asarray(last, dtype=xp.int64, device=scores.device)
    last_bits = xp.where(ids >= 0, edges[ids], 0)  # (B,)
    is_other = (scores > -math.inf) & (scores < xp.max(scores, axis=-1, keepdims=True))
    own = edges if tokens is None else edges[tokens]
    is_part = (last_bits & own[xp.argmax(scores, axis=-1)] & PART) != 0
    is_inside = ((last_bits & OPEN) != 0)[:, None] & ((own & CONTINUES) != 0)  # fast to choose by
    return xp.where((is_inside | is_part[:, None]) & is_other, -math.inf, scores)


def end_loops(scores: Array, texts: Sequence[Any], lengths: Sequence[int], edges: Array) -> Array:
    """Without the tokens that would begin a phrase again which the text has just said twice; it has
    two tokens or more, and a letter or an emoji. (B, V), B texts of ids, B times n -> (B, V)

    A name may be repeated, and a row of a table: neither is said three times without a break. n = 0
    keeps all.
    """
    others = scores
    for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        recent = _recent(text) if n else []
        for size in range(2, len(recent) // 2 + 1):
            phrase = recent[-size:]
            if phrase != recent[-2 * size : -size]:
                continue
            if any(int(edges[token]) & (LETTER | PART) for token in phrase):
                if others is scores:
                    others = array_namespace(scores).asarray(scores, copy=True)
                others[row, phrase[0]] = -math.inf
    return others


def avoid_repeats(
    scores: Array,
    texts: Sequence[Any],
    lengths: Sequence[int],
    number: int | None = None,
    tokens: Array | None = None,
) -> Array:
    """Without the tokens that would end a sequence of n tokens which the last REACH tokens of the
    text have already, and without the last token itself unless it is the likeliest again; a row in
    which no other token is left keeps them. (B, K), B texts of ids, B times n -> (B, K)

    n = 0 keeps all. Where the model allows one token only, as inside of a name, it is said again.
    `number` is <NUM>: two of them have two values, and are never the same.
    """
    xp = array_namespace(scores)
    best = xp.argmax(scores, axis=-1)
    likeliest = (best if tokens is None else tokens[best]).tolist()
    column = None if tokens is None else {token: k for k, token in enumerate(tokens.tolist())}
    rows: list[int] = []
    columns: list[int] = []
    for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        if not n or not len(text):
            continue
        recent = _recent(text)
        found = repeating_tokens(recent, n, number)
        if recent[-1] not in (number, likeliest[row]):
            found.add(recent[-1])
        own = found if column is None else {column[token] for token in found if token in column}
        rows += [row] * len(own)
        columns += own
    if not rows:
        return scores
    others = xp.asarray(scores, copy=True)
    others[xp.asarray(rows), xp.asarray(columns)] = -math.inf
    is_left = xp.max(others, axis=-1, keepdims=True) > -math.inf
    return xp.where(is_left, others, scores)


def _recent(text: Any) -> list[int]:
    found: list[int] = np.asarray(text[-REACH:]).tolist()
    return found


def cut_by_text(
    scores: Array,
    texts: Sequence[Any],
    is_asked: Sequence[bool],
    lengths: Sequence[int],
    edges: Array | None,
    number: int | None = None,
    tokens: Array | None = None,
) -> Array:
    """`keep_whole_words` in the rows that ask for it, then `avoid_repeats`. (B, K) -> (B, K)"""
    if edges is not None and any(is_asked):
        scores = keep_whole_words(scores, texts, is_asked, edges, tokens)
    return avoid_repeats(scores, texts, lengths, number, tokens) if any(lengths) else scores


def move_candidates(
    scores: Array,
    shift: Array,
    rows_of: Callable[[Array], Array],
    tokens: Array | None = None,
) -> Array | None:
    """Scores + W shift, by the rows of W of the candidates alone: a whole product costs the reading
    of W. None where candidates are many. (B, K), (B, C), token ids (n,) -> (n, C); -> (B, K)"""
    xp = array_namespace(scores)
    rows, columns = xp.nonzero(scores > -math.inf)
    if len(columns) > FEW * len(scores):
        return None
    weights = rows_of(columns if tokens is None else tokens[columns])
    if weights is None:
        return None
    moved = xp.asarray(scores, copy=True)
    product = xp.sum(xp.astype(weights, xp.float32) * shift[rows], axis=-1)
    moved[rows, columns] += xp.astype(product, scores.dtype)
    return moved


class Cuts(NamedTuple):
    """What makes the candidates of one text, all resolved."""

    min_p: float = 0.0
    edges: Array | None = None  # (V,) bits of tokens
    n: int = 0  # of `avoid_repeats`
    number: int | None = None  # <NUM>
    whole_words: bool = True  # where there are edges


def candidates_along(scores: Array, text: Any, cuts: Cuts) -> Array:
    """Candidates where the last N tokens of a text were chosen. (N, V), (T,) ids -> (N, V)"""
    first, count = len(text) - len(scores), len(scores)
    texts, lengths = [text[: first + i] for i in range(count)], [cuts.n] * count
    if cuts.n and cuts.edges is not None:
        scores = end_loops(scores, texts, lengths, cuts.edges)
    if cuts.min_p:
        scores = keep_min_p(scores, cuts.min_p)
    asked = [cuts.whole_words] * count
    return cut_by_text(scores, texts, asked, lengths, cuts.edges, cuts.number)


def repeating_tokens(text: list[int], n: int, number: int | None = None) -> set[int]:
    """Tokens that followed the last n - 1 tokens of a text before."""
    if number is not None:  # no two are the same
        text = [-1 - place if token == number else token for place, token in enumerate(text)]
    last = text[len(text) - n + 1 :]
    places = range(len(text) - n + 1)  # where n tokens begin
    found = {text[i + n - 1] for i in places if text[i : i + n - 1] == last}
    return {token for token in found if token >= 0}
