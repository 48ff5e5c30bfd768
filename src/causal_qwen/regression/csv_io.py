"""Tabular runs: a CSV file -> a saved regressor; a CSV file -> the same with numbers beside it.

    report = fit_csv("diamonds.csv", ["price"], "priced")
    predict_csv("priced", "more.csv", level=0.9).to_csv("priced.csv")

What `causal-qwen fit` and `causal-qwen predict` do.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from causal_qwen.paths import check_output_directory
from causal_qwen.regression.conformal import rows_needed
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.regression.sentences import name_rows, require_columns

LEVEL = 0.9
FIRST_LINE = 2  # of a CSV file's first row, as editors count


def fit_csv(
    data: str | os.PathLike[str],
    targets: Sequence[str],
    output: str | os.PathLike[str],
    *,
    columns: Sequence[str] = (),
    weight: str | None = None,
    calibration: float = 0.2,
    overwrite: bool = False,
    seed: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Fit, calibrate and save a regressor; returns what is known about it.

    A share of rows, `calibration`, is held out: errors are measured on it, and intervals
    calibrated. `columns` are those to learn from (all by default), `weight` names a column of row
    weights, `settings` are those of `CausalTextRegressor`.
    """
    if not 0 <= calibration < 1:
        raise ValueError(f"calibration={calibration} must be a share of rows, 0 to 1.")
    check_output_directory(output, overwrite)
    frame = read_csv(data)
    require_columns(frame, [*targets, *columns, *([weight] if weight else [])])
    frame, notes = _good_rows(frame, targets)
    order = np.random.default_rng(seed).permutation(len(frame))
    count = round(calibration * len(frame))
    held_out, learn = frame.iloc[order[:count]], frame.iloc[order[count:]]
    names = targets[0] if len(targets) == 1 else list(targets)
    used = [*columns, *targets] if columns else frame.columns.drop([weight] if weight else [])
    regressor = CausalTextRegressor(random_state=seed, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        regressor.fit(learn[used], names, sample_weight=learn[weight] if weight else None)
        metrics = _measure(regressor, held_out[used], targets) if count else {}
        if count:
            regressor.calibrate(held_out[used], names)
    notes += [str(one.message) for one in caught]
    if 0 < count < (least := rows_needed(LEVEL)):
        notes.append(
            f"{count} calibration rows are too few for {LEVEL:.0%} intervals, which will be "
            f"infinite: at least {least} are needed. Give more rows or a larger --calibration."
        )
    regressor.save(output, overwrite=overwrite)
    return {
        "rows": len(learn),
        "calibration_rows": count,
        "targets": metrics,
        "notes": notes,
    }


def predict_csv(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    level: float = LEVEL,
    calibrated: bool | None = None,
) -> Any:
    """The table with a median and an interval beside it for every target: a DataFrame."""
    regressor = CausalTextRegressor.load(model)
    frame = read_csv(data)
    median = regressor.predict(frame).reshape(len(frame), -1)
    bounds = regressor.predict_interval(frame, level, calibrated=calibrated)
    low, high = (bound.reshape(len(frame), -1) for bound in bounds)
    for place, name in enumerate(regressor.targets_):
        frame[f"{name}_predicted"] = median[:, place]
        frame[f"{name}_low"], frame[f"{name}_high"] = low[:, place], high[:, place]
    return frame


def read_csv(path: str | os.PathLike[str]) -> Any:
    """A table with a header and at least one row."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise ImportError(
            "Tables need pandas, which is not installed: pip install 'causal-qwen[tables]'"
        ) from None
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is no file: check the path.")
    try:
        frame = pandas.read_csv(path)
    except (pandas.errors.ParserError, pandas.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a CSV file: {error}.") from error
    if not len(frame):
        raise ValueError(f"{path} has a header and no row.")
    return frame


def _good_rows(frame: Any, targets: Sequence[str]) -> tuple[Any, list[str]]:
    """Rows whose targets are finite numbers; the others' lines are told."""
    import pandas

    frame = frame.copy()
    is_good = np.ones(len(frame), dtype=bool)
    for name in targets:
        frame[name] = pandas.to_numeric(frame[name], errors="coerce").astype(float)
        is_good &= np.isfinite(frame[name].to_numpy())
    if not is_good.any():
        raise ValueError(f"no row has a finite number for {', '.join(map(repr, targets))}.")
    lines = np.flatnonzero(~is_good) + FIRST_LINE
    notes = []
    if len(lines):
        noun = name_rows(lines).replace("row", "line")
        notes.append(f"{len(lines)} rows without a finite target are skipped: {noun}.")
    return frame[is_good], notes


def _measure(regressor: Any, held_out: Any, targets: Sequence[str]) -> dict[str, dict[str, float]]:
    """Errors on rows that were not learned from, and how often the Cauchy's own interval holds."""
    median = regressor.predict(held_out).reshape(len(held_out), -1)
    bounds = regressor.predict_interval(held_out, LEVEL, calibrated=False)
    low, high = (bound.reshape(len(held_out), -1) for bound in bounds)
    found = {}
    for place, name in enumerate(targets):
        truth = held_out[name].to_numpy()
        error = truth - median[:, place]
        spread = ((truth - truth.mean()) ** 2).sum()
        found[name] = {
            "mdae": float(np.median(np.abs(error))),
            "mae": float(np.abs(error).mean()),
            "r2": float(1 - (error**2).sum() / spread) if spread else float("nan"),
            "raw_coverage_90": float(((low[:, place] <= truth) & (truth <= high[:, place])).mean()),
        }
    return found
