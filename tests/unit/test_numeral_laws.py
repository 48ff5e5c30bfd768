"""The recogniser's laws: what makes digits a number and what makes them a name, case by case.

A line of `numeral_laws.jsonl` names its law (the grammar is in `causal_qwen.text.numerals` and
`.names`), a text, and the characters of its numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

from causal_qwen.text.numerals import decode, encode

LAWS = Path(__file__).parents[1] / "data" / "numeral_laws.jsonl"
CASES = [json.loads(line) for line in LAWS.read_text(encoding="utf-8").splitlines()]


def test_laws_decide_which_digits_are_numbers() -> None:
    for case in CASES:
        encoded = encode(case["text"])
        assert list(encoded.surfaces) == case["numbers"], f"{case['law']}: {case['text']}"
        assert decode(encoded) == case["text"], f"{case['law']}: {case['text']}"
