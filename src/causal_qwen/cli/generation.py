"""Speaking: demo, generate, chat, counterfactual."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from causal_qwen.cli.checks import (
    check_file,
    check_mode,
    check_numbers,
    check_prompt,
    check_seed,
    who_speaks,
)
from causal_qwen.cli.models import load
from causal_qwen.cli.options import (
    Chat,
    Json,
    Length,
    MinDensity,
    Mode,
    Model,
    Numbers,
    Prompt,
    SoftmaxSeed,
    TalkMinDensity,
    TalkTemperature,
    Temperature,
    TopK,
    TopP,
    Who,
)
from causal_qwen.options import SEMANTICS, check_choice
from causal_qwen.terminal import print_json, status

PLACE_OF_TOKEN = 'Edit: one token, "POSITION=TOKEN", counted from 0 with the prompt\'s own.'


def demo(model: Model = "", as_json: Json = False) -> None:
    """Meet it: four modes, individuals, a counterfactual, a number with its interval.

    Example: causal-qwen demo
    """
    processor, causal = load(model)
    from causal_qwen.cli.demo import run

    run(processor, causal, as_json=as_json)


def generate(
    prompt: Prompt,
    model: Model = "",
    mode: Mode = "standard",
    individual: Who = None,
    temperature: Temperature = None,
    min_density: MinDensity = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: SoftmaxSeed = None,
    max_new_tokens: Length = 60,
    numbers: Numbers = None,
    chat: Chat = False,
    save_individual: Annotated[
        Path | None, typer.Option("--save-individual", help="Keep who spoke in this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt in one of the four modes, word by word.

    Example: causal-qwen generate "The train was late" --mode causal -i 7 --min-density 0.05 -t 4
    """
    check_prompt(prompt)
    check_mode(mode)
    check_numbers(numbers)
    check_seed(seed, mode)
    check_file(save_individual)
    who = who_speaks(individual, mode, is_kept=save_individual is not None)
    processor, causal = load(model, numbers)
    from causal_qwen.generation.streaming import read_chat, say

    if chat:
        inputs = read_chat(processor, [{"role": "user", "content": prompt}])
    else:
        inputs = processor(prompt, return_tensors="pt")
    said = say(
        processor,
        causal,
        inputs,
        mode=mode,
        who=who,
        temperature=temperature,
        min_density=min_density,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_new_tokens=max_new_tokens,
        is_live=not as_json,
        is_prompt_shown=not chat,
    )
    if save_individual is not None and said.individual is not None:
        said.individual.save(save_individual)
    if as_json:
        print_json(said.to_dict(prompt, mode))
    elif who is None and said.individual is not None:  # drawn just now: how to meet it again
        typer.echo(f"(--individual {said.individual.seed} says it again)", err=True)


def converse(
    model: Model = "",
    mode: Mode = "causal",
    individual: Who = None,
    temperature: TalkTemperature = None,
    min_density: TalkMinDensity = None,
    max_new_tokens: Length = 200,
    numbers: Numbers = None,
    system: Annotated[
        str | None, typer.Option("--system", help="What the model is told beforehand.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Talk with one individual over several turns; /help lists what can be done meanwhile.

    Unless asked otherwise, an individual speaks at --temperature 4 --min-density 0.05, which keeps
    a small model on topic. From a pipe, one line is one turn; with --json, so is one line of the
    answer.

    Example: causal-qwen chat --individual 7
    """
    check_mode(mode)
    check_numbers(numbers)
    who = who_speaks(individual, None)  # whatever the mode: /mode changes it
    processor, causal = load(model, numbers)
    from causal_qwen.cli.chat import Conversation, run

    conversation = Conversation(
        processor,
        causal,
        mode=mode,
        individual=who,
        system=system,
        temperature=temperature,
        min_density=min_density,
        max_new_tokens=max_new_tokens,
    )
    run(conversation, as_json=as_json)


def counterfactual(
    text: Annotated[str, typer.Argument(help="The beginning of the text, as it was.")],
    individual: Who = "0",
    prompt: Annotated[str | None, typer.Option(help="Edit: another beginning.")] = None,
    token: Annotated[str | None, typer.Option(help=PLACE_OF_TOKEN)] = None,
    number: Annotated[str | None, typer.Option(help='Edit: a value, "INDEX=VALUE".')] = None,
    other_model: Annotated[str | None, typer.Option(help="Edit: another model.")] = None,
    semantics: Annotated[str, typer.Option(help="pearl, or disco: redraw chance.")] = "pearl",
    model: Model = "",
    temperature: Temperature = None,
    min_density: MinDensity = None,
    max_new_tokens: Length = 40,
    html: Annotated[Path | None, typer.Option(help="Also write the table to this file.")] = None,
    as_json: Json = False,
) -> None:
    """What the same individual would have said had the text, or the model, been different.

    Example: causal-qwen counterfactual "The king" --prompt "The queen" -i 7 --min-density 0.05 -t 4
    """
    check_prompt(text, prompt)
    check_choice("--semantics", semantics, SEMANTICS)
    check_file(html)
    who = who_speaks(individual or "0", "causal")
    from causal_qwen.analysis.counterfactual import counterfactual as run
    from causal_qwen.analysis.counterfactual import parse_edit
    from causal_qwen.generation.streaming import room_after

    edit = parse_edit(prompt, token, number, other_model)
    processor, causal = load(model)
    if other_model is not None:
        edit = parse_edit(other_model=load(other_model)[1])
    way = "value" if number is not None else None
    inputs = processor(text, return_tensors="pt", encode_numbers=way)
    options: dict[str, Any] = {"temperature": temperature, "min_density": min_density}
    with status() as progress:
        progress("speaking in both worlds")
        result = run(
            causal,
            inputs,
            who,
            edit,
            semantics=semantics,
            processor=processor,
            max_new_tokens=min(max_new_tokens, room_after(causal, inputs)),
            **{name: value for name, value in options.items() if value is not None},
        )
    if html is not None:
        html.write_text(result.to_html(), encoding="utf-8")
    if as_json:
        print_json(result.to_dict())
    else:
        result.show()
