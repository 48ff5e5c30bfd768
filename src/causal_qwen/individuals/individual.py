"""Individual: the noise that makes an individual this one and no other.

An individual is e in (0, 1)^C, in float64. It becomes standard Cauchy noise by the inverse CDF,

    t = tan((2e - 1) atan(bound)),      bound = sqrt(1 / min_density - 1),

where `min_density` cuts every coordinate to where its density is at least that share of its
maximum (likelihood truncation; 0 cuts nothing). No rejection, no dependence on the machine:
a seed gives the same individual in torch and NumPy, batched and alone, padded and not.

`Individual` is that noise as an object: drawn, kept, mixed, truncated, and given to `generate`.

This module knows NumPy only.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from causal_qwen.individuals.noise import Noise, check_noise, draw_noise, from_cauchy, to_cauchy

SAVED = ("seed", "min_density", "temperature", "name", "offset")


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


@dataclass(frozen=True, eq=False, repr=False)
class Individual:
    """Somebody: the noise that one text, or every text, is spoken with.

    `noise` (C,) is one e for every position: the individual that speaks a whole text. `noise`
    (N, C) is one e per position, for the first N; later ones, or all of them when N = 0, are
    drawn from `seed` as they are needed (*fresh* noise). `offset` moves positions: what a fresh
    individual does at p, it does at p + offset.

    An individual brings its own likelihood truncation and temperature into every call; kappa,
    the unit in which temperature is counted, belongs to the model.
    """

    noise: Noise
    seed: int | None = None
    min_density: float = 0.0
    temperature: float = 1.0
    name: str | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        e = np.array(self.noise, dtype=np.float64)  # a copy: nobody else can change it
        check_noise(e, e.shape[-1] if e.ndim else 1)
        e.setflags(write=False)
        object.__setattr__(self, "noise", e)
        to_cauchy(0.5, self.min_density)  # refuses what is outside [0, 1]
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature!r} must be a number of at least 0.")

    @classmethod
    def draw(
        cls,
        model: Any,
        *,
        seed: int,
        fresh: bool = False,
        min_density: float | None = None,
        temperature: float | None = None,
        name: str | None = None,
    ) -> Individual:
        """The individual `seed` of a model, or of a latent size C.

        Truncation and temperature are the model's saved ones (else 0 and 1) unless given, so that
        it says what `generate(individual=seed)` says; `fresh` noise changes at every position.
        """
        saved = getattr(model, "generation_config", None)
        density = first_given(min_density, getattr(saved, "min_density", None), 0.0)
        heat = first_given(temperature, getattr(saved, "temperature", None), 1.0)
        size = latent_size(model)
        e = draw_noise(seed, 0 if fresh else size)
        return cls(e.reshape(0, size) if fresh else e, seed, density, heat, name)

    @property
    def size(self) -> int:
        """C"""
        return self.noise.shape[-1]

    @property
    def is_fresh(self) -> bool:
        return self.noise.ndim == 2

    def at(self, position: int) -> Noise:
        """e at a position, counted among the tokens that are no padding. -> (C,)"""
        if not self.is_fresh:
            return self.noise
        place = position - self.offset
        if place < 0:
            raise ValueError(f"{self!r} begins at position {self.offset}, not at {position}.")
        if place < len(self.noise):
            return self.noise[place]
        if self.seed is None:
            raise ValueError(
                f"{self!r} has noise for {len(self.noise)} positions and no seed for more."
            )
        return draw_noise(self.seed, self.size, place)

    def cauchy(self, position: int = 0) -> Noise:
        """The standard Cauchy noise t at a position, truncated. -> (C,)"""
        return to_cauchy(self.at(position), self.min_density)

    def mix(self, other: Individual, t: float) -> Individual:
        """Somebody between the two: (1 - t) x1 + t x2 in Cauchy space, 0 <= t <= 1.

        A Cauchy is 1-stable: for independent, untruncated individuals the mix is again exactly
        standard Cauchy, as typical as its parents. Truncated ones stay inside their bound.
        """
        if not 0 <= t <= 1:
            raise ValueError(f"t={t} is outside [0, 1]; 0 is the first individual, 1 the second.")
        for what in ("size", "min_density", "temperature"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise ValueError(
                    f"Individuals of {what} {mine:g} and {theirs:g} do not mix; make them equal."
                )
        if self.is_fresh or other.is_fresh:
            raise ValueError("Only shared individuals mix; fresh noise has no end to be mixed.")
        x = (1 - t) * self.cauchy() + t * other.cauchy()
        return replace(self, noise=from_cauchy(x, self.min_density), seed=None, name=None)

    def truncate(self, min_density: float) -> Individual:
        """The same e under another likelihood truncation."""
        return replace(self, min_density=min_density)

    def shift(self, by: int) -> Individual:
        """The same noise, `by` positions later; a shared individual is the same everywhere."""
        return replace(self, offset=self.offset + by) if self.is_fresh else self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write e into one safetensors file, with the rest as JSON in its header; whole or not."""
        from safetensors.numpy import save_file

        path = Path(path)
        fields = {name: getattr(self, name) for name in SAVED}
        handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            save_file({"noise": self.noise}, unfinished, {"individual": json.dumps(fields)})
            Path(unfinished).replace(path)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Individual:
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is no file; save an individual with .save(path).")
        try:
            with safe_open(path, "numpy") as file:
                fields = json.loads((file.metadata() or {})["individual"])
                return cls(file.get_tensor("noise"), **fields)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no individual ({error}).") from error

    def __eq__(self, other: object) -> bool:
        """The same noise, truncation and temperature; names do not count."""
        if not isinstance(other, Individual):
            return NotImplemented
        return self._deeds() == other._deeds() and np.array_equal(self.noise, other.noise)

    def __hash__(self) -> int:
        return hash((*self._deeds(), self.noise.tobytes()))

    def __repr__(self) -> str:
        parts = [] if self.name is None else [repr(self.name)]
        parts += [] if self.seed is None else [f"seed={self.seed}"]
        parts += [f"size={self.size}"]
        if self.is_fresh:
            parts += ["fresh" if not len(self.noise) else f"positions={len(self.noise)}"]
        for name, usual in (("min_density", 0.0), ("temperature", 1.0), ("offset", 0)):
            if (value := getattr(self, name)) != usual:
                parts.append(f"{name}={value:g}")
        return f"Individual({', '.join(parts)})"

    def _deeds(self) -> tuple[Any, ...]:
        """What, beside the noise it holds, makes it say what it says."""
        later = (self.seed, self.offset) if self.is_fresh else ()
        return (self.noise.shape, self.min_density, self.temperature, *later)


def resolve_individuals(
    who: Any,
    prompts: int,
    copies: int,
    size: int,
    *,
    fresh: bool = False,
    min_density: float = 0.0,
    temperature: float = 1.0,
    asked: Mapping[str, Any] | None = None,
) -> list[Individual]:
    """Who speaks on each of the prompts x copies rows, however they were given.

    `who` is an `Individual` or a list of them, one or more seeds (see `row_seeds`), or e itself,
    (C,) or (rows, C), which then is shared by all positions. Truncation, temperature and `fresh`
    are those of seeds and e; an `Individual` has its own, and what was `asked` for in the same
    call by name must not contradict it.
    """
    rows = prompts * copies
    if isinstance(who, Individual):
        who = [who]
    if isinstance(who, Sequence) and any(isinstance(one, Individual) for one in who):
        for one in who:
            if not isinstance(one, Individual):
                raise ValueError(f"individual={one!r} stands among Individuals and is none.")
            _check_fit(one, size, asked or {})
        return _spread(list(who), prompts, copies)
    if (seeds := as_seeds(who)) is not None:
        return [
            Individual.draw(
                size, seed=seed, fresh=fresh, min_density=min_density, temperature=temperature
            )
            for seed in row_seeds(seeds, prompts, copies)
        ]
    if isinstance(who, (str, numbers.Number)):
        raise ValueError(
            f"individual={who!r} is neither a seed, nor a list of seeds, nor the noise itself, nor "
            "an Individual."
        )
    if (asked or {}).get("fresh_noise"):
        raise ValueError("fresh_noise=True needs seeds: noise given as numbers is shared.")
    noise = np.atleast_2d(check_noise(who, size))
    if len(noise) not in (1, prompts, rows):
        raise ValueError(
            f"{len(noise)} individuals were given for {rows} texts; give 1, {prompts} or {rows}."
        )
    people = [Individual(e, None, min_density, temperature) for e in noise]
    return _spread(people, prompts, copies)


def parse_individual(name: str) -> int | Individual:
    """Somebody named on a command line: a seed, or the file of a saved individual."""
    if name.isdecimal():
        return int(name)
    if not Path(name).is_file():
        raise FileNotFoundError(
            f"{name} is neither a seed (a whole number of at least 0) nor a saved individual."
        )
    return Individual.load(name)


def latent_size(model: Any) -> int:
    """C of a model, or C itself."""
    if isinstance(model, numbers.Integral):
        return int(model)
    size = getattr(getattr(model, "config", None), "causal_size", None)
    if size is None:
        raise TypeError(f"{type(model).__name__} is neither a causal model nor a latent size.")
    return int(size)


def as_seeds(who: Any) -> int | list[int] | None:
    """`who` as one seed or a list of them, or None if it is something else."""
    who = who.tolist() if hasattr(who, "tolist") else who  # arrays and tensors of seeds
    if isinstance(who, numbers.Integral):
        return int(who)
    is_list = isinstance(who, (list, tuple, range))
    if is_list and all(isinstance(seed, numbers.Integral) for seed in who):
        return [int(seed) for seed in who]
    return None


def _check_fit(one: Individual, size: int, asked: Mapping[str, Any]) -> None:
    if one.size != size:
        raise ValueError(
            f"{one!r} has {one.size} coordinates and the model's individuals have {size}: it is "
            "another model's."
        )
    own = {
        "temperature": one.temperature,
        "min_density": one.min_density,
        "fresh_noise": one.is_fresh,
    }
    for name, value in own.items():
        if (wish := asked.get(name)) is not None and wish != value:
            raise ValueError(
                f"{name}={wish!r} contradicts {one!r}, which brings its own; leave it out, or "
                "change the individual with dataclasses.replace or .truncate."
            )


def _spread(people: list[Individual], prompts: int, copies: int) -> list[Individual]:
    rows = prompts * copies
    if len(people) not in (1, prompts, rows):
        raise ValueError(
            f"{len(people)} individuals were given for {rows} texts; give 1, {prompts} or {rows}."
        )
    each = rows // len(people)
    return [one for one in people for _ in range(each)]


def first_given(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)
