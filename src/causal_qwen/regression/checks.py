"""Checks: the fields of a saved regressor, each of which raises one sentence if it is wrong.

The sentence names the file, the field, its value and the cure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from causal_qwen.modeling.value_space import LARGEST

CURE = "restore the file, or fit again"
SHOWN = 60  # characters of a value in a message
MOST_NESTED = 20  # objects and lists inside each other

Check = tuple[Callable[[Any], bool], str]  # of a value, and what it must be


def is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -LARGEST <= value <= LARGEST


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def is_units(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_text, value.values()))


def is_bounds(value: Any) -> bool:
    """[low, high], low below high; null is no bound."""
    if not (isinstance(value, list) and len(value) == 2):
        return False
    if not all(bound is None or is_number(bound) for bound in value):
        return False
    return None in value or value[0] < value[1]


def or_none(check: Check) -> Check:
    is_right, what = check
    return lambda value: value is None or is_right(value), f"{what} or null"


def one_of(choices: Sequence[str]) -> Check:
    return lambda value: is_text(value) and value in choices, f"one of {', '.join(choices)}"


TEXT: Check = (is_text, "a text")
TEXTS: Check = (lambda value: is_text(value) or is_texts(value), "a text or a list of texts")
NAMES: Check = (
    lambda value: is_texts(value) and len({*value}) == len(value),
    "a list of names, each once",
)
COUNT: Check = (is_count, "a whole number of at least 0")
NUMBER: Check = (is_number, "a finite number")
FLAG: Check = (lambda value: isinstance(value, bool), "true or false")


def wrong(file: Path, field: str, what: str, wanted: str) -> ValueError:
    shown = what if len(what) <= SHOWN else f"{what[: SHOWN - 3]}..."
    return ValueError(f"{file}: {field} is {shown}, not {wanted}; {CURE}.")


def read_json(file: Path) -> dict[str, Any]:
    """An object; NaN and Infinity, which JSON does not have, are refused."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number")

    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse)
        _check_depth(found)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); {CURE}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged (a {type(found).__name__}, not an object); {CURE}.")
    return found


def _check_depth(found: Any) -> None:
    """Refuse nesting that would exhaust the stack where a value is shown."""
    level = [found]
    for _ in range(MOST_NESTED):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
        if not level:
            return
    raise ValueError(f"nested more than {MOST_NESTED} deep")


def check_field(file: Path, field: str, value: Any, check: Check) -> None:
    is_right, what = check
    if not is_right(value):
        raise wrong(file, field, repr(value), what)


def check_keys(file: Path, field: str, found: Any, wanted: Any) -> None:
    if not isinstance(found, dict):
        raise wrong(file, field, repr(found), "an object")
    inside = f" in {field}" if field else ""
    if missing := [key for key in wanted if key not in found]:
        raise ValueError(f"{file}: {missing[0]!r} is missing{inside}; {CURE}.")
    if unknown := [key for key in found if key not in wanted]:
        raise ValueError(f"{file}: {unknown[0]!r} is unknown{inside}; {CURE}.")
