"""Noise: e in (0, 1)^C from a seed, and standard Cauchy noise t from e.

    t = tan((2e - 1) atan(bound)),      bound = sqrt(1 / min_density - 1)

`min_density` truncates every coordinate to where its density is at least that share of its
maximum; 0 truncates nothing. There is no rejection step: a seed gives the same noise on every
machine, in torch and NumPy, batched and single, padded and not.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Noise = NDArray[np.float64]

MAX_SEED = 2**64 - 1
SMALLEST = 2.0**-53  # e is at least this far from 0 and 1


def draw_noise(seed: int, size: int, position: int = 0) -> Noise:
    """e of the individual `seed` at `position`. -> (C,)

    Philox counters keyed by (seed, position); the top 52 bits of each word, centred in their
    cell, are exact in float64 and never 0 or 1. A shared individual is the one at position 0.
    """
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"An individual's seed must lie in [0, 2**64), not {seed}.")
    words = np.random.Philox(key=[np.uint64(seed), np.uint64(position)]).random_raw(size)
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def to_cauchy(noise: ArrayLike, min_density: float = 0.0) -> Noise:
    """e in (0, 1) -> standard Cauchy t, truncated at `min_density` of its maximum density."""
    if not 0 <= min_density <= 1:
        raise ValueError(f"min_density={min_density} is outside [0, 1].")
    e = np.asarray(noise, dtype=np.float64)
    return np.tan((2 * e - 1) * math.atan(noise_bound(min_density)))


def from_cauchy(t: ArrayLike, min_density: float = 0.0) -> Noise:
    """The inverse of `to_cauchy`, by the tail beyond |t|: 1/2 + atan(t)/pi rounds to 1."""
    t = np.asarray(t, dtype=np.float64)
    if (bound := noise_bound(min_density)) == 0:
        return np.full_like(t, 0.5)
    size, inverse = np.abs(t), 1 / bound  # 0 without truncation
    # atan(bound) - atan(|t|), numerator and denominator divided by the bound
    tail = np.arctan2(1 - size * inverse, size + inverse) / (2 * math.atan(bound))
    return np.clip(np.where(t < 0, tail, 1 - tail), SMALLEST, 1 - SMALLEST)


def noise_bound(min_density: float) -> float:
    """The largest |t| after truncation."""
    return math.sqrt(1 / min_density - 1) if min_density > 0 else math.inf


def check_noise(noise: ArrayLike, size: int) -> Noise:
    """Validate e given as numbers: one individual (C,) or one per row (B, C)."""
    e = np.asarray(noise, dtype=np.float64)
    if e.ndim not in (1, 2) or e.shape[-1] != size:
        raise ValueError(
            f"An individual of this model is ({size},) numbers, or (rows, {size}) for a batch; "
            f"got shape {e.shape}."
        )
    if not ((e > 0) & (e < 1)).all():
        raise ValueError("An individual's numbers must be strictly between 0 and 1.")
    return e
