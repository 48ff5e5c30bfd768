"""People: the individuals of one visitor, drawn, named, kept in files and brought back.

A visitor's people are a list that belongs to nobody else; every function returns a new one.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.playground.limits import NAME_LETTERS, PEOPLE

TEMPERATURE, TRUNCATION = 4.0, 0.05  # with which individuals differ and a small model stays fluent
STARTERS = {"Ada": 1, "Bo": 2, "Chen": 3}
SUFFIX = ".safetensors"
SEED_DIGITS = 18


def meet(model: CausalModel) -> list[Individual]:
    """Those whom everybody meets first."""
    return [_draw(model, seed, name, TEMPERATURE, TRUNCATION) for name, seed in STARTERS.items()]


def draw(
    people: Sequence[Individual],
    model: CausalModel,
    name: str,
    seed: str = "",
    temperature: float = TEMPERATURE,
    truncation: float = TRUNCATION,
) -> list[Individual]:
    """One more; without a seed, somebody nobody has met."""
    number = seed_of(seed)
    return join(people, _draw(model, number, name or f"No. {number}", temperature, truncation))


def seed_of(text: str) -> int:
    """A seed as it was written; anybody's, if nothing was."""
    if not (text := text.strip()):
        return secrets.randbelow(10**6)
    if not text.isdecimal() or len(text) > SEED_DIGITS:
        raise ValueError(
            f"The seed {text[:SEED_DIGITS]!r} is no whole number of up to {SEED_DIGITS} digits; "
            "leave it empty for anybody."
        )
    return int(text)


def bring(people: Sequence[Individual], path: str | Path, model: CausalModel) -> list[Individual]:
    """One more, out of the file that `keep` or `Individual.save` wrote."""
    try:
        someone = Individual.load(path)
    except ValueError as error:
        raise ValueError(f"{Path(path).name} holds no individual.") from error
    size = model.config.causal_size
    if someone.size != size:
        raise ValueError(
            f"{Path(path).name} has {someone.size} coordinates and this model's individuals have "
            f"{size}: it is another model's."
        )
    name = someone.name or Path(path).stem
    numbered = (f"{name} {number}" for number in itertools.count(2))
    free = next(one for one in itertools.chain([name], numbered) if one not in names(people))
    return join(people, replace(someone, name=free))


def join(people: Sequence[Individual], someone: Individual) -> list[Individual]:
    """The list with somebody new, whose name is short and nobody else's."""
    name = " ".join((someone.name or "").split())
    if not name or len(name) > NAME_LETTERS:
        raise ValueError(f"A name has 1 to {NAME_LETTERS} letters; {name!r} has {len(name)}.")
    if name in names(people):
        raise ValueError(f"There is somebody called {name} already; choose another name.")
    if len(people) >= PEOPLE:
        raise ValueError(f"{PEOPLE} people are enough for one page; reload it to begin anew.")
    return [*people, replace(someone, name=name)]


def keep(someone: Individual, directory: Path) -> Path:
    """The file of an individual, called after it."""
    path = directory / (re.sub(r"[^\w-]+", "-", someone.name or "individual") + SUFFIX)
    someone.save(path)
    return path


def names(people: Sequence[Individual]) -> list[str]:
    return [str(one.name) for one in people]


def find(people: Sequence[Individual], name: str | None) -> Individual:
    found = next((one for one in people if one.name == name), None)
    if found is None:
        raise ValueError("Nobody is chosen; choose one of your individuals.")
    return found


def _draw(
    model: CausalModel, seed: int, name: str, temperature: float, truncation: float
) -> Individual:
    return Individual.draw(
        model, seed=seed, temperature=temperature, min_density=truncation, name=name
    )
