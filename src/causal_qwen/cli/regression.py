"""Regression: fit, predict, audit and what-if, on tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from causal_qwen.cli import options as opt
from causal_qwen.conversion.location import unless_embedded
from causal_qwen.outputs import check_output_directory, check_output_file, whole_file
from causal_qwen.terminal import counted, print_json, print_table

Sources = Annotated[
    list[str] | None,
    Option(
        "--source",
        help="columns, words, kernel, boosting or model; repeatable. Default: by cross-validation.",
    ),
]
Data = Annotated[
    str, Argument(help="A CSV, parquet, .xlsx or JSON file with a header.", callback=opt.given)
]
Targets = Annotated[list[str], Option("--target", "-y", help="A column to predict; repeatable.")]
Texts = Annotated[list[str] | None, Option(help="A free-text column; repeatable.")]
Columns = Annotated[
    list[str] | None,
    Option(help="A column to learn from; repeatable. Default: all but identifiers."),
]
Group = Annotated[
    str | None, Option(help="A column whose equal values stay together in every split.")
]
Time = Annotated[
    str | None, Option(help="A column of times: later rows test what earlier ones taught.")
]
Fitted = Annotated[str, Argument(help="The output of `fit`.", callback=opt.given)]
NewData = Annotated[str, Argument(help="A file with the same columns.", callback=opt.given)]
Level = Annotated[float, Option(help="Level of the interval, 0 to 1.")]
SHOWN_ROWS = 15  # of an audit
FILE = ("separator", "encoding", "decimal")  # settings of a text file
LEARNING = (*FILE, "cache", "dtype", "folds", "max_length", "seed", "support", "verbose")
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
    given = opt.parse_settings(settings, LEARNING)
    from causal_qwen.regression.csv_io import fit_csv

    report = fit_csv(
        data,
        target,
        output,
        overwrite=force,
        text=text,
        columns=column,
        sources=source,
        weight=weight,
        group=group,
        time=time,
        model=unless_embedded(model),
        device=device,
        **given,
    )
    if as_json:
        print_json(report)
        return
    if given.get("verbose") is not False:
        _print_notes(report["notes"])
    typer.echo(report["summary"])
    typer.echo(f"{output}: {counted(report['rows'], 'row')}")


def predict(
    fitted: Fitted,
    data: NewData,
    device: opt.Device = "auto",
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            help="A file: .parquet, .xlsx, .jsonl, .json, else CSV. Default: CSV on stdout.",
            callback=opt.writable,
        ),
    ] = None,
    level: Level = 0.9,
    settings: opt.TableSettings = None,
    force: opt.ForceFile = False,
    as_json: opt.Json = False,
) -> None:
    """Predict a median and an interval for every row of a table.

    Example: causal-qwen predict priced more-rings.csv --level 0.8 --output answers.csv
    """
    given = opt.parse_settings(settings, FILE)
    from causal_qwen.regression.csv_io import predict_csv
    from causal_qwen.tables.files import write_table

    if output is not None:
        check_output_file(output, force, data)
    with _noted():
        table = predict_csv(fitted, data, level=level, device=device, **given)
    if output is not None:
        with whole_file(output, force) as partial:
            write_table(table, partial, output)
        if as_json:
            print_json({"output": str(output), "rows": len(table)})
    elif as_json:
        print_json(table.records())
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(table.csv())  # bytes: whatever the terminal's encoding
        sys.stdout.buffer.flush()


def audit(
    data: Data,
    target: Targets,
    output: Annotated[
        Path | None,
        Option("--output", "-o", help="A file, as of `predict`.", callback=opt.writable),
    ] = None,
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
    from causal_qwen.regression.csv_io import audit_csv
    from causal_qwen.tables.files import Table, write_table

    if output is not None:
        check_output_file(output, force, data)
    options = {"text": text, "columns": column, "sources": source, "group": group, "time": time}
    table, notes = audit_csv(data, target, **options, **given)
    if output is not None:
        with whole_file(output, force) as partial:
            write_table(Table(str(data), table), partial, output)
    if as_json:
        worst = table.head(SHOWN_ROWS).to_dict(orient="records")
        print_json({"rows": len(table), "doubtful": doubtful(table), "worst": worst})
        return
    _print_notes([] if given.get("verbose") is False else notes)
    shown = table.head(max(SHOWN_ROWS, min(doubtful(table), 2 * SHOWN_ROWS)))
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
    from causal_qwen.regression.csv_io import what_if_csv

    pairs = [edit.partition("=") for edit in edits or ()]
    for name, _, value in pairs:
        if not (name and value.strip()):
            raise ValueError(f"{name!r} is no column with a value; write --set carat=1.0.")
    changes = {name: value.strip() for name, _, value in pairs}
    options: dict[str, Any] = {"observed": observed, "target": target, "device": device}
    with _noted():
        found = what_if_csv(fitted, data, row, changes, level=level, semantics=semantics, **options)
    if as_json:
        print_json(found.record())
    else:
        typer.echo(repr(found))


@contextmanager
def _noted() -> Iterator[None]:
    """Print every warning once, as a note on stderr."""
    from causal_qwen.regression.csv_io import noted

    with noted() as notes:
        yield
    _print_notes(notes)


def _print_notes(notes: list[str]) -> None:
    for note in notes:
        typer.echo(f"note: {note}", err=True)
