"""Sentences: the rows of a DataFrame -> one sentence each.

    carat  cut    depth_pct               carat is 0.23, cut is Ideal, depth pct is unknown.
    0.23   Ideal  NaN             ->      The price is

A template such as "A {carat} carat diamond, cut {cut}" sets the wording; without one the sentence
lists the columns' names, values and units ("weight (kg)" or "weight [kg]" has its own unit). A
missing value is "unknown". Columns of free text come first, verbatim.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.tables.rows import name_rows, require_columns
from causal_qwen.terminal import counted
from causal_qwen.text.numerals import render
from causal_qwen.training.data import PLACE

Array = NDArray[np.float64]

UNKNOWN = "unknown"
DIGITS, WHOLE = 10, 1e15  # whole numbers are written out up to here
UNIT = re.compile(r"^(.*\S)\s*[(\[]([^()\[\]]+)[)\]]$")
SENTENCE_END = re.compile(r"[.!?:;。！？]$")


def to_sentences(
    table: Any,
    columns: Sequence[Any],
    *,
    template: str | None = None,
    text: Sequence[Any] = (),
    units: Mapping[Any, str] | None = None,
    question: str = "",
) -> list[str]:
    """A sentence for every row of a DataFrame, from `columns`, followed by `question`."""
    require_columns(table, [*columns, *text])
    used = [*text, *(column for column in columns if column not in text)]
    cells = {column: _cells(table[column], column in text) for column in used}
    rows = [dict(zip(used, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    if template is not None:
        made = [_fill(template, row) for row in rows]
    else:
        names = {column: _name_and_unit(column, units or {}) for column in used}
        made = [_describe(row, text, names) for row in rows]
    return [join_sentences(sentence, question) for sentence in made]


def text_names(text: str | Sequence[str] | None) -> list[str]:
    """The columns of free text, of which one may be given by its name alone."""
    return [text] if isinstance(text, str) else list(text or ())


def used_columns(table: Any, *, template: str | None, without: Sequence[Any]) -> list[Any]:
    """The columns that sentences are made of: the template's, or all but `without`."""
    if template is None:
        return [column for column in table.columns if column not in without]
    columns = template_columns(template, without)
    require_columns(table, columns)
    return columns


def template_columns(template: str, targets: Sequence[Any]) -> list[str]:
    """The columns that a template names, each once; `targets` are refused."""
    columns = list(dict.fromkeys(PLACE.findall(template)))
    if not columns:
        raise ValueError(f"template={template!r} has no column; write {{price}} for one.")
    if known := [name for name in columns if name in targets]:
        raise ValueError(f"the template contains the target {known[0]!r}; leave it out.")
    return columns


def empty_columns(table: Any, columns: Sequence[Any]) -> list[Any]:
    """The columns in which no row has a value."""
    return [column for column in columns if not any(_cells(table[column], True))]


def ask_for(names: Sequence[str]) -> str:
    """The words that the targets' numbers would follow."""
    words = [_words(name) for name in names]
    if len(words) == 1:
        return f"The {words[0]} is"
    return f"The {', '.join(words[:-1])} and {words[-1]} are"


def join_sentences(first: str, second: str) -> str:
    if not second:
        return first
    return f"{first} {second}" if SENTENCE_END.search(first) else f"{first}. {second}"


def _fill(template: str, row: Mapping[Any, str]) -> str:
    return PLACE.sub(lambda place: row[place[1]] or UNKNOWN, template)


def _describe(
    row: Mapping[Any, str], text: Sequence[Any], names: Mapping[Any, tuple[str, str]]
) -> str:
    free_text = " ".join(row[column] for column in text if row[column])
    parts = []
    for column, cell in row.items():
        if column not in text:
            name, unit = names[column]
            parts.append(f"{name} is {f'{cell} {unit}'.strip() if cell else UNKNOWN}")
    listed = ", ".join(parts)
    return join_sentences(free_text, listed) if free_text else listed


def _cells(column: Any, is_text: bool) -> list[str]:
    """Every cell as text, "" where it is missing."""
    pairs = zip(column.tolist(), column.isna().tolist(), strict=True)
    return ["" if is_missing else _to_text(value, is_text) for value, is_missing in pairs]


def _to_text(value: Any, is_text: bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        is_whole = value.is_integer() and abs(value) < WHOLE
        return str(int(value)) if is_whole else render(value, DIGITS)
    if isinstance(value, datetime) and value.time() == datetime.min.time():
        value = value.date()
    if isinstance(value, date):
        return value.isoformat()
    words = " ".join(str(value).split())
    return words if is_text else words.replace("_", " ")


def _name_and_unit(column: Any, units: Mapping[Any, str]) -> tuple[str, str]:
    found = UNIT.match(str(column))
    name, unit = found.groups() if found and column not in units else (str(column), "")
    return _words(name), units.get(column, unit)


def _words(name: Any) -> str:
    return " ".join(str(name).replace("_", " ").split())


# ---------------------------------------------------------------- texts and weights


def read_texts(X: Any) -> list[str]:
    """Texts from a list, a Series, or an array of one dimension or one column."""
    if isinstance(X, str):
        raise TypeError("X is a string; give a list of texts.")
    if getattr(X, "ndim", 1) == 2:
        if X.shape[1] != 1:
            columns = counted(X.shape[1], "column")
            raise ValueError(f"X has {columns}; give a DataFrame, which names them.")
        X = np.asarray(X)[:, 0]
    texts = list(X)
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"X[{row}] is {type(text).__name__}; give a string.")
    return [str(text) for text in texts]


def read_weights(sample_weight: Any, rows: int) -> Array:
    """One weight per row; 1 by default."""
    weights = np.ones(rows) if sample_weight is None else np.asarray(sample_weight, np.float64)
    if weights.shape != (rows,) or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(f"sample_weight must be {rows} finite numbers of at least 0.")
    if rows and not weights.any():
        raise ValueError("sample_weight is zero for every row; give some row a weight.")
    return weights


def usable_rows(
    texts: list[str], values: dict[str, Array], bad_rows: str, index: Any = None
) -> tuple[list[str], dict[str, Array], NDArray[np.bool_]]:
    """Rows with a text and finite targets; other rows raise an error, or are skipped and named."""
    for name, column in values.items():
        if len(column) != len(texts):
            raise ValueError(
                f"target {name!r} has {counted(len(column), 'value')} for "
                f"{counted(len(texts), 'row')}."
            )
    is_usable = np.array([bool(text.strip()) for text in texts], dtype=bool)
    empty = np.flatnonzero(~is_usable)
    why = [f"{name_rows(empty, index)} without a text"] if len(empty) else []
    for name, column in values.items():
        if len(rows := np.flatnonzero(~np.isfinite(column))):
            why.append(f"target {name!r} is NaN or infinite in {name_rows(rows, index)}")
            is_usable[rows] = False
    if why and bad_rows == "raise":
        raise ValueError(f"{'; '.join(why)}: correct them, drop them, or set bad_rows='skip'.")
    if why:
        skipped = int((~is_usable).sum())
        rows_are = counted(skipped, "row is", "rows are")
        warnings.warn(f"{rows_are} skipped: {'; '.join(why)}.", stacklevel=3)
    kept = [texts[row] for row in np.flatnonzero(is_usable)]
    return kept, {name: column[is_usable] for name, column in values.items()}, is_usable
