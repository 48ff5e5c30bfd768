"""Options: one spelling for everything that more than one command takes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from causal_qwen.cli.checks import numpy_seed, torch_seed


def modes() -> list[str]:
    """For the shell to complete."""
    from causal_qwen.options import MODES

    return list(MODES)


Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A converted model or a hub name; the embedded one by default."
    ),
]
Prompt = Annotated[str, typer.Argument(help="The beginning of the text.")]
Mode = Annotated[
    str,
    typer.Option("--mode", help="standard, sampling, causal or compatible.", autocompletion=modes),
]
Who = Annotated[
    str | None, typer.Option("--individual", "-i", help="Who speaks: a seed, or a saved file.")
]


def temperature(usual: str) -> Any:
    return typer.Option("--temperature", "-t", help=f"Of the noise; {usual}.", min=0.0)


def min_density(usual: str) -> Any:
    what = f"Likelihood truncation{usual}."
    return typer.Option("--min-density", help=what, min=0.0, max=1.0)


Temperature = Annotated[float | None, temperature("1 by default")]
MinDensity = Annotated[float | None, min_density(", 0 to 1")]
# A conversation has its own: what keeps a small model on topic.
TalkTemperature = Annotated[float | None, temperature("4 by default, 1 in sampling")]
TalkMinDensity = Annotated[float | None, min_density("; 0.05 by default")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Of the likeliest tokens.", min=1)]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="Of the probability.", min=0.0, max=1.0)
]
Length = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens to say.", min=1)]
Chat = Annotated[bool, typer.Option("--chat", help="Ask as a user of a chat model.")]
Numbers = Annotated[str | None, typer.Option("--numbers", help="Read numbers as text or value.")]
SoftmaxSeed = Annotated[
    int | None,
    typer.Option("--seed", help="Of softmax sampling (compatible).", min=0, callback=torch_seed),
]
Seed = Annotated[
    int,
    typer.Option("--seed", help="Of everything that is drawn.", min=0, callback=numpy_seed),
]
Template = Annotated[
    str | None,
    typer.Option("--template", help='For CSV, e.g. "A {carat} carat ring costs |||{price}".'),
]
RowLength = Annotated[int, typer.Option("--max-length", help="Tokens of a row.", min=2)]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Rows at a time.", min=1)]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
