"""Saved regressors: regressor.json and regressor.safetensors, every field checked as it is read.

A field that is missing, unknown, of another type, not finite or of another shape raises one
ValueError that names the file, the field, its value and the cure (`checks`). Format 1, of versions
that only had the language model, is read as `sources=["model"]`.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from causal_qwen.modeling.value_space import ValueSpace
from causal_qwen.options import VALUE_SPACES
from causal_qwen.outputs import file_sha256
from causal_qwen.regression.checks import (
    COUNT,
    CURE,
    FLAG,
    NUMBER,
    TEXT,
    TEXTS,
    Check,
    check_field,
    check_keys,
    is_bounds,
    is_count,
    is_number,
    is_text,
    is_units,
    or_none,
    read_json,
    wrong,
)
from causal_qwen.regression.head import Chain
from causal_qwen.regression.saved_sources import Shapes, SourceRecord, read_source_settings
from causal_qwen.regression.sentences import template_columns
from causal_qwen.tables.rows import TEXT as TEXT_COLUMN
from causal_qwen.terminal import counted

SETTINGS, TENSORS, MODEL = "regressor.json", "regressor.safetensors", "model"
FORMAT = 2  # of the files together; those of version 0.3, which have no number, are format 1
FIELDS_1 = ("parameters", "columns", "is_single", "targets", "backbone")
FIELDS = (*FIELDS_1, "limits", "seed", "sources")
# Of format 1, which did not have them:
PARAMETERS_OF_1 = {"sources": ["model"], "columns": None, "support": "real", "cv": None}
SCORES = ("scores", "score_weights")  # the tensors of a calibration
NO_LIMITS = (-math.inf, math.inf, False, 0.0, math.inf, -math.inf, math.inf)


class Settings(NamedTuple):
    """What regressor.json contains."""

    parameters: dict[str, Any]
    columns: list[Any] | None
    is_single: bool
    spaces: dict[str, ValueSpace]  # by target
    limits: dict[str, tuple[Any, ...]]  # by target: fields of `Limits`
    seed: int
    backbone: dict[str, str | None] | None  # of a frozen one that is used
    sources: SourceRecord | None  # None: every row is read as a sentence
    tensors_sha256: str | None  # None: of version 0.3
    is_edited: bool | None  # None: it has no hash of its own

    @property
    def has_chains(self) -> bool:
        return self.parameters["backbone"] == "frozen"


def _is_size(value: Any) -> bool:
    return is_text(value) or (
        isinstance(value, list) and len(value) == 2 and all(map(is_count, value))
    )


def _is_column(value: Any) -> bool:
    return is_text(value) or is_number(value)


def _is_limits(value: Any) -> bool:
    """[low, high, whether whole, least scale, most scale, floor, ceiling]; null is no bound."""
    if not (isinstance(value, list) and len(value) in (5, 7) and isinstance(value[2], bool)):
        return False
    least, most = value[3:5]
    is_scale = is_number(least) and least >= 0
    is_scale &= most is None or (is_number(most) and most > 0)
    return is_scale and is_bounds(value[:2]) and is_bounds(value[5:] or [None, None])


PARAMETERS: dict[str, Check] = {  # of `CausalTextRegressor`; it checks choices and ranges itself
    **dict.fromkeys(("backbone", "value_space", "bad_rows", "device", "dtype"), TEXT),
    **dict.fromkeys(("model", "template", "question"), or_none(TEXT)),
    **dict.fromkeys(("max_length", "folds", "batch_size"), COUNT),
    **dict.fromkeys(("epochs", "patience", "random_state"), or_none(COUNT)),
    **dict.fromkeys(("cache", "verbose"), FLAG),
    "held_out": NUMBER,
    "learning_rate": or_none(NUMBER),
    **dict.fromkeys(("columns", "text"), or_none(TEXTS)),
    "units": or_none((is_units, "a map from names to texts")),
    "size": (_is_size, "a name or two whole numbers"),
    "sources": TEXTS,
    "support": (lambda value: is_text(value) or is_bounds(value), "a name or [low, high]"),
    "cv": (lambda value: value is None, "null"),
}


BACKBONE: dict[str, Check] = {
    **dict.fromkeys(("name", "fingerprint"), TEXT),
    **dict.fromkeys(("path", "relative"), or_none(TEXT)),
}


def read_settings(directory: Path) -> Settings:
    """regressor.json; choices and ranges of parameters are the regressor's to check."""
    file = directory / SETTINGS
    if not file.is_file():
        raise FileNotFoundError(f"{directory} has no {SETTINGS}; is it a saved regressor?")
    settings = read_json(file)
    own_sha256 = settings.pop("settings_sha256", None)
    is_edited = None if own_sha256 is None else own_sha256 != settings_sha256(settings)
    version, sha256 = settings.pop("format", 1), settings.pop("tensors_sha256", None)
    if is_count(version) and version > FORMAT:
        raise ValueError(
            f"{file}: format is {version}, and this version reads {FORMAT}; install a newer "
            "version of causal-qwen."
        )
    if version not in (1, FORMAT) or isinstance(version, bool):
        raise wrong(file, "format", repr(version), f"1 or {FORMAT}")
    check_keys(file, "", settings, FIELDS_1 if version == 1 else FIELDS)
    parameters = _parameters(file, settings["parameters"], version)
    columns, is_single = settings["columns"], settings["is_single"]
    check_field(file, "is_single", is_single, FLAG)
    spaces = _spaces(file, settings["targets"])
    _check_columns(file, columns, parameters, list(spaces))
    if is_single and len(spaces) != 1:
        raise wrong(file, "is_single", "true", f"false, for {counted(len(spaces), 'target')}")
    if version == 1:
        limits, seed = dict.fromkeys(spaces, NO_LIMITS), parameters["random_state"] or 0
    else:
        limits, seed = _limits(file, settings["limits"], list(spaces)), settings["seed"]
        check_field(file, "seed", seed, COUNT)
    names = [TEXT_COLUMN] if columns is None else list(map(str, columns))
    sources = _sources(file, settings.get("sources"), parameters, list(spaces), names)
    needs_backbone = parameters["backbone"] == "frozen" and (sources is None or sources.uses_model)
    backbone = _backbone(file, settings["backbone"]) if needs_backbone else None
    return Settings(
        *(parameters, columns, is_single, spaces, limits, seed, backbone, sources),
        tensors_sha256=sha256,
        is_edited=is_edited,
    )


def settings_sha256(settings: dict[str, Any]) -> str:
    """Of all settings but this hash, as JSON reads them; order and spaces do not count."""
    plain = json.loads(json.dumps(settings))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _sources(
    file: Path, found: Any, parameters: dict[str, Any], targets: list[str], columns: list[str]
) -> SourceRecord | None:
    """null where the language model alone reads every row."""
    names = parameters["sources"]
    reads_sentences = parameters["backbone"] != "frozen" or names in ("model", ["model"])
    if not reads_sentences:
        return read_source_settings(file, found, names, targets, columns)
    if found is not None:
        raise wrong(file, "sources", repr(found), "null")
    return None


def _limits(file: Path, found: Any, targets: list[str]) -> dict[str, tuple[Any, ...]]:
    check_keys(file, "limits", found, targets)
    for name, limits in found.items():
        what = "[low, high, true or false, the least scale, the most, floor, ceiling]"
        check_field(file, f"limits.{name}", limits, (_is_limits, what))
    return {
        name: tuple(
            given if one is None else one for one, given in zip(limits, NO_LIMITS, strict=False)
        )
        for name, limits in found.items()
    }


def _parameters(file: Path, found: Any, version: int) -> dict[str, Any]:
    if version == 1:
        new = {*PARAMETERS_OF_1, "device", "dtype"}
        check_keys(file, "parameters", found, PARAMETERS.keys() - new)
        found = {**found, **PARAMETERS_OF_1}
    if isinstance(found, dict) and not {"device", "dtype"} & found.keys():  # before version 0.4
        found = {**found, "device": "auto", "dtype": "auto"}
    check_keys(file, "parameters", found, PARAMETERS)
    for name, check in PARAMETERS.items():
        check_field(file, f"parameters.{name}", found[name], check)
    size, support = found["size"], found["support"]
    if isinstance(support, list):
        support = tuple(
            unbounded if bound is None else bound
            for bound, unbounded in zip(support, NO_LIMITS[:2], strict=True)
        )
    return {**found, "size": tuple(size) if isinstance(size, list) else size, "support": support}


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
        if not (is_space and all(map(is_number, space[1:])) and space[2] > 0):
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
        check_field(file, f"backbone.{key}", value, BACKBONE[key])
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
    experts = {} if settings.sources is None else settings.sources.targets
    for place, (target, tensors) in enumerate(zip(settings.spaces, of_targets, strict=True)):
        _check_scores(file, place, tensors.get("scores"), tensors.get("score_weights"))
        others = {n: t for n, t in tensors.items() if n not in SCORES}
        wanted: Shapes = {}
        if target in experts:
            wanted = experts[target].shapes()
        elif settings.has_chains:
            wanted = _chain_shapes(file, place, tensors.get(Chain.SIZES))
        _check_shapes(file, place, others, wanted)
    if settings.tensors_sha256 not in (None, file_sha256(file)):
        raise ValueError(f"{file} differs from the file that {SETTINGS} was saved with; {CURE}.")
    return of_targets


def _check_scores(file: Path, place: int, scores: Tensor | None, weights: Tensor | None) -> None:
    if scores is not None and (scores.dim() != 1 or not len(scores)):
        shape = f"of shape {tuple(scores.shape)}"
        raise wrong(file, f"tensor {place}.scores", shape, "a list of scores")
    if scores is not None and (scores.diff() < 0).any():
        raise wrong(file, f"tensor {place}.scores", "not in ascending order", "sorted")
    if weights is None:
        return
    if scores is None or weights.shape != scores.shape:
        shape = f"of shape {tuple(weights.shape)}"
        raise wrong(file, f"tensor {place}.score_weights", shape, "one weight per score")
    if (weights < 0).any() or not weights.any():
        raise wrong(file, f"tensor {place}.score_weights", "below 0, or all 0", "weights")


def _chain_shapes(file: Path, place: int, sizes: Tensor | None) -> Shapes:
    """Of a chain of any size, which its first matrix has."""
    name = f"tensor {place}.{Chain.SIZES}"
    if sizes is None:
        raise ValueError(f"{file}: {name} is missing; {CURE}.")
    if sizes.dim() != 2 or 0 in sizes.shape:
        raise wrong(file, name, f"of shape {tuple(sizes.shape)}", "a matrix")
    return dict(Chain.shapes(*sizes.shape))


def _check_shapes(file: Path, place: int, tensors: dict[str, Tensor], wanted: Shapes) -> None:
    """Refuse missing and unknown tensors, and other shapes."""
    for name in wanted.keys() | tensors.keys():
        shown = f"tensor {place}.{name}"
        if name not in tensors:
            raise ValueError(f"{file}: {shown} is missing; {CURE}.")
        if name not in wanted:
            raise ValueError(f"{file}: {shown} is unknown; {CURE}.")
        found = tuple(tensors[name].shape)
        sizes = tuple(
            size if given is None else given
            for size, given in zip(found, wanted[name], strict=False)
        )
        if len(found) != len(wanted[name]) or found != sizes or 0 in found:
            shape = f"of shape {wanted[name]}".replace("None", "any")
            raise wrong(file, shown, f"of shape {found}", shape)
