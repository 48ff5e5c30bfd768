"""Training runs: data and a converted model -> a trained model, its metrics and its curves.

Training is Hugging Face's Trainer (see `trainer`); the command line and Python both call `train`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, ProgressCallback, TrainerState
from transformers.utils import logging

from causal_qwen.conversion.calibration import calibrate_gains, calibrate_scales, read_texts
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import COMPAT_WEIGHT as COMPAT_WEIGHT
from causal_qwen.conversion.convert import open_model
from causal_qwen.conversion.placement import place_model, resolve_device
from causal_qwen.modeling.loss import IGNORE
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.outputs import LOCK, lock, write_text
from causal_qwen.paths import install_hint
from causal_qwen.training.authors import (
    Authors,
    compare,
    likelihoods,
    mark,
    names_of,
)
from causal_qwen.training.checkpoints import STATE, last_checkpoint, read_state, write_record
from causal_qwen.training.data import (
    Collator,
    Example,
    Examples,
    Row,
    encode_counted,
    encode_row,
    pack,
    read_rows,
)
from causal_qwen.training.evaluation import evaluate as evaluate
from causal_qwen.training.from_scratch import new_model, texts_of
from causal_qwen.training.progress import TrainingProgress
from causal_qwen.training.trainer import (
    CausalTrainer,
    CausalTrainingArguments,
    freeze_backbone,
)

logger = logging.get_logger("transformers.causal_qwen")

HELD_OUT = 0.05
CALIBRATION_ROWS = 16  # of the training rows
INDIVIDUALS = (1, 2, 3)  # speak at every evaluation
PROMPT_TOKENS, SPOKEN_TOKENS = 8, 24
NO_LORA = ("in_proj_a", "in_proj_b")  # of Qwen3.5: a number per head
# Pack by default if padding is so much of a batch, and an epoch still has so many steps.
PADDING, PACKED_STEPS = 1 / 3, 50
METRICS = "metrics.json"  # written last
ADAM = 2  # moments of a parameter

Announce = Callable[[str], None]
Shapes = dict[str, tuple[int, ...]]  # of matrices, by name


@dataclass
class Run:
    """Model, data and options of a run; `arguments` are fields of `CausalTrainingArguments`."""

    model: str | None  # None: from scratch
    data: str
    output: str
    scratch: str = "small"  # size of a model from scratch
    eval_data: str | None = None
    template: str | None = None
    numbers: str | None = None  # "text" or "value"; the processor's by default
    max_length: int = 512
    mask_prompt: bool = True
    pack: bool | None = False  # several short rows in one; None: where it pays
    compat_weight: float = COMPAT_WEIGHT
    lora: int = 0  # rank; 0 trains the weights themselves
    individual_column: str | None = None  # rows with the same value share a learned individual
    patience: int = 0  # evaluations without a lower loss before stopping; 0 never stops early
    resume: bool = False
    device: str = "auto"  # "cpu", or "auto": all accelerators that torch sees
    dtype: str = "auto"  # of the weights in memory
    arguments: dict[str, Any] = field(default_factory=dict)


def train(run: Run) -> dict[str, float]:
    """Train, evaluate before and after, recalibrate the noise, save. Returns the final metrics."""
    output = Path(run.output)
    checkpoint = _checkpoint(output, run.resume)
    with lock(output) if _is_first_process() else contextlib.nullcontext():
        return _train(run, output, checkpoint)


@dataclass
class Prepared:
    """A run before its first step: rows, model and examples; nothing is measured or written."""

    run: Run
    rows: list[Row]
    held_out_rows: list[Row]
    processor: CausalQwenProcessor
    model: Any
    learn: Examples  # packed if the run packs
    held_out: Examples
    names: list[str]  # of the individuals, if the run has a column of them

    @property
    def collate(self) -> Collator:
        return Collator(self.processor.tokenizer.pad_token_id)


def prepare(run: Run) -> Prepared:
    """Read the rows and the model, and encode the rows."""
    if run.lora and run.arguments.get("train") == "heads":
        logger.warning("train='heads' freezes the backbone, so its LoRA learns nothing.")
    check_training_device(run.device)
    rows, held_out_rows = _rows(run)
    processor, model = _model(run, rows)
    has_targets = any("target" in row for row in rows)
    processor.encode_numbers = run.numbers or ("value" if has_targets else processor.encode_numbers)
    model.config.encode_numbers = processor.encode_numbers
    model.config.compat_loss_weight = run.compat_weight
    fit_fields(model, rows)
    learn, held_out = (_examples(part, processor, model, run) for part in (rows, held_out_rows))
    names: list[str] = []
    if run.individual_column is not None:
        authors = names_of(rows, run.individual_column)
        names = sorted({name for name in authors if name is not None})
        mark(learn, authors, names, learn=True)
        mark(held_out, names_of(held_out_rows, run.individual_column), names, learn=False)
    packed = Examples(pack(learn, run.max_length)) if run.pack is not False else learn
    run = replace(run, pack=_packs(run, learn, packed) if run.pack is None else run.pack)
    learn = packed if run.pack else learn
    return Prepared(run, rows, held_out_rows, processor, model, learn, held_out, names)


def _packs(run: Run, learn: Examples, packed: Examples) -> bool:
    """Whether packing pays: rows differ in length, and enough steps remain."""
    sizes = [len(example.ids) for example in learn]
    batch = run.arguments.get("per_device_train_batch_size", 8)
    padded = sum(max(part) * len(part) for part in batched(sizes, batch))
    rows_per_step = batch * run.arguments.get("gradient_accumulation_steps", 1)
    steps = len(packed) // rows_per_step
    return 1 - sum(sizes) / padded >= PADDING and steps >= PACKED_STEPS


def _train(run: Run, output: Path, checkpoint: str | None) -> dict[str, float]:
    ready = prepare(run)
    run, processor, model = ready.run, ready.processor, ready.model
    args = training_arguments(run, is_new=checkpoint is None)
    progress = _progress(ready)
    is_shown = not args.disable_tqdm and _is_first_process()
    announce = progress.announce if is_shown else _say_nothing
    texts = _calibration_texts(ready.rows, processor, model, run.max_length)
    if checkpoint is None:
        _calibrate(ready, texts, announce)
    trainer = _trainer(ready, args, progress)
    if _is_first_process():
        _record(ready, output)
    is_learned = checkpoint is not None and _has_all_steps(output, args.max_steps, checkpoint)
    _learn(trainer, checkpoint, run.patience, is_learned)
    metrics: dict[str, float] = trainer.evaluate()
    if trainer.authors is not None:
        announce("comparing the individuals on held-out rows")
        metrics |= _compare_authors(trainer, ready)
    trainer.finish(processor, texts, announce)
    trainer.save_state()
    if trainer.args.should_save:
        write_text(output / METRICS, json.dumps(metrics, indent=1))
    return metrics


def plan(run: Run) -> dict[str, str]:
    """What a run would do, by name: rows and the model are read, nothing is trained or written.
    Memory counts weights, gradients and the optimizer, not activations."""
    _check_new(Path(run.output), run.resume)
    ready = prepare(run)
    run, args = ready.run, training_arguments(ready.run, is_new=True)
    model = with_lora(ready.model, run.lora)
    if args.train == "heads":
        freeze_backbone(model)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    per_epoch = math.ceil(len(ready.learn) / batch)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    parameters = list(model.parameters())
    trained = [one for one in parameters if one.requires_grad]
    size = sum(p.numel() * p.element_size() for p in parameters)
    size += (1 + ADAM) * sum(p.numel() * p.element_size() for p in trained)
    head_rate = args.learning_rate if args.head_learning_rate is None else args.head_learning_rate
    return {
        "rows": f"{len(ready.rows)} to learn, {len(ready.held_out_rows)} held out",
        "cut": f"{ready.learn.truncated} rows, to {run.max_length} tokens",
        "tokens": f"{sum(len(example.ids) for example in ready.learn)} per epoch",
        "sequences": f"{len(ready.learn)}, {'packed' if run.pack else 'not packed'}",
        "batch": f"{batch} sequences per step",
        "steps": f"{steps} ({steps / per_epoch:.3g} epochs)",
        "learning rates": f"{args.learning_rate:g}, heads {head_rate:g}",
        "softmax weight": f"{run.compat_weight:g}",
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "parameters": f"{sum(p.numel() for p in trained):,} of "
        f"{sum(p.numel() for p in parameters):,} trained",
        "individuals": str(len(ready.names)),
        "memory": f"{size / 1e9:.2f} GB without activations",
    }


def _calibrate(ready: Prepared, texts: Sequence[torch.Tensor], announce: Announce) -> None:
    """Set C, scales and gains of a model that was never trained on its training text."""
    is_new, model = ready.run.model is None, ready.model
    if not is_new and not model.abduction.scale.is_constant:
        return
    announce("measuring thresholds and noise gains on the training text")
    hidden = read_texts(model, texts)
    if not is_new:  # only conversion set C and the scales
        calibrate_scales(model, hidden)
    calibrate_gains(model, hidden)


def _trainer(
    ready: Prepared, args: CausalTrainingArguments, progress: TrainingProgress
) -> CausalTrainer:
    trainer = CausalTrainer(
        model=with_lora(ready.model, ready.run.lora),
        args=args,
        train_dataset=ready.learn,
        eval_dataset=ready.held_out,
        data_collator=ready.collate,
        processor=ready.processor,
        authors=Authors(ready.names, ready.model) if ready.names else None,
    )
    if ready.run.patience:
        trainer.add_callback(EarlyStoppingCallback(ready.run.patience))
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(progress)
    return trainer


def _learn(trainer: CausalTrainer, checkpoint: str | None, patience: int, is_learned: bool) -> None:
    """Train; Hugging Face restores the model of a checkpoint, and this the authors. After the last
    step only the model is restored: Hugging Face would make one more."""
    if checkpoint is not None and trainer.authors is not None:
        trainer.authors.load_state(Path(checkpoint))
    if checkpoint is not None and is_learned:
        trainer.state = TrainerState.load_from_json(str(Path(checkpoint, STATE)))
    best = trainer.state.best_model_checkpoint if patience else None
    if checkpoint is not None and is_learned:
        trainer._load_from_checkpoint(best or checkpoint)
    else:
        trainer.train(resume_from_checkpoint=checkpoint)
        best = trainer.state.best_model_checkpoint if patience else None
    if best is not None and trainer.authors is not None:
        trainer.authors.load_state(Path(best))


def _say_nothing(stage: str) -> None:
    pass


def _progress(ready: Prepared) -> TrainingProgress:
    """With lines of individuals after the first held-out row that asks for no number."""
    pairs = zip(ready.held_out_rows, ready.held_out, strict=True)
    heard = next((example for row, example in pairs if row.get("target") is None), None)
    if heard is None:
        return TrainingProgress()
    return TrainingProgress(speak=lambda model: _speak(model, ready.processor, heard))


def _compare_authors(trainer: CausalTrainer, ready: Prepared) -> dict[str, float]:
    assert trainer.authors is not None
    assert ready.run.individual_column is not None
    names = names_of(ready.held_out_rows, ready.run.individual_column)
    trainer.causal_model.eval()
    size = trainer.args.per_device_eval_batch_size
    pushes = trainer.authors.pushes()
    nll = likelihoods(trainer.causal_model, pushes, ready.held_out, ready.collate, size)
    return {f"eval_{k}": v for k, v in compare(nll, names, ready.names).items()}


def _has_all_steps(output: Path, steps: int, checkpoint: str) -> bool:
    """Whether only the end of a run is missing; refuses a run that has ended, too."""
    made = _steps_made(Path(checkpoint))
    if steps <= 0 or made < steps:
        return False
    if (output / METRICS).exists():
        raise ValueError(f"{output} has made {made} of {steps} steps; resume it with more.")
    return True


def _steps_made(directory: Path) -> int:
    state = read_state(directory)
    return 0 if state is None else int(state["global_step"])


def fit_fields(model: CausalModel, rows: Sequence[Mapping[str, Any]]) -> None:
    """Standardise every named target by its own median and interquartile range."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get("target") is not None and row.get("field") is not None:
            found.setdefault(row["field"], []).append(float(row["target"]))
    for name, values in found.items():
        model.fit_value_field(name, values)


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


def _calibration_texts(
    rows: Sequence[Row], processor: CausalQwenProcessor, model: CausalModel, max_length: int
) -> list[torch.Tensor]:
    """Token ids of a few rows, evenly spaced, with numbers as text."""
    sample = rows[:: max(len(rows) // CALIBRATION_ROWS, 1)][:CALIBRATION_ROWS]
    reader = CausalQwenProcessor(processor.tokenizer, chat_template=processor.chat_template)
    fields = model.config.value_fields or ()
    examples = (encode_row(row, reader, max_length, False, fields) for row in sample)
    texts = ([k for k in example.ids if k != reader.num_token_id] for example in examples)
    return [torch.tensor(ids) for ids in texts if ids]


def _speak(model: Any, processor: CausalQwenProcessor, example: Example) -> list[str]:
    """A line of each of a few individuals after the prompt of a held-out row."""
    learned = [place for place, label in enumerate(example.labels) if label != IGNORE]
    end = learned[0] if learned and learned[0] else min(PROMPT_TOKENS, len(example.ids) // 2)
    end = max(end, 1)
    ids = torch.tensor([example.ids[:end]])
    was_training = model.training
    model.eval()
    with quiet():
        said = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=torch.ones_like(ids).to(model.device),
            numeric_values=torch.tensor([example.values[:end]], dtype=torch.float64),
            individual=list(INDIVIDUALS),
            num_return_sequences=len(INDIVIDUALS),
            max_new_tokens=SPOKEN_TOKENS,
            return_dict_in_generate=True,
        )
    model.train(was_training)
    rows = zip(INDIVIDUALS, said.sequences[:, end:], said.numeric_values[:, end:], strict=True)
    lines = []
    for seed, new, values in rows:
        text = processor.decode(new, values, skip_special_tokens=True)
        lines.append(f"individual {seed}: {' '.join(text.split())}")
    return lines


def batched(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _is_first_process() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def _record(ready: Prepared, output: Path) -> None:
    run = ready.run
    options = {**asdict(run), **run.arguments, "model": run.model or "from scratch"}
    for name in ("data", "eval_data", "output", "output_dir", "resume", "arguments"):
        options.pop(name, None)
    rows = {"data": ready.rows, "held-out rows": ready.held_out_rows}
    write_record(output, rows, options, is_new=not run.resume)


def _model(run: Run, rows: Sequence[Row]) -> tuple[CausalQwenProcessor, Any]:
    """The model to continue from, or a new one, reproducible for the same rows and seed."""
    if run.model is not None:
        return open_model(run.model, dtype=run.dtype)  # the trainer moves it
    torch.manual_seed(run.arguments.get("seed", 0))
    processor, model = new_model(texts_of(rows), run.scratch, max_length=run.max_length)
    return processor, place_model(model, "cpu", run.dtype)


def check_training_device(name: str) -> None:
    """Refuse one of several accelerators: the trainer takes every one that it sees."""
    device = resolve_device(name)
    if device.index is not None:
        raise ValueError(
            f"device={name!r}: training uses all accelerators that torch sees; choose one by "
            f"{device.type.upper()}_VISIBLE_DEVICES={device.index}, with device={device.type!r}."
        )


def training_arguments(run: Run, *, is_new: bool) -> CausalTrainingArguments:
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


def _examples(
    rows: Sequence[Row], processor: CausalQwenProcessor, model: CausalModel, run: Run
) -> Examples:
    names = model.config.value_fields or ()
    return encode_counted(rows, processor, run.max_length, run.mask_prompt, names)


def _checkpoint(output: Path, resume: bool) -> str | None:
    if resume:
        last = last_checkpoint(output)
        if last is None:
            raise ValueError(
                f"{output} has no whole checkpoint to resume from; omit --resume, and train into a "
                "new directory."
            )
        return str(last)
    if _is_first_process():
        _check_new(output, resume)
    return None


def _check_new(output: Path, resume: bool) -> None:
    if not resume and output.is_dir() and any(file.name != LOCK for file in output.iterdir()):
        raise FileExistsError(f"{output} is not empty; choose another, or continue with --resume.")


def lora_shapes(model: Any) -> tuple[Shapes, Shapes]:
    """The backbone's projections by name: linear modules, and the stacked weights of experts."""
    modules: Shapes = {
        name.rpartition(".")[2]: (module.out_features, module.in_features)
        for name, module in model.model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith(NO_LORA)
    }
    experts: Shapes = {
        name.partition(".mlp.")[2]: tuple(parameter.shape[-2:])
        for name, parameter in model.model.named_parameters()
        if ".mlp.experts." in name
    }
    return modules, experts


def check_lora_rank(model: Any, rank: int) -> None:
    """Refuse a rank above that of the smallest projection, where LoRA would only cost memory."""
    modules, experts = lora_shapes(model)
    shapes = modules | experts
    smallest = min(shapes, key=lambda name: min(shapes[name]))
    rows, columns = shapes[smallest]
    if rank > min(rows, columns):
        raise ValueError(
            f"lora={rank} exceeds the rank of {smallest}, a matrix of {rows} x {columns}; choose "
            f"at most {min(rows, columns)}."
        )


def with_lora(model: Any, rank: int) -> Any:
    """LoRA on the backbone's projections; the causal heads are trained in full."""
    if not rank:
        return model
    check_lora_rank(model, rank)
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError:
        raise ImportError(
            f"LoRA needs peft, which is not installed: {install_hint('lora')}"
        ) from None
    modules, experts = lora_shapes(model)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(modules),
        target_parameters=list(experts) or None,
        modules_to_save=["abduction", "action", "decision"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)
