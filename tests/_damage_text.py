"""Strings that a recogniser of numbers can stumble on, and a check of its guarantees G1 to G4.

for text in islice(damaged_texts(seed=1), 400_000):
    assert not broken_guarantees(text), text
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from fractions import Fraction

from causal_qwen.text.numerals import canonical, decode, encode, render
from causal_qwen.text.segmentation import split_at_numbers

# ---------------------------------------------------------------- strings

SEPARATORS = [
    *",.:：/-–+=~，、。．×'\"()[]{}<>^_#*|\\%&@\n\t\u2212\u00a0\u2009\u202f\u200b\u200d",
    *(" ", " ", " ", " ", "", "", "", ", ", ". ", " x "),
]
WORDS_AND_SYMBOLS = """
    № # % ℃ $ € 元 万 亿 度 个 人 年 月 日 号 点 第 跌 k e x v E ² ½ ① ٣ १ Ⅷ 五 👍 5️⃣ 👨‍👩‍👧
    No. Op. QQ arXiv PMID ISBN Tel ZIP id pages redis May November novembre мая am pm Uhr der people
    wins kg km/h °C US$ USD 气温 下降了 长征 价格是 电话 订单号 三百 the st e- ×10^ 10⁻⁷ <NUM>
    <\\NUM> https://x.io/ www. ?a=
"""
WORDS = [*WORDS_AND_SYMBOLS.split(), "in May", "12. November", " x 10^{", "\u0301"]
EXAMPLES = (
    "13812345678 QQ：123456789 arXiv:2301.12345 redis:6379 20241105",
    "In May 1500 people came: 12 wins/8 losses, -5°C to +12°C",
    "气温-5℃，下降了-3%，5元-10元，3月5-7日，第3名，价格是99.9元",
    "$1,299.00 + 1.5e-3 mol × 6.02×10^23; 1,234,567.89",
    "call +1 (555) 867-5309 or 555-867-5309 at 10:30, 192.168.0.1",
    '{"a":1,"b":-2.5e3,"id":7} [1, 2.5, -3] 1,2,3 5.1,3.5',
    "der 12. November 2024, le 5 mai, 747-400, pp. 12-15",
)


def damaged_texts(seed: int) -> Iterator[str]:
    """An endless stream of strings, the same for the same seed."""
    rng = random.Random(seed)
    kinds = (_phrase, _phrase, _hostile_run, _damaged_example, _unicode)
    while True:
        yield rng.choice(kinds)(rng)


def _phrase(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 6)):
        parts.append(rng.choice(WORDS) if rng.random() < 0.5 else _number(rng))
        parts.append(rng.choice(SEPARATORS))
    return "".join(parts)


def _number(rng: random.Random) -> str:
    length = rng.choice((1, 1, 2, 2, 3, 4, 5, 8, 10, 11, 16, 18))
    digits = "".join(rng.choices("0123456789", k=length))
    sign = rng.choice(("", "", "", "-", "+", "\u2212"))
    spellings = (
        digits,
        sign + digits,
        f"{sign}{digits}.{rng.randint(0, 999)}",
        f"{sign}{int(digits):,}",
        f"{sign}{digits}e{rng.randint(-400, 400)}",
        f"{rng.randint(1, 9)}.{digits}×10^{rng.randint(-330, 310)}",
        digits.translate(str.maketrans("0123456789", "０１２３４５６７８９")),
        repr(rng.uniform(-1, 1) * 10.0 ** rng.randint(-300, 300)),
        f"20{rng.randint(0, 99):02}{rng.randint(0, 13):02}{rng.randint(0, 32):02}",
        f"1{rng.randint(300000000, 9999999999)}",
    )
    return rng.choice(spellings)


def _hostile_run(rng: random.Random) -> str:
    alphabet = "0123456789０１９,，.．:/^-+\u2212–eE×x*%$€ '’\u00a0\u2009ak年月日第价元²⁻½①\n"
    return "".join(rng.choices(alphabet, k=rng.randint(1, 24)))


def _damaged_example(rng: random.Random) -> str:
    text = list(rng.choice(EXAMPLES))
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(text))
        change = rng.randrange(4)
        if change == 0 and len(text) > 1:
            del text[place]
        elif change == 1:
            text.insert(place, rng.choice(SEPARATORS))
        elif change == 2:
            text[place] = rng.choice("0123456789")
        else:
            other = rng.randrange(len(text))
            text[place], text[other] = text[other], text[place]
    return "".join(text)


def _unicode(rng: random.Random) -> str:
    tops = (0x7F, 0x7F, 0xFF, 0x2FFF, 0xFFFF, 0x10FFFF)
    characters = [chr(rng.randint(0, rng.choice(tops))) for _ in range(rng.randint(0, 12))]
    for _ in range(rng.randint(0, 4)):
        characters.insert(rng.randint(0, len(characters)), _number(rng))
    return "".join(characters)


# ---------------------------------------------------------------- guarantees

RUN = re.compile(r"[0-9](?:[.,:/^]*[-+]?[0-9])*")
POWER = re.compile(r"[eE]| ?(?:[×xX*·⋅]|\\times) ?10")
ASCII = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | str.maketrans(
    "\u2212⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "-0123456789+-"
)


def broken_guarantees(text: str) -> list[str]:
    """Which of the guarantees do not hold for a text; none should."""
    encoded = encode(text)
    spans = encoded.spans
    broken = []
    if decode(encoded) != text or "".join(t for t, _, _ in split_at_numbers(text, "value")) != text:
        broken.append("G1: decode does not invert encode")
    if not len(encoded.pieces) - 1 == len(encoded.values) == len(spans):
        broken.append("G1: placeholders and values are not equally many")
    if tuple(text[start:end] for start, end in spans) != encoded.surfaces:
        broken.append("G1: spans do not locate the surfaces")
    for surface, value in zip(encoded.surfaces, encoded.values, strict=True):
        if not _is_nearest(surface, value):
            broken.append(f"G2: {surface!r} is not {value!r}")
        for written in (canonical(value), render(value, 17), render(value, 6)):
            again = encode(written)
            if again.surfaces != (written,) or not _is_same(again.values[0], float(written)):
                broken.append(f"G3: {written!r} is not read as it is written")
        if not _is_same(encode(canonical(value)).values[0], value):
            broken.append(f"G3: {canonical(value)!r} is not {value!r}")
    return broken + partial_matches(text, spans)


def partial_matches(text: str, spans: tuple[tuple[int, int], ...]) -> list[str]:
    """Numbers that are only part of a run of digits (G4)."""
    read = {place for start, end in spans for place in range(start, end)}
    broken = []
    for run in RUN.finditer(text):
        digits = [place for place in range(*run.span()) if text[place].isdigit()]
        if len(read.intersection(digits)) not in (0, len(digits)):
            broken.append(f"G4: {run[0]!r} is read in part")
    for start, end in spans:
        around = text[max(start - 1, 0) : start] + text[end : end + 1]
        if any(c.isnumeric() and not _is_han(c) for c in around):
            broken.append(f"G4: {text[start:end]!r} has a digit beside it")
    return broken


def _is_nearest(surface: str, value: float) -> bool:
    """Whether the value is the double nearest to the written number, by exact arithmetic."""
    plain = surface.translate(ASCII)
    for separator in (",", "\u00a0", "\u2009", "\u202f", "^", "{", "}"):
        plain = plain.replace(separator, "")
    mantissa, *power = POWER.split(plain, maxsplit=1)
    try:
        exact = Fraction(mantissa) * Fraction(10) ** int(power[0] if power else 0)
    except ValueError:  # not a number
        return False
    if not math.isfinite(value) or (value == 0.0) != (exact == 0):
        return False
    return value == exact.numerator / exact.denominator  # int / int rounds correctly


def _is_same(a: float, b: float) -> bool:
    return a == b and math.copysign(1.0, a) == math.copysign(1.0, b)


def _is_han(character: str) -> bool:
    return "\u2e80" <= character <= "\u9fff" or "\uf900" <= character <= "\ufaff"
