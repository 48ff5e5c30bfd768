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
from sklearn.model_selection import TimeSeriesSplit

from causal_qwen.conversion.placement import resolve_device
from causal_qwen.outputs import check_not_inside, check_output_directory
from causal_qwen.regression.conformal import LEVEL
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.regression.report import write_regressor_report
from causal_qwen.regression.whatif import NumberCounterfactual
from causal_qwen.tables.cells import read_cell
from causal_qwen.tables.files import File, Table, read_table
from causal_qwen.tables.frames import listed, name_rows, require_columns, to_numbers
from causal_qwen.terminal import counted

NUMBERS = "write numbers as 1870.5, without units"
ENDS = ("predicted", "low", "high")  # of the predicted columns' names
BEYOND = "beyond_training"  # a column of notes on rows outside of the training range
DIALECT = ("separator", "encoding", "decimal")


@contextmanager
def noted() -> Iterator[list[str]]:
    """The warnings of a block, each once; they are known at its end."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    notes += dict.fromkeys(str(one.message) for one in caught)


def fit_csv(
    data: File, targets: Sequence[str], output: File, *, overwrite: bool = False, **settings: Any
) -> dict[str, Any]:
    """Fit and save a regressor; returns the number of rows, shares and errors by cross-validation,
    and notes. `settings` are those of `_learn`."""
    check_output_directory(output, overwrite)
    model = settings.get("model")
    check_not_inside(output, data, *([model] if isinstance(model, str | Path) else []))
    with noted() as notes:
        regressor = _learn(data, targets, **settings)
    regressor.save(output, overwrite=overwrite)
    return {
        "summary": regressor.summary(),
        "rows": len(regressor.rows_),
        "sources": regressor.shares(),
        # the median error of every method on unseen rows; ours is "together"
        "errors": {name: found.errors() for name, found in regressor.evidence_.items()},
        "notes": notes,
    }


def audit_csv(data: File, targets: Sequence[str], **settings: Any) -> tuple[Any, list[str]]:
    """The rows of a file by the credibility of their labels (`audit`), and notes. `group` and
    `time` split the rows as in `fit_csv`: a label is judged by other groups, or by earlier rows."""
    with noted() as notes:
        regressor = _learn(data, targets, **settings)
    return regressor.suspicious(), notes


def predict_csv(
    model: File,
    data: File,
    *,
    level: float = LEVEL,
    device: str = "auto",
    **dialect: str | None,
) -> Table:
    """A file with a median and an interval beside it for every target. If some rows have numbers
    outside of the training range, the column `beyond_training` names these."""
    regressor, table = CausalTextRegressor.load(model, device=device), read_table(data, **dialect)
    names = [f"{name}_{end}" for name in regressor.targets_ for end in ENDS]
    if taken := [name for name in (*names, BEYOND) if name in table.cells]:
        raise ValueError(f"{data} has a column {taken[0]!r} already; rename it.")
    frame = table.frame()
    median, bounds, _ = regressor.predict_numbers(frame, [level])
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


def report_csv(model: File, data: File, device: str = "auto", **dialect: str | None) -> Path:
    """Pictures of a saved regressor (`report`), in the directory MODEL-report; returns the page.

    `data` has rows that `fit` has not seen, with the targets.
    """
    regressor = CausalTextRegressor.load(model, device=device).set_params(verbose=False)
    place, names = Path(model).resolve(), list(regressor.targets_)
    frame = _typed_rows(read_table(data, **dialect), names)
    output = place.with_name(f"{place.name}-report")
    return write_regressor_report(regressor, output, place.name, frame, names)


# ---------------------------------------------------------------- rows


def _learn(
    data: File,
    targets: Sequence[str],
    *,
    columns: Sequence[str] | None = None,
    weight: str | None = None,
    group: str | None = None,
    time: str | None = None,
    seed: int = 0,
    **settings: Any,
) -> CausalTextRegressor:
    """A fitted regressor. `settings` are those of `CausalTextRegressor` and of the file.

    `columns` are those to learn from (by default all but identifiers, which a note names). `weight`
    names a column of row weights, `group` one whose rows stay on one side of every split, `time`
    one by which rows are ordered, so that later rows test earlier ones. None of these is learned
    from unless it is in `columns`.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    dialect = {name: given.pop(name) for name in DIALECT if name in given}
    resolve_device(given.get("device", "auto"))  # before the work
    if group is not None and time is not None:
        raise ValueError("group and time both decide the splits; give one of them.")
    splitter = None if time is None else TimeSeriesSplit()
    regressor = CausalTextRegressor(columns=columns, cv=splitter, random_state=seed, **given)
    roles = [name for name in (weight, group, time) if name is not None]
    table = read_table(data, **dialect)
    frame = _typed_rows(table, targets, [*(columns or ()), *roles])
    frame = frame if time is None else frame.iloc[_order(frame, time)]
    used = columns or [name for name in frame if name not in (*targets, *roles)]
    return regressor.fit(
        frame[list(dict.fromkeys([*used, *listed(regressor.text), *targets]))],
        targets[0] if len(targets) == 1 else list(targets),
        sample_weight=None if weight is None else to_numbers(frame[weight]),
        groups=None if group is None else frame[group].astype(str).to_numpy(),
    )


def _order(frame: Any, time: str) -> NDArray[np.int64]:
    """The rows in the order of time."""
    times = to_numbers(frame[time])
    if not np.isfinite(times).all():
        where = name_rows(np.flatnonzero(~np.isfinite(times)), frame.index)
        raise ValueError(f"{where}: {time} is no date and no number; --time needs one.")
    return np.argsort(times, kind="stable")


def _typed_rows(table: Table, targets: Sequence[str], columns: Sequence[str] = ()) -> Any:
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
    return frame[is_usable]
