"""Command line: parse, call, show. Nothing is computed here.

Heavy imports stand inside the commands, so that `causal-qwen --help` answers at once.
"""

from __future__ import annotations

import json
import math
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="causal-qwen",
    help="A language model that decides like an individual.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="A converted model; the embedded one by default.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    context.obj = {"debug": debug}


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
    force: Annotated[bool, typer.Option("--force", help="Replace an existing directory.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn a Qwen2 checkpoint into a causal model that behaves exactly like it.

    Example: causal-qwen convert smollm2-135m my-model
    """
    from causal_qwen.convert import convert as run

    passages = None if text is None else [line for line in _lines(text) if line.strip()]
    with _status() as progress:
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
    _show_report(asdict(report), output, as_json)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The beginning of the text.")],
    model: ModelOption = "",
    mode: Annotated[
        str, typer.Option(help="standard, sampling, causal or compatible.")
    ] = "standard",
    individual: Annotated[
        str | None, typer.Option("--individual", "-i", help="Who speaks: a seed, or a saved file.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", help="1 by default.", min=0.0)
    ] = None,
    min_density: Annotated[
        float | None, typer.Option(help="Likelihood truncation, 0 to 1.", min=0.0, max=1.0)
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 60,
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a user of a chat model.")] = False,
    save_individual: Annotated[
        Path | None, typer.Option(help="Keep who spoke in this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt in one of the four modes, word by word.

    Example: causal-qwen generate "The train was late, so" --mode causal --individual 7
    """
    from transformers import TextStreamer

    from causal_qwen.individual import called

    if not prompt.strip():
        raise ValueError("The prompt is empty; write a few words.")
    if (individual or save_individual) is not None and mode not in ("sampling", "causal"):
        raise ValueError(f"--individual has no part in mode {mode!r}; use causal or sampling.")
    who = None if individual is None else called(individual)
    processor, causal = _load(model)
    inputs = _encode(processor, prompt, chat)
    options: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_density": min_density}
    if mode in ("sampling", "causal"):
        usual = 1.0 if who is None or isinstance(who, int) else None  # a saved one brings its own
        options |= {"individual": who, "temperature": usual if temperature is None else temperature}
    elif mode == "compatible" and temperature not in (None, 1.0):
        options |= {"temperature": temperature, "do_sample": True}
    is_live = not as_json and processor.encode_numbers == "text"  # a streamer sees no values
    streamer = TextStreamer(processor.tokenizer, skip_special_tokens=True) if is_live else None
    result = causal.generate(
        **inputs,
        causal_mode=mode,
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        return_dict_in_generate=True,
        **{name: value for name, value in options.items() if value is not None},
    )
    new = slice(inputs["input_ids"].shape[1], None)
    ids, values = result.sequences[0, new], result.numeric_values[0, new]
    text = processor.decode(ids, values, skip_special_tokens=True)
    if not as_json and not is_live:
        typer.echo(prompt + text)
    speakers = result.get("individual")
    if save_individual is not None:
        speakers[0].save(save_individual)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "prompt": prompt,
                    "text": text,
                    "numbers": values[ids == processor.num_token_id].tolist(),
                    "mode": mode,
                    "individual": speakers and speakers[0].seed,
                },
                ensure_ascii=False,
            )
        )


@app.command()
def counterfactual(
    text: Annotated[str, typer.Argument(help="The beginning of the text, as it was.")],
    individual: Annotated[
        str, typer.Option("--individual", "-i", help="Who speaks: a seed, or a saved file.")
    ] = "0",
    prompt: Annotated[str | None, typer.Option(help="Edit: another beginning.")] = None,
    token: Annotated[str | None, typer.Option(help='Edit: one token, "POSITION=TOKEN".')] = None,
    number: Annotated[str | None, typer.Option(help='Edit: a value, "INDEX=VALUE".')] = None,
    other_model: Annotated[str | None, typer.Option(help="Edit: another model.")] = None,
    semantics: Annotated[str, typer.Option(help="pearl, or disco: redraw chance.")] = "pearl",
    model: ModelOption = "",
    temperature: Annotated[float | None, typer.Option("--temperature", "-t", min=0.0)] = None,
    min_density: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 40,
    html: Annotated[Path | None, typer.Option(help="Also write the table to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """What the same individual would have said had the text, or the model, been different.

    Example: causal-qwen counterfactual "The king's daughter" --prompt "The king's son" -i 7
    """
    from causal_qwen.counterfactual import counterfactual as run
    from causal_qwen.counterfactual import parse_edit
    from causal_qwen.individual import called

    edit = parse_edit(prompt, token, number, other_model)
    who = called(individual)
    processor, causal = _load(model)
    if other_model is not None:
        edit = parse_edit(other_model=_load(other_model)[1])
    way = "value" if number is not None else None
    options: dict[str, Any] = {"temperature": temperature, "min_density": min_density}
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
        typer.echo(json.dumps(result.to_dict(), ensure_ascii=False))
    else:
        result.show()


@app.command()
def train(
    data: Annotated[
        str, typer.Option("--data", "-d", help="JSONL, CSV, text, or a dataset's name.")
    ] = "",
    output: Annotated[str, typer.Option("--output", "-o", help="A new directory.")] = "",
    model: ModelOption = "",
    from_scratch: Annotated[
        str | None, typer.Option(help="No base model: tiny, small or medium, untrained.")
    ] = None,
    eval_data: Annotated[str | None, typer.Option(help="Held-out rows; else 5% of DATA.")] = None,
    template: Annotated[
        str | None, typer.Option(help='For CSV, e.g. "A {carat} carat ring costs |||{price}".')
    ] = None,
    numbers: Annotated[str | None, typer.Option(help="Read numbers as text or value.")] = None,
    steps: Annotated[int, typer.Option(help="Instead of epochs.", min=-1)] = -1,
    epochs: Annotated[float, typer.Option(min=0.0)] = 1.0,
    learning_rate: Annotated[
        float | None,
        typer.Option("--learning-rate", "--lr", help="2e-5; from scratch 3e-3.", min=0.0),
    ] = None,
    head_learning_rate: Annotated[float | None, typer.Option(min=0.0)] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    accumulate: Annotated[int, typer.Option(help="Batches to a step.", min=1)] = 1,
    max_length: Annotated[int, typer.Option(help="Tokens of a row.", min=2)] = 512,
    pack: Annotated[bool, typer.Option("--pack", help="Several rows side by side.")] = False,
    eval_steps: Annotated[int, typer.Option(min=1)] = 100,
    save_steps: Annotated[int, typer.Option(min=1)] = 100,
    log_steps: Annotated[int, typer.Option(min=1)] = 10,
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
    seed: int = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from a checkpoint.")] = False,
    mock: Annotated[bool, typer.Option("--mock", help="A simulation with a known truth.")] = False,
    as_json: JsonOption = False,
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
    from causal_qwen.convert import default_model
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
    metrics = run(
        Run(
            None if from_scratch is not None else model or str(default_model()),
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
    _show_metrics(metrics, output, as_json)


@app.command()
def evaluate(
    data: Annotated[str, typer.Argument(help="Held-out rows: JSONL, CSV, text or a dataset.")],
    model: ModelOption = "",
    base: Annotated[str | None, typer.Option(help="A second model, e.g. before training.")] = None,
    template: Annotated[str | None, typer.Option(help="For CSV.")] = None,
    numbers: Annotated[str | None, typer.Option(help="Read numbers as text or value.")] = None,
    max_length: Annotated[int, typer.Option(min=2)] = 512,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    as_json: JsonOption = False,
) -> None:
    """Accuracy, perplexity, one-vs-rest likelihood and everything about numbers, on held-out rows.

    Example: causal-qwen evaluate rows.jsonl --model tuned
    """
    from causal_qwen.convert import default_model
    from causal_qwen.train import evaluate as run

    path = model or str(default_model())
    metrics = run(path, data, template, max_length, batch_size, numbers)
    if base is None:
        _show_metrics(metrics, path, as_json)
        return
    before = run(base, data, template, max_length, batch_size, numbers)
    _show_metrics(metrics, path, as_json, {"base": before})


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The output directory of a training run.")],
) -> None:
    """Draw a training run's curves: PNG files and an HTML page.

    Example: causal-qwen report tuned
    """
    from causal_qwen.report import write_report

    typer.echo(write_report(run))


@app.command()
def demo(model: ModelOption = "", as_json: JsonOption = False) -> None:
    """Convert the embedded model if need be, and meet a few individuals."""
    from transformers import Qwen2ForCausalLM

    from causal_qwen.convert import quiet
    from causal_qwen.demo import run

    processor, causal = _load(model)
    base = None
    if causal.config.causal_size == causal.config.hidden_size:
        with quiet():  # a converted checkpoint is still its base model's
            base = Qwen2ForCausalLM.from_pretrained(causal.name_or_path).eval()
    run(processor.tokenizer, causal, base, as_json=as_json)


@app.command()
def fit(
    data: Annotated[str, typer.Argument(help="A CSV file with a header.")],
    target: Annotated[
        list[str], typer.Option("--target", "-t", help="The column to predict; may be repeated.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="A new directory.")],
    text: Annotated[
        list[str] | None, typer.Option(help="A column of free text; may be repeated.")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="A column to learn from; all of them by default.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help='E.g. "A {carat} carat ring, {cut}, costs"; else made.')
    ] = None,
    weight: Annotated[str | None, typer.Option(help="A column of row weights.")] = None,
    backbone: Annotated[str, typer.Option(help="frozen, finetune or scratch.")] = "frozen",
    model: ModelOption = "",
    calibration: Annotated[
        float, typer.Option(help="The share of rows held out to calibrate on.", min=0.0, max=0.9)
    ] = 0.2,
    max_length: Annotated[int, typer.Option(help="Tokens of a row.", min=2)] = 512,
    seed: int = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing directory.")] = False,
    as_json: JsonOption = False,
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
        model=model or None,
        max_length=max_length,
    )
    _show_fit(report, output, as_json)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="What `causal-qwen fit` has written.")],
    data: Annotated[str, typer.Argument(help="A CSV file with the same columns.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A CSV file; else it is printed.")
    ] = None,
    level: Annotated[float, typer.Option(help="Of the interval, 0 to 1.")] = 0.9,
    raw: Annotated[bool, typer.Option("--raw", help="The Cauchy's own interval.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Put a median and an interval beside every row of a table.

    Example: causal-qwen predict priced more-rings.csv --level 0.8 --output answers.csv
    """
    import warnings

    from causal_qwen.tabular import predict_csv

    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        table = predict_csv(model, data, level=level, calibrated=False if raw else None)
    for note in notes:
        typer.echo(f"note: {note.message}", err=True)
    if output is not None:
        table.to_csv(output, index=False)
    elif as_json:
        typer.echo(table.to_json(orient="records"))
    else:
        typer.echo(table.to_csv(index=False), nl=False)


@app.command("np-generate")
def np_generate(
    model: Annotated[str, typer.Argument(help="A Qwen2 or converted directory, or smollm2-135m.")],
    prompt: Annotated[str, typer.Argument(help="The beginning of the text.")],
    mode: Annotated[
        str | None, typer.Option(help="standard, sampling, causal or compatible.")
    ] = None,
    individual: Annotated[
        int | None, typer.Option("--individual", "-i", help="The seed of who speaks.")
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", "-t", min=0.0)] = None,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    seed: Annotated[int | None, typer.Option(help="Of softmax sampling.", min=0)] = None,
    min_density: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 60,
    numbers: Annotated[str | None, typer.Option(help="Read numbers as text or value.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 keeps a widened copy; else as stored.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a user of a chat model.")] = False,
    attention: Annotated[bool, typer.Option("--attention", help="Where it looks.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Figures of U, S, P, Y.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The new text only.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt with NumPy alone, and watch every token being born.

    Example: causal-qwen np-generate my-model "The train was late, so" --mode causal -i 7
    """
    from causal_qwen.engine import Engine
    from causal_qwen.watch import as_record, watch

    engine = Engine.from_pretrained(_model_directory(model), dtype=dtype)
    if individual is None and mode in ("sampling", "causal"):
        individual = secrets.randbelow(2**62)  # said in JSON, so that the text can be told again
    options: dict[str, Any] = {"mode": mode, "individual": individual}
    options |= {"min_density": min_density, "encode_numbers": numbers}
    options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    if engine.heads is None or mode == "compatible":
        random = (temperature, top_k, top_p, seed)
        options["do_sample"] = True if any(value is not None for value in random) else None
    options |= {"max_new_tokens": max_new_tokens, "chat": chat}
    if as_json:
        steps = list(engine.stream(prompt, summarize=summary, **options))
        record = {**as_record(prompt, steps), "mode": mode, "individual": individual}
        typer.echo(json.dumps(record, ensure_ascii=False))
    else:
        watch(engine, prompt, quiet=quiet, attention=attention, summary=summary, **options)


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="A Qwen2 or converted directory, or smollm2-135m.")],
    prompt: Annotated[str | None, typer.Option(help="The text to compare on.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 32,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest logit difference to torch float32.", min=0.0)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write verify.json and verify.png there.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Prove the NumPy engine against torch in float32 and float64; exits 1 if a bar is missed.

    Example: causal-qwen verify smollm2-135m --max-new-tokens 256
    """
    from causal_qwen.verify import PROMPT, TOLERANCE, live, plot
    from causal_qwen.verify import verify as run

    with live(quiet=as_json) as progress:
        result = run(
            _model_directory(model),
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


def _model_directory(model: str) -> Path:
    """A directory as it is; the embedded model by its name, converted once."""
    if model != "smollm2-135m" or Path(model).exists():
        return Path(model)
    from causal_qwen.convert import default_model

    with _status() as progress:
        return default_model(progress)


def _load(model: str) -> tuple[Any, Any]:
    from causal_qwen.convert import default_model, open_model

    with _status() as progress:
        path = model or default_model(progress)
        progress("loading the model")
        return open_model(path)


def _encode(processor: Any, prompt: str, chat: bool) -> Any:
    if chat:
        return processor.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    return processor(prompt, return_tensors="pt")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Says what is being done: a spinner on a terminal, plain lines elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: console.print(f"{what} ...", highlight=False)
        return
    with console.status("starting") as status:
        yield lambda what: status.update(f"{what} ...")


def _show_report(report: dict[str, Any], output: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['base']} -> {output}", show_header=False)
    calibration = report.pop("calibration") or {}
    for name, value in {**report, **calibration}.items():
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        table.add_row(name.replace("_", " "), shown)
    Console().print(table)


def _show_metrics(
    metrics: dict[str, float],
    title: str,
    as_json: bool,
    others: dict[str, dict[str, float]] | None = None,
) -> None:
    """One model's metrics, or several side by side."""
    others = others or {}
    if as_json:
        typer.echo(json.dumps({**metrics, **others}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", "this model", *others, title=title, show_header=bool(others))
    for name, value in metrics.items():
        cells = [value, *(other.get(name, math.nan) for other in others.values())]
        table.add_row(name.removeprefix("eval_"), *(f"{cell:.6g}" for cell in cells))
    Console().print(table)


def _show_fit(report: dict[str, Any], output: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    for note in report["notes"]:
        typer.echo(f"note: {note}", err=True)
    rows = {name: float(report[name]) for name in ("rows", "calibration_rows")}
    for target, metrics in report["targets"].items():
        rows |= {f"{target}: {name.replace('_', ' ')}": value for name, value in metrics.items()}
    _show_metrics(rows, output, as_json)


def _mock(seed: int, as_json: bool) -> None:
    from causal_qwen.mock import STEPS, simulate

    if as_json:
        typer.echo(json.dumps([{**asdict(f), "is_found": f.is_found} for f in simulate(seed=seed)]))
        return
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    with Progress(transient=True) as bar:
        task = bar.add_task("learning a known world", total=STEPS)
        findings = simulate(seed=seed, progress=lambda *_: bar.advance(task))
    table = Table(title="What is true, and what training found")
    for column in ("", "true", "found", ""):
        table.add_column(column, justify="left" if not column else "right")
    for f in findings:
        table.add_row(f.name, f"{f.true:.3f}", f"{f.found:.3f}", "yes" if f.is_found else "NO")
    Console().print(table)
    if not all(f.is_found for f in findings):
        raise typer.Exit(1)


def main() -> None:
    """The entry point: errors are one sentence on stderr, Ctrl-C ends quietly."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, ImportError, ArithmeticError) as error:
        if "--debug" in sys.argv:
            raise
        sentence = " ".join(str(error).split())
        if isinstance(error, ModuleNotFoundError):
            sentence = f"{error.name} is not installed: pip install 'causal-qwen[torch]'"
        typer.secho(f"causal-qwen: {sentence}", fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
