"""Decision: scores -> the next token. All four rules, for NumPy and torch arrays alike.

    standard    argmax_k P(S_k > C_k + h), U' = Cauchy(loc_U, scale_U + b)     choose_pruned
    sampling    the same,                  U' = Cauchy(loc_U + T kappa b eps, scale_U)
    causal      argmax_k (W u - C)_k,      u = loc_U + T kappa scale_U t       choose_individual
    compatible  softmax(loc_S), or P_k / sum P with normalization="ovr"        one_vs_rest_log_probs

`decide` applies the rule of a mode to the last position of every row.

P(S_k > C_k + h) grows with (loc_k - C_k - h) / scale_k, so the first two rules maximise that ratio.
The bar h of the context changes their choice only where scales differ. They compute in float64 and
count scales that are equal to 1e-5 relative as equal: rounding must not decide between tokens that
the base model's argmax tells apart, or ties that it breaks by the lowest id.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

Array = Any  # a NumPy array or a torch tensor

TIE = 1e-5  # relative difference below which two scales count as equal
SLACK = 1e-4  # rounding allowance of every float32 bound: positive sums of <= 1000s of terms
SCALE_FLOOR = 1e-12  # a zeroed embedding row (padding) would otherwise give 0/0
NO_CHOICE = "loc_S holds NaN: no token can be chosen; check the model's weights and config.json."
EXACT_CANDIDATES = 64  # so few are decided in float64 without further pruning
MOST_TOGETHER = 512  # candidates whose scales are computed for a whole batch


def array_namespace(array: Array) -> Any:
    if isinstance(array, np.ndarray | np.generic):
        return np
    import array_api_compat

    return array_api_compat.array_namespace(array)


def in_any_row(is_kept: Array) -> Array:
    """Columns that a row keeps. (B, V) -> (K,)"""
    xp = array_namespace(is_kept)
    if len(is_kept) == 1:
        return xp.nonzero(is_kept[0])[0]
    return xp.nonzero(xp.max(xp.astype(is_kept, xp.uint8), axis=0))[0]  # torch's `any` is slow


class Law(Protocol):
    """The one linear law from U to scores, and what is known of its tokens."""

    threshold: Array  # C (V,)
    b_noise: Array  # |b| (C,)
    decision_noise: Array  # |a| (V,)
    word_edges: Array  # (V,) bits of `text.segmentation`
    num_token_id: int | None  # <NUM>
    has_rows: bool  # rows of W can be read: it is whole, and here

    def row_norms(self) -> Array: ...  # ||W_k||_1 (V,)

    # what scale_S of every token lies between, if it is known: (B, C) -> (B, 1) twice
    def scale_range(self, scale: Array) -> tuple[Array, Array] | None: ...

    # (|W| scale)_k in float32, for all or some tokens: (C,) -> (V,) or (n,)
    def absolute(self, scale: Array, rows: Array | None = None) -> Array: ...

    def rows(self, ids: Array) -> Array: ...  # of W, in any precision: (n,) -> (n, C)

    def score_scales(self, scale: Array) -> Array: ...  # scale_S: (B, C) -> (B, V)

    def score_shift(self, shift: Array) -> Array: ...  # W shift: (B, C) -> (B, V)


def decide(
    mode: str,
    loc: Array,
    scale: Array,
    head: Law,
    bar: Array | None = None,
    tokens: Array | None = None,
) -> Array:
    """The token of every row, among all or few tokens. loc_S (B, K), scale_U (B, C) -> (B,)

    `loc` has what noise adds to it, and -inf where a token is no candidate; `bar` is h of every
    row (B, 1), of the scores before both.
    """
    xp = array_namespace(loc)
    if mode == "compatible":
        return xp.argmax(loc, axis=-1)
    threshold = head.threshold if tokens is None else head.threshold[tokens]
    if (mode == "causal" or tokens is not None) and xp.any(xp.isnan(loc)):
        raise ValueError(NO_CHOICE)
    if mode == "causal":
        chosen = choose_individual(loc, threshold)
        return chosen if tokens is None else tokens[chosen]
    scale = scale + head.b_noise if mode == "standard" else scale
    if tokens is not None:
        return tokens[choose(loc, exact_scales(scale, tokens, head), threshold, bar)]
    if not head.has_rows:
        return choose(loc, head.score_scales(scale), threshold, bar)
    if (together := decide_together(scale, loc, head, bar)) is not None:
        return together
    bars = [None] * len(loc) if bar is None else bar
    rows = zip(loc, scale, bars, strict=True)
    chosen = [choose_pruned(row, of_u, head, h) for row, of_u, h in rows]
    return xp.asarray(chosen, device=loc.device)


def exact_scales(scale: Array, tokens: Array, head: Law) -> Array:
    """scale_S = |W| scale + |a| mean(scale) of some tokens, in float64. (B, C), (K,) -> (B, K)"""
    xp = array_namespace(scale)
    scale = xp.astype(scale, xp.float64)
    exact = scale @ xp.abs(xp.astype(head.rows(tokens), xp.float64)).T
    noise = xp.astype(head.decision_noise[tokens], xp.float64)
    exact = exact + noise * xp.mean(scale, axis=-1, keepdims=True)
    return xp.where(exact > SCALE_FLOOR, exact, SCALE_FLOOR)


def margin(loc: Array, threshold: Array, bar: Array | None = None) -> Array:
    """loc_k - C_k - h in float64: float32 would round different scores together. (..., V)"""
    xp = array_namespace(loc)
    level = xp.astype(threshold, xp.float64)
    level = level if bar is None else level + xp.astype(bar, xp.float64)
    return xp.astype(loc, xp.float64) - level


def choose_individual(scores: Array, threshold: Array) -> Array:
    """argmax_k (W u - C)_k: the choice of one individual u. W u (..., V) -> (...)"""
    return array_namespace(scores).argmax(margin(scores, threshold), axis=-1)


def choose(loc: Array, scale: Array, threshold: Array, bar: Array | None = None) -> Array:
    """argmax_k P(S_k > C_k + h): the largest (loc_k - C_k - h) / scale_k; among equal scales, the
    lowest id of the largest margin. (..., V), h (..., 1) -> (...)"""
    xp = array_namespace(loc)
    over, scale = margin(loc, threshold, bar), xp.astype(scale, xp.float64)
    best = xp.argmax(over / scale, axis=-1, keepdims=True)
    is_equal = xp.abs(scale / xp.take_along_axis(scale, best, axis=-1) - 1) <= TIE
    return xp.argmax(xp.where(is_equal, over, -math.inf), axis=-1)


def one_vs_rest_log_probs(
    loc: Array, scale: Array, threshold: Array, bar: Array | None = None
) -> Array:
    """log(P_k / sum P) in float64; -inf where loc is. (..., V) -> (..., V)"""
    xp = array_namespace(loc)
    log_p = xp.log(xp.atan2(xp.astype(scale, xp.float64), -margin(loc, threshold, bar)))
    top = xp.max(log_p, axis=-1, keepdims=True)
    return log_p - top - xp.log(xp.sum(xp.exp(log_p - top), axis=-1, keepdims=True))


def decide_together(scale: Array, loc: Array, head: Law, bar: Array | None = None) -> Array | None:
    """`choose` for the rows of a batch, if few tokens may win in any; None if many may.

    scale_U (B, C), loc_S (B, V), h (B, 1) -> (B,). One bound for all tokens of a row, so that V is
    read few times: the winner's ratio (loc - C - h) / scale is not less than that of the token with
    the largest margin, whose scale is bounded as all are and, if that leaves many tokens, computed.
    """
    xp = array_namespace(loc)
    if (bounds := head.scale_range(xp.astype(scale, xp.float32))) is None:
        return None
    low, high = bounds
    over = xp.astype(loc, xp.float32) - head.threshold
    level = 0.0 if bar is None else xp.astype(bar, xp.float32)
    top = xp.max(over, axis=-1, keepdims=True) - level  # (B, 1)

    def may_win(of_top: Array) -> Array:  # the scale of the largest margin, or its worst case
        bound = top / of_top * xp.where(top >= 0, low, high)
        return in_any_row(over >= bound - SLACK * (1 + xp.abs(bound)) + level)

    tokens = may_win(xp.where(top >= 0, high, low))
    if len(tokens) > EXACT_CANDIDATES:
        best = xp.argmax(over, axis=-1)
        of_top = xp.linalg.diagonal(exact_scales(scale, best, head))[:, None]  # (B, B) -> (B, 1)
        tokens = may_win(xp.astype(of_top, xp.float32))
    if not 0 < len(tokens) <= MOST_TOGETHER:
        return None
    exact = exact_scales(scale, tokens, head)  # (B, tokens)
    return tokens[choose(loc[:, tokens], exact, head.threshold[tokens], bar)]


def choose_pruned(loc: Array, scale: Array, head: Law, bar: Array | None = None) -> int:
    """`choose` for scale_S = |W| scale + |a| mean(scale), computing few scale_S.

    loc (V,), U's scale (C,), h (1,) -> a token id. A token whose best case is worse than another's
    worst case cannot win. Two bounds, then float64 for the rest:

        1. min/max of the scale x the row's L1 norm  O(V)
        2. the product itself in float32             O(candidates x C)
    """
    xp = array_namespace(loc)
    over = xp.astype(loc, xp.float32) - head.threshold
    over = over if bar is None else over - xp.astype(bar, xp.float32)
    noise = head.decision_noise * xp.mean(scale)
    norms = head.row_norms()
    low, high = xp.min(scale) * norms + noise, xp.max(scale) * norms + noise
    keep = xp.nonzero(_may_win(over, low, high))[0]
    if len(keep) > EXACT_CANDIDATES:
        rows = None if len(keep) == len(loc) else keep
        product = head.absolute(scale, rows) + noise[keep]
        keep = keep[_may_win(over[keep], product, product)]
    if len(keep) == 0:
        raise ValueError(NO_CHOICE)
    exact = exact_scales(scale[None], keep, head)[0]
    return int(keep[choose(loc[keep], exact, head.threshold[keep], bar)])


def _may_win(over: Array, low: Array, high: Array) -> Array:
    """Tokens that may still win, given margins and low <= scale <= high up to rounding."""
    xp = array_namespace(over)
    low, high = low * (1 - SLACK), high * (1 + SLACK)
    low = xp.where(low > SCALE_FLOOR, low, SCALE_FLOOR)
    high = xp.where(high > SCALE_FLOOR, high, SCALE_FLOOR)
    is_positive = over >= 0
    worst = over / xp.where(is_positive, high, low)
    best = over / xp.where(is_positive, low, high)
    bar = float(xp.max(worst))
    return best >= (bar - SLACK * abs(bar) if math.isfinite(bar) else bar)
