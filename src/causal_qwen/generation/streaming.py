"""Streaming: text that grows token by token, and can be stopped between two tokens.

A stream is one call of `generate`, with a criterion that shows the running texts after every token.
Iterated, the call runs in a thread of its own, which waits whenever no token is asked for.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from causal_qwen.decoding.context import context_length
from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.generation.steps import RunningTexts
from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.text.segmentation import stable_prefix

OnTexts = Callable[[list[str]], bool]  # the new text of every row -> whether to stop


@dataclass
class TokenStream:
    """The rows of one call as they grow; iterate over it to generate the next token."""

    model: CausalModel
    processor: Processor
    inputs: Mapping[str, Tensor]
    max_new_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None  # of softmax sampling
    settings: DecodingSettings | None = None  # known after the first token
    individuals: list[Individual] | None = None  # one per row, in the modes with noise

    def __post_init__(self) -> None:
        self.ids, self.mask, self.values = (
            self.inputs[name].to(self.model.device)
            for name in ("input_ids", "attention_mask", "numeric_values")
        )
        self.start = self.ids.shape[1]
        self.lengths = [0] * len(self.ids)  # of the rows' new tokens, without the end-of-text token
        self._state: Tensor | None = None
        device = self.model.device  # of which softmax draws its random numbers
        self._device = device if device.type in ("cuda", "xpu") else torch.device("cpu")
        if self.seed is not None:
            self._state = torch.Generator(self._device).manual_seed(self.seed).get_state()

    def run(self, on_texts: OnTexts) -> None:
        """Generate until all rows have ended, or until `on_texts` says so."""
        if not self.max_new_tokens:
            return
        ends, is_over = end_ids(self.model), [False] * len(self.ids)

        def show(running: RunningTexts, ids: Tensor, values: Tensor) -> bool:
            self.ids, self.values = ids, values
            self.settings, self.individuals = running.settings, running.individuals
            for row, token in enumerate(ids[:, -1].tolist()):
                is_over[row] |= token in ends
                self.lengths[row] += not is_over[row]
            texts = self.texts()
            with self._own_random_state():  # that of the caller
                return on_texts(texts)

        options = {name: value for name, value in self.options.items() if value is not None}
        with self._own_random_state():
            self.model.generate(
                input_ids=self.ids,
                attention_mask=self.mask,
                numeric_values=self.values,
                max_new_tokens=self.max_new_tokens,
                stopping_criteria=[RunningTexts(show)],
                **options,
            )

    def __iter__(self) -> Iterator[list[str]]:
        """The new text of every row after each token, until all rows have ended."""
        is_wanted, shown = threading.Semaphore(0), queue.SimpleQueue[Any]()
        is_closed = threading.Event()

        def hand_over(texts: list[str]) -> bool:
            shown.put(texts)
            is_wanted.acquire()
            return is_closed.is_set()

        def work() -> None:
            try:
                self.run(hand_over)
                shown.put(None)
            except BaseException as error:
                shown.put(error)

        thread = threading.Thread(target=copy_context().run, args=(work,), daemon=True)
        thread.start()
        try:
            while (texts := shown.get()) is not None:
                if isinstance(texts, BaseException):
                    raise texts
                yield texts
                is_wanted.release()
        finally:
            is_closed.set()
            is_wanted.release()
            thread.join()

    def texts(self) -> list[str]:
        """The new text of every row, without its end-of-text token."""
        return [
            self.processor.decode(
                self.ids[row, self.start : self.start + length],
                self.values[row, self.start : self.start + length],
                skip_special_tokens=True,
            )
            for row, length in enumerate(self.lengths)
        ]

    @contextlib.contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """Softmax sampling draws from the global state of the model's device: exchange it for the
        stream's, and back, so that the tokens are those of one call after `manual_seed(seed)`."""
        self._exchange_random_state()
        try:
            yield
        finally:
            self._exchange_random_state()

    def _exchange_random_state(self) -> None:
        if self._state is None:
            return
        if self._device.type == "cpu":
            current = torch.get_rng_state()
            torch.set_rng_state(self._state)
        else:
            states = torch.get_device_module(self._device)
            current = states.get_rng_state(self._device)
            states.set_rng_state(self._state, self._device)
        self._state = current


def stream_text(
    model: CausalModel,
    processor: Processor,
    prompts: Sequence[str],
    max_new_tokens: int,
    seed: int | None = None,
    **options: Any,
) -> Iterator[list[str]]:
    """The continuation of every prompt, one token longer each time."""
    inputs = processor(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    return iter(TokenStream(model, processor, inputs, max_new_tokens, options, seed))


@dataclass(frozen=True)
class GeneratedText:
    """A generated text with its numbers, its individual (in modes with noise) and its settings."""

    text: str
    numbers: list[float]
    individual: Individual | None
    settings: DecodingSettings
    seed: int | None = None
    is_stopped: bool = False

    def to_dict(self, prompt: str) -> dict[str, Any]:
        """For JSON: the text, and every setting that is needed to generate it again."""
        return {
            "prompt": prompt,
            "text": self.text,
            "numbers": self.numbers,
            "individual": None,
            **self.settings.to_dict(self.individual),
            "seed": self.seed,
            "is_stopped": self.is_stopped,
        }


def generate_text(
    model: CausalModel,
    processor: Processor,
    inputs: Mapping[str, Tensor],
    *,
    max_new_tokens: int = 60,
    seed: int | None = None,
    on_text: Callable[[str], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    **options: Any,
) -> GeneratedText:
    """Continue one row that a processor has encoded. `options` are those of `generate`.

    `on_text` receives every addition to the text that later tokens cannot change; `should_stop` is
    asked after every token. `seed` is that of softmax sampling.
    """
    length = min(max_new_tokens, remaining_context(model, inputs))
    stream = TokenStream(model, processor, inputs, length, options, seed)
    text = shown = ""
    is_stopped = False

    def show(texts: list[str]) -> bool:
        nonlocal text, shown, is_stopped
        (text,) = texts
        if on_text is not None:
            stable = stable_prefix(text)
            on_text(stable[len(shown) :])
            shown = stable
        is_stopped = should_stop is not None and should_stop()
        return is_stopped

    stream.run(show)
    if on_text is not None:
        on_text(text[len(shown) :])
    ids, values = stream.ids[0, stream.start :], stream.values[0, stream.start :]
    settings = stream.settings
    if settings is None:  # no token was asked for
        given = {name: value for name, value in options.items() if value is not None}
        settings = model.resolve_settings(**given)
    return GeneratedText(
        text=text,
        numbers=values[ids == processor.num_token_id].tolist(),
        individual=stream.individuals[0] if stream.individuals else None,
        settings=settings,
        seed=seed,
        is_stopped=is_stopped,
    )


def end_ids(model: CausalModel) -> set[int]:
    """The tokens that end a text."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        return set()
    return {eos} if isinstance(eos, int) else set(eos)


def context_of(model: CausalModel) -> int:
    """How many tokens a model reads and generates together."""
    config = model.config
    return context_length(config.max_position_embeddings, config.rope_parameters)


def remaining_context(model: CausalModel, inputs: Mapping[str, Tensor]) -> int:
    """How many tokens the model can generate after `inputs`: at least one."""
    context, length = context_of(model), inputs["input_ids"].shape[1]
    if length >= context:
        raise ValueError(
            f"The prompt has {length} tokens and the model's context is {context}; shorten it to "
            f"at most {context - 1}."
        )
    return context - length


def chat_inputs(processor: Processor, messages: list[dict[str, str]]) -> Any:
    """Messages in the model's chat template, up to where the answer begins."""
    if processor.chat_template is None:
        raise ValueError("This model has no chat template; continue texts with `generate`.")
    return processor.apply_chat_template(
        messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
