"""CSV files: a table -> a saved regressor; a table -> the same with predictions beside it.

    report = fit_csv("diamonds.csv", ["price"], "priced")
    predict_csv("priced", "more.csv", level=0.9).to_csv("priced.csv")

Used by `causal-qwen fit` and `causal-qwen predict`.
"""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.outputs import check_not_inside, check_output_directory
from causal_qwen.regression.conformal import rows_needed
from causal_qwen.regression.csv_table import CsvTable, read_table
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.regression.sentences import require_columns
from causal_qwen.terminal import counted

LEVEL = 0.9
SUFFIXES = ("predicted", "low", "high")  # of the predicted columns' names
NUMBERS = "write numbers as 1870.5, without separators and units"


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
    model = settings.get("model")
    check_not_inside(output, data, *([model] if isinstance(model, str | os.PathLike) else []))
    notes: list[str] = []
    regressor = CausalTextRegressor(random_state=seed, **settings)
    with _collected(notes):
        frame = _typed_rows(read_table(data), targets, columns, weight)
        order = np.random.default_rng(seed).permutation(len(frame))
        count = round(calibration * len(frame))
        held_out, training = frame.iloc[order[:count]], frame.iloc[order[count:]]
        names = targets[0] if len(targets) == 1 else list(targets)
        used = [*columns, *targets] if columns else frame.columns.drop([weight] if weight else [])
        regressor.fit(training[used], names, sample_weight=training[weight] if weight else None)
        metrics = _measure(regressor, held_out[used], targets) if count else {}
        if count:
            regressor.calibrate(held_out[used], names)
        if 0 < count < (least := rows_needed(LEVEL)):
            warnings.warn(
                f"{counted(count, 'calibration row is', 'calibration rows are')} too few for "
                f"{LEVEL:.0%} intervals, which will be infinite; at least {least} are needed: give "
                "more rows or a larger --calibration.",
                stacklevel=2,
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
    cache: bool | None = None,
) -> Any:
    """The table with a median and an interval beside it for every target: a DataFrame.

    The table's own cells are texts, exactly as the file has them.
    """
    return predict_table(model, data, level=level, calibrated=calibrated, cache=cache).frame()


def predict_table(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    level: float = LEVEL,
    calibrated: bool | None = None,
    cache: bool | None = None,
) -> PredictedTable:
    """As `predict_csv`, with the text of the file. `cache` replaces the regressor's own setting."""
    table = read_table(data)
    regressor = CausalTextRegressor.load(model)
    if cache is not None:
        regressor.set_params(cache=cache)
    names = [f"{name}_{suffix}" for name in regressor.targets_ for suffix in SUFFIXES]
    if taken := [name for name in names if name in table.columns]:
        raise ValueError(f"{data} has a column {taken[0]!r} already; rename or remove it.")
    predicted = _predict(regressor, table.frame(), level, calibrated)
    columns = predicted.reshape(len(names), len(table))
    return PredictedTable(table, dict(zip(names, columns, strict=True)))


@dataclass(frozen=True)
class PredictedTable:
    """A CSV file and the columns predicted for it."""

    table: CsvTable
    predicted: dict[str, NDArray[np.float64]]

    def __len__(self) -> int:
        return len(self.table)

    def frame(self) -> Any:
        """A DataFrame: the file's cells as texts, the predicted columns as numbers."""
        import pandas

        return pandas.DataFrame({**self.table.columns, **self.predicted})

    def csv(self) -> Iterator[str]:
        """The file's own lines, byte for byte, each followed by its predicted cells."""
        names = io.StringIO(newline="")
        csv.writer(names, lineterminator="").writerow(self.predicted)
        yield _append(self.table.header, names.getvalue())
        columns = [column.tolist() for column in self.predicted.values()]
        for record, *cells in zip(self.table.records, *columns, strict=True):
            yield _append(record, ",".join(map(repr, cells)))


def read_csv(path: str | os.PathLike[str]) -> Any:
    """A table with a header and at least one row: a DataFrame of typed values."""
    return read_table(path).frame().reset_index(drop=True)


def _append(record: str, cells: str) -> str:
    """A record with more cells, before its line end."""
    body = record.rstrip("\r\n")
    return f"{body},{cells}{record[len(body) :]}"


@contextmanager
def _collected(notes: list[str]) -> Iterator[None]:
    """Append every warning to `notes`, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    notes += dict.fromkeys(str(warning.message) for warning in caught)


def _typed_rows(
    table: CsvTable, targets: Sequence[str], columns: Sequence[str], weight: str | None
) -> Any:
    """Typed values of the rows whose targets are finite numbers; a warning shows the others."""
    require_columns(
        frame := table.frame(targets), [*targets, *columns, *([weight] if weight else [])]
    )
    is_usable = np.ones(len(table), dtype=bool)
    for name in targets:
        frame[name] = table.numbers(name)
        is_finite = np.isfinite(frame[name].to_numpy())
        if is_finite.all():
            continue
        where = table.name_lines(np.flatnonzero(~is_finite), name)
        if not is_finite.any():
            raise ValueError(f"no row has a finite number for {name!r}: {where}; {NUMBERS}.")
        what = f"without a finite {name}"
        rows_are = counted(int((~is_finite).sum()), f"row {what} is", f"rows {what} are")
        warnings.warn(f"{rows_are} skipped: {where}; {NUMBERS}.", stacklevel=3)
        is_usable &= is_finite
    if not is_usable.any():
        raise ValueError(f"no row has finite numbers for all of {', '.join(map(repr, targets))}.")
    if weight is not None:
        frame[weight] = weights = table.numbers(weight)
        rows = np.flatnonzero(is_usable & ~((weights >= 0) & (weights < np.inf)))
        if len(rows):
            raise ValueError(
                f"a row's weight is a finite number of at least 0: {table.name_lines(rows, weight)}"
            )
    return frame[is_usable]


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
