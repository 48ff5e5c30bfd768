"""Explanation: a prediction -> what each column, and each group of words, adds to it.

    regressor.explain(table[:3]).table       # row, part, value, median, width

Contributions are Shapley values: what a part adds to the prediction when it takes the place of the
baseline's, averaged over orders in which the parts may be added. The baseline is a typical training
row (`sources.typical_row`): medians of numbers, the most frequent categories, no words. The parts
are the columns, and of a text column its words in groups. Per order the contributions add up to
prediction - baseline, so their averages do, whatever the number of orders. Where the median is a
sum of functions of single parts all orders agree, and a few are exact; elsewhere orders are drawn
at random, each with its reverse, whose errors partly cancel.

Contributions to the width are those to the length of the 90% interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from itertools import permutations as all_orders
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from causal_qwen.regression.prediction import new_axes
from causal_qwen.tables.frames import require_pandas

Array = NDArray[np.float64]
Predict = Callable[[Any], tuple[Array, Array]]  # rows of a DataFrame -> medians, widths

MOST_GROUPS = 12  # of the words of one text
SHOWN = 6  # parts in a repr
SHOWN_LETTERS = 30  # of a value


class Part(NamedTuple):
    """A column, or words of a text column."""

    column: str
    words: str | None = None

    @property
    def name(self) -> str:
        return self.column if self.words is None else f"{self.column}: {self.words}"


@dataclass(frozen=True, repr=False)
class Explanation:
    """`table` has the contributions of every row (columns row, part, value, median, width), the
    largest first; `rows` has what they add up to (baseline, prediction, and both widths)."""

    target: str
    table: Any
    rows: Any

    def plot(self, row: Any = None, *, of: str = "median", ax: Any = None) -> Any:
        """Draw the contributions to one row (the first) as horizontal bars; matplotlib's axes."""
        if of not in ("median", "width"):
            raise ValueError(f"of={of!r} is unknown; draw 'median' or 'width'.")
        row = self.rows.index[0] if row is None else row
        found = self.table[self.table["row"] == row].sort_values(of, key=abs)
        if not len(found):
            raise ValueError(f"row {row!r} is not explained; there are {list(self.rows.index)}.")
        ax = new_axes((7, 1 + 0.32 * len(found))) if ax is None else ax
        labels = [
            part if part != column else f"{column} = {_shown(value)}"
            for part, column, value in zip(
                found["part"], found["column"], found["value"], strict=True
            )
        ]
        ax.barh(range(len(found)), found[of], color=np.where(found[of] > 0, "C0", "C3"))
        ax.set_yticks(range(len(found)), labels)
        ax.axvline(0, color="black", linewidth=0.8)
        total = self.rows.loc[row]
        names = ("baseline", "prediction") if of == "median" else ("baseline_width", "width")
        ends = " to ".join(f"{total[name]:.4g}" for name in names)
        ax.set_title(f"{self.target}: {of} from {ends}")
        return ax

    def __repr__(self) -> str:
        lines = []
        for row, total in self.rows.iterrows():
            found = self.table[self.table["row"] == row]
            listed = [
                f"{part} {value:+.4g}"
                for part, value in zip(found["part"][:SHOWN], found["median"][:SHOWN], strict=True)
            ]
            if len(found) > SHOWN:
                listed.append(f"{len(found) - SHOWN} more {found['median'][SHOWN:].sum():+.4g}")
            lines.append(
                f"row {row}: {self.target} {total['prediction']:.4g} = {total['baseline']:.4g} "
                f"(baseline), {', '.join(listed)}"
            )
        return "\n".join(lines)


def explain_rows(
    frame: Any,
    baseline: Any,
    texts: Sequence[str],
    predict: Predict,
    target: str,
    permutations: int,
    seed: int,
) -> Explanation:
    """Explain every row of `frame`; `texts` are its text columns."""
    pandas = require_pandas()
    if permutations < 2 or permutations % 2:
        raise ValueError(f"permutations={permutations} must be an even number of at least 2.")
    (base,) = baseline.to_dict("records")
    plans = []
    for place, row in enumerate(frame.astype(object).to_dict("records")):
        parts = [part for name in base for part in _parts(row[name], name, texts)]
        orders = _orders(len(parts), permutations, np.random.default_rng(seed + place))
        plans.append(_Plan(row, parts, orders))
    mixed = [plan.mixed(base, subset) for plan in plans for subset in plan.subsets]
    given = pandas.DataFrame(mixed, columns=list(base), dtype=object)
    found = iter(np.stack(predict(given), -1).astype(np.float64))  # (2,): median and width
    tables, totals = [], []
    for label, plan in zip(frame.index, plans, strict=True):
        values = {subset: next(found) for subset in plan.subsets}
        added = plan.contributions(values)
        table = pandas.DataFrame(
            {
                "row": [label] * len(plan.parts),
                "part": [part.name for part in plan.parts],
                "column": [part.column for part in plan.parts],
                "value": [part.words or plan.row[part.column] for part in plan.parts],
                "median": added[:, 0],
                "width": added[:, 1],
            }
        )
        tables.append(table.sort_values("median", key=abs, ascending=False, kind="stable"))
        first, last = values[0], values[2 ** len(plan.parts) - 1]
        totals.append((first[0], last[0], first[1], last[1]))
    names = ["baseline", "prediction", "baseline_width", "width"]
    return Explanation(
        target,
        pandas.concat(tables, ignore_index=True),
        pandas.DataFrame(totals, columns=names, index=frame.index),
    )


@dataclass(frozen=True)
class _Plan:
    """The parts of a row and the orders in which they are added; sets of parts are bits."""

    row: dict[str, Any]
    parts: list[Part]
    orders: list[list[int]]

    @property
    def subsets(self) -> list[int]:
        return sorted({subset for order in self.orders for subset in _prefixes(order)})

    def mixed(self, baseline: dict[str, Any], subset: int) -> dict[str, Any]:
        """The baseline with the parts of `subset` from the row."""
        cells: dict[str, Any] = {}
        for part in (part for place, part in enumerate(self.parts) if subset >> place & 1):
            if part.words is None:
                cells[part.column] = self.row[part.column]
            else:
                cells[part.column] = " ".join(filter(None, (cells.get(part.column), part.words)))
        return baseline | cells

    def contributions(self, values: dict[int, Array]) -> Array:
        """What every part adds on average; `values` of the subsets. -> (parts, 2)"""
        added = np.zeros((len(self.parts), 2))
        for order in self.orders:
            for part, (before, after) in zip(order, pairwise(_prefixes(order)), strict=True):
                added[part] += (values[after] - values[before]) / len(self.orders)
        return added


def _parts(cell: Any, name: str, texts: Sequence[str]) -> list[Part]:
    if name not in texts:
        return [Part(name)]
    words = cell.split() if isinstance(cell, str) else []
    if not words:
        return []
    groups = np.array_split(np.array(words, dtype=object), min(MOST_GROUPS, len(words)))
    return [Part(name, " ".join(group)) for group in groups]


def _orders(count: int, permutations: int, generator: np.random.Generator) -> list[list[int]]:
    """All orders if they are so few, else random ones and their reverses."""
    if math.factorial(count) <= permutations:
        return [list(order) for order in all_orders(range(count))]
    drawn = [generator.permutation(count).tolist() for _ in range(permutations // 2)]
    return [*drawn, *(order[::-1] for order in drawn)]


def _prefixes(order: Sequence[int]) -> list[int]:
    """The sets of parts that are present after 0, 1, ... steps, as bits of a number."""
    found = [0]
    for part in order:
        found.append(found[-1] | 1 << part)
    return found


def _shown(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= SHOWN_LETTERS else f"{text[: SHOWN_LETTERS - 1]}…"
