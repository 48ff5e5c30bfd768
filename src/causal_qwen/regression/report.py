"""Report: pictures of a fitted regressor, as PNG files and one HTML page.

    causal-qwen report priced rings.csv     ->  priced-report/index.html

    calibration    share of labels inside intervals of every level, conformal and the Cauchy's own
    residuals      label - median, over the median
    contributions  mean size of what every column adds (`explanation`)

Give rows that `fit` has not seen.
"""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.regression.audit import PAGE
from causal_qwen.regression.conformal import Conformal
from causal_qwen.regression.prediction import new_axes
from causal_qwen.regression.regressor import CausalTextRegressor

Array = NDArray[np.float64]

LEVELS = np.linspace(0.05, 0.95, 19)
EXPLAINED_ROWS = 20  # their contributions are averaged


def write_regressor_report(
    regressor: CausalTextRegressor, output: Path, title: str, X: Any, y: Any
) -> Path:
    """Draw the pictures of every target; returns the page."""
    output.mkdir(parents=True, exist_ok=True)
    judged = regressor.suspicious(X, y)
    body = ""
    for place, (name, target) in enumerate(regressor.targets_.items()):
        found = judged[judged["target"] == name] if "target" in judged else judged
        errors = (found["label"] - found["expected"]).abs()
        figures = {
            "calibration": _calibration(found["score"].to_numpy(), target.conformal),
            "residuals": _residuals(name, found["label"], found["expected"]),
        }
        if regressor.source_ is not None:
            figures["contributions"] = _contributions(regressor, name, X[:EXPLAINED_ROWS])
        facts = f"median error {errors.median():.6g}, mean error {errors.mean():.6g}"
        body += f"<h2>{html.escape(name)}</h2><p>{len(found)} rows: {facts}</p>"
        for kind, figure in figures.items():
            path = output / f"{place}-{kind}.png"
            figure.savefig(path, dpi=120)
            data = base64.b64encode(path.read_bytes()).decode()
            body += f'<img alt="{kind}" src="data:image/png;base64,{data}">'
    page = output / "index.html"
    page.write_text(PAGE.format(title=html.escape(title), body=body), encoding="utf-8")
    return page


def coverage(scores: Array, conformal: Conformal | None, levels: Array = LEVELS) -> Array:
    """The share of scores inside the interval of every level; the Cauchy's without `conformal`.
    NaN for a level that so few calibration rows do not reach."""
    found = []
    for level in map(float, levels):
        reach = 1 / np.tan(np.pi * (1 - level) / 2)
        if conformal is not None:
            reach = conformal.radius(level) if conformal.reaches_level(level) else np.nan
        found.append(np.nan if np.isnan(reach) else float((np.abs(scores) <= reach).mean()))
    return np.array(found)


def _calibration(scores: Array, conformal: Conformal | None) -> Any:
    axes = new_axes((5.5, 4.5))
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1, label="perfect")
    axes.plot(LEVELS, coverage(scores, None), marker=".", label="Cauchy's own")
    if conformal is not None:
        axes.plot(LEVELS, coverage(scores, conformal), marker=".", label="calibrated")
    axes.set(title="coverage", xlabel="level", ylabel="share inside", ylim=(0, 1.02))
    axes.legend()
    return axes.figure


def _residuals(name: str, labels: Any, medians: Any) -> Any:
    axes = new_axes((7, 4))
    axes.axhline(0, color="grey", linewidth=1)
    axes.scatter(medians, labels - medians, s=10, alpha=0.6)
    axes.set(title="residuals", xlabel=f"{name}, median", ylabel="label - median")
    return axes.figure


def _contributions(regressor: CausalTextRegressor, name: str, X: Any) -> Any:
    """The mean size of contributions by column; words count for their column."""
    table = regressor.explain(X, target=name).table
    by_column = table.groupby(["row", "column"])["median"].sum().abs().groupby("column").mean()
    by_column = by_column.sort_values()
    axes = new_axes((7, 1 + 0.32 * len(by_column)))
    axes.barh([str(column) for column in by_column.index], by_column.to_numpy())
    axes.set(title=f"contributions to {name}: mean size in {len(X)} rows", xlabel=name)
    return axes.figure
