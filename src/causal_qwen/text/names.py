r"""Names: the digits of a text that are dates, phones and identifiers, not numbers.

`hide_names` replaces those digits, so that `numerals` never reads them. A law decides, by the
shape of the digits or by the word beside them; where no law can decide, the digits stay text.

A *bare integer* has no sign, point, exponent, separator, currency or unit. It is a name if it is

    date      19700101 to 20991231 as YYYYMMDD, DDMMYYYY or MMDDYYYY (a day of the calendar);
              YYYYMMDD followed by hhmm or hhmmss
    phone     10 or 11 digits, unless round (three final zeros); 1[3-9] and 9 digits (a Chinese
              mobile phone, also after 86) even if round
    book      978 or 979 and 10 digits
    card      34 or 37 and 13 digits

A measure makes it a number: ``13812345678元``, ``5558675309 bytes``, ``USD 13812345678``.

A *label* makes the number after it a name: ``QQ：123``, ``arXiv:2301.12345``, ``ZIP 90210``,
``Op. 125``, ``"id": 7``, ``订单号123``. Between them may be a point, one of ``: = #``, a quote, the
word "number", and single spaces. The labels are listed below: `_LABELS`, `_NOUNS` and `_PLACES`;
`_TITLES` only capitalised (Room 5), `_ABBREVIATIONS` only with their point, `_LONG_LABELS` and
`_PHONES` only before five digits (order 12345), `_CJK_LABEL` not before a measure (密码6位). A
number sign (№ 5, n° 5, § 5) does the same. A plural label has a list: pages 3, 5 and 7.

A *date* has the English name of a month beside a day (1 to 31) or a year (1000 to 2199), but not
``May 15%`` or ``May 10 million``.

A *point before thousands* (1.500: one to three digits, a point, three digits) beside € or the name
of a currency that is written so is not a decimal point: ``1.500 €``, ``EUR 1.500``. Such digits
stay text.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Iterator

# ---------------------------------------------------------------- characters

CJK = "\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff5f-\uffdf\U00020000-\U0003ffff"
SPACES = "\u00a0\u2009\u202f"  # thousands separators
SIGN = "[-+\u2212]"
DASH = "[-\u2010-\u2013\u2212]"
HIDDEN = "\ue000"  # replaces a digit that is not part of a number
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_HIDE = dict.fromkeys(range(ord("0"), ord("9") + 1), HIDDEN)


# ---------------------------------------------------------------- bare integers

_DATE_SHAPE = re.compile(
    "(?P<year>19[0-9]{2}|20[0-9]{2})(?P<month>[0-9]{2})(?P<day>[0-9]{2})"
    "(?:(?:[01][0-9]|2[0-3])[0-5][0-9](?:[0-5][0-9])?)?"
)
_PHONE_SHAPE = re.compile("(?:86)?1[3-9][0-9]{9}|(?![0-9]*000$)[0-9]{10,11}")
_BOOK_OR_CARD = re.compile("97[89][0-9]{10}|3[47][0-9]{13}")


def is_name(digits: str) -> bool:
    """Whether a bare integer is a date, a phone, a book or a card by its shape alone."""
    if len(digits) < 8:
        return False
    if _PHONE_SHAPE.fullmatch(digits) or _BOOK_OR_CARD.fullmatch(digits):
        return True
    spellings = [digits]
    if len(digits) == 8:
        spellings += [digits[4:] + digits[2:4] + digits[:2], digits[4:] + digits[:4]]
    return any(map(_is_calendar_day, spellings))


def _is_calendar_day(digits: str) -> bool:
    match = _DATE_SHAPE.fullmatch(digits)
    if match is None or not 1 <= int(match["month"]) <= 12:
        return False
    return 1 <= int(match["day"]) <= monthrange(int(match["year"]), int(match["month"]))[1]


# ---------------------------------------------------------------- measures

MEASURE = (  # directly after a number
    "[美英欧歐港日韩韓][元镑鎊圆圓]|[元圆圓円块塊万萬亿億千百人个個件吨噸升米克斤户戶股桶度次倍]"
    "|公[里斤]|字[节節]?|平方|立方"
)
MEASURE_WORD = (
    " (?:bytes?|bits?|people|persons|inhabitants|users|views|dollars?|euros?|pounds?|yuan|yen|won"
    "|rupees?|[kcm]?m|k?g|tons?|tonnes?|years?|days?|hours?|seconds?|[mn]s|USD|EUR|GBP|JPY|CNY|RMB"
    "|INR|CHF|KRW|parameters?|tokens?|[KMGT]?B)\\b"
)
_SHARE = r" ?%| per ?cent\b| [mb]illion| thousand| hundred"
_COUNTER = f"{MEASURE}|[位部条條张張种種行格名家本台辆輛套项項年天周秒]"


# ---------------------------------------------------------------- labels


def _words(words: str) -> frozenset[str]:
    return frozenset(words.split())


_LABELS = _words(
    "qq vx wx wechat weixin whatsapp id ids uid gid pid uuid guid isbn issn doi pmid pmcid "
    "pmc arxiv orcid oclc lccn asin sku skus upc ean gtin imei imsi iccid ip ips iban bic "
    "ssn sn pnr cve cwe rfc rfcs iso iec ieee astm bwv hwv kv opus ngc zip zipcode postcode "
    "otp errno serial version versions ver pin vin ein pep"
)
_NOUNS = _words("code codes port ports No Nos Nr Op Bus Tram Code Codes Port Ports CODE PORT")
_PLACES = _words("chapter chapters section sections figure page pages pp paragraph")
_TITLES = _words(
    "Room Rooms Flight Flights Route Routes Highway Interstate Apt Apartment Suite "
    "Gate Table Tables Equation Equations Figures Appendix Article Articles Platform Runway "
    "Boeing Airbus Windows iPhone iPad iOS Android MacOS macOS Ubuntu Debian Fedora Xbox "
    "PlayStation Python Java PHP Ruby Perl CUDA RTX GTX GeForce Radeon Ryzen Pentium HTTP "
    "Apollo Soyuz Psalm Psalms"
)
_ABBREVIATIONS = _words(
    "no nos nr nrs num op fig figs eq eqs vol vols ch chap sec sect art arts p pp apt rm ext "
    "tab cf cap k"
)
_LONG_LABELS = _words(
    "order orders invoice ticket tickets account acct card case part tracking reference ref "
    "passport licence license permit patent student employee member user customer client item "
    "model bug issue commit build parcel shipment booking policy claim"
)
_PHONES = _words("tel telephone phone mobile cell fax call dial hotline sms contact")
_SEPARATOR = "[\"'”’]?[ \t]?[:=#]?[ \t]?[\"'“‘]?"
_LABEL = re.compile(
    rf"(?<![^\W_{CJK}])([^\W\d_{CJK}]{{1,16}})([.]?)( (?:[Nn]umber|[Nn]r|[Nn]o)s?[.]?)?"
    rf"({_SEPARATOR})(?<![^\W\d_])[+]?([0-9]+)((?:[ .-][0-9]{{2,}}){{0,6}})"
    r"((?:(?:,? (?:and|or|to) |, ?| & )[0-9]{1,9}\b){0,20})"
)
_NUMBER_SIGNS = _words("No Nos Nr No. Nos. Nr. no. nos. nr.")
_FRACTION = re.compile("[.,][0-9]|%")
_CAMEL_ID = re.compile("[a-z]I[dD]s?$")
_CJK_LABEL = re.compile(
    r"(?:(?:(?<![0-9])[号號码碼证證]|微信|邮编|郵編|车次|車次|航班|端口|版本|拨打|撥打"
    r"|QQ群?|[Vv]X)[是为為:=]? ?[\"“]?"
    r"|(?:电话|電話|手机|手機|热线|熱線|传真|傳真|座机|座機|固话)[是为為:=]? ?\+?(?=[0-9]{5}))"
    rf"([0-9]+)(?![0-9]|{_COUNTER})"
)
_SYMBOL_LABEL = re.compile(r"(?:№№?|§§?|¶|(?<![^\W\d_])[nN][°ºª])\.? ?[0-9]+")


def _labelled(shadow: str) -> Iterator[tuple[int, int]]:
    """Spans of digits behind a label."""
    for match in _LABEL.finditer(shadow):
        label, point, number_word, separator, digits, _, _ = match.groups()
        low = label.lower()
        is_plural = low.endswith("s") or low == "pp"
        is_numbered = number_word is not None
        is_long = is_numbered or (len(digits) > 4 and not _FRACTION.match(shadow, match.end(5)))
        if (
            low in _LABELS
            or label in _TITLES
            or label in _NOUNS
            or (low in _PLACES and not (is_plural and ":" in separator))
            or (point and low in _ABBREVIATIONS)
            or _CAMEL_ID.search(label)
            or (is_numbered and number_word.strip() in _NUMBER_SIGNS)
            or (is_long and low in _LONG_LABELS)
        ):
            yield match.start(5), match.end(7 if is_plural else 5)
        elif is_long and low in _PHONES:
            yield match.start(5), match.end(6)
    if not shadow.isascii():
        yield from (match.span(1) for match in _CJK_LABEL.finditer(shadow))
        yield from (match.span() for match in _SYMBOL_LABEL.finditer(shadow))


# ---------------------------------------------------------------- dates

_MONTH = (
    "(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    "|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?"
    "|JAN(?:UARY)?|FEB(?:RUARY)?|MAR(?:CH)?|APR(?:IL)?|MAY|JUNE?|JULY?|AUG(?:UST)?"
    "|SEPT?(?:EMBER)?|OCT(?:OBER)?|NOV(?:EMBER)?|DEC(?:EMBER)?)"
)
_YEAR = r"(?:1[0-9]{3}|2[01][0-9]{2})(?![0-9]|[.,][0-9])"
_DAY = "(?:0?[1-9]|[12][0-9]|3[01])"
_NO_NUMBER = rf"(?!\.?[0-9]|,[0-9]{{3}}|{_SHARE})"  # after a day
_DATES = (
    rf"\b{_MONTH}\.? {_DAY}(?:{DASH}{_DAY})?{_NO_NUMBER}(?:,? {_YEAR})?",
    rf"\b{_MONTH}\.?,? {_YEAR}(?!{_SHARE})",
    rf"(?<![0-9.,]){_DAY}(?:{DASH}{_DAY})? (?:of )?{_MONTH}\b(?:[.,]? {_YEAR})?",
    r"(?<![0-9.,])[0-9]{1,2}(?:\.[0-9]{2})?[ \u00a0\u202f]?"
    r"(?i:[ap]m\b|[ap]\.m\b|o['’]clock)",
)

# ---------------------------------------------------------------- thousands with a point

_THOUSANDS = r"[1-9][0-9]{0,2}\.[0-9]{3}(?![0-9]|[.,][0-9])"
_BEFORE_THOUSANDS = r"(?:€|R\$|[₫₺]|\b(?:EUR|Rp\.?|[Kk]r\.?)) ?"
_AFTER_THOUSANDS = r"(?: ?(?:€|[₫₺]|EUR\b|kr\b)| (?:[Ee]uros?|pesos|reais|rupiah|lira|kron[eo]r)\b)"


# ---------------------------------------------------------------- all names of a text

_CONTEXTS = (
    re.compile(rf"(?:://|www\.|[?&][A-Za-z_][\w.-]{{0,40}}=)[^\s\"<>{CJK}]*"),
    re.compile(
        r"\+[0-9]{1,3}[ .-]?\([0-9]{1,5}\)(?:[ .-]?[0-9]{1,15})*"
        r"|(?:1[ .-]?)?\([0-9]{2,5}\)[ .-]?[0-9]{3,4}[ .-]?[0-9]{3,5}(?![0-9])"
    ),
    re.compile("|".join(_DATES)),
    re.compile(
        rf"(?:{_BEFORE_THOUSANDS}){_THOUSANDS}"
        rf"|(?<![0-9.,])(?:{_THOUSANDS}{DASH})?{_THOUSANDS}{_AFTER_THOUSANDS}"
    ),
    re.compile(r"(?<![0-9])[0-9]{1,15} (?:[¼-¾⅐-⅞]|[0-9]{1,15}[/⁄][0-9])|\b[SP]/N:? ?[0-9]"),
)
_LETTER = re.compile(r"[^\W\d_]|[№§¶]")
_SPACED = re.compile(rf"(?<![0-9])[0-9]+(?:[ {SPACES}][0-9]+)+")
_GAP = re.compile(f"[ {SPACES}]")
_NO_INTEGER = re.compile(rf"(?<=[.^A-Za-z_])|(?<=[0-9]:)|(?<=[eE]{SIGN})")  # ends 1.5, 1e5, 10:30
_NO_SPACED_LIST = re.compile("[0-9] (?:0[0-9]|[0-9]{3})|(?<![0-9])0[0-9]+ ")
_MIXED_WIDTHS = re.compile("[0-9][,.，．]?[０-９]|[０-９][,.，．]?[0-9]|[0-9]，[0-9]{3}(?![0-9])")


def hide_names(text: str) -> str:
    """The text in ASCII forms, with the digits of dates and names hidden; same length."""
    spans = []
    shadow = text
    if not text.isascii():
        spans += [match.span() for match in _MIXED_WIDTHS.finditer(text)]
        shadow = text.translate(_FULL_WIDTH)
    spans += _spaced_groups(shadow)
    if _LETTER.search(shadow):
        spans += _labelled(shadow)
    for pattern in _CONTEXTS:
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
