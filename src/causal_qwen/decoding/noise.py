"""Noise of one call of `generate`, row by row.

    u = loc_U + T kappa (c scale_U t + (1 - c) b eps)

    c = 1 with probability p at every position, else 0

T is the individual's temperature, kappa the model's noise gain. t is the individual's own, the same
at all positions; eps is chance, drawn from its seed at every position, and so is the coin that
decides c. p is its persistence; 0 is noise of its own at every position, scaled by scale_U.

Hazard: in a sum c t + (1 - c) eps of heavy tails the larger part decides. An individual with one
far coordinate of t would drown eps everywhere; the coin leaves 1 - p of its positions to chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from causal_qwen.decoding.settings import DecodingSettings, check_amplitude
from causal_qwen.individuals import Individual, Noise, resolve_individuals, to_cauchy

RANDOM_SEEDS = 2**62  # range of the seeds drawn when a call gives no individual


class NoiseGains(NamedTuple):
    """kappa, the model's unit of temperature; fresh noise may have its own."""

    shared: float = 1.0
    fresh: float | None = None

    def amplitude(self, individual: Individual) -> float:
        """T kappa of an individual."""
        own = self.fresh if individual.is_fresh else None
        return check_amplitude(individual.temperature, self.shared if own is None else own)

    def own_share(self, individual: Individual, position: int) -> float:
        """c: the weight of t, and 1 - c that of eps; 1 without chance."""
        if not individual.has_chance:
            return 1.0
        return float(individual.coin(position) < individual.persistence)

    def noise(self, individuals: Sequence[Individual], positions: Sequence[int]) -> Noise:
        """T kappa c t of every row at its position. -> (B, C)"""
        noise = []
        for one, position in zip(individuals, positions, strict=True):
            weight = self.amplitude(one) * self.own_share(one, position)
            noise.append(weight * one.cauchy(position))
        return np.stack(noise)

    def exogenous(
        self,
        individuals: Sequence[Individual],
        sources: Sequence[Individual] | None,
        positions: Sequence[int],
    ) -> Noise | None:
        """T kappa (1 - c) eps of every row, eps from its individual or from `sources`; None if
        there is none. -> (B, C)

        T and truncation are the individual's. Sources beside an individual that leaves nothing to
        chance (p = 1) add T kappa eps with the kappa of fresh noise, as in `sampling`.
        """
        if sources is None and not any(one.has_chance for one in individuals):
            return None
        noise = np.zeros((len(individuals), individuals[0].size))
        for row, (one, position) in enumerate(zip(individuals, positions, strict=True)):
            source = None if sources is None else sources[row]
            if one.has_chance:
                eps = one.chance(position) if source is None else truncated(source, one, position)
                noise[row] = self.amplitude(one) * (1 - self.own_share(one, position)) * eps
            elif source is not None:
                unit = check_amplitude(one.temperature, self.amplitude(source))
                noise[row] = unit * truncated(source, one, position)
        return noise


def truncated(source: Individual, individual: Individual, position: int) -> Noise:
    """eps of a source, truncated like the individual. -> (C,)"""
    return to_cauchy(source.at(position), individual.min_density)


class UNoise(NamedTuple):
    """Noise that moves the individual at one position of every row: NumPy arrays or tensors."""

    values: Any  # T kappa times standard Cauchy noise, (B, C)
    regime: str = "individual"  # scaled by scale_U ("individual") or by b ("location")
    exogenous: Any = None  # the same, on top, always scaled by b, (B, C)


def stack_noise(noises: Sequence[UNoise | None]) -> UNoise | None:
    """The noise of rows of different modes: what is scaled by scale_U, and what by b; 0 in rows
    that nothing moves, None if there are no others. (B, C)"""
    if (moved := next((one for one in noises if one is not None), None)) is None:
        return None
    zero = np.zeros_like(moved.values)
    own, exogenous = [], []
    for one in noises:
        if one is None:
            one = UNoise(zero)
        is_own = one.regime == "individual"
        own.append(one.values if is_own else zero)
        extra = one.exogenous if is_own else one.values
        exogenous.append(zero if extra is None else extra)
    return UNoise(np.concatenate(own), "individual", np.concatenate(exogenous))


class DecodingNoise:
    """The noise of every row of a call, at every position. Empty in modes without noise.

    A call of `prompts` x `copies` rows takes the individuals of its settings, or draws seeds.
    """

    def __init__(
        self,
        settings: DecodingSettings,
        prompts: int,
        copies: int,
        size: int,
        draw_seeds: Callable[[int], list[int]],
    ) -> None:
        self.settings = settings
        self.gains = NoiseGains(settings.noise_gain, settings.fresh_noise_gain)
        self.individuals: list[Individual] = []  # one per row
        self.sources: list[Individual] | None = None  # of the exogenous noise, one per row
        if not settings.is_noisy:
            return
        given = settings.individual
        self.individuals = resolve_individuals(
            draw_seeds(prompts * copies) if given is None else given,
            prompts,
            copies,
            size,
            fresh=settings.is_fresh,
            min_density=settings.min_density,
            temperature=settings.temperature,
            persistence=settings.persistence,
            explicit=settings.named,
        )
        self._are_moved()  # refuses amplitudes before the prompt is read
        if settings.exogenous is not None:
            self.sources = resolve_individuals(
                settings.exogenous, prompts, copies, size, fresh=True
            )

    def avoided_repeats(self) -> list[int]:
        """n of `avoid_repeats` for every row; 0 without noise, where the base model decides."""
        n = self.settings.avoid_repeats
        return [n if is_moved else 0 for is_moved in self._are_moved()]

    def kept_words(self) -> list[bool]:
        """Whether `whole_words` acts, for every row; not without noise."""
        return [self.settings.whole_words and is_moved for is_moved in self._are_moved()]

    def _are_moved(self) -> list[bool]:
        return [self.gains.amplitude(one) > 0 for one in self.individuals]

    def at(self, positions: Sequence[int]) -> UNoise | None:
        """The noise of every row at its position, counted among tokens that are not padding; None
        if nothing is moved. (B,) -> (B, C)"""
        if not any(individual.temperature > 0 for individual in self.individuals):
            return None
        regime = "location" if self.settings.mode == "sampling" else "individual"
        exogenous = self.gains.exogenous(self.individuals, self.sources, positions)
        return UNoise(self.gains.noise(self.individuals, positions), regime, exogenous)


class JoinedNoise(DecodingNoise):
    """The rows of several calls whose choices follow the same rules, in one batch."""

    def __init__(self, calls: Sequence[DecodingNoise]) -> None:
        self.calls, self.settings = calls, calls[0].settings
        self.individuals = [one for call in calls for one in call.individuals]

    def avoided_repeats(self) -> list[int]:
        return [n for call in self.calls for n in call.avoided_repeats()]

    def kept_words(self) -> list[bool]:
        return [is_kept for call in self.calls for is_kept in call.kept_words()]

    def at(self, positions: Sequence[int]) -> UNoise | None:
        """The noise of calls with one row each; 0 in rows that nothing moves. (B,) -> (B, C)"""
        rows = zip(self.calls, positions, strict=True)
        return stack_noise([call.at([position]) for call, position in rows])
