"""Individuals: fixed noise that makes decoding deterministic. NumPy only.

    seed, name, file or numbers -> e in (0, 1)^C -> standard Cauchy noise t

The same on every machine; a name is a seed by its hash.

    t = tan((2e - 1) atan(bound)),      bound = sqrt(1 / min_density - 1)

`min_density` truncates every coordinate to where its density is at least that share of its
maximum; 0 truncates nothing. There is no rejection step: a seed gives the same noise in torch and
NumPy, batched and single, padded and not.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Noise = NDArray[np.float64]

MAX_SEED = 2**64 - 1
SEEDS = 2**53  # drawn seeds and those of names lie below it: every JSON reader keeps them exactly
SMALLEST = 2.0**-53  # e is at least this far from 0 and 1
SUFFIX = ".safetensors"
SAVED = ("seed", "min_density", "temperature", "name", "offset", "persistence")
OWN_FIELDS = ("temperature", "min_density", "persistence")  # beside the noise itself


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


@dataclass(frozen=True, eq=False, repr=False)
class Individual:
    """Fixed noise that makes `causal` decoding deterministic.

    `noise` (C,) is one e, *shared* by all positions. With `noise` (0, C) every position has an e of
    its own, drawn from `seed` on demand (*fresh* noise).
    `offset` moves fresh noise: position p + offset has the noise that p would have without it.

    `persistence` is the share of positions at which a shared individual's noise is its own; at the
    others, `chance` is drawn. Persistence, truncation and temperature are its own in every call.
    """

    noise: Noise
    seed: int | None = None
    min_density: float = 0.0
    temperature: float = 1.0
    name: str | None = None
    offset: int = 0
    persistence: float = 1.0

    def __post_init__(self) -> None:
        e = np.array(self.noise, dtype=np.float64)  # a copy that no caller can change
        check_noise(e, e.shape[-1] if e.ndim else 1)
        if e.ndim == 2 and (len(e) or self.seed is None):
            raise ValueError(
                "Noise that differs between positions is drawn: Individual.draw(fresh=True)."
            )
        e.setflags(write=False)
        object.__setattr__(self, "noise", e)
        to_cauchy(0.5, self.min_density)  # raises if outside [0, 1]
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature!r} must be a number of at least 0.")
        if not 0 <= self.persistence <= 1:
            raise ValueError(f"persistence={self.persistence!r} is outside [0, 1].")

    @classmethod
    def draw(
        cls,
        model: Any,
        *,
        seed: int | str,
        fresh: bool = False,
        min_density: float | None = None,
        temperature: float | None = None,
        persistence: float | None = None,
        name: str | None = None,
    ) -> Individual:
        """The individual of a seed or a name, of a model or a latent size C, by default with the
        model's truncation, temperature and persistence; `fresh` noise changes at every position."""
        if isinstance(seed, str):
            name, seed = name or seed, seed_of(seed)
        given = {"min_density": min_density, "temperature": temperature, "persistence": persistence}
        saved = getattr(model, "generation_config", None)
        named = {
            n: getattr(saved, n, None) if value is None else value for n, value in given.items()
        }
        own: dict[str, Any] = {n: value for n, value in named.items() if value is not None}
        size = latent_size(model)
        e = draw_noise(seed, 0 if fresh else size)
        return cls(e.reshape(0, size) if fresh else e, seed, name=name, **own)

    @property
    def size(self) -> int:
        """C"""
        return self.noise.shape[-1]

    @property
    def is_fresh(self) -> bool:
        return self.noise.ndim == 2

    @property
    def own_share(self) -> float:
        """The persistence; 0 for fresh noise, which no two positions share."""
        return 0.0 if self.is_fresh else self.persistence

    def at(self, position: int) -> Noise:
        """e at a position; padding is not counted. -> (C,)"""
        if not self.is_fresh:
            return self.noise
        assert self.seed is not None
        return draw_noise(self.seed, self.size, self._index(position))

    def cauchy(self, position: int = 0) -> Noise:
        """The standard Cauchy noise t at a position, truncated. -> (C,)"""
        return to_cauchy(self.at(position), self.min_density)

    @property
    def has_chance(self) -> bool:
        """A part of the noise is drawn anew at every position, besides the shared part."""
        return self.persistence < 1 and not self.is_fresh

    def chance(self, position: int) -> Noise:
        """The standard Cauchy noise eps at a position, truncated: what persistence leaves to
        chance. Its seed is e itself: equal e is the same individual. -> (C,)"""
        return to_cauchy(self._drawn(position)[:-1], self.min_density)

    def coin(self, position: int) -> float:
        """A uniform number of the position, drawn with `chance`: below the persistence, a mixture
        takes the individual's own noise there."""
        return float(self._drawn(position)[-1])

    def _drawn(self, position: int) -> Noise:
        """Uniform numbers of a position: those of `chance`, then the coin. -> (C + 1,)"""
        digest = hashlib.blake2b(self.noise.tobytes(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
        return draw_noise(seed, self.size + 1, self._index(position))

    def _index(self, position: int) -> int:
        if position < self.offset:
            raise ValueError(f"{self!r} begins at position {self.offset}, not at {position}.")
        return position - self.offset

    def mix(self, other: Individual, t: float) -> Individual:
        """Interpolate: (1 - t) x1 + t x2 in Cauchy space, 0 <= t <= 1. Independent, untruncated
        individuals give an exact standard Cauchy again; truncated ones stay inside their bound."""
        if not 0 <= t <= 1:
            raise ValueError(f"t={t} is outside [0, 1]; 0 is the first individual, 1 the second.")
        for name in ("size", *OWN_FIELDS):
            first, second = getattr(self, name), getattr(other, name)
            if first != second:
                raise ValueError(
                    f"Individuals of {name} {first:g} and {second:g} do not mix; make them equal."
                )
        if self.is_fresh or other.is_fresh:
            raise ValueError("Only shared individuals mix; fresh noise is unbounded in length.")
        if t in (0, 1):
            return other if t else self
        x = (1 - t) * self.cauchy() + t * other.cauchy()
        return replace(self, noise=from_cauchy(x, self.min_density), seed=None, name=None)

    def truncate(self, min_density: float) -> Individual:
        """The same e under another likelihood truncation."""
        return replace(self, min_density=min_density)

    def shift(self, by: int) -> Individual:
        """The same noise, `by` positions later; noise that is the same everywhere stays."""
        is_moved = self.is_fresh or self.has_chance
        return replace(self, offset=self.offset + by) if is_moved else self

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write one safetensors file atomically: e, and the other fields as JSON in its header.
        A file that exists is replaced only with `overwrite`."""
        from safetensors.numpy import save

        from causal_qwen.outputs import whole_file

        named = {name: getattr(self, name) for name in SAVED}
        fields = json.dumps(named, default=lambda value: value.item())  # of NumPy's numbers
        metadata = {"individual": fields, "sha256": _hash(fields, self.noise)}
        with whole_file(path, overwrite) as partial:
            partial.write_bytes(save({"noise": self.noise}, metadata))  # with the umask

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Individual:
        """Read what `save` wrote, and check its hash."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is not a file; write one with Individual.save.")
        try:
            with safe_open(path, "numpy") as file:
                metadata, noise = file.metadata() or {}, file.get_tensor("noise")
            if metadata["sha256"] != _hash(fields := metadata["individual"], noise):
                raise ValueError("it was damaged")
            return cls(noise, **json.loads(fields))
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} holds no individual ({error}); restore it, or save it again."
            ) from None

    def __eq__(self, other: object) -> bool:
        """Same noise, truncation, temperature and persistence; the name is ignored."""
        if not isinstance(other, Individual):
            return NotImplemented
        return self._settings() == other._settings() and np.array_equal(self.noise, other.noise)

    def __hash__(self) -> int:
        return hash((*self._settings(), self.noise.tobytes()))

    def __repr__(self) -> str:
        parts = [] if self.name is None else [repr(self.name)]
        parts += [] if self.seed is None else [f"seed={self.seed}"]
        parts += [f"size={self.size}"]
        if self.is_fresh:
            parts.append("fresh")
        defaults = {"min_density": 0.0, "temperature": 1.0, "offset": 0, "persistence": 1.0}
        for name, default in defaults.items():
            if (value := getattr(self, name)) != default:
                parts.append(f"{name}={value:g}")
        return f"Individual({', '.join(parts)})"

    def _settings(self) -> tuple[Any, ...]:
        """Everything but the stored noise that affects decoding."""
        seed = self.seed if self.is_fresh else None
        offset = self.offset if self.is_fresh or self.has_chance else 0
        own = (getattr(self, name) for name in OWN_FIELDS)
        return (self.noise.shape, *own, seed, offset)


def _hash(fields: str, noise: Noise) -> str:
    """Of the fields as they are written, and e with its shape."""
    return hashlib.sha256(f"{fields}{noise.shape}".encode() + noise.tobytes()).hexdigest()


def resolve_individuals(
    individual: Any,
    prompts: int,
    copies: int,
    size: int,
    *,
    fresh: bool = False,
    min_density: float = 0.0,
    temperature: float = 1.0,
    persistence: float = 1.0,
    explicit: Mapping[str, Any] | None = None,
) -> list[Individual]:
    """One individual per generated row: prompts x copies of them.

    `individual` is an `Individual` or a list of them, one or more seeds (see `row_seeds`) or names,
    or e itself, (C,) or (rows, C), shared by all positions. Truncation, temperature, persistence
    and `fresh` apply to seeds, names and e. An `Individual` has its own; options that the caller
    set by name in the same call (`explicit`) must agree with it.
    """
    explicit = explicit or {}
    if isinstance(individual, str):
        individual = parse_individual(individual)
    elif isinstance(individual, list | tuple):
        individual = [parse_individual(one) if isinstance(one, str) else one for one in individual]
    own: Any = {"min_density": min_density, "temperature": temperature, "persistence": persistence}
    draw = partial(Individual.draw, size, fresh=fresh, **own)
    given = [individual] if isinstance(individual, Individual) else individual
    if isinstance(given, Sequence) and any(isinstance(item, Individual) for item in given):
        given = [draw(seed=one) if isinstance(one, int) else one for one in given]
        for item in given:
            _check_compatible(item, size, explicit)
        return _repeat(given, prompts, copies)
    if (seeds := as_seeds(individual)) is not None:
        return [draw(seed=seed) for seed in row_seeds(seeds, prompts, copies)]
    if isinstance(individual, numbers.Number):
        raise ValueError(
            f"individual={individual!r} is neither a seed, a name, noise in (0, 1), nor an "
            "Individual."
        )
    if explicit.get("persistence") == 0:
        raise ValueError("persistence=0 needs seeds: noise given as numbers is shared.")
    if fresh:
        persistence = 1.0
    noise = np.atleast_2d(check_noise(individual, size))
    shared = [Individual(e, None, min_density, temperature, persistence=persistence) for e in noise]
    return _repeat(shared, prompts, copies)


def row_seeds(individual: int | Sequence[int], prompts: int, copies: int) -> list[int]:
    """One seed per generated row, prompt by prompt.

    One seed is one individual for all prompts; its further copies (`num_return_sequences`) are
    its successors. A list has one seed per row, or one per prompt.
    """
    seeds = [individual] if isinstance(individual, int) else [int(seed) for seed in individual]
    if len(seeds) == prompts * copies:
        return seeds
    _check_count(len(seeds), prompts, copies)
    per_prompt = seeds * prompts if len(seeds) == 1 else seeds
    return [seed + copy for seed in per_prompt for copy in range(copies)]


def parse_individual(text: str) -> int | Individual:
    """A seed, the file of a saved individual, or a name."""
    if text.isdecimal():
        return int(text)
    is_path = text.endswith(SUFFIX) or "/" in text or os.sep in text
    return Individual.load(text) if is_path or Path(text).is_file() else seed_of(text)


def seed_of(name: str) -> int:
    """The seed of a name, the same on every machine; case and outer spaces do not count."""
    if not (plain := name.strip().casefold()):
        raise ValueError("An individual's name is empty; give a name or a seed.")
    return int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=8).digest()) % SEEDS


def latent_size(model: Any) -> int:
    """C of a model, or C itself."""
    if isinstance(model, numbers.Integral):
        return int(model)
    size = getattr(getattr(model, "config", None), "causal_size", None)
    if size is None:
        raise TypeError(f"{type(model).__name__} is neither a causal model nor a latent size.")
    return int(size)


def as_seeds(individual: Any) -> int | list[int] | None:
    """One seed or a list of them, or None for anything else."""
    if hasattr(individual, "tolist"):  # arrays and tensors
        individual = individual.tolist()
    if isinstance(individual, numbers.Integral):
        return int(individual)
    is_list = isinstance(individual, (list, tuple, range))
    if is_list and all(isinstance(seed, numbers.Integral) for seed in individual):
        return [int(seed) for seed in individual]
    return None


def _check_compatible(individual: Any, size: int, explicit: Mapping[str, Any]) -> None:
    if not isinstance(individual, Individual):
        raise ValueError(f"individual={individual!r} is not an Individual, unlike others listed.")
    if individual.size != size:
        raise ValueError(
            f"{individual!r} has {individual.size} coordinates and the model's individuals have "
            f"{size}: it is another model's."
        )
    own = {**vars(individual), "persistence": individual.own_share}
    for name in OWN_FIELDS:
        if (value := explicit.get(name)) is not None and value != own[name]:
            raise ValueError(
                f"{name}={value!r} contradicts {individual!r}, which has its own; omit {name}, or "
                "change the individual with dataclasses.replace or .truncate."
            )


def _repeat(individuals: Sequence[Individual], prompts: int, copies: int) -> list[Individual]:
    _check_count(len(individuals), prompts, copies)
    repeats = prompts * copies // len(individuals)
    return [individual for individual in individuals for _ in range(repeats)]


def _check_count(count: int, prompts: int, copies: int) -> None:
    rows = prompts * copies
    if count not in (1, prompts, rows):
        raise ValueError(
            f"{count} individuals were given for {prompts} prompts and {rows} texts; "
            f"give 1, {prompts} or {rows}."
        )
