"""CSV files: how one is written, its cells as they are written, and the values that a model reads.

The encoding is UTF-8, or UTF-16 and UTF-32 by byte order marks or zero bytes; others must be named.
The separator (comma, semicolon, tab, bar) is that with which most of the first rows are as wide as
the header; the decimal mark is a comma only where a comma does not separate cells.

The value of a cell does not depend on other rows, so a row's prediction does not either. A record
with more or fewer cells than the header is refused and its line named: it usually has an unquoted
comma (1,870), which would move every later cell into the wrong column.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from causal_qwen.tables.cells import NUMBER, is_missing, read_amount, read_cell
from causal_qwen.tables.rows import check_width, column_names, name_rows, shown

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
MARK = "[^0-9,.+\\-\\s]{0,4} ?"
COMMA_NUMBER = re.compile(  # 1,5; 1.234,50 €; 12: with a decimal comma
    rf"({MARK}[-+]?)([1-9][0-9]{{0,2}}(?:\.[0-9]{{3}})+|[0-9]+)(,[0-9]+)?"
    rf"([eE][-+]?[0-9]+| ?{MARK})"
)
AMBIGUOUS = r"[1-9][0-9]{0,2}SEP[0-9]{3}(?![0-9])"
CERTAIN = (
    rf"{MARK}[-+]?(?:(?!{AMBIGUOUS})[0-9]+|[1-9][0-9]{{0,2}}(?:OTHER[0-9]{{3}})+)SEP[0-9]+"
    rf"(?:[eE][-+]?[0-9]+)? ?{MARK}"
)
CERTAIN_COMMA = re.compile(CERTAIN.replace("SEP", ",").replace("OTHER", r"\."))
CERTAIN_POINT = re.compile(CERTAIN.replace("SEP", r"\.").replace("OTHER", ","))
THOUSAND = re.compile(r"[1-9][0-9]{0,2}\.[0-9]{3}")  # 1.234


class CsvBlock(NamedTuple):
    """Some rows of a file; every row has a cell in every column."""

    columns: dict[str, list[str]]
    lines: list[int]  # in which the rows begin, as editors count
    header: str  # the text of the header's line, its end included
    records: list[str]  # the text of every row, its line end included
    separator: str
    encoding: str  # which gives the file's bytes back
    decimal: str


def read_csv_blocks(
    path: str,
    rows: int,
    *,
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
) -> Iterator[CsvBlock]:
    """At most `rows` rows at a time. What is not given is found from the file's beginning (the
    decimal mark from the first block), or the error names the option."""
    if decimal not in (None, ",", "."):
        raise ValueError(f"decimal {decimal!r} is no decimal mark; give a comma or a point.")
    opener = OPENERS.get(Path(path).suffix.lower(), open)
    with opener(path, "rb") as file:
        sample = file.read(SAMPLE)
        name = encoding_of(sample[: len(sample) // 4 * 4 or None], encoding)
        start = codecs.getincrementaldecoder(name)("replace").decode(sample)
        mark = find_separator(start) if separator is None else named_separator(separator)
        file.seek(0)
        text = io.TextIOWrapper(file, name, newline="")
        try:
            for found in _blocks(path, text, mark, rows):
                if decimal is None:
                    decimal = find_decimal(path, found[0], mark)
                    if decimal == ".":
                        _note_thousands(path, found[0])
                yield CsvBlock(*found, mark, name, decimal)
        except UnicodeDecodeError:
            raise undecodable(path, name) from None


def _blocks(
    path: str, text: Iterable[str], separator: str, size: int
) -> Iterator[tuple[dict[str, list[str]], list[int], str, list[str]]]:
    """Columns, lines, the header and records; a file without rows is refused."""
    header, names, is_first = "", list[str](), True
    rows: list[tuple[list[str], str, int]] = []
    blank: list[tuple[list[str], str, int]] = []  # not yet known to lie between rows
    skipped: list[int] = []

    def block() -> tuple[dict[str, list[str]], list[int], str, list[str]]:
        if skipped:
            where = name_rows(skipped).replace("row", "line", 1)
            warnings.warn(f"{path}: {where} skipped, being empty.", stacklevel=6)
        cells, records, lines = zip(*rows, strict=True)
        columns = dict(zip(names, map(list, zip(*cells, strict=True)), strict=True))
        return columns, list(lines), header, list(records)

    for cells, record, line in _records(path, text, separator):
        if not names:
            if cells:
                header, names = record, column_names(path, cells)
            continue
        if not cells or (len(names) > 1 and len(cells) == 1 and not record.strip()):
            blank.append(([""], record, line))
            continue
        if len(rows) >= size:
            yield block()
            rows, skipped, is_first = [], [], False
        mark = SEPARATORS.get(separator, separator)
        check_width(path, line, record, len(cells), len(names), mark)
        if len(names) == 1:  # an empty line between rows is an empty cell
            rows += blank
        else:
            skipped += [line for _, _, line in blank]
        blank = []
        rows.append((cells, record, line))
    if not names:
        raise ValueError(f"{path} is empty; a CSV file has a header and at least one row.")
    if not rows and is_first:
        raise ValueError(f"{path} has a header and no rows; give at least one row.")
    yield block()


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


# ---------------------------------------------------------------- encoding


def encoding_of(data: bytes, encoding: str | None = None) -> str:
    """The encoding that is named, else that of the file's first bytes."""
    found = next((n for mark, n in BYTE_ORDER_MARKS.items() if data.startswith(mark)), "utf-8")
    if found == "utf-8" and len(data) > 1 and len(data) % 2 == 0:
        even, odd = data[::2].count(0), data[1::2].count(0)  # of Latin letters, half are 0
        if even == 0 and odd > 0.8 * len(data) / 2:
            found = "utf-16-le"
        elif odd == 0 and even > 0.8 * len(data) / 2:
            found = "utf-16-be"
    if encoding is None:
        return found
    try:
        name = codecs.lookup(encoding).name
    except LookupError:
        raise ValueError(
            f"encoding {encoding!r} is unknown; name one such as utf-8, utf-16, cp1252 or gb18030."
        ) from None
    if name in ("utf-16", "utf-32"):
        return found if found.startswith(name) else f"{name}-le"
    return "utf-8" if name == "utf-8-sig" else name


def read_text(path: str, encoding: str | None = None) -> str:
    """A whole text file, without its byte order mark; .gz, .bz2 and .xz are decompressed."""
    data = _read_bytes(path)
    name = encoding_of(data, encoding)
    try:
        return data.decode(name).removeprefix(BOM)
    except UnicodeDecodeError:
        raise undecodable(path, name) from None


def undecodable(path: str, encoding: str) -> ValueError:
    """Names the line, and encodings in which the whole file can be read."""
    data = _read_bytes(path)
    try:
        data.decode(encoding)
        place = 0
    except UnicodeDecodeError as error:
        place = error.start
    number = data[:place].count(b"\n") + 1
    line = data.splitlines()[number - 1] if data else b""
    found = []
    for name in SUGGESTED:
        with suppress(UnicodeDecodeError):
            data.decode(name)
            if name != encoding:
                found.append(f"--encoding {name} reads {shown(line.decode(name))}")
    cure = f"name its encoding ({', '.join(found[:2])}), or " if found else ""
    return ValueError(
        f"{path}, line {number} is not {encoding.upper()}; {cure}save the table as UTF-8 text."
    )


def _read_bytes(path: str) -> bytes:
    with OPENERS.get(Path(path).suffix.lower(), open)(path, "rb") as file:
        content: bytes = file.read()
        return content


# ---------------------------------------------------------------- separator


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


# ---------------------------------------------------------------- decimal mark


def find_decimal(path: str, columns: dict[str, list[str]], separator: str) -> str:
    """The decimal mark of a file's numbers.

    "1,5" can only be a decimal comma, "1.5" only a decimal point; "1,234" may be either. Where no
    cell decides, a file with semicolons has commas, as spreadsheets write it. Both are refused.
    """
    if separator == ",":
        return "."
    cells = [cell.strip() for column in columns.values() for cell in column]
    comma = next(filter(CERTAIN_COMMA.fullmatch, cells), None)
    point = next(filter(CERTAIN_POINT.fullmatch, cells), None)
    if comma is not None and point is not None:
        raise ValueError(
            f"{path} has numbers with a decimal comma, {shown(comma)}, and with a decimal "
            f"point, {shown(point)}; name one with --decimal, and the others stay text."
        )
    return "," if comma is not None or (separator == ";" and point is None) else "."


def _note_thousands(path: str, columns: dict[str, list[str]]) -> None:
    """Warn of columns such as 987, 1.234, in which a point may separate thousands."""
    for name, cells in columns.items():
        known = {cell.strip() for cell in cells if not is_missing(cell)}
        pointed = [cell for cell in known if THOUSAND.fullmatch(cell)]
        others = known.difference(pointed)
        if pointed and others and all(cell.isdecimal() and len(cell) <= 3 for cell in others):
            warnings.warn(
                f"{path}: {name} has {shown(min(pointed))}, which is read as a number below 1000; "
                "name the decimal comma (--decimal ,) if points separate thousands.",
                stacklevel=6,
            )


def with_point(cell: str) -> str:
    """A cell of a file with decimal commas, with a decimal point; the same if it is no number.

    "1.234,50 €" is "1234.50 €", and "1.500" is "1500".
    """
    text = cell.strip()
    match = COMMA_NUMBER.fullmatch(text)
    if match is None:
        return cell
    before, whole, fraction, after = match.groups()
    moved = f"{before}{whole.replace('.', '')}{(fraction or '').replace(',', '.')}{after}"
    return cell if read_amount(moved) is None or moved == text else moved


def read_comma_cell(cell: str) -> object:
    """As `read_cell`, for a file with decimal commas, in which "1.5" is a text."""
    moved = with_point(cell)
    if moved == cell and "." in cell and NUMBER.fullmatch(cell.strip()):
        return cell
    return read_cell(moved)
