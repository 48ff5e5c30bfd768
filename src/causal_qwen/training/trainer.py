"""Trainer: Hugging Face's Trainer with our loss terms and metrics.

The model computes its own loss from `labels` and `numeric_values`, so a plain `Trainer` works too.
This one counts numbers as well as tokens over an accumulated batch, has separate learning rates
for the causal heads and for the individuals of authors, logs the loss by its terms, and evaluates
with `metrics`.

Hugging Face writes `trainer_state.json` last: a checkpoint in which it can be read is whole.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import ProgressCallback, Trainer, TrainingArguments
from transformers.trainer_utils import sort_checkpoints

from causal_qwen.conversion.calibration import calibrate_gains, read_texts
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.modeling.abduction import AbductionNetwork
from causal_qwen.modeling.action import ActionNetwork
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import Processor
from causal_qwen.modeling.thresholds import Decision
from causal_qwen.options import check_choice
from causal_qwen.training.authors import Authors
from causal_qwen.training.metrics import MetricAccumulator

SHOWN = {"total_loss": "loss", "eval_accuracy": "accuracy", "eval_ovr_nll": "one-vs-rest NLL"}
PREFIX = "checkpoint-"
STATE = "trainer_state.json"
HEADS = (AbductionNetwork, ActionNetwork, Decision)
TERMS = {  # name in the log -> (field of the output, its weight in the config)
    "cls_loss_mean": ("classification_loss", "classification_loss_weight"),
    "reg_loss_effective": ("regression_loss", "regression_loss_weight"),
    "compat_loss_mean": ("compatibility_loss", "compat_loss_weight"),
}

logger = logging.getLogger("transformers.causal_qwen")


@dataclass
class CausalTrainingArguments(TrainingArguments):
    """Hugging Face's arguments and four more. Its filter of NaN is off: the trainer stops there."""

    logging_nan_inf_filter: bool = False  # it reads every loss from the device
    head_learning_rate: float | None = None  # of abduction, noise, thresholds; as the others
    individual_learning_rate: float = 0.03  # of the individuals of authors
    train: str = "all"  # or heads: the backbone is frozen
    recalibrate: bool = True  # measure the noise gains after training

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("train", self.train, ("all", "heads"))


class CausalTrainer(Trainer):
    """A Trainer that counts numbers, logs the terms of the loss and evaluates with `metrics`."""

    def __init__(
        self,
        *args: Any,
        processor: Processor | None = None,
        authors: Authors | None = None,
        **kwargs: Any,
    ) -> None:
        """`processor` is saved in every checkpoint; `authors` are those of `authors` in batches."""
        super().__init__(*args, **kwargs)
        self.causal_model: Any = self.accelerator.unwrap_model(self.model)
        self.processor = processor
        self.authors = None if authors is None else authors.to(self.args.device)
        if getattr(self.args, "train", "all") == "heads":
            freeze_backbone(self.causal_model)
        self._check_shards()
        self._num_numbers: Tensor | None = None
        # Kept on the device: to read a number is to wait for it.
        self._terms: dict[str, list[Tensor]] = {name: [] for name in TERMS}
        self._metrics: MetricAccumulator | None = None

    def _check_shards(self) -> None:
        """FSDP2 computes wrong gradients for tied embeddings when vocab_size % world_size != 0,
        without an error (plain Qwen2 too): losses differ from the second step on."""
        config, shards = self.causal_model.config, self.args.world_size
        rows = config.vocab_size
        if self.is_fsdp_enabled and config.tie_word_embeddings and rows % shards:
            raise ValueError(
                f"FSDP cannot split {rows} tied rows evenly into {shards} shards; first call "
                f"model.resize_token_embeddings({-(-rows // shards) * shards})."
            )
        if self.authors is not None and shards > 1:
            raise ValueError(
                f"Individuals of authors are trained by one process, not {shards}: their gradients "
                "would differ; start one."
            )

    # ------------------------------------------------------------ one step

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Count numbers over the accumulated batch, as the parent counts tokens."""
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        k = self.causal_model.config.num_token_id
        if k is not None and num_items is not None:
            count = sum((batch["labels"][..., 1:] == k).sum().to(device) for batch in samples)
            count = torch.as_tensor(count, device=device)
            if self.args.average_tokens_across_devices and self.args.world_size > 1:
                count = self.accelerator.gather(count).sum()
            self._num_numbers = count
        return samples, num_items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        inputs = {"skip_logits": True, "use_cache": False, **inputs}
        if (named := inputs.pop("authors", None)) is not None and self.authors is not None:
            inputs["u_noise"] = self.authors.noise(named)
        if num_items_in_batch is not None and self._num_numbers is not None:
            inputs["num_numbers_in_batch"] = self._num_numbers
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if model.training:
            for name, (key, _) in TERMS.items():
                self._terms[name].append(outputs[key].detach())
        return (loss, outputs) if return_outputs else loss

    def _check_weights(self) -> None:
        """Refuse to save NaN: a finite loss can have a gradient that is not."""
        for name, parameter in self.causal_model.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # FSDP
            if not local.isfinite().all():
                self._diverge(f"{name} has NaN or infinity after step {self.state.global_step}")

    def _diverge(self, finding: str) -> NoReturn:
        last = last_checkpoint(Path(self.args.output_dir))
        good = "no checkpoint was saved before" if last is None else f"{last} is the last good one"
        raise FloatingPointError(
            f"{finding}; {good}. Check the rows, or train into another directory with a lower "
            "learning rate."
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the loss terms: summed over processes and accumulated batches, mean over steps. Stop
        if they are not finite."""
        if "loss" in logs and (parts := len(self._terms["cls_loss_mean"])):
            steps = parts / self.args.gradient_accumulation_steps
            sums = torch.stack([torch.stack(terms).sum() for terms in self._terms.values()])
            means = self.accelerator.reduce(sums / steps, reduction="sum").tolist()
            weights = [getattr(self.causal_model.config, weight) for _, weight in TERMS.values()]
            logs |= dict(zip(TERMS, means, strict=True))
            logs["total_loss"] = total = sum(w * x for w, x in zip(weights, means, strict=True))
            if not math.isfinite(total):
                self._diverge(f"loss={total} at step {self.state.global_step}")
            self._terms = {name: [] for name in TERMS}
        super().log(logs, *args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's optimizer, with the causal heads and the authors in separate groups."""
        optimizer = super().create_optimizer(*args, **kwargs)
        rate = getattr(self.args, "head_learning_rate", None)
        if rate is not None:
            heads = head_parameters(self.model)
            for group in list(optimizer.param_groups):
                own = [p for p in group["params"] if id(p) in heads]
                group["params"] = [p for p in group["params"] if id(p) not in heads]
                if own:
                    options = {k: v for k, v in group.items() if k != "params"}
                    optimizer.add_param_group({**options, "params": own, "lr": rate})
        if self.authors is not None:
            t, rate = self.authors.t, self.args.individual_learning_rate
            optimizer.add_param_group({"params": [t], "lr": rate, "weight_decay": 0.0})
            # the parent clears the model's gradients only
            optimizer.register_step_post_hook(lambda *_: setattr(t, "grad", None))
        return optimizer

    # ------------------------------------------------------------ evaluation

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        self._metrics = MetricAccumulator(self.causal_model)
        metrics = super().evaluate(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        self._metrics.gather()
        added = {f"{metric_key_prefix}_{name}": v for name, v in self._metrics.compute().items()}
        self._metrics = None
        self.log(added)
        return metrics | added

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        if self._metrics is not None:
            self._metrics.add(Cauchy(outputs["loc_U"], outputs["scale_U"]), inputs)
        return loss.detach(), None, None

    # ------------------------------------------------------------ saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._check_weights()
        with quiet():
            super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Also what the parent does not save: processor, authors, the config beside adapters."""
        super()._save(output_dir, state_dict)
        directory = Path(output_dir or str(self.args.output_dir))
        if self.processor is not None:
            self.processor.save_pretrained(directory)
        if not (directory / "config.json").exists():  # adapters alone
            self.causal_model.config.save_pretrained(directory)
        if self.authors is not None and directory.name.startswith(PREFIX):
            self.authors.save_state(directory)

    # ------------------------------------------------------------ afterwards

    def finish(
        self, processor: Processor, texts: Sequence[Tensor], progress: Callable[[str], None]
    ) -> None:
        """Merge LoRA, recalibrate the noise, and save model and processor."""
        self._check_weights()
        if hasattr(self.causal_model, "merge_and_unload"):
            merged = self.causal_model.merge_and_unload()
            self.model = self.model_wrapped = self.causal_model = merged
        with quiet():
            if self.args.recalibrate:
                progress("measuring noise gains")
                calibrate_gains(self.causal_model, read_texts(self.causal_model, texts))
            self.causal_model.config.encode_numbers = processor.encode_numbers
            self.save_model()
        if self.args.should_save:
            processor.save_pretrained(self.args.output_dir)
            if self.authors is not None:
                self.authors.save(self.causal_model, Path(str(self.args.output_dir)))


def head_parameters(model: nn.Module) -> set[int]:
    """The ids of all parameters of causal heads, found by module: wrappers rename them."""
    found = [
        p for module in model.modules() if isinstance(module, HEADS) for p in module.parameters()
    ]
    found += [p for name, p in model.named_parameters() if name.endswith("value_direction")]
    return {id(parameter) for parameter in found}


def freeze_backbone(model: nn.Module) -> None:
    """Leave only the causal heads trainable."""
    heads = head_parameters(model)
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in heads and parameter.requires_grad)


class Progress(ProgressCallback):
    """Hugging Face's bar; of its logs, what is SHOWN, on stderr."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        shown = [f"{SHOWN[name]} {x:.4g}" for name, x in (logs or {}).items() if name in SHOWN]
        if shown and self.training_bar is not None:
            steps = f"step {state.global_step}/{state.max_steps}"
            self.training_bar.write("  ".join((steps, *shown)), file=sys.stderr)


def last_checkpoint(run: Path) -> Path | None:
    """The newest whole checkpoint; a warning names newer ones that a killed process left."""
    for path in map(Path, reversed(sort_checkpoints(str(run)))):
        if read_state(path) is not None:
            return path
        logger.warning(f"{path} is passed over: it was not completed.")
    return None


def read_state(directory: Path) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state
