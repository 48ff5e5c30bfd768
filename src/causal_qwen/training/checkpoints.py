"""Checkpoints: which of a run's are whole, and what they have logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PREFIX = "checkpoint-"
STATE = "trainer_state.json"  # the trainer writes it last


def last_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint whose state can be read: one that was cut short is passed over."""
    found = [path for path in run.glob(f"{PREFIX}*") if _step(path) >= 0]
    whole = (path for path in sorted(found, key=_step, reverse=True) if _state(path) is not None)
    return next(whole, None)


def read_log(run: Path) -> list[dict[str, float]]:
    """Everything a run has logged: its own record if it has ended, else its newest checkpoint's."""
    last = last_checkpoint(run)
    state = _state(run) or (_state(last) if last is not None else None)
    if state is None:
        raise FileNotFoundError(f"{run} holds no checkpoint with a log; is it a training run?")
    log: list[dict[str, float]] = state["log_history"]
    return log


def _step(checkpoint: Path) -> int:
    step = checkpoint.name.removeprefix(PREFIX)
    return int(step) if step.isdecimal() else -1


def _state(directory: Path) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state
