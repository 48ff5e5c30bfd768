"""Audit: labels -> how credible each is, beside the number that was expected, the worst first.

    regressor.suspicious()                   # the training rows, as cross-validation saw them
    regressor.suspicious(table, "price")     # other rows, judged by the fitted model

A label's score is its distance from the expected median in predicted scales, in the head's space.
Its credibility is the probability that it is right (`credibility`); where the scores are no
evidence of wrong labels every credibility is 1, and the rows are ordered by the size of the score.

A training row is judged by experts that have not seen it. A row in no test set (the first ones of
a time series) is not judged, and left out. Other rows must be rows that `fit` has not seen: a model
expects the labels that it has learned.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.regression.conformal import Target, TargetEvidence
from causal_qwen.regression.credibility import NEGLIGIBLE, find_credibility
from causal_qwen.tables.files import table_kind
from causal_qwen.tables.frames import LINE, require_pandas

Array = NDArray[np.float64]

DOUBTFUL = 0.5  # a label that is less credible looks wrong
PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;max-width:60em;margin:2em auto}}img{{max-width:100%}}
table{{border-collapse:collapse}}
td,th{{padding:0.2em 1em 0.2em 0;text-align:right;border-bottom:1px solid #ddd}}</style>
<h1>{title}</h1>{body}
"""  # also of a report


class Judged(NamedTuple):
    """The labels of one target and what was expected instead; (N,) each."""

    label: Array
    expected: Array
    low: Array
    high: Array
    credibility: Array
    score: Array


def judge_rows(target: Target, labels: Array, y_dist: Cauchy) -> Judged:
    """Rows that training has not seen, beside the scores of the calibration rows: a few rows alone
    would be no evidence of anything."""
    scores = (target.encode(labels) - y_dist.loc.numpy()) / y_dist.scale.numpy()
    known = np.empty(0) if target.conformal is None else target.conformal.scores
    is_known = np.isfinite(scores)  # rows without a label are not judged, and not listed
    both = np.concatenate([known, scores[is_known]])
    least = NEGLIGIBLE / float(y_dist.scale.median()) if len(scores) else 0.0
    credibility = np.full(len(scores), np.nan)
    found = find_credibility(both, np.ones(len(both)), least)
    credibility[is_known] = found.probability[len(known) :]
    return _judged(target, labels, y_dist, credibility, scores)


def judge_training(target: Target, evidence: TargetEvidence) -> Judged:
    """Training rows, as cross-validation saw them."""
    loc = target.encode(evidence.values) - evidence.scores * evidence.scales
    y_dist = Cauchy(torch.from_numpy(loc), torch.from_numpy(evidence.scales))
    return _judged(target, evidence.values, y_dist, evidence.credibility, evidence.scores)


def _judged(
    target: Target, labels: Array, y_dist: Cauchy, credibility: Array, scores: Array
) -> Judged:
    low, high = target.interval(y_dist).T
    return Judged(labels, target.decode(y_dist.loc), low, high, credibility, scores)


def suspicion_table(judged: Mapping[str, Judged], index: Any) -> Any:
    """A DataFrame by the index of the rows, the least credible label first: the row's name,
    `label`, `expected`, its interval `low` to `high`, `credibility` and `score`; with several
    targets also `target`."""
    pandas = require_pandas()
    name = LINE if getattr(index, "name", None) == LINE else "row"
    parts = []
    for target, found in judged.items():
        rows = np.asarray(index)
        part = pandas.DataFrame({name: rows, **found._asdict()}, index=rows)
        if len(judged) > 1:
            part.insert(0, "target", target)
        parts.append(part[np.isfinite(found.score)])
    table = pandas.concat(parts)
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


def write_suspicions(table: Any, place: Path, name: Path, title: str) -> None:
    """Write the table to `place`, as the extension of `name` says: .html, .parquet or .csv."""
    kind = suspicion_kind(name)
    if kind == "html":
        rows = table.to_html(index=False, border=0, float_format="{:.6g}".format)
        body = f"<p>{summary(table)}</p>{rows}"
        place.write_text(PAGE.format(title=html.escape(title), body=body), encoding="utf-8")
    elif kind == "parquet":
        table.to_parquet(place, index=False)
    else:
        table.to_csv(place, index=False)


def suspicion_kind(name: Path) -> str:
    """ "html", "parquet" or "csv"; other kinds of files are refused."""
    kind = "html" if name.suffix.lower() in (".html", ".htm") else table_kind(name)
    if kind not in ("html", "parquet", "csv"):
        raise ValueError(f"{name}: an audit is written as .csv, .html or .parquet; name one.")
    return kind
