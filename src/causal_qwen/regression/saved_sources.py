"""Saved sources: what a regressor of several sources saves beside its chains.

    regressor.json         the columns by kind, their ranges, the experts and the shares
    regressor.safetensors  linear experts, and the center and spread of z
    sources.skops          scikit-learn's fitted transformers, kernels and boosting

A skops file names the type of everything in it, and is refused before anything is made if one is
neither scikit-learn's nor in `TRUSTED`. Splines are not in it: they follow from their knots.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_DEFLATED, BadZipFile

import numpy as np
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.kernel_approximation import Nystroem
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import SplineTransformer
from torch import Tensor

from causal_qwen.modeling.value_space import ValueSpace
from causal_qwen.outputs import file_sha256
from causal_qwen.paths import install_hint
from causal_qwen.regression.checks import (
    COUNT,
    CURE,
    NAMES,
    NUMBER,
    TEXT,
    Check,
    check_field,
    check_keys,
    is_count,
    is_number,
    one_of,
    or_none,
    wrong,
)
from causal_qwen.regression.experts import Expert, Fitted, Stack
from causal_qwen.regression.explanation import baseline_frame
from causal_qwen.regression.features import MIDDLE
from causal_qwen.regression.head import Chain
from causal_qwen.regression.ridge import Ridge
from causal_qwen.regression.source_choice import Sources, choose_sources
from causal_qwen.regression.source_model import WORD_FACTORS, Reading, SourceModel, TargetModel
from causal_qwen.regression.sources import Schema, TableFeatures
from causal_qwen.tables.frames import to_numbers

OBJECTS = "sources.skops"
TRUSTED = (  # beside what skops trusts: scikit-learn's estimators, arrays, plain containers
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    *("functools.partial", "sklearn.utils.validation.check_array"),  # of trees with categories
    *("numpy.dtype", "numpy.round"),  # of an imputer, of rounded components
    "scipy.sparse._csr.csr_matrix",  # of rows with words, in a kernel
)
FIELDS = ("names", "schema", "ranges", "text_columns", "baseline", "targets", "shares", "sha256")
TARGET_FIELDS = ("word_factor", "pooling", "experts")

LOSSES = {  # of experts, by the block that they read
    "linear": ("squared_error", "cauchy"),
    "kernel": ("squared_error", "cauchy"),
    "model": ("squared_error", "cauchy"),
    "boosting": ("squared_error", "absolute_error"),
}
POOLING: Check = or_none((lambda v: is_count(v) and v < len(MIDDLE), f"below {len(MIDDLE)}"))
RANGE: Check = or_none(
    (
        lambda v: isinstance(v, list) and len(v) == 2 and all(map(is_number, v)) and v[0] <= v[1],
        "[lowest, highest]",
    )
)
CELL: Check = or_none((lambda v: isinstance(v, str | bool) or is_number(v), "a text or a number"))

Shapes = dict[str, tuple[int | None, ...]]  # None: any size


class Objects(NamedTuple):
    """What sources.skops has."""

    transformers: dict[str, Any]  # by source
    trees: dict[str, Any]  # by "target.expert"
    kernels: dict[str, Any]  # by target


class TargetRecord(NamedTuple):
    """What regressor.json has of a target's experts."""

    word_factor: float
    pooling: int | None
    experts: list[Expert]

    def uses(self, source: str) -> bool:
        return any(expert.source == source for expert in self.experts)

    def shapes(self) -> Shapes:
        """The tensors of the target: its chain, linear experts, and the standardisation of z."""
        count = len(self.experts)
        found: Shapes = dict(Chain.shapes(count, count + 1))
        for place, expert in enumerate(self.experts):
            if is_linear(expert):
                found[f"expert.{place}.coefficients"] = (None,)
                found[f"expert.{place}.intercept"] = (1,)
        if self.pooling is not None:
            found |= {"reading.center": (None,), "reading.spread": (None,)}
        return found


class SourceRecord(NamedTuple):
    """What regressor.json has of the sources."""

    names: list[str]
    schema: Schema
    ranges: dict[str, tuple[float, float]]
    text_columns: list[str] | None  # that the language model reads
    baseline: dict[str, Any]  # a typical row; see `explanation`
    targets: dict[str, TargetRecord]
    shares: dict[str, dict[str, float]]
    sha256: str

    @property
    def uses_model(self) -> bool:
        return self.uses("model")

    def uses(self, source: str) -> bool:
        return any(target.uses(source) for target in self.targets.values())

    def sources_of(self, target: str) -> set[str]:
        """The sources that a target's experts read."""
        read = {expert.source for expert in self.targets[target].experts}
        if "linear" in read:
            has = {"columns": self.ranges or self.schema.categories, "words": self.schema.texts}
            read |= {name for name in has if name in self.names and has[name]}
        return read - {"linear"}


def is_linear(expert: Expert) -> bool:
    return expert.source != "boosting"


# ---------------------------------------------------------------- writing


def source_settings(
    source: SourceModel, text_columns: list[str], baseline: dict[str, Any], sha256: str
) -> dict[str, Any]:
    """The part of regressor.json."""
    return {
        "names": list(source.table.sources),
        "schema": source.table.schema._asdict(),
        "ranges": {name: source.table.ranges.get(name) for name in source.table.schema.numbers},
        "text_columns": text_columns if source.uses_model else None,
        "baseline": baseline,
        "targets": {
            name: {
                "word_factor": target.word_factor,
                "pooling": None if not target.uses_model else target.reading.pooling,  # type: ignore[union-attr]
                "experts": [one.expert._asdict() for one in target.stack.experts],
            }
            for name, target in source.targets.items()
        },
        "shares": source.shares,
        "sha256": sha256,
    }


def source_tensors(target: TargetModel) -> dict[str, Tensor]:
    """The linear experts of a target, and how it standardises z; its chain is saved beside."""
    found: dict[str, Any] = {}
    for place, one in enumerate(target.stack.experts):
        if is_linear(one.expert):
            found[f"expert.{place}.coefficients"] = one.predictor.coefficients
            found[f"expert.{place}.intercept"] = np.array([one.predictor.intercept])
    if target.uses_model:
        assert target.reading is not None
        found |= {"reading.center": target.reading.center, "reading.spread": target.reading.spread}
    return {name: torch.from_numpy(array) for name, array in found.items()}


def write_objects(file: Path, source: SourceModel) -> None:
    """sources.skops: transformers by source, kernels by target, trees by target and expert."""
    transformers = copy.deepcopy(source.table.transformers)
    for transformer in transformers.values():
        transformer.transformers = clone(transformer).transformers  # unfitted: those are not used
        for spline in _splines(transformer):
            del spline.bsplines_
    trees = {
        f"{place}.{at}": one.predictor
        for place, target in enumerate(source.targets.values())
        for at, one in enumerate(target.stack.experts)
        if not is_linear(one.expert)
    }
    kernels = {
        str(place): target.kernel
        for place, target in enumerate(source.targets.values())
        if target.kernel is not None
    }
    found = Objects(transformers, trees, kernels)._asdict()
    file.write_bytes(load_skops().dumps(found, compression=ZIP_DEFLATED, compresslevel=1))


def _splines(transformer: ColumnTransformer) -> Iterator[SplineTransformer]:
    for _, part, _ in transformer.transformers_:
        for step in part if isinstance(part, Pipeline) else [part]:
            if isinstance(step, SplineTransformer):
                yield step


def load_skops() -> Any:
    try:
        import skops.io
    except ModuleNotFoundError:
        raise ImportError(
            "saving and loading a regressor needs skops, which is not installed: "
            + install_hint("tables")
        ) from None
    return skops.io


# ---------------------------------------------------------------- reading


def read_source_settings(
    file: Path, found: Any, asked: Sources, targets: list[str], columns: list[str]
) -> SourceRecord:
    """The part of regressor.json, every field checked; `asked` are the parameter's sources."""
    check_keys(file, "sources", found, FIELDS)
    if isinstance(found["schema"], dict):
        found["schema"].setdefault("day_first", [])  # of older files
    check_keys(file, "sources.schema", found["schema"], Schema._fields)
    for kind, names in found["schema"].items():
        check_field(file, f"sources.schema.{kind}", names, NAMES)
    schema = Schema(**found["schema"])
    ranges = found["ranges"]
    if not isinstance(ranges, dict) or {*ranges} != {*schema.numbers}:
        raise wrong(file, "sources.ranges", repr(ranges), "an object of the schema's numbers")
    for name, bounds in ranges.items():
        check_field(file, f"sources.ranges.{name}", bounds, RANGE)
    _check_baseline(file, found["baseline"], schema, columns)
    check_field(file, "sources.sha256", found["sha256"], TEXT)
    check_keys(file, "sources.targets", found["targets"], targets)
    check_keys(file, "sources.shares", found["shares"], targets)
    record = SourceRecord(
        found["names"],
        schema,
        {name: (bounds[0], bounds[1]) for name, bounds in ranges.items() if bounds},
        found["text_columns"],
        found["baseline"],
        {name: _target(file, name, found["targets"][name]) for name in targets},
        found["shares"],
        found["sha256"],
    )
    _check_names(file, record, asked)
    read = (schema.texts or columns) if record.uses_model else None
    if record.text_columns != read:
        raise wrong(file, "sources.text_columns", repr(record.text_columns), repr(read))
    for name in targets:
        field = f"sources.shares.{name}"
        check_keys(file, field, record.shares[name], record.sources_of(name))
        for source, share in record.shares[name].items():
            check_field(file, f"{field}.{source}", share, NUMBER)
    return record


def _check_names(file: Path, record: SourceRecord, asked: Sources) -> None:
    """The sources are those that a table of these columns has. The language model may be missing
    if no expert uses it (`fit_sources`), and the kernel, which older files do not know."""
    try:
        wanted = choose_sources(asked, record.schema)
    except (KeyError, ValueError):  # unknown ones, or none
        raise wrong(file, "parameters.sources", repr(asked), "sources of the columns") from None
    for name in ("model", "kernel"):
        if not record.uses(name) and name not in record.names:
            wanted = [one for one in wanted if one != name]
    if record.names != wanted:
        raise wrong(file, "sources.names", repr(record.names), repr(wanted))


def _check_baseline(file: Path, found: Any, schema: Schema, columns: list[str]) -> None:
    """A typical row has a cell of its kind in every column."""
    check_keys(file, "sources.baseline", found, columns)
    for name, cell in found.items():
        field = f"sources.baseline.{name}"
        check_field(file, field, cell, CELL)
        if name in schema.texts and cell != "":
            raise wrong(file, field, repr(cell), "an empty text")
        column, is_first = baseline_frame({name: cell})[name], name in schema.day_first
        numbers = to_numbers(column, is_first) if name in schema.numbers else ()
        if cell is not None and not np.isfinite(numbers).all():
            raise wrong(file, field, repr(cell), "a number or null")


def _target(file: Path, name: str, found: Any) -> TargetRecord:
    field = f"sources.targets.{name}"
    check_keys(file, field, found, TARGET_FIELDS)
    if found["word_factor"] not in WORD_FACTORS:
        known = f"one of {', '.join(map(str, WORD_FACTORS))}"
        raise wrong(file, f"{field}.word_factor", repr(found["word_factor"]), known)
    check_field(file, f"{field}.pooling", found["pooling"], POOLING)
    experts = found["experts"]
    if not isinstance(experts, list) or not experts:
        raise wrong(file, f"{field}.experts", repr(experts), "a list of experts")
    for one in experts:
        check_keys(file, f"{field}.experts", one, Expert._fields)
        check_field(file, f"{field}.experts.source", one["source"], one_of(list(LOSSES)))
        check_field(file, f"{field}.experts.name", one["name"], one_of([one["source"]]))
        check_field(file, f"{field}.experts.loss", one["loss"], one_of(LOSSES[one["source"]]))
        check_field(file, f"{field}.experts.steps", one["steps"], COUNT)
    experts = [Expert(**one) for one in experts]
    record = TargetRecord(found["word_factor"], found["pooling"], experts)
    uses_model = record.uses("model")
    if uses_model is not (record.pooling is not None):
        wanted = "a number" if uses_model else "null"
        raise wrong(file, f"{field}.pooling", repr(record.pooling), wanted)
    return record


def read_objects(file: Path, record: SourceRecord) -> Objects:
    """Of the types that are expected."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; {CURE}.")
    if file_sha256(file) != record.sha256:
        raise ValueError(f"{file} differs from the file that was saved with it; {CURE}.")
    found = _load_trusted(file)
    if isinstance(found, dict):
        found.setdefault("kernels", {})  # of older files
    is_right = isinstance(found, dict) and {*found} == {*Objects._fields}
    if not is_right or not {*found["transformers"]} <= {*record.names}:
        raise ValueError(f"{file} has no transformers of the saved sources; {CURE}.")
    targets = [(str(place), target) for place, target in enumerate(record.targets.values())]
    wanted = {
        "trees": {
            f"{place}.{at}"
            for place, target in targets
            for at, expert in enumerate(target.experts)
            if not is_linear(expert)
        },
        "kernels": {place for place, target in targets if target.uses("kernel")},
    }
    objects = Objects(**found)
    for kind, parts in zip(
        (ColumnTransformer, HistGradientBoostingRegressor, Nystroem), objects, strict=True
    ):
        for name, part in parts.items():
            if type(part) is not kind:
                raise wrong(file, name, f"a {type(part).__name__}", f"a {kind.__name__}")
    for name, keys in wanted.items():
        if {*found[name]} != keys:
            raise wrong(file, name, str(sorted(found[name])), str(sorted(keys)))
    for transformer in objects.transformers.values():
        for spline in _splines(transformer):
            spline.fit(spline.knots)
    return objects


def _load_trusted(file: Path) -> Any:
    """The objects of a skops file, if all types in it are trusted."""
    skops, content = load_skops(), file.read_bytes()
    try:
        unknown = sorted({*skops.get_untrusted_types(data=content)} - {*TRUSTED})
        if not unknown:
            return skops.loads(content, trusted=list(TRUSTED))
    except (
        BadZipFile,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        OSError,
        EOFError,
        zlib.error,
        NotImplementedError,  # an unknown compression
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file} is damaged ({reason[:100]}); {CURE}.") from None
    raise ValueError(
        f"{file} has objects of the type {unknown[0]}, which no regressor has, and is not loaded; "
        f"{CURE}."
    )


def to_source_model(
    record: SourceRecord,
    spaces: dict[str, ValueSpace],
    chains: list[Chain],
    tensors: list[dict[str, Tensor]],
    objects: Objects,
) -> SourceModel:
    """The parts of the three files, put together."""
    source = SourceModel(record.schema, record.names)
    table: TableFeatures = source.table
    table.transformers, table.ranges = objects.transformers, record.ranges
    source.shares = record.shares
    for place, (name, target) in enumerate(record.targets.items()):
        arrays = {key: tensor.numpy() for key, tensor in tensors[place].items()}
        experts = []
        for at, expert in enumerate(target.experts):
            predictor: Any = objects.trees.get(f"{place}.{at}")
            if is_linear(expert):
                slope, constant = (
                    arrays[f"expert.{at}.coefficients"],
                    arrays[f"expert.{at}.intercept"],
                )
                predictor = Ridge(slope, float(constant[0]), np.empty(0))
            experts.append(Fitted(expert, predictor))
        reading = None
        if target.pooling is not None:
            reading = Reading(target.pooling, arrays["reading.center"], arrays["reading.spread"])
        source.targets[name] = TargetModel(
            spaces[name],
            target.word_factor,
            reading,
            objects.kernels.get(str(place)),
            Stack(experts, chains[place]),
        )
    return source
