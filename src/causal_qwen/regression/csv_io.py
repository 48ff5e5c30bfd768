"""Files of tables -> a fitted regressor, for the commands `fit`, `audit` and `report`.

    regressor = learn("diamonds.csv", ["price"], group="shop")

`dialect` are the `separator`, `encoding` and `decimal` of a text file, if they cannot be found.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.model_selection import TimeSeriesSplit

from causal_qwen.conversion.placement import resolve_device
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.tables.files import File, Table, read_table
from causal_qwen.tables.frames import listed, name_rows, require_columns, to_numbers
from causal_qwen.terminal import counted

NUMBERS = "write numbers as 1870.5, without units"
DIALECT = ("separator", "encoding", "decimal")


def learn(
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
    frame = typed_rows(read_table(data, **dialect), targets, [*(columns or ()), *roles])
    if time is not None:
        times = to_numbers(frame[time])
        if len(bad := np.flatnonzero(~np.isfinite(times))):
            where = name_rows(bad, frame.index)
            raise ValueError(f"{where}: {time} is no date and no number; --time needs one.")
        frame = frame.iloc[np.argsort(times, kind="stable")]
    used = columns or [name for name in frame if name not in (*targets, *roles)]
    return regressor.fit(
        frame[list(dict.fromkeys([*used, *listed(regressor.text), *targets]))],
        targets[0] if len(targets) == 1 else list(targets),
        sample_weight=None if weight is None else to_numbers(frame[weight]),
        groups=None if group is None else frame[group].astype(str).to_numpy(),
    )


def typed_rows(table: Table, targets: Sequence[str], columns: Sequence[str] = ()) -> Any:
    """Typed values of the rows whose targets are finite numbers; a warning shows the others."""
    frame = table.frame()
    require_columns(frame, [*targets, *columns])
    is_usable = np.ones(len(frame), dtype=bool)
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
