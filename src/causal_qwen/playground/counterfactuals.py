"""Counterfactuals: the fields of the tab -> one edit -> the same individual's two texts.

A word of the prompt, and a number that the model reads as digits, change the prompt. A generated
word, and a number that the model reads as a value, change the text itself; what follows is
generated again.
"""

from __future__ import annotations

from causal_qwen.analysis.counterfactual import (
    ChangedNumber,
    ChangedPrompt,
    ChangedToken,
    Counterfactual,
    Edit,
    World,
    counterfactual,
)
from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.options import check_choice
from causal_qwen.playground.text_edits import (
    MAX_WORD,
    check_length,
    check_prompt,
    parse_number,
)
from causal_qwen.text.edits import replace_number, replace_word

KINDS = ("a word", "a number", "the prompt")


def compare(
    model: CausalModel,
    processor: Processor,
    individual: Individual,
    prompt: str,
    kind: str,
    *,
    word: str | None = "",
    other_word: str | None = "",
    index: int | None = None,
    number: str | None = "",
    other_prompt: str | None = "",
    max_new_tokens: int,
) -> Counterfactual:
    """Both texts of one edit; `kind` selects the fields that describe it."""
    prompt = check_prompt(prompt, processor)

    def compare_with(edit: Edit) -> Counterfactual:
        return counterfactual(
            model, prompt, individual, edit, processor=processor, max_new_tokens=max_new_tokens
        )

    edit: Edit
    if check_choice("kind", kind, KINDS) == "the prompt":
        edit = ChangedPrompt(check_prompt(other_prompt, processor))
    elif kind == "a number":
        value = parse_number(number)
        index = index if isinstance(index, int) else 0
        changed = replace_number(prompt, index, value)
        is_value = processor.encode_numbers == "value"
        edit = ChangedNumber(index, value) if is_value else ChangedPrompt(changed)
    else:
        word = check_length("word", (word or "").strip(), MAX_WORD)
        other = check_length("replacement", (other_word or "").strip(), MAX_WORD)
        if not word or not other:
            raise ValueError("A word or its replacement is missing; fill in both.")
        text = replace_word(prompt, word, other)
        if text is not None:
            edit = ChangedPrompt(check_prompt(text, processor))
        else:
            edit = _replace_token(compare_with(ChangedPrompt(prompt)).factual, word, other)
    return compare_with(edit)


def _replace_token(generated: World, word: str, other: str) -> ChangedToken:
    step = next((i for i, token in enumerate(generated.tokens) if token.strip() == word), None)
    if step is None:
        raise ValueError(f"{word!r} is not a word of the prompt, nor one generated token.")
    return ChangedToken(generated.start + step, generated.tokens[step].replace(word, other))
