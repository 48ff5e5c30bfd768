"""Conversion: a base model -> a calibrated causal model that behaves exactly like it.

A base is `smollm2-135m` (the embedded default), a hub name, a local directory, a GGUF file, or a
loaded model, of a family in `families.py`. A Llama model without biases is Qwen2 with zero q/k/v
biases, and becomes that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from causal_qwen.backbones import classes_of
from causal_qwen.conversion.calibration import Calibration, calibrate
from causal_qwen.conversion.checkpoint_io import (
    as_convertible,
    assemble,
    check_complete,
    check_finite,
    damaged_files_named,
    encode_texts,
    family_of_model,
    load_base,
    load_tokenizer,
    quiet,
    read_fields,
)
from causal_qwen.families import Family, family_of, text_fields
from causal_qwen.generation.mixin import adopt_generation_config
from causal_qwen.model import CausalChain, CausalQwenForCausalLM
from causal_qwen.modeling.action import head_weight
from causal_qwen.modeling.processor import CausalQwenProcessor, install_number_token
from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.numpy_engine.calibration import FIELDS, TEXTS
from causal_qwen.numpy_engine.heads import expected_tensors as causal_tensors
from causal_qwen.options import INITIALIZATIONS, check_choice
from causal_qwen.outputs import check_not_inside, new_directory
from causal_qwen.paths import (
    EMBEDDED,
    embedded_directory,
    is_converted,
)
from causal_qwen.text.segmentation import word_edges

DOCUMENTS: dict[str, Any] = {  # the source documents' literal numbers
    "gamma_init": 10.0,
    "b_noise_init": 0.1,
    "ovr_threshold_init": 100.0,
    "decision_noise": "zero",
    "threshold_context": "none",
}


@dataclass(frozen=True)
class Report:
    """What was converted, and how closely it agrees with its base model."""

    base: str
    parameters: int
    causal_size: int
    calibration: Calibration | None
    head_error: float  # relative Frobenius error of the head, 0 unless C < H
    max_logit_difference: float
    positions: int
    standard_agreement: float  # share of positions where argmax P is the base model's argmax


def convert_model(
    base: Any = EMBEDDED,
    *,
    model_class: Any,
    tokenizer: Any = None,
    init: str = "calibrated",
    causal_size: int | None = None,
    dtype: Any = None,
    texts: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **config_fields: Any,
) -> Any:
    """A causal model that starts as `base`; the module docstring lists possible bases.

    Args:
        init: `"calibrated"`, or `"documents"` for the source documents' literal numbers.
        causal_size: C; larger than H pads (exact), smaller takes the best low-rank head.
        dtype: of the weights; the base model's own by default.
        texts: text to calibrate on instead of the built-in texts.
        config_fields: further fields of the configuration, `CausalConfig`'s or the base's.
    """
    check_choice("init", init, INITIALIZATIONS)
    if isinstance(base, torch.nn.Module):
        check_finite(base, "the base model")
    else:
        progress("loading the base model")
        tokenizer = load_tokenizer(base) if tokenizer is None else tokenizer
        base = load_base(base, dtype)
    base = as_convertible(base, model_class)
    config_fields = {**(DOCUMENTS if init == "documents" else FIELDS), **config_fields}
    size = base.config.vocab_size
    number = None if tokenizer is None else install_number_token(tokenizer, size)
    is_new = number is not None and number >= size
    if not is_new:
        config_fields.setdefault("num_token_id", number)
    model = graft(base, class_for(model_class, family_of_model(base)), causal_size, config_fields)
    model.generation_config = adopt_generation_config(base.generation_config)
    set_word_edges(model, tokenizer)
    model.calibration = None
    if init == "calibrated":
        encoded = encode_texts(tokenizer, TEXTS if texts is None else texts, size)
        model.calibration = calibrate(model, encoded, progress)
    if number is not None and is_new:
        model.resize_token_embeddings(number + 1)
        model.config.num_token_id = number
    return model


def convert(
    base: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Report:
    """Convert `base`; save model, tokenizer and generation config to `output`, all or nothing."""
    if str(base) != EMBEDDED:
        check_not_inside(output, base)
    with new_directory(Path(output), overwrite) as directory:
        progress("loading the base model")
        qwen, tokenizer = load_base(base, options.pop("dtype", None)), load_tokenizer(base)
        size = sum(p.numel() * p.element_size() for p in qwen.parameters()) / 1e9
        progress(f"{size:.1f} GB of {str(qwen.dtype).removeprefix('torch.')} will be written")
        options |= {"tokenizer": tokenizer, "progress": progress}
        model = convert_model(qwen, model_class=CausalQwenForCausalLM, **options)
        progress("comparing with the base model")
        texts = encode_texts(tokenizer, TEXTS, model.config.vocab_size)
        difference, _, agreement, positions = compare_logits(model, qwen, texts)
        report = Report(
            base=str(base),
            parameters=sum(p.numel() for p in model.parameters()),
            causal_size=model.config.latent_size,
            calibration=model.calibration,
            head_error=head_error(qwen, model),
            max_logit_difference=difference,
            positions=positions,
            standard_agreement=agreement,
        )
        progress("saving")
        with quiet():
            model.save_pretrained(directory)
        if tokenizer is not None:
            CausalQwenProcessor(tokenizer).save_pretrained(directory)
    return report


def default_model(progress: Callable[[str], None] = lambda _: None) -> Path:
    """The directory of the embedded model, converted on first use into the cache directory."""
    from filelock import FileLock

    output = embedded_directory()
    output.parent.mkdir(parents=True, exist_ok=True)
    if not is_converted(output):
        with FileLock(output.with_name(f".{output.name}.lock")):  # one process at a time
            if not is_converted(output):
                convert(EMBEDDED, output, progress=progress)
    return output


def graft(qwen: Any, cls: Any, causal_size: int | None, fields: dict[str, Any]) -> Any:
    """The causal model around the base model's own tensors."""
    hidden = qwen.config.hidden_size
    size = hidden if causal_size is None else causal_size
    state = dict(qwen.state_dict())
    if size != hidden:
        fields = {**fields, "tie_word_embeddings": False}
        state |= resize_latent(state["lm_head.weight"], size)
    elif qwen.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    config = cls.config_class.from_base(qwen.config, causal_size=size, **fields)
    from_pretrained = super(CausalChain, cls).from_pretrained
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the number head starts at random: conversion is reproducible
        own = causal_tensors(config.to_dict())
        return assemble(from_pretrained, config, state, qwen.dtype, own).eval()


def resize_latent(head: Tensor, size: int) -> dict[str, Tensor]:
    """C > H pads the head with zeros; C < H takes its truncated SVD, optimal for that rank.

    W = (W V_C) V_C^T with V_C the leading eigenvectors of W^T W: an H x H problem, not V x H.
    """
    hidden = head.shape[1]
    if size > hidden:
        return {"lm_head.weight": torch.nn.functional.pad(head, (0, size - hidden))}
    wide = head.double()
    _, vectors = torch.linalg.eigh(wide.T @ wide)
    basis = vectors[:, -size:].flip(-1)  # (H, C)
    return {
        "lm_head.weight": (wide @ basis).to(head.dtype),
        "abduction.loc.weight": basis.T.contiguous().to(head.dtype),
    }


def set_word_edges(model: CausalModel, tokenizer: Any) -> None:
    """Which tokens continue a word, and which leave one open; without a tokenizer, none."""
    if tokenizer is not None:
        edges = word_edges(tokenizer.backend_tokenizer, model.config.vocab_size)
        model.decision.word_edges.copy_(torch.from_numpy(edges))


@torch.no_grad()
def compare_logits(
    model: CausalModel, plain: Any, texts: Sequence[Tensor]
) -> tuple[float, float, float, int]:
    """The largest difference of logits, the shares of positions where the best logit and the best
    P are the plain model's choice, and how many positions there are."""
    worst, same, agreeing, positions = 0.0, 0, 0, 0
    for ids in texts:
        expected, output = plain(ids[None]).logits[0], model(ids[None])
        logits = output.logits[0, :, : expected.shape[-1]]  # without a new <NUM>, which comes last
        worst = max(worst, float((logits - expected).abs().max()))
        same += int((logits.argmax(-1) == expected.argmax(-1)).sum())
        chosen = model.decision.choose(output.s_dist)[0]
        agreeing += int((chosen == expected.argmax(-1)).sum())
        positions += len(ids)
    return worst, same / positions, agreeing / positions, positions


def head_error(qwen: Any, model: CausalModel) -> float:
    """||W - W' W_loc||_F / ||W||_F: the part of the head that C < H dimensions lose."""
    if model.config.causal_size >= qwen.config.hidden_size:
        return 0.0
    head = qwen.lm_head.weight.double()
    kept = model.lm_head.weight.double() @ model.abduction.loc.weight.double()
    return float((head - kept).norm() / head.norm())


def class_for(cls: Any, family: Family) -> Any:
    """`cls`, or the class of the family: every class of ours opens checkpoints of all families."""
    own = cls.config_class.family
    if own == family:
        return cls
    if cls is not classes_of(own)[2]:
        raise ValueError(
            f"{cls.__name__} is a subclass for {own.base!r}, and the model's architecture is "
            f"{family.base!r}; subclass {family.names[2]}."
        )
    return classes_of(family)[2]


def load(
    cls: Any,
    from_pretrained: Callable[..., Any],
    path: str | os.PathLike[str] | None,
    *args: Any,
    output_loading_info: bool = False,
    **kwargs: Any,
) -> Any:
    """`from_pretrained` for our checkpoints and for plain ones.

    A plain checkpoint, or plain tensors without a path, lacks the causal parameters: those of a
    checkpoint are calibrated here. Any other missing tensor is an error.
    """
    where = str(path or "The state_dict")
    fields = {} if path is None else read_fields(path, kwargs)
    if text_fields(fields) is not fields:
        raise ValueError(
            f"{path} also sees; `causal-qwen convert {path} OUTPUT --merge` takes the part that "
            "reads."
        )
    config = kwargs.get("config")
    given = config.model_type if isinstance(config, PreTrainedConfig) else fields.get("model_type")
    family = cls.config_class.family if given is None else family_of(given, where)
    if (other := class_for(cls, family)) is not cls:
        return other.from_pretrained(path, *args, output_loading_info=output_loading_info, **kwargs)
    kwargs = {"use_safetensors": True, "trust_remote_code": False, **kwargs}
    is_plain = fields.get("model_type") == family.base
    with damaged_files_named(where), quiet() if is_plain else contextlib.nullcontext():
        model, info = from_pretrained(path, *args, output_loading_info=True, **kwargs)
    own = {*causal_tensors(model.config.to_dict())}
    may_lack = is_plain or (path is None and own <= {*info["missing_keys"]})
    check_complete(info, where, own if may_lack else ())
    check_finite(model, where)
    model.generation_config = adopt_generation_config(model.generation_config)
    if is_plain and kwargs.get("config") is None:
        _calibrate_plain(model, where, kwargs)
    elif fields.get("dtype") not in (None, str(model.dtype).removeprefix("torch.")):
        model.action.restore_equality(head_weight(model.lm_head))
    return (model, info) if output_loading_info else model


def _calibrate_plain(model: Any, path: str, options: Mapping[str, Any]) -> None:
    """Calibrate a plain checkpoint as it is opened."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{path} is a plain checkpoint: it is calibrated as it is opened, which needs all "
            "weights in memory; convert it first (causal-qwen convert --merge), then offload it."
        )
    tokenizer, size = load_tokenizer(path), model.config.vocab_size
    if tokenizer is not None and (number := install_number_token(tokenizer, size)) < size:
        model.config.num_token_id = number
    for name, value in FIELDS.items():
        setattr(model.config, name, options.get(name, value))
    set_word_edges(model, tokenizer)
    model.calibration = calibrate(model, encode_texts(tokenizer, TEXTS, size))
