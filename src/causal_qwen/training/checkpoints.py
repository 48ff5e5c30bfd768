"""Checkpoints of a training run: lock its directory, find whole checkpoints, read their log.

A checkpoint is whole once its manifest is written, after all other files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from causal_qwen.outputs import LOCK, MANIFEST, damaged_files, lock, unlock

PREFIX = "checkpoint-"
STATE = "trainer_state.json"
RECORD = "run.json"  # what the run was started with, see `record`

logger = logging.getLogger("transformers.causal_qwen")


@contextlib.contextmanager
def locked_run(run: Path) -> Iterator[None]:
    """Create a run's directory and hold its lock; without any files in the end it is removed."""
    is_new = not run.exists()
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PermissionError(f"{run} cannot be written: {error.strerror}.") from error
    try:
        with lock(run / LOCK, run):
            try:
                yield
            finally:
                unlock(run / LOCK)
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                run.rmdir()


def last_checkpoint(run: Path, *, hashes: bool = False) -> Path | None:
    """The newest whole checkpoint by the sizes of its files, with `hashes` by their content.
    A warning names newer ones that are damaged."""
    for path in reversed(_numbered(run)):
        if not (damage := _damage(path, hashes)):
            return path
        logger.warning(f"{path} is passed over: {damage}.")
    return None


def delete_oldest(run: Path, limit: int | None, best: str | None) -> None:
    """Keep the newest `limit` checkpoints, and the best one; copies with other names stay."""
    if not limit:
        return
    own = [p for p in _numbered(run) if (p / MANIFEST).is_file() and not p.is_symlink()]
    kept = own[-limit:]
    the_best = [path for path in own[:-limit] if best and path.name == Path(best).name]
    if the_best:
        kept = the_best + own[-max(limit - 1, 1) :]
    for path in own:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _numbered(run: Path) -> list[Path]:
    """What is called checkpoint-NUMBER in a run, the oldest first."""
    steps = {path: path.name.removeprefix(PREFIX) for path in run.glob(f"{PREFIX}*")}
    numbered = [path for path, step in steps.items() if step.isdecimal()]
    return sorted(numbered, key=lambda path: int(steps[path]))


def read_log(run: Path) -> list[dict[str, float]]:
    """The log of a finished run, or of its newest checkpoint."""
    last = last_checkpoint(run)
    state = read_state(run) or (read_state(last) if last is not None else None)
    if state is None:
        raise FileNotFoundError(f"{run} has no checkpoint with a log; is it a training run?")
    log: list[dict[str, float]] = state["log_history"]
    return log


def _damage(checkpoint: Path, hashes: bool) -> str:
    """Why a checkpoint cannot be used; empty for a whole one."""
    if (checkpoint / MANIFEST).exists():
        return ", ".join(damaged_files(checkpoint, hashes=hashes))
    if (checkpoint.parent / RECORD).exists():
        return f"it has no {MANIFEST}, so it was not completed"
    is_readable = read_state(checkpoint) is not None  # version 0.3.0 wrote no manifests
    return "" if is_readable else f"{STATE} is missing or damaged"


def read_state(directory: Path) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state
