"""Report: pictures of a fitted regressor, as PNG files and one HTML page.

    causal-qwen report priced rings.csv     ->  priced-report/index.html

    calibration    share of labels inside intervals of every level, conformal and the Cauchy's own
    residuals      label - median, over the median
    contributions  mean size of what every column adds (`explanation`)

Give rows that `fit` has not seen. Without rows, the calibration is that of the regressor's own
calibration scores (from cross-validation or held-out rows), half of which judge the intervals of
the other half; residuals are those of cross-validation while the regressor is in memory.
"""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.paths import install_hint
from causal_qwen.regression.conformal import Conformal, Target
from causal_qwen.regression.regressor import CausalTextRegressor

Array = NDArray[np.float64]

LEVELS = np.linspace(0.05, 0.95, 19)
EXPLAINED_ROWS = 20  # their contributions are averaged
PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;max-width:60em;margin:2em auto}}img{{max-width:100%}}
td,th{{padding:0 1em 0 0;text-align:right}}</style>
<h1>{title}</h1>{body}
"""


@dataclass(frozen=True)
class Rows:
    """Labels and predictions of one target; scores in predicted scales."""

    labels: Array
    medians: Array
    scores: Array
    origin: str  # of the rows, in words


def write_regressor_report(
    regressor: CausalTextRegressor, output: Path, title: str, X: Any = None, y: Any = None
) -> Path:
    """Draw the pictures of every target; returns the page."""
    output.mkdir(parents=True, exist_ok=True)
    body = ""
    for place, name in enumerate(regressor.targets_):
        target, rows = regressor.targets_[name], _rows(regressor, name, X, y)
        figures = {"calibration": _calibration(target, rows)}
        if rows is not None:
            figures["residuals"] = _residuals(name, rows)
        if X is not None and regressor.baseline_ is not None:
            figures["contributions"] = _contributions(regressor, name, X)
        body += f"<h2>{html.escape(name)}</h2>{_table(target, rows)}"
        for kind, figure in figures.items():
            if figure is not None:
                path = output / f"{place}-{kind}.png"
                figure.savefig(path, dpi=120)
                data = base64.b64encode(path.read_bytes()).decode()
                body += f'<img alt="{kind}" src="data:image/png;base64,{data}">'
        if X is None:
            body += "<p>Contributions need rows: causal-qwen report FITTED DATA.</p>"
    page = output / "index.html"
    page.write_text(PAGE.format(title=html.escape(title), body=body), encoding="utf-8")
    return page


def coverage(scores: Array, conformal: Conformal | None, levels: Array = LEVELS) -> Array:
    """The share of scores inside the interval of every level; the Cauchy's without `conformal`.
    NaN for a level that so few calibration rows do not reach."""
    sizes = np.abs(scores)
    found = []
    for level in levels:
        if conformal is None:
            reach = 1 / np.tan(np.pi * (1 - level) / 2)
        else:
            is_reached = conformal.reaches_level(float(level))
            reach = conformal.radius(float(level)) if is_reached else np.nan
        found.append(np.nan if np.isnan(reach) else float((sizes <= reach).mean()))
    return np.array(found)


def _rows(regressor: CausalTextRegressor, name: str, X: Any, y: Any) -> Rows | None:
    """The given rows, else those of cross-validation, if they are known."""
    if X is not None:
        found = regressor.suspicious(X, y)
        if "target" in found:
            found = found[found["target"] == name]
        labels, medians, scores = found[["label", "expected", "score"]].to_numpy().T
        return Rows(labels, medians, scores, "the given rows")
    evidence = getattr(regressor, "evidence_", {}).get(name)
    if evidence is None:
        return None
    tested = np.isfinite(evidence.scores)
    labels, medians = evidence.values[tested], evidence.unseen[tested]
    return Rows(labels, medians, evidence.scores[tested], "cross-validation")


def _own_scores(conformal: Conformal) -> list[tuple[Array, Conformal]]:
    """Each half of the calibration scores, with the calibration by the other half."""
    order = np.random.default_rng(0).permutation(len(conformal.scores))
    halves = np.sort(order[::2]), np.sort(order[1::2])
    return [
        (conformal.scores[one], Conformal(conformal.scores[other], conformal.weights[other]))
        for one, other in (halves, halves[::-1])
    ]


def _calibration(target: Target, rows: Rows | None) -> Any:
    conformal = target.conformal
    if rows is None and conformal is None:
        return None
    curves = {}
    if rows is not None and rows.origin == "the given rows":
        curves["Cauchy's own"] = coverage(rows.scores, None)
        if conformal is not None:
            curves["calibrated"] = coverage(rows.scores, conformal)
    else:
        assert conformal is not None or rows is not None
        scores = rows.scores if conformal is None else conformal.scores  # type: ignore[union-attr]
        curves["Cauchy's own"] = coverage(scores, None)
        if conformal is not None and len(conformal.scores) > 3:
            both = [coverage(half, fitted) for half, fitted in _own_scores(conformal)]
            curves["calibrated"] = np.mean(both, 0)
    figure, axes = _figure((5.5, 4.5))
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1, label="perfect")
    for name, curve in curves.items():
        axes.plot(LEVELS, curve, marker=".", label=name)
    where = "calibration rows" if rows is None else rows.origin
    axes.set(title=f"coverage, {where}", xlabel="level", ylabel="share inside", ylim=(0, 1.02))
    axes.legend()
    return figure


def _residuals(name: str, rows: Rows) -> Any:
    figure, axes = _figure((7, 4))
    axes.axhline(0, color="grey", linewidth=1)
    axes.scatter(rows.medians, rows.labels - rows.medians, s=10, alpha=0.6)
    axes.set(title=f"residuals, {rows.origin}", xlabel=f"{name}, median", ylabel="label - median")
    return figure


def _contributions(regressor: CausalTextRegressor, name: str, X: Any) -> Any:
    """The mean size of contributions by column; words count for their column."""
    table = regressor.explain(X[:EXPLAINED_ROWS], target=name).table
    by_column = table.groupby(["row", "column"])["median"].sum().abs().groupby("column").mean()
    by_column = by_column.sort_values()
    figure, axes = _figure((7, 1 + 0.32 * len(by_column)))
    axes.barh([str(column) for column in by_column.index], by_column.to_numpy())
    count = min(len(X), EXPLAINED_ROWS)
    axes.set(title=f"contributions to {name}: mean size in {count} rows", xlabel=name)
    return figure


def _table(target: Target, rows: Rows | None) -> str:
    facts: dict[str, str] = {}
    if rows is not None:
        errors = np.abs(rows.labels - rows.medians)
        facts = {
            "rows": f"{len(errors)} ({rows.origin})",
            "median error": f"{np.median(errors):.6g}",
            "mean error": f"{errors.mean():.6g}",
        }
    if target.conformal is not None:
        facts["calibration rows"] = str(len(target.conformal))
    cells = (
        f"<tr><td>{name}</td><td>{html.escape(fact)}</td></tr>" for name, fact in facts.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _figure(size: tuple[float, float]) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ImportError(
            f"Pictures need matplotlib, which is not installed: {install_hint('plot')}"
        ) from None
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()
