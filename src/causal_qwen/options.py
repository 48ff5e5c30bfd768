"""Choices: what is chosen by name. Both sides and the command line have the names from here."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

T = TypeVar("T")

MODES = ("standard", "sampling", "causal", "compatible")
NOISY_MODES = ("sampling", "causal")  # modes in which an individual's noise has a part
NORMALIZATIONS = ("softmax", "ovr")  # of `compatible`: which probabilities it draws from
SEMANTICS = ("pearl", "disco")  # of a counterfactual: chance stays, or is redrawn
NUMBER_READINGS = ("text", "value")  # numbers are read as digits, or as their values
INITIALIZATIONS = ("calibrated", "documents")  # of what is added to a base model
SCALE_ACTIVATIONS = ("exp", "softplus", "abs")
NUMERIC_ENCODINGS = ("log", "sigmoid")
VALUE_SPACES = ("symlog", "linear")
TYPED = ("--", "/")  # how options and commands begin


def check_choice(name: str, value: T, choices: Collection[T]) -> T:
    """A value that is one of the choices; any other is refused as its user wrote it."""
    if value not in choices:
        said = f"{name} {value}" if name.startswith(TYPED) else f"{name}={value!r}"
        raise ValueError(f"{said} is unknown; choose one of {', '.join(map(str, choices))}.")
    return value
