"""Ask: a panel answers one question, or every question of a file."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from causal_qwen.cli import options as opt
from causal_qwen.terminal import print_json, progress_bar

if TYPE_CHECKING:
    from causal_qwen.panel import Panel

BETWEEN = ";"  # the options of a question in a file
NUMBER = "number"  # instead of options


def ask(
    context: typer.Context,
    question: Annotated[str, Argument(help="What to ask.", show_default=False)] = "",
    options: Annotated[
        list[str] | None,
        Argument(help='Two or more options, such as coffee tea; "cat|cats" are one.'),
    ] = None,
    individuals: Annotated[str, Option(help="How many, or their names: ada,bob.")] = "1000",
    versus: Annotated[
        str | None, Option(help="Ask the same individuals this, too.", callback=opt.given)
    ] = None,
    questions: Annotated[
        Path | None,
        Option(
            help="A CSV file with a column question, and options (coffee;tea, or number).",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Option(help="Everybody's answers: .csv or .parquet; with --questions, it resumes."),
    ] = None,
    model: opt.ModelName = "",
    engine: opt.Engine = "auto",
    settings: opt.Settings = None,
    as_json: opt.Json = False,
) -> None:
    """Ask many individuals at once. Options are answered in the time of one prompt.

    Example: causal-qwen ask "Do you prefer coffee or tea?" coffee tea
    """
    _check_call(question, options, versus, questions, output)
    from causal_qwen.panel import Panel
    from causal_qwen.session import open as open_session

    decoding, opening = opt.split_settings(context)
    session = open_session(model, engine, **opening)
    panel = Panel(session, _people(individuals), **decoding)
    if questions is not None and output is not None:
        with progress_bar("questions") as progress:
            answer_file(panel, questions, output, progress)
        return
    found = panel.ask(question, options or None)
    if versus is not None:
        found = found.versus(panel.ask(versus, options))
    if output is not None:
        frame = found.to_frame()
        write = frame.to_parquet if output.suffix == ".parquet" else frame.to_csv
        write(output, index=False)
    print_json(found.to_dict()) if as_json else print(found)


def _check_call(
    question: str,
    options: list[str] | None,
    versus: str | None,
    questions: Path | None,
    output: Path | None,
) -> None:
    """Refuse what contradicts itself before a model is loaded."""
    if (questions is None) != bool(question):
        raise ValueError("Give a QUESTION with its options, or --questions FILE.")
    if questions is not None and (output is None or versus is not None):
        raise ValueError("--questions FILE goes with --output, and without --versus.")
    if versus is not None and not options:
        raise ValueError("--versus compares answers among options; name two or more.")
    if output is not None and output.suffix not in (".csv", ".parquet"):
        raise ValueError(f"--output {output}: name a file .csv or .parquet.")
    if questions is not None and output is not None and output.suffix != ".parquet":
        raise ValueError(f"--output {output}: answers to a file are a directory .parquet.")
    if output is not None and (output.is_file() or (output.exists() and questions is None)):
        raise FileExistsError(f"{output} exists; name another output.")


def _people(given: str) -> int | list[str]:
    return int(given) if given.isdecimal() else [one.strip() for one in given.split(",")]


def answer_file(
    panel: Panel, source: Path, output: Path, progress: Callable[[int, int], None]
) -> None:
    """The answers to every question of a file that `output`, a directory of parts, has not yet."""
    asked = read_questions(source)
    output.mkdir(exist_ok=True)
    for place, row in enumerate(asked):
        part = output / f"{place:06}.parquet"
        if not part.exists():
            options = [one.strip() for one in row["options"].split(BETWEEN) if one.strip()]
            is_number = options == [NUMBER]
            among = None if is_number else options or None
            found = panel.ask(row["question"], among, number=is_number).to_frame()
            found.insert(0, "question", row["question"])
            found.insert(0, "id", row["id"])
            partial = part.with_suffix(".partial")
            found.astype({"person": str}).to_parquet(partial, index=False)
            os.replace(partial, part)
        progress(place + 1, len(asked))


def read_questions(source: Path) -> list[dict[str, str]]:
    """Rows with id (their number by default), question and options."""
    with source.open(encoding="utf-8-sig", newline="") as file:
        rows = [{k: v or "" for k, v in row.items() if k} for row in csv.DictReader(file)]
    for number, row in enumerate(rows, 1):
        row["id"] = row.get("id") or str(number)
        row.setdefault("options", "")
        if not row.get("question", "").strip():
            raise ValueError(f"Row {number} of {source} has no question; name its column question.")
    return rows
