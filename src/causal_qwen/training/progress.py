"""Progress of a training run on the terminal: loss, speed, remaining time, and what is said."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

SHOWN = {"total_loss": "loss", "eval_accuracy": "accuracy", "eval_ovr_nll": "one-vs-rest NLL"}


class TrainingProgress(TrainerCallback):
    """A bar on a terminal, a line per log elsewhere; only from the first process."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        note = TextColumn("{task.fields[note]}")
        columns = BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn()
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.latest: dict[str, float] = {}

    def print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started, self.first_step = time.monotonic(), state.global_step
        self.first_token = state.num_input_tokens_seen
        if state.is_world_process_zero:
            steps = {"total": state.max_steps, "completed": state.global_step}
            self.task = self.bar.add_task("training", **steps, note="")
            self.bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.bar.update(self.task, completed=state.global_step, note=self._note(state))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        news = {name: logs[name] for name in SHOWN if name in (logs or {})}
        self.latest |= news
        if news and state.is_world_process_zero and not self.console.is_terminal:
            line = f"step {state.global_step}/{state.max_steps}  {self._note(state)}"
            if done := state.global_step - self.first_step:
                pace = (time.monotonic() - self.started) / done
                left = timedelta(seconds=round(pace * (state.max_steps - state.global_step)))
                line += f"  {left} to go"
            self.print(line)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.stop()

    def _note(self, state: Any) -> str:
        parts = [f"{SHOWN[name]} {value:.4g}" for name, value in self.latest.items()]
        seconds = max(time.monotonic() - self.started, 1e-9)
        parts.append(f"{(state.num_input_tokens_seen - self.first_token) / seconds:.0f} tokens/s")
        return "  ".join(parts)
