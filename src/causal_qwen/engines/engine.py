"""Engine: what a loaded model offers, and rows, the texts that it decodes as they grow.

An engine decodes rows of different prompts, individuals and modes together. It knows tokens only;
stop strings are in `causal_qwen.session`, limits and the queue of a server in `serving.batching`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from causal_qwen.decoding.decision import Array, Law
from causal_qwen.decoding.noise import UNoise
from causal_qwen.decoding.settings import DecodingSettings


class Tokens(NamedTuple):
    """A text as ids, and the value of every <NUM> (0 elsewhere)."""

    ids: list[int]
    values: list[float]


class Choice(NamedTuple):
    """The next token of a row."""

    id: int
    value: float = 0.0  # of <NUM>
    log_prob: float | None = None  # log softmax(loc_S) of the token, if asked for
    top: tuple[tuple[str, float], ...] = ()  # the likeliest tokens as text, with theirs


@dataclass(eq=False)
class Row:
    """A prompt, the options of `generate` that decide its tokens, and the tokens so far."""

    prompt: Tokens
    options: Mapping[str, Any]
    seed: int | None = None  # of softmax draws
    max_new_tokens: int = 16
    alternatives: int | None = None  # log probabilities of so many tokens beside the chosen one
    new: Tokens = field(default_factory=lambda: Tokens([], []))

    @property
    def length(self) -> int:
        return len(self.prompt.ids) + len(self.new.ids)

    def append(self, choice: Choice) -> None:
        self.new.ids.append(choice.id)
        self.new.values.append(choice.value)


class View(NamedTuple):
    """The last position of a text, as all individuals see it; arrays of the engine's kind."""

    scores: Array  # loc_S (V,)
    law: Law
    # what noise adds to loc_U as the rows of W count it, and the value of <NUM>: -> (N, C), (N,)
    move: Callable[[UNoise], tuple[Array, Array]]


class Batch(Protocol):
    """Rows that are decoded together; a row may join and leave between any two steps."""

    def join(self, rows: Sequence[Row]) -> list[Choice | Exception]:
        """Read the prompts of new rows together; copies of a text, which share their prompt, are
        neighbours. -> the first token of each. An error leaves the batch as it was."""

    def step(self) -> list[tuple[Row, Choice | Exception]]:
        """The next token of every row."""

    def leave(self, row: Row) -> None:
        """Forget a row."""


class Engine(Protocol):
    """A loaded model."""

    kind: str  # "torch", "numpy" or "llama.cpp"
    model: Any  # torch's model, NumPy's engine, or llama.cpp's context
    size: int  # C: the coordinates of an individual
    rows: int | None  # texts that a batch decodes at once; None: as many as memory has room for
    context: int  # tokens that a prompt and its continuation may have together
    default_mode: str  # of a call that names neither mode nor individual
    ends: frozenset[int]  # tokens that end a text
    num_token_id: int | None  # <NUM>

    def encode(self, text: str, special: bool = True) -> Tokens: ...
    def encode_chat(self, messages: list[dict[str, str]]) -> Tokens: ...
    def decode(self, tokens: Tokens) -> str: ...
    def show(self, token: int, value: float = 0.0) -> str: ...
    def resolve(self, **options: Any) -> DecodingSettings: ...
    def look(self, prompt: Tokens) -> View: ...  # by one forward pass
    def new_batch(self) -> Batch: ...
