"""Context: how many tokens a model reads, and which of them end a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def context_length(max_position_embeddings: int, rope: Mapping[str, Any] | None) -> int:
    """Positions of a model, including those that RoPE scaling adds to the trained ones."""
    rope = rope or {}
    if rope.get("rope_type") not in ("linear", "dynamic", "yarn"):
        return max_position_embeddings
    trained = rope.get("original_max_position_embeddings", max_position_embeddings)
    return max(max_position_embeddings, int(trained * rope["factor"]))


def end_ids(model: Any) -> set[int]:
    """The tokens that end a text."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        return set()
    return {eos} if isinstance(eos, int) else set(eos)


def context_of(model: Any) -> int:
    """How many tokens a model reads and generates together."""
    config = model.config
    return context_length(config.max_position_embeddings, config.rope_parameters)
