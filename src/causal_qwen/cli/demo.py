"""Demo: the promise, the modes, individuals, a counterfactual, and a number with its interval."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from rich import box
from rich.console import Console
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

# Rows of scikit-learn's 150 irises to fit and to calibrate on; the rest is held out.
FITTED, CALIBRATED = 75, 50
TARGET, LEVEL = "petal length", 0.9
SENTENCE = "An iris {species} has sepals of {sepal length} by {sepal width} cm and petals "
SENTENCE += "{petal width} cm wide"
QUESTION = "The length of its petals in cm is"

NEXT = """
Next
  causal-qwen chat --individual 7
  causal-qwen counterfactual "The king" --prompt "The queen" -i 7
  causal-qwen app
  causal-qwen fit table.csv --target price --output priced
  causal-qwen doctor"""


def run(processor: Processor, model: CausalModel, as_json: bool = False) -> None:
    """Every part is printed, and is a record for JSON."""
    console = Console(quiet=as_json, highlight=False)
    with status() as progress, torch.no_grad():
        progress("generating")
        record: dict[str, Any] = {
            "behaves_like_its_base": show_promise(processor, model, console),
            "modes": show_modes(processor, model, console),
            "individuals": show_individuals(processor, model, console),
            "counterfactual": show_counterfactual(processor, model, console),
        }
    record["number"] = show_number(processor, model, console)
    console.print(NEXT)
    if as_json:
        print_json(record)


def generate(processor: Processor, model: Any, prompt: str, **options: Any) -> str:
    """The new text in one line."""
    inputs = processor.tokenizer(prompt, return_tensors="pt").to(model.device)
    out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **options)
    new = out[0, inputs["input_ids"].shape[1] :]
    return " ".join(processor.tokenizer.decode(new, skip_special_tokens=True).split())


def show_promise(processor: Processor, model: CausalModel, console: Console) -> bool | None:
    """Whether the model generates its base model's text; None if C differs from H."""
    if model.config.causal_size != model.config.hidden_size:
        return None
    with quiet():  # a converted checkpoint contains its base model
        base = model.base_class.from_pretrained(model.name_or_path, dtype=model.dtype).eval()
        base.to(model.device)
    text = generate(processor, model, PROMPT, causal_mode="standard")
    is_same = generate(processor, base, PROMPT, do_sample=False) == text
    verdict = "word for word the same text" if is_same else "different texts"
    console.print(f"1 · The promise: before training, the model and its base generate {verdict}.")
    return is_same


def show_modes(processor: Processor, model: CausalModel, console: Console) -> dict[str, str]:
    table = _table(f"2 · Four modes: “{PROMPT} …”", "mode", "text")
    texts: dict[str, str] = {}
    for mode in MODES:
        who = {"individual": INDIVIDUALS[0]} if mode in NOISY_MODES else {}
        texts[mode] = generate(processor, model, PROMPT, causal_mode=mode, **who)
        table.add_row(mode, Text(texts[mode]))
    console.print(table)
    return texts


def show_individuals(
    processor: Processor, model: CausalModel, console: Console
) -> dict[str, list[str]]:
    prompts = (PROMPT, OTHER_PROMPT)
    heads = [f"{prompt} …" for prompt in prompts]
    table = _table("3 · Individuals: the same noise e in every text", "who", *heads)
    texts = {}
    for seed in INDIVIDUALS:
        who = {"causal_mode": "causal", "individual": seed}
        texts[str(seed)] = [generate(processor, model, prompt, **who) for prompt in prompts]
        table.add_row(str(seed), *map(Text, texts[str(seed)]))
    console.print(table)
    return texts


def show_counterfactual(
    processor: Processor, model: CausalModel, console: Console
) -> dict[str, Any]:
    """The same individual with one word changed; ‖ marks where the texts part."""
    who = INDIVIDUALS[0]
    result = counterfactual(
        model, PROMPT, who, CHANGED_PROMPT, processor=processor, max_new_tokens=NEW_TOKENS
    )
    title = f"4 · Counterfactual: individual {who}, had the astronaut been tired"
    table = _table(title, "", "text of the same individual")
    table.add_row("factual", _mark_divergence(result, result.factual, "red"))
    table.add_row("counterfactual", _mark_divergence(result, result.counterfactual, "green"))
    console.print(table)
    step = result.divergence
    where = "are the same" if step is None else f"part at ‖, after {counted(step, 'token')}"
    console.print(f"   Same noise, another context: U moved at every step, and the texts {where}.")
    return result.to_dict()


def _mark_divergence(result: Counterfactual, world: World, colour: str) -> Text:
    step = len(world.tokens) if result.divergence is None else result.divergence
    same, other = ("".join(part) for part in (world.tokens[:step], world.tokens[step:]))
    words = Text.assemble((world.prompt, "dim"), same)
    if other:
        words.append("‖", "bold").append(other.replace("\n", " "), f"bold {colour}")
    return words


def show_number(
    processor: Processor, model: CausalModel, console: Console
) -> dict[str, Any] | None:
    """Fit a regressor on sentences about irises, and predict held-out ones."""
    title = "\n5 · A number with its interval"
    missing = next((name for name in ("pandas", "sklearn") if find_spec(name) is None), None)
    if missing is not None:
        console.print(Text(f"{title}: {cure(missing)}"), soft_wrap=True)
        return None
    words = f"{title}: a regressor on the frozen backbone, fitted on {FITTED} irises"
    console.print(Text(words, style="bold"))
    import numpy as np

    from causal_qwen.regression.regressor import CausalTextRegressor, OpenModel
    from causal_qwen.tables.iris import iris_table

    flowers = iris_table()
    train, rest = flowers[:FITTED], flowers[FITTED:]
    calibration, test = rest[:CALIBRATED], rest[CALIBRATED:]
    regressor = CausalTextRegressor(
        model=OpenModel(processor, model),
        sources=["model"],
        template=SENTENCE,
        question=QUESTION,
        verbose=not console.quiet,
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
    console.print(
        f"   {one['text']} …\n"
        f"   median {one['median']:.2f} cm, {LEVEL:.0%} interval {one['low']:.2f} to "
        f"{one['high']:.2f}; truth {one['truth']:.2f} cm\n"
        f"   {len(test)} held-out flowers: median error {held_out['mdae']:.2f} cm (always "
        f"{constant:g}: {held_out['mdae_of_the_median']:.2f}); the intervals contain "
        f"{held_out['coverage']:.0%} of the values."
    )
    sizes = {"table": "iris", "rows": FITTED, "calibration_rows": CALIBRATED}
    return {**sizes, **one, "held_out": held_out}


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
