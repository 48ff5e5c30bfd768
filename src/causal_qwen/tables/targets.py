"""Targets: the numbers to predict, from names of columns, arrays, tables or cells as written.

    read_targets(frame, "price")               # {"price": [1200.0, ...]}, from "$1,200", 1200, ...
    read_targets(texts, {"a": [1], "b": [2]})  # several targets

A cell is read by itself (`causal_qwen.tables.cells`), and a warning shows one that is more than
digits. What differs in unit is refused: "5%" beside "0.05", "$5" beside "€5". So are dates.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.tables import frames
from causal_qwen.tables.cells import DIGITS, is_missing, marks_differ, read_target, shown
from causal_qwen.terminal import counted

Array = NDArray[np.float64]

UNNAMED = "value"  # a target without a name ...
OTHERWISE = "target"  # ... beside a column of that name


def read_targets(X: Any, y: Any) -> tuple[dict[str, Array], bool]:
    """Name -> values in float64, and whether `y` is one target that is not in a list."""
    if _are_names(X, y):
        is_single = isinstance(y, str | int)
        names = frames.text_names([y] if is_single else y)
        if not frames.is_table(X):
            raise ValueError(f"y={names[0]!r} names a column, but X is not a table; give values.")
        frames.require_columns(X, names)
        return {name: _numbers(name, X[name], X.index) for name in names}, is_single
    is_single = False
    if isinstance(y, dict):
        columns = y
    elif hasattr(y, "columns"):
        columns = dict(frames.to_frame(y).items())
    elif np.ndim(y) == 2:
        columns = {f"{UNNAMED} {at}": column for at, column in enumerate(np.asarray(y).T, 1)}
    elif is_single := np.ndim(y) == 1:
        unnamed = OTHERWISE if frames.is_table(X) and UNNAMED in X.columns else UNNAMED
        columns = {getattr(y, "name", None) or unnamed: y}
    else:
        raise ValueError("y must be numbers, one per row, or names of the table's columns.")
    index = X.index if frames.is_table(X) else None
    found = {str(name): _numbers(str(name), one, index) for name, one in columns.items()}
    return found, is_single


def check_rows(rows: Any, values: dict[str, Array]) -> None:
    """Refuse targets of another length than `rows`, a table's index, or that are not finite."""
    for name, column in values.items():
        if len(column) != len(rows):
            both = f"{counted(len(column), 'value')} for {counted(len(rows), 'row')}"
            raise ValueError(f"target {name!r} has {both}.")
        if len(bad := np.flatnonzero(~np.isfinite(column))):
            where = frames.name_rows(bad, rows)
            raise ValueError(
                f"target {name!r} is NaN or infinite in {where}: correct or drop them."
            )


def check_variety(name: str, values: Array) -> None:
    """Refuse labels of which nothing can be learned."""
    if len(values) < 2:
        raise ValueError(f"{counted(len(values), 'row')} are too few to learn from.")
    if values.min() == values.max():
        raise ValueError(f"target {name!r} is constant ({values[0]:g} in all {len(values)} rows).")


def _are_names(X: Any, y: Any) -> bool:
    """Whether y names columns; texts such as "$1,200", one per row, are values."""
    if isinstance(y, str | int):
        return True
    if not (isinstance(y, list | tuple) and y and all(isinstance(name, str) for name in y)):
        return False
    has_one = frames.is_table(X) and any(name in X.columns for name in y)
    return has_one or not all(is_missing(cell) or read_target(cell) for cell in y)


def _numbers(name: str, column: Any, index: Any = None) -> Array:
    array = np.asarray(column)
    if array.dtype.kind in "biuf":
        return frames.widen(array)
    cells = list(array.astype(str) if array.dtype.kind in "mM" else array.tolist())
    values, unread = read_cells(name, cells)
    if unread:
        where, cell = frames.name_rows(unread, index), shown(str(cells[unread[0]]))
        raise ValueError(
            f"target {name!r} has no number in {where}, such as {cell}; correct or drop them (of "
            "dates, give the days since the first)."
        )
    return values


def read_cells(
    name: str, cells: Sequence[Any], written: Sequence[str] | None = None
) -> tuple[Array, list[int]]:
    """The numbers of a column's cells, and the rows of cells that are neither missing nor numbers.
    `written` are the cells to show, if others are read.

    A warning counts the cells that are more than digits, and shows one with its value.
    """
    texts = [str(cell) for cell in written or cells]
    values, unread, amounts = np.full(len(texts), np.nan), [], []
    marks: dict[str, int] = {}  # -> the first row
    for row, cell in enumerate(cells):
        if isinstance(cell, str):
            if is_missing(cell):
                continue
            if (amount := read_target(cell)) is None:
                unread.append(row)
                continue
            values[row] = amount.value
            marks.setdefault(amount.mark, row)
            if DIGITS.fullmatch(cell.strip()) is None:
                amounts.append(row)
        elif texts[row] not in ("None", "<NA>", "NaT", "nan"):
            try:
                values[row] = float(cell)
            except (TypeError, ValueError):
                unread.append(row)
    if marks_differ(marks):
        one, other = [shown(texts[row]) for row in marks.values()][:2]
        raise ValueError(
            f"target {name!r} has cells of different units, {one} and {other}; write all of them "
            "in one."
        )
    if amounts:
        are = "cell {} is read as a number" if len(amounts) == 1 else "cells {} are read as numbers"
        such = are.format(f"such as {shown(texts[amounts[0]])}")
        value = f"{values[amounts[0]]:.15g}"
        warnings.warn(f"{name}: {len(amounts)} {such} ({value}).", stacklevel=3)
    return values, unread
