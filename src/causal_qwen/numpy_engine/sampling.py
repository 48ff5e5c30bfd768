"""Sampling: softmax draws, and the cuts top-k and top-p.

Draw i of a seed is Philox keyed by (seed, i), so a seed reproduces a text.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from causal_qwen.individuals import draw_noise
from causal_qwen.numpy_engine.weights import Float32

NEVER = np.float32(-np.inf)  # the score of a token that may not be chosen


def softmax(scores: Float32) -> NDArray[np.float64]:
    """exp(s) / sum exp(s) in float64. (..., V)"""
    wide = np.asarray(scores, np.float64)
    weights = np.exp(wide - wide.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def keep_top_k(scores: Float32, k: int) -> Float32:
    """The k largest scores, ties included; the others become -inf. (..., V)"""
    k = min(k, scores.shape[-1])
    bar = np.partition(scores, -k, axis=-1)[..., -k, None]
    return np.where(scores < bar, NEVER, scores)


def keep_top_p(scores: Float32, p: float) -> Float32:
    """The smallest set of likeliest tokens that together have probability p. (..., V)"""
    order = np.argsort(scores, axis=-1, kind="stable")
    mass = np.cumsum(np.take_along_axis(softmax(scores), order, -1), axis=-1)
    is_out = mass <= 1 - p
    is_out[..., -1] = False
    out = np.empty_like(is_out)
    np.put_along_axis(out, order, is_out, -1)
    return np.where(out, NEVER, scores)


def penalize_repetition(scores: Float32, ids: NDArray[np.int64], penalty: float) -> Float32:
    """Scores of tokens already in the text, divided by the penalty (or times, if negative)."""
    seen = np.take_along_axis(scores, ids, -1)
    seen = np.where(seen < 0, seen * np.float32(penalty), seen / np.float32(penalty))
    scores = scores.copy()
    np.put_along_axis(scores, ids, seen, -1)
    return scores


def draw(scores: Float32, seed: int, index: int) -> int:
    """A token drawn from softmax(scores), by draw `index` of `seed`. (V,)"""
    kept = np.flatnonzero(scores > NEVER)
    mass = np.cumsum(softmax(scores[kept]))
    place = int(np.searchsorted(mass, draw_noise(seed, 1, index)[0] * mass[-1], side="right"))
    return int(kept[min(place, len(kept) - 1)])
