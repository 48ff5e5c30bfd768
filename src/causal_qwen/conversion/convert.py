"""Conversion: a Qwen2 checkpoint -> CausalQwen, calibrated, behaving exactly like it.

A base is `smollm2-135m` (the embedded default), a hub name, a local Qwen2 directory, a model of
Llama architecture (Qwen2 with zero q/k/v biases), a GGUF file, or a loaded model.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from causal_qwen.conversion.base_models import as_qwen2, config_fields, load_base, load_tokenizer
from causal_qwen.conversion.calibration import PROMPTS, TEXTS, Calibration, calibrate
from causal_qwen.conversion.checkpoint_io import assemble, damaged_files_named, encode_texts, quiet
from causal_qwen.generation.mixin import adopt_generation_config
from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.modeling.processor import CausalQwenProcessor, install_number_token
from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.options import INITIALIZATIONS, check_choice
from causal_qwen.paths import EMBEDDED, embedded_directory, is_converted, new_directory

DOCUMENTS: dict[str, Any] = {  # the source documents' literal numbers
    "gamma_init": 10.0,
    "b_noise_init": 0.1,
    "ovr_threshold_init": 100.0,
    "decision_noise": "zero",
}


@dataclass(frozen=True)
class Report:
    """What a conversion did, and how well it kept its promise."""

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
    measure_noise: bool = True,
    progress: Callable[[str], None] = lambda _: None,
    **config_fields: Any,
) -> Any:
    """A causal model that starts as `base`. See the module's first lines for what a base may be.

    Args:
        init: `"calibrated"`, or `"documents"` for the source documents' literal numbers.
        causal_size: C; larger than H pads (exact), smaller takes the best low-rank head.
        dtype: of the weights; the base model's own by default.
        texts: text to calibrate on instead of the built-in passages.
        measure_noise: let the model speak to find its noise gains; False takes typical ones.
        config_fields: further fields of `CausalQwen2Config`.
    """
    progress("loading the base model")
    qwen = base if isinstance(base, torch.nn.Module) else load_base(base, dtype)
    qwen = as_qwen2(qwen)
    check_finite(qwen)
    if tokenizer is None and not isinstance(base, torch.nn.Module):
        tokenizer = load_tokenizer(base)  # and it gets the token <NUM>
    if check_choice("init", init, INITIALIZATIONS) == "documents":
        config_fields = {**DOCUMENTS, **config_fields}

    number = None if tokenizer is None else install_number_token(tokenizer, qwen.config.vocab_size)
    is_new = number is not None and number >= qwen.config.vocab_size
    if not is_new:
        config_fields.setdefault("num_token_id", number)
    model = graft(qwen, model_class, causal_size, config_fields)
    model.generation_config = adopt_generation_config(qwen.generation_config)
    initialize(model, tokenizer, init, texts, measure_noise, progress)
    if number is not None and is_new:
        model.resize_token_embeddings(number + 1)
        model.config.num_token_id = number
    return model


def convert(
    base: Any,
    output: str | os.PathLike[str],
    *,
    init: str = "calibrated",
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Report:
    """Convert `base` and save model, tokenizer and generation settings to `output`, or nothing."""
    with new_directory(Path(output), overwrite) as directory:
        progress("loading the base model")
        qwen = as_qwen2(load_base(base, options.pop("dtype", None)))
        tokenizer = load_tokenizer(base)
        options.setdefault("measure_noise", str(base) != EMBEDDED)  # whose own are the typical ones
        model = convert_model(
            qwen,
            model_class=CausalQwenForCausalLM,
            tokenizer=tokenizer,
            init=init,
            progress=progress,
            **options,
        )
        progress("comparing with the base model")
        report = compare(str(base), qwen, model, encode_texts(tokenizer, TEXTS))
        progress("saving")
        with quiet():
            model.save_pretrained(directory)
        if tokenizer is not None:
            CausalQwenProcessor(tokenizer).save_pretrained(directory)
    return report


def default_model(progress: Callable[[str], None] = lambda _: None) -> Path:
    """The embedded model, converted once and kept in the user's cache directory."""
    output = embedded_directory()
    if not is_converted(output):
        with contextlib.suppress(FileExistsError):  # another process was faster
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
    config = CausalQwen2Config.from_qwen2(qwen.config, causal_size=size, **fields)
    from_pretrained = super(cls, cls).from_pretrained
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the number head's start is part of what a conversion is
        return assemble(from_pretrained, config, state, qwen.dtype).eval()


def resize_latent(head: Tensor, size: int) -> dict[str, Tensor]:
    """C > H pads the head with zeros; C < H takes its truncated SVD, the best of that rank.

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


def initialize(
    model: CausalModel,
    tokenizer: Any,
    init: str,
    texts: Sequence[str] | None = None,
    measure_noise: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Any:
    """Give the causal parameters of a grafted model their values, and say what they are."""
    model.calibration = None
    if init == "calibrated":
        passages = encode_texts(tokenizer, TEXTS if texts is None else texts)
        prompts = encode_texts(tokenizer, PROMPTS) if measure_noise else None
        model.calibration = calibrate(model, passages, prompts, progress)
    return model


@torch.no_grad()
def compare(base: str, qwen: Any, model: CausalModel, texts: Sequence[Tensor] | None) -> Report:
    """How well the promise is kept, position by position, on a few passages."""
    if texts is None:
        generator = torch.Generator().manual_seed(0)
        texts = [torch.randint(model.config.vocab_size, (64,), generator=generator)]
    worst, agreeing, positions = 0.0, 0, 0
    for ids in texts:
        expected = qwen(ids[None]).logits[0]
        output = model(ids[None])
        logits = output.logits[0, :, : expected.shape[-1]]  # a new <NUM> would come after these
        worst = max(worst, float((logits - expected).abs().max()))
        chosen = model.decision.choose(output.s_dist)[0]
        agreeing += int((chosen == expected.argmax(-1)).sum())
        positions += len(ids)
    return Report(
        base=base,
        parameters=sum(p.numel() for p in model.parameters()),
        causal_size=model.config.latent_size,
        calibration=model.calibration,
        head_error=head_error(qwen, model),
        max_logit_difference=worst,
        positions=positions,
        standard_agreement=agreeing / positions,
    )


def head_error(qwen: Any, model: CausalModel) -> float:
    """||W - W' W_loc||_F / ||W||_F of the law that the latent space can express."""
    if model.config.causal_size >= qwen.config.hidden_size:
        return 0.0
    head = qwen.lm_head.weight.double()
    kept = model.lm_head.weight.double() @ model.abduction.loc.weight.double()
    return float((head - kept).norm() / head.norm())


def open_model(path: str | os.PathLike[str]) -> tuple[CausalQwenProcessor, Any]:
    """A model, ready to speak, and its own processor."""
    with quiet():
        model = CausalQwenForCausalLM.from_pretrained(path).eval()
        try:
            processor = CausalQwenProcessor.from_pretrained(path)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} holds no tokenizer; copy its base model's tokenizer there."
            ) from error
    processor.check(model.config)
    return processor, model


def load(
    cls: Any,
    from_pretrained: Callable[..., Any],
    path: str | os.PathLike[str],
    *args: Any,
    output_loading_info: bool = False,
    **kwargs: Any,
) -> Any:
    """`from_pretrained` for our checkpoints and for plain Qwen2 ones.

    A plain checkpoint lacks the causal parameters: they get their calibrated values here, on the
    built-in passages if a tokenizer lies beside the weights. Loading stays quick: only a
    conversion measures the noise gains, here they are the typical ones.
    """
    kwargs.setdefault("use_safetensors", True)
    fields = {} if kwargs.get("config") is not None else config_fields(path, kwargs)
    is_plain = fields.get("model_type") == "qwen2"
    with damaged_files_named(path), quiet() if is_plain else contextlib.nullcontext():
        model, info = from_pretrained(path, *args, output_loading_info=True, **kwargs)
    model.generation_config = adopt_generation_config(model.generation_config)
    if is_plain:
        tokenizer = load_tokenizer(path)
        if tokenizer is not None:
            number = install_number_token(tokenizer, model.config.vocab_size)
            if number < model.config.vocab_size:
                model.config.num_token_id = number
        model.calibration = calibrate(model, encode_texts(tokenizer, TEXTS))
    elif fields.get("dtype") not in (None, str(model.dtype).removeprefix("torch.")):
        model.action.restore_equality(model.lm_head.weight)
    return (model, info) if output_loading_info else model


def check_finite(model: CausalModel) -> None:
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"The base model's {name} holds NaN or infinity; its file is damaged.")
