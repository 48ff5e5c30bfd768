"""Individuals: those that the server keeps, one file each.

A file is written whole or not at all (`Individual.save`), so a server that is killed loses nothing
that it has confirmed. The name of a file is the individual's name.
"""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from causal_qwen.decoding.settings import draw_seed
from causal_qwen.engines.engine import Engine
from causal_qwen.individuals import OWN_FIELDS, Individual
from causal_qwen.serving.requests import Body, Number, RequestError, Seed, about

SUFFIX = ".safetensors"
NAME = re.compile(r"(?!\d+$)\w[\w .-]{0,58}\w|[^\W\d]")  # digits are a seed; a file's name


class DrawRequest(Body):
    name: str | None = about("Save the individual under this name.")
    seed: Seed | None = about("Its seed; drawn if left out.")
    temperature: Number | None = about("Strength of its noise. Default: the model's.")
    min_density: Number | None = about("Likelihood truncation. Default: the model's.")
    persistence: Number | None = about("Share of noise that is its own. Default: the model's.")

    def draw(self, backend: Engine) -> Individual:
        """An individual of the model."""
        given = self.model_dump(exclude_none=True, exclude={"name", "seed"})
        seed = draw_seed() if self.seed is None else self.seed
        try:
            settings = backend.resolve(causal_mode="causal", **given)
            own = {field: getattr(settings, field) for field in OWN_FIELDS}
            return Individual.draw(backend.size, seed=seed, **own)
        except ValueError as error:
            raise RequestError(str(error)) from None


class IndividualStore:
    """A directory of individuals of one model."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory, self.size = directory, size
        self._lock = threading.Lock()

    def find(self, name: str) -> Individual:
        path = self._path(name)
        if not path.is_file():
            raise _absent(name)
        found = Individual.load(path)
        if found.size != self.size:
            raise RequestError(
                f"The individual {name!r} has {found.size} coordinates and this model's have "
                f"{self.size}: it is another model's.",
                "individual",
            )
        return found

    def save(self, individual: Individual, name: str) -> Individual:
        """A new individual under a name that is not taken."""
        path = self._path(name)
        self.directory.mkdir(parents=True, exist_ok=True)
        named = replace(individual, name=name)
        try:
            with self._lock:
                named.save(path)
        except FileExistsError:
            words = f"The name {name!r} is taken; choose another."
            raise RequestError(words, "name", 409) from None
        return named

    def delete(self, name: str) -> None:
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            raise _absent(name) from None

    def names(self) -> list[str]:
        return sorted(file.name.removesuffix(SUFFIX) for file in self.directory.glob(f"*{SUFFIX}"))

    def _path(self, name: str) -> Path:
        if NAME.fullmatch(name) is None:
            raise RequestError(
                "An individual's name has up to 60 letters, digits, spaces, dots and hyphens, and "
                f"is not a number, unlike {name[:60]!r}.",
                "name",
            )
        return self.directory / f"{name}{SUFFIX}"


def _absent(name: str) -> RequestError:
    words = f"There is no individual {name!r}; draw one, or send a seed."
    return RequestError(words, "individual", 404)


def describe(individual: Individual) -> dict[str, Any]:
    """For JSON."""
    shown = ("name", "seed", "size", *OWN_FIELDS)
    return {"object": "individual", **{name: getattr(individual, name) for name in shown}}
