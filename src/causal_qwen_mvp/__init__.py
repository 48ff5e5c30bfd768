"""The source documents' names for CausalQwen: `models`, `inference`, `training`.

`CausalQwenMVPForCausalLM` is `causal_qwen.CausalQwenForCausalLM` itself, not a copy of it.
`import causal_qwen_mvp` is light: torch and transformers are imported when a name needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import causal_qwen

__all__ = [
    "AbductionNetwork",
    "ActionNetwork",
    "CauchyMath",
    "CausalMVPOutput",
    "CausalQwen2Config",
    "CausalQwenMVPForCausalLM",
    "OvRClassifier",
]

if TYPE_CHECKING:
    from causal_qwen_mvp.models import (
        AbductionNetwork,
        ActionNetwork,
        CauchyMath,
        CausalMVPOutput,
        CausalQwen2Config,
        CausalQwenMVPForCausalLM,
        OvRClassifier,
    )


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    causal_qwen.__getattr__("CausalQwenForCausalLM")  # raises ImportError if torch is missing
    return getattr(importlib.import_module(f"{__name__}.models"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
