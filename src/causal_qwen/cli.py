"""Command line: parse, call, show. Nothing is computed here.

Heavy imports stand inside the commands, so that `causal-qwen --help` answers at once.
"""

from __future__ import annotations

import math
import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from causal_qwen.shown import counted, print_json, show_rows, status

NAME = "causal-qwen"

app = typer.Typer(
    name=NAME,
    help="A language model that decides like an individual.",
    epilog="Begin with: causal-qwen demo",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _modes() -> list[str]:
    from causal_qwen.engine.generation import MODES

    return list(MODES)


# One spelling for everything that more than one command takes.
Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A converted model or a hub name; the embedded one by default."
    ),
]
Prompt = Annotated[str, typer.Argument(help="The beginning of the text.")]
Mode = Annotated[
    str,
    typer.Option("--mode", help="standard, sampling, causal or compatible.", autocompletion=_modes),
]
Who = Annotated[
    str | None, typer.Option("--individual", "-i", help="Who speaks: a seed, or a saved file.")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", "-t", help="Of the noise; 1 by default.", min=0.0)
]
MinDensity = Annotated[
    float | None,
    typer.Option("--min-density", help="Likelihood truncation, 0 to 1.", min=0.0, max=1.0),
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Of the likeliest tokens.", min=1)]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="Of the probability.", min=0.0, max=1.0)
]
Length = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens to say.", min=1)]
Chat = Annotated[bool, typer.Option("--chat", help="Ask as a user of a chat model.")]
Numbers = Annotated[str | None, typer.Option("--numbers", help="Read numbers as text or value.")]
SoftmaxSeed = Annotated[
    int | None, typer.Option("--seed", help="Of softmax sampling (compatible).", min=0)
]
Seed = Annotated[int, typer.Option("--seed", help="Of everything that is drawn.", min=0)]
Template = Annotated[
    str | None,
    typer.Option("--template", help='For CSV, e.g. "A {carat} carat ring costs |||{price}".'),
]
RowLength = Annotated[int, typer.Option("--max-length", help="Tokens of a row.", min=2)]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Rows at a time.", min=1)]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show an error's traceback; may stand anywhere.")
    ] = False,
) -> None:
    """`main` has taken --debug out already: it is declared for the help page."""


@app.command()
def demo(model: Model = "", as_json: Json = False) -> None:
    """Meet it: four modes, individuals, a counterfactual, a number with its interval.

    Example: causal-qwen demo
    """
    processor, causal = _load(model)
    from causal_qwen.demo import run

    run(processor, causal, as_json=as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """What is installed, which model, which device, what is missing and how to get it.

    Example: causal-qwen doctor
    """
    from rich.console import Console

    from causal_qwen.doctor import examine

    with status(not as_json) as progress:
        progress("looking around")
        diagnosis = examine()
    if as_json:
        print_json(diagnosis.to_dict())
    else:
        Console(highlight=False).print(diagnosis)
    if not diagnosis.is_well:
        raise typer.Exit(1)


@app.command()
def convert(
    base: Annotated[
        str,
        typer.Argument(help="smollm2-135m, a hub name, a Qwen2 or Llama directory, a GGUF file."),
    ],
    output: Annotated[Path, typer.Argument(help="The directory to create.")],
    init: Annotated[
        str, typer.Option(help="calibrated, or documents for the sources' literal numbers.")
    ] = "calibrated",
    causal_size: Annotated[
        int | None, typer.Option(help="C, the individual's size; the hidden size by default.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the base model's by default.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file to calibrate on, one passage per line.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Turn a Qwen2 checkpoint into a causal model that behaves exactly like it.

    Example: causal-qwen convert smollm2-135m my-model
    """
    from causal_qwen.convert import convert as run

    passages = None if text is None else [line for line in _lines(text) if line.strip()]
    with status() as progress:
        report = run(
            base,
            output,
            init=init,
            causal_size=causal_size,
            dtype=dtype,
            texts=passages,
            overwrite=force,
            progress=progress,
        )
    record = asdict(report)
    if as_json:
        print_json(record)
        return
    facts = record | (record.pop("calibration") or {})
    rows = [(name.replace("_", " "), _said(value)) for name, value in facts.items()]
    show_rows(f"{report.base} -> {output}", (), rows)


@app.command()
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

    Example: causal-qwen generate "The train was late, so" --mode causal --individual 7
    """
    if not prompt.strip():
        raise ValueError("The prompt is empty; write a few words.")
    _check_mode(mode)
    if (individual or save_individual) is not None and mode not in ("sampling", "causal"):
        raise ValueError(f"--individual has no part in mode {mode!r}; use causal or sampling.")
    from causal_qwen.individual import called

    who = None if individual is None else called(individual)
    processor, causal = _load(model, numbers)
    from causal_qwen.speech import read_chat, say

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


@app.command("chat")
def converse(
    model: Model = "",
    mode: Mode = "causal",
    individual: Who = None,
    temperature: Temperature = None,
    min_density: MinDensity = None,
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
    from causal_qwen.individual import called

    _check_mode(mode)
    who = None if individual is None else called(individual)
    processor, causal = _load(model, numbers)
    from causal_qwen.chat import Conversation, run

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


@app.command()
def counterfactual(
    text: Annotated[str, typer.Argument(help="The beginning of the text, as it was.")],
    individual: Who = "0",
    prompt: Annotated[str | None, typer.Option(help="Edit: another beginning.")] = None,
    token: Annotated[str | None, typer.Option(help='Edit: one token, "POSITION=TOKEN".')] = None,
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

    Example: causal-qwen counterfactual "The king's daughter" --prompt "The king's son" -i 7
    """
    from causal_qwen.counterfactual import counterfactual as run
    from causal_qwen.counterfactual import parse_edit
    from causal_qwen.individual import called

    edit = parse_edit(prompt, token, number, other_model)
    who = called(individual or "0")
    processor, causal = _load(model)
    if other_model is not None:
        edit = parse_edit(other_model=_load(other_model)[1])
    way = "value" if number is not None else None
    options: dict[str, Any] = {"temperature": temperature, "min_density": min_density}
    with status() as progress:
        progress("speaking in both worlds")
        result = run(
            causal,
            processor(text, return_tensors="pt", encode_numbers=way),
            who,
            edit,
            semantics=semantics,
            processor=processor,
            max_new_tokens=max_new_tokens,
            **{name: value for name, value in options.items() if value is not None},
        )
    if html is not None:
        html.write_text(result.to_html(), encoding="utf-8")
    if as_json:
        print_json(result.to_dict())
    else:
        result.show()


@app.command()
def fit(
    data: Annotated[str, typer.Argument(help="A CSV file with a header.")],
    target: Annotated[
        list[str], typer.Option("--target", "-y", help="The column to predict; may be repeated.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="A new directory.")],
    text: Annotated[
        list[str] | None, typer.Option(help="A column of free text; may be repeated.")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="A column to learn from; all of them by default.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option("--template", help='E.g. "A {carat} carat ring, {cut}, costs"; else made.'),
    ] = None,
    weight: Annotated[str | None, typer.Option(help="A column of row weights.")] = None,
    backbone: Annotated[str, typer.Option(help="frozen, finetune or scratch.")] = "frozen",
    model: Model = "",
    calibration: Annotated[
        float, typer.Option(help="The share of rows held out to calibrate on.", min=0.0, max=0.9)
    ] = 0.2,
    max_length: RowLength = 512,
    seed: Seed = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Learn to predict numbers from the rows of a table, with calibrated intervals.

    Example: causal-qwen fit rings.csv --target price --text description --output priced
    """
    from causal_qwen.tabular import fit_csv

    report = fit_csv(
        data,
        target,
        output,
        columns=column or (),
        weight=weight,
        calibration=calibration,
        overwrite=force,
        seed=seed,
        text=text or None,
        template=template,
        backbone=backbone,
        model=_unless_embedded(model),
        max_length=max_length,
    )
    if as_json:
        print_json(report)
        return
    for note in report["notes"]:
        typer.echo(f"note: {note}", err=True)
    rows: list[tuple[str, float]] = [
        (name.replace("_", " "), report[name]) for name in ("rows", "calibration_rows")
    ]
    for one, metrics in report["targets"].items():
        rows += [(f"{one}: {name.replace('_', ' ')}", value) for name, value in metrics.items()]
    show_rows(output, (), rows)


@app.command()
def predict(
    first: Annotated[
        str,
        typer.Argument(
            metavar="FITTED",
            show_default=False,
            help="What `causal-qwen fit` has written; may be given as --model instead.",
        ),
    ] = "",
    second: Annotated[
        str,
        typer.Argument(
            metavar="DATA", show_default=False, help="A CSV file with the same columns."
        ),
    ] = "",
    model: Annotated[str, typer.Option("--model", "-m", help="As FITTED.")] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A CSV file; else it is printed.")
    ] = None,
    level: Annotated[float, typer.Option(help="Of the interval, 0 to 1.")] = 0.9,
    raw: Annotated[bool, typer.Option("--raw", help="The Cauchy's own interval.")] = False,
    as_json: Json = False,
) -> None:
    """Put a median and an interval beside every row of a table.

    Example: causal-qwen predict priced more-rings.csv --level 0.8 --output answers.csv
    """
    import warnings

    fitted, data = _model_first(first, second, model)
    if not (fitted and data):
        raise ValueError("Predicting needs what `causal-qwen fit` has written, and a CSV file.")
    from causal_qwen.tabular import predict_csv

    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        table = predict_csv(fitted, data, level=level, calibrated=False if raw else None)
    for note in notes:
        typer.echo(f"note: {note.message}", err=True)
    if output is not None:
        table.to_csv(output, index=False)
    elif as_json:
        typer.echo(table.to_json(orient="records"))
    else:
        typer.echo(table.to_csv(index=False), nl=False)


@app.command()
def train(
    data: Annotated[
        str, typer.Option("--data", "-d", help="JSONL, CSV, text, or a dataset's name.")
    ] = "",
    output: Annotated[str, typer.Option("--output", "-o", help="A new directory.")] = "",
    model: Model = "",
    from_scratch: Annotated[
        str | None, typer.Option(help="No base model: tiny, small or medium, untrained.")
    ] = None,
    eval_data: Annotated[str | None, typer.Option(help="Held-out rows; else 5% of DATA.")] = None,
    template: Template = None,
    numbers: Numbers = None,
    steps: Annotated[int, typer.Option(help="Instead of epochs.", min=-1)] = -1,
    epochs: Annotated[float, typer.Option(help="Times that every row is seen.", min=0.0)] = 1.0,
    learning_rate: Annotated[
        float | None,
        typer.Option("--learning-rate", "--lr", help="2e-5; from scratch 3e-3.", min=0.0),
    ] = None,
    head_learning_rate: Annotated[
        float | None, typer.Option(help="Of the causal heads; as all else by default.", min=0.0)
    ] = None,
    batch_size: BatchSize = 8,
    accumulate: Annotated[int, typer.Option(help="Batches to a step.", min=1)] = 1,
    max_length: RowLength = 512,
    pack: Annotated[bool, typer.Option("--pack", help="Several rows side by side.")] = False,
    eval_steps: Annotated[int, typer.Option(help="Between evaluations.", min=1)] = 100,
    save_steps: Annotated[int, typer.Option(help="Between checkpoints.", min=1)] = 100,
    log_steps: Annotated[int, typer.Option(help="Between lines of the log.", min=1)] = 10,
    early_stopping: Annotated[
        int, typer.Option(help="Evaluations without a better loss; keeps the best.", min=0)
    ] = 0,
    scheduler: Annotated[str, typer.Option(help="Of the learning rate, as in HF.")] = "cosine",
    clip: Annotated[float, typer.Option(help="The gradient's norm.", min=0.0)] = 1.0,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, more time.")
    ] = False,
    what: Annotated[str, typer.Option("--train", help="all, or heads only.")] = "all",
    lora: Annotated[int, typer.Option(help="LoRA's rank; 0 is none.", min=0)] = 0,
    compat_weight: Annotated[
        float | None, typer.Option(help="Of the softmax term; 0 is the documents' loss.", min=0.0)
    ] = None,
    report_to: Annotated[str, typer.Option(help="tensorboard, wandb, trackio or none.")] = "none",
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    seed: Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from a checkpoint.")] = False,
    mock: Annotated[bool, typer.Option("--mock", help="A simulation with a known truth.")] = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a converted model on text and numbers.

    Example: causal-qwen train --data rows.jsonl --output tuned --steps 200
    """
    if mock:
        _mock(seed, as_json)
        return
    if not data or not output:
        raise ValueError("Training needs --data and --output (or --mock, which needs neither).")
    if precision not in ("fp32", "bf16", "fp16"):
        raise ValueError(f"--precision {precision} is unknown; choose fp32, bf16 or fp16.")
    if from_scratch is not None and (model or lora or what == "heads"):
        raise ValueError(
            "--from-scratch trains all of a new model; leave --model, --lora, --train."
        )
    from causal_qwen.train import COMPAT_WEIGHT, Run
    from causal_qwen.train import train as run

    if learning_rate is None:
        learning_rate = 2e-5 if from_scratch is None else 3e-3
    arguments = {
        "max_steps": steps,
        "num_train_epochs": epochs,
        "learning_rate": learning_rate,
        "head_learning_rate": head_learning_rate,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "gradient_accumulation_steps": accumulate,
        "eval_strategy": "steps",
        "eval_steps": eval_steps,
        "save_steps": save_steps,
        "save_total_limit": 2,
        "logging_steps": log_steps,
        "train": what,
        "report_to": report_to,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "lr_scheduler_type": scheduler,
        "warmup_steps": 0.05,
        "max_grad_norm": clip,
        "gradient_checkpointing": gradient_checkpointing,
        "seed": seed,
    }
    typer.echo("reading the model and the data ...", err=True)  # training has a bar of its own
    metrics = run(
        Run(
            None if from_scratch is not None else _path(model),
            data,
            output,
            scratch=from_scratch or "",
            eval_data=eval_data,
            template=template,
            numbers=numbers,
            max_length=max_length,
            pack=pack,
            patience=early_stopping,
            compat_weight=COMPAT_WEIGHT if compat_weight is None else compat_weight,
            lora=lora,
            resume=resume,
            arguments=arguments,
        )
    )
    _show_metrics({"this model": metrics}, output, as_json)


@app.command()
def evaluate(
    data: Annotated[str, typer.Argument(help="Held-out rows: JSONL, CSV, text or a dataset.")],
    model: Model = "",
    base: Annotated[str | None, typer.Option(help="A second model, e.g. before training.")] = None,
    template: Template = None,
    numbers: Numbers = None,
    max_length: RowLength = 512,
    batch_size: BatchSize = 8,
    as_json: Json = False,
) -> None:
    """Accuracy, perplexity, one-vs-rest likelihood and everything about numbers, on held-out rows.

    Example: causal-qwen evaluate rows.jsonl --model tuned
    """
    from causal_qwen.train import evaluate as run

    found: dict[str, dict[str, float]] = {}
    for name, path in {"this model": _path(model), **({"base": base} if base else {})}.items():
        typer.echo(f"loading {path} ...", err=True)
        with counted("evaluating") as count:
            found[name] = run(path, data, template, max_length, batch_size, numbers, count)
    _show_metrics(found, _path(model), as_json)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The output directory of a training run.")],
    as_json: Json = False,
) -> None:
    """Draw a training run's curves: PNG files and an HTML page.

    Example: causal-qwen report tuned
    """
    from causal_qwen.report import write_report

    with status(not as_json) as progress:
        progress("drawing")
        page = write_report(run)
    if as_json:
        pictures = sorted(str(picture) for picture in page.parent.glob("*.png"))
        print_json({"page": str(page), "pictures": pictures})
    else:
        typer.echo(page)


@app.command("np-generate")
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
            "--mode", help="As in generate; the model's own by default.", autocompletion=_modes
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

    Example: causal-qwen np-generate my-model "The train was late, so" --mode causal -i 7
    """
    model, prompt = _model_first(first, second, model)
    if not prompt.strip():
        raise ValueError("The prompt is empty; write a few words.")
    _check_mode(mode)
    from causal_qwen.engine import Engine
    from causal_qwen.individual import called
    from causal_qwen.watch import as_record, watch

    engine = Engine.from_pretrained(_directory(model), dtype=dtype)
    who = None if individual is None else called(individual)
    if who is None and mode in ("sampling", "causal"):
        who = secrets.randbelow(2**62)  # said in JSON, so that the text can be told again
    options: dict[str, Any] = {"mode": mode, "individual": who}
    options |= {"min_density": min_density, "encode_numbers": numbers}
    options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    if engine.heads is None or mode == "compatible":
        random = (temperature, top_k, top_p, seed)
        options["do_sample"] = True if any(value is not None for value in random) else None
    options |= {"max_new_tokens": max_new_tokens, "chat": chat}
    if as_json:
        steps = list(engine.stream(prompt, summarize=summary, **options))
        told = who if who is None or isinstance(who, int) else who.seed
        print_json({**as_record(prompt, steps), "mode": mode, "individual": told})
    else:
        watch(engine, prompt, quiet=quiet, attention=attention, summary=summary, **options)


@app.command()
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
    directory = _directory(which or model)
    from causal_qwen.verify import PROMPT, TOLERANCE, live, plot
    from causal_qwen.verify import verify as run

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


@app.command("app")
def playground(
    model: Model = "",
    host: Annotated[str, typer.Option("--host", help="The address to answer on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The port.", min=0, max=65535)] = 7860,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")
    ] = True,
) -> None:
    """Open the playground in the browser; everything stays on this machine. Ctrl-C ends it.

    Example: causal-qwen app --port 7861
    """
    from causal_qwen.playground import launch

    launch(model=_unless_embedded(model) or "", host=host, port=port, open_browser=browser)


# ---------------------------------------------------------------- models


def _unless_embedded(model: str) -> str | None:
    """A model's name; None stands for the embedded one, however it was named."""
    from causal_qwen.home import EMBEDDED

    is_embedded = not model or (model == EMBEDDED and not Path(model).exists())
    return None if is_embedded else model


def _path(model: str) -> str:
    """A model's name as it is; the embedded one's directory, converted once."""
    if (named := _unless_embedded(model)) is not None:
        return named
    from causal_qwen.convert import default_model

    with status() as progress:
        return str(default_model(progress))


def _directory(model: str) -> Path:
    """A model's files on this disk, for NumPy: torch is only needed to convert the embedded one."""
    from causal_qwen.home import embedded_directory, is_converted, model_directory

    if (named := _unless_embedded(model)) is not None:
        return model_directory(named)
    embedded = embedded_directory()
    return embedded if is_converted(embedded) else Path(_path(model))


def _load(model: str, numbers: str | None = None) -> tuple[Any, Any]:
    """A processor and its model, ready to speak."""
    path = _path(model)
    with status() as progress:
        progress("loading the model")
        from causal_qwen.convert import open_model

        processor, causal = open_model(path)
    processor.encode_numbers = numbers or processor.encode_numbers
    return processor, causal


def _model_first(first: str, second: str, model: str) -> tuple[str, str]:
    """MODEL and what comes after it, where MODEL may be left out or be given as --model."""
    if second and model:
        raise ValueError(f"Two models were given, {first} and {model}: leave one out.")
    if not second and not model and Path(first).is_dir():
        return first, ""  # a model, and nothing after it
    return (first, second) if second else (model, first)


def _check_mode(mode: str | None) -> None:
    """Before a model is loaded for nothing."""
    if mode is not None and mode not in _modes():
        raise ValueError(f"--mode {mode} is unknown; choose one of {', '.join(_modes())}.")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


# ---------------------------------------------------------------- results


def _said(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _show_metrics(found: dict[str, dict[str, float]], title: str, as_json: bool) -> None:
    """The first model's metrics, and others beside them."""
    first, *others = found
    if as_json:
        print_json({**found[first], **{name: found[name] for name in others}})
        return
    rows = [
        (name.removeprefix("eval_"), *(one.get(name, math.nan) for one in found.values()))
        for name in found[first]
    ]
    show_rows(title, ("", *found) if others else (), rows)


def _mock(seed: int, as_json: bool) -> None:
    """Train on a simulation, and compare what was found with what is true."""
    from causal_qwen.mock import STEPS, simulate

    with counted("learning a known world", not as_json) as count:
        findings = simulate(seed=seed, progress=lambda step, _: count(step, STEPS))
    if as_json:
        print_json([{**asdict(one), "is_found": one.is_found} for one in findings])
    else:
        rows = [
            (one.name, f"{one.true:.3f}", f"{one.found:.3f}", "yes" if one.is_found else "NO")
            for one in findings
        ]
        show_rows("What is true, and what training found", ("", "true", "found", ""), rows)
    if not all(one.is_found for one in findings):
        raise typer.Exit(1)


def _sentence(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        from causal_qwen.doctor import cure

        return cure(error.name.partition(".")[0])
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    words = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError | ImportError | ArithmeticError) and words:
        return words
    return f"{type(error).__name__}: {words} (--debug shows where)"


def main() -> None:
    """The entry point: errors are one sentence on stderr, Ctrl-C ends quietly with 130."""
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        app(args=arguments, prog_name=NAME)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        typer.secho(f"{NAME}: {_sentence(error)}", fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
