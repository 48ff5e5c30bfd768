"""Files of tables -> a saved regressor; a file -> the same with predictions beside its columns.

    report = fit_csv("diamonds.csv", ["price"], "priced")
    table = predict_csv("priced", "more.csv", level=0.9)

Used by `causal-qwen fit`, `audit`, `predict`, `what-if` and `report`. `dialect` are the
`separator`, `encoding` and `decimal` of a text file, if they cannot be found.
"""

from __future__ import annotations

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
from causal_qwen.regression.conformal import LEVEL
from causal_qwen.regression.regressor import CausalTextRegressor, to_seed
from causal_qwen.regression.report import write_regressor_report
from causal_qwen.regression.whatif import NumberCounterfactual
from causal_qwen.tables.cells import read_cell
from causal_qwen.tables.files import File, Table, read_table
from causal_qwen.tables.frames import listed, name_rows, require_columns, to_numbers
from causal_qwen.terminal import counted

NUMBERS = "write numbers as 1870.5, without units"
ENDS = ("predicted", "low", "high")  # of the predicted columns' names
BEYOND = "beyond_training"  # a column of notes on rows outside of the training range
HELD_OUT = 0.2  # share of rows, where a regressor is not calibrated by cross-validation
DIALECT = ("separator", "encoding", "decimal")
ROLES = ("weight", "group", "time")


@contextmanager
def noted() -> Iterator[list[str]]:
    """The warnings of a block, each once; they are known at its end."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    notes += dict.fromkeys(str(one.message) for one in caught)


def fit_csv(
    data: File,
    targets: Sequence[str],
    output: File,
    *,
    calibration: float | None = None,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Fit, calibrate and save a regressor; returns row counts, metrics and notes.

    Errors are measured and intervals calibrated by cross-validation; or on a share of rows,
    `calibration`, that is held out. None holds out a fifth where `fit` does not cross-validate.
    `settings` are those of `CausalTextRegressor` and of the file, and `columns`, `weight`, `group`
    and `time` (see `_learn`).
    """
    check_output_directory(output, overwrite)
    model = settings.get("model")
    check_not_inside(output, data, *([model] if isinstance(model, str | Path) else []))
    judged = None
    with noted() as notes:
        regressor, training, held_out = _learn(data, targets, calibration, settings)
        if len(held_out):
            judged = regressor.suspicious(held_out, list(targets))
            regressor.calibrate(held_out, list(targets))
        elif regressor.source_ is not None:
            judged = regressor.suspicious()
    regressor.save(output, overwrite=overwrite)
    errors = {name: found.errors() for name, found in getattr(regressor, "evidence_", {}).items()}
    return {
        "summary": regressor.summary(),
        "rows": len(training),
        "calibration_rows": len(held_out),
        "targets": {} if judged is None else {name: _metrics(judged, name) for name in targets},
        "sources": regressor.shares() if errors else {},
        "errors": errors,  # median, of every method on unseen rows; ours is "together"
        "best": {name: min(one, key=lambda method: one[method]) for name, one in errors.items()},
        "notes": notes,
    }


def audit_csv(data: File, targets: Sequence[str], **settings: Any) -> tuple[Any, list[str]]:
    """The rows of a file by the credibility of their labels (`audit`), and notes. `group` and
    `time` split the rows as in `fit_csv`: a label is judged by other groups, or by earlier rows."""
    if list(settings.get("sources") or ()) == ["model"]:
        raise ValueError("an audit cross-validates; give another source beside the model.")
    with noted() as notes:
        regressor, _, _ = _learn(data, targets, 0.0, settings)
    return regressor.suspicious(), notes


def predict_csv(
    model: File,
    data: File,
    *,
    level: float = LEVEL,
    calibrated: bool | None = None,
    cache: bool | None = None,
    device: str = "auto",
    **dialect: str | None,
) -> Table:
    """A file with a median and an interval beside it for every target. If some rows have numbers
    outside of the training range, the column `beyond_training` names these."""
    regressor = CausalTextRegressor.load(model, device=device)
    regressor.set_params(cache=regressor.cache if cache is None else cache)
    table = read_table(data, **dialect)
    names = [f"{name}_{end}" for name in regressor.targets_ for end in ENDS]
    if taken := [name for name in (*names, BEYOND) if name in table.cells]:
        raise ValueError(f"{data} has a column {taken[0]!r} already; rename it.")
    frame = table.frame()
    median, bounds, _ = regressor.predict_numbers(frame, [level], calibrated=calibrated)
    numbers = np.stack([median, bounds[..., 0, 0], bounds[..., 0, 1]], -1)
    found: dict[str, Any] = dict(zip(names, numbers.reshape(len(frame), -1).T, strict=True))
    notes = np.array(regressor.beyond_training(frame), dtype=object)
    if len(marked := np.flatnonzero(notes)):
        found[BEYOND] = notes
        where = f"{name_rows(marked[:1], frame.index)}: {notes[marked[0]]}"
        warnings.warn(
            f"{counted(len(marked), 'row has', 'rows have')} numbers beyond the training range, of "
            f"{len(table)}, and wider intervals ({where}).",
            stacklevel=2,
        )
    return table.beside(**found)


def what_if_csv(
    model: File,
    data: File,
    row: int,
    edits: Mapping[str, str],
    *,
    observed: float | None = None,
    target: str | None = None,
    device: str = "auto",
    **question: Any,
) -> NumberCounterfactual:
    """A counterfactual of one row of a file, counted from 1; `observed` is its own target if it
    has one. `edits` are cells as the file would have them; `separator`, `encoding` and `decimal`
    are settings of the file, unless they are columns of the regressor."""
    regressor = CausalTextRegressor.load(model, device=device)
    known = set(regressor.columns_ or ())
    dialect = {name: edits[name] for name in DIALECT if name in edits and name not in known}
    table = read_table(data, **dialect)
    changes = {
        name: read_cell(cell, table.decimal) for name, cell in edits.items() if name not in dialect
    }
    if not 1 <= row <= len(table):
        raise ValueError(f"row {row} is not in {data}, which has rows 1 to {len(table)}.")
    name = regressor.target_name(target)
    if observed is None:
        if name not in table.cells:
            raise ValueError(f"{data} has no column {name!r}; give the number seen, --observed.")
        observed = float(table.numbers(name)[row - 1])
    given = table.frame().iloc[[row - 1]]
    return regressor.counterfactual(given, observed, changes, target=name, **question)


def report_csv(
    model: File,
    data: File | None = None,
    targets: str | Sequence[str] = (),
    device: str = "auto",
    **dialect: str | None,
) -> Path:
    """Pictures of a saved regressor (`report`), in the directory MODEL-report; returns the page.

    `data` has rows that `fit` has not seen; `targets` are its columns, in the order of `fit`.
    """
    if data is None:
        raise ValueError("a regressor's report needs rows: causal-qwen report FITTED DATA.")
    regressor = CausalTextRegressor.load(model, device=device).set_params(verbose=False)
    place = Path(model).resolve()
    names = listed(targets) or list(regressor.targets_)
    frame = _typed_rows(read_table(data, **dialect), names)
    output = place.with_name(f"{place.name}-report")
    return write_regressor_report(regressor, output, place.name, frame, names)


# ---------------------------------------------------------------- rows


def _learn(
    data: File, targets: Sequence[str], calibration: float | None, settings: Mapping[str, Any]
) -> tuple[CausalTextRegressor, Any, Any]:
    """A fitted regressor, its training rows and those held out.

    `columns` are those to learn from (by default all but identifiers, which a note names). `weight`
    names a column of row weights, `group` one whose rows stay on one side of every split, `time`
    one by which rows are ordered, so that later rows test earlier ones. None of these is learned
    from unless it is in `columns`.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    dialect = {name: given.pop(name) for name in DIALECT if name in given}
    roles = {name: given.pop(name) for name in ROLES if name in given}
    group, time, weight = (roles.get(name) for name in ("group", "time", "weight"))
    columns, seed = list(given.pop("columns", ())), to_seed(given.pop("seed", 0))
    resolve_device(given.get("device", "auto"))  # before the work
    if group is not None and time is not None:
        raise ValueError("group and time both decide the splits; give one of them.")
    splitter = None if time is None else TimeSeriesSplit()
    regressor = CausalTextRegressor(
        columns=columns or None, cv=splitter, random_state=seed, **given
    )
    if calibration is None:
        calibration = HELD_OUT if regressor.reads_sentences() else 0.0
    if not 0 <= calibration < 1:
        raise ValueError(f"calibration={calibration} is no share of the rows; give 0 to 0.9.")
    frame = _typed_rows(read_table(data, **dialect), targets, [*columns, *roles.values()], weight)
    used = columns or [name for name in frame if name not in (*targets, *roles.values())]
    order = np.random.default_rng(seed).permutation(len(frame))
    training, held_out = _split(frame, order, group, time, round(len(frame) * calibration))
    regressor.fit(
        training[list(dict.fromkeys([*used, *listed(regressor.text), *targets]))],
        targets[0] if len(targets) == 1 else list(targets),
        sample_weight=training[weight] if weight else None,
        groups=training[group].astype(str).to_numpy() if group else None,
    )
    return regressor, training, held_out


def _split(
    frame: Any, order: NDArray[np.int64], group: str | None, time: str | None, count: int
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


def _typed_rows(
    table: Table,
    targets: Sequence[str],
    columns: Sequence[str] = (),
    weight: str | None = None,
) -> Any:
    """Typed values of the rows whose targets are finite numbers; a warning shows the others."""
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
        frame[weight] = table.numbers(weight)
    return frame[is_usable]


def _metrics(judged: Any, target: str) -> dict[str, float]:
    """Errors of rows that the experts have not seen, in a table of `audit`."""
    rows = judged[judged["target"] == target] if "target" in judged else judged
    errors = (rows["label"] - rows["expected"]).abs()
    r2 = r2_score(rows["label"], rows["expected"]) if np.ptp(rows["label"]) else np.nan
    return {"mdae": float(errors.median()), "mae": float(errors.mean()), "r2": float(r2)}
