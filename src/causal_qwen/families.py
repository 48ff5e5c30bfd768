"""Families of base models: the one file in which a family is added.

A family is a decoder of transformers: `XConfig`, `XModel` and `XForCausalLM` with a linear head.
Its causal classes are made from these (`causal_qwen/backbones.py`), so an entry of FAMILIES is all
that is needed. Fields that differ from the usual:

    config, backbone   names of its classes if they are not stem + "Config" and stem + "Model"
    divisor            the config field by which the head's product is divided, W x / divisor

A cap of the logits (`final_logit_softcapping`), scaled embeddings and the load-balancing loss of
mixtures of experts are recognised by their names in transformers. Then add a tiny configuration to
tests/contract/test_families.py, which runs the whole contract on it. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "causal_"
# A field of config.json once W_loc is trained, for its readers: the base model's own class leaves
# W_loc out, and only warns of tensors that it does not know.
MARK = "w_loc"
TRAINED = "trained: load it with causal_qwen, or run `causal-qwen export` first"


@dataclass(frozen=True)
class Family:
    """The names of a family's classes in transformers, and of ours."""

    base: str  # model_type of the base model
    stem: str  # of the names of its classes
    config: str = ""
    backbone: str = ""
    divisor: str = ""
    own_stem: str = ""  # of our names, "Causal" + stem by default

    @property
    def model_type(self) -> str:
        return PREFIX + self.base

    @property
    def base_names(self) -> tuple[str, str, str]:
        """Configuration, backbone and model in transformers."""
        config, backbone = self.config or f"{self.stem}Config", self.backbone or f"{self.stem}Model"
        return config, backbone, f"{self.stem}ForCausalLM"

    @property
    def classifier(self) -> str:
        """Our class for AutoModelForSequenceClassification."""
        return f"{self.own_stem or f'Causal{self.stem}'}ForSequenceClassification"

    @property
    def names(self) -> tuple[str, str, str]:
        """Configuration, backbone and model here."""
        stem = self.own_stem or f"Causal{self.stem}"
        return f"Causal{self.stem}Config", f"{stem}Model", f"{stem}ForCausalLM"


FAMILIES = (
    Family("qwen2", "Qwen2", own_stem="CausalQwen"),
    Family("qwen3", "Qwen3"),
    Family("qwen3_moe", "Qwen3Moe"),
    Family("qwen3_5_text", "Qwen3_5", "Qwen3_5TextConfig", "Qwen3_5TextModel"),
    Family("llama", "Llama"),
    Family("mistral", "Mistral"),
    Family("smollm3", "SmolLM3"),
    Family("gemma2", "Gemma2"),
    Family("gemma3_text", "Gemma3", "Gemma3TextConfig", "Gemma3TextModel"),
    Family("phi3", "Phi3"),
    Family("olmo2", "Olmo2"),
    Family("granite", "Granite", divisor="logits_scaling"),
)
BY_BASE = {family.base: family for family in FAMILIES}
BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}
QWEN2 = BY_BASE["qwen2"]


def is_causal(model_type: object) -> bool:
    """Whether this is a model_type of ours."""
    return model_type in BY_MODEL_TYPE


def family_of(model_type: object, where: str = "The checkpoint") -> Family:
    """The family of a base model's model_type, or of ours."""
    found = BY_BASE.get(str(model_type)) or BY_MODEL_TYPE.get(str(model_type))
    if found is None:
        raise ValueError(
            f"{where} has the architecture {model_type!r}, which CausalQwen does not know; it "
            f"knows {', '.join(BY_BASE)}, and another family is added in causal_qwen/families.py."
        )
    return found


def text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the config.json of a model that also sees (Qwen3.5, Gemma 3), the part that reads; else
    all fields."""
    inner = fields.get("text_config")
    if not isinstance(inner, dict) or inner.get("model_type") not in BY_BASE:
        return fields
    shared = {name: fields[name] for name in ("quantization_config",) if name in fields}
    return {**shared, **inner}
