"""Shared by the four scripts: the model under test, and a report that sets the exit code."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from transformers import Qwen2ForCausalLM
from transformers.utils import logging

from causal_qwen import CausalQwenForCausalLM
from causal_qwen.conversion.checkpoint_io import load_tokenizer
from causal_qwen.conversion.convert import default_model

ModelOption = Annotated[
    Path | None, typer.Option("--model", help="A CausalQwen directory; the embedded model if none.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of all draws.")]

console = Console(highlight=False)


@dataclass
class Subject:
    """The model under test, its tokenizer if it has one, and which claims apply to it."""

    path: Path
    model: Any
    tokenizer: Any
    is_default: bool

    def ids(self, text: str) -> Tensor:
        """(1, T): the text's tokens; without a tokenizer, random ones seeded by the text."""
        if self.tokenizer is not None:
            ids: Tensor = self.tokenizer(text, return_tensors="pt").input_ids
            return ids
        generator = torch.Generator().manual_seed(sum(text.encode()))
        return torch.randint(self.model.config.vocab_size, (1, 12), generator=generator)

    def text(self, ids: Tensor) -> str:
        if self.tokenizer is None:
            return " ".join(map(str, ids.tolist()))
        decoded: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return " ".join(decoded.split())

    def base(self) -> tuple[Any, dict[str, Any]]:
        """The same directory as a plain Qwen2 model, and the report of its loading."""
        model, info = Qwen2ForCausalLM.from_pretrained(
            self.path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        return model.eval(), info

    @property
    def why_other_logits(self) -> str | None:
        """Why the logits may differ from the base model's; None: they must not."""
        loc = self.model.abduction.loc
        is_identity = loc.weight.shape[0] == loc.weight.shape[1] and torch.equal(
            loc.weight.float(), torch.eye(len(loc.weight), device=loc.weight.device)
        )
        if not is_identity or loc.bias.any():
            return "its abduction of locations is no longer the identity"
        return None

    @property
    def why_other_choices(self) -> str | None:
        """Why argmax P may differ from the base model's argmax; None: it must not."""
        model = self.model
        if model.abduction.scale.weight.any():
            return "its scales have been trained"
        if len(model.decision.threshold.unique()) > 1:
            return "its thresholds have been trained"
        if not model.action.decision_noise.any():
            return "it was not converted: its decision noise is 0"
        return self.why_other_logits

    @property
    def why_uncalibrated(self) -> str | None:
        """Why its noise at temperature 1 is unknown; None: it has been calibrated."""
        if getattr(self.model.generation_config, "noise_gain", None) is None:
            return "its noise gain was never calibrated"
        return None


def load_subject(path: Path | None) -> Subject:
    """The model of `--model`, or the embedded one, converted on first use; in float32.

    In half precision cached and uncached logits differ by more than choices do.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    is_default = path is None
    if path is not None and not (path / "config.json").is_file():
        console.print(f"[red]There is no model in {escape(str(path))}:[/] it holds no config.json.")
        raise typer.Exit(2)
    try:
        with console.status("loading the model") as status:
            if path is None:
                path = default_model(progress=lambda stage: status.update(f"converting: {stage}"))
            model = CausalQwenForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            return Subject(path, model, load_tokenizer(path), is_default)
    except (OSError, ValueError) as error:
        console.print(f"[red]The model cannot be loaded:[/] {escape(str(error))}")
        raise typer.Exit(2) from None


@dataclass
class Checks:
    """Claims and whether they hold. `finish` ends the program: 0 only if all of them do."""

    title: str
    subject: Subject
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = self.subject.model
        size = sum(p.numel() for p in model.parameters())
        name = "the embedded model" if self.subject.is_default else self.subject.path.name
        console.rule(f"[bold]{self.title}")
        console.print(
            f"{escape(name)}: {size / 1e6:.1f}M parameters, {model.dtype}, "
            f"H={model.config.hidden_size} C={model.config.causal_size} V={model.config.vocab_size}"
        )

    def section(self, title: str) -> None:
        console.print(f"\n[bold]{title}[/]")

    def check(
        self, claim: str, holds: bool | Tensor, measured: str = "", unless: str | None = None
    ) -> None:
        """`unless`: why this model may break the claim; ignored for the embedded model."""
        measured = f"  [dim]{escape(measured)}[/]" if measured else ""
        if unless is not None and not self.subject.is_default:
            self.skipped.append(claim)
            print_line("[yellow]–[/]", f"{escape(claim)}  [yellow]not asked: {escape(unless)}[/]")
        elif bool(holds):
            self.passed.append(claim)
            print_line("[green]✓[/]", escape(claim) + measured)
        else:
            self.failed.append(claim)
            print_line("[red]✗[/]", f"[red]{escape(claim)}[/]{measured}")

    def at_most(self, claim: str, value: float, limit: float, unless: str | None = None) -> None:
        """A NaN is never at most anything."""
        self.check(claim, value <= limit, f"{value:.3g} ≤ {limit:.3g}", unless)

    def finish(self) -> None:
        counts = f"{len(self.passed)} passed, {len(self.failed)} failed"
        counts += f", {len(self.skipped)} not asked" if self.skipped else ""
        is_good = bool(self.passed) and not self.failed
        console.print()
        console.rule(f"[bold {'green' if is_good else 'red'}]{counts}")
        for claim in self.failed:
            print_line("[red]✗[/]", f"[red]{escape(claim)}[/]")
        raise typer.Exit(0 if is_good else 1)


def print_line(mark: str, text: str) -> None:
    """Print a line whose continuation is indented like its start."""
    line = Table.grid(padding=(0, 1))
    line.add_row("", mark, text)
    console.print(line)


def show_table(*columns: str, rows: list[tuple[str, ...]], title: str | None = None) -> None:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
