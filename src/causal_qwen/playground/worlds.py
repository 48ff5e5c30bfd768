"""Worlds: what an individual says, and what the same one says after an edit.

An edit is another prompt, another word or another number. A word of the prompt, and a number that
the model reads as digits, change the prompt; a word that was *said*, and a number that the model
reads as a value, change the text itself, and what follows is said anew.
"""

from __future__ import annotations

from causal_qwen.analysis.counterfactual import (
    ChangedNumber,
    ChangedPrompt,
    ChangedToken,
    Counterfactual,
    Edit,
    counterfactual,
)
from causal_qwen.analysis.token_sequence import TokenSequence, read_tokens, show_tokens
from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.playground.limits import check_prompt
from causal_qwen.playground.voices import one_speaker
from causal_qwen.playground.wording import change_number, change_word, number_in

KINDS = ("a word", "a number", "the prompt")


def imagine(
    model: CausalModel,
    processor: Processor,
    individual: Individual,
    prompt: str,
    kind: str,
    *,
    word: str = "",
    other_word: str = "",
    place: int = 0,
    number: str = "",
    other_prompt: str = "",
    max_new_tokens: int,
) -> Counterfactual:
    """Both worlds of one edit; `kind` says which of the fields tells it."""
    prompt = check_prompt(prompt, processor)
    edit: Edit
    if kind == "the prompt":
        edit = ChangedPrompt(check_prompt(other_prompt, processor))
    elif kind == "a number":
        value = number_in(number)
        changed = change_number(prompt, place, value)
        is_value = processor.encode_numbers == "value"
        edit = ChangedNumber(place, value) if is_value else ChangedPrompt(changed)
    elif kind == "a word":
        edit = _change_word(
            model, processor, individual, prompt, word.strip(), other_word.strip(), max_new_tokens
        )
    else:
        raise ValueError(f"{kind!r} is no edit; choose {', '.join(KINDS)}.")
    return counterfactual(
        model, prompt, individual, edit, processor=processor, max_new_tokens=max_new_tokens
    )


def _change_word(
    model: CausalModel,
    processor: Processor,
    individual: Individual,
    prompt: str,
    word: str,
    other: str,
    max_new_tokens: int,
) -> Edit:
    """In the prompt if it is there, else among the tokens that the individual says."""
    if not word or not other:
        raise ValueError("A changed word needs both: the word, and the one in its place.")
    if (changed := change_word(prompt, word, other)) is not None:
        return ChangedPrompt(check_prompt(changed, processor))
    begun = read_tokens(model, prompt, processor)
    result = model.generate(
        **begun.batch(model),
        **one_speaker(individual),
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
    )
    start = len(begun.ids)
    said = TokenSequence(result.sequences[0, start:].cpu(), result.numeric_values[0, start:].cpu())
    tokens = show_tokens(model, said, processor)
    step = next((i for i, token in enumerate(tokens) if token.strip() == word), None)
    if step is None:
        raise ValueError(
            f"{word!r} is neither a word of the text nor one token of what {individual.name} says."
        )
    return ChangedToken(start + step, tokens[step].replace(word, other))
