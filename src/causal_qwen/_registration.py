"""Registration with Hugging Face's Auto classes, without importing them.

`AutoModel.register` needs the class, and importing it while transformers is half imported fails.
So the names are entered where transformers keeps those of its own models: it imports
`transformers.models.<model_type>` when one of them is needed, here an alias of this package, whose
lazy names import the classes. `model.py` and `processor.py` register the classes by the public
method, too. Then `AutoModelForCausalLM.from_pretrained` loads CausalQwen directories without
`trust_remote_code`.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import ModuleType

import wrapt

AUTO = "transformers.models.auto"
MODEL_TYPE = "causal_qwen2"
NAMES = {  # module of transformers.models.auto -> table -> name of our class
    "configuration_auto": {"CONFIG_MAPPING_NAMES": "CausalQwen2Config"},
    "modeling_auto": {
        "MODEL_MAPPING_NAMES": "CausalQwenModel",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "CausalQwenForCausalLM",
    },
    "processing_auto": {"PROCESSOR_MAPPING_NAMES": "CausalQwenProcessor"},
}


def install() -> None:
    """Enter the names when transformers imports its tables.

    If it already has, the tables were read, too: register the classes themselves, at once.
    """
    is_late = hasattr(sys.modules.get(f"{AUTO}.modeling_auto"), "AutoModelForCausalLM")
    for module, tables in NAMES.items():
        wrapt.register_post_import_hook(partial(_enter, tables), f"{AUTO}.{module}")
    if is_late:
        importlib.import_module("causal_qwen.model")


def _enter(tables: dict[str, str], auto: ModuleType) -> None:
    sys.modules.setdefault(f"transformers.models.{MODEL_TYPE}", sys.modules["causal_qwen"])
    for table, name in tables.items():
        getattr(auto, table)[MODEL_TYPE] = name
