"""Speech: one answer, as the command line asks for it, until it ends or is stopped."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from causal_qwen.decoding.context import context_length
from causal_qwen.generation.mixin import Ledger
from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.options import NOISY_MODES
from causal_qwen.text.segmentation import stable_prefix


@dataclass(frozen=True)
class Said:
    """What was said, the numbers in it, and by whom in the modes with noise."""

    text: str
    numbers: list[float]
    individual: Individual | None
    is_stopped: bool = False

    def to_dict(self, prompt: str, mode: str) -> dict[str, Any]:
        """For JSON."""
        return {
            "prompt": prompt,
            "text": self.text,
            "numbers": self.numbers,
            "mode": mode,
            "individual": None if self.individual is None else self.individual.seed,
            "is_stopped": self.is_stopped,
        }


class Live(BaseStreamer):
    """Writes a text to the standard output as it grows, its numbers as their values."""

    def __init__(self, processor: Processor, inputs: Any, is_prompt_shown: bool) -> None:
        self.processor = processor
        self.ids: list[int] = inputs["input_ids"][0].tolist() if is_prompt_shown else []
        self.values: list[float] = inputs["numeric_values"][0].tolist() if is_prompt_shown else []
        self.ledger: Ledger | None = None
        self.is_begun = False
        self.written = ""

    def follow(self, ledger: Ledger | None) -> None:
        """Where the value beside the newest token stands."""
        self.ledger = ledger

    def put(self, value: Any) -> None:
        """The prompt, which is known already; then every token."""
        if not self.is_begun:
            self.is_begun = True
            return
        self.ids += value.flatten().tolist()
        self.values.append(0.0 if self.ledger is None else float(self.ledger.values[0, -1]))
        self._write(stable_prefix(self._text()))

    def end(self) -> None:
        self._write(self._text() + "\n")

    def _text(self) -> str:
        text: str = self.processor.decode(self.ids, self.values, skip_special_tokens=True)
        return text

    def _write(self, text: str) -> None:
        print(text[len(self.written) :], end="", flush=True)
        self.written = text


class Stop(StoppingCriteria):
    """Ends an answer after the next word once it `is_asked` to."""

    is_asked = False

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((len(input_ids),), self.is_asked, device=input_ids.device)


@contextlib.contextmanager
def stopped_by_interrupt() -> Iterator[Stop]:
    """Ctrl-C stops the answer and not the program; a second one ends the program."""
    stop = Stop()

    def ask(*_: Any) -> None:
        stop.is_asked = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def say(
    processor: Processor,
    model: CausalModel,
    inputs: Any,
    *,
    mode: str = "standard",
    who: int | Individual | None = None,
    temperature: float | None = None,
    min_density: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    max_new_tokens: int = 60,
    is_live: bool = False,
    is_prompt_shown: bool = False,
    stop: Stop | None = None,
) -> Said:
    """Continue what a processor has read; `is_live` writes it to the standard output as it comes.

    In `compatible` mode a temperature, top-k, top-p or seed asks for softmax sampling, as in Qwen.
    """
    start, room = inputs["input_ids"].shape[1], room_after(model, inputs)
    options: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_density": min_density}
    if mode in NOISY_MODES:
        usual = None if isinstance(who, Individual) else 1.0  # an Individual brings its own
        options |= {"individual": who, "temperature": usual if temperature is None else temperature}
    elif mode == "compatible" and temperature != 0:
        asked = (temperature, top_k, top_p, seed)
        if any(value is not None for value in asked):
            options |= {"temperature": temperature, "do_sample": True}
    with torch.random.fork_rng() if seed is not None else contextlib.nullcontext():
        if seed is not None:
            torch.manual_seed(seed)
        result = model.generate(
            **inputs,
            causal_mode=mode,
            max_new_tokens=min(max_new_tokens, room),
            streamer=Live(processor, inputs, is_prompt_shown) if is_live else None,
            stopping_criteria=None if stop is None else [stop],
            return_dict_in_generate=True,
            **{name: value for name, value in options.items() if value is not None},
        )
    ids, values = result.sequences[0, start:], result.numeric_values[0, start:]
    people = result.get("individual")
    return Said(
        text=processor.decode(ids, values, skip_special_tokens=True),
        numbers=values[ids == processor.num_token_id].tolist(),
        individual=people[0] if people else None,
        is_stopped=stop is not None and stop.is_asked,
    )


def context_of(model: CausalModel) -> int:
    """How many tokens it reads and says together, stretched positions included."""
    config = model.config
    return context_length(config.max_position_embeddings, config.rope_parameters)


def room_after(model: CausalModel, inputs: Any) -> int:
    """How many tokens the model can say after what was read, which must leave it one."""
    context, length = context_of(model), inputs["input_ids"].shape[1]
    if length >= context:
        raise ValueError(
            f"The prompt has {length} tokens; this model reads 1 to {context - 1} and says one "
            "more: shorten it."
        )
    return context - length


def read_chat(processor: Processor, messages: list[dict[str, str]]) -> Any:
    """Messages in the model's own chat template, up to where it answers."""
    if processor.chat_template is None:
        raise ValueError("This model has no chat template: it continues texts, with generate.")
    return processor.apply_chat_template(
        messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


def end_ids(model: CausalModel) -> set[int]:
    """The tokens that end a text."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        return set()
    return {eos} if isinstance(eos, int) else set(eos)
