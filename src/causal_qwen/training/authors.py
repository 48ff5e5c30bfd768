"""Authors: every author's texts share one individual, which is learned with the model.

    U | author j ~ Cauchy(loc_U + g scale_U * t_j, scale_U)         at every position of j's texts

t_j (C,) starts as standard Cauchy noise drawn from a seed, the hash of the author's name, and is a
parameter of the run. The loss is that of training, on the moved U: knowing the author moves the
centre, and the width stays, because what an author says next is still uncertain. g is the gain of
fresh noise (kappa of temperature 1), measured on the training text before the first step. `causal`
decoding has u = loc_U + T kappa scale_U * t: an individual saved with T = g / kappa and persistence
1 speaks exactly as it was trained.

Hazards: untruncated Cauchy noise has coordinates in the hundreds, whose push would drown the first
steps: the start is truncated. A model that always knows the author forgets to write for nobody: one
text in NAMELESS of every author is read without it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from causal_qwen.decoding.noise import UNoise
from causal_qwen.individuals import (
    Individual,
    draw_noise,
    from_cauchy,
    latent_size,
    seed_of,
    to_cauchy,
)
from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.training.data import NOBODY, Example

DIRECTORY = "individuals"  # in the output of a run
FILE = "individuals.safetensors"  # in a checkpoint
NAMELESS = 8  # one text in so many is read without its author
START_DENSITY = 0.05  # truncation of the first t: at most 4.4


class Authors(nn.Module):
    """The learnable t of every author, by name. -> noise of a batch, individuals"""

    def __init__(self, names: Iterable[str], model: CausalModel) -> None:
        super().__init__()
        self.names = sorted(set(names))
        self.gain = getattr(model.generation_config, "fresh_noise_gain", None) or 1.0
        size = latent_size(model)
        start = [to_cauchy(draw_noise(seed_of(name), size), START_DENSITY) for name in self.names]
        self.t = nn.Parameter(torch.tensor(np.stack(start), dtype=torch.float32))  # (N, C)

    def noise(self, authors: Tensor) -> UNoise:
        """g t of the author at every position, 0 for NOBODY. (B, T) -> (B, T, C)"""
        is_known = (authors != NOBODY).unsqueeze(-1)
        return UNoise(self.gain * self.t[authors.clamp_min(0)].where(is_known, 0.0))

    def individuals(self, model: CausalModel) -> list[Individual]:
        """For `causal` decoding by `model`: T kappa = g, and t at every position."""
        kappa = getattr(model.generation_config, "noise_gain", None) or 1.0
        temperature = self.gain / kappa
        noise = from_cauchy(self.t.detach().double().cpu().numpy())
        pairs = zip(self.names, noise, strict=True)
        return [Individual(e, name=name, temperature=temperature) for name, e in pairs]

    def save_state(self, checkpoint: Path) -> None:
        """t and g, to continue from: an individual's e would round them."""
        gain = torch.tensor(self.gain, dtype=torch.float64)
        save_file({"t": self.t.detach().cpu(), "gain": gain}, checkpoint / FILE)

    @torch.no_grad()
    def load_state(self, checkpoint: Path) -> None:
        saved = load_file(checkpoint / FILE)
        self.gain = float(saved["gain"])
        self.t.copy_(saved["t"])

    def save(self, model: CausalModel, output: Path) -> list[Path]:
        """One file per author."""
        (output / DIRECTORY).mkdir(exist_ok=True)
        places = [output / file for file in saved_files(self.names)]
        for place, individual in zip(places, self.individuals(model), strict=True):
            individual.save(place, overwrite=True)
        return places


def saved_files(names: Sequence[str]) -> list[str]:
    """Of individuals, in the output of a run."""
    return [f"{DIRECTORY}/{name}.safetensors" for name in file_names(names)]


def file_names(names: Sequence[str]) -> list[str]:
    """Names with letters, digits, - and _ only; names that become equal get a number."""
    plain = [re.sub(r"[^\w-]+", "_", name).strip("_")[:80] or "author" for name in names]
    seen: Counter[str] = Counter()
    found = []
    for name in plain:
        seen[name.lower()] += 1  # some file systems take upper and lower case for one
        found.append(name if seen[name.lower()] == 1 else f"{name}_{seen[name.lower()]}")
    return found


def names_of(rows: Sequence[Mapping[str, Any]], column: str) -> list[str | None]:
    """The author of every row; None where the column is empty."""
    if not any(column in row for row in rows):
        known = ", ".join(map(repr, rows[0]))
        raise ValueError(f"No row has the column {column!r} of individuals; a row has {known}.")
    named = (row.get(column) for row in rows)
    return [None if name is None or not str(name).strip() else str(name) for name in named]


def mark(
    examples: Sequence[Example], names: Sequence[str | None], known: Sequence[str], *, learn: bool
) -> None:
    """Give every token of an example the index of its author. To learn, one text in NAMELESS of an
    author has none."""
    seen: Counter[str] = Counter()
    index = {name: place for place, name in enumerate(known)}
    for example, name in zip(examples, names, strict=True):
        place = NOBODY if name is None else index.get(name, NOBODY)
        if name is not None:
            seen[name] += 1
            if learn and seen[name] % NAMELESS == 0:
                place = NOBODY
        example.authors = [place] * len(example.ids)
