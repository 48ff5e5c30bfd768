"""Registration with Hugging Face's Auto classes, without importing them.

`AutoModel.register` needs the class, and importing it while transformers is half imported fails.
So the names are entered where transformers keeps those of its own models: it imports
`transformers.models.<model_type>` when one of them is needed, here an alias of this package, whose
lazy names import the classes. `backbones.py` and `processor.py` register the classes by the public
method, too. Then `AutoModelForCausalLM.from_pretrained` loads CausalQwen directories without
`trust_remote_code`.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import ModuleType

import wrapt

from causal_qwen.families import FAMILIES

AUTO = "transformers.models.auto"
TABLES = {  # module of transformers.models.auto -> table -> place among a family's names
    "configuration_auto": {"CONFIG_MAPPING_NAMES": 0},
    "modeling_auto": {"MODEL_MAPPING_NAMES": 1, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": 2},
    "processing_auto": {"PROCESSOR_MAPPING_NAMES": None},
}
PROCESSOR = "CausalQwenProcessor"


def install() -> None:
    """Enter the names when transformers imports its tables.

    If it already has, the tables were read, too: then Qwen2's classes are registered at once, and
    those of another family when its configuration is first needed.
    """
    is_late = hasattr(sys.modules.get(f"{AUTO}.modeling_auto"), "AutoModelForCausalLM")
    for module, tables in TABLES.items():
        wrapt.register_post_import_hook(partial(_enter, tables), f"{AUTO}.{module}")
    if is_late:
        importlib.import_module("causal_qwen.backbones")


def _enter(tables: dict[str, int | None], auto: ModuleType) -> None:
    for family in FAMILIES:
        alias = f"transformers.models.{family.model_type}"
        sys.modules.setdefault(alias, sys.modules["causal_qwen"])
        for table, place in tables.items():
            name = PROCESSOR if place is None else family.names[place]
            getattr(auto, table)[family.model_type] = name
