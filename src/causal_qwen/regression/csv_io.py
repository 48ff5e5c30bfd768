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
from sklearn.model_selection import TimeSeriesSplit

from causal_qwen.outputs import check_not_inside, check_output_directory
from causal_qwen.regression.conformal import rows_needed
from causal_qwen.regression.fitted import LEVEL
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.regression.report import write_regressor_report
from causal_qwen.regression.sentences import template_columns, text_names
from causal_qwen.regression.whatif import NumberCounterfactual
from causal_qwen.tables.files import PredictedTable, Table, read_blocks, read_table
from causal_qwen.tables.frames import id_like, to_numbers
from causal_qwen.tables.rows import name_rows, require_columns
from causal_qwen.tables.targets import check_target_names
from causal_qwen.terminal import counted

File = str | os.PathLike[str]

SUFFIXES = ("predicted", "low", "high")  # of the predicted columns' names
NUMBERS = "write numbers as 1870.5, without units"
BEYOND = "beyond_training"  # a column of notes on rows outside of the training range
HELD_OUT = 0.2  # share of rows, where a regressor is not calibrated by cross-validation
TRUE, FALSE = ("true", "yes", "y", "1", "1.0"), ("false", "no", "n", "0", "0.0", "")


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
    if calibration is not None and not 0 <= calibration < 1:
        raise ValueError(f"calibration={calibration} must be a share of rows, 0 to below 1.")
    check_target_names(targets)
    check_output_directory(output, overwrite)
    model = settings.get("model")
    check_not_inside(output, data, *([model] if isinstance(model, str | os.PathLike) else []))
    notes: list[str] = []
    dialect, regressor = _regressor(settings, columns, group, time, seed)
    roles = [one for one in (weight, group, time, trusted) if one is not None]
    with _collected(notes):
        table = read_table(data, **dialect)
        frame = _typed_rows(table, targets, columns, weight, roles)
        used = _used_columns(frame, targets, columns, roles, settings)
        if calibration is None:
            calibration = HELD_OUT if regressor.reads_sentences() else 0.0
        count = round(calibration * len(frame))
        order = np.random.default_rng(seed).permutation(len(frame))
        training, held_out = _split(frame, order, group, time, count)
        names = targets[0] if len(targets) == 1 else list(targets)
        _fit(regressor, training, used, names, group, training[weight] if weight else None)
        trust = None if trusted is None else _truth(held_out if count else training, trusted)
        if count:
            metrics = _measure(regressor, held_out[used], targets)
            regressor.calibrate(held_out[used], names, trusted=trust)
        else:
            metrics = _cross_validated(regressor)
            if trust is not None:
                regressor.calibrate_trusted(trust)
        if 0 < (held := len(held_out)) < (least := rows_needed(LEVEL)):
            warnings.warn(
                f"{counted(held, 'calibration row is', 'calibration rows are')} too few for "
                f"{LEVEL:.0%} intervals, which will be infinite; at least {least} are needed: give "
                "more rows or a larger --calibration.",
                stacklevel=2,
            )
    regressor.save(output, overwrite=overwrite)
    counts = {"rows": len(training), "calibration_rows": len(held_out)}
    return {**counts, "targets": metrics, **_findings(regressor), "notes": notes}


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
    check_target_names(targets)
    notes: list[str] = []
    dialect, regressor = _regressor(settings, columns, group, time, seed)
    if regressor.reads_sentences():
        raise ValueError("an audit cross-validates; give another --source beside the model.")
    roles = [one for one in (group, time) if one is not None]
    with _collected(notes):
        frame = _typed_rows(read_table(data, **dialect), targets, columns, None, roles)
        used = _used_columns(frame, targets, columns, roles, settings)
        frame, _ = _split(frame, np.arange(len(frame)), group, time)
        _fit(regressor, frame, used, targets[0] if len(targets) == 1 else list(targets), group)
    return regressor.suspicious(), notes


def _regressor(
    settings: dict[str, Any],
    columns: Sequence[str],
    group: str | None,
    time: str | None,
    seed: int,
) -> tuple[dict[str, str | None], CausalTextRegressor]:
    """The options of the file, which are taken out of `settings`, and an unfitted regressor. `time`
    splits rows in its order; None splits them by groups, or at random."""
    if group is not None and time is not None:
        raise ValueError("group and time both decide the splits; give one of them.")
    dialect = {name: settings.pop(name, None) for name in ("separator", "encoding", "decimal")}
    splitter = None if time is None else TimeSeriesSplit()
    options: dict[str, Any] = {
        "columns": list(columns) or None,
        "cv": splitter,
        "random_state": seed,
    }
    return dialect, CausalTextRegressor(**options, **settings)


def _fit(
    regressor: CausalTextRegressor,
    frame: Any,
    used: list[str],
    targets: str | list[str],
    group: str | None,
    weights: Any = None,
) -> None:
    groups = frame[group].astype(str).to_numpy() if group else None
    regressor.fit(frame[used], targets, sample_weight=weights, groups=groups)


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
        if name not in table.columns:
            raise ValueError(f"{data} has no column {name!r}; give the number seen, --observed.")
        observed = float(table.numbers(name)[row - 1])
    if regressor.columns_ is None:
        raise ValueError(f"{model} was fitted on texts, not on a table; use Python.")
    given = table.frame().iloc[[row - 1]]
    options: dict[str, Any] = {"target": name, "level": level, "semantics": semantics}
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
    regressor = _loaded(model, None, device).set_params(verbose=False)
    place = Path(model).resolve()
    output = place.with_name(f"{place.name}-report")
    if data is None:
        return write_regressor_report(regressor, output, place.name)
    names = list(targets) or list(regressor.targets_)
    frame = _typed_rows(read_table(data, **dialect), names, (), None)
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
    table = read_table(data, **dialect)
    predictor = _Predictor(_loaded(model, cache, device), level, calibrated)
    predicted = predictor(table)
    if not predictor.beyond:
        del predicted[BEYOND]
    predictor.warn_beyond()
    return PredictedTable(table, predicted)


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
    for table in read_blocks(data, rows, **dialect):
        yield PredictedTable(table, predictor(table))
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

    def __call__(self, table: Table) -> dict[str, NDArray[Any]]:
        names = [f"{name}_{suffix}" for name in self.regressor.targets_ for suffix in SUFFIXES]
        if taken := [name for name in (*names, BEYOND) if name in table.columns]:
            raise ValueError(
                f"{table.path} has a column {taken[0]!r} already; rename or remove it."
            )
        frame = table.frame()
        predicted = _predict(self.regressor, frame, self.level, self.calibrated)
        columns = predicted.reshape(len(names), len(table))
        notes = self.regressor.beyond_training(frame)
        outside = [row for row, note in enumerate(notes) if note]
        if outside and not self.beyond:
            self.example = f"{name_rows(outside[:1], frame.index)}: {notes[outside[0]]}"
        self.rows, self.beyond = self.rows + len(table), self.beyond + len(outside)
        found: dict[str, NDArray[Any]] = dict(zip(names, columns, strict=True))
        return found | {BEYOND: np.array(notes, dtype=object)}

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


def _used_columns(
    frame: Any,
    targets: Sequence[str],
    columns: Sequence[str],
    roles: Sequence[str],
    settings: Mapping[str, Any],
) -> list[str]:
    """The columns to learn from, and the targets."""
    if columns:
        texts = text_names(settings.get("text"))
        return [*dict.fromkeys([*columns, *texts]), *targets]
    return [*_all_but_ids(frame, [*targets, *roles], settings), *targets]


def _split(
    frame: Any, order: NDArray[np.int64], group: str | None, time: str | None, count: int = 0
) -> tuple[Any, Any]:
    """(training, held-out) rows, of which the latter are at least `count`: the first of `order`,
    whole groups in that order, or the latest. Training rows are then in the order of time."""
    if time is not None:
        order = _by_time(frame[time], time)[::-1]
    elif group is not None:
        order = _by_group(frame[group], order)
    held_out, training = frame.iloc[order[:count]], frame.iloc[order[count:]]
    if group is not None:  # a group is held out as a whole
        is_split = training[group].isin(held_out[group]).to_numpy()
        held_out, training = frame.iloc[order[: count + is_split.sum()]], training[~is_split]
    return training if time is None else training.iloc[::-1], held_out


def _by_time(column: Any, name: str) -> NDArray[np.int64]:
    """The rows from the earliest to the latest."""
    times = to_numbers(column)
    if not np.isfinite(times).all():
        where = name_rows(np.flatnonzero(~np.isfinite(times)), column.index)
        raise ValueError(f"{where}: {name} is no date and no number; --time needs one in each row.")
    return np.argsort(times, kind="stable")


def _by_group(column: Any, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows by group, the groups in the order in which they first occur in `order`."""
    groups = column.astype(str).to_numpy()[order]
    if len(np.unique(groups)) < 2:
        raise ValueError(f"column {column.name!r} has one group; --group needs at least two.")
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    return order[np.argsort(first[group], kind="stable")]


def _truth(frame: Any, name: str) -> NDArray[np.bool_]:
    """A column of truth values: true, yes, 1; false, no, 0; an empty cell is false."""
    found = []
    for place, cell in enumerate(frame[name].tolist()):
        text = "" if cell is None or cell != cell else str(cell).strip().lower()
        if text not in TRUE + FALSE:
            where = name_rows([place], frame.index)
            raise ValueError(f"{where}: {name} is {cell!r}; write yes or no, true or false.")
        found.append(text in TRUE)
    return np.array(found)


def _all_but_ids(frame: Any, without: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
    """The columns to learn from; a warning names the identifiers that are left out."""
    names = [name for name in frame.columns if name not in without]
    wanted, template = set(text_names(settings.get("text"))), settings.get("template")
    if template is not None:
        wanted |= set(template_columns(template, ()))
    ids = [name for name in id_like(frame[names]) if name not in wanted]
    if not ids or len(ids) == len(names):
        return names
    listed = ", ".join(map(repr, ids))
    columns_are = counted(len(ids), "column that names rows is", "columns that name rows are")
    warnings.warn(
        f"{columns_are} left out: {listed}; use --column to learn from one.", stacklevel=3
    )
    return [name for name in names if name not in ids]


def _typed_rows(
    table: Table,
    targets: Sequence[str],
    columns: Sequence[str],
    weight: str | None,
    roles: Sequence[str] = (),
) -> Any:
    """Typed values of the rows whose targets are finite numbers; a warning shows the others."""
    require_columns(frame := table.frame(targets), [*targets, *columns, *roles])
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
    median, interval, _ = regressor.predict_numbers(frame, [level], calibrated=calibrated)
    bounds = interval[..., 0, 0], interval[..., 0, 1]
    return np.stack([part.reshape(len(frame), -1).T for part in (median, *bounds)], 1)


def _measure(regressor: Any, held_out: Any, targets: Sequence[str]) -> dict[str, dict[str, float]]:
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
    error = truth - median
    spread = ((truth - truth.mean()) ** 2).sum()
    return {
        "mdae": float(np.median(np.abs(error))),
        "mae": float(np.abs(error).mean()),
        "r2": float(1 - (error**2).sum() / spread) if spread else float("nan"),
        "raw_coverage_90": float(is_inside.mean()),
    }


def _findings(regressor: CausalTextRegressor) -> dict[str, Any]:
    """Per target: the shares of sources, median errors of every method on unseen rows ("together"
    is ours), and the method with the smallest one."""
    if regressor.source_ is None:
        return {"sources": {}, "errors": {}, "best": {}}
    errors = {name: evidence.errors() for name, evidence in regressor.evidence_.items()}
    best = {name: min(one, key=lambda method: one[method]) for name, one in errors.items()}
    return {"sources": regressor.shares(), "errors": errors, "best": best}
