"""CausalQwen: a language model that decides like an individual.

`import causal_qwen` is light: torch and transformers are imported when a name needs them.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import wrapt

__version__ = "0.3.0"

_HOMES = {
    "Cauchy": "cauchy",
    "CausalQwen2Config": "config",
    "CausalQwenForCausalLM": "model",
    "CausalQwenModel": "model",
    "CausalQwenOutput": "model",
    "CausalQwenProcessor": "processor",
    "CausalTextGenerationPipeline": "pipeline",
    "CausalTextRegressor": "regressor",
    "ChangedNumber": "counterfactual",
    "ChangedPrompt": "counterfactual",
    "ChangedToken": "counterfactual",
    "GumbelIndividual": "gumbel",
    "Individual": "individual",
    "NumberPrediction": "prediction",
    "OpenModel": "regressor",
    "OtherModel": "counterfactual",
    "infer_individual": "posterior",
    "stability_violations": "counterfactual",
}
_LIGHT = ("Individual",)  # needs no torch
__all__ = [
    "Cauchy",
    "CausalQwen2Config",
    "CausalQwenForCausalLM",
    "CausalQwenModel",
    "CausalQwenOutput",
    "CausalQwenProcessor",
    "CausalTextGenerationPipeline",
    "CausalTextRegressor",
    "ChangedNumber",
    "ChangedPrompt",
    "ChangedToken",
    "GumbelIndividual",
    "Individual",
    "NumberPrediction",
    "OpenModel",
    "OtherModel",
    "__version__",
    "infer_individual",
    "stability_violations",
]

if TYPE_CHECKING:
    from causal_qwen.cauchy import Cauchy
    from causal_qwen.config import CausalQwen2Config
    from causal_qwen.counterfactual import (
        ChangedNumber,
        ChangedPrompt,
        ChangedToken,
        OtherModel,
        stability_violations,
    )
    from causal_qwen.gumbel import GumbelIndividual
    from causal_qwen.individual import Individual
    from causal_qwen.model import CausalQwenForCausalLM, CausalQwenModel, CausalQwenOutput
    from causal_qwen.pipeline import CausalTextGenerationPipeline
    from causal_qwen.posterior import infer_individual
    from causal_qwen.prediction import NumberPrediction
    from causal_qwen.processor import CausalQwenProcessor
    from causal_qwen.regressor import CausalTextRegressor, OpenModel


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        if name not in _LIGHT:
            importlib.import_module(f"{__name__}.model")  # registers it with transformers
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("torch", "transformers"):
            raise
        raise ImportError(
            f"{name} needs {error.name}, which is not installed: pip install 'causal-qwen[torch]'"
        ) from None
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)


@wrapt.when_imported("transformers.models.auto.configuration_auto")
def _announce(auto: Any) -> None:
    """Let `AutoConfig`, and through it every Auto class, find us without importing torch now.

    transformers resolves the names of its own models lazily, as `transformers.models.<type>`;
    ours stands there under an alias, and importing it registers the models (see `model.py`).
    """
    auto.CONFIG_MAPPING_NAMES["causal_qwen2"] = "CausalQwen2Config"
    sys.modules.setdefault("transformers.models.causal_qwen2", sys.modules[__name__])


@wrapt.when_imported("transformers.models.auto.modeling_auto")
def _announce_models(auto: Any) -> None:
    auto.MODEL_MAPPING_NAMES["causal_qwen2"] = "CausalQwenModel"
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["causal_qwen2"] = "CausalQwenForCausalLM"


@wrapt.when_imported("transformers.models.auto.processing_auto")
def _announce_processor(auto: Any) -> None:
    auto.PROCESSOR_MAPPING_NAMES["causal_qwen2"] = "CausalQwenProcessor"
