"""Random checkpoints of a given shape, for benchmarks, tests and teaching."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from causal_qwen.numpy_engine import heads as causal_heads
from causal_qwen.numpy_engine import qwen2
from causal_qwen.numpy_engine.weights import DTYPES, SINGLE, Float32
from causal_qwen.options import check_choice

KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
POOL_SIZE = 2**22 + 9  # random numbers drawn once; each weight is a slice of them, wrapped around

TINY: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
QWEN_0_5B: dict[str, Any] = {  # Qwen2.5-0.5B
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
QWEN_1_5B: dict[str, Any] = {  # DeepSeek-R1-Distill-Qwen-1.5B
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


def random_checkpoint(
    directory: Path,
    fields: Mapping[str, Any],
    dtype: str = "float32",
    seed: int = 0,
    std: float = 0.02,
    is_causal: bool = False,
    base: str = "qwen2",
) -> Path:
    """Write a checkpoint whose logits have the spread of a trained model.

    `is_causal` adds CausalQwen's heads: W_loc = I, small varied scales, an equal threshold. `base`
    is the architecture, qwen2 or qwen3.
    """
    check_choice("dtype", dtype, KINDS)
    config = {**fields, "model_type": f"causal_{base}" if is_causal else base}
    shape = qwen2.Qwen2Config.from_dict(config)
    shapes = qwen2.expected_tensors(shape)
    heads = causal_heads.expected_tensors(config) if is_causal else {}
    generator = np.random.default_rng(seed)
    pool = generator.standard_normal(POOL_SIZE, dtype=np.float32)

    def draw(name: str, size: tuple[int, ...]) -> Float32:
        if name == "model.norm.weight":  # logits with a standard deviation of about 6
            spread = 6 / (std * math.sqrt(shape.hidden_size))
            return np.full(size, spread, np.float32)
        if name.endswith("norm.weight"):
            return np.ones(size, np.float32)
        if name == "abduction.loc.weight":
            return np.eye(*size, dtype=np.float32)
        constants = {"abduction.scale.bias": -4.0, "action.b_noise": 0.01, "decision.threshold": 20}
        if name in constants:
            return np.full(size, constants[name], np.float32)
        start, count = int(generator.integers(POOL_SIZE)), math.prod(size)
        wrapped = np.resize(np.roll(pool, -start), count) if count > POOL_SIZE - start else None
        values = pool[start : start + count] if wrapped is None else wrapped
        return values.reshape(size) * np.float32(std)

    directory.mkdir(parents=True, exist_ok=True)
    kinds = dict.fromkeys(shapes, KINDS[dtype]) | dict.fromkeys(heads, "F32")
    header, end = {}, 0
    for name, size in {**shapes, **heads}.items():
        start, end = end, end + math.prod(size) * np.dtype(DTYPES[kinds[name]]).itemsize
        header[name] = {"dtype": kinds[name], "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)  # align tensors to cache lines
    with (directory / SINGLE).open("wb") as file:
        file.write((len(text)).to_bytes(8, "little") + text)
        for name, size in {**shapes, **heads}.items():
            values = draw(name, size)
            values.astype(DTYPES[kinds[name]]).tofile(file)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
