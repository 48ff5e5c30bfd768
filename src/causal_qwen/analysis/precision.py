"""Precision: what int8 weights change, in NumPy: layer by layer, and in the next token's softmax.

The same text through the engine in float32 and in int8: relative differences of every layer and of
the logits, the KL divergence of the two softmax, how often both choose the same token, and the
ratio of the perplexities. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.engine import Engine, KeyValueCache

TOKENS, PASSAGE = 2000, 500  # in all, and read at once
POSITIONS = 64  # logits in memory at once
RATIO = 0.005  # by which the perplexity may differ
TOPICS = ("exceptions", "context-managers", "execmodel", "objects", "typesfunctions")
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Precision:
    """int8 beside float32 on one text."""

    tokens: int
    layers: dict[str, float]  # stage -> root mean square of the difference, over that of float32
    kl_mean: float  # of softmax in float32 to int8, in nats
    kl_max: float
    agreement: float  # share of positions with the same likeliest token
    perplexity_float32: float
    perplexity_int8: float

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity_int8 / self.perplexity_float32


def standard_text() -> str:
    """English prose that is part of Python: pages of its language reference."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in TOPICS)


def compare_precision(
    model: str | Path,
    int8: str | Path | None = None,
    ids: list[int] | None = None,
    tokens: int = TOKENS,
) -> Precision:
    """`model` as stored beside `int8`, a quantised directory; by default the same model, rounded.

    `ids` replace the text; a model without a tokenizer reads random ones.
    """
    exact = Engine.from_pretrained(model)
    rounded = Engine.from_pretrained(model if int8 is None else int8, dtype="int8")
    ids = (_ids(exact, tokens) if ids is None else ids)[:tokens]
    squares: dict[str, list[Float64]] = {}
    parts = []
    for start in range(0, len(ids), PASSAGE):
        passage = ids[start : start + PASSAGE]
        if len(passage) < 2:
            break
        states = [_states(engine, passage) for engine in (exact, rounded)]
        for name, state in states[0].items():
            squares.setdefault(name, []).append(_sums_of_squares(state, states[1][name]))
        z = [state["norm"][:-1] for state in states]
        for first in range(0, len(passage) - 1, POSITIONS):
            near = slice(first, first + POSITIONS)
            one, other = scores(exact, z[0][near]), scores(rounded, z[1][near])
            squares.setdefault("logits", []).append(_sums_of_squares(one, other))
            parts.append(_compare(one, other, np.array(passage[1:][near])))
    kl, agreed, first_log, second_log = np.concatenate(parts, axis=1)
    return Precision(
        tokens=len(ids),
        layers={name: _relative(sums) for name, sums in squares.items()},
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        agreement=float(agreed.mean()),
        perplexity_float32=float(np.exp(-first_log.mean())),
        perplexity_int8=float(np.exp(-second_log.mean())),
    )


def _ids(engine: Engine, tokens: int) -> list[int]:
    tokens = min(tokens, 4 * engine.model.config.context)
    if engine.reader is None:
        drawn = np.random.default_rng(0).integers(0, engine.model.config.vocab_size, tokens)
        return [int(token) for token in drawn]
    return engine.reader.encode(standard_text(), "text")[0]


def _states(engine: Engine, ids: list[int]) -> dict[str, NDArray[Any]]:
    """Every layer's output, and the normed one."""
    parts: dict[str, NDArray[Any]] = {}

    def keep(name: str, array: NDArray[Any]) -> None:
        if not name.startswith("attention"):
            parts[name] = array[0]

    model = engine.model
    cache = KeyValueCache(model.config, 1, len(ids))
    model.forward(model.embed(np.array([ids])), cache, keep, block=len(ids))
    return parts


def scores(engine: Engine, z: NDArray[Any]) -> NDArray[Any]:
    """The logits of a plain model, loc_S of a causal one. (..., H) -> (..., V)"""
    heads = engine.heads
    return engine.model.logits(z) if heads is None else heads.score(heads.abduct(z).loc)


def _sums_of_squares(one: NDArray[Any], other: NDArray[Any]) -> Float64:
    """-> (2,): of the difference, and of `one`"""
    return np.array([np.square(x, dtype=np.float64).sum() for x in (one - other, one)])


def _relative(sums: list[Float64]) -> float:
    difference, own = np.sum(sums, axis=0)
    return float(np.sqrt(difference / own)) if own else 0.0


def _compare(one: NDArray[Any], other: NDArray[Any], following: NDArray[Any]) -> Float64:
    """KL, agreement, and the log-probability of the token that follows in both. -> (4, n)"""
    logs = [_log_softmax(scores) for scores in (one, other)]
    kl = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    row = np.arange(len(following))
    return np.stack(
        (kl, one.argmax(-1) == other.argmax(-1), logs[0][row, following], logs[1][row, following])
    )


def _log_softmax(scores: NDArray[Any]) -> Float64:
    wide = scores.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide
