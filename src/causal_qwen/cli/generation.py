"""Generation: demo, generate, chat, counterfactual."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from causal_qwen.cli import options as opt
from causal_qwen.cli.models import load
from causal_qwen.options import Mode, Semantics
from causal_qwen.outputs import check_output_file, whole_file
from causal_qwen.terminal import print_json, status


def demo(
    model: opt.ModelName = "",
    device: opt.Device = "auto",
    dtype: opt.Precision = "auto",
    as_json: opt.Json = False,
) -> None:
    """Show the four modes, individuals, a counterfactual, and a number with its interval.

    Example: causal-qwen demo
    """
    processor, causal = load(model, None, device, dtype)
    from causal_qwen.cli.demo import run

    run(processor, causal, as_json=as_json)


def generate(
    context: typer.Context,
    prompt: opt.Prompt = None,
    model: opt.ModelName = "",
    device: opt.Device = "auto",
    dtype: opt.Precision = "auto",
    mode: opt.DecodingMode = None,
    individual: opt.IndividualName = None,
    temperature: opt.Temperature = None,
    min_density: opt.MinDensity = None,
    persistence: opt.Persistence = None,
    min_p: opt.MinP = None,
    whole_words: opt.WholeWords = None,
    avoid_repeats: opt.AvoidRepeats = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    seed: opt.SoftmaxSeed = None,
    max_new_tokens: opt.NewTokens = 60,
    numbers: opt.Numbers = None,
    chat: opt.Chat = False,
    save_individual: Annotated[
        Path | None, Option(help="Save the individual in this file.", callback=opt.writable)
    ] = None,
    source: Annotated[
        Path | None,
        Option(
            "--input",
            help="JSON lines with a prompt or messages, and any field of the server.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            help="The texts of --input, line by line; a second run resumes.", callback=opt.writable
        ),
    ] = None,
    force: opt.ForceFile = False,
    as_json: opt.Json = False,
) -> None:
    """Continue a prompt in one of the four modes, token by token; or every prompt of a file.

    Example: causal-qwen generate "The train was late" --individual 7
    """
    if source is not None or output is not None:
        if prompt is not None or source is None or output is None or save_individual is not None:
            raise ValueError("--input and --output go together, without a PROMPT.")
        _generate_lines(context, source, output)
        return
    if prompt is None:
        raise typer.BadParameter("Missing argument 'PROMPT'.", context)
    if save_individual is not None:
        check_output_file(save_individual, force)
    who, mode = opt.check_individual(individual, mode, is_saved=save_individual is not None)
    opt.check_seed(seed, mode)
    processor, causal = load(model, numbers, device, dtype)
    from causal_qwen.generation.streaming import chat_inputs, generate_text

    options, seed = opt.decoding_options(
        context, causal.resolve_settings, causal_mode=mode, individual=who
    )
    messages = [{"role": "user", "content": prompt}]
    inputs = chat_inputs(processor, messages) if chat else processor(prompt, return_tensors="pt")
    unprinted = [] if chat else [prompt]  # printed with the first text, so not before an error

    def write(text: str) -> None:
        print(unprinted.pop() if unprinted else "", text, sep="", end="", flush=True)

    result = generate_text(
        causal,
        processor,
        inputs,
        max_new_tokens=max_new_tokens,
        seed=seed,
        on_text=None if as_json else write,
        **options,
    )
    if save_individual is not None and result.individual is not None:
        result.individual.save(save_individual, overwrite=force)
    if as_json:
        record = {**result.to_dict(prompt), "max_new_tokens": max_new_tokens, "chat": chat}
        record["encode_numbers"] = numbers
        record["individual"] = individual if record["individual"] is None else record["individual"]
        print_json(record)
        return
    write("\n")
    opt.print_replay(context, result.settings.mode, options["individual"], seed)


def _generate_lines(context: typer.Context, source: Path, output: Path) -> None:
    """Options are the defaults of all lines."""
    given = context.params
    opt.check_seed(given["seed"], given["mode"])
    processor, causal = load(*(given[name] for name in ("model", "numbers", "device", "dtype")))
    from causal_qwen.cli.batch import ROWS, run
    from causal_qwen.serving.limits import Limits
    from causal_qwen.serving.torch_backend import TorchBackend

    noise = ("individual", "temperature", "min_density", "persistence")
    names = (*noise, "min_p", "whole_words", "avoid_repeats", "top_k", "top_p", "seed")
    defaults = {name: given[name] for name in names if given[name] is not None}
    defaults |= {"max_tokens": given["max_new_tokens"]}
    if given["mode"] is not None:
        defaults["causal_mode"] = given["mode"]
    backend = TorchBackend(causal, processor)
    limits = Limits(ROWS, 10 * ROWS, backend.context, backend.context)
    with status() as progress:
        failed = run(backend, source, output, defaults, limits, progress)
    if failed:
        raise ValueError(f"{failed} of the new lines of {output} are errors; see their 'error'.")


def chat(
    model: opt.ModelName = "",
    device: opt.Device = "auto",
    dtype: opt.Precision = "auto",
    mode: Annotated[Mode, Option(help="Decision rule.")] = "causal",
    individual: opt.IndividualName = None,
    temperature: opt.Temperature = None,
    min_density: opt.MinDensity = None,
    persistence: opt.Persistence = None,
    min_p: opt.MinP = None,
    whole_words: opt.WholeWords = None,
    avoid_repeats: opt.AvoidRepeats = None,
    max_new_tokens: opt.NewTokens = 200,
    numbers: opt.Numbers = None,
    system: Annotated[str | None, Option(help="A system message.")] = None,
    url: Annotated[
        str | None, Option(help="Chat with a server instead, such as http://127.0.0.1:8000.")
    ] = None,
    api_key: Annotated[
        str | None, Option(help="The server's API key.", envvar="CAUSAL_QWEN_API_KEY")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Chat with one individual over several turns; /help lists the commands.

    From a pipe, each line is one turn; with --json, so is each line of the output. A line that
    fails is reported and the next one is read; the exit code is then 1.

    Example: causal-qwen chat --individual 7
    """
    from causal_qwen.cli.turns import Speaker, run

    settings: dict[str, Any] = {
        "temperature": temperature,
        "min_density": min_density,
        "persistence": persistence,
        "min_p": min_p,
        "whole_words": whole_words,
        "avoid_repeats": avoid_repeats,
    }
    conversation: Speaker
    if url is not None:
        if model or numbers:
            raise ValueError("--url names the server, which has a model: leave out --model.")
        from causal_qwen.cli.remote_chat import RemoteConversation

        given = {name: value for name, value in settings.items() if value is not None}
        conversation = RemoteConversation(
            url, api_key, mode, individual, system, max_new_tokens, given
        )
    else:
        who, _ = opt.check_individual(individual, None)  # in any mode: /mode can change it
        processor, causal = load(model, numbers, device, dtype)
        from causal_qwen.cli.chat import Conversation

        conversation = Conversation(
            processor,
            causal,
            mode=mode,
            individual=who,
            system=system,
            max_new_tokens=max_new_tokens,
            **settings,
        )
    if run(conversation, as_json=as_json):
        raise typer.Exit(1)


def counterfactual(
    text: Annotated[str, Argument(help="The factual beginning.", callback=opt.given)],
    individual: opt.IndividualName = "0",
    prompt: Annotated[
        str | None, Option(help="Edit: another beginning.", callback=opt.given)
    ] = None,
    token: Annotated[
        str | None, Option(help='Edit: one token, "POSITION=TOKEN", counted from 0.')
    ] = None,
    number: Annotated[str | None, Option(help='Edit: a value, "INDEX=VALUE".')] = None,
    other_model: Annotated[str | None, Option(help="Edit: another model.")] = None,
    semantics: Annotated[
        Semantics, Option(help="Keep all noise (pearl) or redraw chance (disco).")
    ] = "pearl",
    model: opt.ModelName = "",
    device: opt.Device = "auto",
    dtype: opt.Precision = "auto",
    temperature: opt.Temperature = None,
    min_density: opt.MinDensity = None,
    persistence: opt.Persistence = None,
    min_p: opt.MinP = None,
    whole_words: opt.WholeWords = None,
    avoid_repeats: opt.AvoidRepeats = None,
    max_new_tokens: opt.NewTokens = 40,
    html: Annotated[
        Path | None, Option(help="Also write an HTML table.", callback=opt.writable)
    ] = None,
    force: opt.ForceFile = False,
    as_json: opt.Json = False,
) -> None:
    """Compare the texts of one individual before and after an edit.

    Example: causal-qwen counterfactual "The king" --prompt "The queen" -i 7
    """
    if html is not None:
        check_output_file(html, force)
    who, _ = opt.check_individual(individual or "0", "causal")
    from causal_qwen.analysis.counterfactual import counterfactual as run
    from causal_qwen.analysis.counterfactual import parse_edit
    from causal_qwen.generation.streaming import remaining_context

    edit = parse_edit(prompt, token, number, other_model)
    processor, causal = load(model, None, device, dtype)
    if other_model is not None:
        edit = parse_edit(other_model=load(other_model, None, device, dtype)[1])
    encoding = "value" if number is not None else None
    inputs = processor(text, return_tensors="pt", encode_numbers=encoding)
    own = {"temperature": temperature, "min_density": min_density, "persistence": persistence}
    named = own | {"min_p": min_p, "whole_words": whole_words, "avoid_repeats": avoid_repeats}
    options: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    with status() as progress:
        progress("generating both texts")
        result = run(
            causal,
            inputs,
            who,
            edit,
            semantics=semantics,
            processor=processor,
            max_new_tokens=min(max_new_tokens, remaining_context(causal, inputs)),
            **options,
        )
    settings = causal.resolve_settings(causal_mode="causal", **options)
    record = {**settings.to_dict(result.individual), "max_new_tokens": max_new_tokens}
    _show(result, html, force, record if as_json else None)


def _show(result: Any, html: Path | None, force: bool, record: dict[str, Any] | None) -> None:
    """A counterfactual as an HTML file, and as JSON with the record of its settings or a table."""
    if html is not None:
        with whole_file(html, force) as partial:
            partial.write_text(result.to_html(), encoding="utf-8")
    if record is None:
        result.show()
    else:
        print_json({**result.to_dict(), "settings": record})
