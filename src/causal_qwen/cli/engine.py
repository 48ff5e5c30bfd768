"""Engine: quantize and verify, Qwen2 in NumPy."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from causal_qwen.cli import options as opt
from causal_qwen.conversion.location import directory_of
from causal_qwen.outputs import check_output_directory
from causal_qwen.terminal import print_json, print_table

DType = Annotated[
    Literal["float32", "int8"] | None,
    Option(help="Keep a copy in this type: int8 has half the bytes of bfloat16, and rounds."),
]
MODEL = "A Qwen2 or converted directory, smollm2-135m or a hub name; or use --model."


def quantize(
    which: Annotated[str, Argument(metavar="MODEL", help=MODEL, callback=opt.given)],
    output: Annotated[Path, Argument(help="The directory to create.")],
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Write a model with int8 weights, for generate --engine numpy: half the bytes of bfloat16.

    Example: causal-qwen quantize smollm2-135m small
    """
    check_output_directory(output, force)
    from causal_qwen.engine.quantization import quantize as run

    report = run(directory_of(which), output, overwrite=force)
    if as_json:
        print_json(asdict(report))
        return
    rows = [(name.replace("_", " "), value) for name, value in asdict(report).items()]
    print_table(f"{which} -> {output}", (), rows)


def verify(
    which: Annotated[str, Argument(metavar="MODEL", show_default=False, help=MODEL)] = "",
    model: opt.ModelName = "",
    prompt: Annotated[
        str | None, Option(help="The text to compare on.", callback=opt.given)
    ] = None,
    max_new_tokens: opt.NewTokens = 32,
    tolerance: Annotated[
        float | None, Option(help="Largest logit difference to torch float32.", min=0.0)
    ] = None,
    dtype: DType = None,
    kernel: opt.Kernel = "numpy",
    original: Annotated[
        str | None,
        Option(
            help="The model that a quantised directory was made from: measures what int8 changes."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Option("--output", "-o", help="Write verify.json and .png here.", file_okay=False),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Verify the NumPy engine against torch in float32 and float64; exit 1 if a bound is missed.

    Example: causal-qwen verify smollm2-135m --max-new-tokens 256
    """
    if which and model:
        raise ValueError(f"Two models were given, {which} and {model}: leave one out.")
    directory = directory_of(which or model)
    from causal_qwen.analysis.verify import PROMPT, TOLERANCE, live, plot
    from causal_qwen.analysis.verify import verify as run

    with live(quiet=as_json) as progress:
        result = run(
            directory,
            PROMPT if prompt is None else prompt,
            max_new_tokens,
            TOLERANCE if tolerance is None else tolerance,
            progress,
            dtype=dtype,
            kernel=kernel,
            original=None if original is None else directory_of(original),
        )
    if result.precision is not None and not as_json:
        found = asdict(result.precision)
        found["largest error of a layer"] = f"{max(found.pop('layers').values()):.4f}"
        found["perplexity ratio"] = f"{result.precision.perplexity_ratio:.4f}"
        print_table("int8 beside float32", (), [(k.replace("_", " "), v) for k, v in found.items()])
    if as_json:
        typer.echo(result.to_json())
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "verify.json").write_text(result.to_json(), encoding="utf-8")
        plot(result, output / "verify.png")
    if not as_json:
        typer.echo(result.sentence)
    if not result.is_passed:
        raise typer.Exit(1)
