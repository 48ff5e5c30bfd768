"""CausalQwen: a language model that decides like an individual.

`import causal_qwen` is light: torch and transformers are imported when a name needs them. It
changes the process in one way, an import hook: once transformers is imported, its Auto classes
know ours (`_registration.py`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from causal_qwen import _registration
from causal_qwen._version import __version__ as __version__
from causal_qwen.families import FAMILIES, QWEN2
from causal_qwen.paths import install_hint

_MODULES = {  # public name -> the module that defines it, below this package
    "CausalQwen2Config": "modeling.configuration",
    "CausalQwenForCausalLM": "model",
    "CausalQwenModel": "model",
    "CausalQwenOutput": "model",
    "CausalQwenProcessor": "modeling.processor",
    "CausalTextRegressor": "regression.regressor",
    "Individual": "individuals",
    "OpenModel": "regression.regressor",
    "Panel": "panel",
    "Session": "session",
    "counterfactual": "analysis.counterfactual",
    "infer_individual": "analysis.posterior",
    "open": "session",
}
_FAMILIES = {  # classes of the other families of base models, made when they are first needed
    name: "backbones"
    for family in FAMILIES
    for name in (*(family.names if family != QWEN2 else ()), family.classifier)
}
__all__ = ["__version__", *_MODULES]

if TYPE_CHECKING:
    from causal_qwen.analysis.counterfactual import counterfactual
    from causal_qwen.analysis.posterior import infer_individual
    from causal_qwen.individuals import Individual
    from causal_qwen.model import CausalQwenForCausalLM, CausalQwenModel, CausalQwenOutput
    from causal_qwen.modeling.configuration import CausalQwen2Config
    from causal_qwen.modeling.processor import CausalQwenProcessor
    from causal_qwen.panel import Panel
    from causal_qwen.regression.regressor import CausalTextRegressor, OpenModel
    from causal_qwen.session import Session, open


def __getattr__(name: str) -> Any:
    place = _MODULES.get(name) or _FAMILIES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{place}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("torch", "transformers"):
            raise
        raise ImportError(
            f"{name} needs {error.name}, which is not installed: {install_hint('torch')}"
        ) from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_FAMILIES])


_registration.install()
