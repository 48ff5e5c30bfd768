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

*Number of digits.* A bare integer may have 15; longer ones are card numbers and keys. With a point
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
  "-" is a sign only behind a word like 为 or 是 (长征-5 is a rocket).
* A *range* has one dash; a unit on its left must be repeated on its right. Not ranges: what looks
  like a phone (555-1234), a month (2024-11, 11-2024), short years (2024-25) or a ZIP+4.
* A *list* stays text if a neighbouring pair could be one number (1,234,56), or if a list of two
  could be one number with a decimal comma (1,5 and 1.299,00; but 1.5,2.5 splits).

Everything else stays text: 10:30, 1/2, 1.2.3, 1-2-3, 10^6, A1B2, a@b7.org, #5, 1'000, 1_000, 5²,
5½ and any digit next to another script's. The context can keep a word text as well:

* integers separated by single plain spaces, if one has a leading zero or one after the first
  has three digits (1 000 000; 4111 1111 1111 1111), or from three on after a "+" (+33 6 12 34);
* a URL or query string, a phone number with brackets, 7 digits after tel/call/电话, "+" and 8
  digits, ISBN, version, No.;
* a month's name beside a day or a year, am/pm/o'clock, 月日号点时 after an integer and 年 after a
  year (3年 is a duration), 第 before it;
* a mixed fraction (1 1/2, 3 ½), a decade (1990s, '90s), an emoticon (:3), a LaTeX index (x_{2}).

The scan is linear: every pattern below is bounded, or starts only where a maximal run starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["PLACEHOLDER", "Encoded", "canonical", "decode", "encode", "render"]

PLACEHOLDER = "<NUM>"

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

    def __post_init__(self) -> None:
        count = len(self.values)
        if len(self.surfaces) != count or len(self.pieces) != count + 1:
            raise ValueError(
                f"{count} values need {count} surfaces and {count + 1} pieces of text, "
                f"got {len(self.surfaces)} and {len(self.pieces)}"
            )
        if not all(map(math.isfinite, self.values)):
            row = next(i for i, value in enumerate(self.values) if not math.isfinite(value))
            raise ValueError(
                f"values[{row}] is {self.values[row]}; only finite numbers can be written"
            )

    @property
    def text(self) -> str:
        r"""The text with ``<NUM>`` for every number, for display.

        A typed ``<NUM>`` is shown as ``<\NUM>`` (and ``<\NUM>`` as ``<\\NUM>``), so the
        placeholders can be counted: there are exactly as many as values.
        """
        return PLACEHOLDER.join(_TYPED_PLACEHOLDER.sub(r"<\\\1NUM>", p) for p in self.pieces)

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


_TYPED_PLACEHOLDER = re.compile(r"<(\\*)NUM>")


def encode(text: str) -> Encoded:
    """Cut a text at its numbers (grammar in the module's docstring)."""
    if not isinstance(text, str):
        raise TypeError(f"encode takes one str, got {type(text).__name__}")
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
    15 digits, or a value rounded up beyond the largest double) it is ``canonical`` instead.
    """
    if not 1 <= digits <= 17:
        raise ValueError(f"digits must be 1 to 17 (17 write every double exactly), got {digits}")
    text = format(_finite(value), f".{digits}g")
    if math.isinf(float(text)):
        return canonical(value)
    is_long = len(text.lstrip("-")) > _MAX_INTEGER_DIGITS and text.lstrip("-").isdigit()
    return canonical(float(text)) if is_long else text


def _finite(value: float) -> float:
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite; only finite numbers can be written")
    return value


# ---------------------------------------------------------------- characters

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
CJK = "\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff5f-\uffdf\U00020000-\U0003ffff"
_BREAKS = (
    r"\s\x00-\x20!\"&()*;<=>?\[\]`{|}~,"
    "¡¦¨©«¬®¯±´¶¸»¿×÷"
    "\u2014-\u2018\u201a-\u2023\u2026\u2038-\u203b\u2045-\u205e"  # dashes, quotes, bullets
    "\u2190-\u2211\u2213\u2214\u2216-\u2235\u2237-\u22ff"  # arrows, operators but minus and slashes
    "\u2300-\u245f\u2500-\u2775\u2794-\u2bff\u2e00-\u2e7f"  # pictures but circled digits
    "\U0001f000-\U0001f0ff\U0001f200-\U0001fbef" + CJK
)
_GLUE = f"[^{_BREAKS}]"
_SPACES = "\u00a0\u2009\u202f"  # thousands separators
_SIGN = "[-+\u2212]"
_DASH = "[-\u2010-\u2013\u2212]"
_MONEY = "$¢-¥฿\u20a0-\u20cf￠￡￥￦"
_LETTER = r"[^\W\d_²³]"  # still holds ½ and the like: see _is_unit
_SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_HIDDEN = "\ue000"  # replaces a digit that is not part of a number
_DATE_MARKS = "年月日号號点點时時番년월일시번"


# ---------------------------------------------------------------- the parts of a number

_TIMES = r"(?:[×xX*·⋅]|\\times)"
_GROUPS = "|".join(f"(?:{sep}[0-9]{{3}})+" for sep in "," + _SPACES)
_BODY = rf"(?:(?:[1-9][0-9]{{0,2}}(?:{_GROUPS})|0|[1-9][0-9]*)(?:\.[0-9]+)?|\.[0-9]+)"
_POWER = (
    rf" ?{_TIMES} ?10(?:\^{_SIGN}?[0-9]{{1,3}}|\^\{{{_SIGN}?[0-9]{{1,3}}\}}"
    "|[⁺⁻]?[⁰¹²³⁴-⁹]{1,3})"
)
_NUMBER = rf"{_BODY}(?:[eE]{_SIGN}?[0-9]{{1,3}}|{_POWER})?"
_CURRENCY = rf"(?:[A-Z]{{0,3}}\\?[{_MONEY}])"

_POWER_OF_TEN = re.compile(rf"[eE]| ?{_TIMES} ?10")
_TO_ASCII = str.maketrans("\u2212" + _SUPERSCRIPT, "-0123456789+-", "," + _SPACES + "^{}")
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

_DIGIT = f"[0-9{_HIDDEN}]"
_ANY_WORD = (
    rf"{_GLUE}*(?:(?:(?<=[0-9{_HIDDEN}.:/^]),+(?=[-+\u2212.:/^0-9{_HIDDEN}])"
    rf"|(?<={_DIGIT})[{_SPACES}](?={_DIGIT})){_GLUE}+)*"
    rf"(?: ?{_TIMES} ?10(?:\^\{{?|(?=[{_SUPERSCRIPT}])|{_SIGN}(?=[0-9])){_GLUE}*(?:\}}{_GLUE}*)?)*"
)
# Fast path: a short plain number whose surroundings cannot change its reading.
_PLAIN_WORD = (
    rf"(?<![^\x00-z|}}~{CJK}])(?<![第제点點时時시])(?<![第제] )"
    r"[$]?((?:(?<![^\s(=])-)?(?:0|[1-9][0-9]{0,8})(?:\.[0-9]{1,8})?(?:e[-+]?[0-9]{1,2})?)"
    rf"(?=[.,:]?(?:[\x00-\x20!\"&()*;<=>?\[\]`{{|}}~]|(?![{_DATE_MARKS}])[{CJK}]|\Z))"
    rf"(?! ?{_TIMES})"
)
_WORD = re.compile(f"{_PLAIN_WORD}|([^{_BREAKS}0-9{_HIDDEN}]*{_DIGIT}{_ANY_WORD})|{_GLUE}+")
_BEFORE_WORD = ":'’\ufe0f"
_AFTER_WORD = ".,:'’/\\+-\u2010\u2011\u2012\u2013\u2212"


def _find_numbers(text: str) -> list[Found]:
    found: list[Found] = []
    shadow = _hide_names(text)
    for match in _WORD.finditer(shadow):
        if plain := match[1]:
            end = match.end()
            found.append((end - len(plain), end, float(plain)))
        elif (word := match[2]) and _HIDDEN not in word:
            found += _read_word(shadow, *match.span())
    return found


def _read_word(shadow: str, start: int, end: int) -> list[Found]:
    """The numbers of the word at [start, end), or none."""
    word = shadow[start:end].lstrip(_BEFORE_WORD)
    begin = end - len(word)
    word = word.rstrip(_AFTER_WORD)
    close = begin + len(word)
    if _is_refused(shadow, start, begin) or _is_date(shadow, begin, close):
        return []
    for read in (_read_single, _read_range, _read_items, _read_sum):
        if numbers := read(word, begin):
            return numbers
    return []


# ---------------------------------------------------------------- kinds of words

_SINGLE = re.compile(
    r"(?!\+[0-9]{8,}\Z|[12][0-9]{2}0s\Z|localhost:)"
    rf"(?:[^\W\d]+:)?(?:\+?{_CURRENCY})?({_SIGN}?{_NUMBER})([^0-9,.]*)"
)
_NO_DASH = r"[^-\u2010-\u2013\u22120-9,.]*"
_RANGE = re.compile(
    rf"{_CURRENCY}?({_NUMBER})({_NO_DASH}){_DASH}{_CURRENCY}?({_NUMBER})({_NO_DASH})"
)
_NO_RANGE = re.compile(
    rf"[0-9]{{3}}{_DASH}[0-9]{{4,}}|[0-9]{{1,4}}{_DASH}[0-9]{{7,}}|[0-9]{{5}}{_DASH}[0-9]{{4}}"
    rf"|[0-9]{{4}}{_DASH}[0-9]{{1,2}}|[0-9]{{1,2}}{_DASH}(?:19|20)[0-9]{{2}}"
)
_PLUS = re.compile(r"(?<![eE])\+")
_TERM = re.compile(rf"{_CURRENCY}?({_NUMBER})([^0-9,.]*)")
_ITEM = re.compile(rf"{_SIGN}?{_NUMBER}")
_PLAIN_ITEMS = re.compile("(?:(?:0|[1-9][0-9]{0,8}),)+(?:0|[1-9][0-9]{0,8})")
_GROUPED_PAIR = re.compile(r"(?<![0-9.])[1-9][0-9]{0,2},[0-9]{3}(?![0-9])")
_DECIMAL_COMMA = re.compile(
    rf"{_SIGN}?(?:[0-9{_SPACES}]+|[1-9][0-9]{{0,2}}(?:\.[0-9]{{3}})+),[0-9][^.,]*"
)


def _read_single(word: str, begin: int) -> list[Found]:
    match = _SINGLE.fullmatch(word)
    if match is None or not _is_unit(match[2]):
        return []
    value = _value(match[1])
    return [] if value is None else [(begin + match.start(1), begin + match.end(1), value)]


def _read_range(word: str, begin: int) -> list[Found]:
    match = _RANGE.fullmatch(word)
    if match is None or _NO_RANGE.fullmatch(word):
        return []
    left, left_unit, right, right_unit = match.groups()
    if left_unit not in ("", right_unit) or not _is_unit(right_unit):
        return []
    low, high = _value(left), _value(right)
    if low is None or high is None:
        return []
    return [
        (begin + match.start(1), begin + match.end(1), low),
        (begin + match.start(3), begin + match.end(3), high),
    ]


def _read_items(word: str, begin: int) -> list[Found]:
    items = word.split(",")
    if len(items) < 2 or _GROUPED_PAIR.search(word) or _DECIMAL_COMMA.fullmatch(word):
        return []
    if _PLAIN_ITEMS.fullmatch(word):  # fast path for long lists
        values: Iterable[float | None] = map(float, items)
    elif all(map(_ITEM.fullmatch, items)):
        values = map(_value, items)
    else:
        return []
    found = []
    for item, value in zip(items, values, strict=True):
        if value is None:
            return []
        end = begin + len(item)
        found.append((begin, end, value))
        begin = end + 1
    return found


def _read_sum(word: str, begin: int) -> list[Found]:
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
_UNIT_LETTERS = frozenset("bcdghjklmpstvwxyBKLMNTVWXµμΩÅ")
_NO_UNIT_NAME = re.compile(
    "st|nd|rd|th|er|re|ère|[eè]me|nde|ˢᵗ|ⁿᵈ|ʳᵈ|ᵗʰ|[ap]m|[a-f]{2,}", re.IGNORECASE
)
_UNIT_NAME = re.compile(  # in whatever case; a lower-case word needs no mention
    "[pnµmckMGT]?(?:i?b|bps|hz|w|wh|v|a|ah|j|ev|n|pa|ω|g|m|l|s|t|mol|bq|sv|gy|cal)|d[bl]|dbm|hpa"
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
    if match is None or match[2] != match[2].lower():
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
_COPULAS = frozenset("为為是到至约約于於在达達比得有和与與或は")
_REFUSING = re.compile(r"(?<=[第제])|(?<=[第제] )|(?<=[0-9][点點时時시])|(?<=[\^_]\{)")
_SHORT_YEAR = re.compile("[0-9]{2}(?:s|(?!['’0-9A-Za-z]))")
_DATE = re.compile("月|日(?![元圆圓円间間])|[号號点點番]|[时時](?![间間])|월|일|시(?!간)|번")
_YEAR = re.compile("(?<![0-9])(?:[0-9]{4}[年년]|[0-9]{2}[年년] ?[0-9]{1,2}[月월])")


def _is_refused(shadow: str, start: int, begin: int) -> bool:
    """Whether the characters before the word at `begin` keep it text.

    shadow[start:begin] are the quotes and the colon in front of it.
    """
    before = shadow[start - 1 : start] if start else ""
    lead = shadow[start:begin]
    if ":" in lead and (lead.count(":") > 1 or not before.strip()):
        return True  # :: of addresses, :3 of chats
    if lead.endswith(("'", "’")) and _SHORT_YEAR.match(shadow, begin):
        return True
    if not lead and shadow[begin] in _SIGNS and not _sign_can_follow(before, shadow[begin]):
        return True
    return _REFUSING.match(shadow, start) is not None


def _sign_can_follow(before: str, sign: str) -> bool:
    if before in _CLOSING:
        return False
    return sign != "-" or not before.isalpha() or before in _COPULAS


def _is_date(shadow: str, begin: int, close: int) -> bool:
    """Whether the word is an integer that a CJK letter after it makes a date or a time."""
    if shadow[close : close + 1] not in _DATE_MARKS or close == len(shadow):
        return False
    if "." in shadow[begin:close]:
        return False
    years = (_YEAR.match(shadow, max(begin, close - length)) for length in (4, 2))
    return _DATE.match(shadow, close) is not None or any(years)


# ---------------------------------------------------------------- wider context

_MONTH = (
    "(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    "|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_YEAR_NUMBER = r"[0-9]{4}(?!\.?[0-9])"
_DAY = "[0-9]{1,2}"
_HOUR = r"[0-9]{1,2}(?:\.[0-9]{2})?"
# The patterns of a row are tried only on texts that match its first expression.
_CONTEXTS = tuple(
    (re.compile(needle), re.compile("|".join(patterns)))
    for needle, *patterns in (
        (
            r"://|www\.|=",
            rf"(?:://|www\.|[?&][A-Za-z_][\w.-]{{0,40}}=)[^\s\"<>{CJK}]*",
        ),
        (
            r"\(",
            r"\+[0-9]{1,3}[ .-]?\([0-9]{1,5}\)(?:[ .-]?[0-9]{1,15})*",
            r"(?:1[ .-]?)?\([0-9]{2,5}\)[ .-]?[0-9]{3,4}[ .-]?[0-9]{3,5}(?![0-9])",
        ),
        (
            "[A-DF-Za-df-z电電手热전]",
            r"(?i:\b(?:tel|phone|fax|mobile|call))\.?:? ?\+?[0-9]{7}",
            r"(?:电话|電話|手机|手機|热线|전화)(?:号码|號碼|番号|번호)?[是为:]? ?\+?[0-9]{7}",
            r"(?i:\b(?:ISBN|ISSN)(?:-1[03])?|\bver(?:sion|\.)?):? ?[0-9]",
            r"\b[Nn]os?\. ?[0-9]",
            rf"\b{_MONTH}\.? {_DAY}(?:{_DASH}{_DAY})?(?!\.?[0-9])(?:,? {_YEAR_NUMBER})?",
            rf"\b{_MONTH}\.?,? {_YEAR_NUMBER}",
            rf"(?<![0-9.,]){_DAY} (?:of )?{_MONTH}\b(?:,? {_YEAR_NUMBER})?",
            rf"(?<![0-9.,]){_HOUR}[ \u00a0\u202f]?(?i:[ap]m\b|[ap]\.m\b|o['’]clock)",
        ),
        (
            "[/⁄¼-¾⅐-⅞]",
            r"(?<![0-9])[0-9]{1,15} (?:[¼-¾⅐-⅞]|[0-9]{1,15}[/⁄][0-9])",
        ),
    )
)
_SPACED = re.compile(rf"(?<![0-9])[0-9]+(?:[ {_SPACES}][0-9]+)+")
_GAP = re.compile(f"[ {_SPACES}]")
_NO_INTEGER = re.compile(rf"(?<=[.^A-Za-z_])|(?<=[0-9]:)|(?<=[eE]{_SIGN})")  # ends 1.5, 1e5, 10:30
_NO_SPACED_LIST = re.compile("[0-9] (?:0[0-9]|[0-9]{3})|(?<![0-9])0[0-9]+ ")
_MIXED_WIDTHS = re.compile("[0-9][,.，．]?[０-９]|[０-９][,.，．]?[0-9]|[0-9]，[0-9]{3}(?![0-9])")
_HIDE = dict.fromkeys(range(ord("0"), ord("9") + 1), _HIDDEN)


def _hide_names(text: str) -> str:
    """The text in ASCII forms, with the digits of dates and names hidden; same length."""
    spans = []
    shadow = text
    if not text.isascii():
        spans += [match.span() for match in _MIXED_WIDTHS.finditer(text)]
        shadow = text.translate(_FULL_WIDTH)
    spans += _spaced_groups(shadow)
    for needle, pattern in _CONTEXTS:
        if needle.search(shadow):
            spans += [match.span() for match in pattern.finditer(shadow)]
    parts = []
    done = 0
    for start, end in sorted(spans):
        parts.append(shadow[done:start])
        parts.append(shadow[max(done, start) : end].translate(_HIDE))
        done = max(done, end)
    return "".join((*parts, shadow[done:]))


def _spaced_groups(shadow: str) -> Iterator[tuple[int, int]]:
    """Chains of integers and plain spaces that could be one number, a card or a phone."""
    for chain in _SPACED.finditer(shadow):
        start, end = chain.span()
        if _NO_INTEGER.match(shadow, start):
            gap = _GAP.search(shadow, start)
            start = gap.end() if gap else end
        is_phone = shadow.startswith("+", start - 1) and shadow.count(" ", start, end) > 1
        if is_phone or _NO_SPACED_LIST.search(shadow, start, end):
            yield start, end
