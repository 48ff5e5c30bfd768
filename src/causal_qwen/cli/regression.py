"""Regression: fit, predict, audit and what-if, on tables; the feature cache."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Context, Option

from causal_qwen.cli import options as opt
from causal_qwen.conversion.location import unless_embedded
from causal_qwen.outputs import check_output_directory, check_output_file, whole_file
from causal_qwen.terminal import print_json, print_table

if TYPE_CHECKING:
    from causal_qwen.tables.files import PredictedTable


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
Quiet = Annotated[bool, Option("--quiet", "-q", help="Show no progress and no notes.")]
Fitted = Annotated[
    str,
    Argument(metavar="FITTED", show_default=False, help="The output of `fit`; or use --model."),
]
NewData = Annotated[
    str, Argument(metavar="DATA", show_default=False, help="A file with the same columns.")
]
FittedModel = Annotated[str, Option("--model", "-m", help="The same as FITTED.")]
Level = Annotated[float, Option(help="Level of the interval, 0 to 1.")]
SHOWN_ROWS = 15  # of an audit
FILE = ("separator", "encoding", "decimal")
LEARNING = (  # options that `fit` and `audit` share
    *("data", "target", "text", "column", "source", "group", "time", *FILE),
    *("model", "device", "dtype", "seed", "no_cache", "quiet"),
)
RENAMED = {
    "target": "targets",
    "column": "columns",
    "source": "sources",
    "no_cache": "cache",
    "quiet": "verbose",
}
CHANGED: dict[str, Callable[[Any], Any]] = {
    "columns": lambda names: names or (),
    "sources": lambda names: names or "auto",
    "text": lambda names: names or None,
    "cache": lambda is_off: not is_off,
    "verbose": lambda is_quiet: not is_quiet,
    "model": unless_embedded,
}


def fit(
    context: Context,
    data: Data,
    target: Targets,
    output: Annotated[
        str, Option("--output", "-o", help="The directory to create.", callback=opt.given)
    ],
    text: Texts = None,
    column: Columns = None,
    template: Annotated[
        str | None,
        Option(help='Sentence of a row, e.g. "A {carat} carat ring costs". Default: made.'),
    ] = None,
    units: Annotated[
        list[str] | None,
        Option(help="A column's unit in the sentence, e.g. depth=mm; repeatable."),
    ] = None,
    question: Annotated[
        str | None, Option(help='The end of every sentence. Default: "The price is".')
    ] = None,
    source: Sources = None,
    support: Annotated[
        str, Option(help="Possible values: auto, real, positive, count, or LOW,HIGH.")
    ] = "auto",
    weight: Annotated[str | None, Option(help="The column of row weights.")] = None,
    group: Group = None,
    time: Time = None,
    trusted: Annotated[
        str | None, Option(help="A column that marks rows whose targets are right: yes or no.")
    ] = None,
    separator: opt.Separator = None,
    encoding: opt.Encoding = None,
    decimal: opt.Decimal = None,
    model: opt.ModelName = "",
    device: opt.Device = "auto",
    dtype: opt.Precision = "auto",
    calibration: Annotated[
        float | None,
        Option(
            help="Share of rows held out for calibration. Default: 0, by cross-validation; 0.2 "
            "where the model alone reads rows.",
            min=0.0,
            max=0.9,
        ),
    ] = None,
    max_length: opt.RowLength = 512,
    seed: opt.Seed = 0,
    no_cache: opt.NoCache = False,
    force: opt.Force = False,
    quiet: Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """Learn to predict numbers from the rows of a table, with calibrated intervals.

    Example: causal-qwen fit rings.csv --target price --text description --output priced
    """
    check_output_directory(output, force)
    from causal_qwen.regression.csv_io import fit_csv

    report = fit_csv(
        **_named(context, *LEARNING, "weight", "trusted", "calibration", "template", "question"),
        **_named(context, "max_length", "output"),
        overwrite=force,
        units=_pairs(units, "--units depth=mm") or None,
        support=_support(support),
    )
    if as_json:
        print_json(report)
        return
    for note in () if quiet else report["notes"]:
        typer.echo(f"note: {note}", err=True)
    _print_methods(report, quiet)
    rows: list[tuple[str, float]] = [("rows", report["rows"])]
    if report["calibration_rows"] or not report["sources"]:
        rows.append(("calibration rows", report["calibration_rows"]))
    else:
        rows.append(("rows of cross-validation, which calibrates", report["rows"]))
    for one, metrics in report["targets"].items():
        rows += [(f"{one}: {name.replace('_', ' ')}", value) for name, value in metrics.items()]
    print_table(output, (), rows)


def predict(
    context: Context,
    first: Fitted = "",
    second: NewData = "",
    model: FittedModel = "",
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
    raw: Annotated[
        bool, Option("--raw", help="Use the Cauchy's interval without calibration.")
    ] = False,
    separator: opt.Separator = None,
    encoding: opt.Encoding = None,
    decimal: opt.Decimal = None,
    batch: Annotated[
        int | None,
        Option(help="Read, predict and write n rows at a time: CSV and parquet.", min=1),
    ] = None,
    no_cache: opt.NoCache = False,
    force: opt.ForceFile = False,
    as_json: opt.Json = False,
) -> None:
    """Predict a median and an interval for every row of a table.

    Example: causal-qwen predict priced more-rings.csv --level 0.8 --output answers.csv
    """
    fitted, data = opt.split_model(first, second, model)
    if not (fitted and data):
        raise ValueError("`predict` needs the directory that `fit` wrote, and a file.")
    from causal_qwen.regression.csv_io import predict_blocks, predict_table
    from causal_qwen.tables.files import check_output_kind, write_blocks

    if output is not None:
        check_output_kind(output, is_batch=batch is not None)
        check_output_file(output, force, data)
    options = _named(context, "level", "device", *FILE)
    options |= {"calibrated": False if raw else None, "cache": False if no_cache else None}
    with _noted():
        if batch is None:
            blocks = iter([predict_table(fitted, data, **options)])
        else:
            blocks = predict_blocks(fitted, data, batch, **options)
        if output is not None:
            with whole_file(output, force) as partial:
                rows = write_blocks(blocks, partial, output)
            if as_json:
                print_json({"output": str(output), "rows": rows})
        elif as_json:
            print_json([row for block in blocks for row in block.records()])
        else:
            _print_csv(blocks)


def audit(
    context: Context,
    data: Data,
    target: Targets,
    output: Annotated[
        Path | None,
        Option("--output", "-o", help="A file: .csv, .html or .parquet.", callback=opt.writable),
    ] = None,
    text: Texts = None,
    column: Columns = None,
    source: Sources = None,
    group: Group = None,
    time: Time = None,
    separator: opt.Separator = None,
    encoding: opt.Encoding = None,
    decimal: opt.Decimal = None,
    model: opt.ModelName = "",
    device: opt.Device = "auto",
    dtype: opt.Precision = "auto",
    seed: opt.Seed = 0,
    no_cache: opt.NoCache = False,
    force: opt.ForceFile = False,
    quiet: Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """List the rows whose numbers look wrong, with the number that the other rows suggest.

    Example: causal-qwen audit rings.csv --target price --output suspicious.csv
    """
    from causal_qwen.regression.audit import doubtful, summary, suspicion_kind, write_suspicions
    from causal_qwen.regression.csv_io import audit_csv

    if output is not None:
        suspicion_kind(output)  # refuses a kind that is not written, before the work
        check_output_file(output, force, data)
    table, notes = audit_csv(**_named(context, *LEARNING))
    if output is not None:
        with whole_file(output, force) as partial:
            write_suspicions(table, partial, output, f"{Path(data).name}: {', '.join(target)}")
    if as_json:
        worst = table.head(SHOWN_ROWS).to_dict(orient="records")
        print_json({"rows": len(table), "doubtful": doubtful(table), "worst": worst})
        return
    for note in () if quiet else notes:
        typer.echo(f"note: {note}", err=True)
    shown = table.head(max(SHOWN_ROWS, min(doubtful(table), 2 * SHOWN_ROWS)))
    print_table(summary(table), list(shown), shown.to_numpy().tolist())


def what_if(
    context: Context,
    first: Fitted = "",
    second: NewData = "",
    row: Annotated[int, Option(help="A row of the file, counted from 1.", min=1)] = 1,
    edits: Annotated[
        list[str] | None,
        Option("--set", help="A column and its other value, e.g. carat=1.0; repeatable."),
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
    model: FittedModel = "",
    device: opt.Device = "auto",
    separator: opt.Separator = None,
    encoding: opt.Encoding = None,
    decimal: opt.Decimal = None,
    no_cache: opt.NoCache = False,
    as_json: opt.Json = False,
) -> None:
    """Ask what a row's number would have been, had a column been different.

    Example: causal-qwen what-if priced rings.csv --row 3 --observed 2835 --set carat=1.0
    """
    fitted, data = opt.split_model(first, second, model)
    if not (fitted and data):
        raise ValueError("`what-if` needs the directory that `fit` wrote, and a file.")
    from causal_qwen.regression.csv_io import what_if_csv
    from causal_qwen.tables.cells import read_cell

    with _noted():
        found = what_if_csv(
            fitted,
            data,
            row,
            {name: read_cell(value) for name, value in _pairs(edits, "--set carat=1.0").items()},
            target=target,
            cache=False if no_cache else None,
            **_named(context, "observed", "level", "semantics", "device", *FILE),
        )
    if as_json:
        print_json(found.record())
    else:
        typer.echo(repr(found))


def cache(
    clear: Annotated[bool, Option("--clear", help="Delete the feature cache.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Show where `fit` and `predict` keep what the backbone has read, check it, or delete it.

    Example: causal-qwen cache --clear
    """
    from rich.filesize import decimal

    from causal_qwen.paths import check_cache_directory
    from causal_qwen.regression.feature_cache import cache_record, clear_cache

    check_cache_directory()
    if clear:
        deleted = clear_cache()
        if as_json:
            print_json({"deleted": deleted})
        for name in [] if as_json else deleted or ["nothing: there is no feature cache"]:
            typer.echo(f"deleted {name}")
        return
    record = cache_record()
    if as_json:
        print_json(record)
        return
    rows = [("path", record["path"]), ("size", decimal(record["size"])), ("rows", record["rows"])]
    print_table("feature cache", (), rows)
    if record["problem"] is not None:
        typer.echo(f"note: {record['problem']}", err=True)


def _named(context: Context, *names: str) -> dict[str, Any]:
    """Some options of a command as arguments of a function."""
    given = {RENAMED.get(name, name): value for name, value in context.params.items()}
    chosen = {name: given[name] for name in (RENAMED.get(name, name) for name in names)}
    return {name: CHANGED.get(name, lambda value: value)(one) for name, one in chosen.items()}


@contextmanager
def _noted() -> Iterator[None]:
    """Print every warning once, as a note on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for note in dict.fromkeys(str(warning.message) for warning in caught):
        typer.echo(f"note: {note}", err=True)


def _print_methods(report: dict[str, Any], quiet: bool) -> None:
    """The shares of sources, and errors on unseen rows beside those of single methods."""
    for target, errors in report["errors"].items():
        shares = report["sources"][target]
        if shares:
            rows = [(source, f"{share:.0%}") for source, share in shares.items()]
            print_table(f"{target}: sources", ("source", "share"), rows)
        best = report["best"][target]
        rows = [
            ("this regressor" if method == "together" else method, error)
            for method, error in sorted(errors.items(), key=lambda item: item[1])
        ]
        print_table(f"{target}: median error on unseen rows", ("method", "error"), rows)
        if best != "together" and not quiet:
            typer.echo(
                f"note: {best} alone has a smaller error on {target} than this regressor.", err=True
            )


def _support(text: str) -> str | tuple[float, float]:
    """ "positive" as it is; "0,100" -> (0.0, 100.0)"""
    if "," not in text:
        return text
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"--support {text!r} is no range; write LOW,HIGH, e.g. 0,100.") from None
    return low, high


def _pairs(words: Iterable[str] | None, example: str) -> dict[str, str]:
    """ "carat=1.0", ... -> {"carat": "1.0", ...}"""
    pairs = [word.partition("=") for word in words or ()]
    for name, _, value in pairs:
        if not (name and value.strip()):
            raise ValueError(f"{name!r} is no column with a value; write {example}.")
    return {name: value.strip() for name, _, value in pairs}


def _print_csv(blocks: Iterable[PredictedTable]) -> None:
    """The file's own bytes on stdout, line ends unchanged, whatever the terminal's encoding."""
    sys.stdout.flush()
    for place, block in enumerate(blocks):
        sys.stdout.buffer.writelines(block.lines("csv", is_first=place == 0))
        sys.stdout.buffer.flush()
