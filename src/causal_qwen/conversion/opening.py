"""Opening: the name of a model -> its processor and torch model.

    merged directory       what it holds
    base                   with its layer in the cache, made at the first use
    causal layer           with the base that it names

`layer_of` is the way back.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields as fields_of
from typing import Any

import numpy as np
import torch

from causal_qwen.conversion.checkpoint_io import (
    as_convertible,
    family_of_model,
    load_base,
    load_tokenizer,
    local_directory,
    quiet,
    read_fields,
)
from causal_qwen.conversion.convert import class_for, convert_model, graft
from causal_qwen.conversion.placement import resolve_device, resolve_dtype
from causal_qwen.families import is_causal, text_fields
from causal_qwen.generation.mixin import adopt_generation_config
from causal_qwen.layer import CausalLayer, files_of, fingerprint, is_gguf, is_layer, kept_layer
from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.configuration import CausalConfig
from causal_qwen.modeling.processor import CausalQwenProcessor, install_number_token
from causal_qwen.numpy_engine.calibration import DEFAULTS
from causal_qwen.numpy_engine.heads import MATRICES, expected_tensors
from causal_qwen.options import WORD_EDGES

Progress = Callable[[str], None]
OWN = tuple(field.name for field in fields_of(CausalConfig))
PER_TOKEN = ("action.decision_noise", "decision.threshold", "lm_head.bias", WORD_EDGES)
GENERATION = (*DEFAULTS, "noise_gain", "fresh_noise_gain")


def open_model(
    path: str | os.PathLike[str],
    device: str = "cpu",
    dtype: str = "auto",
    progress: Progress = lambda _: None,
) -> tuple[CausalQwenProcessor, Any]:
    """A model of any kind for inference, on a device and in a dtype."""
    if (found := unmerged(str(path))) is not None:
        return open_base(*found, device, dtype, progress)
    progress("loading the model")
    place, kind = resolve_device(device), resolve_dtype(dtype)
    directory = local_directory(path)
    with quiet():
        model = CausalQwenForCausalLM.from_pretrained(path, dtype=kind).eval().to(place)
        if not (directory / "tokenizer.json").exists():
            raise ValueError(
                f"{path} has no tokenizer; copy the base model's tokenizer files there."
            )
        processor = CausalQwenProcessor.from_pretrained(path)
        processor.check(model.config)
    return processor, model


def unmerged(model: str) -> tuple[str, CausalLayer | None] | None:
    """A base and its layer, if it is given; None for a merged directory."""
    if is_layer(model):
        layer = CausalLayer.load(model)
        return layer.base, layer
    if is_gguf(model):
        return model, None
    fields = read_fields(model, {})
    return None if is_causal(text_fields(fields).get("model_type")) else (model, None)


def open_base(
    base: str,
    layer: CausalLayer | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    progress: Progress = lambda _: None,
) -> tuple[CausalQwenProcessor, Any]:
    """A base model with its layer: by default the one in the cache, made at the first use."""
    files, kind = files_of(base), resolve_dtype(dtype)
    if layer is None:
        layer = kept_layer(fingerprint(files))
    else:
        layer.check_base(files)
    progress("loading the base model")
    qwen, tokenizer = load_base(base, None if kind == "auto" else kind), load_tokenizer(base)
    if tokenizer is None:
        raise ValueError(f"{base} has no tokenizer; copy the base model's tokenizer files there.")
    if layer is None:
        model = _converted(qwen, tokenizer, progress)
        layer_of(model, base, qwen.config.vocab_size).keep()
    else:
        model = with_layer(qwen, layer, tokenizer)
    return CausalQwenProcessor(tokenizer), model.eval().to(resolve_device(device))


def make_layer(base: str, progress: Progress = lambda _: None, **options: Any) -> CausalLayer:
    """Calibrate a base model; options are those of `convert_model`."""
    progress("loading the base model")
    qwen = load_base(base)
    model = _converted(qwen, load_tokenizer(base), progress, **options)
    return layer_of(model, base, qwen.config.vocab_size)


def _converted(base: Any, tokenizer: Any, progress: Progress, **options: Any) -> Any:
    options |= {"tokenizer": tokenizer, "progress": progress}
    return convert_model(base, model_class=CausalQwenForCausalLM, **options)


@torch.no_grad()
def with_layer(base: Any, layer: CausalLayer, tokenizer: Any) -> Any:
    """The causal model of a base in memory, in its precision."""
    base, size = as_convertible(base, CausalQwenForCausalLM), base.config.vocab_size
    fields = {name: layer.fields[name] for name in OWN if name in layer.fields}
    size_of_u = fields.pop("causal_size", None)
    kind = class_for(CausalQwenForCausalLM, family_of_model(base))
    model = graft(base, kind, size_of_u, fields)
    state = model.state_dict()
    for name in layer.tensors.keys() & state.keys():
        state[name].copy_(torch.from_numpy(layer.tensors[name]))
    model.generation_config = adopt_generation_config(base.generation_config)
    for name, value in layer.generation.items():
        setattr(model.generation_config, name, value)
    number = install_number_token(tokenizer, size)
    if number >= size:  # no id is free: <NUM> exists in memory only
        model.resize_token_embeddings(number + 1)
    model.config.num_token_id = number
    return model


def layer_of(model: Any, base: str, size: int) -> CausalLayer:
    """What a causal model has beside its base of `size` tokens."""
    described, state = model.config.to_dict(), model.state_dict()
    fields = {name: described[name] for name in OWN}
    fields |= {"vocab_size": size, "hidden_size": model.config.hidden_size}
    if (number := model.config.num_token_id) is not None and number >= size:
        fields["num_token_id"] = None
    tensors = {}
    for name in (*expected_tensors(fields), WORD_EDGES):
        tensor = state[name].detach().cpu()
        kept = tensor[:size] if name in PER_TOKEN else tensor
        tensors[name] = kept.numpy() if name == WORD_EDGES else kept.float().numpy()
    untrained = np.eye(model.config.hidden_size), np.zeros(1)
    for name, start in zip(MATRICES, untrained, strict=True):
        if (tensors[name] == start).all():
            del tensors[name]
    saved = model.generation_config.to_dict()
    generation = {name: saved[name] for name in GENERATION if saved.get(name) is not None}
    return CausalLayer(base, fingerprint(files_of(base)), fields, generation, tensors)
