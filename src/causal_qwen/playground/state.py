"""State: what all visitors share: the model, its worker, and fitted or loaded predictors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from causal_qwen.conversion.convert import default_model, open_model
from causal_qwen.generation.streaming import stream_text
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.playground import predictors
from causal_qwen.playground.predictors import Predictor
from causal_qwen.playground.token_view import TypicalU, measure_typical
from causal_qwen.playground.worker import AdmissionQueue, Worker
from causal_qwen.regression.regressor import OpenModel

PARALLEL, WAITING = 4, 24  # requests; together less than the server's 40 threads
MAX_REGRESSORS = 4  # loaded from directories at the same time
IRISES, OWN_HEAD = "<irises>", "<model>"  # predictors that are not in a directory


@dataclass
class AppState:
    """Individuals are not in it: every visitor has a list of their own."""

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

    def predictor(self, key: str) -> Predictor:
        """By key: `IRISES`, `OWN_HEAD`, or the directory of a regressor."""
        if key == OWN_HEAD:
            return predictors.from_model(self.model, self.processor)
        if key == IRISES:
            if self.irises is None:
                raise ValueError("The iris regressor is still being fitted; wait a moment.")
            return self.irises
        return self.regressors.get(key) or self.load_regressor(key)
