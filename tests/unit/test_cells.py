"""One cell: a number, an amount with its mark, a date, a text."""

from __future__ import annotations

import math
from typing import Any

import pytest

from causal_qwen.tables.cells import (
    read_amount,
    read_cell,
    read_target,
)


@pytest.mark.parametrize(
    ("cell", "value", "mark"),
    [
        ("2,725", 2725, ""),
        ("$1,200", 1200, "$"),
        ("$-5", -5, "$"),
        ("1,234.50 €", 1234.5, "€"),
        ("€ 12", 12, "€"),
        ("USD 1,200", 1200, "USD"),
        ("US$5", 5, "US$"),
        ("300元", 300, "元"),
        ("5%", 5, "%"),
        ("-0.5 %", -0.5, "%"),
        (" 12 ", 12, ""),
        ("１２", 12, ""),
        ("−5", -5, ""),
        ("1e5", 1e5, ""),
    ],
)
def test_an_amount_is_a_number_with_at_most_one_mark(cell: str, value: float, mark: str) -> None:
    assert read_amount(cell) == (value, mark)


@pytest.mark.parametrize(
    "cell",
    [
        *("1.5k", "5 kg", "(1,200)", "1,5", "about 5", "5-10", "1/2", "12:30", "-$5", "$5%", "%5"),
        *("007", "", "NA", "True", "2024-05-01", "1'000", "1 000", "1e999", "Rs. 500", "5 apples"),
    ],
)
def test_a_cell_that_must_be_guessed_is_no_amount(cell: str) -> None:
    assert read_amount(cell) is None


def test_digits_of_any_length_are_a_target() -> None:
    assert read_target("007") == (7, "")
    assert read_target("12345678901234567890") == (12345678901234567890.0, "")
    assert read_target("20241105") == (20241105, "")
    assert read_target("$2,725") == (2725, "$")
    assert read_target("1e999") is None
    assert read_target("inf") is None
    assert read_target("1_000") is None


@pytest.mark.parametrize(
    ("cell", "value"),
    [("1.10", 1.1), ("007", "007"), ("true", True), ("x ", "x "), ("9" * 16, "9" * 16), ("3", 3)],
)
def test_a_cell_is_typed_by_itself(cell: str, value: Any) -> None:
    found = read_cell(cell)
    assert found == value
    assert type(found) is type(value)
    assert all(math.isnan(read_cell(missing)) for missing in ("", " ", "NA", " n/a "))
