"""Fields: what a visitor writes -> prompts, individuals, edits and ranges. No torch, no Gradio."""

from __future__ import annotations

import itertools
import re
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from causal_qwen.individuals.individual import Individual
from causal_qwen.tables.cells import is_missing, read_cell
from causal_qwen.text.edits import DIGITS, find_numbers, number_span, replace_number, replace_word
from causal_qwen.text.numerals import encode, render

MAX_CHARACTERS = 1000  # of a text
MAX_PROMPTS = 5  # at once
MAX_INDIVIDUALS = 12  # of one visitor
MAX_NAME = 24  # characters
MAX_SEED = 18  # digits
MAX_MAGNITUDE = 1e300  # of a dragged number
SUFFIX = ".safetensors"
KINDS = ("a word", "a number", "the prompt")  # that an edit replaces
COMPATIBLE_TEMPERATURE = 0.7  # varied and still fluent
MODE_NOTES = {
    "standard": "the most probable token, no noise",
    "sampling": "new noise in U at every token",
    "causal": "individual {seed}: noise in U of its own, the same in every text",
    "compatible": "softmax sampling, as in plain Qwen2",
}


def read_text(text: str | None, name: str = "text") -> str:
    """Without surrounding spaces; an empty or too long one is refused."""
    text = (text or "").strip()
    if not text:
        raise ValueError(f"The {name} is empty; write a few words.")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"The {name} has {len(text):,} characters; the playground takes {MAX_CHARACTERS:,}."
        )
    return text


def read_prompts(lines: str | None) -> list[str]:
    """One prompt per line."""
    prompts = [line for line in (lines or "").splitlines() if line.strip()]
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"There are {len(prompts)} prompts; write 1 to {MAX_PROMPTS}, one a line.")
    return [read_text(prompt) for prompt in prompts]


def four_modes(
    sampling: float, causal: float, compatible: float, persistence: float, seed: int
) -> dict[str, dict[str, Any]]:
    """Every mode with its own temperature, as fields of a request; 0 is greedy `compatible`."""
    found: dict[str, dict[str, Any]] = {
        "standard": {"seed": seed},
        "sampling": {"temperature": sampling, "individual": seed},
        "causal": {"temperature": causal, "individual": seed, "persistence": persistence},
        "compatible": {"seed": seed, "do_sample": compatible > 0},
    }
    if compatible:
        found["compatible"]["temperature"] = compatible
    return {name: {"causal_mode": name, **options} for name, options in found.items()}


# ---------------------------------------------------------------- individuals
# Every function returns a new list, so visitors never share one.


def read_seed(text: str | None) -> int:
    """A random one if the field is empty."""
    if not (text := (text or "").strip()):
        return secrets.randbelow(10**6)
    if not text.isdecimal() or len(text) > MAX_SEED:
        raise ValueError(
            f"The seed {text[:MAX_SEED]!r} is not a whole number of up to {MAX_SEED} digits; "
            "leave it empty for a random one."
        )
    return int(text)


def add(them: Sequence[Individual], new: Individual) -> list[Individual]:
    """The list with one more, whose name is short and not taken."""
    name = " ".join((new.name or f"No. {new.seed}").split())
    if not 0 < len(name) <= MAX_NAME:
        shown = name[:MAX_NAME]
        raise ValueError(f"The name {shown!r} has {len(name)} characters; use 1 to {MAX_NAME}.")
    if name in names(them):
        raise ValueError(f"The name {name} is taken; choose another one.")
    if len(them) >= MAX_INDIVIDUALS:
        raise ValueError(
            f"There are {MAX_INDIVIDUALS} individuals already; reload the page to start over."
        )
    return [*them, replace(new, name=name)]


def load(them: Sequence[Individual], path: str, size: int) -> list[Individual]:
    """The list with one more, from a file of `Individual.save`."""
    file = Path(path).name
    try:
        loaded = Individual.load(path)
    except ValueError as error:
        raise ValueError(f"{file} is not a saved individual.") from error
    if loaded.size != size:
        raise ValueError(
            f"{file} has {loaded.size} coordinates and this model's individuals have {size}: it "
            "belongs to another model."
        )
    name = loaded.name or Path(path).stem
    numbered = (f"{name} {number}" for number in itertools.count(2))
    free = (one for one in itertools.chain([name], numbered) if one not in names(them))
    return add(them, replace(loaded, name=next(free)))


def save(individual: Individual, directory: Path) -> str:
    """-> a file named after the individual, in a new directory below `directory`"""
    name = re.sub(r"[^\w-]+", "-", individual.name or "individual") + SUFFIX
    path = Path(tempfile.mkdtemp(dir=directory)) / name
    individual.save(path)
    return str(path)


def names(them: Sequence[Individual]) -> list[str]:
    return [str(individual.name) for individual in them]


def find(them: Sequence[Individual], name: str | None) -> Individual:
    found = next((one for one in them if one.name == name), None)
    if found is None:
        raise ValueError("No individual is selected; select one of yours.")
    return found


# ---------------------------------------------------------------- edits


def read_number(text: str | None) -> float:
    """The value of a field that holds one number and nothing else."""
    found = find_numbers(text := read_text(text, "number"))
    if len(found) != 1 or found[0][0] != text:
        raise ValueError(f"{text!r} is not a number; write one such as 12 or -0.5.")
    return found[0][1]


def read_edit(
    prompt: str, kind: str, fields: dict[str, Any], generate: Callable[[], tuple[int, list[str]]]
) -> dict[str, Any]:
    """The fields of the tab -> one edit, as `/v1/counterfactuals` takes it.

    `generate` returns the length of the prompt and the tokens of the text after it; it is called
    only for a word that is not in the prompt.
    """
    if kind == "the prompt":
        return {"prompt": read_text(fields["other_prompt"])}
    if kind == "a number":
        value, index = read_number(fields["number"]), fields["index"] or 0
        replace_number(prompt, index, value)  # refuses a number that is not there
        return {"number": index, "by": value}
    word, other = (read_text(fields[name], "word") for name in ("word", "other_word"))
    if (text := replace_word(prompt, word, other)) is not None:
        return {"prompt": text}
    start, tokens = generate()
    step = next((i for i, token in enumerate(tokens) if token.strip() == word), None)
    if step is None:
        raise ValueError(f"{word!r} is not a word of the prompt, nor one generated token.")
    return {"token": start + step, "by": tokens[step].replace(word, other)}


def read_row(text: str) -> dict[str, Any] | None:
    """Lines such as "carat = 0.9" as a row of a table; None for any other text."""
    pairs = [line.partition("=") for line in text.splitlines() if line.strip()]
    if not pairs or not all(name.strip() and sign for name, sign, _ in pairs):
        return None
    cells = {name.strip(): value.strip() for name, _, value in pairs}
    return {name: None if is_missing(cell) else read_cell(cell) for name, cell in cells.items()}


class DragRange(NamedTuple):
    """The values that a dragged number can take."""

    low: float
    high: float
    step: float

    def at(self, share: float) -> float:
        """The value at a share of the range, 0 to 1, rounded to a step."""
        steps = round(share * (self.high - self.low) / self.step)
        return float(render(self.low + steps * self.step, DIGITS - 3))


def drag_range(text: str, index: int) -> DragRange:
    """0 to twice the number, in steps of its last written decimal; -10 to 10 for 0."""
    start, end = number_span(text, index)
    value = encode(text).values[index]
    decimals = len(re.sub(r"[^\d].*", "", text[start:end].partition(".")[2]))
    far = max(min(2 * value, MAX_MAGNITUDE), -MAX_MAGNITUDE)
    low, high = (-10.0, 10.0) if value == 0 else sorted((0.0, far))
    written, fine = 10.0**-decimals, float(render((high - low) / 1000, 1))
    is_small = written > (high - low) / 2  # written with an exponent
    return DragRange(low, high, (fine or high - low) if is_small else max(written, fine))
