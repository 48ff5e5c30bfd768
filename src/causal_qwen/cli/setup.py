"""Setup: doctor, convert, export, app, quantize, verify."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from causal_qwen.cli import options as opt
from causal_qwen.conversion.location import check_model, directory_of, path_of, unless_embedded
from causal_qwen.options import ExportFormat, ExportType, Initialization
from causal_qwen.outputs import check_output_directory, check_output_file
from causal_qwen.terminal import print_facts, print_json, print_table, status


def doctor(
    speed: Annotated[
        bool, Option("--speed", help="Measure tokens/s of the embedded model on every engine.")
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Check the installation: packages, device, embedded model, and how to install what is missing.

    Example: causal-qwen doctor
    """
    from rich.console import Console

    from causal_qwen.cli.doctor import examine, measure, render

    with status(not as_json) as progress:
        progress("examining the installation")
        record = examine()
        if speed:
            record["tokens_per_second"] = measure(progress)
    if as_json:
        print_json(record)
    else:
        Console(highlight=False).print(render(record))
    if not record["is_well"]:
        raise typer.Exit(1)


def convert(
    base: Annotated[
        str,
        Argument(
            help="smollm2-135m (dequantised from a Q4_1 file), a hub name, a directory of a known "
            "family (Qwen, Llama, Mistral, Gemma ...), or a GGUF file.",
            callback=opt.given,
        ),
    ],
    output: Annotated[
        Path, Argument(help="The layer to write, NAME.causal; with --merge, a directory.")
    ],
    merge: Annotated[
        bool, Option("--merge", help="Write base and layer as one directory, as training needs it.")
    ] = False,
    init: Annotated[
        Initialization,
        Option(help="Calibrate the new parameters, or use the documents' literal values."),
    ] = "calibrated",
    causal_size: Annotated[
        int | None, Option(help="C, the size of an individual. Default: the hidden size.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Option(help="Type of the merged weights. Default: the base's; bfloat16 for 4-bit files."),
    ] = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Write the causal layer of a plain model, which then behaves exactly like it.

    Models are converted as they are opened, so this is needed only to keep, share or train one.

    Example: causal-qwen convert smollm2-135m my-model --merge
    """
    check_model(base)
    if not merge:
        _write_layer(base, output, init, (causal_size, dtype), force, as_json)
        return
    check_output_directory(output, force)
    from causal_qwen.conversion.convert import convert as run

    with status() as progress:
        report = run(
            base,
            output,
            init=init,
            causal_size=causal_size,
            dtype=dtype,
            overwrite=force,
            progress=progress,
        )
    record = asdict(report)
    facts = record if as_json else record | (record.pop("calibration") or {})
    print_facts(f"{report.base} -> {output}", facts, as_json)


def _write_layer(
    base: str, output: Path, init: str, merged: tuple[object, ...], force: bool, as_json: bool
) -> None:
    from causal_qwen.layer import is_layer

    if any(option is not None for option in merged):
        raise ValueError("--causal-size and --dtype change the weights of the base; add --merge.")
    if not is_layer(output):
        raise ValueError(
            f"{output} would be a causal layer: name it {output}.causal, or add --merge for a "
            "directory with the base in it."
        )
    check_output_file(output, force)
    from causal_qwen.session import choose_engine

    with status() as progress:
        if init == "calibrated" and choose_engine("auto", base) == "llama.cpp":
            from causal_qwen.engines.llama import LlamaEngine

            layer = LlamaEngine.open(base, "auto", progress).layer
        else:
            from causal_qwen.conversion.opening import make_layer

            layer = make_layer(base, progress, init=init)
    layer.save(output, overwrite=force)
    size = round(output.stat().st_size / 1e6, 1)
    record = {"base": layer.base, "megabytes": size, **layer.fields, **layer.generation}
    print_facts(f"{base} -> {output}", record, as_json)


def export(
    model: Annotated[str, Argument(help="A converted model, or smollm2-135m.", callback=opt.given)],
    output: Annotated[Path, Argument(help="The directory to create.")],
    to: Annotated[
        ExportFormat, Option(help="A plain checkpoint of the base's architecture, or GGUF.")
    ] = "plain",
    dtype: Annotated[
        ExportType | None,
        Option(help="Type of the weights. Default: the model's own; f16 in a GGUF file."),
    ] = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Write a model for tools without this package: its scores loc_S, W_loc folded into the head.

    Example: causal-qwen export my-model out --to gguf --dtype q8_0
    """
    check_output_directory(output, force)
    path = path_of(model)
    from causal_qwen.conversion.export import export as run

    with status() as progress:
        report = run(path, output, to=to, dtype=dtype, overwrite=force, progress=progress)
    print_facts(f"{model} -> {output}", asdict(report), as_json)


def playground(
    model: opt.ModelName = "",
    device: opt.Device = "auto",
    host: Annotated[
        str,
        Option(help="The address to listen on; other machines need the password that is printed."),
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="The port to listen on.", min=0, max=65535)] = 7860,
    auth: Annotated[
        str | None,
        Option(
            help="Ask for this user and password.",
            metavar="USER:PASSWORD",
            envvar="CAUSAL_QWEN_AUTH",
        ),
    ] = None,
    browser: Annotated[
        bool, Option("--browser/--no-browser", help="Open the page in the browser.")
    ] = True,
    url: Annotated[
        str | None,
        Option(help="Use the model of a server instead, such as http://127.0.0.1:8000."),
    ] = None,
    api_key: Annotated[
        str | None, Option(help="The server's API key.", envvar="CAUSAL_QWEN_API_KEY")
    ] = None,
) -> None:
    """Open the playground in the browser; all data stays on this machine. Ctrl-C closes it.

    With --url, the page works through a server (causal-qwen serve), which gets what is typed.

    Example: causal-qwen app --port 7861
    """
    if url is not None and (model or device != "auto"):
        raise ValueError("--url names the server, which has a model: leave out --model, --device.")
    from causal_qwen.app import launch

    launch(
        unless_embedded(model) or "",
        host,
        port,
        open_browser=browser,
        auth=auth,
        device=device,
        url=url,
        api_key=api_key,
    )


# ---------------------------------------------------------------- Qwen2 in NumPy

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
