"""Registration with Hugging Face's Auto classes, without importing them.

The modules below call the public `register` of their Auto class when they are imported. To keep
`import causal_qwen` light, that happens when transformers imports the Auto class itself, or at
once if it already has. Then `AutoModelForCausalLM.from_pretrained` loads CausalQwen directories
without `trust_remote_code`.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

import wrapt

CONFIGURATION_AUTO = "transformers.models.auto.configuration_auto"
MODELING_AUTO = "transformers.models.auto.modeling_auto"
PROCESSING_AUTO = "transformers.models.auto.processing_auto"


def install() -> None:
    wrapt.register_post_import_hook(_register_configuration, CONFIGURATION_AUTO)
    wrapt.register_post_import_hook(_register_models, MODELING_AUTO)
    wrapt.register_post_import_hook(_register_processor, PROCESSING_AUTO)


def _register_configuration(auto: ModuleType) -> None:
    modeling = sys.modules.get(MODELING_AUTO)
    if modeling is not None and not hasattr(modeling, "AutoModel"):
        return  # half imported: Qwen2's configuration would need it; `_register_models` follows
    importlib.import_module("causal_qwen.modeling.configuration")


def _register_models(auto: ModuleType) -> None:
    has_torch = find_spec("torch") is not None
    importlib.import_module(
        "causal_qwen.model" if has_torch else "causal_qwen.modeling.configuration"
    )


def _register_processor(auto: ModuleType) -> None:
    importlib.import_module("causal_qwen.modeling.processor")
