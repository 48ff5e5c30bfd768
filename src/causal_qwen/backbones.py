"""Backbones: the causal classes of every family, made when they are first needed.

`causal_qwen.backbones.CausalQwen3ForCausalLM` (or the same name of the package) is made from
`Qwen3ForCausalLM`, `Qwen3Model` and `Qwen3Config` of transformers and our part of them, by the
entry of its family in `families.py`. A class is made once, registered with the Auto classes, and
found here by pickle.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import transformers
from huggingface_hub.dataclasses import strict
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoProcessor,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GenericForSequenceClassification

from causal_qwen.families import FAMILIES, QWEN2, Family
from causal_qwen.model import (
    CausalBackbone,
    CausalChain,
    CausalInitMixin,
    CausalQwenForCausalLM,
    CausalQwenModel,
)
from causal_qwen.modeling.configuration import CausalConfig, CausalQwen2Config
from causal_qwen.modeling.processor import CausalQwenProcessor

Classes = tuple[Any, Any, Any]  # configuration, backbone, model

_made: dict[Family, Classes] = {}
_lock = threading.RLock()


def classes_of(family: Family) -> Classes:
    """Our configuration, backbone and model of a family."""
    with _lock:
        if family not in _made:
            _made[family] = _make(family)
            _register(family, *_made[family])
        return _made[family]


def base_class(family: Family) -> Any:
    """`XForCausalLM` of transformers."""
    return getattr(transformers, family.base_names[2])


def _make(family: Family) -> Classes:
    if family == QWEN2:
        return CausalQwen2Config, CausalQwenModel, CausalQwenForCausalLM
    config_base, backbone_base, model_base = (
        getattr(transformers, name) for name in family.base_names
    )
    own = {"__module__": __name__}
    config_name, backbone_name, model_name = family.names
    config: Any = strict(
        type(
            config_name,
            (CausalConfig, config_base),
            {
                **own,
                "__doc__": f"`{config_base.__name__}` plus the fields of the causal chain.",
                "family": family,
                "model_type": family.model_type,
            },
        )
    )
    backbone = type(
        backbone_name,
        (CausalBackbone, backbone_base),
        {
            **own,
            "__doc__": f"`{backbone_base.__name__}`, which also reads numbers.",
            "config_class": config,
        },
    )
    model = type(
        model_name,
        (CausalChain, model_base, GenerationMixin),
        {
            **own,
            "__doc__": f"`{model_base.__name__}` with an individual U before the scores.",
            "config_class": config,
            "base_class": model_base,
            "backbone_class": backbone,
        },
    )
    return config, backbone, model


@functools.cache
def classifier_of(family: Family, config: Any, backbone: Any) -> Any:
    """A linear classifier on the last position's state of our backbone, as Hugging Face's."""
    pretrained = getattr(transformers, family.base_names[1]).__mro__[1]  # XPreTrainedModel
    fields = {
        "__module__": __name__,
        "__doc__": f"`{backbone.__name__}` with a linear classifier on the last position.",
        "config_class": config,
    }
    bases = (CausalInitMixin, GenericForSequenceClassification, pretrained)
    return type(family.classifier, bases, fields)


def _register(family: Family, config: Any, backbone: Any, model: Any) -> None:
    AutoConfig.register(family.model_type, config, exist_ok=True)
    AutoModel.register(config, backbone, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    classifier = classifier_of(family, config, backbone)
    AutoModelForSequenceClassification.register(config, classifier, exist_ok=True)
    AutoProcessor.register(config, CausalQwenProcessor, exist_ok=True)
    renamed = get_checkpoint_conversion_mapping(family.base)
    if renamed is not None:  # files of this family name their tensors differently
        register_checkpoint_conversion_mapping(family.model_type, renamed, overwrite=True)


def __getattr__(name: str) -> Any:
    for family in FAMILIES:
        if name in family.names:
            return classes_of(family)[family.names.index(name)]
        if name == family.classifier:
            return classifier_of(family, *classes_of(family)[:2])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


classes_of(QWEN2)
