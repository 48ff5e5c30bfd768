"""Audit: labels -> how credible each is, beside the number that was expected, the worst first.

    regressor.suspicious()                   # the training rows, as cross-validation saw them

A label's score is its distance from the expected median in predicted scales, in the head's space.
Its credibility is the probability that it is right (`credibility`); where the scores are no
evidence of wrong labels every credibility is 1, and the rows are ordered by the size of the score.

A row is judged by experts that have not seen it; one in no test set (the first ones of a time
series) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.regression.conformal import Target
from causal_qwen.tables.frames import LINE

Array = NDArray[np.float64]

DOUBTFUL = 0.5  # a label that is less credible looks wrong


class Judged(NamedTuple):
    """The training rows of a target that cross-validation has tested."""

    rows: Any  # a pandas index
    labels: Array
    y_dist: Cauchy
    credibility: Array
    peers: dict[str, Array]  # medians of single methods

    def errors(self, target: Target) -> dict[str, float]:
        """The median absolute error of every method; ours is "together"."""
        middle = np.full(len(self.labels), np.median(self.labels))
        together = target.decode(self.y_dist.loc)
        every = {"training median": middle, **self.peers, "together": together}
        return {name: float(np.median(np.abs(p - self.labels))) for name, p in every.items()}


def suspicion_table(judged: Mapping[str, Judged], targets: Mapping[str, Target]) -> Any:
    """A DataFrame by the index of the rows, the least credible label first: the row's name,
    `label`, `expected`, its interval `low` to `high`, `credibility` and `score`; with several
    targets also `target`."""
    parts = []
    for name, found in judged.items():
        target = targets[name]
        low, high = target.interval(found.y_dist).T
        columns = {
            **({"target": name} if len(judged) > 1 else {}),
            LINE if found.rows.name == LINE else "row": np.asarray(found.rows),
            "label": found.labels,
            "expected": target.decode(found.y_dist.loc),
            "low": low,
            "high": high,
            "credibility": found.credibility,
            "score": target.scores(found.labels, found.y_dist),
        }
        parts.append(pd.DataFrame(columns, index=np.asarray(found.rows)))
    table = pd.concat(parts)
    order = np.lexsort((-table["score"].abs().to_numpy(), table["credibility"].to_numpy()))
    return table.iloc[order]


def doubtful(table: Any) -> int:
    """How many labels of a suspicion table look wrong."""
    return int((table["credibility"] < DOUBTFUL).sum())


def summary(table: Any) -> str:
    return f"{doubtful(table)} of {len(table)} labels look wrong (credibility below {DOUBTFUL:g})."
