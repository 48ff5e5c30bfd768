"""Saved regressors: regressor.json and regressor.safetensors, every field checked as it is read.

A field that is missing, unknown, of another type, not finite or of another shape raises one
ValueError that names the file, the field, its value and the cure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from causal_qwen.modeling.value_space import LARGEST, ValueSpace
from causal_qwen.options import VALUE_SPACES
from causal_qwen.outputs import file_sha256
from causal_qwen.regression.head import Chain
from causal_qwen.regression.sentences import template_columns
from causal_qwen.terminal import counted

SETTINGS, TENSORS, MODEL = "regressor.json", "regressor.safetensors", "model"
FORMAT = 1  # of both files; those of version 0.3, which have no number, are the same
FIELDS = ("parameters", "columns", "is_single", "targets", "backbone")
CURE = "restore the file, or fit again"
SHOWN = 60  # characters of a value in a message

Check = tuple[Callable[[Any], bool], str]  # of a value, and what it must be


class Settings(NamedTuple):
    """What regressor.json contains."""

    parameters: dict[str, Any]
    columns: list[Any] | None
    is_single: bool
    spaces: dict[str, ValueSpace]  # by target
    backbone: dict[str, str | None] | None  # of a frozen one
    tensors_sha256: str | None  # None: of version 0.3


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -LARGEST <= value <= LARGEST


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_units(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_size(value: Any) -> bool:
    return _is_text(value) or (
        isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))
    )


def _is_column(value: Any) -> bool:
    return _is_text(value) or _is_number(value)


def _or_none(check: Check) -> Check:
    is_right, what = check
    return lambda value: value is None or is_right(value), f"{what} or null"


TEXT: Check = (_is_text, "a text")
TEXTS: Check = (lambda value: _is_text(value) or _is_texts(value), "a text or a list of texts")
COUNT: Check = (_is_count, "a whole number of at least 0")
NUMBER: Check = (_is_number, "a finite number")
FLAG: Check = (lambda value: isinstance(value, bool), "true or false")
PARAMETERS: dict[str, Check] = {  # of `CausalTextRegressor`; it checks choices and ranges itself
    **dict.fromkeys(("backbone", "value_space", "bad_rows"), TEXT),
    **dict.fromkeys(("model", "template", "question"), _or_none(TEXT)),
    **dict.fromkeys(("max_length", "folds", "batch_size", "random_state"), COUNT),
    **dict.fromkeys(("epochs", "patience"), _or_none(COUNT)),
    **dict.fromkeys(("cache", "verbose"), FLAG),
    "held_out": NUMBER,
    "learning_rate": _or_none(NUMBER),
    "text": _or_none(TEXTS),
    "units": _or_none((_is_units, "a map from names to texts")),
    "size": (_is_size, "a name or two whole numbers"),
}


BACKBONE: dict[str, Check] = {
    **dict.fromkeys(("name", "fingerprint"), TEXT),
    **dict.fromkeys(("path", "relative"), _or_none(TEXT)),
}


def read_settings(directory: Path) -> Settings:
    """regressor.json; choices and ranges of parameters are the regressor's to check."""
    file = directory / SETTINGS
    if not file.is_file():
        raise FileNotFoundError(f"{directory} has no {SETTINGS}; is it a saved regressor?")
    settings = _read_json(file)
    version, sha256 = settings.pop("format", FORMAT), settings.pop("tensors_sha256", None)
    if _is_count(version) and version > FORMAT:
        raise ValueError(
            f"{file}: format is {version}, and this version reads {FORMAT}; install a newer "
            "version of causal-qwen."
        )
    if version != FORMAT:
        raise wrong(file, "format", repr(version), str(FORMAT))
    _check_keys(file, "", settings, FIELDS)
    parameters = _parameters(file, settings["parameters"])
    columns, is_single = settings["columns"], settings["is_single"]
    _check(file, "is_single", is_single, FLAG)
    spaces = _spaces(file, settings["targets"])
    _check_columns(file, columns, parameters, list(spaces))
    if is_single and len(spaces) != 1:
        raise wrong(file, "is_single", "true", f"false, for {counted(len(spaces), 'target')}")
    is_frozen = parameters["backbone"] == "frozen"
    backbone = _backbone(file, settings["backbone"]) if is_frozen else None
    return Settings(parameters, columns, is_single, spaces, backbone, sha256)


def wrong(file: Path, field: str, what: str, wanted: str) -> ValueError:
    shown = what if len(what) <= SHOWN else f"{what[: SHOWN - 3]}..."
    return ValueError(f"{file}: {field} is {shown}, not {wanted}; {CURE}.")


def _read_json(file: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number")

    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); {CURE}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged (a {type(found).__name__}, not an object); {CURE}.")
    return found


def _check(file: Path, field: str, value: Any, check: Check) -> None:
    is_right, what = check
    if not is_right(value):
        raise wrong(file, field, repr(value), what)


def _check_keys(file: Path, field: str, found: Any, wanted: Any) -> None:
    if not isinstance(found, dict):
        raise wrong(file, field, repr(found), "an object")
    inside = f" in {field}" if field else ""
    if missing := [key for key in wanted if key not in found]:
        raise ValueError(f"{file}: {missing[0]!r} is missing{inside}; {CURE}.")
    if unknown := [key for key in found if key not in wanted]:
        raise ValueError(f"{file}: {unknown[0]!r} is unknown{inside}; {CURE}.")


def _parameters(file: Path, found: Any) -> dict[str, Any]:
    _check_keys(file, "parameters", found, PARAMETERS)
    for name, check in PARAMETERS.items():
        _check(file, f"parameters.{name}", found[name], check)
    size = found["size"]
    return {**found, "size": tuple(size) if isinstance(size, list) else size}


def _check_columns(
    file: Path, columns: Any, parameters: dict[str, Any], targets: list[str]
) -> None:
    """The columns of a table's sentences, which a template names; null for texts."""
    template = parameters["template"]
    if columns is None:
        if template is not None or parameters["text"] is not None:
            raise ValueError(f"{file}: template and text are for tables, of columns; {CURE}.")
        return
    is_list = isinstance(columns, list) and columns and all(map(_is_column, columns))
    if not is_list or len({*columns} - {*targets}) < len(columns):
        names = "a list of names or null, each name once and none a target"
        raise wrong(file, "columns", repr(columns), names)
    try:
        named = columns if template is None else template_columns(template, targets)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if named != columns:
        known = f"one of the columns {', '.join(map(repr, columns))}"
        raise wrong(file, "parameters.template", repr(template), known)


def _spaces(file: Path, targets: Any) -> dict[str, ValueSpace]:
    if not isinstance(targets, dict) or not targets:
        raise wrong(file, "targets", repr(targets), "an object with at least one target")
    for name, space in targets.items():
        is_space = isinstance(space, list) and len(space) == 3 and space[0] in VALUE_SPACES
        if not (is_space and all(map(_is_number, space[1:])) and space[2] > 0):
            kinds = " or ".join(VALUE_SPACES)
            raise wrong(
                file,
                f"targets.{name}",
                repr(space),
                f"[{kinds}, a finite center, a spread above 0]",
            )
    return {name: ValueSpace(*space) for name, space in targets.items()}


def _backbone(file: Path, found: Any) -> dict[str, str | None]:
    """The name and the fingerprint, and the place, which is null for a model without one."""
    if not isinstance(found, dict):
        raise wrong(file, "backbone", repr(found), "an object")
    if missing := [key for key in ("name", "fingerprint") if key not in found]:
        raise ValueError(f"{file}: {missing[0]!r} is missing in backbone; {CURE}.")
    for key, value in found.items():
        if key not in BACKBONE:
            raise ValueError(f"{file}: {key!r} is unknown in backbone; {CURE}.")
        _check(file, f"backbone.{key}", value, BACKBONE[key])
    return found


def read_tensors(directory: Path, settings: Settings) -> list[dict[str, Tensor]]:
    """The tensors of every target, by name: those of its chain, and its calibration scores."""
    file, targets = directory / TENSORS, len(settings.spaces)
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; {CURE}.")
    try:
        found = load_file(file)
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error}); {CURE}.") from None
    of_targets: list[dict[str, Tensor]] = [{} for _ in range(targets)]
    for key, tensor in found.items():
        digits, _, name = key.partition(".")
        if not (digits.isdecimal() and digits.isascii() and int(digits) < targets and name):
            raise ValueError(f"{file}: tensor {key} is unknown; {CURE}.")
        if tensor.dtype != torch.float64:
            raise wrong(file, f"tensor {key}", str(tensor.dtype), "torch.float64")
        if not tensor.isfinite().all():
            raise wrong(file, f"tensor {key}", "NaN or infinite", "finite")
        of_targets[int(digits)][name] = tensor
    is_frozen = settings.backbone is not None
    for place, tensors in enumerate(of_targets):
        _check_scores(file, place, tensors.get("scores"))
        _check_chain(file, place, {n: t for n, t in tensors.items() if n != "scores"}, is_frozen)
    if settings.tensors_sha256 not in (None, file_sha256(file)):
        raise ValueError(f"{file} differs from the file that {SETTINGS} was saved with; {CURE}.")
    return of_targets


def _check_scores(file: Path, place: int, scores: Tensor | None) -> None:
    if scores is not None and (scores.dim() != 1 or not len(scores)):
        shape = f"of shape {tuple(scores.shape)}"
        raise wrong(file, f"tensor {place}.scores", shape, "a list of scores")
    if scores is not None and (scores.diff() < 0).any():
        raise wrong(file, f"tensor {place}.scores", "not in ascending order", "sorted")


def _check_chain(file: Path, place: int, tensors: dict[str, Tensor], is_frozen: bool) -> None:
    """The names and shapes of a chain; without a frozen backbone there is none."""
    shapes = {f"{place}.{name}": tuple(tensor.shape) for name, tensor in tensors.items()}
    wanted: dict[str, tuple[int, ...]] = {}
    if is_frozen:
        sizes = shapes.get(first := f"{place}.{Chain.SIZES}")
        if sizes is None:
            raise ValueError(f"{file}: tensor {first} is missing; {CURE}.")
        if len(sizes) != 2 or 0 in sizes:
            raise wrong(file, f"tensor {first}", f"of shape {sizes}", "a matrix")
        wanted = {f"{place}.{name}": shape for name, shape in Chain.shapes(*sizes).items()}
    for name in wanted.keys() | shapes.keys():
        if name not in shapes:
            raise ValueError(f"{file}: tensor {name} is missing; {CURE}.")
        if name not in wanted:
            raise ValueError(f"{file}: tensor {name} is unknown; {CURE}.")
        if shapes[name] != wanted[name]:
            shape = f"of shape {wanted[name]}"
            raise wrong(file, f"tensor {name}", f"of shape {shapes[name]}", shape)
