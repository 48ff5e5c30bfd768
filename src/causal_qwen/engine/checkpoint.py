"""Checkpoint: the tensors that a config.json describes, checked before anything is built.

Both engines use it: the NumPy engine on the tensors that it maps, conversion on the headers of
the files that torch is about to load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from causal_qwen.engine import heads, qwen2
from causal_qwen.engine.weights import (
    LAYER,
    SCALE,
    Stored,
    check_finite,
    check_shapes,
    check_tied,
    listed,
)
from causal_qwen.families import is_causal
from causal_qwen.options import WORD_EDGES
from causal_qwen.terminal import counted

CAUSAL, LLAMA = "causal_qwen2", "llama"
SHAPE_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
)
POSITIVE = ("rms_norm_eps", "rope_theta", "factor")  # numbers, at the top or of the rotation
ROTATIONS = ("rope_parameters", "rope_scaling")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "num_token_id")
MOST_IDS = 2**31
QUANTIZER = "compressed-tensors"  # whose names and config.json `quantize` writes
ROW_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
LARGEST = float(np.finfo(np.float32).max)
Shapes = Mapping[str, tuple[int, ...]]


def check_tensors(fields: Mapping[str, Any], tensors: Mapping[str, Stored], where: str) -> None:
    """`check_checkpoint`, then the values: finite, and a tied head that is the embeddings."""
    check_checkpoint(fields, {name: stored.shape for name, stored in tensors.items()}, where)
    check_finite(tensors, where)
    if fields.get("tie_word_embeddings", False):
        check_tied(tensors, where)


def check_checkpoint(fields: Mapping[str, Any], shapes: Shapes, where: str) -> None:
    """Refuse tensors (name -> shape) that are not those of config.json's fields.

    The number of layers is compared first: then no size of a damaged config.json leads to work
    or memory beyond what the file's own tensors need.
    """
    check_numbers(fields)
    check_layers(fields, shapes, where)
    expected = expected_tensors(fields)
    if fields.get("quantization_config") is not None:
        check_quantization(fields["quantization_config"])
        matrices = {
            name: shape
            for name, shape in expected.items()
            if len(shape) == 2
            and name + SCALE in shapes
            and (name == "lm_head.weight" or LAYER.search(name))
        }
        expected |= {name + SCALE: (shape[0], 1) for name, shape in matrices.items()}
    expected |= found_optional(fields, shapes)
    check_shapes(shapes, expected, where)
    # A tied head may be stored; old checkpoints hold the rotary frequencies, which are computed.
    known = {*expected, "lm_head.weight"}
    strange = [n for n in shapes if n not in known and not n.endswith("rotary_emb.inv_freq")]
    if strange:
        raise ValueError(
            f"{where} has {listed(strange)}, which its configuration does not describe; download "
            "it again."
        )


def check_quantization(config: Mapping[str, Any]) -> None:
    """Refuse quantised weights other than int8 with one scale per row."""
    groups = config.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    schemes = [group.get("weights") if isinstance(group, Mapping) else None for group in groups]
    is_known = config.get("format") in ("int-quantized", "naive-quantized") and all(
        isinstance(scheme, Mapping) and ROW_INT8.items() <= scheme.items() for scheme in schemes
    )
    if config.get("quant_method") != QUANTIZER or not schemes or not is_known:
        raise ValueError(
            f"quantization_config has quant_method={config.get('quant_method')!r} and format="
            f"{config.get('format')!r}; the NumPy engine reads int8 with one scale per row, which "
            "`causal-qwen quantize` writes."
        )


def check_numbers(fields: Mapping[str, Any]) -> None:
    """Refuse numbers of config.json with which every hidden state would be NaN or 0."""
    rotations = [fields[name] for name in ROTATIONS if isinstance(fields.get(name), Mapping)]
    for given in (fields, *rotations):
        for name in POSITIVE:
            value = given.get(name, 1)
            if value is None and name != "rms_norm_eps":  # the default
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value <= LARGEST):
                raise ValueError(f"{name}={value!r:.40} must be a finite number above 0.")
    check_token_ids(fields)


def check_token_ids(fields: Mapping[str, Any]) -> None:
    """Refuse ids of tokens, in config.json or generation_config.json, that are no whole numbers.
    A text may end with several tokens; -1 is a padding that is no token."""
    for name in TOKEN_IDS:
        value = fields.get(name)
        ids = value if name == "eos_token_id" and isinstance(value, list) else [value]
        for one in ids if value is not None else ():
            if not isinstance(one, int) or isinstance(one, bool) or not -1 <= one < MOST_IDS:
                raise ValueError(f"{name}={value!r:.40} must be the id of a token, or null.")


def check_layers(fields: Mapping[str, Any], shapes: Shapes, where: str) -> None:
    layers = len({found[1] for name in shapes if (found := LAYER.search(name))})
    if fields.get("num_hidden_layers") != layers:
        raise ValueError(
            f"{where} has num_hidden_layers={fields.get('num_hidden_layers')!r} and weights of "
            f"{counted(layers, 'layer')}; download it again."
        )


def has_expected_tensors(fields: Mapping[str, Any]) -> bool:
    """Whether the names and shapes of this architecture's tensors are known here."""
    return fields.get("model_type", CAUSAL) in (*qwen2.MODEL_TYPES, LLAMA)


def expected_tensors(fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a Qwen2, Qwen3, Llama or causal checkpoint."""
    names = ("model_type", *SHAPE_FIELDS) if fields.get("model_type") != LLAMA else SHAPE_FIELDS
    given = {name: fields[name] for name in names if name in fields}
    shapes = qwen2.expected_tensors(qwen2.Qwen2Config.from_dict(given), fields.get("causal_size"))
    if fields.get("model_type") == LLAMA:  # Qwen2 without biases
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(".bias")}
    if is_causal(fields.get("model_type")):
        shapes |= heads.expected_tensors(fields)
    return shapes


def check_words(
    saved: Mapping[str, Any], fields: Mapping[str, Any], names: Any, where: str
) -> None:
    """A model that keeps words whole has the tensor that tells them: without it, individuals would
    speak differently, in silence."""
    if saved.get("whole_words") and is_causal(fields.get("model_type")) and WORD_EDGES not in names:
        raise ValueError(
            f"{where} has no {WORD_EDGES}, which whole_words in generation_config.json needs; "
            "restore the weights, or convert the model again."
        )


def found_optional(fields: Mapping[str, Any], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Name -> expected shape of tensors that a causal checkpoint may lack, and this one has."""
    if not is_causal(fields.get("model_type")):
        return {}
    optional = heads.optional_tensors(fields)
    return {name: shape for name, shape in optional.items() if name in shapes}
