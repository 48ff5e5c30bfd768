"""TokenSequence: the ids and values of one text, and the model output before each token.

Counterfactuals and posteriors accept a string, ids, or what a processor returns;
`read_tokens` turns each into a `TokenSequence`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from causal_qwen.analysis.shares import People
from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.decoding.step import Cuts, candidate_tokens, choose_for_many
from causal_qwen.generation.logits import ModelLaw, to_tensors
from causal_qwen.modeling.abduction import whole
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.text.numerals import render
from causal_qwen.text.segmentation import INCOMPLETE


class TokenSequence(NamedTuple):
    """Ids (T,) and values (T,), 0 for tokens that are not numbers."""

    ids: Tensor
    values: Tensor

    def batch(self, model: CausalModel) -> dict[str, Tensor]:
        """The sequence as the only row of a batch for `model.generate`."""
        ids = self.ids[None].to(model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if model.config.num_token_id is not None:
            inputs["numeric_values"] = self.values[None].to(model.device)
        return inputs

    def cut(self, length: int) -> TokenSequence:
        return TokenSequence(self.ids[:length], self.values[:length])

    def then(self, other: TokenSequence) -> TokenSequence:
        return TokenSequence(
            torch.cat([self.ids, other.ids]), torch.cat([self.values, other.values])
        )

    def change(self, position: int, token: int, value: float = 0.0) -> TokenSequence:
        ids, values = self.ids.clone(), self.values.clone()
        ids[position], values[position] = token, value
        return TokenSequence(ids, values)


def cuts_of(model: CausalModel, settings: DecodingSettings) -> Cuts:
    """What makes the candidates of a text that `generate` writes by these settings, on the CPU."""
    noise = model.decoding_noise(settings)
    words, n = noise.kept_words()[0], noise.avoided_repeats()[0]
    edges = whole(model.decision, "word_edges").cpu() if words or n else None
    return Cuts(settings.min_p or 0.0, edges, n, model.config.num_token_id, words)


def load_processor(model: CausalModel) -> Any:
    """The processor saved with the model."""
    from causal_qwen.modeling.processor import CausalQwenProcessor

    try:
        return CausalQwenProcessor.from_pretrained(model.name_or_path)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"The model ({model.name_or_path!r}) has no saved processor; pass processor=, or ids "
            "instead of text."
        ) from error


def read_tokens(
    model: CausalModel, text: Any, processor: Processor | None = None, special: bool = True
) -> TokenSequence:
    """A string, ids (T,) or (1, T), or what a processor returned for one text.

    `special=False` adds no special tokens: for a text that continues another.
    """
    if isinstance(text, TokenSequence):
        return text
    values: Any = None
    if isinstance(text, str):
        if processor is None:
            raise ValueError("A text needs processor=: the model has none; or give ids.")
        inputs = processor(text, return_tensors="pt", add_special_tokens=special)
        ids, values = inputs["input_ids"], inputs["numeric_values"]
    elif isinstance(text, Mapping):
        ids, values = text["input_ids"], text.get("numeric_values")
    else:
        ids = text
    ids = torch.as_tensor(ids).cpu()
    if not ids.numel():
        raise ValueError("The text is empty; give at least one token.")
    if ids.is_floating_point() or ids.dim() > 2 or (ids.dim() == 2 and len(ids) != 1):
        raise ValueError(f"ids of shape {tuple(ids.shape)} are not one text: give (T,) or (1, T).")
    ids = ids.reshape(-1).long()
    values = torch.zeros(len(ids)) if values is None else torch.as_tensor(values).cpu()
    return TokenSequence(ids, values.reshape(-1).double())


def is_number(model: CausalModel, ids: Tensor) -> Tensor:
    """Which ids are `<NUM>`; none in a model without numbers."""
    number = model.config.num_token_id
    return ids == (-1 if number is None else number)


@torch.no_grad()
def observe(model: CausalModel, sequence: TokenSequence, start: int) -> Any:
    """The model's output before each token from `start` on: T - start positions of one row."""
    if not 1 <= start < len(sequence.ids):
        raise ValueError(
            f"start={start} needs a token before and after it; the text has {len(sequence.ids)}."
        )
    before = sequence.cut(len(sequence.ids) - 1)
    inputs = before.batch(model)
    if not is_number(model, before.ids).any():
        inputs.pop("numeric_values", None)
    return model(**inputs, logits_to_keep=len(sequence.ids) - start, use_cache=False)


@torch.no_grad()
def shares_at(
    model: CausalModel, output: Any, place: int, text: Tensor, people: People
) -> dict[int, float]:
    """What share of some people would choose each token after a text, from the model's output
    before it."""
    scores, u = output.logits[0, place].float(), Cauchy(*(x[0, place] for x in output.u_dist))
    law = ModelLaw(model, scores.device, u.loc.dtype)
    tokens = candidate_tokens(scores, people.rules(), text, law)
    noise = to_tensors(people.noise(len(text) - 1), u.scale)
    shifts = model.action.displacement(u, noise) / law.divisor
    chosen = choose_for_many(scores, shifts, tokens, law)
    ids, counts = chosen.unique(return_counts=True)
    return {int(k): int(n) / len(people) for k, n in zip(ids, counts, strict=True)}


def show_tokens(
    model: CausalModel, sequence: TokenSequence, processor: Processor | None = None
) -> list[str]:
    """Every token as text; numbers as their value."""
    numbers = is_number(model, sequence.ids).tolist()
    rows = zip(sequence.ids.tolist(), sequence.values.tolist(), numbers, strict=True)
    name = str if processor is None else lambda token: processor.tokenizer.decode([token])
    return [render(value) if is_value else name(token) for token, value, is_value in rows]


def decode_tokens(
    model: CausalModel, sequence: TokenSequence, processor: Processor | None = None
) -> list[str]:
    """As `show_tokens`, but joined they are the text: a character whose bytes are several tokens
    is put at the last of them, and the others are empty."""
    tokens = show_tokens(model, sequence, processor)
    start: int | None = None  # of a character that is not whole yet
    for index, token in enumerate(tokens):
        if INCOMPLETE not in token:
            start = None
            continue
        start = index if start is None else start
        assert processor is not None  # ids hold no half characters
        text = processor.tokenizer.decode(sequence.ids[start : index + 1])
        tokens[start : index + 1] = [*[""] * (index - start), text]
        start = start if text.endswith(INCOMPLETE) else None
    return tokens


def decode_sequence(sequence: TokenSequence, processor: Processor | None = None) -> str:
    """The sequence as text, or as ids without a processor."""
    if processor is None:
        return " ".join(map(str, sequence.ids.tolist()))
    text: str = processor.decode(sequence.ids, sequence.values, skip_special_tokens=True)
    return text
