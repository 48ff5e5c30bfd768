"""Remote: a `Provider` whose model is behind the routes of `causal-qwen serve`. No torch.

    texts            POST /v1/completions, a stream per text; the server decodes them together
    individuals      POST /v1/individuals for the model's settings; here they are seeds
    counterfactuals  POST /v1/counterfactuals
    numbers          POST /v1/numbers

A request that fails is one sentence (`serving.client`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from causal_qwen.individuals.individual import OWN_FIELDS, Individual
from causal_qwen.playground import individuals, modes, provider, text_edits
from causal_qwen.playground.provider import (
    LEVELS,
    OWN_HEAD,
    PARALLEL,
    WAITING,
    Array,
    Forecast,
    NumberStart,
    Sweep,
    sweep_texts,
)
from causal_qwen.playground.text_edits import DragRange, GeneratedTokens
from causal_qwen.playground.worker import AdmissionQueue
from causal_qwen.serving.client import Client
from causal_qwen.tables.cells import is_missing, read_cell

T = TypeVar("T")

TEXTS, PEOPLE = "/v1/completions", "/v1/individuals"
COUNTERFACTUALS, NUMBERS, MODELS = "/v1/counterfactuals", "/v1/numbers", "/v1/models"
TABS = provider.TABS[:-1]  # no route explains a token
TEXT_TABS = provider.TABS[:2]
LEFT_OUT = (
    "A server has no route for the Tokens tab, the density of a prediction and counterfactual "
    "numbers, so they are left out here"
)
TEXTS_ONLY = "This server runs without torch and answers texts only, so the other tabs are left out"
NOTE = (
    "Numbers by the regressor {name!r} of the server. If it reads columns, write a line for each, "
    "such as carat = 0.7."
)
OWN_HEAD_NOTE = (
    "This server was started without --regressor: numbers come from its model's own head, which "
    "answers only if it was trained on values."
)


@dataclass
class RemoteState:
    """One served model."""

    client: Client
    name: str
    size: int  # C, of an individual
    persistence: float
    max_new_tokens: int
    has_analyses: bool  # counterfactuals and numbers
    regressors: Sequence[str] = ()
    queue: AdmissionQueue = field(
        default_factory=lambda: AdmissionQueue(PARALLEL, WAITING), repr=False
    )
    has_what_if = False

    @classmethod
    def open(cls, url: str, api_key: str | None = None) -> RemoteState:
        """Ask a server for its model."""
        client = Client(url, api_key)
        found = client.get(MODELS)
        with client.reading(MODELS):
            card = found["data"][0]
            size = int(card["individual_size"])  # of no other server's models
        drawn = client.post(PEOPLE, {})
        with client.reading(MODELS):
            return cls(
                client=client,
                name=str(card["id"]),
                size=size,
                persistence=float(drawn["persistence"]),
                max_new_tokens=min(int(card["limits"]["max_tokens"]), provider.MAX_NEW_TOKENS),
                has_analyses=card["engine"] == "torch",
                regressors=[str(name) for name in card["regressors"]],
            )

    @property
    def place(self) -> str:
        missing = LEFT_OUT if self.has_analyses else TEXTS_ONLY
        return f" at `{self.client.address}`. {missing}"

    @property
    def tabs(self) -> Sequence[str]:
        return TABS if self.has_analyses else TEXT_TABS

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    def close(self) -> None:
        self.client.close()

    def check_prompt(self, text: str | None) -> str:
        return text_edits.check_prompt(text)  # the server counts tokens

    def check_prompts(self, lines: str | None) -> list[str]:
        return text_edits.check_prompts(lines)

    # ------------------------------------------------------------ individuals and their texts

    def draw_first(self) -> list[Individual]:
        first = individuals.FIRST.items()
        return [self._draw(seed, name, individuals.TEMPERATURE) for name, seed in first]

    def draw(
        self,
        them: Sequence[Individual],
        name: str | None,
        seed: str | None = "",
        temperature: float = individuals.TEMPERATURE,
        persistence: float | None = None,
    ) -> list[Individual]:
        number = individuals.parse_seed(seed)
        name = individuals.parse_name(name, number)
        return individuals.add(them, self._draw(number, name, temperature, persistence))

    def _draw(
        self, seed: int, name: str, temperature: float, persistence: float | None = None
    ) -> Individual:
        """With the settings that the server confirms; it keeps nothing."""
        asked = {"seed": seed, "temperature": temperature, "persistence": persistence}
        found = self.client.post(PEOPLE, asked)
        with self.client.reading(PEOPLE):
            own: dict[str, Any] = {one: float(found[one]) for one in OWN_FIELDS}
        return Individual.draw(self.size, seed=seed, name=name, **own)

    def load(self, them: Sequence[Individual], path: str) -> list[Individual]:
        more = individuals.load(them, path, self.size)
        request_fields(more[-1])
        return more

    def stream_modes(
        self, prompt: str, asked: Sequence[modes.Mode], max_new_tokens: int, seed: int
    ) -> Iterator[list[str]]:
        bodies = [
            {"prompt": prompt, **({} if "individual" in one.options else {"seed": seed})}
            | one.options
            for one in asked
        ]
        return self._stream(bodies, max_new_tokens)

    def stream_individuals(
        self, prompts: Sequence[str], them: Sequence[Individual], max_new_tokens: int
    ) -> Iterator[list[str]]:
        rows = zip(prompts, them, strict=True)
        bodies = [{"prompt": prompt, **request_fields(one)} for prompt, one in rows]
        return self._stream(bodies, max_new_tokens)

    def _stream(self, bodies: Sequence[dict[str, Any]], most: int) -> Iterator[list[str]]:
        """All texts side by side. Closing the iterator closes the connections, which stops them."""
        with ExitStack() as open_streams:
            streams = [
                open_streams.enter_context(closing(self._text({**body, "max_tokens": most})))
                for body in bodies
            ]
            yield from modes.interleave(streams)

    def _text(self, body: dict[str, Any]) -> Generator[list[str]]:
        text = ""
        with closing(self.client.stream(TEXTS, {**body, "stream": True})) as events:
            for record in events:
                with self.client.reading(TEXTS):
                    text += record["choices"][0]["text"]
                yield [text]

    def compare(
        self, individual: Individual, prompt: str, kind: str, max_new_tokens: int, **fields: Any
    ) -> RemoteComparison:
        prompt = self.check_prompt(prompt)
        body = {"prompt": prompt, "max_tokens": max_new_tokens, **request_fields(individual)}

        def compare_with(edit: dict[str, Any]) -> RemoteComparison:
            found = self.client.post(COUNTERFACTUALS, {**body, "edit": edit})
            with self.client.reading(COUNTERFACTUALS):
                return RemoteComparison.read(found, individual)

        def generate() -> GeneratedTokens:
            factual = compare_with({"prompt": prompt}).factual
            return GeneratedTokens(factual.start, factual.tokens)

        return compare_with(
            text_edits.choose_edit(
                prompt, kind, check=self.check_prompt, generate=generate, **fields
            )
        )

    def split_tokens(self, text: str) -> list[str]:
        raise ValueError(f"{LEFT_OUT}.")

    def explain_token(self, text: str, index: int) -> Any:
        raise ValueError(f"{LEFT_OUT}.")

    # ------------------------------------------------------------ numbers

    @property
    def offered(self) -> dict[str, str]:
        named = {name: f"the regressor {name}" for name in self.regressors}
        return named or {OWN_HEAD: "the model's own number head"}

    @property
    def start(self) -> NumberStart:
        key = next(iter(self.offered))
        return NumberStart(key, self.predictor(key).note, "")

    def prepare(self, key: str) -> Iterator[str]:
        yield from ()

    def predictor(self, key: str, is_new: bool = False) -> RemotePredictor:
        if key not in self.offered:
            raise ValueError(f"There is no regressor {key!r} on this server.")
        return RemotePredictor(self.client, None if key == OWN_HEAD else key)


def request_fields(individual: Individual) -> dict[str, Any]:
    """The individual as fields of a request, in which it is a seed."""
    own = {name: getattr(individual, name) for name in OWN_FIELDS}
    seed = individual.seed
    if seed is None or individual != Individual.draw(individual.size, seed=seed, **own):
        raise ValueError(
            f"{individual.name} has noise that no seed draws, and a server is sent a seed; open "
            "the playground with the model itself."
        )
    return {"causal_mode": "causal", "individual": seed, **own}


# ---------------------------------------------------------------- counterfactuals


@dataclass(frozen=True, eq=False)
class RemoteWorld:
    """A world of a counterfactual, as the server describes it."""

    prompt: str
    start: int
    tokens: list[str]
    new_ids: list[int]
    is_ended: bool
    probability: Array
    log_prob: Array
    number: Array

    @classmethod
    def read(cls, record: dict[str, Any]) -> RemoteWorld:
        tokens = [str(token) for token in record["tokens"]]
        return cls(
            prompt=str(record["prompt"]),
            start=int(record["start"]),
            tokens=tokens,
            new_ids=[int(one) for one in record["ids"][record["start"] :]],
            is_ended=bool(record["is_ended"]),
            probability=_array(record["probability"], len(tokens)),
            log_prob=_array(record["log_prob"], len(tokens)),
            number=_array(record["number"], len(tokens), 3),
        )


@dataclass(frozen=True, eq=False)
class RemoteComparison:
    """A counterfactual, as the server describes it; an `analysis.rendering.ComparedWorlds`."""

    factual: RemoteWorld
    counterfactual: RemoteWorld
    edit: str
    semantics: str
    individual: Individual
    divergence: int | None
    shift_U: Array
    scale_ratio: Array
    is_text: bool = True

    @classmethod
    def read(cls, record: dict[str, Any], individual: Individual) -> RemoteComparison:
        factual, other = (RemoteWorld.read(record[name]) for name in ("factual", "counterfactual"))
        steps = min(len(factual.tokens), len(other.tokens))
        divergence = record["divergence"]
        return cls(
            factual,
            other,
            edit=str(record["edit"]),
            semantics=str(record["semantics"]),
            individual=individual,
            divergence=None if divergence is None else int(divergence),
            shift_U=_array(record["shift_U"], steps),
            scale_ratio=_array(record["scale_ratio"], steps),
        )


def _array(values: Any, *shape: int) -> Array:
    """Of a JSON list; null, which is no finite number, becomes NaN."""
    return np.array(values, dtype=np.float64).reshape(shape)


# ---------------------------------------------------------------- numbers


@dataclass(frozen=True)
class RemotePredictor:
    """A regressor of the server, or (None) the number head of its model."""

    client: Client = field(repr=False)
    regressor: str | None
    example = ""

    @property
    def name(self) -> str:
        return self.regressor or "the next number, by the model's own head"

    @property
    def note(self) -> str:
        return NOTE.format(name=self.regressor) if self.regressor else OWN_HEAD_NOTE

    def forecast(self, text: str) -> Forecast:
        (median,), intervals = self._ask([text])
        ends = {level: (float(low), float(high)) for level, ((low, high),) in intervals.items()}
        return Forecast(None, float(median), ends)

    def sweep(self, text: str, index: int, drag: DragRange) -> Sweep:
        values, texts = sweep_texts(text, index, drag)
        medians, intervals = self._ask(texts)
        return Sweep(values, medians, *intervals[LEVELS[-1]].T)

    def what_if(self, text: str, observed: str, other: str) -> str:
        raise ValueError(f"{LEFT_OUT}.")

    def _ask(self, texts: Sequence[str]) -> tuple[Array, dict[float, Array]]:
        """-> medians (N,) and, by level, intervals (N, 2)"""
        rows = [read_row(text) for text in texts]
        inputs: Sequence[Any] = texts if any(row is None for row in rows) else rows
        body = {"input": list(inputs), "levels": list(LEVELS), "regressor": self.regressor}
        answer = self.client.post(NUMBERS, body)
        with self.client.reading(NUMBERS):
            found = answer["data"]
            medians = _array([one["median"] for one in found], len(texts))
            ends = {
                level: np.array(
                    [_ends(one["intervals"][place]) for one in found], dtype=np.float64
                ).reshape(len(texts), 2)
                for place, level in enumerate(LEVELS)
            }
        return medians, ends


def _ends(interval: dict[str, Any]) -> tuple[float, float]:
    """Null is an end that is not finite."""
    low, high = interval["low"], interval["high"]
    return -math.inf if low is None else low, math.inf if high is None else high


def read_row(text: str) -> dict[str, Any] | None:
    """Lines such as "carat = 0.9" as a row of a table; None for any other text."""
    pairs = [line.partition("=") for line in text.splitlines() if line.strip()]
    if not pairs or not all(name.strip() and sign for name, sign, _ in pairs):
        return None
    cells = {name.strip(): value.strip() for name, _, value in pairs}
    return {name: None if is_missing(cell) else read_cell(cell) for name, cell in cells.items()}
