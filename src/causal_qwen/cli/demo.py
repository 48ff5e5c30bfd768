"""Demo: the promise, the modes, individuals, a counterfactual, and a number with its interval."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from causal_qwen.analysis.rendering import split_text
from causal_qwen.cli.doctor import cure
from causal_qwen.options import MODES, NOISY_MODES
from causal_qwen.session import Session
from causal_qwen.terminal import counted, status

# None of these is a calibration prompt.
PROMPT = "The proud astronaut closed the hatch and"
CHANGED_PROMPT = "The tired astronaut closed the hatch and"
OTHER_PROMPT = "The young cook tasted the sauce and"
INDIVIDUALS = (1, 2, 3)
NEW_TOKENS = 28
WORDS = 4  # of the next ones that individuals choose

FITTED = 125  # of scikit-learn's 150 irises; the rest is held out
TARGET, LEVEL = "petal length", 0.9
SENTENCE = "An iris {species} has sepals of {sepal length} by {sepal width} cm and petals "
SENTENCE += "{petal width} cm wide. The length of its petals in cm is"

NEXT = """
Next
  causal-qwen chat --individual 7
  causal-qwen ask "Do you prefer coffee or tea?" coffee tea
  causal-qwen counterfactual "The king" --prompt "The queen" -i 7
  causal-qwen app
  causal-qwen fit table.csv --target price --output priced
  causal-qwen doctor"""


def run(session: Session) -> None:
    console = Console(highlight=False)
    parts = [show_promise, show_modes, show_individuals, show_counterfactual, show_number]
    if session.engine.kind != "torch":  # a regressor reads hidden states
        parts.pop()
    for show in parts:
        with status() as progress:
            progress("generating")
            shown = show(session)
        console.print(*shown, sep="\n")
    console.print(NEXT)


def one_line(session: Session, prompt: str, **options: Any) -> Text:
    """The new text."""
    found = session.generate(prompt, max_new_tokens=NEW_TOKENS, **options)
    return Text(" ".join(found.text.split()))


def show_promise(session: Session) -> Iterator[Any]:
    """Whether `standard` writes the greedy text of the scores: before training, the base's."""
    texts = {
        one_line(session, PROMPT, mode="standard").plain,
        one_line(session, PROMPT, mode="compatible", do_sample=False).plain,
    }
    verdict = "word for word the same text" if len(texts) == 1 else "different texts"
    yield f"1 · The promise: the base model and standard write {verdict}."


def show_modes(session: Session) -> Iterator[Any]:
    table = _table(f"2 · Four modes: “{PROMPT} …”", "mode", "text")
    for mode in MODES:
        who = INDIVIDUALS[0] if mode in NOISY_MODES else None
        table.add_row(mode, one_line(session, PROMPT, mode=mode, individual=who))
    yield table


def show_individuals(session: Session) -> Iterator[Any]:
    prompts = (PROMPT, OTHER_PROMPT)
    heads = [f"{prompt} …" for prompt in prompts]
    table = _table("3 · Individuals: the same noise e in every text", "who", *heads)
    for who in INDIVIDUALS:
        table.add_row(str(who), *(one_line(session, one, individual=who) for one in prompts))
    yield table
    shares = session.shares(PROMPT).tokens[:WORDS]
    words = ", ".join(f"{one.token.strip()} {one.share:.0%}" for one in shares)
    yield f"   The next word of a thousand individuals: {words} ..."


def show_counterfactual(session: Session) -> Iterator[Any]:
    """The same individual with one word changed; ‖ marks where the texts part."""
    who = INDIVIDUALS[0]
    result = session.counterfactual(PROMPT, CHANGED_PROMPT, who, max_new_tokens=NEW_TOKENS)
    title = f"4 · Counterfactual: individual {who}, had the astronaut been tired"
    if session.engine.kind != "torch":  # two texts, without the distributions behind them
        yield f"\n{title}\n{result}"
        return
    table = _table(title, "", "text of the same individual")
    for name, colour in {"factual": "red", "counterfactual": "green"}.items():
        prompt, same, other = split_text(result, getattr(result, name))
        words = Text.assemble((prompt, "dim"), same, ("‖" if other else "", "bold"))
        table.add_row(name, words.append(other.replace("\n", " "), f"bold {colour}"))
    yield table
    step = result.divergence
    where = "are the same" if step is None else f"part at ‖, after {counted(step, 'token')}"
    yield f"   Same noise, another context: U moved at every step, and the texts {where}."


def show_number(session: Session) -> Iterator[Any]:
    """Fit a regressor on sentences about irises, and predict held-out ones."""
    title = "\n5 · A number with its interval"
    missing = next((name for name in ("pandas", "sklearn") if find_spec(name) is None), None)
    if missing is not None:
        yield Text(f"{title}: {cure(missing)}")
        return
    import numpy as np

    from causal_qwen.regression.regressor import CausalTextRegressor, OpenModel
    from causal_qwen.tables.iris import iris_table

    flowers = iris_table()
    texts = [SENTENCE.format(**row) for row in flowers.to_dict("records")]
    lengths, test = flowers[TARGET].to_numpy(), texts[FITTED:]
    opened = OpenModel(session.processor, session.model)
    regressor = CausalTextRegressor(model=opened, sources=["model"], verbose=False)
    regressor.fit(texts[:FITTED], lengths[:FITTED])
    median, truth = regressor.predict(test), lengths[FITTED:]
    low, high = regressor.predict_interval(test, LEVEL)
    errors = np.abs(median - truth), np.abs(np.median(lengths[:FITTED]) - truth)
    mine, constant = map(np.median, errors)
    yield f"{title}: a regressor on the frozen backbone, fitted on {FITTED} irises"
    yield f"   {test[0]} …"
    yield (
        f"   median {median[0]:.2f} cm, {LEVEL:.0%} interval {low[0]:.2f} to {high[0]:.2f}; "
        f"truth {truth[0]:.2f} cm"
    )
    covered = np.mean((low <= truth) & (truth <= high))
    yield (
        f"   {len(test)} held-out flowers: median error {mine:.2f} cm (always the median: "
        f"{constant:.2f}); the intervals contain {covered:.0%} of them."
    )


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
        style, ratio = ("", 1) if place else ("bold", None)
        table.add_column(column, style=style, ratio=ratio, overflow="fold")
    return table
