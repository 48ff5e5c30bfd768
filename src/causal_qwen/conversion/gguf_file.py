"""GGUF file: a plain model and its tokenizer -> one file for llama.cpp, and a Modelfile for Ollama.

Names of tensors and metadata come from the `gguf` package. Matrices are stored as f32, f16 or q8_0,
vectors always as f32. Tokenizers are byte-level BPE; llama.cpp knows how each splits text by name,
so one that is none of PRE_TOKENIZERS is refused instead of splitting text in another way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from causal_qwen.numpy_engine.qwen2 import inverse_frequencies

ARCHITECTURES = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
}
QUANTIZED = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
BLOCK = 32  # weights of one block of q8_0
PRE_TOKENIZERS = (  # what llama.cpp calls them, and what tells them apart in tokenizer.json
    ("llama-bpe", r"\p{N}{1,3}"),
    ("qwen2", r"\p{L}+|\p{N}|"),
    ("smollm", '"individual_digits": true'),
    ("gpt-2", '"use_regex": true'),
)


def write_gguf(plain: Any, tokenizer: Any, directory: Path, dtype: str = "f16") -> Path:
    """Write `model-DTYPE.gguf` and `Modelfile` into a directory. -> the file"""
    base = plain.config.model_type
    if base not in ARCHITECTURES:
        raise ValueError(
            f"GGUF files of {base!r} are not written here, only of {', '.join(ARCHITECTURES)}; "
            "export --to plain, and use llama.cpp's convert_hf_to_gguf.py."
        )
    file = directory / f"model-{dtype}.gguf"
    architecture = ARCHITECTURES[base]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_file_type(QUANTIZED[dtype][1])
    _add_shape(writer, plain.config)
    _add_tokenizer(writer, tokenizer, plain.config)
    _add_tensors(writer, plain, architecture, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (directory / "Modelfile").write_text(f"FROM ./{file.name}\n", encoding="utf-8")
    return file


def _add_shape(writer: Any, config: Any) -> None:
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ValueError(
            f"sliding_window={config.sliding_window}: llama.cpp would attend to all tokens; set it "
            "to null in config.json if the window is longer than every text."
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        longest = config.max_position_embeddings
        rope = {"original_max_position_embeddings": longest, **rope}
        plain, _ = inverse_frequencies({**rope, "rope_type": "default"}, head_dim, longest)
        scaled, _ = inverse_frequencies(rope, head_dim, longest)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    elif kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if (trained := rope.get("original_max_position_embeddings")) is not None:
            writer.add_rope_scaling_orig_ctx_len(trained)
    elif kind != "default":
        raise ValueError(f"rope_type={kind!r} has no GGUF equivalent here.")


def _add_tokenizer(writer: Any, tokenizer: Any, config: Any) -> None:
    fields = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["id"]: token["special"] for token in fields["added_tokens"]}
    names = {index: name for name, index in tokenizer.get_vocab().items()}
    tokens, kinds = [], []
    for index in range(config.vocab_size):
        tokens.append(names.get(index, f"[PAD{index}]"))
        if index not in names:
            kinds.append(gguf.TokenType.UNUSED)
        elif index in special:
            is_control = special[index]
            kinds.append(gguf.TokenType.CONTROL if is_control else gguf.TokenType.USER_DEFINED)
        else:
            kinds.append(gguf.TokenType.NORMAL)
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in fields["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(fields))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(tokenizer("a").input_ids[0] == tokenizer.bos_token_id)
    for kind in ("bos", "eos", "pad"):
        if (token := getattr(tokenizer, f"{kind}_token_id")) is not None:
            getattr(writer, f"add_{kind}_token_id")(token)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _pre_tokenizer(fields: dict[str, Any]) -> str:
    """llama.cpp's name of the way in which a tokenizer splits text."""
    text = json.dumps(fields["pre_tokenizer"]).replace("\\\\", "\\")
    if fields["model"]["type"] == "BPE" and '"ByteLevel"' in text:
        for name, sign in PRE_TOKENIZERS:
            if sign in text:
                return name
    raise ValueError(
        "The tokenizer is none that is known to llama.cpp here "
        f"({', '.join(name for name, _ in PRE_TOKENIZERS)}); export --to plain, and use "
        "llama.cpp's convert_hf_to_gguf.py."
    )


def _add_tensors(writer: Any, plain: Any, architecture: Any, dtype: str) -> None:
    config, kind = plain.config, QUANTIZED[dtype][0]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    is_tied = config.tie_word_embeddings
    for name, tensor in plain.state_dict().items():
        if is_tied and name == "lm_head.weight":
            continue
        values = tensor.detach().float().cpu().numpy()
        if architecture == gguf.MODEL_ARCH.LLAMA and ".q_proj." in name:
            values = _interleave(values, config.num_attention_heads)
        elif architecture == gguf.MODEL_ARCH.LLAMA and ".k_proj." in name:
            values = _interleave(values, config.num_key_value_heads)
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if own is None:
            raise ValueError(f"{name} has no name in GGUF files of {config.model_type!r}.")
        stored = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else kind
        if stored == gguf.GGMLQuantizationType.Q8_0 and values.shape[-1] % BLOCK:
            stored = gguf.GGMLQuantizationType.F16
        writer.add_tensor(own, gguf.quants.quantize(values, stored), raw_dtype=stored)


def _interleave(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """GGUF's Llama rotates neighbours, Hugging Face's the two halves of a head."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])  # (heads, 2, D / 2, ...)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
