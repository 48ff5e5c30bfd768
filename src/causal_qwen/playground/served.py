"""Served: what the page asks of the routes of `causal-qwen serve`. No torch.

    texts            POST /v1/completions, a stream per text; the server decodes them together
    individuals      POST /v1/individuals for the model's settings; here they are seeds
    counterfactuals  POST /v1/counterfactuals
    numbers          POST /v1/numbers, /v1/numbers/counterfactual
    tokens           POST /v1/tokens

A request that fails is one sentence (`serving.client`).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from causal_qwen.individuals.individual import OWN_FIELDS, Individual
from causal_qwen.playground.fields import DragRange, read_edit, read_row, read_text
from causal_qwen.serving.client import Client
from causal_qwen.text.edits import replace_number

Array = NDArray[np.float64]

TEXTS, PEOPLE, MODELS = "/v1/completions", "/v1/individuals", "/v1/models"
COUNTERFACTUALS, NUMBERS, TOKENS = "/v1/counterfactuals", "/v1/numbers", "/v1/tokens"
WHAT_IF = "/v1/numbers/counterfactual"
TABS = ("Generate", "Individuals", "Counterfactual", "Numbers", "Tokens")
TEXTS_ONLY = "This server runs without torch and answers texts only, so the other tabs are left out"
MAX_NEW_TOKENS = 80
LEVELS = (0.5, 0.9)
SWEEP_POINTS = 9
TEMPERATURE = 1.0
FIRST = {"Ada": 1, "Bo": 2, "Chen": 3}  # names and seeds of every visitor's first individuals


class Forecast(NamedTuple):
    """The number that a text asks for: its median, and intervals by level."""

    median: float
    intervals: dict[float, tuple[float, float]]


class Sweep(NamedTuple):
    """Median and interval for several values of one number of the text, (N,) each."""

    values: Array
    median: Array
    low: Array
    high: Array


@dataclass
class ServedModel:
    client: Client
    name: str
    size: int  # C, of an individual
    persistence: float  # of individuals, by default
    max_new_tokens: int
    has_analyses: bool  # counterfactuals, numbers and tokens
    regressors: Sequence[str] = ()

    @classmethod
    def open(cls, url: str, api_key: str | None = None) -> ServedModel:
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
                max_new_tokens=min(int(card["limits"]["max_tokens"]), MAX_NEW_TOKENS),
                has_analyses=card["engine"] == "torch",
                regressors=[str(name) for name in card["regressors"]],
            )

    # ------------------------------------------------------------ individuals and their texts

    def draw(
        self, seed: int, name: str, temperature: float, persistence: float | None = None
    ) -> Individual:
        """With the settings that the server confirms; it keeps nothing."""
        asked = {"seed": seed, "temperature": temperature, "persistence": persistence}
        found = self.client.post(PEOPLE, asked)
        with self.client.reading(PEOPLE):
            own: dict[str, Any] = {one: float(found[one]) for one in OWN_FIELDS}
        return Individual.draw(self.size, seed=seed, name=name or None, **own)

    def stream(self, bodies: Iterable[dict[str, Any]], most: int) -> Iterator[list[str]]:
        """All texts side by side, growing. Closing the iterator closes the connections, which stops
        them."""
        with ExitStack() as opened:
            streams = [
                opened.enter_context(closing(self._text({**body, "max_tokens": most})))
                for body in bodies
            ]
            yield from interleave(streams)

    def _text(self, body: dict[str, Any]) -> Generator[str]:
        text = ""
        with closing(self.client.stream(TEXTS, {**body, "stream": True})) as events:
            for record in events:
                with self.client.reading(TEXTS):
                    text += record["choices"][0]["text"]
                yield text

    def compare(
        self, individual: Individual, prompt: str, kind: str, most: int, fields: dict[str, Any]
    ) -> Any:
        """Both texts of one edit: an `analysis.rendering.ComparedWorlds`."""
        prompt = read_text(prompt)
        body = {"prompt": prompt, "max_tokens": most, **request_fields(individual)}

        def compare_with(edit: dict[str, Any]) -> Any:
            found = self.client.post(COUNTERFACTUALS, {**body, "edit": edit})
            with self.client.reading(COUNTERFACTUALS):
                return _read_comparison(found, individual)

        def generate() -> tuple[int, list[str]]:
            factual = compare_with({"prompt": prompt}).factual
            return factual.start, factual.tokens

        return compare_with(read_edit(prompt, kind, fields, generate))

    # ------------------------------------------------------------ numbers and tokens

    def forecast(self, regressor: str, text: str) -> Forecast:
        """By a regressor of the server, or ("") by the number head of its model."""
        (median,), intervals = self._numbers(regressor, [text])
        ends = {level: (float(low), float(high)) for level, ((low, high),) in intervals.items()}
        return Forecast(float(median), ends)

    def sweep(self, regressor: str, text: str, index: int, drag: DragRange) -> Sweep:
        """`text` with its `index`-th number moved from one end of its range to the other."""
        values = np.unique([drag.at(share) for share in np.linspace(0, 1, SWEEP_POINTS)])
        texts = [replace_number(text, index, float(value)) for value in values]
        medians, intervals = self._numbers(regressor, texts)
        return Sweep(values, medians, *intervals[LEVELS[-1]].T)

    def _numbers(self, regressor: str, texts: Sequence[str]) -> tuple[Array, dict[float, Array]]:
        """-> medians (N,) and, by level, intervals (N, 2)"""
        body = {"input": _inputs(texts), "levels": list(LEVELS), "regressor": regressor or None}
        answer = self.client.post(NUMBERS, body)
        with self.client.reading(NUMBERS):
            found = answer["data"]
            medians = _array([one["median"] for one in found], len(texts))
            ends = {
                level: _array([_ends(one["intervals"][place]) for one in found], len(texts), 2)
                for place, level in enumerate(LEVELS)
            }
        return medians, ends

    def what_if(self, regressor: str, text: str, observed: float, edited: str) -> str:
        """What the number seen after `text` would have been after the `edited` one, in words."""
        before, after = _inputs([text, edited])
        body = {
            "input": before,
            "observed": observed,
            "edited": after,
            "regressor": regressor or None,
        }
        found = self.client.post(WHAT_IF, body)
        with self.client.reading(WHAT_IF):
            return (
                f"Observed {observed:.4g} where {found['factual']:.4g} was expected; after the "
                f"edited text it would have been {found['median']:.4g} ({found['level']:.0%}: "
                f"{found['low']:.4g} to {found['high']:.4g})."
            )

    def tokens(self, text: str) -> list[str]:
        found = self.client.post(TOKENS, {"input": text})
        with self.client.reading(TOKENS):
            return [str(token) for token in found["tokens"]]

    def explain_token(self, text: str, index: int) -> Any:
        """An `analysis.token_view.TokenView`."""
        found = self.client.post(TOKENS, {"input": text, "index": index})
        with self.client.reading(TOKENS):
            return _as_object(found["view"])


def request_fields(individual: Individual) -> dict[str, Any]:
    """The individual as fields of a request, in which it is a seed."""
    own = {name: getattr(individual, name) for name in OWN_FIELDS}
    seed = individual.seed
    if seed is None or individual != Individual.draw(individual.size, seed=seed, **own):
        raise ValueError(
            f"{individual.name} has noise that no seed draws, and a server is sent a seed; use "
            "causal-qwen generate --individual FILE."
        )
    return {"causal_mode": "causal", "individual": seed, **own}


def interleave(streams: Sequence[Iterator[str]]) -> Iterator[list[str]]:
    """One token of every stream in turn -> the texts of all streams after each token"""
    texts = [""] * len(streams)
    running = dict(enumerate(streams))
    while running:
        for index, stream in list(running.items()):
            if (grown := next(stream, None)) is None:
                del running[index]
            else:
                texts[index] = grown
                yield list(texts)


def _inputs(texts: Sequence[str]) -> list[Any]:
    """Rows, if all texts are lines such as "carat = 0.9"."""
    rows = [read_row(text) for text in texts]
    return list(texts) if any(row is None for row in rows) else rows


def _read_comparison(record: dict[str, Any], individual: Individual) -> Any:
    worlds = {}
    for name in ("factual", "counterfactual"):
        world = record[name]
        named = {"probability": "P", "log_prob": "log_prob"}
        arrays = {name: _array(world[key], -1) for name, key in named.items()}
        number = _array(world["number"], -1, 3)
        ids = world["ids"][world["start"] :]
        worlds[name] = SimpleNamespace(**{**world, **arrays, "number": number, "new_ids": ids})
    steps = {one: _array(record[one], -1) for one in ("shift_U", "scale_ratio")}
    rest = {one: record[one] for one in ("edit", "semantics", "divergence")}
    return SimpleNamespace(**worlds, **steps, **rest, individual=individual, is_text=True)


def _as_object(record: Any) -> Any:
    if isinstance(record, list):
        return [_as_object(one) for one in record]
    if isinstance(record, dict):
        return SimpleNamespace(**{name: _as_object(value) for name, value in record.items()})
    return record


def _array(values: Any, *shape: int) -> Array:
    """Of a JSON list; null, which is no finite number, becomes NaN."""
    return np.array(values, dtype=np.float64).reshape(shape)


def _ends(interval: dict[str, Any]) -> tuple[float, float]:
    """Null is an end that is not finite."""
    low, high = interval["low"], interval["high"]
    return -math.inf if low is None else low, math.inf if high is None else high
