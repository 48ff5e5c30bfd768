"""Table files: CSV, parquet, Excel and JSON, by the file's extension.

    table = read_table("rings.parquet")
    table.frame()                # typed values, a row for every row of the file
    write_table(table.beside(price_predicted=values), partial, "answers.xlsx")

    .parquet .pq     pyarrow
    .xlsx            openpyxl, the first sheet
    .jsonl .ndjson   an object per line
    .json            a list of objects
    anything else    CSV with a header

A CSV file is UTF-8 unless its encoding is named; its separator is that with which most of the first
rows are as wide as the header. A row of another width is refused and its line named: it usually has
an unquoted comma (1,870). (pandas' own reader fills short rows up and may cut long ones.)
"""

from __future__ import annotations

import bz2
import csv
import gzip
import importlib
import io
import json
import lzma
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.tables.cells import find_decimal, read_cell, shown, with_point
from causal_qwen.tables.frames import LINE, name_rows, plain, text_names, to_frame
from causal_qwen.tables.targets import read_cells
from causal_qwen.terminal import counted

File = str | os.PathLike[str]

KINDS = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".xlsx": "Excel",
    ".json": "JSON",
}
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
SEPARATORS = ",;\t|"
SAMPLE = 2**20  # characters from which the separator is found
ROWS_COMPARED = 200


@dataclass(frozen=True)
class Table:
    """The cells of a file as it has them (of a CSV file, texts): a DataFrame, whose index has the
    places of the rows in the file, and their name, "row" or "line"."""

    path: str
    cells: Any
    separator: str = ","  # of a CSV file, as is the next
    decimal: str = "."

    def frame(self) -> Any:
        """A DataFrame of typed values with the same index."""
        if table_kind(self.path) != "csv":
            return to_frame(self.cells.infer_objects())
        return self.cells.map(read_cell, decimal=self.decimal)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column as numbers, NaN where a cell is none: "5 kg" and "True" are none.

        A warning shows a cell that is more than digits, such as "$1,200".
        """
        cells = self.cells[name].tolist()
        moved = list(map(with_point, cells)) if self.decimal == "," else cells
        return read_cells(name, moved, cells)[0]

    def name_cells(self, rows: Any, name: str) -> str:
        """ "lines 5 and 7: price 'n/a'": where rows are, and their first cell that is not empty."""
        texts = (str(cell) for cell in self.cells[name].iloc[rows])
        seen = next((f" {shown(text)}" for text in texts if text.strip()), "")
        return f"{name_rows(rows, self.cells.index)}: {name}{seen}"

    def records(self) -> list[dict[str, Any]]:
        """The rows with JSON's values: dates are texts, NaN and infinities None."""

        def plainly(cell: Any) -> Any:  # JSON has no infinities; lists and objects are its own
            cell = cell if isinstance(cell, list | dict) else plain(cell)
            return None if isinstance(cell, float) and not math.isfinite(cell) else cell

        rows = self.cells.astype(object).to_dict(orient="records")
        return [{name: plainly(cell) for name, cell in row.items()} for row in rows]

    def csv(self) -> bytes:
        """As a CSV file in UTF-8, with the separator and the decimal mark of the input."""
        options = {"sep": self.separator, "decimal": self.decimal, "lineterminator": "\n"}
        text: str = self.cells.to_csv(index=False, **options)
        return text.encode()


def table_kind(path: File) -> str:
    """ "csv", "parquet", "Excel", "jsonl" or "JSON"; .gz and its kin are passed over."""
    name = Path(path)
    name = name.with_suffix("") if name.suffix.lower() in OPENERS else name
    return KINDS.get(name.suffix.lower(), "csv")


# ---------------------------------------------------------------- reading


def read_table(path: File, **dialect: str | None) -> Table:
    """Read a file with a header and at least one row; `dialect` are the `separator`, `encoding` and
    `decimal` of a text file, if they cannot be found."""
    named = {option: value for option, value in dialect.items() if value is not None}
    import pandas

    with _naming(path) as (name, kind):
        if named and kind != "csv":
            raise ValueError(f"{path} is no CSV file, so {', '.join(named)} has no effect.")
        if kind == "csv":
            table = _read_csv(name, **named)
        elif kind == "parquet":  # pandas' metadata would make an index of a column
            parquet = importlib.import_module("pyarrow.parquet")
            table = Table(name, parquet.ParquetFile(name).read().to_pandas(ignore_metadata=True))
        elif kind == "Excel":
            frame = pandas.read_excel(name, dtype=object, keep_default_na=False, engine="openpyxl")
            table = Table(name, frame.mask(frame.eq("")))
        else:
            objects = dict(_json_objects(name, kind))
            index = pandas.Index(objects, name=LINE if kind == "jsonl" else "row")
            table = Table(name, pandas.DataFrame([*objects.values()], index, dtype=object))
        if not len(table.cells):
            raise ValueError(f"{path} has no rows; give at least one row.")
        return replace(table, cells=table.cells.set_axis(text_names(table.cells.columns), axis=1))


def read_records(path: File) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every row with its place in the file; JSON's objects and Arrow's lists as they are."""
    with _naming(path) as (name, kind):
        if "json" in kind.lower():
            yield from _json_objects(name, kind)
        elif kind == "parquet":
            parquet = importlib.import_module("pyarrow.parquet")
            yield from enumerate(parquet.read_table(name).to_pylist())
        else:
            cells = read_table(path).cells
            rows = cells.astype(object).where(cells.notna(), None).to_dict("records")
            yield from zip(cells.index, rows, strict=True)


def read_text(path: File, encoding: str | None = None) -> str:
    """A whole text file, without its byte order mark; .gz, .bz2 and .xz are decompressed."""
    opener = OPENERS.get(Path(path).suffix.lower(), open)
    try:
        with opener(path, "rt", encoding=encoding or "utf-8-sig", newline="") as file:
            text: str = file.read()
    except UnicodeDecodeError:
        raise ValueError(
            f"{path} is not {(encoding or 'utf-8').upper()}; name its encoding, such as --set "
            "encoding=cp1252, or save it as UTF-8 text."
        ) from None
    return text


@contextmanager
def _naming(path: File) -> Iterator[tuple[str, str]]:
    """Name and kind of a file that exists; whatever a damaged one makes its reader raise names
    the file."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file; check the path.")
    name, kind = os.fspath(path), table_kind(path)
    try:
        yield name, kind
    except (ImportError, Warning):
        raise
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        if isinstance(error, ValueError) and why.startswith(name):
            raise
        kind = {"csv": "CSV", "jsonl": "JSON"}.get(kind, kind)
        raise ValueError(f"{name} cannot be read as {kind}: {why}.") from None


def _json_objects(path: str, kind: str) -> list[tuple[int, dict[str, Any]]]:
    """The objects with their places in the file."""
    text = read_text(path)
    if kind == "JSON":
        content = json.loads(text)
        if not (isinstance(content, list) and all(isinstance(row, dict) for row in content)):
            raise ValueError("give a list of objects")
        return list(enumerate(content, 1))
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        row = None
        with suppress(ValueError):
            row = json.loads(line) if line.strip() else {}
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is no JSON object: {shown(line)}.")
        if line.strip():
            found.append((number, row))
    return found


# ---------------------------------------------------------------- CSV


def _read_csv(
    path: str,
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
) -> Table:
    """A table of texts whose index are lines, as editors count. What is not named is found."""
    if decimal not in (None, ",", "."):
        raise ValueError(f"decimal {decimal!r} is no decimal mark; give a comma or a point")
    text = read_text(path, encoding)
    mark = _find_separator(text[:SAMPLE]) if separator is None else separator
    mark = "\t" if mark.lower() in ("tab", "\\t") else mark
    lines, rows = _rows(path, text, mark)
    if not rows:
        raise ValueError(f"{path} is empty; a CSV file has a header and at least one row.")
    names = [name or f"Unnamed: {place}" for place, name in enumerate(rows[0])]
    import pandas

    cells = pandas.DataFrame(rows[1:], pandas.Index(lines[1:], name=LINE), names, dtype=object)
    if decimal is None and mark != ",":  # spreadsheets with decimal commas write semicolons
        decimal = find_decimal(cells.to_numpy().flat, is_usual=mark == ";")
    return Table(path, cells, mark, decimal or ".")


def _rows(path: str, text: str, mark: str) -> tuple[list[int], list[list[str]]]:
    """The first line of every record, and its cells, as many as the header has."""
    reader, line = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True), 1
    lines: list[int] = []
    rows: list[list[str]] = []
    try:
        for cells in reader:
            width = len(rows[0]) if rows else len(cells)
            if not cells or (len(cells) == 1 < width and not cells[0].strip()):
                pass  # an empty line
            elif len(cells) != width:  # its cells would be in the wrong columns
                has = f"has {counted(len(cells), 'cell')} and the header {width}"
                raise ValueError(
                    f"{path}, line {line} {has}: {shown(mark.join(cells))}; quote a cell that "
                    f'contains the separator, such as "1{mark}870", and write one per empty cell.'
                )
            else:
                lines.append(line)
                rows.append(cells)
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {line} is not CSV ({error}).") from None
    return lines, rows


def _find_separator(text: str) -> str:
    """The separator with which the header has several cells and most rows as many.

    A tie is decided by the number of cells, then against the comma: names of columns seldom have
    semicolons, tabs or bars. A file in which no separator fits is taken to have commas.
    """
    best, separator = (0.5, 0, False), ","
    for mark in SEPARATORS:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=mark)
        widths: list[int] = []
        with suppress(csv.Error):  # such as a cell of megabytes, after a quote that is never closed
            widths += (len(row) for row in islice(filter(None, rows), ROWS_COMPARED))
        if widths and widths[0] > 1:
            agreeing = float(np.mean([width == widths[0] for width in widths[1:] or widths]))
            best, separator = max((best, separator), ((agreeing, widths[0], mark != ","), mark))
    return separator


# ---------------------------------------------------------------- writing


def write_table(table: Table, place: Path, name: File) -> None:
    """Write to `place`, as the kind of file that the extension of `name` says."""
    kind = table_kind(name)
    with OPENERS.get(Path(name).suffix.lower(), open)(place, "wb") as file:
        if kind == "csv":
            file.write(table.csv())
        elif kind in ("jsonl", "JSON"):
            rows = [json.dumps(row, ensure_ascii=False) for row in table.records()]
            text = "\n".join(rows) if kind == "jsonl" else f"[{', '.join(rows)}]"
            file.write(f"{text}\n".encode())
        elif kind == "Excel":
            to_frame(table.cells).to_excel(file, index=False, engine="openpyxl")
        else:
            table.cells.to_parquet(file, index=False)
