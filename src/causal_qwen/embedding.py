"""Embedding: ids + values -> inputs_embeds.

    e_i = embed(x_i) + phi(v_i)   at <NUM> positions,   e_i = embed(x_i)   everywhere else,

with phi(v) = sign(v) ln(1 + |v|) e_dir ("log"), or embed(<NUM>) * sigmoid(v) ("sigmoid").
"""

from __future__ import annotations

import torch
from torch import Tensor


def symlog(value: Tensor) -> Tensor:
    """sign(v) ln(1 + |v|): the compressed scale on which numbers are read and predicted."""
    return value.sign() * value.abs().log1p()


def symexp(value: Tensor) -> Tensor:
    """The inverse of `symlog`; ask for float64 input where large values matter."""
    return value.sign() * value.abs().expm1()


def embed_values(
    embeddings: Tensor, values: Tensor, is_number: Tensor, direction: Tensor, encoding: str
) -> Tensor:
    """Add values to the embeddings of `<NUM>` tokens. (B, T, H), (B, T), (B, T), (H,) -> (B, T, H)

    The value channel is computed in float32: in bfloat16, ln(1 + 999000) and ln(1 + 1020000) are
    the same number.
    """
    values = values.to(torch.float32).unsqueeze(-1)  # (B, T, 1)
    if encoding == "log":
        enriched = embeddings.float() + symlog(values) * direction.float()
    else:
        enriched = embeddings.float() * values.sigmoid()
    return torch.where(is_number.unsqueeze(-1), enriched.to(embeddings.dtype), embeddings)
