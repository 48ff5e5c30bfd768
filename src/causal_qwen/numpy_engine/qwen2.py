"""Qwen2 and Qwen3 in NumPy, from token ids to logits, top to bottom.

    ids -> embedding -> [ x + attention(norm(x)) -> x + mlp(norm(x)) ] per layer -> norm -> head

Legend: B batch, T tokens read now, S tokens seen so far (the cache's length), H hidden size,
I intermediate size, V vocabulary, Q query heads, K key-value heads, G = Q/K query heads to each of
them, D size of a head.

Qwen3 has no biases, and normalises queries and keys head by head before they are rotated.
Everything is float32, except cos and sin of the rotary angles (float64). Long inputs are processed
in blocks, so no (T, T) array is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from causal_qwen.decoding.settings import context_length
from causal_qwen.numpy_engine.fast import (
    LOWEST,
    Kernel,
    Matrix,
    attend,
    blas_alone,
    can_compile,
    is_masked,
    project,
    softmax_in_place,
    swiglu,
)
from causal_qwen.numpy_engine.weights import Float32, Stored, widen
from causal_qwen.options import check_choice

Ints = NDArray[np.int64]
Observer = Callable[[str, Float32], None]

BLOCK = 512  # tokens processed together by all layers
QWEN3 = ("qwen3", "causal_qwen3")
MODEL_TYPES = ("qwen2", "causal_qwen2", *QWEN3)
QWEN3_HEAD_DIM = 128  # of config.json without head_dim
ROPE_TYPES = ("default", "yarn", "llama3")


# ---------------------------------------------------------------- the model's shape


@dataclass(frozen=True)
class Qwen2Config:
    """The architecture, with the field names of config.json."""

    vocab_size: int  # V
    hidden_size: int  # H
    intermediate_size: int  # I
    num_hidden_layers: int
    num_attention_heads: int  # Q
    num_key_value_heads: int  # K
    head_dim: int  # D
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = False
    rope: dict[str, Any] = field(default_factory=dict)
    is_qwen3: bool = False  # queries and keys are normalised, and there are no biases

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Qwen2Config:
        """From config.json; defaults are those of Hugging Face."""
        check_architecture(fields)
        if lacking := [name for name in _SIZES if not fields.get(name)]:
            raise ValueError(f"config.json has no {lacking[0]}; use that of the model.")
        sizes = {name: int(fields[name]) for name in _SIZES}
        heads = sizes["num_attention_heads"]
        longest = int(fields.get("max_position_embeddings") or 32_768)
        is_qwen3 = fields.get("model_type") in QWEN3
        head_dim = QWEN3_HEAD_DIM if is_qwen3 else sizes["hidden_size"] // heads
        return cls(
            **sizes,
            num_key_value_heads=int(fields.get("num_key_value_heads") or heads),
            head_dim=int(fields.get("head_dim") or head_dim),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=longest,
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            rope=_rope_fields(fields),
            is_qwen3=is_qwen3,
        )

    @property
    def context(self) -> int:
        """Context length, RoPE scaling included."""
        return context_length(self.max_position_embeddings, self.rope)


def check_architecture(fields: Mapping[str, Any]) -> None:
    model_type = fields.get("model_type", "qwen2")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"The checkpoint has the architecture {model_type!r}; this engine runs Qwen2 and Qwen3 "
            "(`causal-qwen convert --merge` turns Llama models into Qwen2)."
        )
    if model_type in QWEN3 and fields.get("attention_bias"):
        raise ValueError("attention_bias=True: this engine runs Qwen3 without biases.")
    if fields.get("use_sliding_window"):
        raise ValueError("use_sliding_window=True: this engine has no windows; use torch.")
    if (activation := fields.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act={activation!r} is unknown; Qwen2's is 'silu'.")


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads"),
)


def _rope_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE fields of old (rope_theta, rope_scaling) and new checkpoints."""
    rope = dict(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    rope.setdefault("rope_theta", fields.get("rope_theta", 10_000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    check_choice("rope_type", rope["rope_type"], ROPE_TYPES)
    if rope.get("mscale") or rope.get("mscale_all_dim") or rope.get("truncate") is False:
        raise ValueError("config.json scales RoPE by mscale or without truncation; use torch.")
    return rope


# ---------------------------------------------------------------- the parts


def rms_norm(hidden_states: Float32, weight: Float32, eps: float = 1e-6) -> Float32:
    """x / sqrt(mean(x^2) + eps) * weight: (..., H)"""
    if hidden_states.size == hidden_states.shape[-1]:  # one position: no temporaries
        flat = hidden_states.reshape(-1)
        scale = 1 / math.sqrt(float(flat @ flat) / flat.size + eps)
        return np.float32(scale) * hidden_states * weight
    mean = np.vecdot(hidden_states, hidden_states)[..., None] / np.float32(hidden_states.shape[-1])
    return hidden_states * (1 / np.sqrt(mean + np.float32(eps))) * weight


def rotate_half(x: Float32) -> Float32:
    """(x1, x2) -> (-x2, x1): each coordinate of the first half is paired with one of the second."""
    half = x.shape[-1] // 2
    return np.concatenate((-x[..., half:], x[..., :half]), axis=-1)


def apply_rotary_pos_emb(
    q: Float32, k: Float32, cos: Float32, sin: Float32
) -> tuple[Float32, Float32]:
    """Rotate every pair by its angle: (a, b) -> (a cos - b sin, b cos + a sin). (..., T, D)"""
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def inverse_frequencies(rope: Mapping[str, Any], size: int, longest: int) -> tuple[Float32, float]:
    """theta^(-2i/D) for every pair i, scaled; and the factor on cos and sin. -> (D/2,)"""
    exponents = np.arange(0, size, 2).astype(np.float32) / np.float32(size)
    wavelengths = (float(rope["rope_theta"]) ** exponents.astype(np.float64)).astype(np.float32)
    inverse = np.float32(1) / wavelengths  # over 2 pi
    trained = rope.get("original_max_position_embeddings", longest)
    if rope["rope_type"] == "yarn":
        return _yarn(rope, size, trained, wavelengths)
    if rope["rope_type"] == "llama3":
        inverse = _llama3(rope, trained, inverse)
    return inverse, 1.0


def _yarn(
    rope: Mapping[str, Any], size: int, trained: int, wavelengths: Float32
) -> tuple[Float32, float]:
    """Long waves are stretched by `factor`, short ones stay, with a ramp between the two."""
    factor, theta = rope["factor"], float(rope["rope_theta"])

    def pair_that_turns(times: float) -> float:
        return size * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(rope.get("beta_fast") or 32)), 0)
    high: float = min(math.ceil(pair_that_turns(rope.get("beta_slow") or 1)), size - 1)
    high = high + 0.001 if low == high else high
    ramp = (np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = 1 - np.clip(ramp, 0, 1)  # 1: as trained, 0: stretched
    stretched = np.float32(1) / (np.float32(factor) * wavelengths)
    inverse = stretched * (1 - kept) + np.float32(1) / wavelengths * kept
    attention = rope.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return inverse, float(attention)


def _llama3(rope: Mapping[str, Any], trained: int, inverse: Float32) -> Float32:
    """Waves longer than the trained context are stretched, short ones stay, smoothly between."""
    factor, low, high = (rope[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = trained * inverse.astype(np.float64) / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return ((1 - kept) * inverse / factor + kept * inverse).astype(np.float32)


class RotaryEmbedding:
    """cos and sin of position x frequency."""

    def __init__(self, config: Qwen2Config) -> None:
        self.frequencies, self.attention = inverse_frequencies(
            config.rope, config.head_dim, config.max_position_embeddings
        )

    def __call__(self, positions: Ints) -> tuple[Float32, Float32]:
        """(B, T) -> cos, sin (B, 1, T, D), the same for all heads"""
        angles = positions.astype(np.float32)[:, None, :, None] * self.frequencies
        angles = np.concatenate((angles, angles), axis=-1).astype(np.float64)
        cos, sin = self.attention * np.cos(angles), self.attention * np.sin(angles)
        return cos.astype(np.float32), sin.astype(np.float32)


def repeat_kv(hidden_states: Float32, n_rep: int) -> Float32:
    """Every key-value head for each of its query heads. (B, K, S, D) -> (B, K n_rep, S, D)"""
    return np.repeat(hidden_states, n_rep, axis=1)


def attention_forward(
    query: Float32,
    key: Float32,
    value: Float32,
    attention_mask: Float32 | None,
    scaling: float,
    num_key_value_groups: int,
) -> tuple[Float32, Float32]:
    """softmax(Q K^T scaling + mask) V by definition: whole arrays, repeated keys.

    query (B, Q, T, D), key and value (B, K, S, D), mask (1, 1, T, S) or None for none
    -> (B, T, Q, D), and the weights (B, Q, T, S). `attend` computes the same in blocks.
    """
    keys = repeat_kv(key, num_key_value_groups)  # (B, Q, S, D)
    values = repeat_kv(value, num_key_value_groups)
    scores = query @ keys.swapaxes(-1, -2) * np.float32(scaling)  # (B, Q, T, S)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = softmax_in_place(scores)
    return (weights @ values).swapaxes(1, 2), weights


def causal_mask(new: int, seen: int) -> Float32:
    """0 where the i-th of the `new` last positions may attend, the lowest float elsewhere.
    -> (1, 1, T, S)"""
    mask: Float32 = np.where(is_masked(new, seen), LOWEST, np.float32(0))
    return mask[None, None]


# ---------------------------------------------------------------- the model


class KeyValueCache:
    """Keys and values of every layer and position, so that each token is processed once.

    In memory, the numbers of one coordinate stand side by side, (B, K, D, S): products of one
    position then read long rows, which BLAS divides among its threads.
    """

    def __init__(self, config: Qwen2Config, batch: int = 1, capacity: int = 256) -> None:
        shape = (batch, config.num_key_value_heads, config.head_dim, capacity)
        self.keys = [np.empty(shape, np.float32) for _ in range(config.num_hidden_layers)]
        self.values = [np.empty(shape, np.float32) for _ in range(config.num_hidden_layers)]
        self.length = 0  # S

    def append(self, layer: int, key: Float32, value: Float32) -> tuple[Float32, Float32]:
        """Append (B, K, T, D). -> views of all keys, all values (B, K, S, D)"""
        end = self.length + key.shape[2]
        for table, new in ((self.keys, key), (self.values, value)):
            old = table[layer]
            if end > old.shape[3]:  # double: the total cost of copying stays linear
                wider = np.empty((*old.shape[:3], max(2 * old.shape[3], end)), np.float32)
                wider[..., : self.length] = old[..., : self.length]
                table[layer] = wider
            table[layer][..., self.length : end] = new.swapaxes(2, 3)
        keys, values = self.keys[layer][..., :end], self.values[layer][..., :end]
        return keys.swapaxes(2, 3), values.swapaxes(2, 3)


@dataclass
class Layer:
    """One layer's weights."""

    input_norm: Float32  # (H,)
    query: Matrix  # (Q D, H)
    key: Matrix  # (K D, H)
    value: Matrix
    output: Matrix  # (H, Q D)
    post_norm: Float32  # (H,)
    gate: Matrix  # (I, H)
    up: Matrix
    down: Matrix  # (H, I)
    query_bias: Float32 | None = None  # (Q D,)
    key_bias: Float32 | None = None  # (K D,)
    value_bias: Float32 | None = None
    query_norm: Float32 | None = None  # (D,)
    key_norm: Float32 | None = None


def layer_tensors(config: Qwen2Config) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Field of `Layer` -> its name in a checkpoint, and its shape."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "input_norm": ("input_layernorm.weight", (hidden,)),
        "query": ("self_attn.q_proj.weight", (queries, hidden)),
        "key": ("self_attn.k_proj.weight", (keys, hidden)),
        "value": ("self_attn.v_proj.weight", (keys, hidden)),
        "output": ("self_attn.o_proj.weight", (hidden, queries)),
        "post_norm": ("post_attention_layernorm.weight", (hidden,)),
        "gate": ("mlp.gate_proj.weight", (inner, hidden)),
        "up": ("mlp.up_proj.weight", (inner, hidden)),
        "down": ("mlp.down_proj.weight", (hidden, inner)),
    }
    if config.is_qwen3:
        for name in ("query", "key"):
            found[f"{name}_norm"] = (f"self_attn.{name[0]}_norm.weight", (size,))
    else:
        for name, width in {"query": queries, "key": keys, "value": keys}.items():
            found[f"{name}_bias"] = (f"self_attn.{name[0]}_proj.bias", (width,))
    return found


def expected_tensors(
    config: Qwen2Config, head_size: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint; the head reads `head_size` (H)."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        parts = layer_tensors(config).values()
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, head_size or hidden)
    return shapes


class Qwen2:
    """The backbone and its head: ids -> hidden states -> logits."""

    def __init__(self, config: Qwen2Config, parameters: Mapping[str, Stored]) -> None:
        self.config = config
        self.rotary = RotaryEmbedding(config)
        self.embedding = Matrix.of(parameters, "model.embed_tokens.weight")  # (V, H)
        self.norm = widen(parameters["model.norm.weight"])  # (H,)
        self.head = self.embedding  # (V, H)
        if "lm_head.weight" in parameters:  # also of a tied checkpoint, as in transformers
            self.head = Matrix.of(parameters, "lm_head.weight")

        def read(name: str, shape: tuple[int, ...]) -> Any:
            return Matrix.of(parameters, name) if len(shape) == 2 else widen(parameters[name])

        self.layers = [
            Layer(
                **{
                    field: read(f"model.layers.{layer}.{name}", shape)
                    for field, (name, shape) in layer_tensors(config).items()
                }
            )
            for layer in range(config.num_hidden_layers)
        ]
        self.is_float32 = all(matrix.stored.dtype == np.float32 for matrix in self._matrices())

    def _matrices(self) -> list[Matrix]:
        parts = (value for layer in self.layers for value in vars(layer).values())
        return [self.head, *(part for part in parts if isinstance(part, Matrix))]

    def use(self, kernel: Kernel | None) -> None:
        """Multiply int8 and bfloat16 weights by a compiled kernel, or (None) by NumPy."""
        for matrix in self._matrices():
            if can_compile(matrix.stored):
                matrix.kernel = kernel

    def limit_blas(self, positions: int) -> AbstractContextManager[None]:
        """BLAS has one thread while others divide the work: see `Matrix`."""
        return nullcontext() if self.is_float32 and positions == 1 else blas_alone()

    def embed(self, ids: Ints) -> Float32:
        """(B, T) -> (B, T, H)"""
        if len(strange := ids[(ids < 0) | (ids >= self.config.vocab_size)]):
            raise ValueError(
                f"Token id {strange[0]} is outside the vocabulary of {self.config.vocab_size}: "
                "use this model's tokenizer."
            )
        return self.embedding.rows(ids)

    def forward(
        self,
        embeddings: Float32,
        cache: KeyValueCache,
        observe: Observer | None = None,
        block: int | None = None,
    ) -> Float32:
        """Process (B, T, H) after the cached tokens. -> hidden states (B, T, H), normed

        `observe(name, array)` receives the embedding, every layer's attention weights (B, Q, T, S)
        and output, and the final norm's, block by block.
        """
        total = cache.length + embeddings.shape[1]
        if total > self.config.context:
            raise ValueError(
                f"{total} tokens exceed this model's context of {self.config.context}; "
                "shorten the prompt."
            )
        block = BLOCK if block is None else block
        with self.limit_blas(embeddings.shape[0] * embeddings.shape[1]):
            blocks = [
                self._read(embeddings[:, start : start + block], cache, observe)
                for start in range(0, embeddings.shape[1], block)
            ]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)

    def _read(self, x: Float32, cache: KeyValueCache, observe: Observer | None) -> Float32:
        """One block. (B, T, H) -> (B, T, H)"""
        eps, end = self.config.rms_norm_eps, cache.length + x.shape[1]
        cos, sin = self.rotary(np.arange(cache.length, end)[None])
        if observe is not None:
            observe("embedding", x)
        for index, layer in enumerate(self.layers):
            normed = rms_norm(x, layer.input_norm, eps)  # (B, T, H)
            q, k, v = self._heads(layer, normed)  # (B, Q, T, D), (B, K, T, D) twice
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            keys, values = cache.append(index, k, v)  # (B, K, S, D)
            mixed = attend(q, keys, values)  # (B, T, Q D)
            x = x + layer.output(mixed)
            normed = rms_norm(x, layer.post_norm, eps)
            gate, up = project(normed, layer.gate, layer.up)  # (B, T, I)
            x = x + layer.down(swiglu(gate, up))
            if observe is not None:
                observe(f"attention.{index}", self._weights(q, keys, values))
                observe(f"layer.{index}", x)
        cache.length = end
        z = rms_norm(x, self.norm, eps)
        if observe is not None:
            observe("norm", z)
        return z

    def _heads(self, layer: Layer, normed: Float32) -> tuple[Float32, Float32, Float32]:
        """Queries, keys and values, head by head. (B, T, H) -> (B, Q or K, T, D)"""
        batch, new, _ = normed.shape
        q, k, v = project(normed, layer.query, layer.key, layer.value)
        biases = (layer.query_bias, layer.key_bias, layer.value_bias)
        for x, bias in zip((q, k, v), biases, strict=True):
            if bias is not None:
                x += bias
        q, k, v = (
            x.reshape(batch, new, -1, self.config.head_dim).swapaxes(1, 2) for x in (q, k, v)
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            eps = self.config.rms_norm_eps
            q, k = rms_norm(q, layer.query_norm, eps), rms_norm(k, layer.key_norm, eps)
        return q, k, v

    def _weights(self, q: Float32, keys: Float32, values: Float32) -> Float32:
        """The attention weights of the positions just read. -> (B, Q, T, S)"""
        mask = causal_mask(q.shape[2], keys.shape[2])
        groups = q.shape[1] // keys.shape[1]
        return attention_forward(q, keys, values, mask, self.config.head_dim**-0.5, groups)[1]

    def logits(self, z: Float32) -> Float32:
        """(..., H) -> (..., V)"""
        return self.head(z)


def greedy_decode(
    input_ids: ArrayLike,
    all_parameters: Mapping[str, Stored],
    config: Mapping[str, Any] | Qwen2Config,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
) -> Ints:
    """Greedy decoding. (T,) or (B, T) -> the same with the new tokens

    `all_parameters` maps names to a checkpoint's tensors; `vocab_size` is read from their shapes if
    `config` lacks it. Stops early only if `eos_token_id` is given and every row has generated it.
    """
    if not isinstance(config, Qwen2Config):
        vocabulary = all_parameters["model.embed_tokens.weight"].shape[0]
        tied = "lm_head.weight" not in all_parameters
        found = {"vocab_size": vocabulary, "tie_word_embeddings": tied}
        config = Qwen2Config.from_dict({**found, **config})
    model = Qwen2(config, all_parameters)
    ids = np.atleast_2d(np.asarray(input_ids, np.int64))
    stops = np.atleast_1d([] if eos_token_id is None else eos_token_id)
    cache = KeyValueCache(config, len(ids), ids.shape[1] + max_new_tokens)
    new, is_done = ids, np.zeros(len(ids), bool)
    for _ in range(max_new_tokens):
        z = model.forward(model.embed(new), cache)
        new = model.logits(z[:, -1]).argmax(-1)[:, None]
        ids = np.concatenate((ids, new), axis=1)
        is_done |= np.isin(new[:, 0], stops)
        if is_done.all():
            break
    return ids[0] if np.ndim(input_ids) == 1 else ids
