"""Voices: prompts -> texts that grow token by token.

Hugging Face's `generate` is asked for one token at a time, with its own cache: the same text as
one call says, at the same speed, and between two tokens others can have their turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from causal_qwen.generation.streaming import end_ids
from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.protocols import CausalModel, Processor


@dataclass(frozen=True)
class Voice:
    """One way to go on: a title, what it asks, and the options of `generate`."""

    title: str
    note: str
    options: dict[str, Any] = field(repr=False)
    seed: int | None = None  # of plain softmax sampling


def four_modes(
    sampling: float, causal: float, compatible: float, truncation: float, seed: int
) -> list[Voice]:
    """The four modes, each with its own temperature; 0 makes `compatible` greedy."""
    noise = {"individual": seed, "min_density": truncation}
    softmax = {"do_sample": True, "temperature": compatible} if compatible else {}
    return [
        Voice("standard", "what people like this would say", {"causal_mode": "standard"}),
        Voice(
            "sampling",
            "the same after a push, a new one at every word",
            {"causal_mode": "sampling", "temperature": sampling, **noise},
        ),
        Voice(
            "causal",
            f"what individual {seed} says, the same one at every word",
            {"causal_mode": "causal", "temperature": causal, **noise},
        ),
        Voice(
            "compatible",
            "what plain Qwen2 would say",
            {"causal_mode": "compatible", "do_sample": False, **softmax},
            seed,
        ),
    ]


def one_speaker(people: Individual | Sequence[Individual]) -> dict[str, Any]:
    """The options of `generate` with which these individuals speak."""
    who = people if isinstance(people, Individual) else list(people)
    return {"causal_mode": "causal", "individual": who}


def speak(
    model: CausalModel,
    processor: Processor,
    prompts: Sequence[str],
    max_new_tokens: int,
    seed: int | None = None,
    **options: Any,
) -> Iterator[list[str]]:
    """What is said after every prompt, one token longer each time, until all have ended."""
    inputs = processor(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    ids, mask, values = (
        inputs[name].to(model.device) for name in ("input_ids", "attention_mask", "numeric_values")
    )
    start, cache = ids.shape[1], DynamicCache(config=model.config)
    ends, chance = end_ids(model), _Chance(seed)
    lengths = [0] * len(prompts)  # of what was said, without the end
    is_over = [False] * len(prompts)
    for _ in range(max_new_tokens):
        with chance.borrowed():
            result = model.generate(
                input_ids=ids,
                attention_mask=mask,
                numeric_values=values,
                past_key_values=cache,
                max_new_tokens=1,
                return_dict_in_generate=True,
                **options,
            )
        ids, values = result.sequences, result.numeric_values
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        for row, token in enumerate(ids[:, -1].tolist()):
            is_over[row] |= token in ends
            lengths[row] += not is_over[row]
        yield [
            processor.decode(
                ids[row, start : start + length],
                values[row, start : start + length],
                skip_special_tokens=True,
            )
            for row, length in enumerate(lengths)
        ]
        if all(is_over):
            return


def take_turns(voices: Sequence[Iterator[list[str]]]) -> Iterator[list[str]]:
    """Several speakers, a token each in turn: all their texts after every token."""
    texts = [""] * len(voices)
    speaking = dict(enumerate(voices))
    while speaking:
        for place, voice in list(speaking.items()):
            said = next(voice, None)
            if said is None:
                del speaking[place]
            else:
                texts[place] = said[0]
                yield list(texts)


class _Chance:
    """Softmax sampling takes torch's own randomness: it is borrowed, and given back as it was.

    Between two tokens it is kept, so that they come as from one call after `manual_seed(seed)`.
    """

    def __init__(self, seed: int | None) -> None:
        self._state = None if seed is None else torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        if self._state is None:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._state)
            yield
            self._state = torch.get_rng_state()
