"""Files of tables -> a saved regressor; a file -> the same with predictions beside its columns.

    report = fit_csv("diamonds.csv", ["price"], "priced")
    predict_csv("priced", "more.csv", level=0.9).to_csv("priced.csv")

Used by `causal-qwen fit`, `audit`, `predict`, `what-if` and `report`. The options `separator`,
`encoding` and `decimal` are a text file's, if they cannot be found.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import r2_score
from sklearn.model_selection import TimeSeriesSplit

from causal_qwen.conversion.placement import resolve_device
from causal_qwen.outputs import check_not_inside, check_output_directory
from causal_qwen.regression.conformal import LEVEL, rows_needed
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.regression.report import write_regressor_report
from causal_qwen.regression.sentences import template_columns
from causal_qwen.regression.whatif import NumberCounterfactual
from causal_qwen.tables.files import PredictedTable, Table, read_blocks, read_table
from causal_qwen.tables.frames import (
    id_like,
    listed,
    name_rows,
    require_columns,
    text_names,
    to_numbers,
)
from causal_qwen.terminal import counted

File = str | os.PathLike[str]

SUFFIXES = ("predicted", "low", "high")  # of the predicted columns' names
NUMBERS = "write numbers as 1870.5, without units"
BEYOND = "beyond_training"  # a column of notes on rows outside of the training range
HELD_OUT = 0.2  # share of rows, where a regressor is not calibrated by cross-validation
TRUTH = dict.fromkeys(("true", "yes", "y", "1", "1.0"), True)
TRUTH |= dict.fromkeys(("false", "no", "n", "0", "0.0", ""), False)


# ---------------------------------------------------------------- fit and audit


def fit_csv(
    data: File,
    targets: Sequence[str],
    output: File,
    *,
    columns: Sequence[str] = (),
    weight: str | None = None,
    group: str | None = None,
    time: str | None = None,
    trusted: str | None = None,
    calibration: float | None = None,
    overwrite: bool = False,
    seed: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Fit, calibrate and save a regressor; returns row counts, metrics and notes.

    Errors are measured and intervals calibrated by cross-validation; or on a share of rows,
    `calibration`, that is held out. None holds out a fifth where `fit` does not cross-validate.

    `columns` are those to learn from (by default all but identifiers, which a note names). `weight`
    names a column of row weights, `group` one whose rows stay on one side of every split, `time`
    one by which rows are ordered, so that later rows test earlier ones, `trusted` one that marks
    rows whose labels are right, the only ones that calibrate. None of them is learned from unless
    it is in `columns`. `settings` are those of `CausalTextRegressor` and of the file.
    """
    check_output_directory(output, overwrite)
    model = settings.get("model")
    check_not_inside(output, data, *([model] if isinstance(model, str | os.PathLike) else []))
    notes: list[str] = []
    with _collected(notes):
        regressor, dialect = _regressor(settings, columns, group, time, seed)
        if calibration is None:
            calibration = HELD_OUT if regressor.reads_sentences() else 0.0
        table = read_table(data, **dialect)
        roles = {"weight": weight, "group": group, "time": time, "trusted": trusted}
        training, held_out = _learn(regressor, table, targets, roles, calibration, seed)
        names = targets[0] if len(targets) == 1 else list(targets)
        trust = None
        if trusted is not None:
            trust = _truth(held_out if len(held_out) else training, trusted)
        if len(held_out):
            metrics = _measured(regressor, held_out, targets)
            regressor.calibrate(held_out, names, trusted=trust)
            if len(held_out) < (least := rows_needed(LEVEL)):
                rows_are = counted(len(held_out), "calibration row is", "calibration rows are")
                warnings.warn(
                    f"{rows_are} too few for {LEVEL:.0%} intervals, which will be infinite; at "
                    f"least {least} are needed: give more rows or a larger --calibration.",
                    stacklevel=2,
                )
        else:
            metrics = _cross_validated(regressor)
            if trust is not None:
                regressor.calibrate_trusted(trust)
    regressor.save(output, overwrite=overwrite)
    errors = {name: found.errors() for name, found in getattr(regressor, "evidence_", {}).items()}
    return {
        "rows": len(training),
        "calibration_rows": len(held_out),
        "targets": metrics,
        "sources": regressor.shares() if errors else {},
        "errors": errors,  # median, of every method on unseen rows; ours is "together"
        "best": {name: min(one, key=lambda method: one[method]) for name, one in errors.items()},
        "notes": notes,
    }


def audit_csv(
    data: File,
    targets: Sequence[str],
    *,
    columns: Sequence[str] = (),
    group: str | None = None,
    time: str | None = None,
    seed: int = 0,
    **settings: Any,
) -> tuple[Any, list[str]]:
    """The rows of a file by the credibility of their labels (`audit`), and notes. `group` and
    `time` split the rows as in `fit_csv`: a label is judged by other groups, or by earlier rows."""
    notes: list[str] = []
    with _collected(notes):
        regressor, dialect = _regressor(settings, columns, group, time, seed)
        if regressor.reads_sentences():
            raise ValueError("an audit cross-validates; give another --source beside the model.")
        roles = {"group": group, "time": time}
        _learn(regressor, read_table(data, **dialect), targets, roles)
    return regressor.suspicious(), notes


def _learn(
    regressor: CausalTextRegressor,
    table: Table,
    targets: Sequence[str],
    roles: Mapping[str, str | None],
    calibration: float = 0.0,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Fit to the rows of a table; -> the training rows and those held out. `roles` are columns:
    `weight`, `group`, `time` and `trusted`."""
    columns = {role: column for role, column in roles.items() if column is not None}
    weight, group = columns.get("weight"), columns.get("group")
    frame = _typed_rows(table, targets, [*(regressor.columns or ()), *columns.values()], weight)
    used = regressor.columns
    if used is None:
        used = _all_but_ids(frame, [*targets, *columns.values()], regressor)
    order, count = np.random.default_rng(seed).permutation(len(frame)), len(frame) * calibration
    training, held_out = _split(frame, order, group, columns.get("time"), round(count))
    regressor.fit(
        training[list(dict.fromkeys([*used, *listed(regressor.text), *targets]))],
        targets[0] if len(targets) == 1 else list(targets),
        sample_weight=training[weight] if weight else None,
        groups=training[group].astype(str).to_numpy() if group else None,
    )
    return training, held_out


def _regressor(
    settings: dict[str, Any],
    columns: Sequence[str],
    group: str | None,
    time: str | None,
    seed: int,
) -> tuple[CausalTextRegressor, dict[str, str | None]]:
    """An unfitted regressor, and the options of the file, which are taken out of `settings`. `time`
    splits rows in its order; None splits them by groups, or at random."""
    resolve_device(settings.get("device", "auto"))  # before the work
    if group is not None and time is not None:
        raise ValueError("group and time both decide the splits; give one of them.")
    dialect = {name: settings.pop(name, None) for name in ("separator", "encoding", "decimal")}
    splitter = None if time is None else TimeSeriesSplit()
    learned = list(columns) or None
    options: dict[str, Any] = {"columns": learned, "cv": splitter, "random_state": seed}
    return CausalTextRegressor(**options, **settings), dialect


# ---------------------------------------------------------------- questions to a saved regressor


def what_if_csv(
    model: File,
    data: File,
    row: int,
    changes: Mapping[str, Any],
    *,
    observed: float | None = None,
    target: str | None = None,
    cache: bool | None = None,
    device: str = "auto",
    level: float = LEVEL,
    semantics: str = "disco",
    **dialect: str | None,
) -> NumberCounterfactual:
    """A counterfactual of one row of a file, counted from 1; `observed` is its own target if it
    has one."""
    table = read_table(data, **dialect)
    if not 1 <= row <= len(table):
        raise ValueError(f"row {row} is not in {data}, which has rows 1 to {len(table)}.")
    regressor = _loaded(model, cache, device)
    name = regressor.target_name(target)
    if observed is None:
        if name not in table.cells:
            raise ValueError(f"{data} has no column {name!r}; give the number seen, --observed.")
        observed = float(table.numbers(name)[row - 1])
    options: dict[str, Any] = {"target": name, "level": level, "semantics": semantics}
    given = table.frame().iloc[[row - 1]]
    return regressor.counterfactual(given, observed, dict(changes), **options)


def report_csv(
    model: File,
    data: File | None = None,
    targets: Sequence[str] = (),
    device: str = "auto",
    **dialect: str | None,
) -> Path:
    """Pictures of a saved regressor (`report`), in the directory MODEL-report; returns the page.

    `data` has rows that `fit` has not seen; `targets` are its columns, in the order of `fit`.
    """
    if data is None:
        raise ValueError("a regressor's report needs rows: causal-qwen report FITTED DATA.")
    regressor = _loaded(model, None, device).set_params(verbose=False)
    place = Path(model).resolve()
    output = place.with_name(f"{place.name}-report")
    names = list(targets) or list(regressor.targets_)
    frame = _typed_rows(read_table(data, **dialect), names)
    y = names[0] if len(names) == 1 else names
    return write_regressor_report(regressor, output, place.name, frame, y)


def predict_csv(model: File, data: File, **options: Any) -> Any:
    """The table with a median and an interval beside it for every target: a DataFrame.

    The options are those of `predict_table`. The cells of a CSV file are texts, exactly as the file
    has them.
    """
    return predict_table(model, data, **options).frame()


def predict_table(
    model: File,
    data: File,
    *,
    level: float = LEVEL,
    calibrated: bool | None = None,
    cache: bool | None = None,
    device: str = "auto",
    **dialect: str | None,
) -> PredictedTable:
    """A file and the columns predicted for it. `cache` replaces the regressor's own setting."""
    predictor = _Predictor(_loaded(model, cache, device), level, calibrated)
    block = predictor(read_table(data, **dialect))
    if not predictor.beyond:
        del block.predicted[BEYOND]  # type: ignore[attr-defined]
    predictor.warn_beyond()
    return block


def predict_blocks(
    model: File,
    data: File,
    rows: int,
    *,
    level: float = LEVEL,
    calibrated: bool | None = None,
    cache: bool | None = None,
    device: str = "auto",
    **dialect: str | None,
) -> Iterator[PredictedTable]:
    """`predict_table`, so many rows at a time, at constant memory. Every block has the column
    `beyond_training`, because later rows are not known yet; a warning counts them at the end."""
    predictor = _Predictor(_loaded(model, cache, device), level, calibrated)
    yield from map(predictor, read_blocks(data, rows, **dialect))
    predictor.warn_beyond()


def _loaded(model: File, cache: bool | None, device: str) -> CausalTextRegressor:
    regressor = CausalTextRegressor.load(model, device=device)
    return regressor if cache is None else regressor.set_params(cache=cache)


class _Predictor:
    """A loaded regressor -> the predicted columns of tables, and what it has seen in them."""

    def __init__(
        self, regressor: CausalTextRegressor, level: float, calibrated: bool | None
    ) -> None:
        self.regressor, self.level, self.calibrated = regressor, level, calibrated
        self.rows = self.beyond = 0
        self.example = ""

    def __call__(self, table: Table) -> PredictedTable:
        names = [f"{name}_{suffix}" for name in self.regressor.targets_ for suffix in SUFFIXES]
        if taken := [name for name in (*names, BEYOND) if name in table.cells]:
            raise ValueError(f"{table.path} has a column {taken[0]!r} already; rename it.")
        frame = table.frame()
        numbers = _predict(self.regressor, frame, self.level, self.calibrated)
        notes = self.regressor.beyond_training(frame)
        outside = [row for row, note in enumerate(notes) if note]
        if outside and not self.beyond:
            self.example = f"{name_rows(outside[:1], frame.index)}: {notes[outside[0]]}"
        self.rows, self.beyond = self.rows + len(table), self.beyond + len(outside)
        found = dict(zip(names, numbers.reshape(len(names), len(table)), strict=True))
        return PredictedTable(table, {**found, BEYOND: np.array(notes, dtype=object)})

    def warn_beyond(self) -> None:
        if self.beyond:
            rows_are = counted(self.beyond, "row has", "rows have")
            warnings.warn(
                f"{rows_are} numbers beyond the training range, of {self.rows}, and wider "
                f"intervals ({self.example}).",
                stacklevel=3,
            )


# ---------------------------------------------------------------- rows


@contextmanager
def _collected(notes: list[str]) -> Iterator[None]:
    """Append every warning to `notes`, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    notes += dict.fromkeys(str(warning.message) for warning in caught)


def _split(
    frame: Any, order: NDArray[np.int64], group: str | None, time: str | None, count: int = 0
) -> tuple[Any, Any]:
    """(training, held-out) rows, of which the latter are at least `count`: the first of `order`,
    whole groups in that order, or the latest. Training rows are then in the order of time."""
    if time is not None:
        times = to_numbers(frame[time])
        if not np.isfinite(times).all():
            where = name_rows(np.flatnonzero(~np.isfinite(times)), frame.index)
            raise ValueError(f"{where}: {time} is no date and no number; --time needs one.")
        order = np.argsort(times, kind="stable")
        return frame.iloc[order[: len(order) - count]], frame.iloc[order[len(order) - count :]]
    if group is not None:
        groups = frame[group].astype(str).to_numpy()[order]
        _, first, place = np.unique(groups, return_index=True, return_inverse=True)
        if len(first) < 2:
            raise ValueError(f"column {group!r} has one group; --group needs at least two.")
        order, groups = (part[np.argsort(first[place], kind="stable")] for part in (order, groups))
        count = int(np.isin(groups, groups[:count]).sum())  # a group is held out as a whole
    return frame.iloc[order[count:]], frame.iloc[order[:count]]


def _truth(frame: Any, name: str) -> NDArray[np.bool_]:
    """A column of truth values: true, yes, 1; false, no, 0; an empty cell is false."""
    cells = frame[name].astype(object).where(frame[name].notna(), "").tolist()
    texts = [str(cell).strip().lower() for cell in cells]
    if unread := [row for row, text in enumerate(texts) if text not in TRUTH]:
        where = name_rows(unread, frame.index)
        raise ValueError(f"{where}: {name} is {cells[unread[0]]!r}; write yes or no.")
    return np.array([TRUTH[text] for text in texts])


def _all_but_ids(frame: Any, without: Sequence[str], regressor: CausalTextRegressor) -> list[str]:
    """The columns to learn from; a warning names the identifiers that are left out."""
    names = [name for name in frame.columns if name not in without]
    wanted, template = listed(regressor.text), regressor.template
    wanted += [] if template is None else template_columns(template, ())
    ids = [name for name in id_like(frame[names]) if name not in wanted]
    if not ids or len(ids) == len(names):
        return names
    columns_are = counted(len(ids), "column that names rows is", "columns that name rows are")
    warnings.warn(
        f"{columns_are} left out: {', '.join(map(repr, ids))}; use --column to learn from one.",
        stacklevel=3,
    )
    return [name for name in names if name not in ids]


def _typed_rows(
    table: Table,
    targets: Sequence[str],
    columns: Sequence[str] = (),
    weight: str | None = None,
) -> Any:
    """Typed values of the rows whose targets are finite numbers; a warning shows the others."""
    text_names(targets)
    frame = table.frame(targets)
    require_columns(frame, [*targets, *columns])
    is_usable = np.ones(len(table), dtype=bool)
    for name in targets:
        frame[name] = table.numbers(name)
        is_finite = np.isfinite(frame[name].to_numpy())
        if is_finite.all():
            continue
        where = table.name_cells(np.flatnonzero(~is_finite), name)
        if not is_finite.any():
            raise ValueError(f"no row has a finite number for {name!r}: {where}; {NUMBERS}.")
        what = f"without a finite {name}"
        rows_are = counted(int((~is_finite).sum()), f"row {what} is", f"rows {what} are")
        warnings.warn(f"{rows_are} skipped: {where}; {NUMBERS}.", stacklevel=3)
        is_usable &= is_finite
    if weight is not None:
        frame[weight] = weights = table.numbers(weight)
        rows = np.flatnonzero(is_usable & ~((weights >= 0) & (weights < np.inf)))
        if len(rows):
            where = table.name_cells(rows, weight)
            raise ValueError(f"a row's weight is a finite number of at least 0: {where}")
    return frame[is_usable]


def _predict(
    regressor: CausalTextRegressor, frame: Any, level: float, calibrated: bool | None
) -> Any:
    """Median, low and high. -> (targets, 3, N)"""
    median, interval, _ = regressor.predict_numbers(frame, [level], calibrated=calibrated)
    parts = (median, interval[..., 0, 0], interval[..., 0, 1])
    return np.stack([part.reshape(len(frame), -1).T for part in parts], 1)


def _measured(regressor: Any, held_out: Any, targets: Sequence[str]) -> dict[str, dict[str, float]]:
    """Errors on held-out rows, and the coverage of the Cauchy's own interval."""
    found = {}
    predicted = _predict(regressor, held_out, LEVEL, calibrated=False)
    for name, (median, low, high) in zip(targets, predicted, strict=True):
        truth = held_out[name].to_numpy()
        found[name] = _metrics(truth, median, (low <= truth) & (truth <= high))
    return found


def _cross_validated(regressor: CausalTextRegressor) -> dict[str, dict[str, float]]:
    """The same on training rows, each by experts that have not seen it."""
    found = {}
    reach = 1 / np.tan(np.pi * (1 - LEVEL) / 2)  # of the Cauchy's interval, in scales
    for name, evidence in getattr(regressor, "evidence_", {}).items():
        tested = np.isfinite(evidence.scores)
        is_inside = np.abs(evidence.scores[tested]) <= reach
        found[name] = _metrics(evidence.values[tested], evidence.unseen[tested], is_inside)
    return found


def _metrics(truth: Any, median: Any, is_inside: Any) -> dict[str, float]:
    error = np.abs(truth - median)
    is_constant = truth.min() == truth.max()
    return {
        "mdae": float(np.median(error)),
        "mae": float(error.mean()),
        "r2": float("nan") if is_constant else float(r2_score(truth, median)),
        "raw_coverage_90": float(is_inside.mean()),
    }
