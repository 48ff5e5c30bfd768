"""Table files: CSV, parquet, Excel and JSON, by the file's extension.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.paths import install_hint
from causal_qwen.tables.cells import MISSING, is_missing, read_cell, shown, with_point
from causal_qwen.tables.csv_table import OPENERS, append_cells, read_csv_blocks, read_text
from causal_qwen.tables.frames import name_rows, plain, require_pandas, to_frame
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


@dataclass(frozen=True)
class Table:
    """The rows of a file: a DataFrame of the cells as the file has them (of a CSV file, texts). Its
    index has the places of the rows in the file, and their name: "row" or "line"."""

    path: str
    kind: str
    cells: Any
    source: Any = None  # what the file's own writer needs

    def __len__(self) -> int:
        return len(self.cells)

    def frame(self, targets: Sequence[str] = ()) -> Any:
        """A DataFrame of typed values with the same index. A warning shows a cell of a CSV file
        such as "NA", which may be a name, unless it is in a target's column."""
        if self.kind != "csv":
            return to_frame(self.cells)
        typed = {}
        for name, cells in self.cells.items():
            typed[name] = [read_cell(cell, self.source.decimal) for cell in cells]
            rows = [row for row, cell in enumerate(cells) if cell.strip() in MISSING]
            if rows and name not in targets:
                count = counted(len(rows), "cell is", "cells are")
                where = self.name_cells(rows, name)
                warnings.warn(f"{self.path}: {count} read as missing: {where}.", stacklevel=3)
        frame = require_pandas().DataFrame(typed, dtype=object, index=self.cells.index)
        return frame.infer_objects()

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column as numbers, NaN where a cell is none: "5 kg" and "True" are none.

        A warning shows a cell that is more than digits, such as "$1,200".
        """
        cells = self.cells[name].tolist()
        if self.kind == "csv" and self.source.decimal == ",":
            return read_cells(name, list(map(with_point, cells)), cells).values
        return read_cells(name, cells).values

    def name_cells(self, rows: Sequence[int] | NDArray[np.int64], name: str) -> str:
        """ "lines 5 and 7 (line 5: price 'n/a')": where rows are, and the first of their cells that
        says something."""
        texts = [str(cell) for cell in self.cells[name].iloc[rows]]
        seen = next((at for at, text in enumerate(texts) if not is_missing(text)), 0)
        where, one = (name_rows(some, self.cells.index) for some in (rows, rows[seen : seen + 1]))
        return f"{where} ({one}: {name} {shown(texts[seen])})"


def read_table(path: str | os.PathLike[str], **dialect: str | None) -> Table:
    """Read a file with a header and at least one row; `dialect` are the `separator`, `encoding` and
    `decimal` of a text file, if they cannot be found."""
    name, kind = _checked(path, dialect)
    with _named(name, kind):
        if kind == "csv":
            (block,) = read_csv_blocks(name, sys.maxsize, **dialect)
            return Table(name, kind, *block)
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
                yield Table(name, kind, *block)
            return
        arrow = _need("pyarrow")
        with _need("pyarrow.parquet").ParquetFile(name) as file:
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
            is_typed = kind == "parquet"
            rows = table.source.to_pylist() if is_typed else table.cells.to_dict("records")
            yield from zip(table.cells.index, rows, strict=True)


def table_kind(path: str | os.PathLike[str]) -> str:
    """ "csv", "parquet", "excel", "jsonl" or "json", by the extension; .gz and its kin are passed
    over."""
    name = Path(path)
    if name.suffix.lower() in OPENERS:
        name = name.with_suffix("")
    return KINDS.get(name.suffix.lower(), "csv")


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
        if isinstance(error, ValueError) and why.startswith((path, "separator", "encoding")):
            raise
        raise ValueError(f"{path} cannot be read as {NAMES[kind]}: {why}.") from None


def _need(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        package = module.split(".")[0]
        raise ImportError(f"{package} is not installed: {install_hint('files')}") from None


# ---------------------------------------------------------------- reading


def _table(
    path: str, kind: str, frame: Any, places: Sequence[int], noun: str, source: Any = None
) -> Table:
    index = require_pandas().Index(places, name=noun)
    return Table(path, kind, to_frame(frame).set_axis(index, axis=0), source)


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
            row = error
        if not isinstance(row, dict):
            why = f" ({row.msg})" if isinstance(row, json.JSONDecodeError) else ""
            raise ValueError(
                f"{path}, line {number} is no JSON object{why}: {shown(line)}; write one such as "
                '{"carat": 0.7, "price": 900}.'
            )
        yield number, line, row


def _json_objects(path: str, encoding: str | None = None) -> list[dict[str, Any]]:
    content = json.loads(read_text(path, encoding))
    if isinstance(content, dict) and all(isinstance(v, list) for v in content.values()):
        frame = to_frame(content)
        content = frame.astype(object).where(frame.notna(), None).to_dict("records")
    if not (isinstance(content, list) and all(isinstance(row, dict) for row in content)):
        raise ValueError("give a list of objects, or an object of lists")
    return content


def _read_jsonl(path: str, encoding: str | None = None) -> Table:
    found = list(_json_lines(path, encoding))
    frame = require_pandas().DataFrame([row for _, _, row in found])
    places, lines = [place for place, _, _ in found], [line for _, line, _ in found]
    return _table(path, "jsonl", frame, places, "line", lines)


def _read_json(path: str, encoding: str | None = None) -> Table:
    rows = _json_objects(path, encoding)
    return _table(path, "json", require_pandas().DataFrame(rows), range(len(rows)), "row")


def _read_parquet(path: str) -> Table:
    return _parquet_table(path, _need("pyarrow.parquet").read_table(path))


def _parquet_table(path: str, table: Any, start: int = 0) -> Table:
    return _table(path, "parquet", table, range(start, start + len(table)), "row", table)


def _read_excel(path: str) -> Table:
    book = _need("openpyxl").load_workbook(path, data_only=True)
    sheet = book.worksheets[0]
    if len(book.worksheets) > 1:
        count = len(book.worksheets)
        what = f"the first of {count} sheets is read, {sheet.title!r}"
        warnings.warn(f"{path}: {what}.", stacklevel=4)
    every = list(sheet.iter_rows(values_only=True))
    filled = [place for place, row in enumerate(every, 1) if any(cell is not None for cell in row)]
    if not filled:
        raise ValueError("its first sheet is empty")
    (top, *places), header = filled, every[filled[0] - 1]
    if empty := sorted(set(range(top + 1, filled[-1])) - {*places}):
        warnings.warn(f"{path}: {name_rows(empty)} skipped, being empty.", stacklevel=4)
    rows = [every[place - 1] for place in places]
    used = [
        column
        for column, name in enumerate(header)
        if name is not None or any(row[column] is not None for row in rows)
    ]
    names = [f"Unnamed: {at}" if header[at] is None else header[at] for at in used]
    cells = [[row[column] for column in used] for row in rows]
    frame = require_pandas().DataFrame(cells, columns=names, dtype=object).infer_objects()
    return _table(path, "excel", frame, places, "row", top)


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
        return self.table.cells.reset_index(drop=True).assign(**self.predicted)

    def records(self) -> list[dict[str, Any]]:
        """The rows with JSON's values: dates are texts, NaN and infinities None."""
        rows = self.frame().astype(object).to_dict(orient="records")
        return [_finite(row) for row in rows]

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

    def lines(self, kind: str, is_first: bool = True) -> Iterator[bytes]:
        """The lines of a CSV file, in the encoding of the input, or of JSON lines. Blocks of one
        file have one header, that of the first."""
        if kind == "jsonl":
            return self._json_lines()
        encoding = self.table.source.encoding if self.table.kind == "csv" else "utf-8"
        return (line.encode(encoding) for line in islice(self.csv(), int(not is_first), None))

    def _json_lines(self) -> Iterator[bytes]:
        if self.table.kind != "jsonl":
            yield from (f"{_to_json(row)}\n".encode() for row in self.records())
            return
        columns = [column.tolist() for column in self.predicted.values()]
        for line, *cells in zip(self.table.source, *columns, strict=True):
            added = _to_json(_finite(dict(zip(self.predicted, cells, strict=True))))
            body = line.rstrip()[:-1].rstrip()
            yield f"{body}{'' if body.endswith('{') else ', '}{added[1:]}\n".encode()

    def arrow(self) -> Any:
        arrow, found = _need("pyarrow"), self.table.source
        if self.table.kind != "parquet":
            found = arrow.Table.from_pandas(self.table.cells, preserve_index=False)
        for name, column in self.predicted.items():
            found = found.append_column(name, arrow.array(column))
        return found

    def write(self, place: Path, name: str | os.PathLike[str]) -> None:
        """Write to `place`, as the kind of file that the extension of `name` says."""
        kind = table_kind(name)
        if kind == "excel":
            self._write_excel(place)
        elif kind == "json":
            with _open_output(place, name) as file:
                file.write(json.dumps(self.records(), ensure_ascii=False, indent=1).encode())
        else:
            write_blocks([self], place, name)

    def _write_excel(self, place: Path) -> None:
        excel, table = _need("openpyxl"), self.table
        if table.kind == "excel":
            book = excel.load_workbook(table.path)
            sheet, top, places = book.worksheets[0], table.source, table.cells.index
        else:
            book = excel.Workbook()
            sheet, top, places = book.active, 1, range(2, len(table) + 2)
            sheet.append(list(table.cells))
            for row in PredictedTable(table, {}).records():
                sheet.append(list(row.values()))
        first = sheet.max_column + 1
        for column, (name, cells) in enumerate(self.predicted.items(), first):
            sheet.cell(top, column, name)
            for row, number in zip(places, cells.tolist(), strict=True):
                is_plain = isinstance(number, str) or math.isfinite(number)
                sheet.cell(int(row), column, number if is_plain else str(number))
        book.save(place)


def check_output_kind(name: str | os.PathLike[str], *, is_batch: bool) -> None:
    """Refuse, before the work, a kind of file that is not written, or not in blocks."""
    if table_kind(name) in ("excel", "json") and is_batch:
        raise ValueError(f"{name}: --batch writes .csv, .jsonl and .parquet; name one.")


def write_blocks(
    blocks: Iterable[PredictedTable], place: Path, name: str | os.PathLike[str]
) -> int:
    """Write blocks one after the other, CSV, JSON lines or parquet; -> their rows."""
    kind, rows = table_kind(name), 0
    with ExitStack() as stack:
        writer: Any = None  # of the first block, whose columns are those of all
        for block in blocks:
            if kind in ("excel", "json"):
                block.write(place, name)
            elif kind == "parquet":
                found = block.arrow()
                if writer is None:
                    make = _need("pyarrow.parquet").ParquetWriter
                    writer = stack.enter_context(make(place, found.schema))
                writer.write_table(found.cast(writer.schema))
            else:
                is_first = writer is None
                if writer is None:
                    writer = stack.enter_context(_open_output(place, name))
                writer.writelines(block.lines(kind, is_first))
            rows += len(block)
    return rows


def _open_output(place: Path, name: str | os.PathLike[str]) -> Any:
    """A binary file at `place`, compressed if `name` ends in .gz, .bz2 or .xz."""
    return OPENERS.get(Path(name).suffix.lower(), open)(place, "wb")


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON's values: it has no NaN and no infinities."""
    cells = {name: plain(cell) for name, cell in row.items()}
    is_none = {n: isinstance(cell, float) and not math.isfinite(cell) for n, cell in cells.items()}
    return {name: None if is_none[name] else cell for name, cell in cells.items()}


def _to_json(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False)
