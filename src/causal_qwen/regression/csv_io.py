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
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.regression.report import write_regressor_report
from causal_qwen.regression.sentences import template_columns, text_names
from causal_qwen.regression.whatif import NumberCounterfactual
from causal_qwen.tables.csv_table import open_output
from causal_qwen.tables.files import (
    Table,
    csv_lines,
    predicted_frame,
    read_blocks,
    read_table,
    records,
    table_kind,
    text_encoding,
    write_typed,
)
from causal_qwen.tables.frames import id_like, to_numbers
from causal_qwen.tables.rows import name_rows, require_columns
from causal_qwen.tables.targets import check_target_names
from causal_qwen.terminal import counted

LEVEL = 0.9
SUFFIXES = ("predicted", "low", "high")  # of the predicted columns' names
NUMBERS = "write numbers as 1870.5, without units"
BEYOND = "beyond_training"  # a column of notes on rows outside of the training range
HELD_OUT = 0.2  # share of rows, where a regressor is not calibrated by cross-validation
TRUE, FALSE = ("true", "yes", "y", "1", "1.0"), ("false", "no", "n", "0", "0.0", "")


def fit_csv(
    data: str | os.PathLike[str],
    targets: Sequence[str],
    output: str | os.PathLike[str],
    *,
    columns: Sequence[str] = (),
    weight: str | None = None,
    group: str | None = None,
    time: str | None = None,
    trusted: str | None = None,
    calibration: float | None = None,
    overwrite: bool = False,
    seed: int = 0,
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Fit, calibrate and save a regressor; returns row counts, metrics and notes.

    Errors are measured and intervals calibrated by cross-validation; or on a share of rows,
    `calibration`, that is held out. None holds out a fifth where `fit` does not cross-validate.

    `columns` are those to learn from (by default all but identifiers, which a note names). `weight`
    names a column of row weights, `group` one whose rows stay on one side of every split, `time`
    one by which rows are ordered, so that later rows test earlier ones, `trusted` one that marks
    rows whose labels are right, the only ones that calibrate. None of them is learned from unless
    it is in `columns`. `settings` are those of `CausalTextRegressor`; `separator`, `encoding` and
    `decimal` are a text file's, if they cannot be found.
    """
    if calibration is not None and not 0 <= calibration < 1:
        raise ValueError(f"calibration={calibration} must be a share of rows, 0 to below 1.")
    check_target_names(targets)
    check_output_directory(output, overwrite)
    model = settings.get("model")
    check_not_inside(output, data, *([model] if isinstance(model, str | os.PathLike) else []))
    notes: list[str] = []
    regressor = CausalTextRegressor(
        random_state=seed, columns=list(columns) or None, cv=_splitter(group, time), **settings
    )
    roles = [one for one in (weight, group, time, trusted) if one is not None]
    with _collected(notes):
        table = read_table(data, separator=separator, encoding=encoding, decimal=decimal)
        frame = _typed_rows(table, targets, columns, weight, roles)
        used = _used_columns(frame, targets, columns, roles, settings)
        if calibration is None:
            calibration = HELD_OUT if regressor.reads_sentences() else 0.0
        count = round(calibration * len(frame))
        order = np.random.default_rng(seed).permutation(len(frame))
        training, held_out = _split(frame, order, group, time, count)
        names = targets[0] if len(targets) == 1 else list(targets)
        regressor.fit(
            training[used],
            names,
            sample_weight=training[weight] if weight else None,
            groups=training[group].astype(str).to_numpy() if group else None,
        )
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
    regressor.set_params(cv=None)  # it has split the rows, and JSON has no splitters
    regressor.save(output, overwrite=overwrite)
    counts = {"rows": len(training), "calibration_rows": len(held_out)}
    return {**counts, "targets": metrics, **_findings(regressor), "notes": notes}


def audit_csv(
    data: str | os.PathLike[str],
    targets: Sequence[str],
    *,
    columns: Sequence[str] = (),
    group: str | None = None,
    time: str | None = None,
    seed: int = 0,
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
    **settings: Any,
) -> tuple[Any, list[str]]:
    """The rows of a file by the credibility of their labels (`audit`), and notes. `group` and
    `time` split the rows as in `fit_csv`: a label is judged by other groups, or by earlier rows."""
    check_target_names(targets)
    notes: list[str] = []
    regressor = CausalTextRegressor(
        random_state=seed, columns=list(columns) or None, cv=_splitter(group, time), **settings
    )
    if regressor.reads_sentences():
        raise ValueError("an audit cross-validates; give another --source beside the model.")
    roles = [one for one in (group, time) if one is not None]
    with _collected(notes):
        table = read_table(data, separator=separator, encoding=encoding, decimal=decimal)
        frame = _typed_rows(table, targets, columns, None, roles)
        used = _used_columns(frame, targets, columns, roles, settings)
        frame, _ = _split(frame, np.arange(len(frame)), group, time)
        regressor.fit(
            frame[used],
            targets[0] if len(targets) == 1 else list(targets),
            groups=frame[group].astype(str).to_numpy() if group else None,
        )
    return regressor.suspicious(), notes


def _splitter(group: str | None, time: str | None) -> Any:
    """Of rows in the order of `time`; None splits by groups, or at random."""
    if group is not None and time is not None:
        raise ValueError("group and time both decide the splits; give one of them.")
    if time is None:
        return None
    from sklearn.model_selection import TimeSeriesSplit

    return TimeSeriesSplit()


def what_if_csv(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
    row: int,
    changes: Mapping[str, Any],
    *,
    observed: float | None = None,
    target: str | None = None,
    cache: bool | None = None,
    device: str = "auto",
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
    **options: Any,
) -> NumberCounterfactual:
    """A counterfactual of one row of a file, counted from 1; `observed` is its own target if it
    has one. `options` are those of `CausalTextRegressor.counterfactual`."""
    table = read_table(data, separator=separator, encoding=encoding, decimal=decimal)
    if not 1 <= row <= len(table):
        raise ValueError(f"row {row} is not in {data}, which has rows 1 to {len(table)}.")
    regressor = CausalTextRegressor.load(model, device=device)
    if cache is not None:
        regressor.set_params(cache=cache)
    name = regressor.target_name(target)
    if observed is None:
        if name not in table.columns:
            raise ValueError(f"{data} has no column {name!r}; give the number seen, --observed.")
        observed = float(table.numbers(name)[row - 1])
    frame = table.frame()
    given: Any = frame.iloc[[row - 1]]
    if regressor.columns_ is None:
        raise ValueError(f"{model} was fitted on texts, not on a table; use Python.")
    return regressor.counterfactual(given, observed, dict(changes), target=name, **options)


def report_csv(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    targets: Sequence[str] = (),
    device: str = "auto",
    **dialect: str | None,
) -> Path:
    """Pictures of a saved regressor (`report`), in the directory MODEL-report; returns the page.

    `data` has rows that `fit` has not seen; `targets` are its columns, in the order of `fit`;
    `dialect` are the `separator`, `encoding` and `decimal` of a text file.
    """
    regressor = CausalTextRegressor.load(model, device=device)
    regressor.set_params(verbose=False)
    place = Path(model).resolve()
    output = place.with_name(f"{place.name}-report")
    if data is None:
        return write_regressor_report(regressor, output, place.name)
    names = list(targets) or list(regressor.targets_)
    frame = _typed_rows(read_table(data, **dialect), names, (), None)
    y = names[0] if len(names) == 1 else names
    return write_regressor_report(regressor, output, place.name, frame, y)


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
    device: str = "auto",
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
) -> PredictedTable:
    """A file and the columns predicted for it. `cache` replaces the regressor's own setting."""
    table = read_table(data, separator=separator, encoding=encoding, decimal=decimal)
    predictor = _Predictor(model, level, calibrated, cache, device)
    predicted = predictor(table)
    if not predictor.beyond:
        del predicted[BEYOND]
    predictor.warn_beyond()
    return PredictedTable(table, predicted)


def predict_blocks(
    model: str | os.PathLike[str],
    data: str | os.PathLike[str],
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
    predictor = _Predictor(model, level, calibrated, cache, device)
    for table in read_blocks(data, rows, **dialect):
        yield PredictedTable(table, predictor(table))
    predictor.warn_beyond()


class _Predictor:
    """A loaded regressor -> the predicted columns of tables, and what it has seen in them."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        level: float,
        calibrated: bool | None,
        cache: bool | None,
        device: str,
    ) -> None:
        self.regressor = CausalTextRegressor.load(model, device=device)
        if cache is not None:
            self.regressor.set_params(cache=cache)
        self.level, self.calibrated = level, calibrated
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


@dataclass(frozen=True)
class PredictedTable:
    """A file and the columns predicted for it."""

    table: Table
    predicted: dict[str, NDArray[Any]]  # numbers; notes as texts

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
