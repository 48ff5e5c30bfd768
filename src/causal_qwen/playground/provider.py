"""Provider: what the page asks of a model, wherever the model is. Does not import torch.

    state    a model in this process
    remote   a model behind `causal-qwen serve`

The page has the tabs and parts that its provider offers, and nothing else differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from causal_qwen.analysis.rendering import ComparedWorlds
from causal_qwen.individuals.individual import Individual
from causal_qwen.playground.modes import Mode
from causal_qwen.playground.text_edits import DragRange
from causal_qwen.playground.worker import AdmissionQueue
from causal_qwen.text.edits import replace_number

Array = NDArray[np.float64]
T = TypeVar("T")

TABS = ("Generate", "Individuals", "Counterfactual", "Numbers", "Tokens")
PARALLEL, WAITING = 4, 24  # requests; together less than the server's 40 threads
MAX_NEW_TOKENS = 80
LEVELS = (0.5, 0.9)
SWEEP_POINTS = 9
OWN_HEAD = "<model>"  # the key of the model's own number head


class Density(Protocol):
    """A distribution that can be drawn."""

    def quantile(self, p: float) -> Any: ...
    def log_prob(self, value: Any) -> Any: ...


class Forecast(NamedTuple):
    """The number that a text asks for: its distribution (None if unknown), median and intervals
    by level."""

    distribution: Density | None
    median: float
    intervals: dict[float, tuple[float, float]]


class Sweep(NamedTuple):
    """Median and interval for several values of one number of the text, (N,) each."""

    values: Array
    median: Array
    low: Array
    high: Array


class NumberSource(Protocol):
    """A text -> a number with its uncertainty."""

    @property
    def name(self) -> str: ...
    @property
    def note(self) -> str: ...
    @property
    def example(self) -> str: ...  # "" if there is none
    def forecast(self, text: str) -> Forecast: ...
    def sweep(self, text: str, index: int, drag: DragRange) -> Sweep: ...
    def what_if(self, text: str, observed: str, other: str) -> str: ...


class NumberStart(NamedTuple):
    """What the tab of numbers shows first: a predictor by its key, a note and a text."""

    key: str
    note: str
    text: str


class Provider(Protocol):
    """Individuals are not in it: every visitor has a list of their own."""

    queue: AdmissionQueue

    @property
    def name(self) -> str: ...  # of the model
    @property
    def place(self) -> str: ...  # where the model is, and what the page lacks there; "" if here
    @property
    def tabs(self) -> Sequence[str]: ...
    @property
    def persistence(self) -> float: ...  # of individuals, by default
    @property
    def max_new_tokens(self) -> int: ...

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function` where it may use the model."""
        ...

    def check_prompt(self, text: str | None) -> str: ...
    def check_prompts(self, lines: str | None) -> list[str]: ...

    def draw_first(self) -> list[Individual]: ...
    def draw(self, them: Sequence[Individual], *fields: Any) -> list[Individual]: ...
    def load(self, them: Sequence[Individual], path: str) -> list[Individual]: ...

    def stream_modes(
        self, prompt: str, asked: Sequence[Mode], max_new_tokens: int, seed: int
    ) -> Iterator[list[str]]:
        """The texts of all modes, growing."""
        ...

    def stream_individuals(
        self, prompts: Sequence[str], them: Sequence[Individual], max_new_tokens: int
    ) -> Iterator[list[str]]:
        """The texts of all pairs of a prompt and an individual, growing."""
        ...

    def compare(
        self, individual: Individual, prompt: str, kind: str, max_new_tokens: int, **fields: Any
    ) -> ComparedWorlds:
        """Both texts of one edit, whose fields are those of `text_edits.choose_edit`."""
        ...

    @property
    def start(self) -> NumberStart: ...
    @property
    def offered(self) -> dict[str, str] | None: ...  # key -> title of predictors; None: any
    @property
    def has_what_if(self) -> bool: ...  # of numbers
    def prepare(self, key: str) -> Iterator[str]:
        """Make a predictor ready. -> notes on the progress"""
        ...

    def predictor(self, key: str, is_new: bool = False) -> NumberSource:
        """By key; a new one is read again."""
        ...

    def split_tokens(self, text: str) -> list[str]: ...
    def explain_token(self, text: str, index: int) -> Any: ...

    def close(self) -> None: ...


def sweep_texts(text: str, index: int, drag: DragRange) -> tuple[Array, list[str]]:
    """Values of the `index`-th number from one end of its range to the other, and the texts."""
    values = np.unique([drag.at(share) for share in np.linspace(0, 1, SWEEP_POINTS)])
    return values, [replace_number(text, index, float(value)) for value in values]
