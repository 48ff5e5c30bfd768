"""Report: pictures of a fitted regressor, in one HTML page.

    causal-qwen report priced rings.csv     ->  priced-report/index.html

    calibration    share of labels inside intervals of every level
    residuals      label - median, over the median
    contributions  mean size of what every column adds (`explanation`)

Give rows that `fit` has not seen.
"""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.regression.conformal import Conformal
from causal_qwen.regression.regressor import CausalTextRegressor

Array = NDArray[np.float64]

PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;max-width:60em;margin:2em auto}}img{{max-width:100%}}</style>
<h1>{title}</h1>{body}
"""
LEVELS = np.linspace(0.05, 0.95, 19)
EXPLAINED_ROWS = 20  # their contributions are averaged


def write_regressor_report(
    regressor: CausalTextRegressor, output: Path, title: str, X: Any, y: Any
) -> Path:
    """Draw the pictures of every target; returns the page."""
    from matplotlib.figure import Figure

    output.mkdir(parents=True, exist_ok=True)
    judged = regressor.suspicious(X, y)
    body = ""
    for name, target in regressor.targets_.items():
        found = judged[judged["target"] == name] if "target" in judged else judged
        errors = found["label"] - found["expected"]
        figure = Figure(figsize=(16, 5), layout="constrained")
        calibration, residuals, contributions = figure.subplots(1, 3)
        calibration.plot([0, 1], [0, 1], color="grey", linewidth=1)
        share = coverage(found["score"].to_numpy(), target.conformal)
        calibration.plot(LEVELS, share, marker=".")
        calibration.set(title="calibration", xlabel="level", ylabel="share inside", ylim=(0, 1.02))
        residuals.axhline(0, color="grey", linewidth=1)
        residuals.scatter(found["expected"], errors, s=10, alpha=0.6)
        residuals.set(title="residuals", xlabel=f"{name}, median", ylabel="label - median")
        added = regressor.explain(X[:EXPLAINED_ROWS], target=name).table  # words: of their column
        added = added.groupby(["row", "column"])["median"].sum().abs().groupby("column").mean()
        added = added.sort_values()
        contributions.barh([str(column) for column in added.index], added.to_numpy())
        contributions.set(title="contributions", xlabel=f"mean contribution to {name}")
        facts = f"median error {errors.abs().median():.6g}, mean error {errors.abs().mean():.6g}"
        body += f"<h2>{html.escape(name)}</h2><p>{len(found)} rows: {facts}</p>"
        picture = io.BytesIO()
        figure.savefig(picture, dpi=120)
        data = base64.b64encode(picture.getvalue()).decode()
        body += f'<img alt="pictures of {html.escape(name)}" src="data:image/png;base64,{data}">'
    page = output / "index.html"
    page.write_text(PAGE.format(title=html.escape(title), body=body), encoding="utf-8")
    return page


def coverage(scores: Array, conformal: Conformal, levels: Array = LEVELS) -> Array:
    """The share of scores inside the interval of every level; NaN for a level that so few
    calibration rows do not reach."""
    is_known = np.array([conformal.reaches_level(level) for level in levels])
    radii = [conformal.radius(level) for level in levels[is_known]]
    share = np.full(len(levels), np.nan)
    share[is_known] = (np.abs(scores)[:, None] <= radii).mean(0)
    return share
