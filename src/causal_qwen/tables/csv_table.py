"""CSV table: a file's cells as they are written, and the values that the model reads.

    table = read_csv_table("rings.csv")
    table.columns["code"]      # ["007", "1.10", "NA"]: as in the file
    table.frame()["code"]      # ["007", 1.1, NaN]: every cell by itself

The value of a cell does not depend on other rows, so a row's prediction does not either. Only how
the file is written is found from several rows (`csv_dialect`).

A record with more or fewer cells than the header is refused and its line named: it usually has an
unquoted comma (1,870), which would move every later cell into the wrong column.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.tables.cells import MISSING, read_cell
from causal_qwen.tables.csv_dialect import (
    SEPARATORS,
    decode,
    encoding_of,
    find_decimal,
    find_separator,
    named_separator,
    read_comma_cell,
    with_point,
)
from causal_qwen.tables.rows import LINE, check_width, column_names, name_lines, name_rows, shown
from causal_qwen.tables.targets import read_cells
from causal_qwen.terminal import counted

BOM = "\ufeff"
SAMPLE = 2**20  # bytes from which the encoding and the separator of a long file are found
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@dataclass(frozen=True)
class CsvTable:
    """A header and at least one row; every row has a cell in every column."""

    path: str
    columns: dict[str, list[str]]  # name -> cells; a column without a name is "Unnamed: 0", ...
    lines: list[int]  # in which the rows begin, as editors count
    header: str  # the text of the header's line, its end included
    records: list[str]  # the text of every row, its line end included
    separator: str = ","
    encoding: str = "utf-8"  # which gives the file's bytes back
    decimal: str = "."

    def __len__(self) -> int:
        return len(self.lines)

    def frame(self, targets: Sequence[str] = ()) -> Any:
        """A DataFrame of typed values: numbers, booleans, texts, NaN for empty cells and "NA".

        Its index has the lines of the file, which name the rows in messages. A warning shows a
        cell such as "NA", which may be a name, unless it is in a target's column.
        """
        import pandas

        read = read_comma_cell if self.decimal == "," else read_cell
        typed = {name: list(map(read, cells)) for name, cells in self.columns.items()}
        for name, cells in self.columns.items():
            rows = [row for row, cell in enumerate(cells) if cell.strip() in MISSING]
            if rows and name not in targets:
                count = counted(len(rows), "cell is", "cells are")
                where = self.name_lines(rows, name)
                warnings.warn(f"{self.path}: {count} read as missing: {where}.", stacklevel=3)
        frame = pandas.DataFrame(typed, dtype=object).infer_objects()
        return frame.set_index(pandas.Index(self.lines, name=LINE))

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column as numbers, NaN where a cell is none: "5 kg" and "True" are none.

        A warning shows a cell that is more than digits, such as "$1,200".
        """
        cells = self.columns[name]
        read = list(map(with_point, cells)) if self.decimal == "," else cells
        return read_cells(name, read, cells).values

    def name_lines(self, rows: Sequence[int] | NDArray[np.int64], name: str) -> str:
        """ "lines 5 and 7 (line 5: price 'n/a')": where rows begin, and the first one's cell."""
        return name_lines(LINE, self.lines, self.columns[name], rows, name)

    def with_predictions(self, predicted: Mapping[str, NDArray[Any]]) -> Iterator[str]:
        """The file's own lines, each followed by its predicted cells."""
        yield self._append(self.header, list(predicted))
        columns = [column.tolist() for column in predicted.values()]
        for record, *cells in zip(self.records, *columns, strict=True):
            yield self._append(record, [self._written(cell) for cell in cells])

    def _append(self, record: str, cells: list[str]) -> str:
        """A record with more cells, before its line end."""
        text = io.StringIO(newline="")
        csv.writer(text, delimiter=self.separator, lineterminator="").writerow(cells)
        body = record.rstrip("\r\n")
        return f"{body}{self.separator}{text.getvalue()}{record[len(body) :]}"

    def _written(self, cell: float | str) -> str:
        return cell if isinstance(cell, str) else repr(cell).replace(".", self.decimal)


def read_csv_table(
    path: str | os.PathLike[str],
    *,
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
) -> CsvTable:
    """Read a separated text file; a .gz, .bz2 or .xz file is decompressed.

    What is not given is found from the file, or the error names the option.
    """
    if decimal not in (None, ",", "."):
        raise ValueError(f"decimal {decimal!r} is no decimal mark; give a comma or a point.")
    name = os.fspath(path)
    text, encoding = decode(name, read_bytes(path), encoding)
    mark = find_separator(text) if separator is None else named_separator(separator)
    lines = _Lines(name, io.StringIO(text, newline=""))
    (table,) = _blocks(lines, mark, encoding, sys.maxsize)
    return replace(table, decimal=decimal or _decimal_of(table))


def read_csv_blocks(
    path: str | os.PathLike[str],
    rows: int,
    *,
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
) -> Iterator[CsvTable]:
    """`read_csv_table`, so many rows at a time; how the file is written is found from its
    beginning."""
    name = os.fspath(path)
    opener = OPENERS.get(Path(path).suffix.lower(), open)
    with opener(path, "rb") as file:
        sample = file.read(SAMPLE)
        encoding = encoding_of(sample[: len(sample) // 4 * 4], encoding)
        if separator is None:
            mark = find_separator(codecs.getincrementaldecoder(encoding)("replace").decode(sample))
        else:
            mark = named_separator(separator)
        file.seek(0)
        lines = _Lines(name, io.TextIOWrapper(file, encoding, newline=""))
        try:
            for table in _blocks(lines, mark, encoding, rows):
                decimal = decimal or _decimal_of(table)
                yield replace(table, decimal=decimal)
        except UnicodeDecodeError:
            raise ValueError(
                f"{name}, after line {lines.number} is not {encoding.upper()}; name its encoding "
                "(--encoding), or save the table as UTF-8 text."
            ) from None


def _decimal_of(table: CsvTable) -> str:
    cells = (cell for column in table.columns.values() for cell in column)
    return find_decimal(table.path, cells, table.separator)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file; a .gz, .bz2 or .xz file is decompressed."""
    opener = OPENERS.get(Path(path).suffix.lower())
    if opener is None:
        return Path(path).read_bytes()
    try:
        with opener(path, "rb") as file:
            content: bytes = file.read()
            return content
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise ValueError(f"{path} cannot be decompressed: {error}; copy it again.") from error


def open_output(place: Path, name: str | os.PathLike[str]) -> Any:
    """A binary file at `place`, compressed if `name` ends in .gz, .bz2 or .xz."""
    return OPENERS.get(Path(name).suffix.lower(), open)(place, "wb")


class _Lines:
    """The lines of a file, checked one by one; `take` returns those since its last call."""

    def __init__(self, path: str, text: Iterator[str]) -> None:
        self.path, self.number, self.taken = path, 0, 0
        self.text = text
        self.pending: list[str] = []

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self.text)
        self.number += 1
        if "\0" in line:
            raise ValueError(
                f"{self.path}, line {self.number} has a NUL byte; save the table as UTF-8 text."
            )
        self.pending.append(line)
        return line.removeprefix(BOM) if self.number == 1 else line

    def take(self) -> tuple[str, int]:
        """The text of a record, and the line in which it begins."""
        first, self.taken = self.taken + 1, self.number
        text = "".join(self.pending)
        self.pending.clear()
        return text, first


def _blocks(lines: _Lines, separator: str, encoding: str, size: int) -> Iterator[CsvTable]:
    """Tables of at most `size` rows; a file without rows is refused."""
    mark = SEPARATORS.get(separator, separator)
    header = ""
    names: list[str] = []
    rows: list[list[str]] = []
    places: list[tuple[str, int]] = []  # text and first line of every row
    blank: list[tuple[str, int]] = []  # not yet known to lie between rows
    skipped: list[int] = []
    is_first = True

    def block() -> CsvTable:
        if skipped:
            where = name_rows(skipped).replace("row", "line", 1)
            warnings.warn(f"{lines.path}: {where} skipped, being empty.", stacklevel=5)
        columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        texts, numbers = (list(part) for part in zip(*places, strict=True))
        return CsvTable(lines.path, columns, numbers, header, texts, separator, encoding)

    for cells, place in _records(lines, separator):
        if not names:
            if cells:
                header, names = place[0], column_names(lines.path, cells)
            continue
        if not cells or (len(names) > 1 and len(cells) == 1 and not place[0].strip()):
            blank.append(place)
            continue
        if len(rows) >= size:
            yield block()
            rows, places, skipped, is_first = [], [], [], False
        text, line = place
        check_width(lines.path, line, text, len(cells), len(names), mark)
        if len(names) == 1:  # an empty line between rows is an empty cell
            rows += [[""] for _ in blank]
            places += blank
        else:
            skipped += [line for _, line in blank]
        blank = []
        rows.append(cells)
        places.append(place)
    if not names:
        raise ValueError(f"{lines.path} is empty; a CSV file has a header and at least one row.")
    if not rows and is_first:
        raise ValueError(f"{lines.path} has a header and no rows; give at least one row.")
    yield block()


def _records(lines: _Lines, separator: str) -> Iterator[tuple[list[str], tuple[str, int]]]:
    """The cells of every record, with its text and first line."""
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            text, line = lines.take()
            raise ValueError(
                f"{lines.path}, line {line} is not CSV ({error}): {shown(text)}; write a quote "
                'inside a quoted cell as "" and close every quote.'
            ) from None
        yield cells, lines.take()
