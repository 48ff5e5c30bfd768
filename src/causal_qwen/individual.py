"""Individual: the noise that makes an individual this one and no other.

An individual is e in (0, 1)^C, in float64. It becomes standard Cauchy noise by the inverse CDF,

    t = tan((2e - 1) atan(bound)),      bound = sqrt(1 / min_density - 1),

where `min_density` cuts every coordinate to where its density is at least that share of its
maximum (likelihood truncation; 0 cuts nothing). No rejection, no dependence on the machine:
a seed gives the same individual in torch and NumPy, batched and alone, padded and not.

This module knows NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Noise = NDArray[np.float64]

MAX_SEED = 2**64 - 1


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
    bound = math.sqrt(1 / min_density - 1) if min_density > 0 else math.inf
    return np.tan((2 * e - 1) * math.atan(bound))


def check_noise(noise: ArrayLike, size: int) -> Noise:
    """e given by hand: one individual (C,) or one per row (B, C)."""
    e = np.asarray(noise, dtype=np.float64)
    if e.ndim not in (1, 2) or e.shape[-1] != size:
        raise ValueError(
            f"An individual of this model is ({size},) numbers, or (rows, {size}) for a batch; "
            f"got shape {e.shape}."
        )
    if not ((e > 0) & (e < 1)).all():
        raise ValueError("An individual's numbers must lie strictly between 0 and 1.")
    return e


def row_seeds(individual: int | Sequence[int], prompts: int, copies: int) -> list[int]:
    """One seed per generated row, prompt by prompt.

    One seed is one individual for all prompts; its further copies (`num_return_sequences`) are
    its successors. A list names every row, or every prompt.
    """
    if isinstance(individual, int):
        return [individual + copy for _ in range(prompts) for copy in range(copies)]
    seeds = [int(seed) for seed in individual]
    if len(seeds) == 1:
        return row_seeds(seeds[0], prompts, copies)
    if len(seeds) == prompts * copies:
        return seeds
    if len(seeds) == prompts:
        return [seed + copy for seed in seeds for copy in range(copies)]
    raise ValueError(
        f"{len(seeds)} individuals were given for {prompts} prompts with {copies} texts each; "
        f"give 1, {prompts} or {prompts * copies}."
    )
