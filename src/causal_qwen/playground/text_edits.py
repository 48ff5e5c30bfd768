"""Text edits: check a visitor's prompts, numbers and edits, and the range of a dragged number.

Does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from causal_qwen.options import check_choice
from causal_qwen.text.edits import DIGITS, find_numbers, number_span, replace_number, replace_word
from causal_qwen.text.numerals import encode, render

if TYPE_CHECKING:
    from causal_qwen.modeling.protocols import Processor

MAX_CHARACTERS = 1000  # of a prompt
MAX_TOKENS = 200
MAX_PROMPTS = 5  # at once
MAX_WORD = 100  # characters of a word or a number to insert
MAX_MAGNITUDE = 1e300  # of a dragged number
KINDS = ("a word", "a number", "the prompt")  # that an edit replaces


class DragRange(NamedTuple):
    """The values that a dragged number can take."""

    low: float
    high: float
    step: float

    def at(self, share: float) -> float:
        """The value at a share of the range, 0 to 1, rounded to a step."""
        steps = round(share * (self.high - self.low) / self.step)
        return float(render(self.low + steps * self.step, DIGITS - 3))


def check_prompt(text: str | None, processor: Processor | None = None) -> str:
    """The prompt without surrounding spaces; an empty or too long one is refused.

    Without a processor, tokens are not counted.
    """
    text = (text or "").strip()
    if not text:
        raise ValueError("The text is empty; write a few words.")
    check_length("text", text, MAX_CHARACTERS)
    if processor is not None and (tokens := len(processor(text)["input_ids"])) > MAX_TOKENS:
        raise ValueError(f"The text has {tokens} tokens; the playground takes {MAX_TOKENS}.")
    return text


def check_length(name: str, text: str, most: int) -> str:
    """Refuse a long text before any work is done on it."""
    if len(text) > most:
        raise ValueError(f"The {name} has {len(text):,} characters; the playground takes {most:,}.")
    return text


def check_prompts(lines: str | None, processor: Processor | None = None) -> list[str]:
    """One prompt per line."""
    check_length("text", lines or "", MAX_PROMPTS * MAX_CHARACTERS)
    prompts = [line for line in (lines or "").splitlines() if line.strip()]
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"There are {len(prompts)} prompts; write 1 to {MAX_PROMPTS}, one a line.")
    return [check_prompt(prompt, processor) for prompt in prompts]


def parse_number(text: str | None) -> float:
    """The value of a field that holds one number and nothing else."""
    text = check_length("number", (text or "").strip(), MAX_WORD)
    found = find_numbers(text)
    if len(found) != 1 or found[0][0] != text:
        raise ValueError(f"{text!r} is not a number; write one such as 12 or -0.5.")
    return found[0][1]


class GeneratedTokens(NamedTuple):
    """The tokens that an individual generates after a prompt of `start` tokens."""

    start: int
    tokens: Sequence[str]


def choose_edit(
    prompt: str,
    kind: str,
    *,
    check: Callable[[str | None], str],
    generate: Callable[[], GeneratedTokens],
    word: str | None = "",
    other_word: str | None = "",
    index: int | None = None,
    number: str | None = "",
    other_prompt: str | None = "",
) -> dict[str, Any]:
    """The fields of the tab -> one edit, as `/v1/counterfactuals` takes it.

    `check` refuses long prompts; `generate` is asked only for a word that is not in the prompt.
    """
    if check_choice("kind", kind, KINDS) == "the prompt":
        return {"prompt": check(other_prompt)}
    if kind == "a number":
        value = parse_number(number)
        index = index if isinstance(index, int) else 0
        replace_number(prompt, index, value)  # refuses a number that is not there
        return {"number": index, "by": value}
    word = check_length("word", (word or "").strip(), MAX_WORD)
    other = check_length("replacement", (other_word or "").strip(), MAX_WORD)
    if not word or not other:
        raise ValueError("A word or its replacement is missing; fill in both.")
    text = replace_word(prompt, word, other)
    if text is not None:
        return {"prompt": check(text)}
    start, tokens = generate()
    step = next((i for i, token in enumerate(tokens) if token.strip() == word), None)
    if step is None:
        raise ValueError(f"{word!r} is not a word of the prompt, nor one generated token.")
    return {"token": start + step, "by": tokens[step].replace(word, other)}


def check_drag(fields: Any) -> tuple[int, float, DragRange]:
    """What the browser reports of a drag: the number's index, its value, and its range."""
    is_valid = isinstance(fields, list) and len(fields) == 5 and all(map(_is_finite, fields))
    if is_valid and isinstance(fields[0], int):
        index, value, low, high, step = fields
        if low < high and step > 0 and math.isfinite((high - low) / step):
            return index, float(value), DragRange(low, high, step)
    raise ValueError("The dragged number is unknown; press Predict, and drag it again.")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= MAX_MAGNITUDE


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
