"""Prediction: the distribution of the number that follows a text.

    model.predict("The diamond weighs 0.7 carat. Its price is", processor)

Given that the next token is a number, its value is Y ~ Cauchy(w.loc_U' + c, |w|.scale_U') on the
scale of `value_space`; medians, quantiles and intervals map back exactly. A Cauchy has no mean: the
median is the point prediction. This law is predictive: it covers all individuals and exogenous
noise. `sample` gives the numbers of single individuals, the same as `causal` generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from transformers.utils import logging

from causal_qwen.decoding.decision import SCALE_FLOOR
from causal_qwen.decoding.noise import NoiseGains
from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.individuals import Individual, resolve_individuals
from causal_qwen.modeling.abduction import whole
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.modeling.value_space import ValueSpace, field_space
from causal_qwen.text.numerals import render

logger = logging.get_logger("transformers.causal_qwen")

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class IndividualLaw:
    """u = loc_U + T kappa (p scale_U t + (1 - p) b eps) of an individual, in every row."""

    scale: Tensor  # scale_U (..., C)
    b: Tensor  # (C,)
    weight: Tensor  # (C,)
    positions: Tensor  # of the last token (...,), as in generation
    settings: DecodingSettings

    def __getitem__(self, row: Any) -> IndividualLaw:
        return replace(self, scale=self.scale[row], positions=self.positions[row])

    def shifts(self, individuals: Sequence[int] | Sequence[Individual]) -> Tensor:
        """w.(u - loc_U) of n individuals. -> (..., n)"""
        settings, count = self.settings, len(individuals)
        names = ("min_density", "temperature", "persistence")
        options: dict[str, Any] = {name: getattr(settings, name) for name in names}
        options["fresh"] = settings.is_fresh
        people = resolve_individuals(list(individuals), count, 1, len(self.b), **options)
        gains = NoiseGains(settings.noise_gain, settings.fresh_noise_gain)
        shifts = torch.empty(*self.positions.shape, count, dtype=torch.float64)
        for position in self.positions.unique().tolist() if count else ():
            at, places = self.positions == position, [position] * count
            t = torch.from_numpy(gains.noise(people, places))  # (n, C)
            shifts[at] = (self.scale[at] * self.weight) @ t.T
            if (exogenous := gains.exogenous(people, None, places)) is not None:
                shifts[at] += torch.from_numpy(exogenous) @ (self.b * self.weight)
        return shifts


@dataclass(frozen=True, repr=False, eq=False)
class NumberPrediction:
    """The distribution of a number, or of a batch of numbers (then all results are arrays).

    `probability` is P_<NUM>: the probability that the next token is a number at all.
    """

    y: Cauchy  # in `space`, float64: shape () or (B,)
    space: ValueSpace
    probability: Any
    law: IndividualLaw | None = field(default=None, repr=False)

    @property
    def median(self) -> Any:
        """The point prediction."""
        return _out(self.space.decode(self.y.loc))

    def quantile(self, p: ArrayLike) -> Any:
        """The value that the number is below with probability p. p (...) -> (batch..., ...)"""
        probability = torch.as_tensor(np.asarray(p, dtype=np.float64))
        if not ((probability > 0) & (probability < 1)).all():
            raise ValueError(f"p={p!r} is outside (0, 1).")
        shape = (*self.y.loc.shape, *(1,) * probability.dim())
        y = Cauchy(self.y.loc.reshape(shape), self.y.scale.reshape(shape))
        return _out(self.space.decode(y.icdf(probability)))

    def interval(self, level: float = 0.9) -> tuple[Any, Any]:
        """The central interval that contains the number with probability `level`."""
        low, high = self.y.interval(level)
        return _out(self.space.decode(low)), _out(self.space.decode(high))

    def log_prob(self, value: ArrayLike) -> Any:
        """The log-density at `value`, one for all or one per row, in units of the value itself."""
        v = torch.from_numpy(np.array(value, dtype=np.float64))
        return _out(self.y.log_prob(self.space.encode(v)) + self.space.log_slope(v))

    def sample(self, individuals: Sequence[int] | Sequence[Individual]) -> Array:
        """The numbers of these individuals (seeds, or `Individual`s), the same that they give in
        `causal` generation after the same text: w.u + c. -> (n,), or (B, n) for a batch."""
        if self.law is None:
            raise ValueError("a regressor's prediction has no individuals; use quantile.")
        moved = self.y.loc.unsqueeze(-1) + self.law.shifts(individuals)
        return self.space.decode(moved).numpy()

    def __len__(self) -> int:
        return len(self.y.loc)

    def __getitem__(self, row: Any) -> NumberPrediction:
        law = None if self.law is None else self.law[row]
        probability = _out(torch.as_tensor(self.probability)[row])
        y = Cauchy(self.y.loc[row], self.y.scale[row])
        return NumberPrediction(y, self.space, probability, law)

    def __iter__(self) -> Iterator[NumberPrediction]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        if self.y.loc.dim():
            return f"{len(self)} numbers"
        low, high = map(render, self.interval(0.9))
        interval = f"90% interval {low} to {high}"
        return f"{render(self.median)}  ({interval}; P(<NUM>) = {self.probability:.2g})"


@torch.no_grad()
def predict(
    model: CausalModel,
    texts: str | Sequence[str],
    processor: Processor,
    *,
    field: str | None = None,
    batch_size: int = 16,
    **reading: Any,
) -> NumberPrediction:
    """The distribution of the number that follows each text; `field` names the target, whose
    standardisation is used, `reading` are options of the processor."""
    processor.check(model.config)
    reading.setdefault("encode_numbers", processor.encode_numbers)
    if model.config.encode_numbers == "text":
        logger.warning_once("This model was not trained on values: its numbers are arbitrary.")
    space = field_space(model.config, field)
    many = [texts] if isinstance(texts, str) else list(texts)
    none = torch.empty(0, model.config.latent_size)
    parts: list[tuple[Tensor, ...]] = [
        (none, none, none, torch.empty(0), torch.empty(0, dtype=torch.long))
    ]
    for start in range(0, len(many), batch_size):
        batch = many[start : start + batch_size]
        parts.append(_last_position(model, processor, batch, reading, start))
    loc, wide, scale, probability, positions = map(torch.cat, zip(*parts, strict=True))
    b = whole(model.action, "b_noise").detach().abs().double().cpu()
    weight, bias = model.action.value.weight[0].double().cpu(), float(model.action.value.bias)
    y = Cauchy(loc.double() @ weight + bias, wide.double() @ weight.abs())
    y = Cauchy(y.loc, y.scale.clamp_min(SCALE_FLOOR))
    settings = model.resolve_settings(causal_mode="causal")
    law = IndividualLaw(scale.double(), b, weight, positions, settings)
    found = NumberPrediction(y, space, probability.double().numpy(), law)
    return found[0] if isinstance(texts, str) else found


def _last_position(
    model: CausalModel,
    processor: Processor,
    texts: Sequence[str],
    reading: dict[str, Any],
    start: int,
) -> tuple[Tensor, ...]:
    """loc_U', scale_U', scale_U, P_<NUM> and the position, at the end of every text.
    -> (B, C), (B, C), (B, C), (B,), (B,)"""
    asked = [processor.ask(text) for text in texts]
    inputs = processor(asked, return_tensors="pt", padding_side="left", **reading)
    if (is_empty := inputs["attention_mask"].sum(-1) == 0).any():
        row = start + int(is_empty.nonzero()[0])
        raise ValueError(f"texts[{row}] is empty; give at least one word.")
    inputs = {name: column.to(model.device) for name, column in inputs.items()}
    positions = inputs["attention_mask"].cumsum(-1) - 1
    output = model(
        **inputs,
        position_ids=positions.clamp_min(0),
        logits_to_keep=1,
        skip_logits=True,
        use_cache=False,
    )
    last = Cauchy(output.loc_U[:, -1], output.scale_U[:, -1])
    u = model.action.widen(last)
    number = model.config.num_token_id or 0  # `Processor.check` has compared it
    probability = model.decision(model.act(last)[0])[:, number].float()
    found = (u.loc.float(), u.scale.float(), last.scale.float(), probability)
    return *(column.cpu() for column in found), positions[:, -1].cpu()


def _out(value: Tensor) -> Any:
    """A tensor as an array, or as a float if it is a single number."""
    return value.item() if value.dim() == 0 else value.numpy()
