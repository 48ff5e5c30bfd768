"""Rows: the header and rows of a table, as messages name them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from causal_qwen.tables.cells import is_missing
from causal_qwen.terminal import counted

ROWS_LISTED = 5  # in a message
LINE = "line"  # the name of an index of lines of a file
SHOWN = 60  # characters of a line or cell in a message
TEXT = "text"  # the column of texts that are not in a table


def column_names(path: str, header: list[str]) -> list[str]:
    """The names of a CSV file's columns; one without a name has that which pandas gives it."""
    named = [name or f"Unnamed: {place}" for place, name in enumerate(header)]
    if len(set(named)) < len(named):
        twice = Counter(named).most_common(1)[0][0]
        raise ValueError(f"{path} has two columns {shown(twice)}; rename one of them.")
    return named


def check_width(
    path: str, line: int, text: str, cells: int, names: int, separator: str = "comma"
) -> None:
    """Refuse a row of a CSV file with more or fewer cells than the header: its cells would be in
    the wrong columns."""
    if cells == names:
        return
    example = ', such as "1,870"' if separator == "comma" else ""
    cure = f"quote a cell that contains a {separator}{example}"
    if cells < names:
        cure = f"write a {separator} for every empty cell, and check that the file is complete"
    raise ValueError(
        f"{path}, line {line} has {counted(cells, 'cell')} and the header {names}: {shown(text)}; "
        f"{cure}."
    )


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


def shown(text: str) -> str:
    """A line or cell in a message."""
    text = text.rstrip("\r\n")
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}...")
