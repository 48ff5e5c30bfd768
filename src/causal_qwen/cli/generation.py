"""Generation: demo, generate, chat, counterfactual."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from causal_qwen.cli import options as opt
from causal_qwen.options import Mode, Semantics
from causal_qwen.outputs import check_output_file, write_text
from causal_qwen.terminal import print_json, status

if TYPE_CHECKING:
    from causal_qwen.session import Session


def demo(model: opt.ModelName = "") -> None:
    """Show the four modes, individuals, a counterfactual, and a number with its interval.

    Example: causal-qwen demo
    """
    from causal_qwen.cli.demo import run
    from causal_qwen.session import choose_engine
    from causal_qwen.session import open as open_session

    run(open_session(model, "auto" if choose_engine("auto", model) == "llama.cpp" else "torch"))


def generate(
    context: typer.Context,
    prompt: opt.Prompt = None,
    model: opt.ModelName = "",
    engine: opt.Engine = "auto",
    device: opt.Device = "auto",
    mode: opt.DecodingMode = None,
    individual: opt.IndividualName = None,
    temperature: opt.Temperature = None,
    seed: opt.SoftmaxSeed = None,
    max_new_tokens: opt.NewTokens = 60,
    settings: opt.Settings = None,
    chat: opt.Chat = False,
    watch: Annotated[
        bool, Option("--watch", help="Show every token with its probability and runners-up.")
    ] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print only the new text.")] = False,
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
    elif prompt is None:
        raise typer.BadParameter("Missing argument 'PROMPT'.", context)
    if save_individual is not None:
        check_output_file(save_individual, force)
    who, mode = opt.check_individual(individual, mode, is_saved=save_individual is not None)
    opt.check_seed(seed, mode)
    from causal_qwen.cli.live_view import RUNNERS_UP, show, shown
    from causal_qwen.session import open as open_session

    decoding, opening = opt.split_settings(context)
    session = open_session(model, engine, device=device, **opening)
    if source is not None and output is not None:
        _generate_lines(session, context.params, decoding, source, output)
        return
    assert prompt is not None
    options = {"mode": mode, "seed": seed, **decoding}
    begin = [{"role": "user", "content": prompt}] if chat else prompt
    options["alternatives"] = RUNNERS_UP + 1 if watch else None
    stream = session.stream(begin, who, max_new_tokens=max_new_tokens, **options)
    opt.check_seed(seed, stream.settings.mode)
    tokens = []
    if watch and not as_json and not quiet and sys.stdout.isatty():
        from rich.console import Console

        show(stream, prompt, Console(highlight=False))
    else:
        unprinted = [] if chat or quiet else [prompt]  # with the first text: not before an error
        for text in stream:
            if not as_json:
                print(unprinted.pop() if unprinted else "", text, sep="", end="", flush=True)
            elif watch:
                tokens.append(shown(stream))
        print("", end="" if as_json else "\n")
    result = stream.result
    if save_individual is not None and result.individual is not None:
        result.individual.save(save_individual, overwrite=force)
    if as_json:
        record = {**result.to_dict(prompt), "max_new_tokens": max_new_tokens, "chat": chat}
        record["encode_numbers"] = opening.get("numbers")
        if watch:
            names = ("token", "probability", "runners_up")
            record["tokens"] = [dict(zip(names, token, strict=True)) for token in tokens]
        if session.engine.default_mode != "compatible":
            own = {name: v for name, v in decoding.items() if name not in ("top_k", "top_p")}
            record["shares"] = session.shares(begin, **own).to_dict()["tokens"]
        record["individual"] = individual if record["individual"] is None else record["individual"]
        print_json(record)
        return
    if not quiet:
        drawn = None if result.individual is None else result.individual.seed
        opt.print_replay(context, result.settings.mode, drawn, result.seed)


def _generate_lines(
    session: Session, given: dict[str, Any], decoding: dict[str, Any], source: Path, output: Path
) -> None:
    """Options are the defaults of all lines."""
    from causal_qwen.cli.batch import ROWS, run
    from causal_qwen.serving.requests import Limits

    defaults = {name: given[name] for name in ("individual", "seed") if given[name] is not None}
    defaults |= {"max_tokens": given["max_new_tokens"], **decoding}
    if given["mode"] is not None:
        defaults["causal_mode"] = given["mode"]
    context = session.engine.context
    limits = Limits(ROWS, 10 * ROWS, context, context)
    with status() as progress:
        failed = run(session.engine, source, output, defaults, limits, progress)
    if failed:
        raise ValueError(f"{failed} of the new lines of {output} are errors; see their 'error'.")


def chat(
    context: typer.Context,
    named: Annotated[
        str, Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)
    ] = "",
    model: opt.ModelName = "",
    engine: opt.Engine = "auto",
    device: opt.Device = "auto",
    mode: Annotated[Mode, Option(help="Decision rule.")] = "causal",
    individual: opt.IndividualName = None,
    temperature: opt.Temperature = None,
    max_new_tokens: opt.NewTokens = 200,
    settings: opt.Settings = None,
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

    Example: causal-qwen chat model.gguf --individual 7
    """
    from causal_qwen.cli.chat import Conversation, RemoteConversation, run

    if named and model:
        raise ValueError(f"Two models are named, {named} and {model}; leave one out.")
    model = named or model

    decoding, opening = opt.split_settings(context)
    begin = mode, individual, system, max_new_tokens, decoding
    conversation: Conversation
    if url is not None:
        if model or opening:
            raise ValueError("--url names the server, which has a model: leave out --model.")
        from causal_qwen.serving.client import Client

        conversation = RemoteConversation(Client(url, api_key), *begin)
    else:
        who, _ = opt.check_individual(individual, None)  # in any mode: /mode can change it
        from causal_qwen.session import open as open_session

        session = open_session(model, engine, device=device, **opening)
        conversation = Conversation(session, mode, who, *begin[2:])
    if run(conversation, as_json=as_json):
        raise typer.Exit(1)


def counterfactual(
    context: typer.Context,
    text: Annotated[str, Argument(help="The factual beginning.", callback=opt.given)],
    individual: opt.IndividualName = "0",
    prompt: Annotated[
        str | None, Option(help="Edit: another beginning.", callback=opt.given)
    ] = None,
    token: Annotated[
        str | None, Option(help='Edit: one token, "POSITION=TOKEN", counted from 0.')
    ] = None,
    number: Annotated[str | None, Option(help='Edit: a value, "INDEX=VALUE".')] = None,
    semantics: Annotated[
        Semantics, Option(help="Keep all noise (pearl) or redraw chance (disco).")
    ] = "pearl",
    model: opt.ModelName = "",
    device: opt.Device = "auto",
    temperature: opt.Temperature = None,
    max_new_tokens: opt.NewTokens = 40,
    settings: opt.Settings = None,
    html: Annotated[
        Path | None, Option(help="Also write an HTML table.", callback=opt.writable)
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Compare the texts of one individual before and after an edit.

    Example: causal-qwen counterfactual "The king" --prompt "The queen" -i 7
    """
    if html is not None:
        check_output_file(html, overwrite=False)
    who, _ = opt.check_individual(individual or "0", "causal")
    from causal_qwen.session import choose_engine
    from causal_qwen.session import open as open_session

    decoding, opening = opt.split_settings(context)
    if prompt is not None and html is None and choose_engine("auto", model) == "llama.cpp":
        session = open_session(model, device=device, **opening)
        both = session.counterfactual(text, prompt, who, max_new_tokens=max_new_tokens, **decoding)
        print_json(both.to_dict()) if as_json else both.show()
        return
    from causal_qwen.analysis.counterfactual import parse_edit

    edit = parse_edit(prompt, token, number)
    session = open_session(model, "torch", device=device, **opening)
    causal = session.model
    encoding = "value" if number is not None else None
    inputs = session.processor(text, return_tensors="pt", encode_numbers=encoding)
    room = session.engine.context - inputs["input_ids"].shape[1]
    if room < 1:
        raise ValueError(
            f"The prompt has {inputs['input_ids'].shape[1]} tokens; this model reads 1 to "
            f"{session.engine.context - 1}."
        )
    with status() as progress:
        progress("generating both texts")
        length = min(max_new_tokens, room)
        named = {"semantics": semantics, "max_new_tokens": length, **decoding}
        result = session.counterfactual(inputs, edit, who, **named)
    if html is not None:
        write_text(html, result.to_html())
    if not as_json:
        result.show()
        return
    resolved = causal.resolve_settings(causal_mode="causal", **decoding)
    record = {**resolved.to_dict(result.individual), "max_new_tokens": max_new_tokens}
    print_json({**result.to_dict(), "settings": record})
