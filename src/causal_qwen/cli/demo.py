"""Demo: what a causal language model is, shown on a real one while one watches."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import Qwen2ForCausalLM

from causal_qwen.analysis.counterfactual import Counterfactual, World, counterfactual
from causal_qwen.cli.chat import LIVELY
from causal_qwen.cli.doctor import cure
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.terminal import print_json, status

PROMPT = "The old lighthouse keeper opened the door and"
OTHER_PROMPT = "The young mayor opened the letter and"
CHANGED_PROMPT = "The young lighthouse keeper opened the door and"
PERSONA = {"causal_mode": "causal", **LIVELY["causal"]}
INDIVIDUALS = (1, 2, 3)
NEW_TOKENS = 28
CANDIDATES = 5

# Of the 150 irises that come with scikit-learn, so many to learn from and to calibrate on.
LEARNED, CALIBRATED = 75, 50
TARGET, LEVEL = "petal length", 0.9
SENTENCE = "An iris {species} has sepals of {sepal length} by {sepal width} cm and petals "
SENTENCE += "{petal width} cm wide"
QUESTION = "The length of its petals in cm is"


def run(processor: Processor, model: CausalModel, as_json: bool = False) -> None:
    """The promise, the modes, individuals, a counterfactual, one decision, and a number."""
    console = Console(quiet=as_json, highlight=False)
    record: dict[str, Any] = {}
    with status() as progress, torch.no_grad():
        progress("speaking")
        speaker = Speaker(processor, model)
        record["behaves_like_its_base"] = show_promise(speaker, console)
        record["modes"] = show_modes(speaker, console)
        record["individuals"] = show_individuals(speaker, console)
        record["counterfactual"] = show_counterfactual(speaker, console)
        record["decision"] = show_decision(processor, model, console)
    record["number"] = show_number(processor, model, console)
    if as_json:
        print_json(record)
        return
    console.print(Text("\nNext", style="bold"))
    for command, what in NEXT.items():
        console.print(Text.assemble("  ", (command, "cyan"), f"\n      {what}"))


NEXT = {
    "causal-qwen chat --individual 7": "talk with somebody",
    'causal-qwen counterfactual "The king" --prompt "The queen" -i 7 -t 0.3': "change a word",
    "causal-qwen app": "all of it in the browser",
    "causal-qwen fit table.csv --target price --output priced": "numbers from a table of yours",
    "causal-qwen doctor": "what is installed, what is missing",
}


class Speaker:
    """Continues prompts with a model, in one line each."""

    def __init__(self, processor: Processor, model: CausalModel) -> None:
        self.processor, self.model = processor, model

    def say(self, prompt: str, model: Any = None, **options: Any) -> str:
        inputs = self.processor.tokenizer(prompt, return_tensors="pt")
        out = (model or self.model).generate(**inputs, max_new_tokens=NEW_TOKENS, **options)
        new = out[0, inputs["input_ids"].shape[1] :]
        return one_line(self.processor.tokenizer.decode(new, skip_special_tokens=True))


def one_line(text: str) -> str:
    return " ".join(text.split())


def show_promise(speaker: Speaker, console: Console) -> bool | None:
    """Whether it says what its base says; None where the base is not in it any more."""
    config = speaker.model.config
    if config.causal_size != config.hidden_size:
        return None
    with quiet():  # a converted checkpoint is still its base model's
        base = Qwen2ForCausalLM.from_pretrained(speaker.model.name_or_path).eval()
    is_same = speaker.say(PROMPT, base, do_sample=False) == speaker.say(PROMPT)
    verdict = ("word for word the same", "bold green") if is_same else ("not the same", "bold red")
    words = Text.assemble("Before training, it speaks like the model it came from: ", verdict, ".")
    console.print(Panel(words, title="1 · The promise", title_align="left", box=box.ROUNDED))
    return is_same


def show_modes(speaker: Speaker, console: Console) -> dict[str, str]:
    said = {
        "standard": speaker.say(PROMPT),
        "sampling": speaker.say(PROMPT, causal_mode="sampling", individual=1),
        "causal": speaker.say(PROMPT, individual=1, **PERSONA),
        "compatible": speaker.say(PROMPT, causal_mode="compatible"),
    }
    table = _table(f"2 · Four modes: “{PROMPT} …”", "mode", "says")
    for mode, text in said.items():
        table.add_row(mode, Text(text))
    console.print(table)
    return said


def show_individuals(speaker: Speaker, console: Console) -> dict[str, list[str]]:
    prompts = (PROMPT, OTHER_PROMPT)
    table = _table("3 · Individuals: each is one e, for every word of every text", "who")
    for prompt in prompts:
        table.add_column(f"{prompt} …", ratio=1)
    said = {}
    for seed in INDIVIDUALS:
        texts = [speaker.say(prompt, individual=seed, **PERSONA) for prompt in prompts]
        said[str(seed)] = texts
        table.add_row(str(seed), *map(Text, texts))
    console.print(table)
    return said


def show_counterfactual(speaker: Speaker, console: Console) -> dict[str, Any]:
    """The same individual, one word changed; ‖ marks where the worlds part."""
    result = counterfactual(
        speaker.model,
        PROMPT,
        INDIVIDUALS[0],
        CHANGED_PROMPT,
        processor=speaker.processor,
        max_new_tokens=NEW_TOKENS,
        **LIVELY["causal"],
    )
    title = f"4 · Counterfactual: individual {INDIVIDUALS[0]}, had the keeper been young"
    table = _table(title, "world", "the same individual says")
    for name, world, colour in (
        ("as it was", result.factual, "red"),
        ("changed", result.counterfactual, "green"),
    ):
        table.add_row(name, _parted(result, world, colour))
    console.print(table)
    where = "never part"
    if (step := result.divergence) is not None:
        where = f"part at ‖, after {step} word pieces"
    note = f"   Same noise, another context: U moved at every step, and the worlds {where}."
    console.print(Text(note, style="dim"))
    return result.to_dict()


def _parted(result: Counterfactual, world: World, colour: str) -> Text:
    """Prompt, what both worlds say, and what only this one says."""
    step = len(world.tokens) if result.divergence is None else result.divergence
    same, other = ("".join(part) for part in (world.tokens[:step], world.tokens[step:]))
    words = Text.assemble((world.prompt, "dim"), same)
    if other:
        words.append("‖", "bold").append(other.replace("\n", " "), f"bold {colour}")
    return words


def show_decision(processor: Processor, model: CausalModel, console: Console) -> dict[str, Any]:
    """One decision: the best candidates' scores, and the chance that each passes its threshold."""
    tokenizer = processor.tokenizer
    output = model(**tokenizer(PROMPT, return_tensors="pt"), logits_to_keep=1)
    probability = model.decision(output.s_dist)[0, -1]
    loc, scale = output.loc_S[0, -1], output.scale_S[0, -1]
    table = _table(
        "5 · Inside one decision: S_k ~ Cauchy(loc, scale), wanted if S_k > C_k", "token"
    )
    table.show_lines = False
    for column in ("loc", "scale", "C", "P(S > C)"):
        table.add_column(column, justify="right")
    best = loc.topk(CANDIDATES).indices.tolist()
    for k in best:
        threshold = model.decision.threshold[k]
        figures = (f"{loc[k]:.2f}", f"{scale[k]:.2e}", f"{threshold:.2f}", f"{probability[k]:.2e}")
        table.add_row(repr(tokenizer.decode([k])), *figures)
    console.print(table)
    total = float(probability.sum())
    console.print(Text(f"   The sum of P over {len(loc):,} tokens is {total:.2f}.", style="dim"))
    return {
        "sum_p": total,
        "chosen": tokenizer.decode([int(probability.argmax())]),
        "candidates": {tokenizer.decode([k]): float(probability[k]) for k in best},
    }


def show_number(
    processor: Processor, model: CausalModel, console: Console
) -> dict[str, Any] | None:
    """Learn to tell a flower's petals from a sentence about it, and tell one that is new."""
    title = "6 · A number with its interval"
    missing = next((m for m in ("pandas", "sklearn") if find_spec(m) is None), None)
    if missing is not None:
        console.print(Text(f"\n{title}: {cure(missing)}"), soft_wrap=True)
        return None
    console.print(
        Text(f"\n{title}: learning from {LEARNED} irises, frozen backbone ...", style="bold")
    )
    import numpy as np

    from causal_qwen.regression.iris import iris_table
    from causal_qwen.regression.regressor import CausalTextRegressor, OpenModel

    flowers = iris_table()
    learn, rest = flowers[:LEARNED], flowers[LEARNED:]
    calibration, unseen = rest[:CALIBRATED], rest[CALIBRATED:]
    regressor = CausalTextRegressor(
        model=OpenModel(processor, model),
        template=SENTENCE,
        question=QUESTION,
        verbose=not console.quiet,
    )
    regressor.fit(learn, TARGET).calibrate(calibration, TARGET)
    median = regressor.predict(unseen)
    low, high = regressor.predict_interval(unseen, LEVEL)
    truth = unseen[TARGET].to_numpy()
    one = {
        "text": sentence(unseen),
        "median": float(median[0]),
        "low": float(low[0]),
        "high": float(high[0]),
        "level": LEVEL,
        "truth": float(truth[0]),
    }
    usual = float(np.median(learn[TARGET]))
    exam = {
        "rows": len(unseen),
        "mdae": float(np.median(np.abs(median - truth))),
        "mdae_of_the_median": float(np.median(np.abs(usual - truth))),
        "coverage": float(np.mean((low <= truth) & (truth <= high))),
    }
    _show_one(one, console)
    console.print(
        Text(
            f"   {exam['rows']} flowers it has not seen: median error {exam['mdae']:.2f} cm, where "
            f"always saying {usual:g} has {exam['mdae_of_the_median']:.2f}; "
            f"{exam['coverage']:.0%} of the {LEVEL:.0%} intervals hold the truth.",
            style="dim",
        )
    )
    return {
        "table": "iris",
        "rows": LEARNED,
        "calibration_rows": CALIBRATED,
        **one,
        "held_out": exam,
    }


def sentence(table: Any) -> str:
    """What the model reads of a table's first row."""
    from causal_qwen.regression.sentences import to_sentences, used_columns

    columns = used_columns(table, template=SENTENCE, without=[TARGET])
    return to_sentences(table[:1], columns, template=SENTENCE, question=QUESTION)[0]


def _show_one(one: dict[str, Any], console: Console) -> None:
    """A sentence, and on a line below it the interval, the median and the truth."""
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
    table.add_row("reads", Text(f"{one['text']} …"))
    words = Text.assemble((f"● {one['median']:.2f} cm", "bold green"))
    words.append(f", {one['level']:.0%} interval {low:.2f} to {high:.2f}")
    table.add_row("says", words)
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
