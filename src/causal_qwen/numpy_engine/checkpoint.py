"""Checkpoint: the tensors that a config.json describes, all of them and finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from causal_qwen.families import is_causal
from causal_qwen.numpy_engine import heads, qwen2
from causal_qwen.numpy_engine.weights import LAYER, SCALE, Stored, check_complete, check_finite

QUANTIZER = "compressed-tensors"  # whose names and config.json `quantize` writes
ROW_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def expected_tensors(fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a Qwen2, Qwen3 or causal checkpoint."""
    config = qwen2.Qwen2Config.from_dict(fields)
    shapes = qwen2.expected_tensors(config, fields.get("causal_size"))
    return shapes | (heads.expected_tensors(fields) if is_causal(fields.get("model_type")) else {})


def check_tensors(fields: Mapping[str, Any], tensors: Mapping[str, Stored], where: str) -> None:
    """Refuse missing tensors, and NaN."""
    shapes = expected_tensors(fields)
    expected = [*shapes]
    if fields.get("quantization_config") is not None:
        check_quantization(fields["quantization_config"])
        linear = [name for name, shape in shapes.items() if len(shape) == 2]
        scaled = [name for name in linear if name == "lm_head.weight" or LAYER.search(name)]
        expected += [name + SCALE for name in scaled]
    check_complete(tensors, expected, where)
    check_finite(tensors, where)


def check_quantization(config: Mapping[str, Any]) -> None:
    """Refuse quantised weights other than int8 with one scale per row."""
    schemes = [group.get("weights") or {} for group in config.get("config_groups", {}).values()]
    is_rows = schemes and all(ROW_INT8.items() <= scheme.items() for scheme in schemes)
    if config.get("quant_method") != QUANTIZER or not is_rows:
        raise ValueError(
            f"quantization_config has quant_method={config.get('quant_method')!r} and format="
            f"{config.get('format')!r}; the NumPy engine reads int8 with one scale per row, which "
            "`causal-qwen quantize` writes."
        )
