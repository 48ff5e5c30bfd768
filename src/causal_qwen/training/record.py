"""Record: the data, model and options that a run was started with, for comparison on --resume."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.outputs import write_text
from causal_qwen.terminal import counted
from causal_qwen.training.checkpoints import RECORD

CHANGEABLE = {  # options that a resumed run may change: its length, its logs, its speed
    *("max_steps", "num_train_epochs", "patience", "save_steps", "save_strategy", "recalibrate"),
    *("eval_steps", "eval_strategy", "per_device_eval_batch_size", "save_total_limit", "use_cpu"),
    *("logging_steps", "report_to", "disable_tqdm", "gradient_checkpointing"),
    *("dataloader_num_workers", "device"),
}
Record = dict[str, Any]

logger = logging.getLogger("transformers.causal_qwen")


def describe(
    rows: Mapping[str, tuple[str, Sequence[Any]]],
    model: tuple[str, CausalModel | None],
    options: Mapping[str, Any],
) -> Record:
    """Sources and hashes; `rows` are (source, rows) by their purpose, no model is from scratch."""
    source, causal = model
    parts: Record = {
        purpose: {"source": f"{where}, {counted(len(some), 'row')}", "sha256": _hash_rows(some)}
        for purpose, (where, some) in rows.items()
    }
    parts["model"] = {"source": source, "sha256": None if causal is None else _hash_model(causal)}
    named = json.loads(json.dumps(dict(options), default=str))
    return {**parts, "options": named}


def write_record(run: Path, record: Record) -> None:
    write_text(run / RECORD, json.dumps(record, indent=1))


def check_unchanged(run: Path, record: Record) -> None:
    """Refuse to resume a run with other data, another model or other options than it has recorded;
    a warning names changes that it allows."""
    try:
        recorded = json.loads((run / RECORD).read_text(encoding="utf-8"))
        options: dict[str, Any] = dict(recorded.pop("options"))
        changes = [
            f"other {part} ({record[part]['source']}; at the start {of['source']})"
            for part, of in recorded.items()
            if of["sha256"] != record[part]["sha256"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        logger.warning(f"{run} has no readable {RECORD}: it resumes without a comparison.")
        return
    now = record["options"]
    told = {
        name: f"{name}={now.get(name)!r} (at the start {options.get(name)!r})"
        for name in {**options, **now}
        if options.get(name) != now.get(name)
    }
    changes += [words for name, words in told.items() if name not in CHANGEABLE]
    if changes:
        raise ValueError(
            f"{run} cannot resume with {'; '.join(changes)}: resume with what {run / RECORD} "
            "records, or train into another directory."
        )
    if told:
        logger.warning(f"{run} resumes with other options: {'; '.join(told.values())}.")


def _hash_rows(rows: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def _hash_model(model: CausalModel) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
