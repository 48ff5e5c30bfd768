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

from causal_qwen.regression.conformal import Conformal
from causal_qwen.regression.explanation import new_axes
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
    output.mkdir(parents=True, exist_ok=True)
    judged = regressor.suspicious(X, y)
    body = ""
    for place, (name, target) in enumerate(regressor.targets_.items()):
        found = judged[judged["target"] == name] if "target" in judged else judged
        errors = found["label"] - found["expected"]
        figures = {"calibration": new_axes((5.5, 4.5)), "residuals": new_axes((7, 4))}
        _draw_calibration(figures["calibration"], found["score"].to_numpy(), target.conformal)
        figures["residuals"].axhline(0, color="grey", linewidth=1)
        figures["residuals"].scatter(found["expected"], errors, s=10, alpha=0.6)
        figures["residuals"].set(xlabel=f"{name}, median", ylabel="label - median")
        if regressor.source_ is not None:  # words count for their column
            added = regressor.explain(X[:EXPLAINED_ROWS], target=name).table
            added = added.groupby(["row", "column"])["median"].sum().abs().groupby("column").mean()
            added = added.sort_values()
            figures["contributions"] = axes = new_axes((7, 1 + 0.32 * len(added)))
            axes.barh([str(column) for column in added.index], added.to_numpy())
            axes.set(xlabel=f"mean contribution to {name}")
        facts = f"median error {errors.abs().median():.6g}, mean error {errors.abs().mean():.6g}"
        body += f"<h2>{html.escape(name)}</h2><p>{len(found)} rows: {facts}</p>"
        for kind, axes in figures.items():
            path = output / f"{place}-{kind}.png"
            axes.set_title(kind)
            axes.figure.savefig(path, dpi=120)
            data = base64.b64encode(path.read_bytes()).decode()
            body += f'<img alt="{kind}" src="data:image/png;base64,{data}">'
    page = output / "index.html"
    page.write_text(PAGE.format(title=html.escape(title), body=body), encoding="utf-8")
    return page


def coverage(scores: Array, conformal: Conformal | None, levels: Array = LEVELS) -> Array:
    """The share of scores inside the interval of every level; the Cauchy's without `conformal`.
    NaN for a level that so few calibration rows do not reach."""
    reach = 1 / np.tan(np.pi * (1 - levels) / 2)
    if conformal is not None:
        radii = (conformal.radius(x) if conformal.reaches_level(x) else np.nan for x in levels)
        reach = np.array([*radii])
    share = (np.abs(scores)[:, None] <= reach).mean(0)
    return np.where(np.isnan(reach), np.nan, share)


def _draw_calibration(axes: Any, scores: Array, conformal: Conformal | None) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1, label="perfect")
    axes.plot(LEVELS, coverage(scores, None), marker=".", label="Cauchy's own")
    if conformal is not None:
        axes.plot(LEVELS, coverage(scores, conformal), marker=".", label="calibrated")
    axes.set(xlabel="level", ylabel="share inside", ylim=(0, 1.02))
    axes.legend()
