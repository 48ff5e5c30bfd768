"""Placement: the names of a device and of a dtype -> torch's, or one sentence about why not."""

from __future__ import annotations

import torch

from causal_qwen.options import DTYPES, check_choice


def resolve_device(name: str = "auto") -> torch.device:
    """`auto` is the accelerator (cuda, mps ...) if there is one, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if _has_accelerator() else None
    if name == "auto":
        return torch.device("cpu") if accelerator is None else accelerator
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"device={name!r} is unknown; use auto, cpu, cuda, cuda:1 or mps."
        ) from error
    known = available_devices()
    if device.type != "meta" and not {str(device), f"{device}:0"} & {*known, "cpu:0"}:
        raise ValueError(f"device={name!r} is not available here; available: {', '.join(known)}.")
    return device


def available_devices() -> list[str]:
    """The CPU and every accelerator that torch sees: cpu, cuda:0, cuda:1."""
    if not _has_accelerator() or (accelerator := torch.accelerator.current_accelerator()) is None:
        return ["cpu"]
    count = torch.accelerator.device_count()
    return ["cpu", *(f"{accelerator.type}:{index}" for index in range(count))]


def resolve_dtype(name: str = "auto") -> torch.dtype | str:
    """`auto` is the checkpoint's own."""
    check_choice("dtype", name, DTYPES)
    return name if name == "auto" else getattr(torch, name)


def has_fast_bf16(device: str = "auto") -> bool:
    """Whether bfloat16 pays: on an accelerator that computes in it. A CPU mostly emulates it."""
    is_cuda = resolve_device(device).type == "cuda" and torch.cuda.is_available()
    return is_cuda and torch.cuda.is_bf16_supported(including_emulation=False)


def _has_accelerator() -> bool:
    return bool(torch.accelerator.is_available())
