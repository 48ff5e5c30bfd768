"""Checkpoint files: find them, build models from tensors, check what was loaded, silence Hugging
Face. Damaged files are refused by safetensors and transformers themselves."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import logging

from causal_qwen.engine.checkpoint import QUANTIZER
from causal_qwen.engine.weights import TIED_DIFFERS, listed, read_json
from causal_qwen.families import family_of, is_causal, text_fields
from causal_qwen.modeling.action import dense
from causal_qwen.paths import download

CONFIG = "config.json"
RANDOM_TOKENS = 64
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")


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


def check_loading_info(
    info: Mapping[str, Any], where: str, may_lack: Collection[str] = (), may_have: Any = ()
) -> None:
    """Refuse what Hugging Face reports: missing tensors, which it has drawn at random, and
    tensors that the model does not have."""
    if missing := sorted({*info["missing_keys"]} - {*may_lack}):
        raise ValueError(f"{where} lacks {listed(missing)}; download it again.")
    if strange := sorted({*info["unexpected_keys"]} - {*may_have}):
        raise ValueError(
            f"{where} has {listed(strange)}, which its configuration does not describe; download "
            "it again."
        )


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
    local: Tensor = dense(tensor.to_local() if hasattr(tensor, "to_local") else tensor)
    total = local.sum(dtype=torch.float32)  # fast; it can also overflow
    return bool(torch.isfinite(total)) or bool(torch.isfinite(local).all())


def check_tied(model: Any, where: str) -> None:
    """Refuse a stored head that differs from the embeddings to which config.json ties it."""
    if model.config.tie_word_embeddings and "lm_head.weight" not in model.all_tied_weights_keys:
        raise ValueError(f"{where} {TIED_DIFFERS}")


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
    check_loading_info(info, "The base model", may_lack)
    model.name_or_path = model.config.name_or_path = ""  # not "None", which may be on the hub
    return model


def encode_texts(tokenizer: Any, texts: Sequence[str], vocabulary: int = 0) -> list[Tensor]:
    """Token ids of every text; without a tokenizer, as many random texts."""
    if tokenizer is None:
        rng = torch.Generator().manual_seed(0)
        return [torch.randint(vocabulary, (RANDOM_TOKENS,), generator=rng) for _ in texts]
    return [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]


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
