"""CSV dialect: how a file is written: its encoding, its separator, its decimal mark.

decode(path, data)         the text, if its encoding is certain: UTF-8, or UTF-16 and UTF-32 by
                           their byte order marks or zero bytes; others must be named
find_separator(text)       comma, semicolon, tab or bar: that with which most of the first rows
                           are as wide as the header
find_decimal(cells, ...)   comma or point, where a comma does not separate cells
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

from causal_qwen.tables.cells import NUMBER, read_amount, read_cell
from causal_qwen.tables.rows import shown

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


# ---------------------------------------------------------------- encoding


def decode(path: str, data: bytes, encoding: str | None = None) -> tuple[str, str]:
    """The text of a file, its byte order mark included, and the encoding that gives it back."""
    name = encoding_of(data, encoding)
    try:
        return data.decode(name), name
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}, line {line} is not {name.upper()}; {_suggestion(data, error.start, name)}."
        ) from None


def encoding_of(data: bytes, encoding: str | None = None) -> str:
    """The encoding that is named, else that of the file's first bytes."""
    return _encoding_of(data) if encoding is None else _named_encoding(encoding, data)


def _encoding_of(data: bytes) -> str:
    for mark, name in BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            return name
    if len(data) % 2 == 0 and len(data) > 1:  # UTF-16 of Latin letters: every other byte is 0
        even, odd = data[::2].count(0), data[1::2].count(0)
        if even == 0 and odd > 0.8 * len(data) / 2:
            return "utf-16-le"
        if odd == 0 and even > 0.8 * len(data) / 2:
            return "utf-16-be"
    return "utf-8"


def _named_encoding(encoding: str, data: bytes) -> str:
    try:
        name = codecs.lookup(encoding).name
    except LookupError:
        raise ValueError(
            f"encoding {encoding!r} is unknown; name one such as utf-8, utf-16, cp1252 or gb18030."
        ) from None
    if name in ("utf-16", "utf-32"):
        found = _encoding_of(data)
        return found if found.startswith(name) else f"{name}-le"
    return "utf-8" if name == "utf-8-sig" else name


def _suggestion(data: bytes, place: int, refused: str) -> str:
    """Encodings in which the whole file can be read, with what they make of one line."""
    first = data.rfind(b"\n", 0, place) + 1
    end = data.find(b"\n", place)
    line = data[first : end if end >= 0 else len(data)]
    found = []
    for name in SUGGESTED:
        try:
            data.decode(name)
            text = line.decode(name)
        except UnicodeDecodeError:
            continue
        if name != refused:
            found.append(f"--encoding {name} reads {shown(text)}")
    if not found:
        return "save the table as UTF-8 text"
    return f"name its encoding ({', '.join(found[:2])}), or save the table as UTF-8 text"


# ---------------------------------------------------------------- separator


def find_separator(text: str) -> str:
    """The separator with which the header has several cells and most rows as many.

    A tie is decided by the number of cells, then against the comma: names of columns seldom have
    semicolons, tabs or bars. A file in which no separator fits is taken to have commas.
    """
    best, separator = (0.5, 0, False), ","
    for mark in SEPARATORS:
        widths = _widths(text, mark)
        if not widths or widths[0] < 2:
            continue
        agreeing = sum(width == widths[0] for width in widths[1:]) / max(len(widths) - 1, 1)
        if len(widths) == 1:
            agreeing = 1.0  # a header alone
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


def _widths(text: str, mark: str) -> list[int]:
    rows = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), delimiter=mark)
    widths: list[int] = []
    with suppress(csv.Error):  # such as a cell of megabytes, after a quote that is never closed
        widths += (len(row) for row in islice(filter(None, rows), ROWS_COMPARED + 1))
    return widths


# ---------------------------------------------------------------- decimal mark


def find_decimal(path: str, cells: Iterable[str], separator: str) -> str:
    """The decimal mark of a file's numbers.

    "1,5" can only be a decimal comma, "1.5" only a decimal point; "1,234" may be either. Where no
    cell decides, a file with semicolons has commas, as spreadsheets write it. Both are refused.
    """
    if separator == ",":
        return "."
    comma = point = None
    for cell in cells:
        if comma is None and CERTAIN_COMMA.fullmatch(text := cell.strip()):
            comma = text
        elif point is None and CERTAIN_POINT.fullmatch(text := cell.strip()):
            point = text
        if comma is not None and point is not None:
            raise ValueError(
                f"{path} has numbers with a decimal comma, {shown(comma)}, and with a decimal "
                f"point, {shown(point)}; name one with --decimal, and the others stay text."
            )
    if comma is not None:
        return ","
    return "," if separator == ";" and point is None else "."


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
