"""Evaluation: a model directory or a training checkpoint, and files of rows -> metrics.

    accumulators = measure("tuned/checkpoint-200", ["gsm8k.jsonl", "chat.jsonl"])
    accumulators["gsm8k.jsonl"].compute(), accumulators["gsm8k.jsonl"].intervals()

Checkpoints of LoRA are merged into the model that they were trained from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import open_model
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.paths import install_hint
from causal_qwen.training.data import Collator, encode_counted, read_rows
from causal_qwen.training.metrics import REPLICATES, MetricAccumulator

ADAPTER = "adapter_config.json"
OF_RUN = ("value_fields", "encode_numbers")  # of a config, set by a run that saves adapters only
Progress = Callable[[int, int], None]


def evaluate(
    path: str,
    data: str,
    template: str | None = None,
    max_length: int = 512,
    batch_size: int = 8,
    numbers: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress = lambda done, total: None,
) -> dict[str, float]:
    """Metrics of a model on held-out rows; before training, `perplexity` is its base model's."""
    options: dict[str, Any] = {
        "template": template,
        "max_length": max_length,
        "batch_size": batch_size,
        "device": device,
        "dtype": dtype,
    }
    found = measure(path, [data], numbers=numbers, progress=progress, replicates=0, **options)
    return found[data].compute()


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
    if len(set(files)) < len(files):
        raise ValueError(f"{', '.join(files)}: a file is named twice; name every file once.")
    rows = {file: read_rows(file, template) for file in files}
    processor, model = open_checkpoint(path, device, dtype)
    processor.encode_numbers = numbers or processor.encode_numbers
    collate, fields = Collator(processor.tokenizer.pad_token_id), model.config.value_fields or ()
    done, total, found = 0, sum(map(len, rows.values())), {}
    generator = torch.Generator().manual_seed(0)  # the same for every model: replicates are pairs
    for file, some in rows.items():
        examples = encode_counted(some, processor, max_length, target_fields=fields)
        found[file] = MetricAccumulator(model, replicates, generator)
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
    try:
        from peft import PeftModel
    except ModuleNotFoundError:
        raise ImportError(
            f"{directory} is a checkpoint of LoRA, which needs peft: {install_hint('lora')}"
        ) from None
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


def pooled(files: Mapping[str, MetricAccumulator]) -> MetricAccumulator:
    """All rows of several files as one."""
    first, *others = files.values()
    total = MetricAccumulator(first.model, len(first.resampled))
    for one in (first, *others):
        total.merge(one)
    return total


def table_of(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of `side_by_side`: a metric and, in brackets, its 95% interval."""
    others = {name: value for name, value in record.items() if _is_model(value)}
    columns = ["", "this model", *(title for name in others for title in (name, "difference"))]
    rows = []
    for name, value in record.items():
        if not isinstance(value, float):
            continue
        row = [name, _cell(name, record)]
        for other in others.values():
            row.append(_cell(name, other))
            row.append(_cell(name, other, "difference_intervals", other["difference"]))
        rows.append(row)
    return columns, rows


def _is_model(value: Any) -> bool:
    return isinstance(value, Mapping) and "difference" in value


def _cell(name: str, of: Mapping[str, Any], spans: str = "intervals", values: Any = None) -> str:
    value = (of if values is None else values).get(name)
    if value is None:
        return ""
    low, high = of[spans].get(name, (None, None))
    return f"{value:.5g}" if low is None else f"{value:.5g} ({low:.5g} to {high:.5g})"


def markdown(title: str, record: Mapping[str, Any]) -> str:
    """`side_by_side` as a Markdown section."""
    columns, rows = table_of(record)
    counts = f"{record['rows']} rows, {record['tokens']} tokens with a label; 95% intervals: "
    lines = [columns, ["---"] * len(columns), *rows]
    table = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    return f"## {title}\n\n{counts}bootstrap over rows.\n\n{table}\n"
