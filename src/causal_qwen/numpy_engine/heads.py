"""Heads: CausalQwen's heads in NumPy. z -> U -> S, Y -> the next token and its value.

    loc_U = W_loc z + b_loc            scale_U = act(W_scale z + b_scale)          abduction
    loc_S = W loc_U                    scale_S = |W| scale_U' + |a| mean(scale_U')  action
    Y ~ Cauchy(w.loc_U + c, |w|.scale_U')                                          its number
    P_k = atan2(scale_S, C + h - loc_S) / pi,     the choice: argmax_k P_k         decision

Names and rules are those of the torch code, see docs/maths.md. The choice is
argmax_k (loc_k - C_k - h) / scale_k in float64, where scales equal to 1e-5 relative count as equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from causal_qwen.decoding.decision import SCALE_FLOOR, SLACK
from causal_qwen.decoding.noise import UNoise
from causal_qwen.numpy_engine.fast import Matrix
from causal_qwen.numpy_engine.weights import Float32, Stored, widen
from causal_qwen.options import (
    NUMERIC_ENCODINGS,
    SCALE_ACTIVATIONS,
    THRESHOLD_CONTEXTS,
    VALUE_SPACES,
    WORD_EDGES,
    check_choice,
)

Float64 = NDArray[np.float64]

MATRICES = ("abduction.loc.weight", "abduction.scale.weight")  # 1 and 0 until training
ABS_FLOOR = 1e-6  # of the scale activation "abs"
LARGEST = np.finfo(np.float64).max


class Cauchy(NamedTuple):
    """Independent Cauchy variables: `loc` and `scale > 0` of one common shape."""

    loc: Float32
    scale: Float32

    def sf(self, threshold: NDArray[np.floating] | float) -> Float64:
        """P(X > threshold), in float64"""
        loc, scale = np.asarray(self.loc, np.float64), np.asarray(self.scale, np.float64)
        return np.arctan2(scale, threshold - loc) / math.pi


@dataclass(frozen=True)
class ValueSpace:
    """Maps Y to a value: v = g^-1(center + spread y), g = symlog or the identity."""

    kind: str = "symlog"
    center: float = 0.0
    spread: float = 1.0

    @classmethod
    def of(cls, fields: Mapping[str, Any], field: str | None = None) -> ValueSpace:
        """The value space of a field in config.json; by default of the field "default", if any."""
        scales = fields.get("value_fields") or {}
        kind = _chosen(fields, "value_space", VALUE_SPACES)
        if field is None:
            return cls(kind, *scales.get("default", (0.0, 1.0)))
        if field not in scales:
            raise ValueError(
                f"field={field!r} is unknown; this model has {', '.join(scales) or 'none'}."
            )
        return cls(kind, *scales[field])

    def decode(self, y: NDArray[Any]) -> Float64:
        """y -> v in float64, clamped to the largest finite double."""
        scaled = self.center + self.spread * np.asarray(y, np.float64)
        with np.errstate(over="ignore"):
            value = symexp(scaled) if self.kind == "symlog" else scaled
        return np.clip(value, -LARGEST, LARGEST)


def symlog(value: Float64) -> Float64:
    """sign(v) ln(1 + |v|)"""
    return np.sign(value) * np.log1p(np.abs(value))


def symexp(value: Float64) -> Float64:
    """The inverse of `symlog`"""
    return np.sign(value) * np.expm1(np.abs(value))


def expected_tensors(fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors that a causal checkpoint adds to Qwen2's."""
    vocabulary, hidden = fields["vocab_size"], fields["hidden_size"]
    latent = fields.get("causal_size") or hidden  # C
    shapes: dict[str, tuple[int, ...]] = {
        "abduction.loc.weight": (latent, hidden),
        "abduction.loc.bias": (latent,),
        "abduction.scale.weight": (latent, hidden),
        "abduction.scale.bias": (latent,),
        "action.b_noise": (latent,),
        "action.decision_noise": (vocabulary,),
        "action.value.weight": (1, latent),
        "action.value.bias": (1,),
        "decision.threshold": (vocabulary,),
        "model.value_direction": (hidden,),
    }
    if fields.get("head_bias", False):
        shapes["lm_head.bias"] = (vocabulary,)
    return shapes


def with_defaults(fields: Mapping[str, Any], tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The causal tensors, 0 where they are missing; W_loc and W_scale may be left out."""
    shapes = expected_tensors(fields).items()
    missing = {n: np.zeros(s, np.float32) for n, s in shapes if n not in (*MATRICES, *tensors)}
    return {**missing, **tensors}


def _chosen(fields: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    """A checked option of config.json; the first choice is the default."""
    return check_choice(name, fields.get(name, choices[0]), choices)


class CausalHeads:
    """Abduction, action and thresholds: from the backbone's z to scores and values."""

    def __init__(
        self, fields: Mapping[str, Any], parameters: Mapping[str, Stored], head: Any
    ) -> None:
        self.activation = _chosen(fields, "scale_activation", SCALE_ACTIVATIONS)
        self.encoding = _chosen(fields, "numeric_encoding", NUMERIC_ENCODINGS)
        self.context = _chosen(fields, "threshold_context", THRESHOLD_CONTEXTS)
        self.head = head  # W (V, C): a `Matrix`, or a `GgufHead`
        self.head_bias = widen(parameters["lm_head.bias"]) if fields.get("head_bias") else None
        loc, scale = (parameters.get(name) for name in MATRICES)  # (C, H) both
        self.loc_bias = widen(parameters["abduction.loc.bias"])
        self.is_plain = loc is None or is_identity(loc, self.loc_bias)  # loc_U = z
        self.loc = None if loc is None or self.is_plain else Matrix(loc)
        self.scale = None if scale is None or not scale.any() else Matrix(scale)
        self.scale_bias = widen(parameters["abduction.scale.bias"])
        self.b_noise = np.abs(widen(parameters["action.b_noise"]))  # (C,)
        self.decision_noise = np.abs(widen(parameters["action.decision_noise"]))  # (V,)
        self.value_weight = widen(parameters["action.value.weight"])[0]  # (C,)
        self.value_bias = widen(parameters["action.value.bias"])[0]
        self.threshold = widen(parameters["decision.threshold"])  # (V,)
        no_edges = np.zeros(len(self.threshold), np.uint8)
        self.word_edges = parameters.get(WORD_EDGES, no_edges).astype(np.uint8)  # (V,) of bits
        self.direction = widen(parameters["model.value_direction"])  # (H,)
        self._norms: Float32 | None = None  # ||W_k||_1, computed on first use
        self.num_token_id: int | None = fields.get("num_token_id")

    @property
    def size(self) -> int:
        """C, the size of an individual."""
        return len(self.b_noise)

    def embed_values(
        self, embeddings: Float32, values: Float64, is_number: NDArray[np.bool_]
    ) -> Float32:
        """Add values to the embeddings of <NUM>. (B, T, H), (B, T), (B, T) -> (B, T, H)"""
        if not is_number.any():
            return embeddings
        numbers = values[is_number]
        enriched = embeddings.copy()
        if self.encoding == "log":
            enriched[is_number] += symlog(numbers).astype(np.float32)[:, None] * self.direction
        else:
            with np.errstate(over="ignore"):
                enriched[is_number] *= (1 / (1 + np.exp(-numbers))).astype(np.float32)[:, None]
        return enriched

    def abduct(self, z: Float32) -> Cauchy:
        """z (..., H) -> U (..., C)"""
        raw = self.scale_bias  # the same in every context, until training
        if self.scale is not None:
            raw = self.scale(z) + raw
        elif z.ndim > 1:
            raw = np.broadcast_to(raw, (*z.shape[:-1], len(raw)))
        if self.activation == "exp":
            with np.errstate(over="ignore"):  # an infinite scale is rejected where it is used
                scale = np.exp(raw)
        elif self.activation == "softplus":
            scale = np.logaddexp(raw, np.float32(0))
        else:
            scale = np.abs(raw) + np.float32(ABS_FLOOR)
        return Cauchy(self.loc_u(z), scale)

    def loc_u(self, z: Float32) -> Float32:
        """(..., H) -> (..., C)"""
        return z if self.loc is None else self.loc(z) + self.loc_bias

    def widen(self, u: Cauchy) -> Cauchy:
        """Scale noise: adds b to scale_U and leaves loc_U unchanged."""
        return Cauchy(u.loc, u.scale + self.b_noise)

    def displacement(self, u: Cauchy, noise: UNoise) -> Float32:
        """The shift of loc_U by noise: scaled by b ("location") or by scale_U ("individual"), plus
        exogenous noise scaled by b. (B, C)"""
        factor = self.b_noise if noise.regime == "location" else u.scale
        moved: Float32 = noise.values.astype(np.float32) * factor
        if noise.exogenous is None:
            return moved
        return moved + noise.exogenous.astype(np.float32) * self.b_noise

    def score(self, loc: Float32) -> Float32:
        """loc_S = W loc_U. (..., C) -> (..., V)"""
        scores = self.head(loc)
        return scores if self.head_bias is None else scores + self.head_bias

    def score_shift(self, shift: Float32) -> Float32:
        """W shift. (B, C) -> (B, V)"""
        largest = np.abs(shift).max(-1, keepdims=True)  # of each row (B, 1)
        size: Float32 = np.maximum(largest, np.finfo(np.float32).tiny)
        return self.head(shift / size) * size

    def score_scale(self, scale: Float32) -> Float32:
        """scale_S of every token, for one position. (C,) -> (V,)"""
        own = self.decision_noise * scale.mean(dtype=np.float64).astype(np.float32)
        return np.maximum(self.head.absolute(scale) + own, np.float32(SCALE_FLOOR))

    def bar(self, scores: Float32) -> Float64 | None:
        """h = logsumexp(loc_S), or None without a bar. (..., V) -> (..., 1)"""
        if self.context == "none":
            return None
        top = scores.max(-1, keepdims=True)
        total: Float64 = np.exp(scores - top).sum(-1, keepdims=True, dtype=np.float64)
        return top + np.log(total)

    def level(self, scores: Float32) -> Float64:
        """C + h, what a score must exceed. (..., V) -> (V,) or (..., V)"""
        bar = self.bar(scores)
        threshold = self.threshold.astype(np.float64)
        return threshold if bar is None else threshold + bar

    def number(self, u: Cauchy) -> Cauchy:
        """Y: the value if the next token is a number. (..., C) -> (...)"""
        scale = np.maximum(u.scale @ np.abs(self.value_weight), np.float32(SCALE_FLOOR))
        return Cauchy(u.loc @ self.value_weight + self.value_bias, scale)

    # ------------------------------------------------------------ as in `decoding.step.Law`

    has_rows = True

    def scale_range(self, scale: Float32) -> tuple[Float32, Float32] | None:
        if self.scale is not None:  # of every context its own: `choose_pruned` is as fast
            return None
        least, most = self._unit_range
        low, high = scale.min(-1, keepdims=True), scale.max(-1, keepdims=True)
        return low * least, high * most

    @cached_property
    def _unit_range(self) -> tuple[np.float32, np.float32]:
        """Of ||W_k||_1 + |a_k|, which conversion makes equal."""
        unit = self.row_norms() + self.decision_noise
        return unit.min() * np.float32(1 - SLACK), unit.max() * np.float32(1 + SLACK)

    def score_scales(self, scale: Float32) -> Float32:
        return np.stack([self.score_scale(row) for row in scale])

    def row_norms(self) -> Float32:
        if self._norms is None:
            self._norms = self.head.row_norms()
        return self._norms

    def absolute(self, scale: Float32, rows: NDArray[np.integer] | None = None) -> Float32:
        return self.head.absolute(scale, rows)

    def rows(self, ids: NDArray[np.integer]) -> Float32:
        return self.head.rows(ids)


def is_identity(weight: Stored, bias: Float32) -> bool:
    """Whether loc_U = z, as before training."""
    return not bias.any() and np.array_equal(weight, np.eye(*weight.shape, dtype=weight.dtype))
