"""Sentences: the rows of a DataFrame -> one sentence each.

    carat  cut    depth_pct               carat is 0.23, cut is Ideal, depth pct is unknown.
    0.23   Ideal  NaN             ->      The price is

A template such as "A {carat} carat diamond, cut {cut}" sets the wording; without one the sentence
lists the columns' names, values and units ("weight (kg)" or "weight [kg]" has its own unit). A
missing value is "unknown". Columns of free text come first, verbatim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any

from causal_qwen.tables.frames import require_columns
from causal_qwen.text.numerals import render
from causal_qwen.training.data import PLACE

UNKNOWN = "unknown"
DIGITS, WHOLE = 10, 1e15  # whole numbers are written out up to here
UNIT = re.compile(r"^(.*\S)\s*[(\[]([^()\[\]]+)[)\]]$")
SENTENCE_END = re.compile(r"[.!?:;。！？]$")


def to_sentences(
    table: Any,
    columns: Sequence[Any],
    *,
    template: str | None = None,
    text: Sequence[Any] = (),
    units: Mapping[Any, str] | None = None,
    question: str = "",
) -> list[str]:
    """A sentence for every row of a DataFrame, from `columns`, followed by `question`."""
    require_columns(table, [*columns, *text])
    used = [*text, *(column for column in columns if column not in text)]
    cells = [
        [
            "" if gone else _to_text(cell, name in text)
            for cell, gone in zip(some, nans, strict=True)
        ]
        for name, some, nans in ((n, table[n].tolist(), table[n].isna()) for n in used)
    ]
    names = {column: _name_and_unit(column, units or {}) for column in used}
    found = []
    for values in zip(*cells, strict=True):
        row = dict(zip(used, values, strict=True))
        if template is not None:
            made = PLACE.sub(lambda place, row=row: row[place[1]] or UNKNOWN, template)  # type: ignore[misc]
        else:
            parts = [
                f"{name} is {f'{row[column]} {unit}'.strip() if row[column] else UNKNOWN}"
                for column, (name, unit) in names.items()
                if column not in text
            ]
            free_text = " ".join(row[column] for column in text if row[column])
            made = join_sentences(free_text, ", ".join(parts))
        found.append(join_sentences(made, question))
    return found


def template_columns(template: str, targets: Sequence[Any]) -> list[str]:
    """The columns that a template names, each once; `targets` are refused."""
    columns = list(dict.fromkeys(PLACE.findall(template)))
    if not columns:
        raise ValueError(f"template={template!r} has no column; write {{price}} for one.")
    if known := [name for name in columns if name in targets]:
        raise ValueError(f"the template contains the target {known[0]!r}; leave it out.")
    return columns


def ask_for(names: Sequence[str]) -> str:
    """The words that the targets' numbers would follow."""
    words = [_words(name) for name in names]
    if len(words) == 1:
        return f"The {words[0]} is"
    return f"The {', '.join(words[:-1])} and {words[-1]} are"


def join_sentences(first: str, second: str) -> str:
    if not first or not second:
        return first or second
    return f"{first} {second}" if SENTENCE_END.search(first) else f"{first}. {second}"


def _to_text(value: Any, is_text: bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.isfinite(value):
        is_whole = value.is_integer() and abs(value) < WHOLE
        return str(int(value)) if is_whole else render(value, DIGITS)
    if isinstance(value, datetime) and value.time() == datetime.min.time():
        value = value.date()
    if isinstance(value, date):
        return value.isoformat()
    words = " ".join(str(value).split())
    return words if is_text else words.replace("_", " ")


def _name_and_unit(column: Any, units: Mapping[Any, str]) -> tuple[str, str]:
    found = UNIT.match(str(column))
    name, unit = found.groups() if found and column not in units else (str(column), "")
    return _words(name), units.get(column, unit)


def _words(name: Any) -> str:
    return " ".join(str(name).replace("_", " ").split())
