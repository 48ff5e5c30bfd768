"""Engine: np-generate and verify, Qwen2 in NumPy."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from causal_qwen.cli.checks import (
    check_directory,
    check_mode,
    check_numbers,
    check_prompt,
    check_seed,
    who_speaks,
)
from causal_qwen.cli.models import directory_of, model_first
from causal_qwen.cli.options import (
    Chat,
    Json,
    Length,
    MinDensity,
    Model,
    Numbers,
    SoftmaxSeed,
    Temperature,
    TopK,
    TopP,
    Who,
    modes,
)
from causal_qwen.options import NOISY_MODES
from causal_qwen.terminal import print_json


def np_generate(
    first: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A Qwen2 or converted directory, smollm2-135m or a hub name; may be left out, or "
            "given as --model.",
        ),
    ] = "",
    second: Annotated[
        str,
        typer.Argument(metavar="PROMPT", show_default=False, help="The beginning of the text."),
    ] = "",
    model: Model = "",
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode", help="As in generate; the model's own by default.", autocompletion=modes
        ),
    ] = None,
    individual: Who = None,
    temperature: Temperature = None,
    min_density: MinDensity = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: SoftmaxSeed = None,
    max_new_tokens: Length = 60,
    numbers: Numbers = None,
    chat: Chat = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32 keeps a widened copy; else as stored.")
    ] = None,
    attention: Annotated[bool, typer.Option("--attention", help="Where it looks.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Figures of U, S, P, Y.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The new text only.")] = False,
    as_json: Json = False,
) -> None:
    """Continue a prompt with NumPy alone, and watch every token being born.

    Example: causal-qwen np-generate "The train was" --mode causal -i 7 --min-density 0.05 -t 4
    """
    model, prompt = model_first(first, second, model)
    check_prompt(prompt)
    check_mode(mode)
    check_numbers(numbers)
    check_seed(seed, mode)
    who = who_speaks(individual, mode)
    from causal_qwen.engine import Engine
    from causal_qwen.engine.live_view import as_record, watch

    engine = Engine.from_pretrained(directory_of(model), dtype=dtype)
    mode = mode or engine.own_mode
    check_seed(seed, mode)
    options: dict[str, Any] = {"mode": mode, "min_density": min_density, "encode_numbers": numbers}
    options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    if mode == "compatible":
        random = (temperature, top_k, top_p, seed)
        options["do_sample"] = True if any(value is not None for value in random) else None
        seed = secrets.randbelow(2**62) if seed is None else seed
    if who is None and mode in NOISY_MODES:
        who = secrets.randbelow(2**62)  # said in JSON, so that the text can be told again
    options |= {"individual": who, "seed": seed}
    options |= {"max_new_tokens": max_new_tokens, "chat": chat}
    if as_json:
        steps = list(engine.stream(prompt, summarize=summary, **options))
        told = who if who is None or isinstance(who, int) else who.seed
        spoken = {"mode": mode, "individual": told, "seed": seed}
        print_json({**as_record(prompt, steps), **spoken})
    else:
        watch(engine, prompt, quiet=quiet, attention=attention, summary=summary, **options)


def verify(
    which: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A Qwen2 or converted directory, smollm2-135m or a hub name.",
        ),
    ] = "",
    model: Model = "",
    prompt: Annotated[str | None, typer.Option(help="The text to compare on.")] = None,
    max_new_tokens: Length = 32,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest logit difference to torch float32.", min=0.0)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write verify.json and verify.png there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove the NumPy engine against torch in float32 and float64; exits 1 if a bar is missed.

    Example: causal-qwen verify smollm2-135m --max-new-tokens 256
    """
    if which and model:
        raise ValueError(f"Two models were given, {which} and {model}: leave one out.")
    check_prompt(prompt)
    check_directory(output)
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
        )
    if as_json:
        typer.echo(result.to_json())
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "verify.json").write_text(result.to_json(), encoding="utf-8")
        plot(result, output / "verify.png")
    if not result.is_passed:
        raise typer.Exit(1)
