"""Value space: numbers <-> the scale on which they are predicted.

    y = (g(v) - center) / spread,     g(v) = v ("linear") or sign(v) ln(1 + |v|) ("symlog")

Y is on that scale: medians and quantiles map back exactly, because the map is monotone. A *field*
is a named target with its own center and spread, fitted on training data (median and interquartile
range: outliers move neither) and saved in the config.

At <NUM> positions e_i = embed(x_i) + phi(v_i), phi(v) = sign(v) ln(1 + |v|) e_dir ("log"), or
embed(<NUM>) * sigmoid(v) ("sigmoid"); everywhere else e_i = embed(x_i).
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEFAULT_FIELD = "default"
LARGEST = torch.finfo(torch.float64).max


def symlog(value: Tensor) -> Tensor:
    """sign(v) ln(1 + |v|)"""
    return value.sign() * value.abs().log1p()


def symexp(value: Tensor) -> Tensor:
    """The inverse of `symlog`; use float64 where large values matter."""
    return value.sign() * value.abs().expm1()


class ValueSpace(NamedTuple):
    """Maps values of one field, or of every position (tensors), to Y and back."""

    kind: str = "symlog"
    center: Any = 0.0
    spread: Any = 1.0

    def encode(self, value: Tensor) -> Tensor:
        """v -> y"""
        value = symlog(value) if self.kind == "symlog" else value
        return (value - self.center) / self.spread

    def decode(self, y: Tensor) -> Tensor:
        """y -> v in float64. Overflow is clamped to the largest double, with a warning."""
        value = self.clamped(y)
        warn_if_clamped(value)
        return value

    def clamped(self, y: Tensor) -> Tensor:
        """`decode` without the warning, for values that may not be used."""
        value = self.center + self.spread * y.double()
        value = symexp(value) if self.kind == "symlog" else value
        return value.clamp(-LARGEST, LARGEST)

    def log_slope(self, value: Tensor) -> Tensor:
        """ln dy/dv: added to a log-density of y, it gives that of v."""
        slope = -value.abs().log1p() if self.kind == "symlog" else torch.zeros_like(value)
        return slope - torch.as_tensor(self.spread, dtype=value.dtype).log()


def warn_if_clamped(value: Tensor) -> None:
    if (value.abs() >= LARGEST).any():
        warnings.warn(
            f"a value beyond {LARGEST:.2g} was predicted and is clamped to it",
            RuntimeWarning,
            stacklevel=3,
        )


def fit_field(values: Any, kind: str) -> tuple[float, float]:
    """(center, spread) of training values: their median and interquartile range."""
    values = torch.as_tensor(values, dtype=torch.float64).flatten()
    if len(values) == 0 or not values.isfinite().all():
        raise ValueError("values must be finite, and at least one, to fit a field.")
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, center, high = ValueSpace(kind).encode(values).quantile(quartiles).tolist()
    spread = high - low
    return center, spread if spread > 0 else 1.0


def field_space(config: Any, field: str | None = None) -> ValueSpace:
    """The space of a named field; without a name, of the field "default" if there is one."""
    fields = config.value_fields or {}
    if field is None:
        return ValueSpace(config.value_space, *fields.get(DEFAULT_FIELD, (0.0, 1.0)))
    if field not in fields:
        known = ", ".join(fields) or "none: fit one with model.fit_value_field(name, values)"
        raise ValueError(f"field={field!r} is unknown; this model has {known}.")
    return ValueSpace(config.value_space, *fields[field])


def position_space(config: Any, fields: Tensor | None, like: Tensor) -> ValueSpace:
    """The space of every position. `fields` (B,) or (B, T): indices into the names of
    `config.value_fields` in alphabetical order (that of a loaded config), -1 for the default;
    `like` is (B, T)."""
    default = field_space(config)
    if fields is None:
        return default
    pairs = [pair for _, pair in sorted((config.value_fields or {}).items())]
    # The default is last, at index -1. float64: a center may be far larger than its spread.
    table = torch.tensor([*pairs, default[1:]], dtype=torch.float64, device=like.device)
    fields = fields.to(like.device)
    if fields.numel() and not -1 <= int(fields.min()) <= int(fields.max()) < len(pairs):
        raise ValueError(
            f"numeric_fields contains {fields.unique().tolist()}; the model has {len(pairs)} "
            "value fields, numbered from 0, and -1 is the default."
        )
    center, spread = table[fields if fields.dim() == 2 else fields.unsqueeze(-1)].unbind(-1)
    return ValueSpace(config.value_space, center.expand_as(like), spread.expand_as(like))


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
