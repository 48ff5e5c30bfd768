"""Registration with Hugging Face's Auto classes, without importing them, by an import hook: the
one change that `import causal_qwen` makes to a process.

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
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from causal_qwen.families import FAMILIES, Family

AUTO = "transformers.models.auto"
TABLES: dict[str, dict[str, Callable[[Family], str]]] = {
    # module of transformers.models.auto -> table -> the name of our class
    "configuration_auto": {"CONFIG_MAPPING_NAMES": lambda family: family.names[0]},
    "modeling_auto": {
        "MODEL_MAPPING_NAMES": lambda family: family.names[1],
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": lambda family: family.names[2],
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": lambda family: family.classifier,
    },
    "processing_auto": {"PROCESSOR_MAPPING_NAMES": lambda _: "CausalQwenProcessor"},
}
PEFT = "peft.utils.constants"  # its default target_modules, by model_type


class _Waiting:
    """Finds nothing, and installs the hooks when transformers or PEFT is first looked for: wrapt
    imports asyncio, which commands without torch need not pay for."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> None:
        if name in ("transformers", "peft") and cls in sys.meta_path:
            sys.meta_path.remove(cls)
            _install_hooks()


def install() -> None:
    """Enter the names when transformers imports its tables."""
    if "transformers" in sys.modules or "peft" in sys.modules:
        _install_hooks()
    else:
        sys.meta_path.insert(0, _Waiting)


def _install_hooks() -> None:
    """If the tables are imported, they were read, too: then Qwen2's classes are registered at once,
    and those of another family when its configuration is first needed."""
    import wrapt

    is_late = hasattr(sys.modules.get(f"{AUTO}.modeling_auto"), "AutoModelForCausalLM")
    for module, tables in TABLES.items():
        wrapt.register_post_import_hook(partial(_enter, tables), f"{AUTO}.{module}")
    wrapt.register_post_import_hook(_enter_targets, PEFT)
    if is_late:
        importlib.import_module("causal_qwen.backbones")


def _enter(tables: dict[str, Callable[[Family], str]], auto: ModuleType) -> None:
    for family in FAMILIES:
        alias = f"transformers.models.{family.model_type}"
        sys.modules.setdefault(alias, sys.modules["causal_qwen"])
        for table, name_of in tables.items():
            getattr(auto, table)[family.model_type] = name_of(family)


def _enter_targets(constants: ModuleType) -> None:
    """Every default of PEFT for a base model is the default of the causal one."""
    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict):
            for family in FAMILIES:
                if family.base in table:
                    table.setdefault(family.model_type, table[family.base])
