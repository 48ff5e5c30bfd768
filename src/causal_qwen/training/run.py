"""Training runs: data and a converted model -> a trained model, its metrics and its curves.

Training is Hugging Face's Trainer (see `trainer`); the command line and Python both call `train`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, ProgressCallback, TrainerState

from causal_qwen.conversion.calibration import calibrate_gains, calibrate_scales, read_texts
from causal_qwen.conversion.opening import open_model
from causal_qwen.conversion.placement import resolve_device
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.numpy_engine.calibration import FIELDS
from causal_qwen.outputs import LOCK, lock, write_text
from causal_qwen.training.authors import Authors, mark, names_of
from causal_qwen.training.data import (
    Collator,
    Example,
    Row,
    encode_row,
    encode_rows,
    read_rows,
)
from causal_qwen.training.trainer import (
    STATE,
    CausalTrainer,
    CausalTrainingArguments,
    Progress,
    last_checkpoint,
    read_state,
)

COMPAT_WEIGHT: float = FIELDS["compat_loss_weight"]
HELD_OUT = 0.05
CALIBRATION_ROWS = 16  # of the training rows
NO_LORA = ("in_proj_a", "in_proj_b")  # of Qwen3.5: a number per head
METRICS = "metrics.json"  # written last


@dataclass
class Run:
    """Model, data and options of a run; `arguments` are fields of `CausalTrainingArguments`."""

    model: str
    data: str
    output: str
    eval_data: str | None = None
    template: str | None = None
    numbers: str | None = None  # "text" or "value"; the processor's by default
    max_length: int = 512
    compat_weight: float = COMPAT_WEIGHT
    lora: int = 0  # rank; 0 trains the weights themselves
    individual_column: str | None = None  # rows with the same value share a learned individual
    patience: int = 0  # evaluations without a lower loss before stopping; 0 never stops early
    resume: bool = False
    device: str = "auto"  # "cpu", or "auto": all accelerators that torch sees
    dtype: str = "auto"  # of the weights in memory
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Prepared:
    """A run before its first step: rows, model and examples; nothing is measured or written."""

    rows: list[Row]
    held_out_rows: list[Row]
    processor: CausalQwenProcessor
    model: Any
    learn: list[Example]
    held_out: list[Example]
    names: list[str]  # of the individuals, if the run has a column of them


def train(run: Run) -> dict[str, float]:
    """Train, evaluate before and after, recalibrate the noise, save. Returns the final metrics."""
    output = Path(run.output)
    checkpoint = _checkpoint(output, run.resume)
    is_first = int(os.environ.get("RANK", 0)) == 0
    with lock(output) if is_first else contextlib.nullcontext():
        ready, args = prepare(run), training_arguments(run, is_new=checkpoint is None)
        is_shown = is_first and not args.disable_tqdm

        def announce(stage: str) -> None:
            if is_shown:
                print(f"{stage} ...", file=sys.stderr)

        texts = _calibration_texts(run, ready)
        if checkpoint is None and ready.model.abduction.scale.is_constant:  # untrained
            announce("measuring thresholds and noise gains on the training text")
            hidden = read_texts(ready.model, texts)
            calibrate_scales(ready.model, hidden)
            calibrate_gains(ready.model, hidden)
        trainer = _trainer(run, ready, args)
        _learn(trainer, checkpoint, run)
        metrics: dict[str, float] = trainer.evaluate()
        trainer.finish(ready.processor, texts, announce)
        trainer.save_state()
        if is_first:
            write_text(output / METRICS, json.dumps(metrics, indent=1))
    return metrics


# ---------------------------------------------------------------- before the first step


def prepare(run: Run) -> Prepared:
    """Read the rows and the model, and encode the rows."""
    rows, held_out_rows = _rows(run)
    processor, model = open_model(run.model, dtype=run.dtype)  # the trainer moves it
    has_targets = any("target" in row for row in rows)
    processor.encode_numbers = run.numbers or ("value" if has_targets else processor.encode_numbers)
    model.config.encode_numbers = processor.encode_numbers
    model.config.compat_loss_weight = run.compat_weight
    fit_fields(model, rows)
    fields = model.config.value_fields or ()
    learn, held_out = (
        encode_rows(part, processor, run.max_length, fields) for part in (rows, held_out_rows)
    )
    names: list[str] = []
    if run.individual_column is not None:
        authors = names_of(rows, run.individual_column)
        names = sorted({name for name in authors if name is not None})
        mark(learn, authors, names, learn=True)
        mark(held_out, names_of(held_out_rows, run.individual_column), names, learn=False)
    return Prepared(rows, held_out_rows, processor, model, learn, held_out, names)


def _rows(run: Run) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and held-out rows: from `eval_data`, or a share of the data."""
    rows = read_rows(run.data, run.template)
    if run.eval_data is not None:
        return rows, read_rows(run.eval_data, run.template)
    if len(rows) < 2:
        raise ValueError(f"{run.data} has one row; add more, or give rows to evaluate on.")
    random.Random(run.arguments.get("seed", 0)).shuffle(rows)
    count = max(int(len(rows) * HELD_OUT), 1)
    return rows[count:], rows[:count]


def fit_fields(model: CausalModel, rows: Sequence[Mapping[str, Any]]) -> None:
    """Standardise every named target by its own median and interquartile range."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get("target") is not None and row.get("field") is not None:
            found.setdefault(row["field"], []).append(float(row["target"]))
    for name, values in found.items():
        model.fit_value_field(name, values)


def training_arguments(run: Run, *, is_new: bool) -> CausalTrainingArguments:
    """Those of the run; refuses one of several accelerators: the trainer takes all it sees."""
    device = resolve_device(run.device)
    if device.index is not None:
        raise ValueError(
            f"device={run.device!r}: training uses all accelerators that torch sees; choose one by "
            f"{device.type.upper()}_VISIBLE_DEVICES={device.index}, with device={device.type!r}."
        )
    arguments: dict[str, Any] = {
        "output_dir": run.output,
        "remove_unused_columns": False,
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "include_num_input_tokens_seen": "all",
        # not trainer.evaluate() beforehand: accelerate would then train without DDP
        "eval_on_start": is_new,
        "use_cpu": run.device == "cpu",
        **run.arguments,
    }
    if run.patience:
        arguments |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    return CausalTrainingArguments(**arguments)


def _calibration_texts(run: Run, ready: Prepared) -> list[torch.Tensor]:
    """Token ids of a few rows, evenly spaced, with numbers as text."""
    rows, processor = ready.rows, ready.processor
    sample = rows[:: max(len(rows) // CALIBRATION_ROWS, 1)][:CALIBRATION_ROWS]
    reader = CausalQwenProcessor(processor.tokenizer, chat_template=processor.chat_template)
    fields = ready.model.config.value_fields or ()
    examples = (encode_row(row, reader, run.max_length, fields) for row in sample)
    texts = ([k for k in example.ids if k != reader.num_token_id] for example in examples)
    return [torch.tensor(ids) for ids in texts if ids]


def _trainer(run: Run, ready: Prepared, args: CausalTrainingArguments) -> CausalTrainer:
    trainer = CausalTrainer(
        model=with_lora(ready.model, run.lora),
        args=args,
        train_dataset=ready.learn,
        eval_dataset=ready.held_out,
        data_collator=Collator(ready.processor.tokenizer.pad_token_id),
        processor=ready.processor,
        authors=Authors(ready.names, ready.model) if ready.names else None,
    )
    if run.patience:
        trainer.add_callback(EarlyStoppingCallback(run.patience))
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(Progress())
    return trainer


def with_lora(model: Any, rank: int) -> Any:
    """LoRA on the backbone's projections, also those of experts, whose weights are stacked; the
    causal heads are trained in full."""
    if not rank:
        return model
    from peft import LoraConfig, get_peft_model

    modules = {
        name.rpartition(".")[2]
        for name, module in model.model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith(NO_LORA)
    }
    names = (name for name, _ in model.model.named_parameters())
    experts = {name.partition(".mlp.")[2] for name in names if ".mlp.experts." in name}
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=sorted(modules),
        target_parameters=sorted(experts) or None,
        modules_to_save=["abduction", "action", "decision"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


# ---------------------------------------------------------------- new and resumed runs


def _checkpoint(output: Path, resume: bool) -> Path | None:
    if not resume:
        if int(os.environ.get("RANK", 0)) == 0:
            _check_new(output)
        return None
    if (last := last_checkpoint(output)) is None:
        raise ValueError(
            f"{output} has no whole checkpoint to resume from; omit --resume, and train into a "
            "new directory."
        )
    return last


def _check_new(output: Path) -> None:
    if output.is_dir() and any(file.name != LOCK for file in output.iterdir()):
        raise FileExistsError(f"{output} is not empty; choose another, or continue with --resume.")


def _learn(trainer: CausalTrainer, checkpoint: Path | None, run: Run) -> None:
    """Train; Hugging Face restores the model of a checkpoint, and this the authors. After the last
    step only the model is restored: Hugging Face would make one more."""
    if checkpoint is None:
        trainer.train()
    else:
        if trainer.authors is not None:
            trainer.authors.load_state(checkpoint)
        batches = trainer.get_train_dataloader()
        steps = trainer.set_initial_training_values(trainer.args, batches)[-1]
        if _has_all_steps(checkpoint, steps):
            trainer.state = TrainerState.load_from_json(str(checkpoint / STATE))
            best = trainer.state.best_model_checkpoint if run.patience else None
            trainer._load_from_checkpoint(best or str(checkpoint))
        else:
            trainer.train(resume_from_checkpoint=str(checkpoint))
    best = trainer.state.best_model_checkpoint if run.patience else None
    if best is not None and trainer.authors is not None:
        trainer.authors.load_state(Path(best))


def _has_all_steps(checkpoint: Path, steps: int) -> bool:
    """Whether only the end of a run is missing; refuses a run that has ended, too."""
    made = int((read_state(checkpoint) or {"global_step": 0})["global_step"])
    if made < steps:
        return False
    if (checkpoint.parent / METRICS).exists():
        raise ValueError(f"{checkpoint} has made {made} of {steps} steps; resume it with more.")
    return True
