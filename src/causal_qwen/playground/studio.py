"""Studio: the open model, the thread that works with it, and what was learned on the way."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from causal_qwen.conversion.convert import default_model, open_model
from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.playground import oracles, people
from causal_qwen.playground.inside import Usual, get_used_to
from causal_qwen.playground.limits import PARALLEL, REGRESSORS, WAITING
from causal_qwen.playground.oracles import Oracle
from causal_qwen.playground.voices import speak
from causal_qwen.playground.worker import Door, Worker
from causal_qwen.regression.regressor import OpenModel


@dataclass
class Studio:
    """What all visitors share. Individuals are not in it: they are a visitor's own."""

    name: str
    processor: Processor = field(repr=False)
    model: CausalModel = field(repr=False)
    files: Path  # where saved individuals wait to be downloaded
    worker: Worker = field(default_factory=Worker, repr=False)
    door: Door = field(default_factory=lambda: Door(PARALLEL, WAITING), repr=False)
    usual: Usual | None = field(default=None, repr=False)
    flowers: Oracle | None = field(default=None, repr=False)
    regressors: dict[str, Oracle] = field(default_factory=dict, repr=False)  # by directory
    learning: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open(cls, model: str, files: Path) -> Studio:
        """Open a model and let it say one word, so that the first visitor need not wait."""
        path = model or str(default_model(lambda what: print(f"{what} ...", flush=True)))
        processor, causal = open_model(path)
        studio = cls(Path(path).name, processor, causal, files)
        studio.usual = studio.worker.do(get_used_to, causal, processor)
        studio.worker.do(list, speak(causal, processor, ["Hello"], 1))
        return studio

    def learn_flowers(self) -> Iterator[tuple[int, int] | Oracle]:
        """The oracle of the irises: learned once for all, while the first who asks can watch."""
        with self.learning:
            if self.flowers is not None:
                yield self.flowers
                return
            for news in self.worker.each(oracles.learn_flowers(self.model, self.processor)):
                if isinstance(news, Oracle):
                    self.flowers = news
                yield news

    def open_regressor(self, path: str) -> Oracle:
        """The regressor in a directory as it is now; the last few are kept open."""
        opened = OpenModel(self.processor, self.model)
        oracle = self.worker.do(oracles.of_directory, path, opened)
        self.regressors.pop(path, None)
        self.regressors[path] = oracle
        for oldest in list(self.regressors)[:-REGRESSORS]:
            self.regressors.pop(oldest, None)
        return oracle

    def oracle(self, key: str) -> Oracle:
        """Somebody to ask for numbers: a directory's regressor, the model itself, or the irises."""
        if key == oracles.OWN:
            return oracles.of_model(self.model, self.processor)
        if key == oracles.IRISES:
            if self.flowers is None:
                raise ValueError("The irises are still being learned; wait a moment.")
            return self.flowers
        return self.regressors.get(key) or self.open_regressor(key)

    def keep(self, someone: Individual) -> str:
        """The file of an individual, in a directory of its own."""
        return str(people.keep(someone, Path(tempfile.mkdtemp(dir=self.files))))

    def close(self) -> None:
        self.worker.close()
