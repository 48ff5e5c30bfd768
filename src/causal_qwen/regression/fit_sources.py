"""Fit of several sources: a frame and labels -> experts, their chains and calibration.

    kinds of the columns -> sources -> what the language model reads -> SourceModel -> Target

Of many texts a sample shows how the language model is to read the others, or that it need not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.regression.experts import Evidence
from causal_qwen.regression.explanation import baseline_row
from causal_qwen.regression.features import MIDDLE
from causal_qwen.regression.fitted import fit_target, say_credibility
from causal_qwen.regression.inputs import source_texts
from causal_qwen.regression.reading import announce, backbone_record, read_frame, warn_long_texts
from causal_qwen.regression.sentences import text_names
from causal_qwen.regression.settings import value_spaces
from causal_qwen.regression.source_choice import choose_sources, split_rows, without_ids
from causal_qwen.regression.source_model import Hidden, SourceModel
from causal_qwen.regression.sources import Schema, with_inner_numbers
from causal_qwen.tables.frames import column_kinds
from causal_qwen.tables.rows import TEXT
from causal_qwen.terminal import progress_bar

if TYPE_CHECKING:
    from causal_qwen.regression.regressor import CausalTextRegressor

Array = NDArray[np.float64]

MANY_TEXTS = 2000  # distinct ones, of which a sample shows how the language model is to read
SAMPLE = 1000  # rows


def fit_sources(
    regressor: CausalTextRegressor,
    frame: Any,
    values: dict[str, Array],
    weights: Array,
    groups: Any,
) -> None:
    """Set `source_`, `targets_`, `evidence_` and, if the language model reads, `backbone_`."""
    kinds = column_kinds(frame)
    if regressor.columns_ is None:
        kinds = {TEXT: "text"}
    kinds |= dict.fromkeys(text_names(regressor.text), "text")
    kinds = without_ids(kinds, regressor.columns is not None)
    dates = [name for name, kind in kinds.items() if kind == "date"]
    schema = with_inner_numbers(Schema.of_kinds(kinds), frame, dates)
    chosen, labels = choose_sources(regressor.sources, schema), (values, weights, groups)
    z = None
    if "model" in chosen:
        regressor.text_columns_ = schema.texts or list(kinds)
        texts = source_texts(regressor, frame)
        warn_long_texts(regressor, texts, index=frame.index)
        announce(regressor, texts)
        places: Sequence[int] = range(len(MIDDLE))
        if regressor.cv is None and len(set(texts)) >= MANY_TEXTS:
            places = _useful_poolings(regressor, SourceModel(schema, chosen), frame, *labels)
        if places:
            z = read_frame(regressor, frame, places)
            regressor.backbone_ = backbone_record(regressor)
        else:
            chosen = [name for name in chosen if name != "model"]
    source = SourceModel(schema, chosen)
    evidence = _fit_source(regressor, source, frame, z, *labels)
    regressor.source_ = source
    if not source.uses_model:
        regressor.__dict__.pop("backbone_", None)
    regressor.evidence_ = {}
    for name, found in evidence.items():
        fitted = fit_target(source.targets[name], values[name], weights, found, regressor.support)
        regressor.targets_[name], regressor.evidence_[name] = fitted
        say_credibility(name, found.credibility.share)
    regressor.rows_ = frame.index
    regressor.baseline_ = baseline_row(frame, source.table.schema)


def _fit_source(
    regressor: CausalTextRegressor,
    source: SourceModel,
    frame: Any,
    z: Hidden | None,
    values: dict[str, Array],
    weights: Array,
    groups: Any,
) -> dict[str, Evidence]:
    """Fit `source` in place, with a progress bar."""
    stages, total = 0, len(values) * (3 if len(source.table.sources) == 1 else 8)
    with progress_bar("fitting", regressor.verbose) as progress:

        def done() -> None:
            nonlocal stages
            stages += 1
            if stages < total:  # an estimate
                progress(stages, total)

        evidence = source.fit(
            frame,
            z,
            values,
            weights,
            split_rows(len(frame), groups, regressor.cv, regressor.folds, regressor.seed_, weights),
            spaces=value_spaces(regressor.value_space),
            seed=regressor.seed_,
            done=done,
            is_random=regressor.cv is None and groups is None,
        )
        progress(total, total)
    return evidence


def _useful_poolings(
    regressor: CausalTextRegressor,
    trial: SourceModel,
    frame: Any,
    values: dict[str, Array],
    weights: Array,
    groups: Any,
) -> list[int]:
    """Those that a trial fit to some rows uses, so that the language model reads the other rows
    no further; none if unseen labels are not likelier with it."""
    rows = np.random.default_rng(regressor.seed_).permutation(len(frame))[:SAMPLE]
    some = {name: column[rows] for name, column in values.items()}
    of_group = None if groups is None else groups[rows]
    every = list(range(len(MIDDLE)))
    if of_group is not None and len(set(of_group)) < 2:  # which cannot be split
        return every
    z = read_frame(regressor, frame.iloc[rows], every)
    _fit_source(regressor, trial, frame.iloc[rows], z, some, weights[rows], of_group)
    if regressor.verbose and not trial.uses_model:
        what = f"{SAMPLE:,} rows are not predicted better with the language model"
        print(f"{what}, which does not read the others.", file=sys.stderr, flush=True)
    return trial.poolings
