"""Audit: labels -> how credible each is, beside the number that was expected, the worst first.

    regressor.suspicious()                   # the training rows, as cross-validation saw them
    regressor.suspicious(table, "price")     # other rows, judged by the fitted model

A label's score is its distance from the expected median in predicted scales, in the head's space.
Its credibility is the probability that it is right (`credibility`); where the scores are no
evidence of wrong labels every credibility is 1, and the rows are ordered by the size of the score.

A training row is judged by experts that have not seen it; a row in no test set (the first ones of
a time series) is left out. Other rows must be rows that `fit` has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.regression.conformal import Target, TargetEvidence
from causal_qwen.regression.credibility import NEGLIGIBLE, find_credibility
from causal_qwen.tables.frames import LINE

Array = NDArray[np.float64]
Judged = dict[str, Array]  # column of the table -> (N,)

DOUBTFUL = 0.5  # a label that is less credible looks wrong


def judge_rows(target: Target, labels: Array, y_dist: Cauchy) -> Judged:
    """Rows that training has not seen, beside the scores of the calibration rows: a few rows alone
    would be no evidence of anything."""
    scores = target.scores(labels, y_dist)
    known = target.conformal.scores
    is_known = np.isfinite(scores)  # rows without a label are not judged, and not listed
    both = np.concatenate([known, scores[is_known]])
    least = NEGLIGIBLE / float(y_dist.scale.median()) if len(scores) else 0.0
    credibility = np.full(len(scores), np.nan)
    found = find_credibility(both, np.ones(len(both)), least)
    credibility[is_known] = found.probability[len(known) :]
    return _judged(target, labels, y_dist, credibility, scores)


def judge_training(target: Target, evidence: TargetEvidence) -> Judged:
    """Training rows, as cross-validation saw them."""
    encoded = target.space.encode(torch.from_numpy(evidence.values))
    scale = torch.from_numpy(evidence.scales)
    y_dist = Cauchy(encoded - torch.from_numpy(evidence.scores) * scale, scale)
    return _judged(target, evidence.values, y_dist, evidence.credibility, evidence.scores)


def _judged(
    target: Target, labels: Array, y_dist: Cauchy, credibility: Array, score: Array
) -> Judged:
    low, high = target.interval(y_dist).T
    found = {"label": labels, "expected": target.decode(y_dist.loc), "low": low, "high": high}
    return {**found, "credibility": credibility, "score": score}


def suspicion_table(judged: Mapping[str, Judged], index: Any) -> Any:
    """A DataFrame by the index of the rows, the least credible label first: the row's name,
    `label`, `expected`, its interval `low` to `high`, `credibility` and `score`; with several
    targets also `target`."""
    name = LINE if getattr(index, "name", None) == LINE else "row"
    parts = []
    for target, found in judged.items():
        rows = np.asarray(index)
        of_target = {"target": target} if len(judged) > 1 else {}
        part = pd.DataFrame({**of_target, name: rows, **found}, index=rows)
        parts.append(part[np.isfinite(part["score"])])
    table = pd.concat(parts)
    order = np.lexsort((-table["score"].abs().to_numpy(), table["credibility"].to_numpy()))
    return table.iloc[order]


def doubtful(table: Any) -> int:
    """How many labels of a suspicion table look wrong."""
    return int((table["credibility"] < DOUBTFUL).sum())


def summary(table: Any) -> str:
    count = doubtful(table)
    if not count:
        return f"None of {len(table)} labels looks wrong; the most surprising ones come first."
    return f"{count} of {len(table)} labels look wrong (credibility below {DOUBTFUL:g})."
