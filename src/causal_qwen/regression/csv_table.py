"""CSV table: a file's cells as they are written, and the values that the model reads.

    table = read_table("rings.csv")
    table.columns["code"]      # ["007", "1.10", "NA"]: as in the file
    table.frame()["code"]      # ["007", 1.1, NaN]: every cell by itself

The value of a cell does not depend on other rows, so a row's prediction does not either.

A record with more or fewer cells than the header is refused and its line named: it usually has an
unquoted comma (1,870), which would move every later cell into the wrong column. Files that are not
comma-separated UTF-8 text are refused in one sentence.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import lzma
import math
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from causal_qwen.paths import install_hint
from causal_qwen.regression.sentences import LINE, name_rows
from causal_qwen.terminal import counted
from causal_qwen.training.data import check_width, column_names, shown

BOM = "\ufeff"
QUOTED = re.compile(r'"(?:[^"]|"")*"')
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}  # not read; named in an error
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
MISSING = frozenset(("NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None"))
TRUTH = {
    text: text.lower() == "true" for text in ("True", "TRUE", "true", "False", "FALSE", "false")
}
# At most 15 digits before the point, which a double holds exactly.
NUMBER = re.compile(
    r"[-+]?(?:(?:0|[1-9][0-9]{0,14})(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
)


@dataclass(frozen=True)
class CsvTable:
    """A header and at least one row; every row has a cell in every column."""

    path: str
    columns: dict[str, list[str]]  # name -> cells; a column without a name is "Unnamed: 0", ...
    lines: list[int]  # in which the rows begin, as editors count
    header: str  # the text of the header's line, its end included
    records: list[str]  # the text of every row, its line end included

    def __len__(self) -> int:
        return len(self.lines)

    def frame(self, targets: Sequence[str] = ()) -> Any:
        """A DataFrame of typed values: numbers, booleans, texts, NaN for empty cells and "NA".

        Its index has the lines of the file, which name the rows in messages. A warning shows a
        cell such as "NA", which may be a name, unless it is in a target's column.
        """
        import pandas

        typed = {name: list(map(_value, cells)) for name, cells in self.columns.items()}
        for name, cells in self.columns.items():
            rows = [row for row, cell in enumerate(cells) if cell.strip() in MISSING]
            if rows and name not in targets:
                count = counted(len(rows), "cell is", "cells are")
                where = self.name_lines(rows, name)
                warnings.warn(f"{self.path}: {count} read as missing: {where}.", stacklevel=3)
        frame = pandas.DataFrame(typed, dtype=object).infer_objects()
        return frame.set_index(pandas.Index(self.lines, name=LINE))

    def numbers(self, name: str) -> NDArray[np.float64]:
        """A column as numbers, NaN where a cell is none: "1,870", "5 kg" and "True" are none."""
        import pandas

        cells = pandas.Series(self.columns[name], dtype=object)
        return pandas.to_numeric(cells, errors="coerce").to_numpy(np.float64)

    def name_lines(self, rows: Sequence[int] | NDArray[np.int64], name: str) -> str:
        """ "lines 5 and 7 (line 5: price 'n/a')": where rows begin, and the first one's cell."""
        lines = [self.lines[row] for row in rows]
        where = name_rows(lines).replace("row", "line", 1)
        return f"{where} (line {lines[0]}: {name} {shown(self.columns[name][rows[0]])})"


def read_table(path: str | os.PathLike[str]) -> CsvTable:
    """Read a comma-separated UTF-8 file; a .gz, .bz2 or .xz file is decompressed."""
    require_pandas()
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file; check the path.")
    opener = OPENERS.get(Path(path).suffix.lower(), open)
    try:
        with opener(path, "rt", encoding="utf-8", errors="surrogateescape", newline="") as file:
            _check_separator(os.fspath(path), file)
            file.seek(0)
            return _parse(_Lines(os.fspath(path), file))
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be decompressed: {error}; copy it again.") from error


def require_pandas() -> None:
    try:
        import pandas  # noqa: F401
    except ModuleNotFoundError:
        raise ImportError(
            f"Tables need pandas, which is not installed: {install_hint('tables')}"
        ) from None


class _Lines:
    """The lines of a file, checked one by one; `take` returns those since its last call."""

    def __init__(self, path: str, file: TextIO) -> None:
        self.path, self.file, self.number, self.taken = path, file, 0, 0
        self.pending: list[str] = []

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self.file)
        self.number += 1
        if "\0" in line:
            raise ValueError(
                f"{self.path}, line {self.number} has a NUL byte; save the table as UTF-8 text."
            )
        try:
            line.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{self.path}, line {self.number} is not UTF-8; save the table as UTF-8 text."
            ) from None
        self.pending.append(line)
        return line.removeprefix(BOM) if self.number == 1 else line

    def take(self) -> tuple[str, int]:
        """The text of a record, and the line in which it begins."""
        first, self.taken = self.taken + 1, self.number
        text = "".join(self.pending)
        self.pending.clear()
        return text, first


def _parse(lines: _Lines) -> CsvTable:
    header = ""
    names: list[str] = []
    rows: list[list[str]] = []
    places: list[tuple[str, int]] = []  # text and first line of every row
    blank: list[tuple[str, int]] = []  # not yet known to lie between rows
    skipped: list[int] = []
    for cells, place in _records(lines):
        if not names:
            if cells:
                header, names = place[0], column_names(lines.path, cells)
            continue
        if not cells or (len(names) > 1 and not place[0].strip()):
            blank.append(place)
            continue
        text, line = place
        check_width(lines.path, line, text, len(cells), len(names))
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
    if not rows:
        raise ValueError(f"{lines.path} has a header and no rows; give at least one row.")
    if skipped:
        where = name_rows(skipped).replace("row", "line", 1)
        warnings.warn(f"{lines.path}: {where} skipped, being empty.", stacklevel=4)
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    texts, numbers = (list(part) for part in zip(*places, strict=True))
    return CsvTable(lines.path, columns, numbers, header, texts)


def _records(lines: _Lines) -> Iterator[tuple[list[str], tuple[str, int]]]:
    """The cells of every record, with its text and first line."""
    reader = csv.reader(lines, strict=True)
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


def _check_separator(path: str, file: TextIO) -> None:
    """Refuse a file whose header has as many of another separator as commas, or more, and whose
    first row has the same number of it. Quoted cells do not count."""
    texts = islice((line for line in file if line.strip()), 2)
    header, *row = [QUOTED.sub("", line) for line in texts] or [""]
    for mark, name in SEPARATORS.items():
        count = header.count(mark)
        if count >= max(header.count(","), 1) and all(line.count(mark) == count for line in row):
            raise ValueError(
                f"{path} is separated by {name}, it seems ({shown(header.removeprefix(BOM))}); "
                "save it with commas, or quote the cells that contain other marks."
            )


def _value(cell: str) -> Any:
    """A number, a truth value, NaN or the text itself; digits such as 007 are a name."""
    text = cell.strip()
    if not text or text in MISSING:
        return math.nan
    if text in TRUTH:
        return TRUTH[text]
    if NUMBER.fullmatch(text) is None:
        return cell
    is_whole = text.lstrip("+-").isdecimal()
    number = int(text) if is_whole else float(text)
    return number if math.isfinite(number) else cell
