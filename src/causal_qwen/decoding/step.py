"""Step: the scores of the last position -> the token of every row. Every engine decides here.

    loc_S -> candidates: no loops, min-p, whole words, no repeats      who may be chosen
          -> + W (noise), of the candidates alone                      what the individual adds
          -> the rule of the mode                                      the token

Scores are NumPy's or torch's. What an engine applies before (penalties, top-k, top-p) has -inf
where a token is no candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from causal_qwen.decoding.candidates import (
    Array,
    array_namespace,
    cut_by_text,
    end_loops,
    few_candidates,
    keep_min_p,
    move_candidates,
)
from causal_qwen.decoding.decision import NO_CHOICE, Law, choose_individual, decide

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
