"""Options: arguments that several commands share, and the checks made before a model is loaded."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from causal_qwen.options import NOISY_MODES, DType, EngineName, Mode, NumberReading


def given(value: str | None) -> str | None:
    """Typer callback: refuse an empty text, such as an unset variable of a script."""
    if value is not None and not value.strip():
        raise typer.BadParameter("it is empty.")
    return value


def all_given(values: list[str]) -> list[str]:
    """Typer callback: `given` for every value."""
    for value in values:
        given(value)
    return values


def writable(path: Path | None) -> Path | None:
    """Typer callback: refuse a file that cannot be written once the work is done."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a directory; name a file.")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{path} cannot be written: {path.parent} is not a directory.")
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: there is no permission.")
    return path


ModelName = Annotated[
    str, Option("--model", "-m", help="A converted model or hub name. Default: embedded.")
]
Prompt = Annotated[
    str | None, Argument(help="The beginning of the text.", callback=given, show_default=False)
]
DecodingMode = Annotated[
    Mode | None,
    Option(
        "--mode", help="Decision rule. Default: causal with --individual, else the model's own."
    ),
]
IndividualName = Annotated[
    str | None, Option("--individual", "-i", help="A seed, or the file of an individual.")
]
Temperature = Annotated[
    float | None,
    Option(
        "--temperature",
        "-t",
        help="Strength of the noise, or of softmax. Default: the model's.",
        min=0.0,
    ),
]
MinDensity = Annotated[
    float | None, Option(help="Likelihood truncation. Default: the model's.", min=0.0, max=1.0)
]
Persistence = Annotated[
    float | None,
    Option(
        help="Share of the noise that is the same for every token. Default: the model's.",
        min=0.0,
        max=1.0,
    ),
]
MinP = Annotated[
    float | None,
    Option(
        help="Keep tokens with this share of the largest probability. Default: the model's.",
        min=0.0,
        max=1.0,
    ),
]
WholeWords = Annotated[
    bool | None,
    Option(
        "--whole-words/--no-whole-words",
        help="End words as the likeliest token ends them. Default: the model's.",
    ),
]
AvoidRepeats = Annotated[
    int | None,
    Option(help="Do not repeat n tokens in a row; 0 switches it off. Default: the model's.", min=0),
]
TopK = Annotated[int | None, Option(help="Keep the k most likely tokens.", min=1)]
TopP = Annotated[
    float | None,
    Option(help="Keep the most likely tokens up to this probability.", min=0.0, max=1.0),
]
NewTokens = Annotated[
    int, Option("--max-new-tokens", "-n", help="Generate at most n tokens.", min=1)
]
Chat = Annotated[bool, Option("--chat", help="Use the prompt as a user's chat message.")]
Numbers = Annotated[
    NumberReading | None, Option("--numbers", help="Read numbers as digits or as values.")
]
SoftmaxSeed = Annotated[
    int | None,
    Option("--seed", help="Seed of softmax sampling (compatible).", min=0, max=2**64 - 1),
]
Seed = Annotated[  # NumPy's global generator takes 32 bits
    int, Option(help="Seed of all random draws.", min=0, max=2**32 - 1)
]
Template = Annotated[
    str | None, Option(help='Text of a CSV row, e.g. "A {carat} carat ring costs |||{price}".')
]
RowLength = Annotated[int, Option("--max-length", help="Cut rows to n tokens.", min=2)]
BatchSize = Annotated[int, Option(help="Rows per batch.", min=1)]
Force = Annotated[bool, Option("--force", help="Overwrite a directory that this program wrote.")]
ForceFile = Annotated[bool, Option("--force", help="Overwrite a file that exists.")]
NoCache = Annotated[bool, Option("--no-cache", help="Neither read nor write the feature cache.")]
Device = Annotated[
    str, Option("--device", help="auto (an accelerator if there is one), cpu, cuda, cuda:1, mps.")
]
Precision = Annotated[
    DType, Option("--dtype", help="Type of the weights in memory. auto: as in the file.")
]
EnginePrecision = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "int8"],
    Option("--dtype", help="Type of the weights in memory; int8 on NumPy. auto: as in the file."),
]
Kernel = Annotated[
    Literal["numpy", "numba"], Option(help="Products of the NumPy engine: NumPy's or numba's.")
]
Engine = Annotated[EngineName, Option("--engine", help="torch, numpy (needs no torch), or auto.")]
Separator = Annotated[
    str | None,
    Option(help="Separator of a CSV file: , ; | or tab. Default: found.", callback=given),
]
Encoding = Annotated[
    str | None,
    Option(help="Encoding of a text file, e.g. cp1252. Default: found.", callback=given),
]
Decimal = Annotated[
    Literal[",", "."] | None, Option(help="Decimal mark of a CSV file. Default: found.")
]
Json = Annotated[bool, Option("--json", help="Print JSON.")]


def check_individual(individual: str | None, mode: str | None, is_saved: bool = False) -> Any:
    """-> (seed, Individual or None; mode). An individual without a mode implies `causal`."""
    if individual is None and not is_saved:
        return None, mode
    if mode not in (None, *NOISY_MODES):
        raise ValueError(f"--individual has no effect in --mode {mode}; use causal or sampling.")
    from causal_qwen.individuals.individual import parse_individual

    return None if individual is None else parse_individual(individual), mode or "causal"


def check_seed(seed: int | None, mode: str | None) -> None:
    """Refuse a seed that has no effect; None is a mode that the model decides."""
    if seed is not None and mode not in (None, "compatible"):
        cure = "use --individual" if mode in NOISY_MODES else "it is deterministic"
        raise ValueError(f"--seed has no effect in --mode {mode}; {cure}, or --mode compatible.")


NOISE = ("temperature", "min_density", "persistence", "min_p", "whole_words", "avoid_repeats")


def decoding_options(context: typer.Context) -> dict[str, Any]:
    """What a command line says of the noise and the candidates."""
    names = (*NOISE, "top_k", "top_p")
    return {name: context.params[name] for name in names if context.params.get(name) is not None}


def print_replay(context: typer.Context, mode: str, individual: Any, seed: int | None) -> None:
    """If an individual or a seed was drawn, print the options that generate the text again."""
    drawn = {"individual": individual, "seed": seed}
    if all(context.params[name] is not None for name, value in drawn.items() if value is not None):
        return
    values = {**context.params, **drawn, "mode": mode, "save_individual": None}
    words: list[str] = []
    for option in context.command.params:
        value = values.get(option.name)
        names = option.secondary_opts if value is False else option.opts  # --no-...
        if option.param_type_name != "option" or value is None or value == option.default:
            continue
        if names:
            words += [max(names, key=len)] + ([] if isinstance(value, bool) else [str(value)])
    typer.echo(f"replay: {shlex.join(words)}", err=True)


def split_model(first: str, second: str, model: str) -> tuple[str, str]:
    """The arguments [MODEL] OTHER, where MODEL may be left out or given as --model."""
    if second and model:
        raise ValueError(f"Two models were given, {first} and {model}: leave one out.")
    if not second and not model and Path(first).is_dir():
        return first, ""  # a model, and nothing after it
    return (first, second) if second else (model, first)
