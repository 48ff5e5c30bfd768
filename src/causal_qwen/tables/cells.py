"""Cells: the value of one cell of a table, as it is written.

    read_cell("1.10")      -> 1.1        read_cell("007") -> "007"      read_cell("NA") -> NaN
    read_amount("$1,200")  -> Amount(1200.0, "$")
    read_amount("5%")      -> Amount(5.0, "%")

An amount is a number of `causal_qwen.text.numerals` alone in its cell, or with one currency or
percent mark. A percentage keeps its number: 5% is 5, not 0.05. "1.5k", "5 kg", "(1,200)", "1,5" and
"about 5" are no amounts: a factor, a unit or a meaning would have to be guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from causal_qwen.text.numerals import encode

MISSING = frozenset(("NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None"))
TRUTH = {
    text: text.lower() == "true" for text in ("True", "TRUE", "true", "False", "FALSE", "false")
}
# At most 15 digits before the point, which a double holds exactly.
NUMBER = re.compile(
    r"[-+]?(?:(?:0|[1-9][0-9]{0,14})(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
)
# Of any length and with leading zeros: a number where a number is asked for.
DIGITS = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
PERCENT = "%"
CURRENCY = re.compile(
    "[A-Z]{0,3}[$¢£¤¥฿\u20a0-\u20cf￠￡￥￦]|[元円원]"
    "|USD|EUR|GBP|JPY|CNY|RMB|INR|CHF|KRW|CAD|AUD|HKD"
)
DATE = re.compile(
    r"[0-9]{4}([-/])(?:0?[1-9]|1[0-2])(?:\1(?:0?[1-9]|[12][0-9]|3[01])"
    r"(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?"
    r"(?:Z|[-+][0-9]{2}:?[0-9]{2})?)?)?"
)
CLOCK = r"(?:,? [0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?(?: ?[AaPp][Mm])?)?"
# The year last: 5/6/2024, whose day may come first or second; `frames.is_day_first`.
YEAR_LAST = re.compile(
    rf"([0-9]{{1,2}})([-/.])([0-9]{{1,2}})\2(?:[0-9]{{4}}|(?<=/)[0-9]{{2}}){CLOCK}"
)
MONTH = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}[.]?"
MONTH_NAMED = re.compile(  # Jun 12 1998; 12-Jun-98; Friday, June 12, 1998
    rf"(?:(?:mon|tue|wed|thu|fri|sat|sun)[a-z]{{0,6}}[.]?,? )?"
    rf"(?:{MONTH} [0-9]{{1,2}},? |[0-9]{{1,2}}(?:[.]? |-){MONTH}(?:,? |-))"
    rf"(?:[0-9]{{4}}|[0-9]{{2}}){CLOCK}",
    re.IGNORECASE,
)
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
SHOWN = 60  # characters of a line or cell in a message


class Amount(NamedTuple):
    value: float
    mark: str  # "", "%", "$", "EUR", ...


def is_missing(text: str) -> bool:
    return not text or text.isspace() or text.strip() in MISSING


def read_cell(cell: str, decimal: str = ".") -> Any:
    """A number, a truth value, NaN or the text itself; digits such as 007 are a name. With decimal
    commas, "1.5" is a text."""
    if decimal == ",":
        given, cell = cell, with_point(cell)
        if cell == given and "." in cell and NUMBER.fullmatch(cell.strip()):
            return cell
    text = cell.strip()
    if is_missing(text):
        return math.nan
    if text in TRUTH:
        return TRUTH[text]
    if NUMBER.fullmatch(text) is None or not math.isfinite(float(text)):
        return cell
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


def read_amount(cell: str) -> Amount | None:
    """The number of a cell and its currency or percent mark; None where it has to be guessed."""
    text = cell.strip()
    if NUMBER.fullmatch(text):
        return Amount(float(text), "") if math.isfinite(float(text)) else None
    found = encode(text) if any(map(str.isdigit, text)) else None
    if found is None or len(found.values) != 1:
        return None
    before, after = (piece.strip() for piece in found.pieces)
    mark = before + after
    is_percent = mark == after == PERCENT
    is_currency = CURRENCY.fullmatch(mark) is not None and not (before and after)
    return Amount(found.values[0], mark) if not mark or is_percent or is_currency else None


def read_target(cell: str) -> Amount | None:
    """As `read_amount`, and digits of any length and with leading zeros."""
    text = cell.strip()
    if DIGITS.fullmatch(text) and math.isfinite(float(text)):
        return Amount(float(text), "")
    return read_amount(text)


def is_date(cell: str) -> bool:
    """Whether a cell is a date: 2024-05-01T10:00Z, 5/6/2024, Jun 12 1998."""
    text = cell.strip()
    return any(form.fullmatch(text) for form in (DATE, YEAR_LAST, MONTH_NAMED))


def marks_differ(marks: Iterable[str]) -> bool:
    """Whether amounts with these marks are of different units.

    A number without a mark may be of any currency; it is no percentage.
    """
    found = set(marks)
    return len(found - {""}) > 1 or {PERCENT, ""} <= found


def with_point(cell: str) -> str:
    """A cell of a file with decimal commas, with a decimal point; the same if it is no number.

    "1.234,50 €" is "1234.50 €", and "1.500" is "1500".
    """
    match = COMMA_NUMBER.fullmatch(cell.strip())
    if match is None:
        return cell
    before, whole, fraction, after = match.groups()
    moved = f"{before}{whole.replace('.', '')}{(fraction or '').replace(',', '.')}{after}"
    return cell if read_amount(moved) is None else moved


def find_decimal(cells: Iterable[str], is_usual: bool) -> str:
    """The decimal mark of a file's cells. "1,5" can only be a decimal comma, "1.5" only a decimal
    point, "1,234" either. Where no cell decides, the comma if it `is_usual`."""
    cells = [cell.strip() for cell in cells]
    if any(map(CERTAIN_COMMA.fullmatch, cells)):
        return ","
    return "," if is_usual and not any(map(CERTAIN_POINT.fullmatch, cells)) else "."


def shown(text: str) -> str:
    """A line or cell in a message."""
    text = text.rstrip("\r\n")
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}...")
