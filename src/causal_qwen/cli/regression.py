"""Regression: fit, predict, audit and what-if, on tables."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from causal_qwen.cli import options as opt
from causal_qwen.conversion.location import unless_embedded
from causal_qwen.outputs import (
    check_not_inside,
    check_output_directory,
    check_output_file,
    whole_file,
)
from causal_qwen.terminal import counted, print_json, print_table

Sources = Annotated[
    list[str] | None,
    Option(
        "--source",
        help="columns, words, kernel, boosting or model; repeatable. Default: by cross-validation.",
    ),
]
Data = Annotated[str, Argument(help="A CSV, parquet, .xlsx or JSON file.", callback=opt.given)]
Targets = Annotated[list[str], Option("--target", "-y", help="A column to predict; repeatable.")]
Texts = Annotated[list[str] | None, Option(help="A free-text column; repeatable.")]
Columns = Annotated[
    list[str] | None, Option(help="A column to learn from; repeatable. Default: all but ids.")
]
Group = Annotated[str | None, Option(help="A column: equal values stay together in every split.")]
Time = Annotated[str | None, Option(help="A column: later rows test what earlier ones taught.")]
Fitted = Annotated[str, Argument(help="The output of `fit`.", callback=opt.given)]
NewData = Annotated[str, Argument(help="A file with the same columns.", callback=opt.given)]
Output = Annotated[
    Path | None,
    Option(
        "--output",
        "-o",
        help="A file: .parquet, .xlsx, .jsonl, .json, else CSV. Default: on stdout.",
        callback=opt.writable,
    ),
]
Level = Annotated[float, Option(help="Level of the interval, 0 to 1.")]
ENDS = ("predicted", "low", "high")  # of the predicted columns' names
BEYOND = "beyond_training"  # a column of distances from the training range, if there are any
SHOWN_ROWS = 15  # of an audit
FILE = ("separator", "encoding", "decimal")  # settings of a text file
LEARNING = (*FILE, "cache", "dtype", "folds", "max_length", "seed", "verbose")
AUDITING = (*LEARNING, "device", "model")


def fit(
    data: Data,
    target: Targets,
    output: Annotated[
        str, Option("--output", "-o", help="The directory to create.", callback=opt.given)
    ],
    text: Texts = None,
    column: Columns = None,
    source: Sources = None,
    weight: Annotated[str | None, Option(help="The column of row weights.")] = None,
    group: Group = None,
    time: Time = None,
    model: opt.ModelName = "",
    device: opt.Device = "auto",
    settings: opt.TableSettings = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Learn to predict numbers from the rows of a table, with calibrated intervals.

    Example: causal-qwen fit rings.csv --target price --text description --output priced
    """
    check_output_directory(output, force)
    check_not_inside(output, data, *([model] if model else []))
    given = opt.parse_settings(settings, LEARNING)
    from causal_qwen.regression.csv_io import learn

    options: dict[str, Any] = {"text": text, "columns": column, "sources": source, "group": group}
    options |= {"time": time, "weight": weight, "model": unless_embedded(model), "device": device}
    with _noted() as notes:
        regressor = learn(data, target, **options, **given)
    regressor.save(output, overwrite=force)
    if as_json:
        found = {"sources": regressor.shares(), "errors": regressor.errors(), "notes": notes}
        print_json({"rows": regressor.rows_, **found})
    else:
        typer.echo(f"{regressor.summary()}\n{output}: {counted(regressor.rows_, 'row')}")


def predict(
    fitted: Fitted,
    data: NewData,
    device: opt.Device = "auto",
    output: Output = None,
    level: Level = 0.9,
    settings: opt.TableSettings = None,
    force: opt.ForceFile = False,
    as_json: opt.Json = False,
) -> None:
    """Predict a median and an interval for every row of a table.

    Example: causal-qwen predict priced more-rings.csv --level 0.8 --output answers.csv
    """
    dialect = opt.parse_settings(settings, FILE)
    import numpy as np

    from causal_qwen.regression.regressor import CausalTextRegressor
    from causal_qwen.tables.files import read_table, write_table

    if output is not None:
        check_output_file(output, force, data)
    regressor, table = CausalTextRegressor.load(fitted, device=device), read_table(data, **dialect)
    names = [f"{name}_{end}" for name in regressor.targets_ for end in ENDS]
    if taken := [name for name in (*names, BEYOND) if name in table.cells]:
        raise ValueError(f"{data} has a column {taken[0]!r} already; rename it.")
    with _noted():
        frame = table.frame()
        median, bounds, _ = regressor.predict_numbers(frame, [level])
    numbers = np.stack([median, bounds[..., 0, 0], bounds[..., 0, 1]], -1)
    found: dict[str, Any] = dict(zip(names, numbers.reshape(len(frame), -1).T, strict=True))
    if (beyond := regressor.beyond_training(frame)).any():
        found[BEYOND] = beyond
    table = replace(table, cells=table.cells.assign(**found))
    if output is not None:
        with whole_file(output, force) as partial:
            write_table(table, partial, output)
        if as_json:
            print_json({"output": str(output), "rows": len(table.cells)})
    elif as_json:
        print_json(table.records())
    else:
        typer.echo(table.csv(), nl=False)  # bytes: whatever the terminal's encoding


def audit(
    data: Data,
    target: Targets,
    output: Output = None,
    text: Texts = None,
    column: Columns = None,
    source: Sources = None,
    group: Group = None,
    time: Time = None,
    settings: opt.TableSettings = None,
    force: opt.ForceFile = False,
    as_json: opt.Json = False,
) -> None:
    """List the rows whose numbers look wrong, with the number that the other rows suggest.

    Example: causal-qwen audit rings.csv --target price --output suspicious.csv
    """
    given = opt.parse_settings(settings, AUDITING)
    from causal_qwen.regression.audit import doubtful, summary
    from causal_qwen.regression.csv_io import learn
    from causal_qwen.tables.files import Table, write_table

    if output is not None:
        check_output_file(output, force, data)
    options: dict[str, Any] = {
        "text": text,
        "columns": column,
        "sources": source,
        "group": group,
        "time": time,
    }
    with _noted():
        table = learn(data, target, **options, **given).suspicious()
    if output is not None:
        with whole_file(output, force) as partial:
            write_table(Table(str(data), table), partial, output)
    shown = table.head(SHOWN_ROWS)
    if as_json:
        worst = shown.to_dict(orient="records")
        print_json({"rows": len(table), "doubtful": doubtful(table), "worst": worst})
    else:
        print_table(summary(table), list(shown), shown.to_numpy().tolist())


def what_if(
    fitted: Fitted,
    data: NewData,
    row: Annotated[int, Option(help="A row of the file, counted from 1.", min=1)] = 1,
    edits: Annotated[
        list[str] | None,
        Option(
            "--set",
            help="A column and its other value, e.g. carat=1.0; or a setting of the file: "
            "separator, encoding, decimal. Repeatable.",
        ),
    ] = None,
    observed: Annotated[
        float | None, Option(help="The number that was seen. Default: the row's own target.")
    ] = None,
    target: Annotated[
        str | None, Option("--target", "-y", help="The target, if there are several.")
    ] = None,
    level: Level = 0.9,
    semantics: Annotated[
        Literal["pearl", "disco"],
        Option(help="Keep all noise, or draw exogenous noise again."),
    ] = "disco",
    device: opt.Device = "auto",
    as_json: opt.Json = False,
) -> None:
    """Ask what a row's number would have been, had a column been different.

    Example: causal-qwen what-if priced rings.csv --row 3 --observed 2835 --set carat=1.0
    """
    from causal_qwen.regression.regressor import CausalTextRegressor
    from causal_qwen.tables.cells import read_cell
    from causal_qwen.tables.files import read_table

    changes = dict(edit.partition("=")[::2] for edit in edits or ())
    regressor = CausalTextRegressor.load(fitted, device=device)
    known = set(regressor.columns_ or ())
    dialect = {name: changes.pop(name) for name in FILE if name in changes and name not in known}
    with _noted():
        table = read_table(data, **dialect)
        if row > len(table.cells):
            raise ValueError(f"row {row} is not in {data}, which has rows 1 to {len(table.cells)}.")
        name = regressor.target_name(target)
        if observed is None:
            if name not in table.cells:
                raise ValueError(
                    f"{data} has no column {name!r}; give the number seen, --observed."
                )
            observed = float(table.numbers(name)[row - 1])
        found = regressor.counterfactual(
            table.frame().iloc[[row - 1]],
            observed,
            {name: read_cell(cell.strip(), table.decimal) for name, cell in changes.items()},
            target=name,
            level=level,
            semantics=semantics,
        )
    if as_json:
        print_json(found.record())
    else:
        typer.echo(repr(found))


@contextmanager
def _noted() -> Iterator[list[str]]:
    """Print the warnings of a block, each once, as notes on stderr; they are known at its end."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    notes += dict.fromkeys(str(one.message) for one in caught)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
