"""Explanation: a prediction -> what each column, and each group of words, adds to it.

    regressor.explain(table[:3]).table       # row, part, value, median, width

Contributions are Shapley values: what a part adds to the prediction when it takes the place of the
baseline's, averaged over orders in which the parts may be added. The baseline is a typical training
row (`sources.typical_row`): medians of numbers, the most frequent categories, no words. The parts
are the columns, and of a text column its words in groups. Per order the contributions add up to
prediction - baseline, so their averages do. Where the median is a sum of functions of single parts
all orders agree; elsewhere orders are drawn at random, each with its reverse, whose errors partly
cancel. Contributions to the width are those to the length of the 90% interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations as all_orders
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Array = NDArray[np.float64]
Part = tuple[str, str | None]  # a column, or a text column and some of its words

MOST_GROUPS = 12  # of the words of one text
SHOWN = 6  # parts in a repr


@dataclass(frozen=True, repr=False)
class Explanation:
    """`table` has the contributions of every row (columns row, part, value, median, width), the
    largest first; `rows` has what they add up to (baseline, prediction, and both widths)."""

    target: str
    table: Any
    rows: Any

    def __repr__(self) -> str:
        lines = []
        for row, total in self.rows.iterrows():
            found = self.table[self.table["row"] == row]
            pairs = list(zip(found["part"], found["median"], strict=True))
            listed = [f"{part} {value:+.4g}" for part, value in pairs[:SHOWN]]
            if rest := [value for _, value in pairs[SHOWN:]]:
                listed.append(f"{len(rest)} more {sum(rest):+.4g}")
            sums = f"{total['prediction']:.4g} = {total['baseline']:.4g} (baseline)"
            lines.append(f"row {row}: {self.target} {sums}, {', '.join(listed)}")
        return "\n".join(lines)


def explain_rows(
    frame: Any,
    baseline: Any,
    texts: Sequence[str],
    predict: Callable[[Any], tuple[Array, Array]],
    target: str,
    permutations: int,
    seed: int,
) -> Explanation:
    """Explain every row of `frame`; `texts` are its text columns, `predict` gives medians and
    widths of a DataFrame's rows."""
    if permutations < 2 or permutations % 2:
        raise ValueError(f"permutations={permutations} must be an even number of at least 2.")
    (base,) = baseline.to_dict("records")
    plans, mixed = [], []
    for place, row in enumerate(frame.astype(object).to_dict("records")):
        parts = [part for name in base for part in _parts(row[name], name, texts)]
        orders = _orders(len(parts), permutations, np.random.default_rng(seed + place))
        plans.append((row, parts, orders))
        steps = (order[:count] for order in orders for count in range(len(parts) + 1))
        mixed += [_mixed(base, row, [parts[place] for place in sorted(step)]) for step in steps]
    given = pd.DataFrame(mixed, columns=list(base), dtype=object)
    found = np.stack(predict(given), -1).astype(np.float64)  # (rows, 2): median and width
    tables, totals, at = [], [], 0
    for label, (row, parts, orders) in zip(frame.index, plans, strict=True):
        values = found[at : at + len(orders) * (len(parts) + 1)].reshape(len(orders), -1, 2)
        at += values.shape[0] * values.shape[1]
        added = np.zeros((len(parts), 2))
        for order, gained in zip(orders, np.diff(values, axis=1), strict=True):
            added[order] += gained / len(orders)
        columns = {
            "row": [label] * len(parts),
            "part": [name if words is None else f"{name}: {words}" for name, words in parts],
            "column": [name for name, _ in parts],
            "value": [words or row[name] for name, words in parts],
            "median": added[:, 0],
            "width": added[:, 1],
        }
        table = pd.DataFrame(columns)
        tables.append(table.sort_values("median", key=abs, ascending=False, kind="stable"))
        totals.append(values[0, [0, -1]].T.ravel())
    names = ["baseline", "prediction", "baseline_width", "width"]
    rows = pd.DataFrame(totals, columns=names, index=frame.index)
    return Explanation(target, pd.concat(tables, ignore_index=True), rows)


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
