"""Checkpoints of a training run: the last whole one, its log, and what the run was started with.

Hugging Face writes `trainer_state.json` last: a checkpoint in which it can be read is whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_utils import sort_checkpoints

from causal_qwen.outputs import write_text

PREFIX = "checkpoint-"
STATE = "trainer_state.json"
RECORD = "run.json"
HASH = "sha256 of "
CHANGEABLE = {  # options that a resumed run may change: its length, its logs, its speed
    *("max_steps", "num_train_epochs", "patience", "save_steps", "save_strategy", "recalibrate"),
    *("eval_steps", "eval_strategy", "per_device_eval_batch_size", "save_total_limit", "use_cpu"),
    *("logging_steps", "report_to", "disable_tqdm", "gradient_checkpointing"),
    *("dataloader_num_workers", "device"),
}

logger = logging.getLogger("transformers.causal_qwen")


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


def read_log(run: Path) -> list[dict[str, float]]:
    """The log of a finished run, or of its newest checkpoint."""
    last = last_checkpoint(run)
    state = read_state(run) or (read_state(last) if last is not None else None)
    if state is None:
        raise FileNotFoundError(f"{run} has no checkpoint with a log; is it a training run?")
    log: list[dict[str, float]] = state["log_history"]
    return log


def write_record(
    run: Path, rows: Mapping[str, Sequence[Any]], options: Mapping[str, Any], *, is_new: bool
) -> None:
    """Record the rows (by purpose) and options of a new run; refuse to resume a run with other
    ones than it has recorded. A warning names changes that are allowed."""
    hashes = {f"{HASH}{purpose}": _hash_rows(some) for purpose, some in rows.items()}
    record = json.loads(json.dumps({**hashes, **options}, default=str))
    if is_new:
        write_text(run / RECORD, json.dumps(record, indent=1))
        return
    started = json.loads((run / RECORD).read_text(encoding="utf-8"))
    changes = {
        name: f"other {name.removeprefix(HASH)}"
        if name.startswith(HASH)
        else f"{name}={record.get(name)!r} (at the start {started.get(name)!r})"
        for name in {**started, **record}
        if started.get(name) != record.get(name)
    }
    if refused := [words for name, words in changes.items() if name not in CHANGEABLE]:
        raise ValueError(
            f"{run} cannot resume with {'; '.join(refused)}: resume with what {run / RECORD} "
            "records, or train into another directory."
        )
    if changes:
        logger.warning(f"{run} resumes with other options: {'; '.join(changes.values())}.")


def _hash_rows(rows: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()
