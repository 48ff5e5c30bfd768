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
MAX_SAVED = 100_000
NAME = re.compile(r"(?!\d+$)\w[\w .-]{0,58}\w|[^\W\d]")  # digits are a seed; a file's name


class DrawRequest(Body):
    name: str | None = about("Save the individual under this name.")
    seed: Seed | None = about("Its seed; drawn if left out.")
    temperature: Number | None = about("Strength of its noise. Default: the model's.")
    min_density: Number | None = about("Likelihood truncation. Default: the model's.")
    persistence: Number | None = about("Share of noise that is its own. Default: the model's.")


class IndividualStore:
    """A directory of individuals of one model."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory, self.size = directory, size
        self._lock = threading.Lock()

    def find(self, name: str) -> Individual:
        path = self._path(name)
        if not path.is_file():
            raise RequestError(
                f"There is no individual {name!r}; draw one, or send a seed.", "individual", 404
            )
        try:
            found = Individual.load(path)
        except ValueError as error:
            words = f"The individual {name!r} is damaged ({error})."
            raise RequestError(words, None, 500) from None
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
        with self._lock:
            if path.exists():
                raise RequestError(f"The name {name!r} is taken; choose another.", "name", 409)
            self.directory.mkdir(parents=True, exist_ok=True)
            if len(self.names()) >= MAX_SAVED:
                raise RequestError(f"{MAX_SAVED:,} individuals are saved; delete some.", None, 409)
            named = replace(individual, name=name)
            named.save(path)
        return named

    def delete(self, name: str) -> None:
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            raise RequestError(f"There is no individual {name!r}.", "individual", 404) from None

    def names(self) -> list[str]:
        if not self.directory.is_dir():
            return []
        return sorted(file.name.removesuffix(SUFFIX) for file in self.directory.glob(f"*{SUFFIX}"))

    def _path(self, name: str) -> Path:
        if NAME.fullmatch(name) is None:
            raise RequestError(
                "An individual's name has up to 60 letters, digits, spaces, dots and hyphens, and "
                f"is not a number, unlike {name[:60]!r}.",
                "name",
            )
        return self.directory / f"{name}{SUFFIX}"


def draw(body: DrawRequest, backend: Engine) -> Individual:
    """An individual of the model."""
    given = body.model_dump(exclude_none=True, exclude={"name", "seed"})
    seed = draw_seed() if body.seed is None else body.seed
    try:
        settings = backend.resolve(causal_mode="causal", **given)
        own = {field: getattr(settings, field) for field in OWN_FIELDS}
        return Individual.draw(backend.size, seed=seed, **own)
    except ValueError as error:
        raise RequestError(str(error)) from None


def describe(individual: Individual) -> dict[str, Any]:
    """For JSON."""
    shown = ("name", "seed", "size", *OWN_FIELDS)
    return {"object": "individual", **{name: getattr(individual, name) for name in shown}}
