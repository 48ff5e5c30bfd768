"""CSV files: a table -> a saved regressor; a table -> the same with predictions beside it.

    report = fit_csv("diamonds.csv", ["price"], "priced")
    predict_csv("priced", "more.csv", level=0.9).to_csv("priced.csv")

Used by `causal-qwen fit` and `causal-qwen predict`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from causal_qwen.outputs import check_output_directory
from causal_qwen.paths import install_hint
from causal_qwen.regression.conformal import rows_needed
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.regression.sentences import name_rows, require_columns

LEVEL = 0.9
FIRST_LINE = 2  # the line of a CSV file's first row, as editors count


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
    """Fit, calibrate and save a regressor; returns row counts, metrics and notes.

    A share of rows, `calibration`, is held out to measure errors and calibrate intervals.
    `columns` are those to learn from (all by default), `weight` names a column of row weights,
    `settings` are those of `CausalTextRegressor`.
    """
    if not 0 <= calibration < 1:
        raise ValueError(f"calibration={calibration} must be a share of rows, 0 to below 1.")
    check_output_directory(output, overwrite)
    frame = read_csv(data)
    require_columns(frame, [*targets, *columns, *([weight] if weight else [])])
    frame, notes = _finite_rows(frame, targets)
    order = np.random.default_rng(seed).permutation(len(frame))
    count = round(calibration * len(frame))
    held_out, training = frame.iloc[order[:count]], frame.iloc[order[count:]]
    names = targets[0] if len(targets) == 1 else list(targets)
    used = [*columns, *targets] if columns else frame.columns.drop([weight] if weight else [])
    regressor = CausalTextRegressor(random_state=seed, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        regressor.fit(training[used], names, sample_weight=training[weight] if weight else None)
        metrics = _measure(regressor, held_out[used], targets) if count else {}
        if count:
            regressor.calibrate(held_out[used], names)
    notes += [str(warning.message) for warning in caught]
    if 0 < count < (least := rows_needed(LEVEL)):
        notes.append(
            f"{count} calibration rows are too few for {LEVEL:.0%} intervals, which will be "
            f"infinite; at least {least} are needed: give more rows or a larger --calibration."
        )
    regressor.save(output, overwrite=overwrite)
    counts = {"rows": len(training), "calibration_rows": count}
    return {**counts, "targets": metrics, "notes": notes}


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
    predicted = _predict(regressor, frame, level, calibrated)
    for name, columns in zip(regressor.targets_, predicted, strict=True):
        for suffix, column in zip(("predicted", "low", "high"), columns, strict=True):
            frame[f"{name}_{suffix}"] = column
    return frame


def read_csv(path: str | os.PathLike[str]) -> Any:
    """A table with a header and at least one row."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise ImportError(
            f"Tables need pandas, which is not installed: {install_hint('tables')}"
        ) from None
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file; check the path.")
    try:
        frame = pandas.read_csv(path)
    except (pandas.errors.ParserError, pandas.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a CSV file: {error}.") from error
    if not len(frame):
        raise ValueError(f"{path} has a header and no rows; give at least one row.")
    return frame


def _finite_rows(frame: Any, targets: Sequence[str]) -> tuple[Any, list[str]]:
    """Rows whose targets are finite numbers, and a note with the lines of the others."""
    import pandas

    frame = frame.copy()
    names = list(targets)
    numbers = frame[names].apply(pandas.to_numeric, errors="coerce").astype(float)
    frame[names] = numbers
    is_finite = np.isfinite(numbers.to_numpy()).all(1)
    if not is_finite.any():
        raise ValueError(f"no row has a finite number for {', '.join(map(repr, targets))}.")
    lines = np.flatnonzero(~is_finite) + FIRST_LINE
    where = name_rows(lines).replace("row", "line") if len(lines) else ""
    notes = [f"{len(lines)} rows without a finite target are skipped: {where}."] if where else []
    return frame[is_finite], notes


def _predict(
    regressor: CausalTextRegressor, frame: Any, level: float, calibrated: bool | None
) -> Any:
    """Median, low and high. -> (targets, 3, N)"""
    bounds = regressor.predict_interval(frame, level, calibrated=calibrated)
    columns = [part.reshape(len(frame), -1).T for part in (regressor.predict(frame), *bounds)]
    return np.stack(columns, 1)


def _measure(regressor: Any, held_out: Any, targets: Sequence[str]) -> dict[str, dict[str, float]]:
    """Errors on held-out rows, and the coverage of the Cauchy's own interval."""
    found = {}
    predicted = _predict(regressor, held_out, LEVEL, calibrated=False)
    for name, (median, low, high) in zip(targets, predicted, strict=True):
        truth = held_out[name].to_numpy()
        error = truth - median
        spread = ((truth - truth.mean()) ** 2).sum()
        found[name] = {
            "mdae": float(np.median(np.abs(error))),
            "mae": float(np.abs(error).mean()),
            "r2": float(1 - (error**2).sum() / spread) if spread else float("nan"),
            "raw_coverage_90": float(((low <= truth) & (truth <= high)).mean()),
        }
    return found
