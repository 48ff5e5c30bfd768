"""Checks: what a command refuses at once, before a model is loaded for nothing."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer

from causal_qwen.options import MODES, NOISY_MODES, NUMBER_READINGS, check_choice

NUMPY_SEEDS, ALL_SEEDS = 2**32, 2**64  # NumPy's global generator takes fewer than torch's


def check_optional_choice(option: str, value: str | None, choices: Collection[str]) -> None:
    """None leaves the choice to the model."""
    if value is not None:
        check_choice(option, value, choices)


def check_mode(mode: str | None) -> None:
    check_optional_choice("--mode", mode, MODES)


def check_numbers(numbers: str | None) -> None:
    check_optional_choice("--numbers", numbers, NUMBER_READINGS)


def check_model(name: str) -> None:
    """A directory holds a model; any other name is for the hub to know."""
    if Path(name).is_dir():
        from causal_qwen.engine.weights import read_json

        read_json(Path(name) / "config.json")


def check_prompt(*prompts: str | None) -> None:
    """Those that are given hold something."""
    if any(prompt is not None and not prompt.strip() for prompt in prompts):
        raise ValueError("The prompt is empty; write a few words.")


def who_speaks(individual: str | None, mode: str | None, is_kept: bool = False) -> Any:
    """A seed or a saved individual, who has a part in the mode; None if nobody is named."""
    from causal_qwen.individuals.individual import parse_individual

    if (individual is not None or is_kept) and mode not in (None, *NOISY_MODES):
        raise ValueError(f"--individual has no part in mode {mode!r}; use causal or sampling.")
    return None if individual is None else parse_individual(individual)


def check_seed(seed: int | None, mode: str | None) -> None:
    """A seed that would draw nothing is refused: elsewhere an individual is the seed."""
    if seed is not None and mode not in (None, "compatible"):
        cure = "name an --individual, or" if mode in NOISY_MODES else "nothing is drawn there:"
        raise ValueError(f"--seed has no part in mode {mode!r}; {cure} use compatible.")


def check_file(path: Path | None) -> None:
    """A file that is to be written when all is done."""
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; give the name of a file.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: {path.parent} is no directory.")


def check_directory(path: Path | None) -> None:
    """One that is to be written into, or made, when all is done."""
    if path is not None and path.is_file():
        raise NotADirectoryError(f"{path} is a file; give the name of a directory.")


# ---------------------------------------------------------------- for typer


def given(value: str | None) -> str | None:
    """An argument that a script has left empty by mistake is refused by its name."""
    if value is not None and not value.strip():
        raise typer.BadParameter("it is empty.")
    return value


def numpy_seed(seed: int) -> int:
    return _below(seed, NUMPY_SEEDS)


def torch_seed(seed: int | None) -> int | None:
    return None if seed is None else _below(seed, ALL_SEEDS)


def _below(seed: int, limit: int) -> int:
    if seed >= limit:
        raise typer.BadParameter(f"{seed} is too large; choose one below {limit}.")
    return seed
