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
from causal_qwen.terminal import print_facts, print_json, print_table, status

DType = Annotated[
    Literal["float32", "int8"] | None,
    Option(help="Keep a copy in this type: int8 has half the bytes of bfloat16, and rounds."),
]
MODEL = "A Qwen2 or converted directory, smollm2-135m or a hub name."


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
    from causal_qwen.numpy_engine.quantization import quantize as run

    report = run(directory_of(which), output, overwrite=force)
    print_facts(f"{which} -> {output}", asdict(report), as_json)


def verify(
    which: Annotated[
        str,
        Argument(metavar="MODEL", show_default=False, help=f"{MODEL[:-1]}, or a GGUF file."),
    ] = "",
    prompt: Annotated[
        str | None, Option(help="The text to compare on.", callback=opt.given)
    ] = None,
    max_new_tokens: opt.NewTokens = 32,
    dtype: DType = None,
    as_json: opt.Json = False,
) -> None:
    """Verify the NumPy engine against torch in float32 and float64; exit 1 if a bound is missed.

    Example: causal-qwen verify smollm2-135m --max-new-tokens 256
    """
    from causal_qwen.layer import is_gguf

    directory = Path(which) if is_gguf(which) else directory_of(which)
    from causal_qwen.analysis.verify import PROMPT
    from causal_qwen.analysis.verify import verify as run

    with status(not as_json) as progress:
        prompt = PROMPT if prompt is None else prompt
        result = run(directory, prompt, max_new_tokens, progress, dtype=dtype)
    if as_json:
        print_json(result.to_dict())
    else:
        print_table(f"Largest differences: {directory}", *result.table())
        typer.echo(result.sentence)
    if not result.is_passed:
        raise typer.Exit(1)
