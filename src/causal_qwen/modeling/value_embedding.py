"""Embedding: ids + values -> inputs_embeds.

    e_i = embed(x_i) + phi(v_i)   at <NUM> positions,   e_i = embed(x_i)   everywhere else,

with phi(v) = sign(v) ln(1 + |v|) e_dir ("log"), or embed(<NUM>) * sigmoid(v) ("sigmoid").
"""

from __future__ import annotations

import torch
from torch import Tensor

from causal_qwen.modeling.value_space import symlog


def check_values(ids: Tensor, values: Tensor | None, num_token_id: int | None) -> None:
    """Every `<NUM>` has a finite value, and nothing else has one. Says which row does not."""
    is_number = ids == num_token_id if num_token_id is not None else torch.zeros_like(ids).bool()
    if values is None:
        if is_number.any():
            raise ValueError(
                f"input_ids{_first(is_number)} is <NUM> and has no value; give numeric_values "
                "beside input_ids, as CausalQwenProcessor does."
            )
        return
    if num_token_id is None:
        raise ValueError("numeric_values need a <NUM> token: set config.num_token_id first.")
    if values.shape != ids.shape:
        raise ValueError(
            f"numeric_values of shape {tuple(values.shape)} must stand beside "
            f"input_ids of shape {tuple(ids.shape)}, one value per token."
        )
    if (is_bad := ~values.isfinite()).any():
        raise ValueError(
            f"numeric_values{_first(is_bad)} is {values[is_bad][0].item()}; only finite numbers "
            "can be read: leave the number as text, or drop the row."
        )
    if (is_stray := (values != 0) & ~is_number).any():
        raise ValueError(
            f"numeric_values{_first(is_stray)} is {values[is_stray][0].item():g} beside a token "
            "that is not <NUM>; values and ids must be padded and cut together."
        )


def _first(where: Tensor) -> list[int]:
    """[row, position] of the first True."""
    place: list[int] = where.nonzero()[0].tolist()
    return place


def embed_values(
    embeddings: Tensor, values: Tensor, is_number: Tensor, direction: Tensor, encoding: str
) -> Tensor:
    """Add values to the embeddings of `<NUM>` tokens. (B, T, H), (B, T), (B, T), (H,) -> (B, T, H)

    The value channel is computed in float32: in bfloat16, ln(1 + 999000) and ln(1 + 1020000) are
    the same number. What is wider is narrowed only after its logarithm: 1e300 can be read.
    """
    values = values if values.dtype == torch.float64 else values.float()
    bent = symlog(values) if encoding == "log" else values.sigmoid()
    bent = bent.float().unsqueeze(-1)  # (B, T, 1)
    if encoding == "log":
        enriched = embeddings.float() + bent * direction.float()
    else:
        enriched = embeddings.float() * bent
    return torch.where(is_number.unsqueeze(-1), enriched.to(embeddings.dtype), embeddings)
