"""The table of docs/ecosystem.md, from the tests that prove its rows.

A test marked `ecosystem("what", "works")` or `ecosystem("what", "refused: the sentence")` is a row.
`python tests/_ecosystem.py` writes the table into the page; a test compares the two.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "ecosystem.md"
BEGIN, END = "<!-- table of tests/_ecosystem.py -->", "<!-- end of the table -->"


def rows() -> Iterator[tuple[str, str, str]]:
    """(what, outcome, file::test) of every marked test."""
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text("utf-8")
        if "mark.ecosystem" not in text:
            continue
        for node in ast.parse(text).body:
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("mark.ecosystem"):
                    what, outcome = (ast.literal_eval(argument) for argument in mark.args)
                    yield what, outcome, f"{file.relative_to(TESTS)}::{node.name}"


def table() -> str:
    lines = ["| what | outcome | proof, in `tests/` |", "|---|---|---|"]
    lines += [f"| {what} | {outcome} | `{test}` |" for what, outcome, test in sorted(rows())]
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the table between its two comments."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), encoding="utf-8")
