"""Export: a causal model -> a plain checkpoint of its base architecture, or a GGUF file.

Both keep the location path alone: loc_S = W (W_loc z + b_loc) + bias becomes one head W' z.
W' = W W_loc is exact. Plain heads have no bias, so a constant beta = W b_loc + bias is added as
beta v.z with v.z close to 1: v is fitted on the model's states along the built-in texts, and the
report says how far the logits moved.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from causal_qwen.backbones import base_class
from causal_qwen.conversion.calibration import read_texts
from causal_qwen.conversion.checkpoint_io import assemble, encode_texts, quiet
from causal_qwen.conversion.convert import compare_logits
from causal_qwen.conversion.opening import open_model
from causal_qwen.decoding.settings import DEFAULTS
from causal_qwen.generation.mixin import adopt_generation_config
from causal_qwen.modeling.configuration import NOT_INHERITED, CausalConfig
from causal_qwen.numpy_engine.calibration import TEXTS
from causal_qwen.numpy_engine.heads import expected_tensors as causal_tensors
from causal_qwen.options import (
    EXPORT_FORMATS,
    GGUF_TYPES,
    PLAIN_TYPES,
    WORD_EDGES,
    check_choice,
)
from causal_qwen.outputs import check_not_inside, new_directory

SHRINKAGE = 1e-3  # of the states' second moments, when a constant is fitted to them
LOST = (
    "scales of U and of the scores, decision noise",
    "thresholds: P_k, and the modes standard, sampling and causal",
    "the number head and numbers read as values",
)


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how closely its logits agree with loc_S."""

    format: str
    architecture: str
    files: tuple[str, ...]
    is_folded: bool  # W_loc was not the identity: the head is W W_loc, no longer tied
    max_logit_difference: float
    same_choices: float  # share of positions with the same best token
    positions: int
    lost: tuple[str, ...]


def export(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    to: str = "plain",
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> ExportReport:
    """Write `model`, a converted directory, to `output`: `to="plain"` or `to="gguf"`.

    `dtype` is f32, f16 or q8_0 for GGUF, and float32, bfloat16 or float16 for plain checkpoints;
    by default f16 and the model's own.
    """
    check_choice("to", to, EXPORT_FORMATS)
    if dtype is not None:
        check_choice("dtype", dtype, PLAIN_TYPES if to == "plain" else GGUF_TYPES)
    check_not_inside(output, model)
    progress("loading the model")
    processor, causal = open_model(model)
    texts = encode_texts(processor.tokenizer, TEXTS)
    progress("folding W_loc into the head")
    plain = plain_model(causal, texts)
    difference, same, _, positions = compare_logits(causal, plain, texts)
    kind = type(plain).__name__
    with new_directory(Path(output), overwrite) as directory:
        progress("writing")
        if to == "plain":
            plain.to(getattr(torch, dtype) if dtype else plain.dtype)
            with quiet():
                plain.save_pretrained(directory)
            processor.tokenizer.save_pretrained(directory)
        else:
            from causal_qwen.conversion.gguf_file import write_gguf

            write_gguf(plain, processor.tokenizer, directory, dtype or "f16")
        written = tuple(sorted(path.name for path in directory.iterdir()))
    return ExportReport(to, kind, written, is_folded(causal), difference, same, positions, LOST)


@torch.no_grad()
def plain_model(causal: Any, texts: list[Tensor]) -> Any:
    """The base architecture's own model with the causal model's loc_S as logits."""
    config, kind = causal.config, base_class(causal.config.family)
    own = {field.name for field in fields(CausalConfig)} | {*NOT_INHERITED}
    plain_fields = {name: value for name, value in config.to_dict().items() if name not in own}
    heads = {*causal_tensors(config.to_dict()), WORD_EDGES, "lm_head.bias"}
    state = {name: tensor for name, tensor in causal.state_dict().items() if name not in heads}
    if is_folded(causal):
        plain_fields["tie_word_embeddings"] = False
        state["lm_head.weight"] = folded_head(causal, texts)
    elif config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    plain_config = kind.config_class(**plain_fields)
    plain = assemble(kind.from_pretrained, plain_config, state, causal.dtype).eval()
    plain.generation_config = _plain_generation_config(causal.generation_config)
    return plain


def is_folded(causal: Any) -> bool:
    """Whether a plain head differs from W: W_loc is trained, or C is not H."""
    return not causal.is_plain() or causal.config.latent_size != causal.config.hidden_size


def folded_head(causal: Any, texts: list[Tensor]) -> Tensor:
    """W W_loc, plus a constant of the scores as well as a linear head can say it. -> (V, H)"""
    weight, loc = causal.lm_head.weight.double(), causal.abduction.loc
    head = weight @ loc.weight.double()
    beta = weight @ loc.bias.double()
    if causal.lm_head.bias is not None:  # added after the family's division
        beta = beta + causal.lm_head.bias.double() * causal.config.logit_divisor
    if bool(beta.any()):
        head = head + torch.outer(beta, _constant_direction(causal, texts))
    return head.to(causal.lm_head.weight.dtype)


def _constant_direction(causal: Any, texts: list[Tensor]) -> Tensor:
    """v with v.z close to 1 at the states of texts: least squares, a little shrunk. -> (H,)"""
    z = read_texts(causal, texts).double()  # (N, H)
    moments = z.T @ z / len(z)
    shrunk = moments + SHRINKAGE * moments.diagonal().mean() * torch.eye(len(moments)).to(z)
    return torch.linalg.solve(shrunk, z.mean(0))


def _plain_generation_config(config: Any) -> Any:
    copied = adopt_generation_config(config)
    for name in DEFAULTS:  # settings of the modes
        if hasattr(copied, name):
            delattr(copied, name)
    return copied
