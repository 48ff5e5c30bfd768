"""Table files: one reader for CSV, parquet, Excel and JSON, by the file's extension.

    table = read_table("rings.parquet")
    table.frame()                       # typed values, a row for every row of the file
    PredictedTable(table, {"price_predicted": values}).write(partial, "answers.parquet")

    .parquet .pq     pyarrow; columns keep their Arrow types
    .xlsx            openpyxl; the first sheet, its formats and formulas kept
    .jsonl .ndjson   an object per line; lines are kept as written
    .json            a list of objects, or an object of columns
    anything else    CSV (`csv_table`), byte for byte

The user's own columns are given back as they were if the output is of the input's kind. Cells of
typed files keep their types; of CSV files, every cell is typed by itself.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.paths import install_hint
from causal_qwen.tables.cells import MISSING, read_cell
from causal_qwen.tables.csv_table import (
    OPENERS,
    CsvBlock,
    append_cells,
    read_comma_cell,
    read_csv_blocks,
    read_text,
    with_point,
)
from causal_qwen.tables.frames import require_pandas, text_name, to_frame
from causal_qwen.tables.rows import LINE, column_names, name_lines, name_rows, shown
from causal_qwen.tables.targets import read_cells
from causal_qwen.terminal import counted

Predicted = Mapping[str, NDArray[Any]]  # numbers, or notes as texts

KINDS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".xlsx": "excel",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
}
NAMES = {"csv": "CSV", "parquet": "parquet", "excel": "Excel", "jsonl": "JSON", "json": "JSON"}
DIALECT = ("separator", "encoding", "decimal")  # options, whose errors name them
UNREAD = {".xls", ".ods", ".feather", ".arrow", ".zip", ".pkl", ".sav", ".dta", ".rds"}


@dataclass(frozen=True)
class Table:
    """The rows of a file: their cells as the file has them (of a CSV file, texts)."""

    path: str
    kind: str
    columns: dict[str, Sequence[Any]]
    places: Sequence[int]  # of the rows in the file
    noun: str = "row"  # of a place: "row", "line"
    source: Any = None  # what the file's own writer needs

    def __len__(self) -> int:
        return len(self.places)

    def frame(self, targets: Sequence[str] = ()) -> Any:
        """A DataFrame of typed values, with the places of the rows as its index, which name the
        rows in messages. A warning shows a cell of a CSV file such as "NA", which may be a name,
        unless it is in a target's column."""
        import pandas

        index = pandas.Index(self.places, name=self.noun)
        if self.kind != "csv":
            return to_frame(pandas.DataFrame(self.columns)).set_axis(index, axis=0)
        read = read_comma_cell if self.source.decimal == "," else read_cell
        for name, cells in self.columns.items():
            rows = [row for row, cell in enumerate(cells) if cell.strip() in MISSING]
            if rows and name not in targets:
                count = counted(len(rows), "cell is", "cells are")
                where = self.name_lines(rows, name)
                warnings.warn(f"{self.path}: {count} read as missing: {where}.", stacklevel=3)
        typed = {name: list(map(read, cells)) for name, cells in self.columns.items()}
        return pandas.DataFrame(typed, dtype=object).infer_objects().set_axis(index, axis=0)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column as numbers, NaN where a cell is none: "5 kg" and "True" are none.

        A warning shows a cell that is more than digits, such as "$1,200".
        """
        cells = list(self.columns[name])
        if self.kind == "csv" and self.source.decimal == ",":
            return read_cells(name, list(map(with_point, cells)), cells).values
        return read_cells(name, cells).values

    def name_lines(self, rows: Sequence[int] | NDArray[np.int64], name: str) -> str:
        """ "lines 5 and 7 (line 5: price 'n/a')": where rows are, and the first one's cell."""
        return name_lines(self.noun, self.places, self.columns[name], rows, name)


def read_table(path: str | os.PathLike[str], **dialect: str | None) -> Table:
    """Read a file with a header and at least one row; `dialect` are the `separator`, `encoding` and
    `decimal` of a text file, if they cannot be found."""
    name, kind = _checked(path, dialect)
    with _named(name, kind):
        if kind == "csv":
            (block,) = read_csv_blocks(name, sys.maxsize, **dialect)
            return _csv_table(name, block)
        require_pandas()
        table = READERS[kind](name, **{key: value for key, value in dialect.items() if value})
    if not len(table):
        raise ValueError(f"{path} has no rows; give at least one row.")
    return table


def read_blocks(path: str | os.PathLike[str], rows: int, **dialect: str | None) -> Iterator[Table]:
    """`read_table`, so many rows at a time: CSV and parquet, at constant memory."""
    name, kind = _checked(path, dialect)
    if kind not in ("csv", "parquet"):
        raise ValueError(f"{path}: --batch reads CSV and parquet; leave it out, or convert.")
    start = 0
    with _named(name, kind):
        if kind == "csv":
            for block in read_csv_blocks(name, rows, **dialect):
                yield _csv_table(name, block)
            return
        arrow = _need("pyarrow", "Parquet files")
        with _need("pyarrow.parquet", "Parquet files").ParquetFile(name) as file:
            for batch in file.iter_batches(batch_size=rows):
                yield _parquet_table(name, arrow.Table.from_batches([batch]), start)
                start += len(batch)
    if not start:
        raise ValueError(f"{path} has no rows; give at least one row.")


def read_records(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every row with its place in the file; JSON's objects and Arrow's lists as they are."""
    name, kind = _checked(path, {})
    with _named(name, kind):
        if kind == "jsonl":
            yield from ((place, row) for place, _, row in _json_lines(name))
        elif kind == "json":
            yield from enumerate(_json_objects(name), 1)
        else:
            table = read_table(path)
            if kind == "parquet":
                yield from enumerate(table.source.to_pylist())
                return
            for place, *cells in zip(table.places, *table.columns.values(), strict=True):
                yield place, dict(zip(table.columns, cells, strict=True))


def table_kind(path: str | os.PathLike[str]) -> str:
    """ "csv", "parquet", "excel", "jsonl" or "json", by the extension; .gz and its kin are passed
    over."""
    name = Path(path)
    if name.suffix.lower() in OPENERS:
        name = name.with_suffix("")
    suffix = name.suffix.lower()
    if suffix in UNREAD:
        raise ValueError(
            f"{path}: {suffix} files are not read; save it as .csv, .parquet or .xlsx."
        )
    return KINDS.get(suffix, "csv")


def _checked(path: str | os.PathLike[str], dialect: Mapping[str, str | None]) -> tuple[str, str]:
    """The name and the kind of a file that exists and has these options."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file; check the path.")
    kind = table_kind(path)
    for option, value in {} if kind == "csv" else dialect.items():
        if value is not None and not (option == "encoding" and kind.startswith("json")):
            raise ValueError(f"{path} is no CSV file, so --{option} has no effect; leave it out.")
    return os.fspath(path), kind


@contextmanager
def _named(path: str, kind: str) -> Iterator[None]:
    """Whatever a damaged file makes its reader raise names the file."""
    try:
        yield
    except (ImportError, Warning):
        raise
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        if isinstance(error, ValueError) and why.startswith((path, *DIALECT)):
            raise
        raise ValueError(f"{path} cannot be read as {NAMES[kind]}: {why}; copy it again.") from None


def _need(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        package = module.split(".")[0]
        raise ImportError(
            f"{what} need {package}, which is not installed: {install_hint('files')}"
        ) from None


# ---------------------------------------------------------------- reading


def _csv_table(path: str, block: CsvBlock) -> Table:
    return Table(path, "csv", dict(block.columns), block.lines, LINE, block)


def _frame_table(path: str, kind: str, frame: Any, places: Sequence[int], *more: Any) -> Table:
    plain = to_frame(frame)
    return Table(path, kind, {name: plain[name] for name in plain}, places, *more)


def _json_lines(
    path: str, encoding: str | None = None
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The number, the text and the object of every line."""
    for number, line in enumerate(read_text(path, encoding).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number} is not JSON ({error.msg}): {shown(line)}; write an object "
                "in every line."
            ) from None
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}, line {number} is no object: {shown(line)}; write one such as "
                '{"carat": 0.7, "price": 900}.'
            )
        yield number, line, row


def _json_objects(path: str, encoding: str | None = None) -> list[dict[str, Any]]:
    try:
        content = json.loads(read_text(path, encoding))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); a file with an object in every line is a .jsonl file."
        ) from None
    if isinstance(content, dict) and all(isinstance(v, list) for v in content.values()):
        frame = to_frame(content)
        content = frame.astype(object).where(frame.notna(), None).to_dict("records")
    if not (isinstance(content, list) and all(isinstance(row, dict) for row in content)):
        raise ValueError(f"{path} is no table; give a list of objects, or an object of lists.")
    return content


def _read_jsonl(path: str, encoding: str | None = None) -> Table:
    found = list(_json_lines(path, encoding))
    frame = require_pandas().DataFrame([row for _, _, row in found])
    places = [place for place, _, _ in found]
    return _frame_table(path, "jsonl", frame, places, LINE, [line for _, line, _ in found])


def _read_json(path: str, encoding: str | None = None) -> Table:
    rows = _json_objects(path, encoding)
    return _frame_table(path, "json", require_pandas().DataFrame(rows), range(len(rows)))


def _read_parquet(path: str) -> Table:
    table = _need("pyarrow.parquet", "Parquet files").read_table(path)
    column_names(path, table.column_names)
    return _parquet_table(path, table)


def _parquet_table(path: str, table: Any, start: int = 0) -> Table:
    return _frame_table(path, "parquet", table, range(start, start + len(table)), "row", table)


def _read_excel(path: str) -> Table:
    book = _need("openpyxl", "Excel files").load_workbook(path, data_only=True)
    sheet = book.worksheets[0]
    if len(book.worksheets) > 1:
        warnings.warn(
            f"{path}: the first of {len(book.worksheets)} sheets is read, {sheet.title!r}.",
            stacklevel=4,
        )
    rows = [
        (place, row)
        for place, row in enumerate(sheet.iter_rows(values_only=True), 1)
        if any(cell is not None for cell in row)
    ]
    if not rows:
        raise ValueError(f"{path} is empty; its first sheet has a header and at least one row.")
    (top, header), *rows = rows
    used = [
        place
        for place, name in enumerate(header)
        if name is not None or any(row[place] is not None for _, row in rows)
    ]
    given = ["" if header[place] is None else text_name(header[place]) for place in used]
    names = column_names(path, given)
    places = [place for place, _ in rows]
    if places and (empty := sorted(set(range(top + 1, places[-1])) - set(places))):
        warnings.warn(f"{path}: {name_rows(empty)} skipped, being empty.", stacklevel=4)
    columns = {
        name: [row[place] for _, row in rows] for name, place in zip(names, used, strict=True)
    }
    frame = require_pandas().DataFrame(columns, dtype=object).infer_objects()
    return _frame_table(path, "excel", frame, places, "row", top)


READERS: dict[str, Any] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "parquet": _read_parquet,
    "excel": _read_excel,
}


# ---------------------------------------------------------------- writing


@dataclass(frozen=True)
class PredictedTable:
    """A file and the columns predicted for it."""

    table: Table
    predicted: Predicted

    def __len__(self) -> int:
        return len(self.table)

    def frame(self) -> Any:
        """A DataFrame: the file's cells (of a CSV file, texts), the predicted ones as numbers."""
        import pandas

        own = {name: list(column) for name, column in self.table.columns.items()}
        return pandas.DataFrame({**own, **self.predicted})

    def records(self) -> list[dict[str, Any]]:
        """The rows with JSON's values: dates are texts; NaN and infinities stay."""
        rows = self.frame().to_dict(orient="records")
        return [{name: _json_value(cell) for name, cell in row.items()} for row in rows]

    def csv(self) -> Iterator[str]:
        """The file's own lines, each followed by its predicted cells."""
        if self.table.kind != "csv":
            yield from self.frame().to_csv(index=False, lineterminator="\n").splitlines(True)
            return
        source = self.table.source
        yield append_cells(source.header, list(self.predicted), source.separator)
        columns = [column.tolist() for column in self.predicted.values()]
        for record, *cells in zip(source.records, *columns, strict=True):
            written = [
                cell if isinstance(cell, str) else repr(cell).replace(".", source.decimal)
                for cell in cells
            ]
            yield append_cells(record, written, source.separator)

    def csv_bytes(self) -> Iterator[bytes]:
        """`csv` in the encoding of the file: byte for byte the user's own columns."""
        encoding = self.table.source.encoding if self.table.kind == "csv" else "utf-8"
        return (line.encode(encoding) for line in self.csv())

    def jsonl_bytes(self) -> Iterator[bytes]:
        columns = [column.tolist() for column in self.predicted.values()]
        if self.table.kind != "jsonl":
            yield from (f"{_to_json(row)}\n".encode() for row in self.records())
            return
        for line, *cells in zip(self.table.source, *columns, strict=True):
            added = _to_json(dict(zip(self.predicted, cells, strict=True)))
            body = line.rstrip()[:-1].rstrip()
            yield f"{body}{'' if body.endswith('{') else ', '}{added[1:]}\n".encode()

    def arrow(self) -> Any:
        arrow = _need("pyarrow", "Parquet files")
        if self.table.kind == "parquet":
            found = self.table.source
        else:
            own = PredictedTable(self.table, {}).frame()
            found = arrow.Table.from_pandas(own, preserve_index=False)
        for name, column in self.predicted.items():
            found = found.append_column(name, arrow.array(column))
        return found

    def write(self, place: Path, name: str | os.PathLike[str]) -> None:
        """Write to `place`, as the kind of file that the extension of `name` says."""
        kind = table_kind(name)
        if kind == "excel":
            self._write_excel(place)
        elif kind == "json":
            rows = [_finite(row) for row in self.records()]
            with _open_output(place, name) as file:
                file.write((json.dumps(rows, ensure_ascii=False, indent=1) + "\n").encode())
        else:
            with closing(BlockWriter(place, name)) as writer:
                writer.write(self.table, self.predicted)

    def _write_excel(self, place: Path) -> None:
        excel, table = _need("openpyxl", "Excel files"), self.table
        if table.kind == "excel":
            book = excel.load_workbook(table.path)
            sheet, top, places = book.worksheets[0], table.source, table.places
        else:
            book = excel.Workbook()
            sheet, top, places = book.active, 1, range(2, len(table) + 2)
            sheet.append(list(table.columns))
            for cells in zip(*table.columns.values(), strict=True):
                sheet.append([_json_value(cell) for cell in cells])
        first = sheet.max_column + 1
        for offset, (name, column) in enumerate(self.predicted.items()):
            sheet.cell(top, first + offset, name)
            for row, number in zip(places, column.tolist(), strict=True):
                is_plain = isinstance(number, str) or math.isfinite(number)
                sheet.cell(row, first + offset, number if is_plain else str(number))
        book.save(place)


class BlockWriter:
    """Writes blocks of a table one after the other: CSV, JSON lines or parquet."""

    def __init__(self, place: Path, name: str | os.PathLike[str]) -> None:
        self.kind = table_kind(name)
        if self.kind not in ("csv", "jsonl", "parquet"):
            raise ValueError(f"{name}: --batch writes .csv, .jsonl and .parquet; name one.")
        self.place, self.name = place, name
        self.writer: Any = None  # opened with the first block, whose columns are those of all

    def write(self, table: Table, predicted: Predicted) -> None:
        if self.kind == "parquet":
            found = PredictedTable(table, predicted).arrow()
            if self.writer is None:
                parquet = _need("pyarrow.parquet", "Parquet files")
                self.writer = parquet.ParquetWriter(self.place, found.schema)
            self.writer.write_table(found.cast(self.writer.schema))
            return
        is_first = self.writer is None
        if self.writer is None:
            self.writer = _open_output(self.place, self.name)
        self.writer.writelines(block_lines(self.kind, table, predicted, is_first))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def block_lines(kind: str, table: Table, predicted: Predicted, is_first: bool) -> Iterator[bytes]:
    """The lines of a block; a CSV file's header is in the first one."""
    block = PredictedTable(table, predicted)
    if kind == "jsonl":
        return block.jsonl_bytes()
    return islice(block.csv_bytes(), 0 if is_first else 1, None)


def _open_output(place: Path, name: str | os.PathLike[str]) -> Any:
    """A binary file at `place`, compressed if `name` ends in .gz, .bz2 or .xz."""
    return OPENERS.get(Path(name).suffix.lower(), open)(place, "wb")


def _json_value(cell: Any) -> Any:
    if isinstance(cell, np.generic):
        cell = cell.item()
    if isinstance(cell, str | int | float | None):
        return cell
    return cell.isoformat() if isinstance(cell, date) else str(cell)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(cell, float) and not math.isfinite(cell) else cell
        for name, cell in row.items()
    }


def _to_json(row: dict[str, Any]) -> str:
    return json.dumps(_finite(row), ensure_ascii=False)
