"""Context length of a model, RoPE scaling included."""

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
