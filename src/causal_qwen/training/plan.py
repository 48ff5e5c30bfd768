"""Plan: what a run would do, without doing it.

    plan(Run("my-model", "rows.jsonl", "tuned")).to_dict()

Rows are read and encoded and the model is loaded; nothing is trained and nothing is written.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from causal_qwen.modeling.loss import IGNORE, chunk_size
from causal_qwen.modeling.one_vs_rest import BLOCK
from causal_qwen.outputs import LOCK, MANIFEST
from causal_qwen.training.authors import saved_files
from causal_qwen.training.checkpoints import PREFIX
from causal_qwen.training.data import Examples
from causal_qwen.training.run import (
    WRITTEN,
    Prepared,
    Run,
    batched,
    prepare,
    training_arguments,
    with_lora,
)
from causal_qwen.training.trainer import CausalTrainingArguments, freeze_backbone, head_parameters

MODEL_FILES = (
    "README.md",
    *("config.json", "generation_config.json", "model.safetensors", "causal_qwen_auto.py"),
    *("tokenizer.json", "tokenizer_config.json", "processor_config.json"),
)
LAYER_WIDTHS = (10, 4)  # saved for the backward pass per token and layer: 10 H + 4 I numbers
LOSS_BLOCKS = 4  # of |W| and the gradient by it, with BLOCK tokens each


@dataclass(frozen=True)
class Plan:
    """The size, the settings, the memory and the files of a run."""

    rows: int
    held_out_rows: int
    cut_rows: int  # to `max_length` tokens
    max_length: int
    tokens: int  # of the training rows, cut
    learned_tokens: int  # of these, those with a label
    sequences: int  # rows of batches; fewer than `rows` if packed
    is_packed: bool
    padding: float  # share of the tokens in a batch
    sequences_per_step: int
    steps: int
    epochs: float
    learning_rate: float
    head_learning_rate: float
    individual_learning_rate: float | None
    compat_weight: float
    precision: str
    parameters: int
    trained_parameters: int
    trained_head_parameters: int
    individuals: int
    memory: dict[str, int]  # bytes, by what needs them
    files: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "memory_total": sum(self.memory.values())}

    def rows_of_table(self) -> list[tuple[str, str]]:
        """Name and value of every line that `--dry-run` prints."""
        memory = ", ".join(f"{name} {_size(count)}" for name, count in self.memory.items())
        packed = f"packed into {self.sequences} sequences" if self.is_packed else "not packed"
        rates = f"{self.learning_rate:g}, heads {self.head_learning_rate:g}"
        if self.individual_learning_rate is not None:
            rates += f", individuals {self.individual_learning_rate:g}"
        return [
            ("rows", f"{self.rows} to learn, {self.held_out_rows} held out"),
            ("cut", f"{self.cut_rows} rows, to {self.max_length} tokens"),
            ("tokens", f"{self.tokens} per epoch, {self.learned_tokens} with a label"),
            ("packing", f"{packed}; {self.padding:.0%} of a batch is padding"),
            ("batch", f"{self.sequences_per_step} sequences per step"),
            ("steps", f"{self.steps} ({self.epochs:.3g} epochs)"),
            ("learning rates", rates),
            ("softmax weight", f"{self.compat_weight:g}"),
            ("precision", self.precision),
            ("trained", f"{self.trained_parameters:,} of {self.parameters:,} parameters"),
            ("of these, heads", f"{self.trained_head_parameters:,}"),
            ("individuals", str(self.individuals)),
            ("memory", f"about {_size(sum(self.memory.values()))} ({memory})"),
            ("before step one", "thresholds and noise gains are measured, unless trained before"),
            ("after the last", "noise gains are measured again"),
            *(("file" if place == 0 else "", file) for place, file in enumerate(self.files)),
        ]


def plan(run: Run) -> Plan:
    """The plan of a run; refuses what the run would refuse."""
    if Path(run.output).is_dir() and any(Path(run.output).iterdir()) and not run.resume:
        raise FileExistsError(f"{run.output} is not empty; choose another, or add --resume.")
    ready = prepare(run)
    run, learn = ready.run, ready.learn
    args = training_arguments(run, is_new=True)
    model = with_lora(ready.model, run.lora)
    if args.train == "heads":
        freeze_backbone(model)
    sizes = [len(example.ids) for example in learn]
    per_batch = args.per_device_train_batch_size
    padded = sum(max(part) * len(part) for part in batched(sizes, per_batch))
    steps, epochs = _length(len(learn), args)
    trained = {id(p): p.numel() for p in model.parameters() if p.requires_grad}
    heads = head_parameters(model)
    extra = len(ready.names) * ready.model.config.latent_size
    rate = args.learning_rate if args.head_learning_rate is None else args.head_learning_rate
    return Plan(
        rows=len(ready.rows),
        held_out_rows=len(ready.held_out_rows),
        cut_rows=learn.truncated,
        max_length=run.max_length,
        tokens=sum(sizes),
        learned_tokens=_learned(learn),
        sequences=len(learn),
        is_packed=bool(run.pack),
        padding=1 - sum(sizes) / padded,
        sequences_per_step=per_batch * args.gradient_accumulation_steps * args.world_size,
        steps=steps,
        epochs=epochs,
        learning_rate=args.learning_rate,
        head_learning_rate=rate,
        individual_learning_rate=args.individual_learning_rate if ready.names else None,
        compat_weight=run.compat_weight,
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        parameters=sum(p.numel() for p in model.parameters()) + extra,
        trained_parameters=sum(trained.values()) + extra,
        trained_head_parameters=sum(n for key, n in trained.items() if key in heads),
        individuals=len(ready.names),
        memory=_memory(model, ready, args, per_batch * max(sizes)),
        files=_files(ready, args, steps),
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _length(sequences: int, args: CausalTrainingArguments) -> tuple[int, float]:
    """Steps and epochs, as Hugging Face's Trainer counts them."""
    batches = math.ceil(sequences / (args.per_device_train_batch_size * args.world_size))
    per_epoch = max(math.ceil(batches / args.gradient_accumulation_steps), 1)
    if args.max_steps > 0:
        return args.max_steps, args.max_steps / per_epoch
    return math.ceil(args.num_train_epochs * per_epoch), args.num_train_epochs


def _learned(learn: Examples) -> int:
    return sum(label != IGNORE for example in learn for label in example.labels[1:])


def _memory(
    model: Any, ready: Prepared, args: CausalTrainingArguments, tokens: int
) -> dict[str, int]:
    """Bytes of a step on a batch of so many tokens. Weights, gradients, Adam's moments and the
    loss's buffers are counted; activations are a rule of thumb. What Python and torch need is not
    in it."""
    config, parameters = ready.model.config, list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    width = 2 if args.bf16 or args.fp16 else 4
    of_hidden, of_mlp = LAYER_WIDTHS
    per_layer = of_hidden * config.hidden_size + of_mlp * config.intermediate_size
    kept = per_layer * config.num_hidden_layers
    if args.gradient_checkpointing:
        kept = config.hidden_size * config.num_hidden_layers + per_layer
    if args.train == "heads":
        kept = per_layer  # nothing is kept below the heads
    chunk = min(tokens, chunk_size(config, tokens))
    return {
        "weights": sum(p.numel() * p.element_size() for p in parameters),
        "gradients": sum(p.numel() * p.element_size() for p in trained),
        "optimizer": 2 * sum(p.numel() * p.element_size() for p in trained),
        "activations": kept * tokens * width,
        "loss": _loss_numbers(model, config, chunk) * 4,
    }


def _loss_numbers(model: Any, config: Any, chunk: int) -> int:
    """Numbers that the loss holds beside the model: the scores of a chunk, with the bar softmax,
    blocks of |W|, and the gradient of W before it is added to that of other batches."""
    weight = model.get_output_embeddings().weight
    tensors = 1 if config.threshold_context == "none" else 2
    scores = tensors * chunk * config.vocab_size
    blocks = LOSS_BLOCKS * min(BLOCK, config.vocab_size) * config.latent_size
    return scores + blocks + (weight.numel() if weight.requires_grad else 0)


def _files(ready: Prepared, args: CausalTrainingArguments, steps: int) -> list[str]:
    saved = range(int(args.save_steps), steps + 1, int(args.save_steps))
    numbers = sorted({*saved, steps})[-(args.save_total_limit or len(saved) + 1) :]
    checkpoints = [f"{PREFIX}{number}/" for number in numbers]
    names = [*MODEL_FILES, *WRITTEN, MANIFEST, *saved_files(ready.names), *checkpoints]
    return sorted(str(Path(ready.run.output, name)) for name in names if name != LOCK)
