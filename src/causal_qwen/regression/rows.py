"""Rows: the columns and rows of a DataFrame, as messages name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from causal_qwen.regression.cells import is_missing
from causal_qwen.training.data import shown

ROWS_LISTED = 5  # in a message
LINE = "line"  # the name of an index of lines of a file
TEXT = "text"  # the column of texts that are not in a table


def require_columns(table: Any, names: Sequence[Any]) -> None:
    for name in names:
        if name not in table.columns:
            existing = ", ".join(map(repr, table.columns))
            raise ValueError(f"there is no column {name!r}; the table has {existing}.")


def is_table(X: Any) -> bool:
    """Whether X is a pandas DataFrame, or behaves like one."""
    return hasattr(X, "columns") and hasattr(X, "isna")


def row_index(X: Any) -> Any:
    """The index of a DataFrame, which names its rows in messages; None for texts."""
    return X.index if is_table(X) else None


def name_rows(rows: Any, index: Any = None) -> str:
    """ "row 3", "rows 3, 5 and 7", "9 rows (3, 5, 7, 8, 9, ...)"; by `index`, a table's labels.

    A table read from a file has its lines as the index: "line 3".
    """
    noun = LINE if getattr(index, "name", None) == LINE else "row"
    shown = [int(row) for row in rows[: ROWS_LISTED + 1]]
    names = [str(row if index is None else index[row]) for row in shown]
    if len(names) == 1:
        return f"{noun} {names[0]}"
    if len(names) <= ROWS_LISTED:
        return f"{noun}s {', '.join(names[:-1])} and {names[-1]}"
    return f"{len(rows)} {noun}s ({', '.join(names[:ROWS_LISTED])}, ...)"


def name_lines(
    noun: str, places: Sequence[int], cells: Sequence[Any], rows: Sequence[int] | Any, name: str
) -> str:
    """ "lines 5 and 7 (line 7: price 'cheap')": where rows of a file are, and a cell of theirs,
    which is not a missing one if there is another."""
    texts = [str(cells[row]) for row in rows]
    found = [places[row] for row in rows]
    where = name_rows(found).replace("row", noun, 1)
    seen = next((at for at, text in enumerate(texts) if not is_missing(text)), 0)
    return f"{where} ({noun} {found[seen]}: {name} {shown(texts[seen])})"
