"""Value embedding: ids + values -> inputs_embeds.

    e_i = embed(x_i) + phi(v_i)   at <NUM> positions,   e_i = embed(x_i)   everywhere else,

with phi(v) = sign(v) ln(1 + |v|) e_dir ("log"), or embed(<NUM>) * sigmoid(v) ("sigmoid").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from causal_qwen.modeling.value_space import symlog


def check_values(ids: Tensor, values: Tensor | None, num_token_id: int | None) -> None:
    """Raise unless every `<NUM>` has a finite value and every other token has none."""
    is_number = ids == num_token_id if num_token_id is not None else torch.zeros_like(ids).bool()
    if values is None:
        if is_number.any():
            raise ValueError(
                f"input_ids{_first(is_number)} is <NUM> and has no value; pass numeric_values with "
                "input_ids, as returned by CausalQwenProcessor."
            )
        return
    if num_token_id is None:
        raise ValueError("numeric_values need a <NUM> token; set config.num_token_id first.")
    if values.shape != ids.shape:
        raise ValueError(
            f"numeric_values of shape {tuple(values.shape)} must have the shape of input_ids, "
            f"{tuple(ids.shape)}."
        )
    if (is_bad := ~values.isfinite()).any():
        raise ValueError(
            f"numeric_values{_first(is_bad)} is {values[is_bad][0].item()}, not finite; keep the "
            "number as text, or drop the row."
        )
    if (is_stray := (values != 0) & ~is_number).any():
        raise ValueError(
            f"numeric_values{_first(is_stray)} is {values[is_stray][0].item():g} at a token that "
            "is not <NUM>; pad and cut values and ids together."
        )


def _first(where: Tensor) -> Any:
    """[row, position] of the first True."""
    return where.nonzero()[0].tolist()


def embed_values(
    embeddings: Tensor, values: Tensor, is_number: Tensor, direction: Tensor, encoding: str
) -> Tensor:
    """Add values to the embeddings of `<NUM>` tokens. (B, T, H), (B, T), (B, T), (H,) -> (B, T, H)

    Computed in float32: in bfloat16, ln(1 + 999000) and ln(1 + 1020000) are the same number.
    float64 values are narrowed only after the logarithm: 1e300 is a valid value.
    """
    values = values if values.dtype == torch.float64 else values.float()
    wide = embeddings.float()
    if encoding == "log":
        enriched = wide + symlog(values).float().unsqueeze(-1) * direction.float()
    else:
        enriched = wide * values.sigmoid().float().unsqueeze(-1)
    return torch.where(is_number.unsqueeze(-1), enriched.to(embeddings.dtype), embeddings)
