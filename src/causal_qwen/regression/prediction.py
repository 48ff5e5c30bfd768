"""Prediction: the distribution of the number that follows a text.

    model.predict("The diamond weighs 0.7 carat. Its price is", processor)

Given that the next token is a number, its value is Y ~ Cauchy(w.loc_U' + c, |w|.scale_U') on the
scale of `value_space`; medians, quantiles and intervals map back exactly. A Cauchy has no mean: the
median is the point prediction. This law is predictive: it covers all individuals and exogenous
noise. `sample` gives the numbers of single individuals, the same as `causal` generation.
"""

from __future__ import annotations

import numbers
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
from causal_qwen.individuals import Individual, check_noise, resolve_individuals
from causal_qwen.modeling.abduction import whole
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.modeling.value_space import ValueSpace, field_space
from causal_qwen.text.numerals import render

logger = logging.get_logger("transformers.causal_qwen")

Array = NDArray[np.float64]

ROWS_SHOWN = 10


@dataclass(frozen=True, eq=False)
class IndividualLaw:
    """u = loc_U + T kappa (p scale_U t + (1 - p) b eps) of an individual, in every row."""

    scale: Tensor  # scale_U (..., C)
    b: Tensor  # (C,)
    positions: Tensor  # of the last token (...,), as in generation
    settings: DecodingSettings

    def __getitem__(self, row: Any) -> IndividualLaw:
        return replace(self, scale=self.scale[row], positions=self.positions[row])

    def shifts(self, individuals: Any, weight: Tensor) -> Tensor:
        """w.(u - loc_U) of n individuals. -> (..., n)"""
        people = self.resolve(individuals)
        settings = self.settings
        gains = NoiseGains(settings.noise_gain, settings.fresh_noise_gain)
        shifts = torch.empty(*self.positions.shape, len(people), dtype=torch.float64)
        for position in self.positions.unique().tolist() if people else ():
            at, places = self.positions == position, [position] * len(people)
            t = torch.from_numpy(gains.noise(people, places))  # (n, C)
            shifts[at] = (self.scale[at] * weight) @ t.T
            if (exogenous := gains.exogenous(people, None, places)) is not None:
                shifts[at] += torch.from_numpy(exogenous) @ (self.b * weight)
        return shifts

    def resolve(self, individuals: Any) -> list[Individual]:
        """A count, seeds, Individuals or noise e, as individuals."""
        size, kinds = len(self.b), numbers.Integral | Individual
        if isinstance(individuals, kinds):
            is_one = isinstance(individuals, Individual)
            individuals = [individuals] if is_one else range(individuals)
        if not (
            isinstance(individuals, Sequence) and all(isinstance(x, kinds) for x in individuals)
        ):
            individuals = np.atleast_2d(check_noise(individuals, size))
        names = ("min_density", "temperature", "persistence")
        options: dict[str, Any] = {name: getattr(self.settings, name) for name in names}
        options["fresh"] = self.settings.is_fresh
        return resolve_individuals(individuals, len(individuals), 1, size, **options)


@dataclass(frozen=True, repr=False, eq=False)
class NumberPrediction:
    """The distribution of a number, or of a batch of numbers (then all results are arrays).

    `probability` is P_<NUM>: the probability that the next token is a number at all.
    """

    y: Cauchy  # in `space`, float64: shape () or (B,)
    space: ValueSpace
    probability: Any
    individuals: Cauchy = field(repr=False)  # U' (..., C), whose linear image y is
    weight: Tensor = field(repr=False)  # (C,)
    bias: float = 0.0
    law: IndividualLaw | None = field(default=None, repr=False)

    @classmethod
    def from_individuals(
        cls,
        u: Cauchy,
        weight: Tensor,
        bias: float,
        space: ValueSpace,
        probability: Any,
        law: IndividualLaw | None = None,
    ) -> NumberPrediction:
        """Y = w.U' + c for a batch U' (B, C), in float64."""
        u = Cauchy(u.loc.double(), u.scale.double())
        weight = weight.double().cpu()
        y = Cauchy(u.loc @ weight + bias, (u.scale @ weight.abs()).clamp_min(SCALE_FLOOR))
        return cls(y, space, probability, u, weight, bias, law)

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

    def cdf(self, value: ArrayLike) -> Any:
        """P(number <= value); one value for all, or one per row."""
        return _out(self.y.cdf(self.space.encode(self._checked(value))))

    def log_prob(self, value: ArrayLike) -> Any:
        """The log-density at `value`, in units of the value itself."""
        v = self._checked(value)
        return _out(self.y.log_prob(self.space.encode(v)) + self.space.log_slope(v))

    def crps(self, value: ArrayLike) -> Any:
        """The continuous ranked probability score; in "symlog" space in symlog units, because it is
        infinite in units of the value. `pinball` scores quantiles in these."""
        return _out(self.y.crps(self.space.encode(self._checked(value))) * self.space.spread)

    def pinball(self, value: ArrayLike, p: float) -> Any:
        """The pinball loss of the p-quantile, in units of the value."""
        error = self._checked(value) - torch.as_tensor(self.quantile(p), dtype=torch.float64)
        return _out(torch.maximum(p * error, (p - 1) * error))

    def sample(
        self, individuals: int | Individual | Sequence[int] | Sequence[Individual] | ArrayLike
    ) -> Array:
        """The numbers of these individuals: w.u + c. -> (n,), or (B, n) for a batch.

        `individuals` are seeds, `Individual`s, noise e (n, C), or a count n: the individuals 0 to
        n - 1. A model's individuals give the number that they give in `causal` generation after
        the same text. A prediction without a law (a regressor's) takes u = loc_U' + scale_U' t, so
        that samples are distributed as the prediction.
        """
        law = self.law or IndividualLaw(
            self.individuals.scale,
            torch.zeros_like(self.weight),
            torch.zeros(self.y.loc.shape, dtype=torch.long),
            DecodingSettings("causal"),
        )
        if self.law is None:  # without positions: all noise is the individual's own
            individuals = [replace(one, persistence=1.0) for one in law.resolve(individuals)]
        moved = self.y.loc.unsqueeze(-1) + law.shifts(individuals, self.weight)
        return self.space.decode(moved).numpy()

    def __len__(self) -> int:
        return len(self.y.loc)

    def __getitem__(self, row: Any) -> NumberPrediction:
        y, u = (Cauchy(*(x[row] for x in dist)) for dist in (self.y, self.individuals))
        probability = _out(torch.as_tensor(self.probability)[row])
        law = None if self.law is None else self.law[row]
        return NumberPrediction(y, self.space, probability, u, self.weight, self.bias, law)

    def __iter__(self) -> Iterator[NumberPrediction]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        if self.y.loc.dim():
            rows = [repr(self[row]) for row in range(min(len(self), ROWS_SHOWN))]
            return "\n".join([f"{len(self)} numbers", *rows, *["..."][: len(self) - ROWS_SHOWN]])
        low, high = map(render, self.interval(0.9))
        interval = f"90% interval {low} to {high}"
        return f"{render(self.median)}  ({interval}; P(<NUM>) = {self.probability:.2g})"

    def _checked(self, value: ArrayLike) -> Tensor:
        """Finite numbers to compare with: one for all, or one per row."""
        v = torch.from_numpy(np.array(value, dtype=np.float64))
        if not v.isfinite().all():
            raise ValueError(f"value={value!r} is not finite.")
        return v


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
    encoding = reading.setdefault("encode_numbers", processor.encode_numbers)
    if model.config.encode_numbers == "value" and encoding == "text" == processor.encode_numbers:
        raise ValueError(
            "this model reads numbers as values, and the processor leaves them as digits: use "
            'encode_numbers="value".'
        )
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
    u, p = Cauchy(loc, wide), probability.double().numpy()
    b = whole(model.action, "b_noise").detach().abs().double().cpu()
    settings = model.resolve_settings(causal_mode="causal")
    law = IndividualLaw(scale.double(), b, positions, settings)
    weight, bias = model.action.value.weight[0], float(model.action.value.bias)
    found = NumberPrediction.from_individuals(u, weight, bias, space, p, law)
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
