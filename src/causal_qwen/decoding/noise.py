"""Noise of one call of `generate`, row by row.

The amplitude of an individual's noise is T kappa: its temperature times the model's noise gain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.individuals.individual import Individual, resolve_individuals
from causal_qwen.individuals.noise import Noise, to_cauchy

RANDOM_SEEDS = 2**62  # range of the seeds drawn when a call gives no individual


class NoiseGains(NamedTuple):
    """kappa, the unit of temperature: one number, or one per row. Fresh noise may have its own."""

    shared: Any = 1.0
    fresh: Any = None

    def amplitude(self, individual: Individual, row: int = 0) -> float:
        """T kappa of an individual on a row."""
        has_own = individual.is_fresh and self.fresh is not None
        gains = np.asarray(self.fresh if has_own else self.shared, dtype=np.float64).reshape(-1)
        return float(individual.temperature * gains[row % len(gains)])

    def noise(self, individuals: Sequence[Individual], positions: Sequence[int]) -> Noise:
        """T kappa t of every row at its position. -> (B, C)"""
        rows = enumerate(zip(individuals, positions, strict=True))
        return np.stack([self.amplitude(one, row) * one.cauchy(at) for row, (one, at) in rows])

    def exogenous(
        self,
        individuals: Sequence[Individual],
        sources: Sequence[Individual],
        positions: Sequence[int],
    ) -> Noise:
        """T kappa eps of every row: T and truncation are the individual's, kappa is that of fresh
        noise, as in `sampling`. -> (B, C)"""
        rows = enumerate(zip(individuals, sources, positions, strict=True))
        return np.stack(
            [
                one.temperature
                * self.amplitude(source, row)
                * to_cauchy(source.at(position), one.min_density)
                for row, (one, source, position) in rows
            ]
        )


class UNoise(NamedTuple):
    """Noise that moves the individual at one position of every row: NumPy arrays or tensors."""

    values: Any  # T kappa times standard Cauchy noise, (B, C)
    regime: str = "individual"  # scaled by scale_U ("individual") or by b ("location")
    exogenous: Any = None  # the same, on top, always scaled by b, (B, C)


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
        self._shared: UNoise | None = None  # if it is the same at every position
        if not settings.is_noisy:
            return
        rows = prompts * copies
        for name in ("noise_gain", "fresh_noise_gain"):
            if (count := np.size(getattr(settings, name))) not in (1, rows):
                raise ValueError(f"{name} has {count} values for {rows} rows; pass 1 or {rows}.")
        given = settings.individual
        self.individuals = resolve_individuals(
            draw_seeds(rows) if given is None else given,
            prompts,
            copies,
            size,
            fresh=settings.fresh_noise,
            min_density=settings.min_density,
            temperature=settings.temperature,
            explicit=settings.named,
        )
        if settings.exogenous is not None:
            self.sources = resolve_individuals(
                settings.exogenous, prompts, copies, size, fresh=True
            )

    def at(self, positions: Sequence[int]) -> UNoise | None:
        """The noise of every row at its position, counted among tokens that are not padding; None
        if nothing is moved. (B,) -> (B, C)"""
        if not any(individual.temperature > 0 for individual in self.individuals):
            return None
        if self._shared is None or self.sources is not None:
            exogenous = None
            if self.sources is not None:
                exogenous = self.gains.exogenous(self.individuals, self.sources, positions)
            regime = "location" if self.settings.mode == "sampling" else "individual"
            noise = UNoise(self.gains.noise(self.individuals, positions), regime, exogenous)
            if any(individual.is_fresh for individual in self.individuals):
                return noise
            self._shared = noise
        return self._shared
