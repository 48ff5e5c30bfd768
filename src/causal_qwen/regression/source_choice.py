"""Source choice: a table -> how each of its columns is read, which sources there are, and how rows
are split for cross-validation.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.model_selection import GroupKFold, KFold, check_cv

from causal_qwen.regression.sources import SOURCES, Schema
from causal_qwen.tables.frames import Kind
from causal_qwen.terminal import counted

Sources = str | Sequence[str]

LEAST_ROWS = 2  # with a weight, of a training part


def source_names(sources: Sources) -> list[str]:
    return [sources] if isinstance(sources, str) else list(dict.fromkeys(sources))


def without_ids(kinds: dict[str, Kind], is_asked_for: bool) -> dict[str, Kind]:
    """Columns that only name rows are left out, with a warning, unless there are no others or
    they were asked for: then they are categories."""
    ids = [name for name, kind in kinds.items() if kind == "id"]
    if not ids:
        return kinds
    if len(ids) == len(kinds) or is_asked_for:
        return {**kinds, **dict.fromkeys(ids, "category")}
    names = ", ".join(map(repr, ids))
    warnings.warn(f"left out, because they only name rows: {names}.", stacklevel=4)
    return kinds


def choose_sources(sources: Sources, schema: Schema) -> list[str]:
    """Those that the table has, in the order of SOURCES. The language model can always be asked
    for; `auto` takes it only for texts."""
    has = {
        "columns": bool(schema.numbers or schema.categories),
        "words": bool(schema.texts),
        "kernel": True,
        "boosting": True,
        "model": bool(schema.texts),
    }
    if sources == "auto":
        return [name for name in SOURCES if has[name]]
    chosen = source_names(sources)
    if not any(has[name] or name == "model" for name in chosen):
        raise ValueError(
            f"sources={sources!r}: the table has no {' or '.join(chosen)}; add another."
        )
    found = [name for name in SOURCES if name in chosen and (has[name] or name == "model")]
    if "kernel" in found and not {"columns", "words"} & {*found}:
        raise ValueError(
            f"sources={sources!r}: 'kernel' compares rows by columns and words; add one of them."
        )
    return found


def split_rows(
    rows: int, groups: Any, cv: Any, folds: int, seed: int, weights: Any = None
) -> list[tuple[Any, Any]]:
    """(training, test) rows: by `cv`, else by groups, else at random. All training parts need rows
    whose weight is above 0."""
    if cv is not None:
        splitter = check_cv(cv)
    elif groups is not None:
        splitter = GroupKFold(min(folds, len(np.unique(groups))))
    else:
        splitter = KFold(min(folds, rows), shuffle=True, random_state=seed)
    splits = list(splitter.split(np.zeros(rows), None, groups))
    has_weight = np.ones(rows, bool) if weights is None else weights > 0
    least = min(has_weight[training].sum() for training, _ in splits)
    if not has_weight.all() and least < LEAST_ROWS:
        raise ValueError(
            f"{counted(int(has_weight.sum()), 'row has', 'rows have')} a weight above 0, too few "
            f"to split {rows} rows for cross-validation; give more rows a weight."
        )
    return splits
