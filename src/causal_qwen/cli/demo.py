"""Demo: the promise, the modes, individuals, a counterfactual, one decision, and a number."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from causal_qwen.analysis.counterfactual import Counterfactual, World, counterfactual
from causal_qwen.cli.doctor import cure
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.options import MODES, NOISY_MODES
from causal_qwen.terminal import counted, print_json, status

# None of these is a calibration prompt.
PROMPT = "The proud astronaut closed the hatch and"
CHANGED_PROMPT = "The tired astronaut closed the hatch and"
OTHER_PROMPT = "The young cook tasted the sauce and"
INDIVIDUALS = (1, 2, 3)
NEW_TOKENS = 28
CANDIDATES = 5

# Rows of scikit-learn's 150 irises to fit and to calibrate on; the rest is held out.
FITTED, CALIBRATED = 75, 50
TARGET, LEVEL = "petal length", 0.9
SENTENCE = "An iris {species} has sepals of {sepal length} by {sepal width} cm and petals "
SENTENCE += "{petal width} cm wide"
QUESTION = "The length of its petals in cm is"

NEXT = {
    "causal-qwen chat --individual 7": "chat with an individual",
    'causal-qwen counterfactual "The king" --prompt "The queen" -i 7': "change a word",
    "causal-qwen app": "the same in the browser",
    "causal-qwen fit table.csv --target price --output priced": "predict numbers from a table",
    "causal-qwen doctor": "check the installation",
}


def run(processor: Processor, model: CausalModel, as_json: bool = False) -> None:
    console = Console(quiet=as_json, highlight=False)
    demo = Demo(processor, model, console)
    with status() as progress, torch.no_grad():
        progress("generating")
        record: dict[str, Any] = {
            "behaves_like_its_base": demo.show_promise(),
            "modes": demo.show_modes(),
            "individuals": demo.show_individuals(),
            "counterfactual": demo.show_counterfactual(),
            "decision": demo.show_decision(),
        }
    record["number"] = demo.show_number()
    if as_json:
        print_json(record)
        return
    console.print(Text("\nNext", style="bold"))
    for command, effect in NEXT.items():
        console.print(Text.assemble("  ", (command, "cyan"), f"\n      {effect}"))


@dataclass(frozen=True)
class Demo:
    """The parts of the demo. Each prints itself and returns its record."""

    processor: Processor
    model: CausalModel
    console: Console

    def generate(self, prompt: str, model: Any = None, **options: Any) -> str:
        """The new text in one line."""
        inputs = self.processor.tokenizer(prompt, return_tensors="pt").to(self.model.device)
        out = (model or self.model).generate(**inputs, max_new_tokens=NEW_TOKENS, **options)
        new = out[0, inputs["input_ids"].shape[1] :]
        return " ".join(self.processor.tokenizer.decode(new, skip_special_tokens=True).split())

    def show_promise(self) -> bool | None:
        """Whether the model generates its base model's text; None if C differs from H."""
        if self.model.config.causal_size != self.model.config.hidden_size:
            return None
        with quiet():  # a converted checkpoint contains its base model
            base = self.model.base_class.from_pretrained(
                self.model.name_or_path, dtype=self.model.dtype
            ).eval()
            base.to(self.model.device)
        text = self.generate(PROMPT, causal_mode="standard")
        is_same = self.generate(PROMPT, base, do_sample=False) == text
        same, other = ("word for word the same text", "bold green"), ("different texts", "bold red")
        verdict = same if is_same else other
        words = Text.assemble("Before training, the model and its base generate ", verdict, ".")
        self.console.print(Panel(words, title="1 · The promise", title_align="left"))
        return is_same

    def show_modes(self) -> dict[str, str]:
        table = _table(f"2 · Four modes: “{PROMPT} …”", "mode", "text")
        texts: dict[str, str] = {}
        for mode in MODES:
            who = {"individual": INDIVIDUALS[0]} if mode in NOISY_MODES else {}
            texts[mode] = self.generate(PROMPT, causal_mode=mode, **who)
            table.add_row(mode, Text(texts[mode]))
        self.console.print(table)
        return texts

    def show_individuals(self) -> dict[str, list[str]]:
        prompts = (PROMPT, OTHER_PROMPT)
        table = _table("3 · Individuals: the same noise e in every text", "who")
        for prompt in prompts:
            table.add_column(f"{prompt} …", ratio=1)
        texts = {}
        for seed in INDIVIDUALS:
            who = {"causal_mode": "causal", "individual": seed}
            texts[str(seed)] = [self.generate(prompt, **who) for prompt in prompts]
            table.add_row(str(seed), *map(Text, texts[str(seed)]))
        self.console.print(table)
        return texts

    def show_counterfactual(self) -> dict[str, Any]:
        """The same individual with one word changed; ‖ marks where the texts part."""
        who = INDIVIDUALS[0]
        options: dict[str, Any] = {"processor": self.processor, "max_new_tokens": NEW_TOKENS}
        result = counterfactual(self.model, PROMPT, who, CHANGED_PROMPT, **options)
        title = f"4 · Counterfactual: individual {who}, had the astronaut been tired"
        table = _table(title, "", "text of the same individual")
        table.add_row("factual", _mark_divergence(result, result.factual, "red"))
        table.add_row("counterfactual", _mark_divergence(result, result.counterfactual, "green"))
        self.console.print(table)
        step = result.divergence
        where = "are the same" if step is None else f"part at ‖, after {counted(step, 'token')}"
        note = f"   Same noise, another context: U moved at every step, and the texts {where}."
        self.console.print(Text(note, style="dim"))
        return result.to_dict()

    def show_decision(self) -> dict[str, Any]:
        """The best candidates of one token: softmax, P_k = P(S_k > C_k + h), and their scores."""
        tokenizer = self.processor.tokenizer
        inputs = tokenizer(PROMPT, return_tensors="pt").to(self.model.device)
        output = self.model(**inputs, logits_to_keep=1)
        probability = self.model.decision(output.s_dist)[0, -1]
        loc, scale = output.loc_S[0, -1], output.scale_S[0, -1]
        softmax, level = loc.softmax(-1), self.model.decision.level(loc)
        table = _table("5 · One decision: S ~ Cauchy(loc, scale), P = P(S > threshold)", "token")
        table.show_lines = False
        for column in ("softmax", "P", "loc", "scale", "threshold"):
            table.add_column(column, justify="right")
        best = loc.topk(CANDIDATES).indices.tolist()
        for k in best:
            figures = (
                f"{softmax[k]:.1%}",
                f"{probability[k]:.2g}",
                f"{loc[k]:.2f}",
                f"{scale[k]:.2e}",
                f"{level[k]:.2f}",
            )
            table.add_row(repr(tokenizer.decode([k])), *figures)
        self.console.print(table)
        total = float(probability.sum())
        self.console.print(
            Text(f"   The sum of P over {len(loc):,} tokens is {total:.2f}.", style="dim")
        )
        return {
            "sum_p": total,
            "chosen": tokenizer.decode([int(probability.argmax())]),
            "softmax": {tokenizer.decode([k]): float(softmax[k]) for k in best},
            "candidates": {tokenizer.decode([k]): float(probability[k]) for k in best},
        }

    def show_number(self) -> dict[str, Any] | None:
        """Fit a regressor on sentences about irises, and predict held-out ones."""
        title = "6 · A number with its interval"
        missing = next((name for name in ("pandas", "sklearn") if find_spec(name) is None), None)
        if missing is not None:
            self.console.print(Text(f"\n{title}: {cure(missing)}"), soft_wrap=True)
            return None
        words = f"\n{title}: a regressor on the frozen backbone, fitted on {FITTED} irises"
        self.console.print(Text(words, style="bold"))
        import numpy as np

        from causal_qwen.regression.regressor import CausalTextRegressor, OpenModel
        from causal_qwen.tables.iris import iris_table

        flowers = iris_table()
        train, rest = flowers[:FITTED], flowers[FITTED:]
        calibration, test = rest[:CALIBRATED], rest[CALIBRATED:]
        regressor = CausalTextRegressor(
            model=OpenModel(self.processor, self.model),
            sources=["model"],
            template=SENTENCE,
            question=QUESTION,
            verbose=not self.console.quiet,
        )
        regressor.fit(train, TARGET).calibrate(calibration, TARGET)
        median, truth = regressor.predict(test), test[TARGET].to_numpy()
        low, high = regressor.predict_interval(test, LEVEL)
        one = {
            "text": regressor.sentences(test[:1])[0],
            "median": float(median[0]),
            "low": float(low[0]),
            "high": float(high[0]),
            "level": LEVEL,
            "truth": float(truth[0]),
        }
        constant = float(np.median(train[TARGET]))
        held_out = {
            "rows": len(test),
            "mdae": float(np.median(np.abs(median - truth))),
            "mdae_of_the_median": float(np.median(np.abs(constant - truth))),
            "coverage": float(np.mean((low <= truth) & (truth <= high))),
        }
        _show_prediction(one, self.console)
        note = (
            f"   {len(test)} held-out flowers: median error {held_out['mdae']:.2f} cm (always "
            f"{constant:g}: {held_out['mdae_of_the_median']:.2f}); the {LEVEL:.0%} intervals "
            f"contain {held_out['coverage']:.0%} of the values."
        )
        self.console.print(Text(note, style="dim"))
        sizes = {"table": "iris", "rows": FITTED, "calibration_rows": CALIBRATED}
        return {**sizes, **one, "held_out": held_out}


def _mark_divergence(result: Counterfactual, world: World, colour: str) -> Text:
    step = len(world.tokens) if result.divergence is None else result.divergence
    same, other = ("".join(part) for part in (world.tokens[:step], world.tokens[step:]))
    words = Text.assemble((world.prompt, "dim"), same)
    if other:
        words.append("‖", "bold").append(other.replace("\n", " "), f"bold {colour}")
    return words


def _show_prediction(one: dict[str, Any], console: Console) -> None:
    """A sentence, its prediction, and both with the truth on a line."""
    width = max(min(console.width, 100) - 28, 20)
    low, high = one["low"], one["high"]
    ends = sorted((low, high, one["truth"]))
    margin = 0.15 * (ends[-1] - ends[0])
    first, last = ends[0] - margin, ends[-1] + margin

    def place(value: float) -> int:
        return round((value - first) / (last - first) * (width - 1))

    line = ["─" if place(low) <= column <= place(high) else " " for column in range(width)]
    line[place(low)], line[place(high)] = "├", "┤"
    line[place(one["truth"])] = "◆"
    line[place(one["median"])] = "●"
    table = _table("", "", "")
    table.show_header, table.show_lines, table.title = False, False, None
    table.add_row("text", Text(f"{one['text']} …"))
    words = Text.assemble((f"● {one['median']:.2f} cm", "bold green"))
    words.append(f", {one['level']:.0%} interval {low:.2f} to {high:.2f}")
    table.add_row("median", words)
    table.add_row("truth", Text(f"◆ {one['truth']:.2f} cm", "bold"))
    table.add_row("", Text("".join(line), "cyan", no_wrap=True))
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=box.ROUNDED,
        expand=True,
        show_lines=True,
    )
    for place, column in enumerate(columns):
        table.add_column(column, style="bold" if place == 0 else "", ratio=None if not place else 1)
    return table
