"""Explanation: a prediction -> what each column, and each group of words, adds to it.

    regressor.explain(table[:3]).table       # row, part, column, value, median

Contributions are Shapley values: what a part adds to the prediction when it takes the place of the
baseline's, averaged over orders in which the parts may be added. The baseline is a typical training
row (`sources.typical_row`): medians of numbers, the most frequent categories, no words. The parts
are the columns, and of a text column its words in groups. Per order the contributions add up to
prediction - baseline, so their averages do. Where the median is a sum of functions of single parts
all orders agree; elsewhere orders are drawn at random, each with its reverse, whose errors partly
cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations as all_orders
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Array = NDArray[np.float64]
Part = tuple[str, str | None]  # a column, or a text column and some of its words

MOST_GROUPS = 12  # of the words of one text


class Explanation(NamedTuple):
    """`table` has the contributions of every row (columns row, part, column, value, median), the
    largest first; `rows` has what they add up to: baseline and prediction."""

    table: Any
    rows: Any


def explain_rows(
    frame: Any,
    base: dict[str, Any],
    texts: Sequence[str],
    predict: Callable[[Any], Array],
    permutations: int,
    seed: int,
) -> Explanation:
    """Explain every row of `frame`; `texts` are its text columns, `predict` gives medians."""
    plans, mixed = [], []
    for place, row in enumerate(frame.astype(object).to_dict("records")):
        parts = [part for name in base for part in _parts(row[name], name, texts)]
        orders = _orders(len(parts), permutations, np.random.default_rng(seed + place))
        plans.append((row, parts, orders))
        steps = (order[:count] for order in orders for count in range(len(parts) + 1))
        mixed += [_mixed(base, row, [parts[place] for place in sorted(step)]) for step in steps]
    given = pd.DataFrame(mixed, columns=list(base), dtype=object)
    found = np.asarray(predict(given), dtype=np.float64)
    tables, totals, at = [], [], 0
    for label, (row, parts, orders) in zip(frame.index, plans, strict=True):
        values = found[at : at + len(orders) * (len(parts) + 1)].reshape(len(orders), -1)
        at += values.size
        added = np.zeros(len(parts))
        for order, gained in zip(orders, np.diff(values, axis=1), strict=True):
            added[order] += gained / len(orders)
        columns = {
            "row": [label] * len(parts),
            "part": [name if words is None else f"{name}: {words}" for name, words in parts],
            "column": [name for name, _ in parts],
            "value": [words or row[name] for name, words in parts],
            "median": added,
        }
        table = pd.DataFrame(columns)
        tables.append(table.sort_values("median", key=abs, ascending=False, kind="stable"))
        totals.append(values[0, [0, -1]])
    rows = pd.DataFrame(totals, columns=["baseline", "prediction"], index=frame.index)
    return Explanation(pd.concat(tables, ignore_index=True), rows)


def _parts(cell: Any, name: str, texts: Sequence[str]) -> list[Part]:
    if name not in texts:
        return [(name, None)]
    words = cell.split() if isinstance(cell, str) else []
    groups = np.array_split(np.array(words, dtype=object), min(MOST_GROUPS, len(words)) or 1)
    return [(name, " ".join(group)) for group in groups if len(group)]


def _mixed(base: dict[str, Any], row: dict[str, Any], parts: Sequence[Part]) -> dict[str, Any]:
    """The baseline with some parts of the row."""
    cells: dict[str, Any] = {}
    for name, words in parts:
        if words is None:
            cells[name] = row[name]
        else:
            cells[name] = f"{cells[name]} {words}" if name in cells else words
    return base | cells


def _orders(count: int, permutations: int, generator: np.random.Generator) -> list[list[int]]:
    """All orders if they are so few, else random ones and their reverses."""
    if math.factorial(count) <= permutations:
        return [list(order) for order in all_orders(range(count))]
    drawn = [generator.permutation(count).tolist() for _ in range(permutations // 2)]
    return [*drawn, *(order[::-1] for order in drawn)]
