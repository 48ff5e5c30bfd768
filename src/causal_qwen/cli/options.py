"""Options: arguments that several commands share, and the checks made before a model is loaded."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from causal_qwen.options import NOISY_MODES, EngineName, Mode, NumberReading


def given(value: str | None) -> str | None:
    """Typer callback: refuse an empty text, such as an unset variable of a script."""
    if value is not None and not value.strip():
        raise typer.BadParameter("it is empty.")
    return value


def writable(path: Path | None) -> Path | None:
    """Typer callback: refuse a file that cannot be written once the work is done."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a directory; name a file.")
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written; check its directory.")
    return path


ADVANCED = "Advanced"  # the part of a help page below what most calls need


def set_option(help: str) -> Any:
    """`--set NAME=VALUE`, for `parse_settings`; `help` says what can be set."""
    return Option(
        "--set", "-s", metavar="NAME=VALUE", help=f"{help}; repeatable.", rich_help_panel=ADVANCED
    )


ModelName = Annotated[
    str,
    Option("--model", "-m", help="A directory, GGUF file, layer or hub name. Default: embedded."),
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
    str | None, Option("--individual", "-i", help="A name, a seed, or the file of an individual.")
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
Settings = Annotated[
    list[str] | None, set_option("Any other setting by its name in Python, e.g. min_p=0.2")
]
TableSettings = Annotated[
    list[str] | None, set_option("Any other setting by its name in Python, e.g. encoding=cp1252")
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
    Option(
        "--seed",
        help="Seed of softmax sampling (compatible).",
        min=0,
        max=2**64 - 1,
        rich_help_panel=ADVANCED,
    ),
]
Seed = Annotated[  # NumPy's global generator takes 32 bits
    int, Option(help="Seed of all random draws.", min=0, max=2**32 - 1, rich_help_panel=ADVANCED)
]
Template = Annotated[
    str | None, Option(help='Text of a CSV row, e.g. "A {carat} carat ring costs |||{price}".')
]
BatchSize = Annotated[int, Option(help="Rows per batch.", min=1)]
Force = Annotated[bool, Option("--force", help="Overwrite a directory that this program wrote.")]
ForceFile = Annotated[bool, Option("--force", help="Overwrite a file that exists.")]
Device = Annotated[
    str,
    Option(
        "--device",
        help="auto (an accelerator if there is one), cpu, cuda, cuda:1, mps.",
        rich_help_panel=ADVANCED,
    ),
]
Engine = Annotated[
    EngineName, Option("--engine", help="torch, llama.cpp (GGUF), numpy (no torch), or auto.")
]
Json = Annotated[bool, Option("--json", help="Print JSON.")]


def check_individual(individual: str | None, mode: str | None, is_saved: bool = False) -> Any:
    """-> (seed, Individual or None; mode). An individual without a mode implies `causal`."""
    if individual is None and not is_saved:
        return None, mode
    if mode not in (None, *NOISY_MODES):
        raise ValueError(f"--individual has no effect in --mode {mode}; use causal or sampling.")
    from causal_qwen.individuals import parse_individual

    return None if individual is None else parse_individual(individual), mode or "causal"


def check_seed(seed: int | None, mode: str | None) -> None:
    """Refuse a seed that has no effect; None is a mode that the model decides."""
    if seed is not None and mode not in (None, "compatible"):
        cure = "use --individual" if mode in NOISY_MODES else "it is deterministic"
        raise ValueError(f"--seed has no effect in --mode {mode}; {cure}, or --mode compatible.")


DECODING = (
    "temperature",
    "min_density",
    "persistence",
    "min_p",
    "whole_words",
    "avoid_repeats",
    "top_k",
    "top_p",
)
OPENING = ("dtype", "kernel", "numbers", "n_ctx", "n_gpu_layers")  # settings of `causal_qwen.open`


def parse_settings(given: list[str] | None, names: Collection[str]) -> dict[str, Any]:
    """`--set NAME=VALUE` of these names; values are JSON, True, False, None, or texts."""
    found: dict[str, Any] = {}
    for one in given or ():
        name, equals, value = one.partition("=")
        if not equals or name not in names:
            raise ValueError(f"--set {one}: name one of {', '.join(sorted(names))}, as NAME=VALUE.")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = {"True": True, "False": False, "None": None}.get(value, value)
    return found


def split_settings(context: typer.Context) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a command line says of noise and candidates, and of how the model is opened."""
    settings = parse_settings(context.params["settings"], (*DECODING, *OPENING))
    opening = {name: settings.pop(name) for name in OPENING if name in settings}
    if context.params.get("temperature") is not None:
        settings["temperature"] = context.params["temperature"]
    return settings, opening


def print_replay(context: typer.Context, mode: str, individual: Any, seed: int | None) -> None:
    """If an individual or a seed was drawn, print the options that generate the text again."""
    drawn = {"individual": individual, "seed": seed}
    if all(context.params[name] is not None for name, value in drawn.items() if value is not None):
        return
    values = {**context.params, **drawn, "mode": mode, "save_individual": None}
    words: list[str] = []
    for option in context.command.params:
        value, name = values.get(option.name), max(option.opts, key=len)
        if option.param_type_name != "option" or value is None or value == option.default:
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [name] + ([] if isinstance(one, bool) else [str(one)])
    typer.echo(f"replay: {shlex.join(words)}", err=True)
