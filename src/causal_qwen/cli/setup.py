"""House: doctor, convert, app. The installation, its models, and its page in the browser."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from causal_qwen.cli.checks import check_model, check_optional_choice, given
from causal_qwen.cli.models import unless_embedded
from causal_qwen.cli.options import Force, Json, Model
from causal_qwen.options import INITIALIZATIONS, check_choice
from causal_qwen.paths import check_output_directory
from causal_qwen.terminal import print_json, print_table, status


def doctor(as_json: Json = False) -> None:
    """What is installed, which model, which device, what is missing and how to get it.

    Example: causal-qwen doctor
    """
    from rich.console import Console

    from causal_qwen.cli.doctor import examine

    with status(not as_json) as progress:
        progress("looking around")
        diagnosis = examine()
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        Console(highlight=False).print(diagnosis)
    if not diagnosis.is_well:
        raise typer.Exit(1)


def convert(
    base: Annotated[
        str,
        typer.Argument(
            help="smollm2-135m, a hub name, a Qwen2 or Llama directory, a GGUF file.",
            callback=given,
        ),
    ],
    output: Annotated[Path, typer.Argument(help="The directory to create.")],
    init: Annotated[
        str, typer.Option(help="calibrated, or documents for the sources' literal numbers.")
    ] = "calibrated",
    causal_size: Annotated[
        int | None, typer.Option(help="C, the individual's size; the hidden size by default.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the base model's by default.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file to calibrate on, one passage per line.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Turn a Qwen2 checkpoint into a causal model that behaves exactly like it.

    Example: causal-qwen convert smollm2-135m my-model
    """
    check_model(base)
    check_choice("--init", init, INITIALIZATIONS)
    check_optional_choice("--dtype", dtype, ("float32", "bfloat16", "float16"))
    check_output_directory(output, force)
    passages = None if text is None else _passages(text)
    from causal_qwen.conversion.convert import convert as run

    with status() as progress:
        report = run(
            base,
            output,
            init=init,
            causal_size=causal_size,
            dtype=dtype,
            texts=passages,
            overwrite=force,
            progress=progress,
        )
    record = asdict(report)
    if as_json:
        print_json(record)
        return
    facts = record | (record.pop("calibration") or {})
    rows = [(name.replace("_", " "), value) for name, value in facts.items()]
    print_table(f"{report.base} -> {output}", (), rows)


def playground(
    model: Model = "",
    host: Annotated[str, typer.Option("--host", help="The address to answer on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The port.", min=0, max=65535)] = 7860,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")
    ] = True,
) -> None:
    """Open the playground in the browser; everything stays on this machine. Ctrl-C ends it.

    Example: causal-qwen app --port 7861
    """
    from causal_qwen.playground import launch

    launch(model=unless_embedded(model) or "", host=host, port=port, open_browser=browser)


def _passages(path: Path) -> list[str]:
    """The lines of a text file, without the empty ones."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason}.") from error
    if not (passages := [line for line in lines if line.strip()]):
        raise ValueError(f"{path} is empty: there is nothing to calibrate on.")
    return passages
