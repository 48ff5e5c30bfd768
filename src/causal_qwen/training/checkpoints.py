"""Checkpoints of a training run: find complete ones, read their log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PREFIX = "checkpoint-"
STATE = "trainer_state.json"  # the trainer writes it last


def last_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint with a readable state; incomplete ones are skipped."""
    found = {path: path.name.removeprefix(PREFIX) for path in run.glob(f"{PREFIX}*")}
    numbered = [path for path, step in found.items() if step.isdecimal()]
    newest = sorted(numbered, key=lambda path: int(found[path]), reverse=True)
    return next((path for path in newest if _state(path) is not None), None)


def read_log(run: Path) -> list[dict[str, float]]:
    """The log of a finished run, or of its newest checkpoint."""
    last = last_checkpoint(run)
    state = _state(run) or (_state(last) if last is not None else None)
    if state is None:
        raise FileNotFoundError(f"{run} has no checkpoint with a log; is it a training run?")
    log: list[dict[str, float]] = state["log_history"]
    return log


def _state(directory: Path) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state
