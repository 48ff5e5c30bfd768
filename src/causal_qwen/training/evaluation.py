"""Evaluation: a model directory or a training checkpoint, and files of rows -> metrics.

    accumulators = measure("tuned/checkpoint-200", ["gsm8k.jsonl", "chat.jsonl"])
    accumulators["gsm8k.jsonl"].compute(), accumulators["gsm8k.jsonl"].intervals()
    write_report(Path("tuned"))         # the curves of a run, finished or not, as one HTML page

Checkpoints of LoRA are merged into the model that they were trained from.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.opening import open_model
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.training.data import Collator, encode_rows, read_rows
from causal_qwen.training.metrics import REPLICATES, MetricAccumulator
from causal_qwen.training.trainer import last_checkpoint, read_state

ADAPTER = "adapter_config.json"
OF_RUN = ("value_fields", "encode_numbers")  # of a config, set by a run that saves adapters only
Progress = Callable[[int, int], None]

CURVES: dict[str, Sequence[str]] = {
    "loss": ("total_loss", "cls_loss_mean", "reg_loss_effective", "compat_loss_mean", "eval_loss"),
    "accuracy": ("eval_accuracy", "eval_accuracy_compatible"),
    "negative log-likelihood": ("eval_nll", "eval_ovr_nll"),
    "sum of P (median)": ("eval_dist/ovr_prob_sum_median",),
    "scale of U": ("eval_dist/U_scale_median", "eval_dist/U_scale_mean"),
    "coverage of intervals": tuple(f"eval_coverage_{level}" for level in (50, 80, 90, 95)),
    "gradient norm": ("grad_norm",),
}
PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;max-width:60em;margin:2em auto}}img{{max-width:100%}}
td{{padding:0 1em 0 0}}</style>
<h1>{title}</h1><table>{rows}</table><img alt="curves" src="data:image/png;base64,{image}">
"""


@torch.no_grad()
def measure(
    path: str,
    files: Sequence[str],
    *,
    template: str | None = None,
    max_length: int = 512,
    batch_size: int = 8,
    numbers: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress = lambda done, total: None,
    replicates: int = REPLICATES,
) -> dict[str, MetricAccumulator]:
    """The metrics of every file, by its name; `progress` counts the rows of all of them."""
    rows = {file: read_rows(file, template) for file in files}
    processor, model = open_checkpoint(path, device, dtype)
    processor.encode_numbers = numbers or processor.encode_numbers
    collate, fields = Collator(processor.tokenizer.pad_token_id), model.config.value_fields or ()
    done, total, found = 0, sum(map(len, rows.values())), {}
    for file, some in rows.items():
        examples = encode_rows(some, processor, max_length, target_fields=fields)
        found[file] = MetricAccumulator(model, replicates)
        for start in range(0, len(examples), batch_size):
            part = examples[start : start + batch_size]
            batch = {name: one.to(model.device) for name, one in collate(part).items()}
            names = ("input_ids", "attention_mask", "numeric_values")
            output = model(**{name: batch[name] for name in names}, skip_logits=True)
            found[file].add(output.u_dist, batch)
            done += len(part)
            progress(done, total)
    return found


def open_checkpoint(
    path: str, device: str = "cpu", dtype: str = "auto"
) -> tuple[CausalQwenProcessor, Any]:
    """`open_model`, also for checkpoints of a run that have adapters alone."""
    directory = Path(path)
    if not (directory / ADAPTER).is_file():
        return open_model(path, device, dtype)
    from peft import PeftModel

    base = json.loads((directory / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
    with quiet():
        _, model = open_model(base, device, dtype)
        model = PeftModel.from_pretrained(model, str(directory)).merge_and_unload().eval()
        trained = type(model.config).from_pretrained(directory)
        for name in OF_RUN:
            setattr(model.config, name, getattr(trained, name))
        processor = CausalQwenProcessor.from_pretrained(directory)
    processor.check(model.config)
    processor.encode_numbers = model.config.encode_numbers
    return processor, model


# ---------------------------------------------------------------- side by side


def side_by_side(models: Mapping[str, MetricAccumulator]) -> dict[str, Any]:
    """The metrics of the first model with their intervals, those of every other one under its name,
    and there the difference of the first to it (first - other)."""
    (_, first), *others = models.items()
    record = _described(first)
    for name, other in others:
        theirs = _described(other)
        shared = [key for key in first.compute() if key in theirs]
        theirs["difference"] = {key: record[key] - theirs[key] for key in shared}
        theirs["difference_intervals"] = first.intervals(other)
        record[name] = theirs
    return record


def _described(found: MetricAccumulator) -> dict[str, Any]:
    counts = {"rows": found.rows, "tokens": int(found.sums[0])}
    return {**found.compute(), "intervals": found.intervals(), **counts}


def table_of(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of `side_by_side`: a metric and, in brackets, its 95% interval."""
    columns, parts = ["", "this model"], [(record, record["intervals"])]
    for name, other in record.items():
        if isinstance(other, Mapping) and "difference" in other:
            columns += [name, "difference"]
            parts.append((other, other["intervals"]))
            parts.append((other["difference"], other["difference_intervals"]))
    names = [name for name, value in record.items() if isinstance(value, float)]
    return columns, [[name, *(_cell(*part, name) for part in parts)] for name in names]


def _cell(values: Mapping[str, Any], intervals: Mapping[str, Any], name: str) -> str:
    value = f"{values[name]:.5g}" if name in values else ""
    if name not in intervals:
        return value
    low, high = intervals[name]
    return f"{value} ({low:.5g} to {high:.5g})"


# ---------------------------------------------------------------- the curves of a run


def write_report(run: Path) -> Path:
    """Draw the log of a finished run, or of its newest checkpoint; returns the page."""
    last = last_checkpoint(run)
    state = read_state(run) or (read_state(last) if last is not None else None)
    if state is None:
        raise FileNotFoundError(f"{run} has no checkpoint with a log; is it a training run?")
    log = state["log_history"]
    page, picture = run / "report" / "index.html", run / "report" / "curves.png"
    page.parent.mkdir(exist_ok=True)
    _draw(log, picture)
    values = {name: value for entry in log for name, value in entry.items()}
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{value:.6g}</td></tr>"
        for name, value in sorted(values.items())
    )
    image = base64.b64encode(picture.read_bytes()).decode()
    text = PAGE.format(title=html.escape(run.name), rows=rows, image=image)
    page.write_text(text, encoding="utf-8")
    return page


def _draw(log: Sequence[Mapping[str, float]], picture: Path) -> None:
    """One plot for every group of curves of which the log has any."""
    from matplotlib.figure import Figure

    logged = {name for entry in log for name in entry}
    plots = {title: logged.intersection(names) for title, names in CURVES.items()}
    plots = {title: names for title, names in plots.items() if names}
    figure = Figure(figsize=(7, 3.2 * len(plots)), layout="constrained")
    for place, (title, names) in enumerate(plots.items(), 1):
        axes = figure.add_subplot(len(plots), 1, place, title=title, xlabel="step")
        for name in sorted(names):
            points = [(entry["step"], entry[name]) for entry in log if name in entry]
            axes.plot(*zip(*points, strict=True), marker=".", label=name.removeprefix("eval_"))
        axes.legend()
    figure.savefig(picture, dpi=120)
