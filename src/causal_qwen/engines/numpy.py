"""NumPy: the engine without torch. Rows take turns, one token each.

A step of the engine reads every weight once per row, so rows do not share that cost as they do in
torch; each is exactly the text of `Engine.generate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from causal_qwen.decoding.noise import UNoise
from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.engines.engine import Choice, Row, Tokens, View
from causal_qwen.layer import (
    CausalLayer,
    calibrated_layer,
    fingerprint,
    is_gguf,
    is_layer,
    kept_layer,
)
from causal_qwen.numpy_engine.engine import Engine
from causal_qwen.numpy_engine.fast import find_kernel
from causal_qwen.numpy_engine.generation import DecodeStep, Generator, Limits
from causal_qwen.numpy_engine.gguf import GgufFile, GgufHead, read_checkpoint, text_reader
from causal_qwen.numpy_engine.heads import (
    MATRICES,
    CausalHeads,
    Float64,
    ValueSpace,
    with_defaults,
)
from causal_qwen.numpy_engine.tokenization import TextReader
from causal_qwen.numpy_engine.weights import Float32


class ReadsTexts:
    """Texts to tokens and back, by a `TextReader`."""

    def __init__(self, reader: TextReader) -> None:
        self.reader = reader
        self.num_token_id = reader.num_token_id  # <NUM>

    def encode(self, text: str, special: bool = True) -> Tokens:
        return Tokens(*self.reader.encode(text, add_special_tokens=special))

    def encode_chat(self, messages: list[dict[str, str]]) -> Tokens:
        text = self.reader.as_chat(messages)
        return Tokens(*self.reader.encode(text, add_special_tokens=False))

    def decode(self, tokens: Tokens) -> str:
        return self.reader.decode(np.asarray(tokens.ids), np.asarray(tokens.values))

    def show(self, token: int, value: float = 0.0) -> str:
        return self.reader.show(token, value)


class NumpyEngine(ReadsTexts):
    """A checkpoint directory that runs on NumPy."""

    kind = "numpy"
    rows: int | None = None

    def __init__(self, engine: Engine) -> None:
        if engine.reader is None:
            raise ValueError("The checkpoint has no tokenizer.json; a server needs one.")
        super().__init__(engine.reader)
        self.model = engine
        self.size: int = engine.fields.get("causal_size") or engine.fields["hidden_size"]
        self.context = engine.model.config.context
        self.default_mode = engine.own_mode
        stops = engine.saved.get("eos_token_id", engine.fields.get("eos_token_id"))
        self.ends = frozenset([] if stops is None else np.atleast_1d(stops).tolist())

    @classmethod
    def open(
        cls,
        path: str | Path,
        dtype: str | None = None,
        kernel: str = "numpy",
        progress: Callable[[str], None] = lambda _: None,
    ) -> NumpyEngine:
        """A directory; or a GGUF file, with its layer from the cache, or a layer. The weights of a
        GGUF file become int8, or float32 if `dtype` says so."""
        layer = CausalLayer.load(path) if is_layer(path) else None
        base = path if layer is None else layer.base
        if not is_gguf(base):
            return cls(Engine.from_pretrained(path, dtype, kernel))
        progress("widening the weights, for the NumPy engine")
        file = GgufFile(base)
        fields, tensors = read_checkpoint(file, dtype or "int8")
        reader, compiled = text_reader(file), find_kernel(kernel)
        if layer is not None:
            layer.check_base(base)
        elif (layer := kept_layer(mark := fingerprint(base))) is None:
            plain = Engine(fields, tensors, reader, where=str(base))
            plain.model.use(compiled)
            tools = reader.tokenizer, plain.logits, reader.num_token_id, progress
            layer = calibrated_layer(str(Path(base).resolve()), mark, GgufHead(file), *tools)
            layer.keep()
        size = fields["hidden_size"]
        untrained = dict(zip(MATRICES, (np.eye(size), np.zeros((size, size))), strict=True))
        own = untrained | with_defaults(layer.fields, layer.tensors)
        fields |= {**layer.fields, "model_type": f"causal_{fields['model_type']}"}
        engine = Engine(fields, tensors | own, reader, dict(layer.generation), str(base))
        engine.model.use(compiled)
        return cls(engine)

    def resolve(self, **options: Any) -> DecodingSettings:
        return self.model.resolve(**as_engine_options(options))

    def look(self, prompt: Tokens) -> View:
        row = Row(prompt, {}, max_new_tokens=1)
        call = NumpyBatch(self).call(row)
        with self.model.model.limit_blas(1):
            z = call.read(len(prompt.ids))
            return view_of(call.heads, self.model.fields, z, call.score(z))

    def new_batch(self) -> NumpyBatch:
        return NumpyBatch(self)


class NumpyBatch:
    def __init__(self, engine: NumpyEngine) -> None:
        self.engine = engine
        self.calls: dict[Row, Iterator[DecodeStep]] = {}

    def join(self, rows: Sequence[Row]) -> list[Choice | Exception]:
        self.calls |= {row: iter(self.call(row)) for row in rows}
        return [self._next(row) for row in rows]

    def step(self) -> list[tuple[Row, Choice | Exception]]:
        return [(row, self._next(row)) for row in list(self.calls)]

    def leave(self, row: Row) -> None:
        self.calls.pop(row, None)

    def call(self, row: Row) -> Generator:
        model = self.engine.model
        limits = Limits(row.max_new_tokens, stops=tuple(self.engine.ends))
        settings = self.engine.resolve(**row.options)
        return Generator(
            model.model, model.heads, model.fields, settings, limits, *row.prompt, row.seed
        )

    def _next(self, row: Row) -> Choice | Exception:
        try:
            step = next(self.calls[row])
        except (ValueError, ArithmeticError) as error:
            return error
        return choice_of(step, row, self.engine.show)


def view_of(
    heads: CausalHeads | None, fields: Mapping[str, Any], z: Float32, scores: Float32
) -> View:
    """z (H,), loc_S (V,)"""
    if heads is None:
        raise ValueError("A plain model has no individuals; convert it, or open it with torch.")
    u, space = heads.abduct(z), ValueSpace.of(fields)

    def move(noise: UNoise) -> tuple[Float32, Float64]:
        shift = heads.displacement(u, noise)  # (N, C)
        return shift, space.decode(heads.number(u).loc + shift @ heads.value_weight)

    return View(scores, heads, move)


def choice_of(step: DecodeStep, row: Row, show: Callable[[int, float], str]) -> Choice:
    """A step as what the engine's users see."""
    if row.alternatives is None:
        return Choice(step.token, step.value)
    top = tuple((show(k, step.y), _log(p)) for k, p in step.likeliest(row.alternatives))
    return Choice(step.token, step.value, _log(step.probabilities[step.token]), top)


def _log(probability: float) -> float:
    return math.log(max(float(probability), math.ulp(0.0)))


def as_engine_options(options: Any) -> dict[str, Any]:
    """The NumPy side calls causal_mode `mode`."""
    named = {name: value for name, value in options.items() if value is not None}
    return {"mode" if name == "causal_mode" else name: value for name, value in named.items()}
