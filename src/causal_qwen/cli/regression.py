"""Regression: fit and predict, on tables; the cache of what the backbone has read."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from causal_qwen.cli import options as opt
from causal_qwen.cli.models import split_model, unless_embedded
from causal_qwen.outputs import check_output_directory, whole_file
from causal_qwen.terminal import print_json, print_table

if TYPE_CHECKING:
    from causal_qwen.regression.csv_io import PredictedTable


Separator = Annotated[
    str | None,
    Option(help="Separator of a CSV file: , ; | or tab. Default: found.", callback=opt.given),
]
Encoding = Annotated[
    str | None,
    Option(help="Encoding of a text file, e.g. cp1252. Default: found.", callback=opt.given),
]
Decimal = Annotated[
    Literal[",", "."] | None, Option(help="Decimal mark of a CSV file. Default: found.")
]


def fit(
    data: Annotated[
        str,
        Argument(help="A CSV, parquet, .xlsx or JSON file with a header.", callback=opt.given),
    ],
    target: Annotated[list[str], Option("--target", "-y", help="A column to predict; repeatable.")],
    output: Annotated[
        str, Option("--output", "-o", help="The directory to create.", callback=opt.given)
    ],
    text: Annotated[list[str] | None, Option(help="A free-text column; repeatable.")] = None,
    column: Annotated[
        list[str] | None,
        Option(help="A column to learn from; repeatable. Default: all but identifiers."),
    ] = None,
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
    weight: Annotated[str | None, Option(help="The column of row weights.")] = None,
    separator: Separator = None,
    encoding: Encoding = None,
    decimal: Decimal = None,
    backbone: Annotated[
        Literal["frozen", "finetune", "scratch"], Option(help="How to use the backbone.")
    ] = "frozen",
    model: opt.ModelName = "",
    calibration: Annotated[
        float, Option(help="Share of rows held out for calibration.", min=0.0, max=0.9)
    ] = 0.2,
    max_length: opt.RowLength = 512,
    seed: opt.Seed = 0,
    no_cache: opt.NoCache = False,
    force: opt.Force = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Show no progress and no notes.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Learn to predict numbers from the rows of a table, with calibrated intervals.

    Example: causal-qwen fit rings.csv --target price --text description --output priced
    """
    check_output_directory(output, force)
    from causal_qwen.regression.csv_io import fit_csv

    report = fit_csv(
        data,
        target,
        output,
        columns=column or (),
        weight=weight,
        calibration=calibration,
        overwrite=force,
        seed=seed,
        separator=separator,
        encoding=encoding,
        decimal=decimal,
        text=text or None,
        template=template,
        units=_units(units or ()),
        question=question,
        verbose=not quiet,
        backbone=backbone,
        model=unless_embedded(model),
        max_length=max_length,
        cache=not no_cache,
    )
    if as_json:
        print_json(report)
        return
    for note in () if quiet else report["notes"]:
        typer.echo(f"note: {note}", err=True)
    rows: list[tuple[str, float]] = [
        (name.replace("_", " "), report[name]) for name in ("rows", "calibration_rows")
    ]
    for one, metrics in report["targets"].items():
        rows += [(f"{one}: {name.replace('_', ' ')}", value) for name, value in metrics.items()]
    print_table(output, (), rows)


def predict(
    first: Annotated[
        str,
        Argument(
            metavar="FITTED", show_default=False, help="The output of `fit`, unless --model is."
        ),
    ] = "",
    second: Annotated[
        str, Argument(metavar="DATA", show_default=False, help="A file with the same columns.")
    ] = "",
    model: Annotated[str, Option("--model", "-m", help="The same as FITTED.")] = "",
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            help="A file: .parquet, .xlsx, .jsonl, .json, else CSV. Default: CSV on stdout.",
            callback=opt.writable,
        ),
    ] = None,
    level: Annotated[float, Option(help="Level of the interval, 0 to 1.")] = 0.9,
    raw: Annotated[
        bool, Option("--raw", help="Use the Cauchy's interval without calibration.")
    ] = False,
    separator: Separator = None,
    encoding: Encoding = None,
    decimal: Decimal = None,
    no_cache: opt.NoCache = False,
    as_json: opt.Json = False,
) -> None:
    """Predict a median and an interval for every row of a table.

    Example: causal-qwen predict priced more-rings.csv --level 0.8 --output answers.csv
    """
    fitted, data = split_model(first, second, model)
    if not (fitted and data):
        raise ValueError("`predict` needs the directory that `fit` wrote, and a file.")
    from causal_qwen.regression.csv_io import predict_table
    from causal_qwen.regression.table_files import table_kind

    if output is not None:
        table_kind(output)  # refuses a kind that is not written, before the work
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = predict_table(
            fitted,
            data,
            level=level,
            calibrated=False if raw else None,
            cache=False if no_cache else None,
            separator=separator,
            encoding=encoding,
            decimal=decimal,
        )
    for note in dict.fromkeys(str(warning.message) for warning in caught):
        typer.echo(f"note: {note}", err=True)
    if output is not None:
        with whole_file(output) as partial:
            table.write(partial, output)
        if as_json:
            print_json({"output": str(output), "rows": len(table)})
    elif as_json:
        print_json(table.records())
    else:
        _print_bytes(table)


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
    aside = ", ".join(record["set_aside"]) or "none"
    rows = [("path", record["path"]), ("size", decimal(record["size"])), ("rows", record["rows"])]
    print_table("feature cache", (), [*rows, ("set aside", aside)])
    if record["problem"] is not None:
        typer.echo(f"note: {record['problem']}", err=True)


def _units(pairs: Iterable[str]) -> dict[str, str] | None:
    """ "depth=mm", ... -> {"depth": "mm", ...}"""
    units = {}
    for pair in pairs:
        name, equals, unit = pair.rpartition("=")
        if not (name and equals and unit.strip()):
            raise ValueError(f"--units {pair!r} is not a column and its unit; write depth=mm.")
        units[name] = unit.strip()
    return units or None


def _print_bytes(table: PredictedTable) -> None:
    """The file's own bytes on stdout, line ends unchanged, whatever the terminal's encoding."""
    if (buffer := getattr(sys.stdout, "buffer", None)) is None:  # a stream of text, as in a test
        sys.stdout.writelines(table.csv())
        return
    sys.stdout.flush()
    buffer.writelines(table.csv_bytes())
    buffer.flush()
