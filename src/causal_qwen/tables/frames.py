"""Frames: the tables that people have -> one DataFrame, and the kind of each of its columns.

    frame = to_frame(X)         # pandas, polars, pyarrow, a dict of columns, a NumPy array, records
    column_kinds(frame)         # {"carat": "number", "cut": "category", "note": "text", ...}
    to_numbers(frame["price"])  # "$1,200" -> 1200.0, NaN where a cell is no number

docs/numbers.md has the rules of the kinds. A pandas Categorical is a category, whatever its values.
Kinds depend on all rows: decide them once, on the training rows, and keep them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from numbers import Real
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from causal_qwen.tables.cells import (
    DATE,
    YEAR_LAST,
    Amount,
    is_date,
    is_missing,
    marks_differ,
    read_amount,
    shown,
)

TEXT = "text"  # the column of texts that are not in a table
LINE = "line"  # the name of an index of lines of a file
ROWS_LISTED = 5  # in a message

Kind = Literal["number", "category", "text", "date", "flag", "id"]

SHARE = 0.95  # of a column's cells that must be numbers or dates
REPEATS = 3.0  # cells per value of a category ...
FEW_VALUES, FEW_REPEATS = 20, 1.5  # ... or per value of a category of few values
WORDS, CHARACTERS = 4, 60  # of the median value of a category
ROWS_OF_IDS = 20  # in fewer rows, distinct values are no evidence of an identifier
MANY_IDS = 0.05  # a column named "id" with so few values per row is a category
CODES = 0.9  # share of the values of an identifier that are codes

ID_NAMES = frozenset(("id", "ids", "pid", "uuid", "guid", "isbn", "rowid", "rowname", "rownames"))
ROW_NAMES = frozenset(
    ("index", "idx", "key", "row", "no", "nr", "num", "number", "code", "ref", "serial", "sku")
)
TIMES = frozenset(
    ("time", "t", "year", "quarter", "month", "week", "day", "hour", "minute", "second", "period")
)
NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
UNNAMED_COLUMN = re.compile(r"Unnamed: [0-9]+|")
CODE = re.compile(r"(?=.*[0-9])[A-Za-z0-9][A-Za-z0-9._:/#-]{0,39}|[0-9a-fA-F]{16,64}")
NESTED = (list, tuple, set, dict, np.ndarray)
CJK_LETTERS = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


# ---------------------------------------------------------------- one DataFrame


def as_table(X: Any) -> Any:
    """A DataFrame, if X has columns; texts as they are: a list, a Series, an array of one column.

    A table is a frame of any library, a dict, a list of rows, an array of two dimensions.
    """
    if hasattr(X, "tocsr"):
        raise TypeError("X is a sparse matrix; pass a dense table, such as X.toarray().")
    if isinstance(X, list | tuple):
        has_columns = len(X) > 0 and isinstance(X[0], list | tuple | dict | np.ndarray)
    elif isinstance(X, np.ndarray):
        is_texts = X.shape[1:] == (1,) and any(isinstance(cell, str) for cell in X.flat)
        has_columns = X.ndim == 2 and not is_texts
    else:
        has_columns = isinstance(X, dict) or hasattr(X, "columns")
    return to_frame(X) if has_columns else X


def is_table(X: Any) -> bool:
    """Whether X is a pandas DataFrame, or behaves like one."""
    return hasattr(X, "columns") and hasattr(X, "isna")


def to_frame(X: Any) -> Any:
    """A DataFrame of X's rows, with texts as column names; X itself is never changed.

    The columns of an array are x0, x1, ... A float32 0.1 becomes 0.1, not 0.10000000149; nullable
    columns have NaN; the items of a list become one text. Two columns of one name are refused.
    """
    import pandas

    X = X.to_pandas() if hasattr(X, "to_pandas") else X
    if isinstance(X, np.ndarray | list | tuple) and not (len(X) and isinstance(X[0], dict)):
        rows = X if isinstance(X, np.ndarray) else np.array([[*row] for row in X], dtype=object)
        if rows.ndim != 2:
            raise ValueError("X is no table: give an array of two dimensions, or rows of one width")
        names = [f"x{place}" for place in range(rows.shape[1])]
        X = pandas.DataFrame(rows, columns=pandas.Index(names, dtype=object)).infer_objects()
    frame = pandas.DataFrame(X)
    frame = frame.set_axis(text_names(frame.columns), axis=1)  # shares X's cells until written
    for name in frame.columns:
        column = frame[name]
        if (plain := _plain_column(pandas, column)) is not column:
            frame[name] = plain
    return frame


def _plain_column(pandas: Any, column: Any) -> Any:
    """A column with float64 for narrow and nullable numbers; the same object if it has none."""
    kind, types = column.dtype, pandas.api.types
    if types.is_complex_dtype(kind):
        raise ValueError(f"column {column.name!r}: complex data is not supported.")
    if types.is_object_dtype(kind):
        is_nested = any(isinstance(cell, NESTED) for cell in column)
        return column.map(_flat) if is_nested else column
    if isinstance(kind, pandas.BooleanDtype):
        return column.astype(object).where(column.notna(), np.nan).infer_objects()
    is_plain = kind in (np.bool_, np.int64, np.uint64, np.float64)
    if is_plain or not types.is_numeric_dtype(kind):
        return column
    return pandas.Series(widen(column), column.index, name=column.name)


def _flat(cell: Any) -> Any:
    """["red", "blue"] is "red, blue"."""
    return ", ".join(map(str, cell)) if isinstance(cell, NESTED) else cell


def widen(values: Any) -> NDArray[np.float64]:
    """Numbers as float64; float32 and float16 -> the double with the same shortest spelling."""
    is_series = hasattr(values, "to_numpy")
    array = values.to_numpy(na_value=np.nan) if is_series else np.asarray(values)
    array = array.astype(str) if array.dtype in (np.float16, np.float32) else array
    return np.asarray(array, np.float64)


def read_texts(X: Any) -> list[str]:
    """Texts from a list, a Series, or an array of one dimension or one column."""
    if isinstance(X, str):
        raise TypeError("X is a string; give a list of texts.")
    if getattr(X, "ndim", 1) == 2 and X.shape[1] != 1:
        raise ValueError(f"X has {X.shape[1]} columns; give the one that holds the texts.")
    texts = np.asarray(X, dtype=object).ravel().tolist()
    if others := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(f"X has {others[0]!r} among its texts; give strings.")
    return texts


# ---------------------------------------------------------------- names, cells and rows


def text_names(columns: Any) -> list[str]:
    """The names of columns as texts, which must differ."""
    names = list(map(str, columns))
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
        raise ValueError(f"the table has two columns {shown(twice)}; rename one of them.")
    return names


def listed(names: str | Sequence[str] | None) -> list[str]:
    """Names, of which one may be given by itself."""
    return [names] if isinstance(names, str) else list(names or ())


def require_columns(table: Any, names: Sequence[Any]) -> None:
    for name in names:
        if name not in table.columns:
            existing = ", ".join(map(repr, table.columns))
            raise ValueError(f"there is no column {name!r}; the table has {existing}.")


def plain(cell: Any) -> Any:
    """A cell of a type that every file has; dates are texts, which are read as dates again."""
    cell = cell.item() if isinstance(cell, np.generic) else cell
    if isinstance(cell, str | int | float | None):
        return cell
    return cell.isoformat() if isinstance(cell, date) else str(cell)


def name_rows(rows: Any, index: Any = None) -> str:
    """ "row 3", "rows 3, 5", "9 rows (3, 5, 7, 8, 9, ...)"; by `index`, a table's labels.

    A table read from a file has its lines as the index: "line 3".
    """
    noun = LINE if getattr(index, "name", None) == LINE else "row"
    names = [str(row if index is None else index[row]) for row in map(int, rows[:ROWS_LISTED])]
    listed = ", ".join(names)
    if len(rows) > ROWS_LISTED:
        return f"{len(rows)} {noun}s ({listed}, ...)"
    return f"{noun} {listed}" if len(rows) == 1 else f"{noun}s {listed}"


# ---------------------------------------------------------------- kinds of columns


def column_kinds(frame: Any) -> dict[str, Kind]:
    """Name -> kind, for every column; docs/numbers.md has the rules."""
    return {name: "id" if _is_id(frame[name]) else _kind(frame[name]) for name in frame.columns}


def _is_id(column: Any) -> bool:
    """Whether a column numbers or names its rows: whole numbers or codes, never words.

    By name: "id", "uuid", "rownames", ... as the first or the last word ("Individual ID",
    "job_ad_id", "Unnamed: 0"), if all values are distinct, or more than 20 and more than 5% of the
    rows. With at least 20 rows and all values distinct also: a name that ends in "index", "key",
    ...; codes with digits (N1A1); row numbers, from 0 to at most twice the number of rows (not in a
    column named for a time: day).
    """
    name, distinct = str(column.name), _distinct(column)
    values = [a.value if isinstance(v, str) and (a := read_amount(v)) else v for v in distinct]
    count, are_whole = len(values), _are_whole(values)
    texts = (value for value in values if isinstance(value, str))
    codes = sum(CODE.fullmatch(text) is not None and not is_date(text) for text in texts)
    if count < 2 or not (are_whole or codes >= CODES * count):
        return False
    is_distinct = count == int(column.notna().sum())
    words = _words(name)
    if UNNAMED_COLUMN.fullmatch(name) or not ID_NAMES.isdisjoint((words[0], words[-1])):
        return is_distinct or count > max(FEW_VALUES, MANY_IDS * len(column))
    if "".join(words) in ID_NAMES:  # row_names
        return is_distinct
    if not is_distinct or count < ROWS_OF_IDS:
        return False
    if words[-1] in ROW_NAMES or not are_whole:
        return True
    numbers = np.array([float(value) for value in values])
    is_numbering = numbers.min() >= 0 and numbers.max() <= 2 * count
    return bool(is_numbering and TIMES.isdisjoint(words))


def _words(name: Any) -> list[str]:
    return [word.lower() for word in NAME_WORDS.findall(str(name))] or [""]


def _distinct(column: Any) -> list[Any]:
    return column.dropna().unique().tolist()


def _are_whole(values: Sequence[Any]) -> bool:
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()
        for value in values
    )


def _kind(column: Any) -> Kind:
    import pandas

    types = pandas.api.types
    if isinstance(column.dtype, pandas.CategoricalDtype):
        return "category"
    if types.is_bool_dtype(column.dtype):
        return "flag"
    if types.is_datetime64_any_dtype(column.dtype):
        return "date"
    if types.is_numeric_dtype(column.dtype):  # store_id, 1 to 5, is a category
        words, distinct = _words(column.name), _distinct(column)
        is_id = not ID_NAMES.isdisjoint((words[0], words[-1])) and _are_whole(distinct)
        return "category" if is_id and 1 < len(distinct) <= FEW_VALUES else "number"
    counts = column.value_counts(sort=False)
    is_given = [not (isinstance(value, str) and is_missing(value)) for value in counts.index]
    values, sizes = counts.index[is_given].tolist(), counts.to_numpy()[is_given]
    if not values:
        return "text"
    if all(isinstance(value, bool | np.bool_) for value in values):
        return "flag"

    def is_most(holds: Sequence[bool]) -> bool:
        return bool(np.dot(np.array(holds, dtype=float), sizes) >= SHARE * sizes.sum())

    if is_most([_is_date_cell(value) for value in values]):
        return "date"
    amounts = [_amount(value) for value in values]
    is_number = is_most([amount is not None for amount in amounts])
    if is_number and not marks_differ(amount.mark for amount in amounts if amount is not None):
        return "number"
    repeats = sizes.sum() / len(values)
    is_repeated = repeats >= REPEATS or (len(values) <= FEW_VALUES and repeats >= FEW_REPEATS)
    texts = list(map(str, values))
    lengths = [len(text.split()) + len(CJK_LETTERS.findall(text)) / 2 for text in texts]
    is_short = np.median(lengths) <= WORDS and np.median([*map(len, texts)]) <= CHARACTERS
    return "category" if is_repeated and is_short else "text"


def _is_date_cell(value: Any) -> bool:
    return is_date(value) if isinstance(value, str) else isinstance(value, date)


def _amount(value: Any) -> Amount | None:
    if isinstance(value, str):
        return read_amount(value)
    is_number = isinstance(value, Real | Decimal) and not isinstance(value, bool)
    return Amount(float(value), "") if is_number else None


# ---------------------------------------------------------------- numbers of a column


def to_numbers(column: Any, day_first: bool | None = None) -> NDArray[np.float64]:
    """A column of kind number, flag or date as float64: NaN where a cell is none.

    Amounts keep their number ("5%" is 5), flags are 0 and 1, dates are days since 1970. A few
    cells do not show whether 5/6/2024 is in May: `day_first` is that of all (`is_day_first`).
    """
    import pandas

    types = pandas.api.types
    if types.is_datetime64_any_dtype(column.dtype):
        return _days(pandas, column)
    if types.is_numeric_dtype(column.dtype):
        return widen(column)
    cells = column.tolist()
    if any(_is_date_cell(cell) for cell in cells[:100]) and _kind(column) == "date":
        first = is_day_first(column) if day_first is None else day_first
        texts = pandas.Series([str(cell) if _is_date_cell(cell) else None for cell in cells])
        options = {"utc": True, "errors": "coerce"}
        is_iso = texts.str.strip().str.fullmatch(DATE).fillna(False).astype(bool)
        found = pandas.to_datetime(texts.where(is_iso), format="ISO8601", **options)
        others = texts.where(~is_iso)
        others = pandas.to_datetime(others, format="mixed", dayfirst=first, **options)
        return _days(pandas, found.fillna(others))
    found = [float(cell) if isinstance(cell, bool | np.bool_) else _amount(cell) for cell in cells]
    values = [one.value if isinstance(one, Amount) else one for one in found]
    return np.array(values, dtype=np.float64)


def is_day_first(column: Any) -> bool:
    """Whether 5/6/2024 is in June: a column of texts shows it by a number above 12. A warning says
    how dates are read that do not show it: 5/6/2024 is in May, 5.6.2024 in June."""
    texts = (value for value in _distinct(column) if isinstance(value, str))
    found = [match for text in texts if (match := YEAR_LAST.fullmatch(text.strip()))]
    if not found or any(int(match[1]) > 12 for match in found):
        return bool(found)
    if any(int(match[3]) > 12 for match in found):
        return False
    first = found[0][2] == "."
    warnings.warn(
        f"{column.name}: dates such as {shown(found[0][0])} are read with the "
        f"{'day' if first else 'month'} first; write 2024-05-01 if that is wrong.",
        stacklevel=3,
    )
    return first


def calendar(days: NDArray[np.float64], part: str) -> NDArray[np.float64]:
    """The `year`, `month`, `weekday` or `hour` of days since 1970; NaN for NaN."""
    import pandas

    times = pandas.to_datetime(days, unit="D", errors="coerce").round("s")
    return np.asarray(getattr(times, part.replace("weekday", "day_of_week")), dtype=np.float64)


def _days(pandas: Any, times: Any) -> NDArray[np.float64]:
    start = pandas.Timestamp(0, tz="UTC" if getattr(times.dtype, "tz", None) else None)
    return np.asarray((times - start) / pandas.Timedelta(days=1), dtype=np.float64)
