"""Quantization: matrices as int8 with one float32 scale per row, in memory or as a directory.

    W_nk = scale_n q_nk up to rounding,     scale_n = max_k |W_nk| / 127

All matrices of the layers and the head; embeddings stay as stored, so that a tied head becomes one
of its own. Names and config.json are those of compressed-tensors ("int-quantized", strategy
"channel"): X.weight is int8, X.weight_scale its scales (N, 1).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from causal_qwen.numpy_engine.checkpoint import QUANTIZER, ROW_INT8, check_tensors, expected_tensors
from causal_qwen.numpy_engine.fast import Matrix, run, shares, tiles
from causal_qwen.numpy_engine.qwen2 import check_architecture
from causal_qwen.numpy_engine.weights import (
    INDEX,
    LAYER,
    SCALE,
    SINGLE,
    Float32,
    Stored,
    read_json,
    read_tensors,
    widen,
)
from causal_qwen.outputs import OURS, check_not_inside, new_directory

EMBEDDING, HEAD, NOISE = "model.embed_tokens.weight", "lm_head.weight", "action.decision_noise"
CONFIG = "config.json"
OWN = (CONFIG, "README.md", "manifest.json")  # files that describe the model before
LARGEST = 127  # of an int8 weight; -128 is not used
Fields = dict[str, Any]


@dataclass(frozen=True)
class Quantized:
    """What `quantize` wrote."""

    matrices: int
    bytes_before: int  # of all tensors
    bytes_after: int


def quantize_rows(stored: Stored) -> tuple[NDArray[np.int8], Float32]:
    """W (N, K) -> int8 (N, K), scales (N, 1); a row of zeros has the scale 1."""
    words, scales = np.empty(stored.shape, np.int8), np.ones((len(stored), 1), np.float32)

    def work(share: slice) -> None:
        for tile in tiles(share, stored.shape[1]):
            rows = np.array(stored[tile], np.float32)
            largest = np.abs(rows).max(axis=1, keepdims=True)
            np.divide(largest, LARGEST, out=scales[tile], where=largest > 0)
            scales[tile] = _short(scales[tile])
            rows /= scales[tile]
            words[tile] = np.clip(np.rint(rows, out=rows), -LARGEST, LARGEST)

    run([partial(work, share) for share in shares(len(stored))])
    return words, scales


def _short(scales: Float32) -> Float32:
    """Rounded up to 16 significant bits: then scale x int8 is exact in float32."""
    return ((scales.view(np.uint32) + np.uint32(0xFF)) & np.uint32(0xFFFFFF00)).view(np.float32)


def is_quantized(parameters: Mapping[str, Stored]) -> bool:
    return any(name.endswith(SCALE) for name in parameters)


def quantized(fields: Fields, parameters: Mapping[str, Stored]) -> tuple[Fields, dict[str, Stored]]:
    """The fields of config.json and the tensors of the same model in int8."""
    found = {**parameters}
    if fields.get("tie_word_embeddings", False):
        found.setdefault(HEAD, found[EMBEDDING])
    shapes = expected_tensors({**fields, "tie_word_embeddings": False})
    linear = [name for name, shape in shapes.items() if len(shape) == 2 and name != EMBEDDING]
    head, ignored = Matrix(found[HEAD]), []
    for name in linear:
        if name == HEAD or LAYER.search(name):
            found[name], found[name + SCALE] = quantize_rows(found[name])
        else:  # of the causal heads: small, and float32 in every model
            ignored.append(name.removesuffix(".weight"))
    if NOISE in found:
        found[NOISE] = _equalized(found[NOISE], head, Matrix.of(found, HEAD))
    return fields | _config(ignored), found


def _equalized(noise: Stored, before: Matrix, after: Matrix) -> Float32:
    """The decision noise a with which ||W_k||_1 + a_k is what it was, up to one constant for all k.

    Otherwise rounding of W would make scales differ that conversion has made equal. (V,)
    """
    moved = np.abs(widen(noise)) + before.row_norms() - after.row_norms()
    return moved - min(float(moved.min()), 0.0)


def _config(ignored: list[str]) -> Fields:
    scheme = {**ROW_INT8, "dynamic": False}
    return {
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": QUANTIZER,
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
            "ignore": ignored,
        },
    }


def dequantized(
    fields: Fields, parameters: Mapping[str, Stored]
) -> tuple[Fields, dict[str, Stored]]:
    """The same model with float32 weights."""
    found = {name: np.array(widen(stored)) for name, stored in parameters.items()}
    for name in [name for name in found if name.endswith(SCALE)]:
        scales = found.pop(name)
        found[name.removesuffix(SCALE)] *= scales.reshape(-1, 1)
    return {name: value for name, value in fields.items() if name != "quantization_config"}, found


# ---------------------------------------------------------------- directories


def quantize(directory: Path, output: Path, overwrite: bool = False) -> Quantized:
    """Write the model of a directory in int8, with its tokenizer and its settings."""
    check_not_inside(output, directory)
    fields, parameters = read_json(directory / CONFIG), read_tensors(directory)
    if is_quantized(parameters) or fields.get("quantization_config") is not None:
        raise ValueError(f"{directory} is quantised already; pass the model that it was made from.")
    check_architecture(fields)
    check_tensors(fields, parameters, str(directory))
    with new_directory(output, overwrite) as new:
        fields, after = quantized(fields, parameters)
        write_model(new, fields, after)
        copy_companions(directory, new)
    return Quantized(
        matrices=sum(name.endswith(SCALE) for name in after),
        bytes_before=sum(stored.nbytes for stored in parameters.values()),
        bytes_after=sum(stored.nbytes for stored in after.values()),
    )


def write_model(directory: Path, fields: Mapping[str, Any], tensors: Mapping[str, Stored]) -> None:
    whole = {name: np.ascontiguousarray(stored) for name, stored in tensors.items()}
    save_file(whole, directory / SINGLE)
    (directory / CONFIG).write_text(json.dumps(fields, indent=1), encoding="utf-8")


def copy_companions(directory: Path, new: Path) -> None:
    """Tokenizer, chat template and generation settings: all files of a model but its weights."""
    for file in directory.iterdir():
        is_weights = file.suffix == ".safetensors" or file.name == INDEX
        if OURS.fullmatch(file.name) and not is_weights and file.name not in OWN:
            shutil.copyfile(file, new / file.name)
