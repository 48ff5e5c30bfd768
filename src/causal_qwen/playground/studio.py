"""Studio: the open model, the thread that works with it, and what was learned on the way."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from causal_qwen.convert import default_model, open_model
from causal_qwen.individual import Individual
from causal_qwen.playground import oracles, people
from causal_qwen.playground.inside import Usual, get_used_to
from causal_qwen.playground.oracles import Oracle
from causal_qwen.playground.voices import speak
from causal_qwen.playground.worker import Worker


@dataclass
class Studio:
    """What all visitors share. Individuals are not in it: they are a visitor's own."""

    name: str
    processor: Any = field(repr=False)
    model: Any = field(repr=False)
    files: Path  # where saved individuals wait to be downloaded
    worker: Worker = field(default_factory=Worker, repr=False)
    usual: Usual | None = field(default=None, repr=False)
    flowers: Oracle | None = field(default=None, repr=False)
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

    def oracle(self, key: str) -> Oracle:
        """Somebody else to ask for numbers: the model itself, or a directory's regressor."""
        if key == oracles.OWN:
            return oracles.of_model(self.model, self.processor)
        return self.worker.do(oracles.of_directory, key)

    def keep(self, someone: Individual) -> str:
        """The file of an individual, in a directory of its own."""
        return str(people.keep(someone, Path(tempfile.mkdtemp(dir=self.files))))

    def close(self) -> None:
        self.worker.close()
