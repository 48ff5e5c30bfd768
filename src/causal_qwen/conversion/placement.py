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
    if device.type not in ("cpu", "meta"):
        if accelerator is None or accelerator.type != device.type:
            found = "no accelerator" if accelerator is None else f"{accelerator.type} only"
            raise ValueError(f"device={name!r}: torch sees {found} here; use auto or cpu.")
        if (device.index or 0) >= (count := torch.accelerator.device_count()):
            raise ValueError(f"device={name!r}: there are {count} of them, counted from 0.")
    return device


def resolve_dtype(name: str = "auto") -> torch.dtype | str:
    """`auto` is the checkpoint's own."""
    check_choice("dtype", name, DTYPES)
    return name if name == "auto" else getattr(torch, name)


def _has_accelerator() -> bool:
    return bool(torch.accelerator.is_available())
