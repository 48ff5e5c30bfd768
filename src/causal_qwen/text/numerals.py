r"""Numerals: find the numbers of a text, their values and their spelling.

    encode("价格是99.9元")  ->  pieces ("价格是", "元"), values (99.9,), surfaces ("99.9",)
    decode(encode(s)) == s  for every string s

Precision first: anything ambiguous stays text, because a missed number is still read as digits
while a wrong one puts a wrong quantity into the model. The text between the numbers is kept as
``pieces`` (one more than there are values), so a ``<NUM>`` typed by a user is part of a piece and
never a placeholder.

Grammar
-------
Full-width forms (U+FF01..FF5E) are read as their ASCII twins. The digits are 0-9.

    number    = [sign] body [exponent]
    sign      = "+" | "-" | U+2212
    body      = (integer | groups) ["." digits] | "." digits
    integer   = "0" | nonzero {digit}                          so 007 is not a number
    groups    = nonzero [digit [digit]] sep ddd {sep ddd}      one kind of sep throughout
    sep       = "," | U+00A0 | U+2009 | U+202F                 no-break, thin, narrow no-break space
    exponent  = ("e" | "E") [sign] d[d[d]]
              | [" "] times [" "] "10" ("^" [sign] d[d[d]] | "^{" [sign] d[d[d]] "}" | superscript)
    times     = "×" | "x" | "X" | "*" | "·" | "⋅" | "\times"

*Number of digits.* A bare integer may have 15; longer ones are card numbers and keys, and some
shorter ones are phones and dates (`causal_qwen.text.names`). With a point
or an exponent 17 significant digits are allowed (leading zeros are not counted), as many as a
double needs: ``repr`` of every finite float is a number of this grammar and encodes to that float.
The value is the correctly rounded binary64. Overflow, and underflow of a nonzero number to 0, stay
text. So do digits of both widths side by side, and three ASCII digits after a full-width comma (in
Chinese it separates clauses).

A *word* is a maximal run of characters that do not break it. Breaks are white space, brackets,
double quotes, ``! & * ; < = > ? | ~`` and their kin, commas, CJK letters, emoji. A comma between
digits does not break, nor does a sep space, nor ``times 10^`` after a number. A word is read whole
or stays text; ``: '`` before it and ``. , : ' / \ + -`` after it are not part of it.

    word      = [label ":"] [["+"] currency] number [unit]                       not -$5
              | [currency] number [unit] dash [currency] number [unit]          range
              | number "," number {"," number}                                  list
              | [currency] number [unit] {"+" [currency] number [unit]}         sum
    currency  = [up to three capitals] ["\"] currency symbol                    $ US$ \$
    dash      = "-" | U+2010..2013 | U+2212
    unit      = ["\"] {"%" | "‰" | "°" | "′" | "″" | currency symbol} [name ["²" | "³"]]
                ["/" letters ["²" | "³"]] {"-" letters}                         5/month, 5-year-old
    name      = a lower-case word, or a known unit in any case (MB, kWh, USD); not the ending of an
                ordinal, am or pm, a lone letter other than a unit (12a, 3D, 5e), hexadecimal (3fab)

* A *sign* is at the start, or after white space, an opening bracket, a quote, an operator, a comma
  or a currency symbol; never after a letter (COVID-19) or a closing bracket. After a CJK letter
  "-" is a sign if the number has a point, %, a degree or a measure that can be negative (气温-5℃,
  利润-20万, 今天-3到5度), or behind a word of change or amount, 为 or 是 (下降了-3); 长征-5 is
  a rocket.
* A *range* has one dash; a unit on its left must be repeated on its right, also a CJK unit
  (5元-10元). Not ranges: what looks like a phone (555-1234), a month (2024-11, 11-2024), short
  years (2024-25) or a ZIP+4. Its ends may have signs if the dash is U+2013: -5–10 °C.
* A *list* stays text if a neighbouring pair could be one number (1,234,56), or if a list of two
  could be one number with a decimal comma (1,5 and 1.299,00; but 1.5,2.5 splits).

Everything else stays text: 10:30, 1/2, 1.2.3, 1-2-3, 10^6, A1B2, a@b7.org, #5, 1'000, 1_000, 5²,
5½ and any digit next to another script's. The context can keep a word text as well:

* integers separated by single plain spaces, if one has a leading zero or one after the first
  has three digits (1 000 000; 4111 1111 1111 1111), or from three on after a "+" (+33 6 12 34);
* a URL or query string, localhost:8080, a phone number with brackets, "+" and 8 digits;
* a label before it, a month's name beside it: see `causal_qwen.text.names`;
* am/pm/o'clock, 月日号点时 after an integer and 年 after a year (3年 is a duration), 第 before it;
* a thousands point: 1.500 € (`causal_qwen.text.names`);
* a mixed fraction (1 1/2, 3 ½), a decade (1990s, '90s), an emoticon (:3), a LaTeX index (x_{2}).

A year alone is a number.

The scan is linear: every pattern below is bounded, or starts only where a maximal run starts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from causal_qwen.options import PLACEHOLDER
from causal_qwen.text.names import (
    CJK,
    DASH,
    HIDDEN,
    MEASURE,
    MEASURE_WORD,
    SIGN,
    SPACES,
    hide_names,
    is_name,
)

__all__ = ["PLACEHOLDER", "Encoded", "canonical", "decode", "encode", "render"]


Found = tuple[int, int, float]  # start, end, value


# ---------------------------------------------------------------- encode and decode


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text cut at its numbers: piece, number, piece, ..., number, piece.

    ``values[i]`` was written ``surfaces[i]`` between ``pieces[i]`` and ``pieces[i + 1]``.
    """

    pieces: tuple[str, ...]
    values: tuple[float, ...]
    surfaces: tuple[str, ...]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of every number in the source text."""
        spans = []
        end = 0
        for piece, surface in zip(self.pieces[:-1], self.surfaces, strict=True):
            start = end + len(piece)
            end = start + len(surface)
            spans.append((start, end))
        return tuple(spans)


def encode(text: str) -> Encoded:
    """Cut a text at its numbers (grammar in the module's docstring)."""
    found = _find_numbers(text)
    ends = [0, *[end for _, end, _ in found]]
    starts = [*[start for start, _, _ in found], len(text)]
    return Encoded(
        pieces=tuple([text[a:b] for a, b in zip(ends, starts, strict=True)]),
        values=tuple([value for _, _, value in found]),
        surfaces=tuple([text[a:b] for a, b, _ in found]),
    )


def decode(encoded: Encoded) -> str:
    """Restore the text: the inverse of ``encode``."""
    parts = [encoded.pieces[0]]
    for surface, piece in zip(encoded.surfaces, encoded.pieces[1:], strict=True):
        parts += surface, piece
    return "".join(parts)


def canonical(value: float) -> str:
    """The shortest text that ``encode`` maps to exactly this double: Python's ``repr``.

    ``repr`` always writes a point or an exponent, so its up to 17 digits are within the grammar.
    """
    return repr(_finite(value))


def render(value: float, digits: int = 6) -> str:
    """The text of a generated value: ``%g`` with so many significant digits.

    ``encode`` recognises what this writes. Where ``%g`` would leave the grammar (an integer beyond
    15 digits or with the digits of a phone or a date, or a value rounded up beyond the largest
    double) it is ``canonical`` instead.
    """
    if not 1 <= digits <= 17:
        raise ValueError(f"digits must be 1 to 17 (17 write every double exactly), got {digits}")
    text = format(_finite(value), f".{digits}g")
    if math.isinf(float(text)):
        return canonical(value)
    is_long = len(text.lstrip("-")) > _MAX_INTEGER_DIGITS and text.lstrip("-").isdigit()
    return canonical(float(text)) if is_long or is_name(text) else text


def _finite(value: float) -> float:
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite; only finite numbers can be written")
    return value


# ---------------------------------------------------------------- characters

_PICTURES = (
    "\u2190-\u2211\u2213\u2214\u2216-\u2235\u2237-\u22ff"  # arrows, operators but minus, slashes
    "\u2300-\u245f\u2500-\u2775\u2794-\u2bff\u2e00-\u2e7f"  # pictures but circled digits
    "\U0001f000-\U0001f0ff\U0001f200-\U0001fbef"
)
_BREAKS = (
    r"\s\x00-\x20!\"&()*;<=>?\[\]`{|}~,"
    "¡¦¨©«¬®¯±´¶¸»¿×÷"
    "\u2014-\u2018\u201a-\u2023\u2026\u2038-\u203b\u2045-\u205e"  # dashes, quotes, bullets
    + _PICTURES
    + CJK
)
_GLUE = f"[^{_BREAKS}]"
_MONEY = "$¢-¥฿\u20a0-\u20cf￠￡￥￦"
_LETTER = r"[^\W\d_²³]"  # still holds ½ and the like: see _is_unit
_SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_DATE_MARKS = "年月日号號点點时時番"


# ---------------------------------------------------------------- the parts of a number

_TIMES = r"(?:[×xX*·⋅]|\\times)"
_GROUPS = "|".join(f"(?:{sep}[0-9]{{3}})+" for sep in "," + SPACES)
_BODY = rf"(?:(?:[1-9][0-9]{{0,2}}(?:{_GROUPS})|0|[1-9][0-9]*)(?:\.[0-9]+)?|\.[0-9]+)"
_POWER = (
    rf" ?{_TIMES} ?10(?:\^{SIGN}?[0-9]{{1,3}}|\^\{{{SIGN}?[0-9]{{1,3}}\}}"
    "|[⁺⁻]?[⁰¹²³⁴-⁹]{1,3})"
)
_NUMBER = rf"{_BODY}(?:[eE]{SIGN}?[0-9]{{1,3}}|{_POWER})?"
_CURRENCY = rf"(?:[A-Z]{{0,3}}\\?[{_MONEY}])"

_POWER_OF_TEN = re.compile(rf"[eE]| ?{_TIMES} ?10")
_TO_ASCII = str.maketrans("\u2212" + _SUPERSCRIPT, "-0123456789+-", "," + SPACES + "^{}")
_MAX_INTEGER_DIGITS = 15
_MAX_DOUBLE_DIGITS = 17


def _value(number: str) -> float | None:
    """The double nearest to a number of the grammar; None if it has too many digits or none."""
    if len(number) <= _MAX_INTEGER_DIGITS and number.isdigit():
        return float(number)
    mantissa, *exponent = _POWER_OF_TEN.split(number.translate(_TO_ASCII), maxsplit=1)
    digits = mantissa.lstrip("+-").replace(".", "")
    is_integer = not exponent and "." not in mantissa
    significant = digits.lstrip("0")
    if len(significant or digits) > (_MAX_INTEGER_DIGITS if is_integer else _MAX_DOUBLE_DIGITS):
        return None
    value = float("e".join((mantissa, *exponent)))
    is_lost = math.isinf(value) or (value == 0.0 and significant != "")
    return None if is_lost else value


# ---------------------------------------------------------------- words

_DIGIT = f"[0-9{HIDDEN}]"
_CHAIN = (
    rf"{_GLUE}*(?:(?:(?<=[0-9{HIDDEN}.:/^]),+(?=[-+\u2212.:/^0-9{HIDDEN}])"
    rf"|(?<={_DIGIT})[{SPACES}](?={_DIGIT})){_GLUE}+)*"
)
_ANY_WORD = (
    rf"{_CHAIN}(?: ?{_TIMES} ?10(?:\^\{{?|(?=[{_SUPERSCRIPT}])|{SIGN}(?=[0-9]))"
    rf"{_CHAIN}(?:\}}{_CHAIN})?)*"
)
_WORD = re.compile(f"([^{_BREAKS}0-9{HIDDEN}]*{_DIGIT}{_ANY_WORD})|{_GLUE}+")
_BEFORE_WORD = ":'’\ufe0f"
_AFTER_WORD = ".,:'’/\\+-\u2010\u2011\u2012\u2013\u2212"
_LEFT, _RIGHT = 8, 16  # so many characters before and after a word can change its reading
_MAX_CACHED = 48  # characters; longer words are read anew


def _find_numbers(text: str) -> list[Found]:
    found: list[Found] = []
    shadow = hide_names(text)
    for match in _WORD.finditer(shadow):
        if (word := match[1]) and HIDDEN not in word:
            start, end = match.span()
            before = shadow[max(start - _LEFT, 0) : start]
            read = _read_word if end - start <= _MAX_CACHED else _read_word.__wrapped__
            for first, last, value in read(before, word, shadow[end : end + _RIGHT]):
                found.append((start + first, start + last, value))
    return found


@lru_cache(maxsize=4096)
def _read_word(before: str, word: str, after: str) -> tuple[Found, ...]:
    """The numbers of a word between its neighbouring characters, or none; the word begins at 0."""
    body = word.lstrip(_BEFORE_WORD)
    begin = len(word) - len(body)
    body = body.rstrip(_AFTER_WORD)
    after = word[begin + len(body) :] + after
    if _is_refused(before, word[:begin], body, after) or _is_date(body, after):
        return ()
    if _is_end_of_range(before, body, after):
        begin, body = begin + 1, body[1:]
    is_quantity = _is_quantity(before, after)
    for read in (_read_single, _read_range, _read_items, _read_sum):
        if numbers := read(body, begin, is_quantity):
            return tuple(numbers)
    return ()


# ---------------------------------------------------------------- kinds of words

_SINGLE = re.compile(
    rf"(?!\+[0-9]{{8,}}\Z|[12][0-9]{{2}}0s\Z|localhost:[0-9]+\Z)"
    rf"(?:[^\W\d]+:)?(?:\+?{_CURRENCY})?({SIGN}?{_NUMBER})([^0-9,.]*)"
)
_NO_DASH = r"[^-\u2010-\u2013\u22120-9,.]*"
_RANGE = re.compile(
    rf"{_CURRENCY}?({SIGN}?{_NUMBER})({_NO_DASH})({DASH}){_CURRENCY}?({SIGN}?{_NUMBER})({_NO_DASH})"
)
_NO_RANGE = re.compile(
    rf"[0-9]{{3}}{DASH}[0-9]{{4,}}|[0-9]{{1,4}}{DASH}[0-9]{{7,}}|[0-9]{{5}}{DASH}[0-9]{{4}}"
    rf"|[0-9]{{4}}{DASH}[0-9]{{1,2}}|[0-9]{{1,2}}{DASH}(?:19|20)[0-9]{{2}}"
)
_PLUS = re.compile(r"(?<![eE])\+")
_TERM = re.compile(rf"{_CURRENCY}?({_NUMBER})([^0-9,.]*)")
_ITEM = re.compile(rf"{SIGN}?{_NUMBER}")
_GROUPED_PAIR = re.compile(r"(?<![0-9.])[1-9][0-9]{0,2},[0-9]{3}(?![0-9])")
_DECIMAL_COMMA = re.compile(
    rf"{SIGN}?(?:[0-9{SPACES}]+|[1-9][0-9]{{0,2}}(?:\.[0-9]{{3}})+),[0-9][^.,]*"
)


def _read_single(word: str, begin: int, is_quantity: bool) -> list[Found]:
    match = _SINGLE.fullmatch(word)
    if match is None or not _is_unit(match[2]):
        return []
    has_currency = match.start(1) > 0 and word[match.start(1) - 1] != ":"
    if not (is_quantity or has_currency or match[2]) and is_name(match[1]):
        return []
    value = _value(match[1])
    return [] if value is None else [(begin + match.start(1), begin + match.end(1), value)]


def _read_range(word: str, begin: int, is_quantity: bool) -> list[Found]:
    match = _RANGE.fullmatch(word)
    if match is None or _NO_RANGE.fullmatch(word.lstrip("+-\u2212")):
        return []
    left, left_unit, dash, right, right_unit = match.groups()
    if dash != "\u2013" and (left[0] in _SIGNS or right[0] in _SIGNS):
        return []  # -3-5
    if not is_quantity and (is_name(left) or is_name(right)):
        return []
    if left_unit not in ("", right_unit) or not _is_unit(right_unit):
        return []
    low, high = _value(left), _value(right)
    if low is None or high is None:
        return []
    return [
        (begin + match.start(1), begin + match.end(1), low),
        (begin + match.start(4), begin + match.end(4), high),
    ]


def _read_items(word: str, begin: int, is_quantity: bool) -> list[Found]:
    items = word.split(",")
    if len(items) < 2 or _GROUPED_PAIR.search(word) or _DECIMAL_COMMA.fullmatch(word):
        return []
    if not all(map(_ITEM.fullmatch, items)) or (not is_quantity and any(map(is_name, items))):
        return []
    found = []
    for item in items:
        if (value := _value(item)) is None:
            return []
        found.append((begin, begin + len(item), value))
        begin += len(item) + 1
    return found


def _read_sum(word: str, begin: int, _: bool) -> list[Found]:
    terms = _PLUS.split(word)
    found = []
    for term in terms if len(terms) > 1 else ():
        match = _TERM.fullmatch(term)
        if match is None or not _is_unit(match[2]):
            return []
        value = _value(match[1])
        if value is None:
            return []
        found.append((begin + match.start(1), begin + match.end(1), value))
        begin += len(term) + 1
    return found


# ---------------------------------------------------------------- units

_UNIT = re.compile(
    rf"\\?[%‰‱°℃℉′″{_MONEY}]*(?:({_LETTER}+)[²³]?)?(?:/{_LETTER}+[²³]?)?((?:-{_LETTER}{{2,}})*)"
)
_RELEASE = re.compile("-(?:alpha|beta|rc|dev|pre|post|snapshot|stable|release|final|nightly|lts)")
_UNIT_LETTERS = frozenset("bcdghjklmpstvwxyBKLMNTVWXµμΩÅ")
_NO_UNIT_NAME = re.compile(
    "st|nd|rd|th|er|re|ère|[eè]me|nde|ˢᵗ|ⁿᵈ|ʳᵈ|ᵗʰ|[ap]m|(?!(?-i:dBA?)\\Z)[a-f]{2,}", re.IGNORECASE
)
_UNIT_NAME = re.compile(  # in whatever case; a lower-case word needs no mention
    "[pnµmckMGT]?(?:i?b|bps|hz|w|wh|v|a|ah|j|ev|n|pa|ω|g|m|l|s|t|mol|bq|sv|gy|cal)|d[bl]|dba|dbm|hpa|mmhg"
    "|lbs?|oz|ft|mi|yd|mph|kph|rpm|fps|pp[mb]|px|dpi|mp|[mb]n"
    "|usd|eur|gbp|jpy|cny|rmb|cad|aud|inr|chf|hkd|krw|btc|eth",
    re.IGNORECASE,
)


def _is_unit(unit: str) -> bool:
    """Whether a number followed directly by this is still a number."""
    if unit in ("", "%", "°"):
        return True
    if unit.isalpha():
        return _is_unit_name(unit)
    match = _UNIT.fullmatch(unit)
    if match is None or match[2] != match[2].lower() or _RELEASE.match(match[2]):
        return False
    if any(c.isnumeric() and c not in "²³" for c in unit):
        return False
    return match[1] is None or unit.startswith("°") or _is_unit_name(match[1])


def _is_unit_name(name: str) -> bool:
    if len(name) == 1:
        return name in _UNIT_LETTERS or (not name.isascii() and name not in "ºª")
    if _NO_UNIT_NAME.fullmatch(name):
        return False
    return name == name.lower() or _UNIT_NAME.fullmatch(name.replace("μ", "µ")) is not None


# ---------------------------------------------------------------- neighbours of a word

_SIGNS = frozenset("+-\u2212")
_CLOSING = frozenset(")]}»›”」』】》〉〕")
_BEFORE_NEGATIVE = frozenset(
    "为為是到至约約于於在达達比得有和与與或は温溫率幅额額值速润潤降跌涨漲升增减減了差亏虧损損低高"
)
_MEASURED = re.compile(f"(?:{MEASURE})+")
_UNIT_BEFORE = re.compile(f"[0-9]([{CJK}]{{1,4}})$")
_NEGATIVE_MEASURE = re.compile(
    "(?:[到至~] ?[-\u2212]?[0-9]{1,4}(?:\\.[0-9]{1,2})?)?"
    "(?:[度元米亿億万萬倍千百]|[个個]?百?分|[个個]点|摄氏|攝氏|[美日欧港]元)"
    "|[到至~] ?[-\u2212]?[0-9]{1,4}(?:\\.[0-9]{1,2})?[%‰°℃℉]"
)
_REFUSING = re.compile(r"第 ?\Z|(?<![0-9])[0-9]{1,2}[点點时時]\Z|[\^_]\{\Z")
_SHORT_YEAR = re.compile("[0-9]{2}(?:s|(?!['’0-9A-Za-z]))")
_DATE = re.compile("月|日(?![元圆圓円间間])|[号號点點番]|[时時](?![间間])")
_YEAR = re.compile("(?<![0-9])(?:(?:1[0-9]|2[01])[0-9]{2}年|[0-9]{2}年 ?[0-9]{1,2}月)")
_QUANTITY_AFTER = re.compile(rf" ?\)?(?: ?[=*×÷+] ?|/)[-0-9(.$]|{MEASURE}|{MEASURE_WORD}")
_QUANTITY_BEFORE = re.compile(
    rf"(?:[0-9)] ?[=*×÷+]|(?<![A-Z])(?:USD|EUR|GBP|JPY|CNY|RMB|INR|CHF|KRW)|[{_MONEY}]) ?$"
)


def _is_refused(before: str, lead: str, body: str, after: str) -> bool:
    """Whether the characters before a word keep it text; `lead` are its quotes and its colon."""
    if ":" in lead and (lead.count(":") > 1 or before[-1:] == "]" or not before[-1:].strip()):
        return True  # :: and [::1]:80 of addresses, :3 of chats
    if lead.endswith(("'", "’")) and _SHORT_YEAR.match(body + after):
        return True
    if not lead and body[0] in _SIGNS and not _is_sign(before, body, after):
        return True
    return _REFUSING.search(before) is not None


def _is_sign(before: str, body: str, after: str) -> bool:
    """Whether the sign at the start of a word belongs to its number."""
    last = before[-1:]
    if last in _CLOSING:
        return False
    if body[0] != "-" or not last.isalpha():
        return True
    if _is_end_of_range(before, body, after):
        return True
    unit = _UNIT_BEFORE.search(before)
    if unit and _MEASURED.fullmatch(unit[1]):
        return False  # 5元-10
    if last in "号號码碼型版":
        return False
    is_measured = "." in body or body[-1] in "%‰°℃℉C" or _NEGATIVE_MEASURE.match(after)
    return last in _BEFORE_NEGATIVE or bool(is_measured)


def _is_end_of_range(before: str, body: str, after: str) -> bool:
    """Whether a word begins with the dash of a range whose unit is a CJK word: 5元-10元."""
    match = _UNIT_BEFORE.search(before) if body[0] == "-" else None
    if match is None or not after.startswith(match[1]):
        return False
    return _MEASURED.fullmatch(match[1]) is not None or match[1][-1] not in _BEFORE_NEGATIVE


def _is_date(body: str, after: str) -> bool:
    """Whether the word is an integer that a CJK letter after it makes a date or a time."""
    if not after or after[0] not in _DATE_MARKS or "." in body:
        return False
    years = (_YEAR.match(body + after, max(0, len(body) - length)) for length in (4, 2))
    return _DATE.match(after) is not None or any(years)


def _is_quantity(before: str, after: str) -> bool:
    """Whether a measure or an operator beside a word makes it a number whatever its shape."""
    return bool(_QUANTITY_AFTER.match(after) or _QUANTITY_BEFORE.search(before))
