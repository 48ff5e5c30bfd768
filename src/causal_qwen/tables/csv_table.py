"""CSV files: how one is written, and its cells and lines as they are written.

The encoding is UTF-8, or that of a byte order mark; others must be named. The separator (comma,
semicolon, tab, bar) is that with which most of the first rows are as wide as the header; the
decimal mark is a comma only where a comma does not separate cells.

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
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from causal_qwen.tables.cells import find_decimal, may_be_thousands, shown
from causal_qwen.tables.frames import name_rows, require_pandas, text_names
from causal_qwen.terminal import counted

BOM = "\ufeff"
SAMPLE = 2**20  # bytes from which the encoding and the separator are found
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}
SEPARATOR_NAMES = {"comma": ",", "semicolon": ";", "tab": "\t", "\\t": "\t", "bar": "|"}
ROWS_COMPARED = 200
BYTE_ORDER_MARKS = {  # the longer ones first: that of UTF-16 begins that of UTF-32
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
SUGGESTED = ("cp1252", "gb18030", "shift_jis")


class Source(NamedTuple):
    """What gives the file's bytes back."""

    header: str  # the text of the header's line, its end included
    records: list[str]  # the text of every row, its line end included
    separator: str
    encoding: str
    decimal: str


def read_csv_blocks(
    path: str,
    rows: int,
    *,
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
) -> Iterator[tuple[Any, Source]]:
    """At most `rows` rows at a time, as a DataFrame of texts whose index are lines, as editors
    count. What is not given is found from the file's beginning (the decimal mark from the first
    block)."""
    if decimal not in (None, ",", "."):
        raise ValueError(f"decimal {decimal!r} is no decimal mark; give a comma or a point.")
    with _open(path) as file:
        sample = file.read(SAMPLE)
        name = encoding_of(sample, encoding)
        start = codecs.getincrementaldecoder(name)("replace").decode(sample)
        mark = find_separator(start) if separator is None else named_separator(separator)
        file.seek(0)
        text = io.TextIOWrapper(file, name, newline="")
        try:
            for cells, header, records in _blocks(path, text, mark, rows):
                if decimal is None:
                    decimal = _decimal_of(path, cells, mark)
                yield cells, Source(header, records, mark, name, decimal)
        except UnicodeDecodeError:
            raise undecodable(path, name) from None


def _blocks(
    path: str, text: Iterable[str], separator: str, size: int
) -> Iterator[tuple[Any, str, list[str]]]:
    """A DataFrame, the header's line and the records; a file without rows is refused."""
    pandas = require_pandas()
    records = _records(path, text, separator)
    header = next((one for one in records if one[0]), None)
    if header is None:
        raise ValueError(f"{path} is empty; a CSV file has a header and at least one row.")
    names = text_names(name or f"Unnamed: {place}" for place, name in enumerate(header[0]))
    rows: list[tuple[list[str], str, int]] = []
    skipped: list[int] = []
    is_first = True

    def block() -> tuple[Any, str, list[str]]:
        known = [line for line in skipped if line < rows[-1][2]]  # the end of a file may be empty
        if known:
            where = name_rows(known).replace("row", "line", 1)
            warnings.warn(f"{path}: {where} skipped, being empty.", stacklevel=6)
        cells, texts, lines = zip(*rows, strict=True)
        index = pandas.Index(lines, name="line")
        return pandas.DataFrame(list(cells), index, names, dtype=object), header[1], list(texts)

    for cells, record, line in records:
        if not cells or (len(cells) == 1 < len(names) and not record.strip()):
            skipped.append(line)
            continue
        if len(rows) >= size:
            yield block()
            rows, skipped, is_first = [], [], False
        if len(cells) != len(names):
            raise _wrong_width(f"{path}, line {line}", record, len(cells), len(names), separator)
        rows.append((cells, record, line))
    if not rows and is_first:
        raise ValueError(f"{path} has a header and no rows; give at least one row.")
    yield block()


def _wrong_width(where: str, record: str, cells: int, names: int, separator: str) -> ValueError:
    """Its cells would be in the wrong columns."""
    mark = SEPARATORS.get(separator, separator)
    cure = f"quote a cell that contains a {mark}" + (', such as "1,870"' if mark == "comma" else "")
    if cells < names:
        cure = f"write a {mark} for every empty cell, and check that the file is complete"
    has = f"has {counted(cells, 'cell')} and the header {names}"
    return ValueError(f"{where} {has}: {shown(record)}; {cure}.")


def _records(
    path: str, text: Iterable[str], separator: str
) -> Iterator[tuple[list[str], str, int]]:
    """The cells of every record, its text and its first line."""
    pending: list[str] = []
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for number, line in enumerate(text, 1):
            if "\0" in line:
                raise ValueError(
                    f"{path}, line {number} has a NUL byte; save the table as UTF-8 text."
                )
            pending.append(line)
            yield line.removeprefix(BOM) if number == 1 else line

    reader = csv.reader(lines(), delimiter=separator, strict=True)
    first = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {first} is not CSV ({error}): {shown(''.join(pending))}; write a "
                'quote inside a quoted cell as "" and close every quote.'
            ) from None
        if cells is None:
            return
        yield cells, "".join(pending), first
        first = number + 1
        pending.clear()


def append_cells(record: str, cells: list[str], separator: str) -> str:
    """A record with more cells, before its line end."""
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=separator, lineterminator="").writerow(cells)
    body = record.rstrip("\r\n")
    return f"{body}{separator}{text.getvalue()}{record[len(body) :]}"


def encoding_of(data: bytes, encoding: str | None = None) -> str:
    """That of a byte order mark, else the one that is named, else UTF-8."""
    for mark, name in BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            return name
    try:
        name = codecs.lookup(encoding or "utf-8").name
    except LookupError:
        raise ValueError(
            f"encoding {encoding!r} is unknown; name one such as utf-8, utf-16, cp1252 or gb18030."
        ) from None
    return {"utf-16": "utf-16-le", "utf-32": "utf-32-le", "utf-8-sig": "utf-8"}.get(name, name)


def read_text(path: str, encoding: str | None = None) -> str:
    """A whole text file, without its byte order mark; .gz, .bz2 and .xz are decompressed."""
    with _open(path) as file:
        data = file.read()
    name = encoding_of(data, encoding)
    try:
        text: str = data.decode(name)
    except UnicodeDecodeError:
        raise undecodable(path, name) from None
    return text.removeprefix(BOM)


def undecodable(path: str, encoding: str) -> ValueError:
    """Names the first line that is not in this encoding, and how it would read in others."""
    number, line, found = 0, b"", []
    with _open(path) as file:
        for one in file:
            number, line = number + 1, one
            try:
                line.decode(encoding)
            except UnicodeDecodeError:
                break
    for name in SUGGESTED:
        with suppress(UnicodeDecodeError):
            found.append(f"--encoding {name} reads {shown(line.decode(name))}")
    cure = f"name its encoding ({', '.join(found[:2])}), or " if found else ""
    return ValueError(
        f"{path}, line {number} is not {encoding.upper()}; {cure}save the table as UTF-8 text."
    )


def _open(path: str) -> Any:
    return OPENERS.get(Path(path).suffix.lower(), open)(path, "rb")


def find_separator(text: str) -> str:
    """The separator with which the header has several cells and most rows as many.

    A tie is decided by the number of cells, then against the comma: names of columns seldom have
    semicolons, tabs or bars. A file in which no separator fits is taken to have commas.
    """
    best, separator = (0.5, 0, False), ","
    for mark in SEPARATORS:
        rows = csv.reader(io.StringIO(text.removeprefix(BOM), newline=""), delimiter=mark)
        widths: list[int] = []
        with suppress(csv.Error):  # such as a cell of megabytes, after a quote that is never closed
            widths += (len(row) for row in islice(filter(None, rows), ROWS_COMPARED + 1))
        if not widths or widths[0] < 2:
            continue
        others = widths[1:] or widths  # a header alone
        agreeing = sum(width == widths[0] for width in others) / len(others)
        if (found := (agreeing, widths[0], mark != ",")) > best:
            best, separator = found, mark
    return separator


def named_separator(separator: str) -> str:
    """A separator as the user names it: a character, or tab, comma, semicolon, bar."""
    mark = SEPARATOR_NAMES.get(separator.lower(), separator)
    if len(mark) != 1 or mark in '"\r\n':
        raise ValueError(
            f"separator {separator!r} is no single character; give one such as ; or | or tab."
        )
    return mark


def _decimal_of(path: str, cells: Any, separator: str) -> str:
    """The decimal mark of a file; without evidence, a file with semicolons has commas, as
    spreadsheets write it."""
    if separator != ",":
        try:
            decimal = find_decimal(cells.to_numpy().flat, separator == ";")
        except ValueError as error:
            raise ValueError(f"{path} has {error}") from None
        if decimal == ",":
            return decimal
    for name, column in cells.items():
        if (cell := may_be_thousands(column)) is not None:
            warnings.warn(
                f"{path}: {name} has {shown(cell)}, which is read as a number below 1000; name the "
                "decimal comma (--decimal ,) if points separate thousands.",
                stacklevel=5,
            )
    return "."
