"""Progress of a training run on the terminal: loss, speed, remaining time, and what is said."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

SHOWN = {"total_loss": "loss", "eval_accuracy": "accuracy", "eval_ovr_nll": "one-vs-rest NLL"}


class TrainingProgress(TrainerCallback):
    """A bar on a terminal, a line per log elsewhere; only from the first process."""

    def __init__(
        self,
        console: Console | None = None,
        speak: Callable[[Any], list[str]] | None = None,
    ) -> None:
        """`speak` generates lines of text with the model, which are printed at every evaluation."""
        self.console = console or Console(stderr=True)
        self.speak = speak
        self.bar: Progress | None = None
        self.latest: dict[str, float] = {}

    def announce(self, stage: str) -> None:
        """Name a stage without a bar of its own."""
        self._print(f"{stage} ...")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started, self.first_step = time.monotonic(), state.global_step
        self.first_token = state.num_input_tokens_seen
        if not (state.is_world_process_zero and self.console.is_terminal):
            return
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.steps = self.bar.add_task(
            "training", total=state.max_steps, completed=state.global_step, note=""
        )
        self.rows = self.bar.add_task("evaluating", total=None, visible=False, note="")
        self.bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.update(self.steps, completed=state.global_step, note=self._note(state))

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any
    ) -> None:
        if self.bar is not None and eval_dataloader is not None:
            self.bar.update(self.rows, total=len(eval_dataloader), visible=True, advance=1)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.bar is not None:
            self.bar.reset(self.rows, visible=False)
        if self.speak is not None and model is not None and args.world_size == 1:
            for line in self.speak(model):
                self._print(f"  {line}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        news = {name: logs[name] for name in SHOWN if name in (logs or {})}
        self.latest |= news
        if news and state.is_world_process_zero and not self.console.is_terminal:
            line = f"step {state.global_step}/{state.max_steps}  {self._note(state)}"
            if done := state.global_step - self.first_step:
                pace = (time.monotonic() - self.started) / done
                left = timedelta(seconds=round(pace * (state.max_steps - state.global_step)))
                line += f"  {left} to go"
            self._print(line)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _note(self, state: Any) -> str:
        parts = [f"{SHOWN[name]} {value:.4g}" for name, value in self.latest.items()]
        seconds = max(time.monotonic() - self.started, 1e-9)
        parts.append(f"{(state.num_input_tokens_seen - self.first_token) / seconds:.0f} tokens/s")
        return "  ".join(parts)
