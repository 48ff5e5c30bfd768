"""Counterfactuals: the fields of the tab -> one edit -> the same individual's two texts.

A word of the prompt, and a number that the model reads as digits, change the prompt. A generated
word, and a number that the model reads as a value, change the text itself; what follows is
generated again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from causal_qwen.analysis.counterfactual import (
    ChangedNumber,
    ChangedPrompt,
    ChangedToken,
    Counterfactual,
    Edit,
    counterfactual,
)
from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.playground.text_edits import GeneratedTokens, check_prompt, choose_edit
from causal_qwen.text.edits import replace_number


def compare(
    model: CausalModel,
    processor: Processor,
    individual: Individual,
    prompt: str,
    kind: str,
    *,
    max_new_tokens: int,
    **fields: Any,
) -> Counterfactual:
    """Both texts of one edit; `kind` selects the fields that describe it."""
    prompt = check_prompt(prompt, processor)

    def compare_with(edit: Edit) -> Counterfactual:
        return counterfactual(
            model, prompt, individual, edit, processor=processor, max_new_tokens=max_new_tokens
        )

    def generate() -> GeneratedTokens:
        factual = compare_with(ChangedPrompt(prompt)).factual
        return GeneratedTokens(factual.start, factual.tokens)

    check = partial(check_prompt, processor=processor)
    edit = choose_edit(prompt, kind, check=check, generate=generate, **fields)
    is_value = processor.encode_numbers == "value"
    return compare_with(_as_edit(edit, prompt, is_value))


def _as_edit(edit: dict[str, Any], prompt: str, is_value: bool) -> Edit:
    if "prompt" in edit:
        return ChangedPrompt(edit["prompt"])
    if "token" in edit:
        return ChangedToken(edit["token"], edit["by"])
    if is_value:
        return ChangedNumber(edit["number"], edit["by"])
    return ChangedPrompt(replace_number(prompt, edit["number"], edit["by"]))
