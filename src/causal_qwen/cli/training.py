"""Training: train, evaluate, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from causal_qwen.cli import options as opt
from causal_qwen.conversion.location import path_of
from causal_qwen.options import ROW_FILES
from causal_qwen.terminal import print_json, print_table, progress_bar, status

REPORTING = ("device", "separator", "encoding", "decimal")  # settings of a regressor's

HEAD_RATE = 1e-5  # of the causal heads beside LoRA: at its rate, scales run away in a few steps
OF_RUN = ("max_length", "patience", "compat_weight", "dtype")  # settings of `Run`


def train(
    data: Annotated[str, Option("--data", "-d", help="JSONL, CSV, text, or a dataset.")] = "",
    output: Annotated[str, Option("--output", "-o", help="The directory to create.")] = "",
    model: opt.ModelName = "",
    device: opt.Device = "auto",
    eval_data: Annotated[str | None, Option(help="Held-out rows. Default: 5% of --data.")] = None,
    template: opt.Template = None,
    numbers: opt.Numbers = None,
    steps: Annotated[int, Option(help="Optimizer steps; overrides --epochs.", min=-1)] = -1,
    epochs: Annotated[float, Option(help="Passes over the data.", min=0.0)] = 1.0,
    learning_rate: Annotated[
        float | None,
        Option(
            "--learning-rate",
            "--lr",
            help="Default: 2e-5; 2e-4 with --lora; 1e-5 with --train heads.",
            min=0.0,
        ),
    ] = None,
    batch_size: opt.BatchSize = 8,
    train: Annotated[Literal["all", "heads"], Option(help="Parameters to train.")] = "all",
    lora: Annotated[int, Option(help="Rank of LoRA; 0 switches it off.", min=0)] = 0,
    individual_column: Annotated[
        str | None,
        Option(help="Rows with the same value, e.g. an author, share a learned individual."),
    ] = None,
    seed: opt.Seed = 0,
    settings: Annotated[
        list[str] | None,
        opt.set_option(
            "max_length, patience, compat_weight, dtype, individual_learning_rate, or a "
            "field of Hugging Face's TrainingArguments, e.g. save_steps=50"
        ),
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Continue from a checkpoint.")] = False,
    as_json: opt.Json = False,
) -> None:
    """Fine-tune a converted model on text and numbers.

    Example: causal-qwen train --data rows.jsonl --output tuned --steps 200
    """
    if not data or not output:
        raise ValueError("`train` needs --data and --output.")
    if steps == 0 or epochs == 0:
        raise ValueError("--steps 0 and --epochs 0 train nothing; give at least one step.")
    _check_files(data, *([eval_data] if eval_data else []))
    typer.echo("loading the model and the data ...", err=True)  # the trainer has its own bar
    from causal_qwen.conversion.placement import has_fast_bf16
    from causal_qwen.training.run import Run
    from causal_qwen.training.run import train as run
    from causal_qwen.training.trainer import CausalTrainingArguments

    given = opt.parse_settings(settings, {*CausalTrainingArguments.__dataclass_fields__, *OF_RUN})
    of_run = {name: given.pop(name) for name in OF_RUN if name in given}
    default_rate = 2e-4 if lora else HEAD_RATE if train == "heads" else 2e-5
    arguments = {
        "max_steps": steps,
        "num_train_epochs": epochs,
        "learning_rate": default_rate if learning_rate is None else learning_rate,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "train": train,
        "seed": seed,
        "eval_strategy": "steps",
        "eval_steps": 100,
        "save_steps": 100,
        "save_total_limit": 2,
        "lr_scheduler_type": "cosine",
        "bf16": has_fast_bf16(device),
        "warmup_steps": 0.05,
        "head_learning_rate": HEAD_RATE if lora else None,
        "report_to": "none",
        **given,
    }
    run_settings = Run(
        path_of(model),
        data,
        output,
        eval_data=eval_data,
        template=template,
        numbers=numbers,
        lora=lora,
        individual_column=individual_column,
        resume=resume,
        device=device,
        arguments=arguments,
        **of_run,
    )
    found = run(run_settings)
    if as_json:
        print_json(found)
        return
    rows = [(name.removeprefix("eval_"), value) for name, value in found.items()]
    print_table(output, (), rows)


def _check_files(*sources: str) -> None:
    """Refuse missing files before torch is imported, which takes seconds."""
    for one in sources:
        if not one or (Path(one).suffix.lower() in ROW_FILES and not Path(one).is_file()):
            raise FileNotFoundError(f"{one or 'An empty name'} does not exist; check the path.")


def evaluate(
    data: Annotated[list[str], Argument(help="Held-out rows: files or datasets, one or more.")],
    model: Annotated[
        str, Option("--model", "-m", help="A model, or a checkpoint of a run. Default: embedded.")
    ] = "",
    base: Annotated[str | None, Option(help="A second model to compare with.")] = None,
    device: opt.Device = "auto",
    template: opt.Template = None,
    settings: Annotated[
        list[str] | None,
        opt.set_option("numbers (text or value), max_length, batch_size, dtype"),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Measure accuracy, perplexity, one-vs-rest likelihood and errors of numbers on held-out rows,
    with 95% intervals (bootstrap over rows).

    Example: causal-qwen evaluate rows.jsonl --model tuned --base my-model
    """
    _check_files(*data)
    paths = {"this model": path_of(model)} | ({"base": path_of(base)} if base else {})
    from causal_qwen.training.evaluation import measure, side_by_side, table_of

    named = opt.parse_settings(settings, ("numbers", "max_length", "batch_size", "dtype"))
    options: dict[str, Any] = {"template": template, "device": device, **named}
    found: dict[str, Any] = {}
    for name, path in paths.items():
        typer.echo(f"loading {path} ...", err=True)
        with progress_bar("evaluating") as count:
            found[name] = measure(path, data, progress=count, **options)
    files = {file: side_by_side({who: of[file] for who, of in found.items()}) for file in data}
    if as_json:
        print_json(files if len(files) > 1 else files[data[0]])
        return
    for file, record in files.items():
        print_table(f"{paths['this model']} on {file}", *table_of(record))


def report(
    run: Annotated[Path, Argument(help="The output directory of `train`, or of `fit`.")],
    data: Annotated[
        str | None,
        Argument(show_default=False, help="Of `fit`: rows that it has not seen, with targets."),
    ] = None,
    settings: opt.TableSettings = None,
    as_json: opt.Json = False,
) -> None:
    """Draw the curves of a training run, or how good a regressor is, on an HTML page.

    Example: causal-qwen report priced new-rings.csv
    """
    with status(not as_json) as progress:
        progress("drawing")
        if (run / "regressor.skops").is_file():
            if data is None:
                raise ValueError("a regressor's report needs rows: causal-qwen report FITTED DATA.")
            from causal_qwen.regression.report import write_report as write_regressor_report

            page = write_regressor_report(run, data, **opt.parse_settings(settings, REPORTING))
        else:
            if data is not None:
                raise ValueError(f"{run} was not written by `fit`, so {data} has no effect.")
            from causal_qwen.training.evaluation import write_report

            page = write_report(run)
    if as_json:
        pictures = sorted(str(picture) for picture in page.parent.glob("*.png"))
        print_json({"page": str(page), "pictures": pictures})
    else:
        typer.echo(page)
