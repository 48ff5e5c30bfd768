"""Report: the curves of a training run as PNG files and one HTML page.

    causal-qwen report RUN     ->  RUN/report/index.html

The curves come from the log in every checkpoint, so the run need not have finished.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from causal_qwen.paths import install_hint
from causal_qwen.training.checkpoints import read_log

CURVES: dict[str, Sequence[str]] = {
    "loss": ("total_loss", "cls_loss_mean", "reg_loss_effective", "compat_loss_mean", "eval_loss"),
    "accuracy": ("eval_accuracy", "eval_accuracy_compatible"),
    "negative log-likelihood": ("eval_nll", "eval_ovr_nll"),
    "sum of P (median)": ("eval_dist/ovr_prob_sum_median",),
    "scale of U": ("eval_dist/U_scale_median", "eval_dist/U_scale_mean"),
    "coverage of intervals": tuple(f"eval_coverage_{level}" for level in (50, 80, 90, 95)),
    "gradient norm": ("grad_norm",),
}
PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;max-width:60em;margin:2em auto}}img{{max-width:100%}}
td{{padding:0 1em 0 0}}</style>
<h1>{title}</h1><table>{rows}</table>{images}
"""


def write_report(run: Path) -> Path:
    """Draw the logged curves; returns the page."""
    log = read_log(run)
    output = run / "report"
    output.mkdir(exist_ok=True)
    images = filter(None, (_draw(title, names, log, output) for title, names in CURVES.items()))
    last = {name: value for entry in log for name, value in entry.items()}
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{value:.6g}</td></tr>"
        for name, value in sorted(last.items())
    )
    pictures = "".join(
        f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}">'
        for path in images
    )
    page = output / "index.html"
    page.write_text(
        PAGE.format(title=html.escape(run.name), rows=rows, images=pictures), encoding="utf-8"
    )
    return page


def _draw(title: str, names: Sequence[str], log: list[dict[str, Any]], output: Path) -> Path | None:
    """One picture of the curves in the log, or None if there are none."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ImportError(
            f"Curves need matplotlib, which is not installed: {install_hint('plot')}"
        ) from None
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for name in names:
        if points := [(entry["step"], entry[name]) for entry in log if name in entry]:
            axes.plot(*zip(*points, strict=True), marker=".", label=name.removeprefix("eval_"))
    if not axes.lines:
        return None
    axes.set(title=title, xlabel="step")
    axes.legend()
    path = output / f"{re.sub(r'[^A-Za-z]+', '-', title).strip('-')}.png"
    figure.savefig(path, dpi=120)
    return path
