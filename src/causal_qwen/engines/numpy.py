"""NumPy: the engine without torch. Rows take turns, one token each.

A step of the engine reads every weight once per row, so rows do not share that cost as they do in
torch; each is exactly the text of `Engine.generate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.engines.engine import Choice, Row, Tokens
from causal_qwen.numpy_engine.engine import Engine, Step


class NumpyEngine:
    """A checkpoint directory that runs on NumPy."""

    kind = "numpy"

    def __init__(self, engine: Engine) -> None:
        if engine.reader is None:
            raise ValueError("The checkpoint has no tokenizer.json; a server needs one.")
        self.model, self.reader = engine, engine.reader
        self.size: int = engine.fields.get("causal_size") or engine.fields["hidden_size"]
        self.context = engine.model.config.context
        self.default_mode = engine.own_mode
        stops = engine.saved.get("eos_token_id", engine.fields.get("eos_token_id"))
        self.ends = frozenset([] if stops is None else np.atleast_1d(stops).tolist())
        self.num_token_id: int | None = engine.fields.get("num_token_id")
        self.has_chat = isinstance(self.reader.template, str)

    @classmethod
    def open(cls, path: str | Path, dtype: str | None = None, kernel: str = "numpy") -> NumpyEngine:
        return cls(Engine.from_pretrained(path, dtype, kernel))

    def encode(self, text: str) -> Tokens:
        return Tokens(*self.reader.encode(text))

    def encode_chat(self, messages: list[dict[str, str]]) -> Tokens:
        text = self.reader.as_chat(messages)
        return Tokens(*self.reader.encode(text, add_special_tokens=False))

    def decode(self, tokens: Tokens) -> str:
        return self.reader.decode(np.asarray(tokens.ids), np.asarray(tokens.values))

    def show(self, token: int, value: float = 0.0) -> str:
        return self.reader.show(token, value)

    def resolve(self, **options: Any) -> DecodingSettings:
        return self.model.resolve(**_engine_options(options))

    def new_batch(self) -> NumpyBatch:
        return NumpyBatch(self)


class NumpyBatch:
    def __init__(self, engine: NumpyEngine) -> None:
        self.engine = engine.model
        self.streams: dict[Row, Iterator[Step]] = {}

    def join(self, rows: Sequence[Row]) -> list[Choice | Exception]:
        has_heads = self.engine.heads is not None
        self.streams |= {
            row: self.engine.stream(
                row.prompt.ids,
                numeric_values=row.prompt.values if has_heads else None,
                runners_up=row.alternatives or 0,
                max_new_tokens=row.max_new_tokens,
                seed=row.seed,
                **_engine_options(row.options),
            )
            for row in rows
        }
        return [self._next(row) for row in rows]

    def step(self) -> list[tuple[Row, Choice | Exception]]:
        return [(row, self._next(row)) for row in list(self.streams)]

    def leave(self, row: Row) -> None:
        self.streams.pop(row, None)

    def _next(self, row: Row) -> Choice | Exception:
        try:
            step = next(self.streams[row])
        except (ValueError, ArithmeticError) as error:
            return error
        log_prob: float | None = None
        top: tuple[tuple[str, float], ...] = ()
        if row.alternatives is not None:
            log_prob = math.log(max(step.probability, math.ulp(0.0)))
            others = [(text, math.log(max(p, math.ulp(0.0)))) for text, p in step.runners_up]
            ranked = sorted([(step.token, log_prob), *others], key=lambda pair: -pair[1])
            top = tuple(ranked[: row.alternatives])
        return Choice(step.id, step.value or 0.0, log_prob, top)


def _engine_options(options: Any) -> dict[str, Any]:
    """The engine calls causal_mode `mode`."""
    named = {name: value for name, value in options.items() if value is not None}
    return {"mode" if name == "causal_mode" else name: value for name, value in named.items()}
