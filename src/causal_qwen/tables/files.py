"""Table files: one reader for CSV, parquet, Excel and JSON, by the file's extension.

    table = read_table("rings.parquet")
    table.frame()                       # typed values, a row for every row of the file
    write_typed(table, {"price_predicted": values}, partial, "answers.parquet")

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
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.paths import install_hint
from causal_qwen.tables.csv_dialect import decode
from causal_qwen.tables.csv_table import (
    OPENERS,
    CsvTable,
    open_output,
    read_bytes,
    read_csv_blocks,
    read_csv_table,
)
from causal_qwen.tables.frames import require_pandas, text_name, to_frame
from causal_qwen.tables.rows import LINE, column_names, name_lines, name_rows, shown
from causal_qwen.tables.targets import read_cells

Numbers = NDArray[np.float64]
Predicted = Mapping[str, NDArray[Any]]  # numbers, or notes as texts

KINDS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".xlsx": "excel",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
}
UNREAD = {".xls", ".ods", ".feather", ".arrow", ".zip", ".pkl", ".sav", ".dta", ".rds"}


@dataclass(frozen=True)
class TypedTable:
    """The rows of a file whose cells have types of their own."""

    path: str
    kind: str
    data: Any  # a DataFrame, as `to_frame` makes it
    places: Sequence[int]  # of the rows in the file
    noun: str  # of a place: "row", "line"
    source: Any = None  # what the file's own writer needs

    def __len__(self) -> int:
        return len(self.data)

    @property
    def columns(self) -> dict[str, Any]:
        return {name: self.data[name].tolist() for name in self.data.columns}

    def frame(self, targets: Sequence[str] = ()) -> Any:
        """The rows, with their places in the file as the index."""
        import pandas

        return self.data.set_axis(pandas.Index(self.places, name=self.noun), axis=0)

    def numbers(self, name: str) -> Numbers:
        """A column as numbers, NaN where a cell is none; see `CsvTable.numbers`."""
        return read_cells(name, self.data[name].tolist()).values

    def name_lines(self, rows: Sequence[int] | NDArray[np.int64], name: str) -> str:
        return name_lines(self.noun, self.places, self.data[name].tolist(), rows, name)


Table = CsvTable | TypedTable


def read_table(
    path: str | os.PathLike[str],
    *,
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
) -> Table:
    """Read a file with a header and at least one row; the options are those of text files."""
    require_pandas()
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file; check the path.")
    name, kind = os.fspath(path), table_kind(path)
    dialect = {"separator": separator, "encoding": encoding, "decimal": decimal}
    if kind == "csv":
        return read_csv_table(path, **dialect)
    for option, value in dialect.items():
        if value is not None and not (option == "encoding" and kind.startswith("json")):
            raise ValueError(f"{path} is no CSV file, so --{option} has no effect; leave it out.")
    if kind in ("jsonl", "json"):
        text, encoding = decode(name, read_bytes(path), encoding)
        table = _read_jsonl(name, text) if kind == "jsonl" else _read_json(name, text)
    else:
        table = _read_parquet(name) if kind == "parquet" else _read_excel(name)
    if not len(table):
        raise ValueError(f"{path} has no rows; give at least one row.")
    return table


def read_blocks(path: str | os.PathLike[str], rows: int, **dialect: str | None) -> Iterator[Table]:
    """`read_table`, so many rows at a time: CSV and parquet, at constant memory."""
    require_pandas()
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file; check the path.")
    if (kind := table_kind(path)) == "csv":
        yield from read_csv_blocks(path, rows, **dialect)
        return
    if kind != "parquet":
        raise ValueError(f"{path}: --batch reads CSV and parquet; leave it out, or convert.")
    if given := [name for name, value in dialect.items() if value is not None]:
        raise ValueError(f"{path} is no CSV file, so --{given[0]} has no effect; leave it out.")
    parquet = _need("pyarrow.parquet", "Parquet files")
    arrow = _need("pyarrow", "Parquet files")
    name, start = os.fspath(path), 0
    with _readable(name), parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=rows):
            table = arrow.Table.from_batches([batch])
            places = range(start, start + len(table))
            yield TypedTable(name, "parquet", to_frame(table), places, "row", table)
            start += len(table)
    if not start:
        raise ValueError(f"{path} has no rows; give at least one row.")


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


def write_typed(
    table: Table, predicted: Predicted, place: Path, name: str | os.PathLike[str]
) -> None:
    """Write a table and its predicted columns to `place`: `name` is no CSV file."""
    kind = table_kind(name)
    if kind == "parquet":
        _write_parquet(table, predicted, place)
    elif kind == "excel":
        _write_excel(table, predicted, place)
    else:
        lines = _jsonl_lines if kind == "jsonl" else _json_lines
        with open_output(place, name) as file:
            file.writelines(line.encode() for line in lines(table, predicted))


def text_encoding(table: Table) -> str:
    return table.encoding if isinstance(table, CsvTable) else "utf-8"


def csv_lines(table: Table, predicted: Predicted) -> Iterator[str]:
    """A CSV file's own lines, byte for byte, each followed by its predicted cells."""
    if isinstance(table, CsvTable):
        return table.with_predictions(predicted)
    text: str = table.data.assign(**predicted).to_csv(index=False, lineterminator="\n")
    return iter(text.splitlines(keepends=True))


def predicted_frame(table: Table, predicted: Predicted) -> Any:
    """A DataFrame: the file's own cells (of a CSV file, texts) and the predicted columns."""
    import pandas

    return pandas.DataFrame({**table.columns, **predicted})


def records(table: Table, predicted: Predicted) -> list[dict[str, Any]]:
    """The rows as JSON's values: dates are texts; NaN and infinities are left to the writer."""
    rows = predicted_frame(table, predicted).to_dict(orient="records")
    return [{name: _json_value(cell) for name, cell in row.items()} for row in rows]


# ---------------------------------------------------------------- JSON


def _read_jsonl(path: str, text: str) -> TypedTable:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows = []
    for number, line in lines:
        try:
            row = json.loads(line.removeprefix("\ufeff"))
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
        rows.append(row)
    frame = to_frame(require_pandas().DataFrame(rows))
    places = [number for number, _ in lines]
    return TypedTable(path, "jsonl", frame, places, LINE, [line for _, line in lines])


def _read_json(path: str, text: str) -> TypedTable:
    try:
        content = json.loads(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not JSON ({error}); a file with an object in every line is a .jsonl file."
        ) from None
    is_records = isinstance(content, list) and all(isinstance(row, dict) for row in content)
    is_columns = isinstance(content, dict) and all(isinstance(v, list) for v in content.values())
    if not (is_records or is_columns):
        raise ValueError(f"{path} is no table; give a list of objects, or an object of lists.")
    frame = to_frame(require_pandas().DataFrame(content) if is_records else content)
    return TypedTable(path, "json", frame, range(len(frame)), "row")


def _jsonl_lines(table: Table, predicted: Predicted) -> Iterator[str]:
    if not (isinstance(table, TypedTable) and table.kind == "jsonl"):
        for row in records(table, predicted):
            yield json.dumps(_finite(row), ensure_ascii=False) + "\n"
        return
    columns = [column.tolist() for column in predicted.values()]
    for line, *cells in zip(table.source, *columns, strict=True):
        added = json.dumps(_finite(dict(zip(predicted, cells, strict=True))), ensure_ascii=False)
        body = line.rstrip()[:-1].rstrip()
        yield f"{body}{'' if body.endswith('{') else ', '}{added[1:]}\n"


def _json_lines(table: Table, predicted: Predicted) -> Iterator[str]:
    rows = [_finite(row) for row in records(table, predicted)]
    yield json.dumps(rows, ensure_ascii=False, indent=1) + "\n"


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


# ---------------------------------------------------------------- parquet


def _read_parquet(path: str) -> TypedTable:
    parquet = _need("pyarrow.parquet", "Parquet files")
    with _readable(path):
        table = parquet.read_table(path)
    if len(set(table.column_names)) < len(table.column_names):
        column_names(path, table.column_names)
    return TypedTable(path, "parquet", to_frame(table), range(len(table)), "row", table)


@contextmanager
def _readable(path: str) -> Iterator[None]:
    arrow = _need("pyarrow", "Parquet files")
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"{path} cannot be read as parquet: {why}; copy it again.") from None


def _write_parquet(table: Table, predicted: Predicted, place: Path) -> None:
    _need("pyarrow.parquet", "Parquet files").write_table(_arrow_table(table, predicted), place)


def _arrow_table(table: Table, predicted: Predicted) -> Any:
    arrow = _need("pyarrow", "Parquet files")
    if isinstance(table, TypedTable) and table.kind == "parquet":
        found = table.source
    else:
        found = arrow.Table.from_pandas(predicted_frame(table, {}), preserve_index=False)
    for name, column in predicted.items():
        found = found.append_column(name, arrow.array(column))
    return found


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
            found = _arrow_table(table, predicted)
            if self.writer is None:
                parquet = _need("pyarrow.parquet", "Parquet files")
                self.writer = parquet.ParquetWriter(self.place, found.schema)
            self.writer.write_table(found.cast(self.writer.schema))
            return
        is_first = self.writer is None
        if self.writer is None:
            self.writer = open_output(self.place, self.name)
        self.writer.writelines(block_lines(self.kind, table, predicted, is_first))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def block_lines(kind: str, table: Table, predicted: Predicted, is_first: bool) -> Iterator[bytes]:
    """The lines of a block; a CSV file's header is in the first one."""
    lines = _jsonl_lines(table, predicted) if kind == "jsonl" else csv_lines(table, predicted)
    encoding = "utf-8" if kind == "jsonl" else text_encoding(table)
    start = 0 if is_first or kind == "jsonl" else 1
    return (line.encode(encoding) for line in islice(lines, start, None))


# ---------------------------------------------------------------- Excel


def _read_excel(path: str) -> TypedTable:
    excel = _need("openpyxl", "Excel files")
    try:
        book = excel.load_workbook(path, data_only=True)
    except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as Excel: {error}; save it again.") from None
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
    return TypedTable(path, "excel", to_frame(frame), places, "row", top)


def _write_excel(table: Table, predicted: Predicted, place: Path) -> None:
    excel = _need("openpyxl", "Excel files")
    if isinstance(table, TypedTable) and table.kind == "excel":
        book = excel.load_workbook(table.path)
        sheet, top, places = book.worksheets[0], table.source, table.places
    else:
        book = excel.Workbook()
        sheet, top, places = book.active, 1, range(2, len(table) + 2)
        sheet.append(list(table.columns))
        for cells in zip(*table.columns.values(), strict=True):
            sheet.append([_json_value(cell) for cell in cells])
    first = sheet.max_column + 1
    for offset, (name, column) in enumerate(predicted.items()):
        sheet.cell(top, first + offset, name)
        for row, number in zip(places, column.tolist(), strict=True):
            is_plain = isinstance(number, str) or math.isfinite(number)
            sheet.cell(row, first + offset, number if is_plain else str(number))
    book.save(place)


def _need(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        package = module.split(".")[0]
        raise ImportError(
            f"{what} need {package}, which is not installed: {install_hint('files')}"
        ) from None
