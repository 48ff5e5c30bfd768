"""Individuals: the list of one visitor. Draw, name, save and load them.

Every function returns a new list, so visitors never share one.
"""

from __future__ import annotations

import itertools
import re
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from causal_qwen.individuals.individual import Individual, latent_size

if TYPE_CHECKING:
    from causal_qwen.modeling.protocols import CausalModel

TEMPERATURE = 1.0
FIRST = {"Ada": 1, "Bo": 2, "Chen": 3}  # names and seeds
MAX_INDIVIDUALS = 12  # of one visitor
MAX_NAME = 24  # characters
MAX_SEED = 18  # digits
SUFFIX = ".safetensors"


def draw_first(model: CausalModel) -> list[Individual]:
    """The individuals of every new visitor."""
    return [
        Individual.draw(model, seed=seed, name=name, temperature=TEMPERATURE)
        for name, seed in FIRST.items()
    ]


def draw(
    individuals: Sequence[Individual],
    model: CausalModel,
    name: str | None,
    seed: str | None = "",
    temperature: float = TEMPERATURE,
    persistence: float | None = None,
) -> list[Individual]:
    """The list with one more; an empty seed is drawn at random."""
    number = parse_seed(seed)
    drawn = Individual.draw(
        model,
        seed=number,
        temperature=temperature,
        persistence=persistence,
        name=parse_name(name, number),
    )
    return add(individuals, drawn)


def parse_name(text: str | None, seed: int) -> str:
    """The name in a field; one of the seed if the field is empty."""
    return (text or "").strip() or f"No. {seed}"


def parse_seed(text: str | None) -> int:
    """The seed in a field; a random one if the field is empty."""
    if not (text := (text or "").strip()):
        return secrets.randbelow(10**6)
    if not text.isdecimal() or len(text) > MAX_SEED:
        raise ValueError(
            f"The seed {text[:MAX_SEED]!r} is not a whole number of up to {MAX_SEED} digits; "
            "leave it empty for a random one."
        )
    return int(text)


def load(
    individuals: Sequence[Individual], path: str | Path, model: CausalModel | int
) -> list[Individual]:
    """The list with one more, from a file of `save` or `Individual.save`.

    `model` is that of the individuals, or its latent size C.
    """
    file = Path(path).name
    try:
        loaded = Individual.load(path)
    except ValueError as error:
        raise ValueError(f"{file} is not a saved individual.") from error
    if loaded.size != (size := latent_size(model)):
        raise ValueError(
            f"{file} has {loaded.size} coordinates and this model's individuals have {size}: it "
            "belongs to another model."
        )
    name = loaded.name or Path(path).stem
    numbered = (f"{name} {number}" for number in itertools.count(2))
    free = (one for one in itertools.chain([name], numbered) if one not in names(individuals))
    return add(individuals, replace(loaded, name=next(free)))


def add(individuals: Sequence[Individual], new: Individual) -> list[Individual]:
    """The list with one more, whose name is short and not taken."""
    name = " ".join((new.name or "").split())
    if not 0 < len(name) <= MAX_NAME:
        shown = name[:MAX_NAME]
        raise ValueError(f"The name {shown!r} has {len(name)} characters; use 1 to {MAX_NAME}.")
    if name in names(individuals):
        raise ValueError(f"The name {name} is taken; choose another one.")
    if len(individuals) >= MAX_INDIVIDUALS:
        raise ValueError(
            f"There are {MAX_INDIVIDUALS} individuals already; reload the page to start over."
        )
    return [*individuals, replace(new, name=name)]


def save(individual: Individual, directory: Path) -> str:
    """-> a file named after the individual, in a new directory below `directory`"""
    name = re.sub(r"[^\w-]+", "-", individual.name or "individual") + SUFFIX
    path = Path(tempfile.mkdtemp(dir=directory)) / name
    individual.save(path)
    return str(path)


def names(individuals: Sequence[Individual]) -> list[str]:
    return [str(individual.name) for individual in individuals]


def select(individuals: Sequence[Individual], chosen: Sequence[str] | None) -> list[Individual]:
    """The individuals with these names, each once."""
    chosen = chosen or []
    if len(chosen) > MAX_INDIVIDUALS:
        raise ValueError(f"{len(chosen)} individuals are selected; select 1 to {MAX_INDIVIDUALS}.")
    return [find(individuals, name) for name in dict.fromkeys(chosen)]


def find(individuals: Sequence[Individual], name: str | None) -> Individual:
    found = next((one for one in individuals if one.name == name), None)
    if found is None:
        raise ValueError("No individual is selected; select one of yours.")
    return found
