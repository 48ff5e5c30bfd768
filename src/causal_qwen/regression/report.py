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

import numpy as np

from causal_qwen.regression.csv_io import typed_rows
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.tables.files import File, read_table

PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;max-width:60em;margin:2em auto}}img{{max-width:100%}}</style>
<h1>{title}</h1>{body}
"""
LEVELS = np.linspace(0.1, 0.9, 9)
EXPLAINED_ROWS = 20  # their contributions are averaged


def write_report(model: Path, data: File, device: str = "auto", **dialect: str | None) -> Path:
    """Draw the pictures of every target, in the directory MODEL-report; returns the page."""
    from matplotlib.figure import Figure

    regressor = CausalTextRegressor.load(model, device=device).set_params(verbose=False)
    frame = typed_rows(read_table(data, **dialect), list(regressor.targets_))
    medians, intervals, _ = regressor.predict_numbers(frame, LEVELS.tolist())
    shape, body = (len(frame), len(regressor.targets_)), ""
    medians, intervals = medians.reshape(shape), intervals.reshape(*shape, -1, 2)
    for place, name in enumerate(regressor.targets_):
        labels, median = frame[name].to_numpy(), medians[:, place]
        low, high = np.moveaxis(intervals[:, place], -1, 0)  # (N, levels) each
        inside = ((low <= labels[:, None]) & (labels[:, None] <= high)).mean(0)
        figure = Figure(figsize=(16, 5), layout="constrained")
        calibration, residuals, contributions = figure.subplots(1, 3)
        calibration.plot([0, 1], [0, 1], color="grey", linewidth=1)
        calibration.plot(LEVELS, inside, marker=".")
        calibration.set(title="calibration", xlabel="level", ylabel="share inside")
        residuals.axhline(0, color="grey", linewidth=1)
        residuals.scatter(median, labels - median, s=10, alpha=0.6)
        residuals.set(title="residuals", xlabel=f"{name}, median", ylabel="label - median")
        added = regressor.explain(frame[:EXPLAINED_ROWS], target=name).table
        added = added.groupby(["row", "column"])["median"].sum()  # the words of a column together
        added = added.abs().groupby("column").mean().sort_values()
        contributions.barh([str(column) for column in added.index], added.to_numpy())
        contributions.set(title="contributions", xlabel=f"mean contribution to {name}")
        picture, errors = io.BytesIO(), np.abs(labels - median)
        figure.savefig(picture, dpi=120)
        facts = f"median error {np.median(errors):.6g}, mean error {errors.mean():.6g}"
        body += f"<h2>{html.escape(name)}</h2><p>{len(frame)} rows: {facts}; 90% intervals hold "
        body += f'{inside[-1]:.0%}</p><img alt="pictures" src="data:image/png;base64,'
        body += f'{base64.b64encode(picture.getvalue()).decode()}">'
    directory = model.resolve().with_name(f"{model.resolve().name}-report")
    directory.mkdir(exist_ok=True)
    page = directory / "index.html"
    page.write_text(PAGE.format(title=html.escape(model.resolve().name), body=body), "utf-8")
    return page
