"""Modes: the four decoding modes as options of `generate`, and several streams side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from causal_qwen.generation.streaming import end_ids
from causal_qwen.modeling.protocols import CausalModel, Processor

SAMPLING_TEMPERATURE, COMPATIBLE_TEMPERATURE = 20.0, 0.7  # varied and still fluent
NOTES = {
    "standard": "the most probable token, no noise",
    "sampling": "new noise in U at every token",
    "causal": "individual {seed}: the same noise in U at every token",
    "compatible": "softmax sampling, as in plain Qwen2",
}


class Mode(NamedTuple):
    name: str
    note: str
    options: dict[str, Any]  # of `generate`


def four_modes(
    sampling: float, causal: float, compatible: float, min_density: float, seed: int
) -> list[Mode]:
    """Every mode with its own temperature; 0 makes `compatible` greedy."""
    noise = {"individual": seed, "min_density": min_density}
    options: dict[str, dict[str, Any]] = {
        "standard": {},
        "sampling": {"temperature": sampling, **noise},
        "causal": {"temperature": causal, **noise},
        "compatible": {"do_sample": compatible > 0},
    }
    if compatible:
        options["compatible"]["temperature"] = compatible
    return [
        Mode(name, NOTES[name].format(seed=seed), {"causal_mode": name, **chosen})
        for name, chosen in options.items()
    ]


def interleave(streams: Sequence[Iterator[list[str]]]) -> Iterator[list[str]]:
    """One token of every stream in turn -> the texts of all streams after each token"""
    texts = [""] * len(streams)
    running = dict(enumerate(streams))
    while running:
        for index, stream in list(running.items()):
            if (grown := next(stream, None)) is None:
                del running[index]
            else:
                texts[index] = grown[0]
                yield list(texts)


# TEMPORARY: until generation.streaming has it
def stream_text(
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
