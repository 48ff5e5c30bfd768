"""Files of tables -> a saved regressor; a file -> the same with predictions beside its columns.

    report = fit_csv("diamonds.csv", ["price"], "priced")
    predict_csv("priced", "more.csv", level=0.9).to_csv("priced.csv")

Used by `causal-qwen fit` and `causal-qwen predict`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.outputs import check_not_inside, check_output_directory
from causal_qwen.regression.conformal import rows_needed
from causal_qwen.regression.csv_table import open_output
from causal_qwen.regression.frames import id_like
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.regression.rows import require_columns
from causal_qwen.regression.sentences import template_columns
from causal_qwen.regression.table_files import (
    Table,
    csv_lines,
    predicted_frame,
    read_table,
    records,
    table_kind,
    text_encoding,
    write_typed,
)
from causal_qwen.regression.targets import check_target_names
from causal_qwen.terminal import counted

LEVEL = 0.9
SUFFIXES = ("predicted", "low", "high")  # of the predicted columns' names
NUMBERS = "write numbers as 1870.5, without units"


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
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Fit, calibrate and save a regressor; returns row counts, metrics and notes.

    A share of rows, `calibration`, is held out to measure errors and calibrate intervals.
    `columns` are those to learn from (by default all but identifiers, which a note names), `weight`
    names a column of row weights, `settings` are those of `CausalTextRegressor`. `separator`,
    `encoding` and `decimal` are a text file's, if they cannot be found.
    """
    if not 0 <= calibration < 1:
        raise ValueError(f"calibration={calibration} must be a share of rows, 0 to below 1.")
    check_target_names(targets)
    check_output_directory(output, overwrite)
    model = settings.get("model")
    check_not_inside(output, data, *([model] if isinstance(model, str | os.PathLike) else []))
    notes: list[str] = []
    regressor = CausalTextRegressor(random_state=seed, **settings)
    with _collected(notes):
        table = read_table(data, separator=separator, encoding=encoding, decimal=decimal)
        frame = _typed_rows(table, targets, columns, weight)
        order = np.random.default_rng(seed).permutation(len(frame))
        count = round(calibration * len(frame))
        held_out, training = frame.iloc[order[:count]], frame.iloc[order[count:]]
        names = targets[0] if len(targets) == 1 else list(targets)
        used = [*columns, *targets]
        if not columns:
            used = _all_but_ids(frame, [*targets, *([weight] if weight else [])], settings)
            used += targets
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
    **options: Any,
) -> Any:
    """The table with a median and an interval beside it for every target: a DataFrame.

    The options are those of `predict_table`. The cells of a CSV file are texts, exactly as the file
    has them.
    """
    return predict_table(model, data, **options).frame()


def predict_table(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    level: float = LEVEL,
    calibrated: bool | None = None,
    cache: bool | None = None,
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
) -> PredictedTable:
    """A file and the columns predicted for it. `cache` replaces the regressor's own setting."""
    table = read_table(data, separator=separator, encoding=encoding, decimal=decimal)
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
    """A file and the columns predicted for it."""

    table: Table
    predicted: dict[str, NDArray[np.float64]]

    def __len__(self) -> int:
        return len(self.table)

    def frame(self) -> Any:
        """A DataFrame: the file's cells (of a CSV file, texts), the predicted ones as numbers."""
        return predicted_frame(self.table, self.predicted)

    def records(self) -> list[dict[str, Any]]:
        """The rows of `frame` with JSON's values."""
        return records(self.table, self.predicted)

    def csv(self) -> Iterator[str]:
        """The file's own lines, each followed by its predicted cells."""
        return csv_lines(self.table, self.predicted)

    def csv_bytes(self) -> Iterator[bytes]:
        """`csv` in the encoding of the file: byte for byte the user's own columns."""
        encoding = text_encoding(self.table)
        return (line.encode(encoding) for line in self.csv())

    def write(self, place: Path, name: str | os.PathLike[str]) -> None:
        """Write to `place`, as the kind of file that the extension of `name` says."""
        if table_kind(name) != "csv":
            write_typed(self.table, self.predicted, place, name)
            return
        with open_output(place, name) as file:
            file.writelines(self.csv_bytes())


def read_csv(path: str | os.PathLike[str], **dialect: str | None) -> Any:
    """A table with a header and at least one row: a DataFrame of typed values.

    `separator`, `encoding` and `decimal` are those of a text file, if they cannot be found.
    """
    return read_table(path, **dialect).frame().reset_index(drop=True)


@contextmanager
def _collected(notes: list[str]) -> Iterator[None]:
    """Append every warning to `notes`, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    notes += dict.fromkeys(str(warning.message) for warning in caught)


def _all_but_ids(frame: Any, without: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """The columns to learn from; a warning names the identifiers that are left out."""
    names = [name for name in frame.columns if name not in without]
    text, template = settings.get("text") or (), settings.get("template")
    wanted = {text} if isinstance(text, str) else set(text)
    if template is not None:
        wanted |= set(template_columns(template, ()))
    ids = [name for name in id_like(frame[names]) if name not in wanted]
    if not ids or len(ids) == len(names):
        return names
    columns_are = counted(
        len(ids), "column looks like an identifier and is", "columns look like identifiers and are"
    )
    listed = ", ".join(map(repr, ids))
    columns_are = counted(len(ids), "column that names rows is", "columns that name rows are")
    warnings.warn(
        f"{columns_are} left out: {listed}; use --column to learn from one.", stacklevel=3
    )
    return [name for name in names if name not in ids]


def _typed_rows(
    table: Table, targets: Sequence[str], columns: Sequence[str], weight: str | None
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
