"""State: what all visitors share: the model, its worker, and fitted or loaded predictors.

A `Provider` with a model in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from causal_qwen.analysis.counterfactual import Counterfactual
from causal_qwen.conversion.convert import default_model, open_model
from causal_qwen.generation.streaming import stream_text
from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.playground import (
    counterfactuals,
    individuals,
    modes,
    predictors,
    provider,
    text_edits,
    token_view,
)
from causal_qwen.playground.predictors import Predictor
from causal_qwen.playground.provider import OWN_HEAD, PARALLEL, WAITING, NumberStart
from causal_qwen.playground.token_view import TypicalU, measure_typical
from causal_qwen.playground.worker import AdmissionQueue, Worker
from causal_qwen.regression.regressor import OpenModel

T = TypeVar("T")

MAX_REGRESSORS = 4  # loaded from directories at the same time
IRISES = "<irises>"  # the key of the predictor that is fitted here
FIRST_NOTE = "The iris regressor is fitted when this tab is first opened."


@dataclass
class AppState:
    place = ""
    tabs = provider.TABS
    max_new_tokens = provider.MAX_NEW_TOKENS
    offered = None  # any directory on this machine
    has_what_if = True

    name: str
    processor: Processor = field(repr=False)
    model: CausalModel = field(repr=False)
    worker: Worker = field(default_factory=Worker, repr=False)
    queue: AdmissionQueue = field(
        default_factory=lambda: AdmissionQueue(PARALLEL, WAITING), repr=False
    )
    typical: TypicalU | None = field(default=None, repr=False)
    irises: Predictor | None = field(default=None, repr=False)
    regressors: dict[str, Predictor] = field(default_factory=dict, repr=False)  # by directory

    @classmethod
    def open(cls, model: str, device: str = "cpu", dtype: str = "auto") -> AppState:
        """Load a model and generate one token, so that the first visitor need not wait."""
        path = model or str(default_model(lambda step: print(f"{step} ...", flush=True)))
        processor, causal = open_model(path, device, dtype)
        state = cls(Path(path).name, processor, causal)
        state.typical = state.run(measure_typical)
        list(state.worker.iterate(state.run(stream_text, ["Hello"], 1)))
        return state

    def run(self, function: Any, *arguments: Any, **options: Any) -> Any:
        """`function(model, processor, ...)` in the worker's thread."""
        return self.worker.run(function, self.model, self.processor, *arguments, **options)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        return self.worker.run(function, *arguments)

    def close(self) -> None:
        self.worker.close()

    @property
    def persistence(self) -> float:
        return self.model.resolve_settings(causal_mode="causal").persistence

    def check_prompt(self, text: str | None) -> str:
        return self.call(text_edits.check_prompt, text, self.processor)

    def check_prompts(self, lines: str | None) -> list[str]:
        return self.call(text_edits.check_prompts, lines, self.processor)

    # ------------------------------------------------------------ individuals and their texts

    def draw_first(self) -> list[Individual]:
        return individuals.draw_first(self.model)

    def draw(self, them: Sequence[Individual], *fields: Any) -> list[Individual]:
        return individuals.draw(them, self.model, *fields)

    def load(self, them: Sequence[Individual], path: str) -> list[Individual]:
        return individuals.load(them, path, self.model)

    def stream_modes(
        self, prompt: str, asked: Sequence[modes.Mode], max_new_tokens: int, seed: int
    ) -> Iterator[list[str]]:
        streams = [
            self.run(stream_text, [prompt], max_new_tokens, seed, **mode.options) for mode in asked
        ]
        return self.worker.iterate(modes.interleave(streams))

    def stream_individuals(
        self, prompts: Sequence[str], them: Sequence[Individual], max_new_tokens: int
    ) -> Iterator[list[str]]:
        who = {"causal_mode": "causal", "individual": list(them)}
        return self.worker.iterate(self.run(stream_text, list(prompts), max_new_tokens, **who))

    def compare(
        self, individual: Individual, prompt: str, kind: str, max_new_tokens: int, **fields: Any
    ) -> Counterfactual:
        fields["max_new_tokens"] = max_new_tokens
        return self.run(counterfactuals.compare, individual, prompt, kind, **fields)

    # ------------------------------------------------------------ tokens

    def split_tokens(self, text: str) -> list[str]:
        return self.run(token_view.split_tokens, text)

    def explain_token(self, text: str, index: int) -> token_view.TokenView:
        return self.run(token_view.explain_token, text, index, self.typical)

    # ------------------------------------------------------------ numbers

    @cached_property
    def start(self) -> NumberStart:
        return NumberStart(IRISES, FIRST_NOTE, predictors.read_irises()[0][0])

    def prepare(self, key: str) -> Iterator[str]:
        for step in self.fit_irises() if key == IRISES else ():
            if isinstance(step, Predictor):
                yield step.note
            else:
                yield f"Fitting the iris regressor: {step[0]} of {step[1]} rows read ..."

    def fit_irises(self) -> Iterator[tuple[int, int] | Predictor]:
        """Progress, then the iris predictor; fitted once for all visitors."""
        if self.irises is not None:
            yield self.irises
            return
        for step in self.worker.iterate(predictors.fit_irises(self.model, self.processor)):
            if isinstance(step, Predictor):
                self.irises = step
            yield step

    def load_regressor(self, path: str) -> Predictor:
        """The regressor in a directory, read anew; the latest few stay loaded."""
        opened = OpenModel(self.processor, self.model)
        predictor = self.worker.run(predictors.from_directory, path, opened)
        self.regressors.pop(path, None)
        self.regressors[path] = predictor
        for oldest in list(self.regressors)[:-MAX_REGRESSORS]:
            self.regressors.pop(oldest, None)
        return predictor

    def predictor(self, key: str, is_new: bool = False) -> Predictor:
        """By key: `IRISES`, `OWN_HEAD`, or the directory of a regressor, read anew if `is_new`."""
        if key == OWN_HEAD:
            return predictors.from_model(self.model, self.processor)
        if key == IRISES:
            if self.irises is None:
                raise ValueError("The iris regressor is still being fitted; wait a moment.")
            return self.irises
        loaded = None if is_new else self.regressors.get(key)
        return loaded or self.load_regressor(key)
