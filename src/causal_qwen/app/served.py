"""Served: what a visitor writes, and what the page asks of the routes of `causal-qwen serve`.

    texts            POST /v1/completions, a stream per text; the server decodes them together
    individuals      names or seeds, with settings
    counterfactuals  POST /v1/counterfactuals
    numbers          POST /v1/numbers
    tokens           POST /v1/tokens
    panels           POST /v1/panel

A request that fails is one sentence (`serving.client`). No torch, no Gradio.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from causal_qwen.serving.client import Client
from causal_qwen.tables.cells import is_missing, read_cell

TEXTS, MODELS = "/v1/completions", "/v1/models"
COUNTERFACTUALS, NUMBERS, TOKENS = "/v1/counterfactuals", "/v1/numbers", "/v1/tokens"
PANEL = "/v1/panel"
MAX_NEW_TOKENS = 80
MAX_CHARACTERS = 1000  # of a text
LEVELS = (0.5, 0.9)
IRISES = "petal length of an iris, in cm"  # the regressor of `local`, and a text for it
IRIS_TEXT = (
    "An iris versicolor has sepals 6.1 cm long and 2.8 cm wide, and petals 1.3 cm wide. The petal "
    "length in cm is"
)
TEMPERATURE = 1.0
COMPATIBLE_TEMPERATURE = 0.7  # varied and still fluent
FIRST = ("Ada", "Bo", "Chen")  # every visitor's first individuals
MODE_NOTES = {
    "standard": "the most probable token, no noise",
    "sampling": "new noise in U at every token",
    "causal": "individual {seed}: noise in U of its own, the same in every text",
    "compatible": "softmax sampling, as in plain Qwen2",
}


class Speaker(NamedTuple):
    """An individual of a visitor: of a seed, or else of its name."""

    name: str
    seed: int | None
    temperature: float
    persistence: float

    def __repr__(self) -> str:
        return self.name

    @property
    def fields(self) -> dict[str, Any]:
        """Of a request."""
        name, seed, temperature, persistence = self
        own = {"temperature": temperature, "persistence": persistence}
        return {"causal_mode": "causal", "individual": name if seed is None else seed, **own}


class Forecast(NamedTuple):
    """The number that a text asks for: its median, and intervals by level."""

    median: float
    intervals: dict[float, tuple[float, float]]


@dataclass
class ServedModel:
    client: Client
    name: str
    persistence: float  # of individuals, by default
    max_new_tokens: int
    has_analyses: bool  # counterfactuals, numbers and tokens
    regressors: Sequence[str] = ()

    @classmethod
    def open(cls, url: str, api_key: str | None = None) -> ServedModel:
        """Ask a server for its model."""
        client = Client(url, api_key)
        (card,) = client.get(MODELS)["data"]
        if "individual_size" not in card:
            raise ValueError(
                f"{client.address} serves another kind of model; use causal-qwen serve."
            )
        return cls(
            client=client,
            name=card["id"],
            persistence=card["persistence"],
            max_new_tokens=min(card["limits"]["max_tokens"], MAX_NEW_TOKENS),
            has_analyses=card["engine"] == "torch",
            regressors=card["regressors"],
        )

    def stream(self, bodies: Iterable[dict[str, Any]], most: int) -> Iterator[list[str]]:
        """All texts side by side, growing by a token of each in turn. Closing the iterator closes
        the connections, which stops the texts."""
        with ExitStack() as opened:
            streams = {}
            for place, body in enumerate(bodies):
                events = self.client.stream(TEXTS, {**body, "max_tokens": most})
                streams[place] = opened.enter_context(closing(events))
            texts = [""] * len(streams)
            while streams:
                for place, events in list(streams.items()):
                    if (record := next(events, None)) is None:
                        del streams[place]
                    else:
                        texts[place] += record["choices"][0]["text"]
                        yield list(texts)

    def compare(self, speaker: Speaker, prompt: str, edited: str, most: int) -> Any:
        """The speaker's texts after two prompts, for `rendering.comparison`."""
        body = {"prompt": prompt, "edit": {"prompt": edited}, "max_tokens": most}
        return _read_comparison(self.client.post(COUNTERFACTUALS, body | speaker.fields), speaker)

    def ask(self, question: str, options: str, versus: str, people: int) -> dict[str, Any]:
        """What many individuals answer; options are separated by commas."""
        named = [one.strip() for one in options.split(",") if one.strip()]
        body = {"question": question, "options": named, "individuals": people}
        return self.client.post(PANEL, body | ({"versus": versus} if versus else {}))

    def forecast(self, regressor: str, text: str) -> Forecast:
        """By a regressor of the server, or ("") by the number head of its model."""
        body = {"input": read_row(text) or text, "levels": LEVELS, "regressor": regressor or None}
        (found,) = self.client.post(NUMBERS, body)["data"]
        ends = {}
        for one in found["intervals"]:  # null is an end that is not finite
            low, high = one["low"], one["high"]
            ends[one["level"]] = (
                -math.inf if low is None else low,
                math.inf if high is None else high,
            )
        return Forecast(found["median"], ends)

    def tokens(self, text: str, index: int | None = None) -> tuple[list[str], Any]:
        """The tokens of a text; with `index`, an `analysis.token_view.TokenView` as well."""
        found = self.client.post(TOKENS, {"input": text, "index": index})
        view = json.dumps(found.get("view"))
        as_view = json.loads(view, object_hook=lambda record: SimpleNamespace(**record))
        return found["tokens"], as_view


def four_modes(
    seed: int, sampling: float, causal: float, compatible: float, persistence: float
) -> dict[str, dict[str, Any]]:
    """Every mode with its own temperature, as fields of a request; 0 is greedy `compatible`."""
    softmax = {"temperature": compatible} if compatible else {"do_sample": False}
    found: dict[str, dict[str, Any]] = {
        "standard": {"seed": seed},
        "sampling": {"temperature": sampling, "individual": seed},
        "causal": {"temperature": causal, "individual": seed, "persistence": persistence},
        "compatible": {"seed": seed, **softmax},
    }
    return {name: {"causal_mode": name, **options} for name, options in found.items()}


def _read_comparison(record: dict[str, Any], speaker: Speaker) -> Any:
    worlds = {}
    for name in ("factual", "counterfactual"):
        world = dict(record[name])
        world["new_ids"] = world["ids"][world["start"] :]
        for figure, key in {"share": "share", "log_prob": "log_prob", "number": "number"}.items():
            world[figure] = np.array(world[key], dtype=np.float64)  # null becomes NaN
        world["number"] = world["number"].reshape(-1, 3)
        worlds[name] = SimpleNamespace(**world)
    steps = {one: np.array(record[one], np.float64) for one in ("shift_U", "scale_ratio")}
    known = {"individual": speaker, "is_text": True}
    return SimpleNamespace(**{**record, **worlds, **steps, **known})


# ---------------------------------------------------------------- what a visitor writes


def read_text(text: str | None) -> str:
    """Without surrounding spaces; an empty or too long one is refused."""
    if not (text := (text or "").strip()):
        raise ValueError("The text is empty; write a few words.")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"The text has {len(text):,} characters; the playground takes {MAX_CHARACTERS:,}."
        )
    return text


def read_row(text: str) -> dict[str, Any] | None:
    """Lines such as "carat = 0.9" as a row of a table; None for any other text."""
    pairs = [line.partition("=") for line in text.splitlines() if line.strip()]
    if not pairs or not all(name.strip() and sign for name, sign, _ in pairs):
        return None
    cells = {name.strip(): value.strip() for name, _, value in pairs}
    return {name: None if is_missing(cell) else read_cell(cell) for name, cell in cells.items()}
