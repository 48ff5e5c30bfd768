"""Heads of the benchmark of numbers: ours and what others use, on the same frozen features.

Every linear head has the same optimiser, penalties, folds and early stopping
(`causal_qwen.regression.head`) and lives in the same space. Ours has more than its loss: it also
chooses one of four noises by cross-validation, and fits its scale to residuals of unseen rows,
where other heads with a scale train it together with the location. The Gaussian and Student's t
therefore appear a second time, fitted "in two steps" like ours, which separates the effect of the
Cauchy from that of the fitting. References see the table's raw columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder
from torch import Tensor

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.regression.head import NOISES, SCALE_PENALTIES, Output, cooled, fit_chain, fit_head

Array = NDArray[np.float64]

LEVELS = (0.5, 0.8, 0.9, 0.95)
QUANTILES = (0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975)
FREEDOM = 4.0  # of Student's t
CAUTION = 10.0  # a scale is penalised more than a location
TREES: dict[str, Any] = {"max_iter": 100, "random_state": 0}


class Said(NamedTuple):
    """Predictions in the head's space: quantiles (N, Q), and loc and scale where there are any."""

    quantiles: Array
    loc: Array
    scale: Array | None = None

    @classmethod
    def of(cls, family: Any, loc: Any, scale: Any) -> Said:
        loc, scale = np.asarray(loc, float), np.broadcast_to(np.asarray(scale, float), len(loc))
        spread = family.ppf(QUANTILES)
        return cls(loc[:, None] + scale[:, None] * spread, loc, scale)


class Data(NamedTuple):
    """What a head learns from, and what it is asked about."""

    z: Tensor
    raw: Any  # a DataFrame
    y: Tensor
    asked_z: Tensor
    asked_raw: Any
    seed: int


# ---------------------------------------------------------------- linear heads


def ours(data: Data) -> Said:
    chain, _ = fit_chain(data.z, data.y, seed=data.seed)
    _, y = chain(data.asked_z)
    return Said.of(stats.cauchy, y.loc, y.scale)


def mean_squared(data: Data) -> Said:
    head = fit_head(
        data.z, data.y, lambda o, y: (o[..., 0] - y) ** 2 / 2, [Output()], seed=data.seed
    )
    spread = (data.y - head.unseen[:, 0]).square().mean().sqrt()
    return Said.of(stats.norm, head(data.asked_z.double())[:, 0], spread)


def mean_absolute(data: Data) -> Said:
    head = fit_head(data.z, data.y, lambda o, y: (o[..., 0] - y).abs(), [Output()], seed=data.seed)
    spread = (data.y - head.unseen[:, 0]).abs().mean()
    return Said.of(stats.laplace, head(data.asked_z.double())[:, 0], spread)


def located(family: Any, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Any:
    """A head for a location and the logarithm of a scale, trained together."""

    def fit(data: Data) -> Said:
        starts = [Output(), Output(math.log(0.5), CAUTION)]
        head = fit_head(
            data.z, data.y, lambda o, y: loss(o[..., 0], o[..., 1], y), starts, seed=data.seed
        )
        loc, log_scale = head(data.asked_z.double()).unbind(-1)
        return Said.of(family, loc, log_scale.exp())

    return fit


def in_two_steps(
    family: Any, loss: Callable[[Tensor, Tensor, Tensor], Tensor], noises: Sequence[float]
) -> Any:
    """As `fit_chain` does it: the location under a cooling noise, the scale on unseen residuals."""

    def under(noise: float, outputs: Tensor, y: Tensor) -> Tensor:
        loc = outputs[..., 0]
        return loss(loc, torch.full_like(loc, math.log(noise)), y) * noise**2

    def unlikely(residuals: Tensor) -> float:
        scale = residuals.abs().median().clamp_min(1e-9) / family.ppf(0.75)
        return float(scale.log() - family.logpdf((residuals / scale).numpy()).mean())

    def fit(data: Data) -> Said:
        found = []
        for noise in noises:
            head = fit_head(
                data.z,
                data.y,
                partial(under, noise),
                [Output()],
                seed=data.seed,
                lesson=partial(cooled, under, noise),
            )
            residuals = data.y - head.unseen[:, 0]
            found.append((unlikely(residuals), head, residuals))
        _, location, residuals = min(found, key=lambda one: one[0])
        start = Output(math.log(float(residuals.abs().median().clamp_min(1e-6))))
        scale = fit_head(
            data.z,
            residuals,
            lambda o, r: loss(torch.zeros_like(o[..., 0]), o[..., 0], r),
            [start],
            penalties=SCALE_PENALTIES,
            seed=data.seed,
        )
        z = data.asked_z.double()
        return Said.of(family, location(z)[:, 0], scale(z)[:, 0].exp())

    return fit


def gaussian(loc: Tensor, log_scale: Tensor, y: Tensor) -> Tensor:
    return log_scale + ((y - loc) * (-log_scale).exp()) ** 2 / 2


def student(loc: Tensor, log_scale: Tensor, y: Tensor) -> Tensor:
    z2 = ((y - loc) * (-log_scale).exp()) ** 2
    return log_scale + (FREEDOM + 1) / 2 * (z2 / FREEDOM).log1p()


def cauchy(loc: Tensor, log_scale: Tensor, y: Tensor) -> Tensor:
    return Cauchy(loc, log_scale.exp()).nll(y)


def pinball(data: Data) -> Said:
    p = torch.tensor(QUANTILES)
    starts = [Output(float(start)) for start in 0.7 * stats.norm.ppf(QUANTILES)]

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        error = y.unsqueeze(-1) - outputs
        return torch.maximum(p * error, (p - 1) * error).sum(-1)

    head = fit_head(data.z, data.y, loss, starts, seed=data.seed)
    quantiles = np.sort(head(data.asked_z.double()).numpy(), -1)
    return Said(quantiles, quantiles[:, len(QUANTILES) // 2])


# ---------------------------------------------------------------- references


def training_median(data: Data) -> Said:
    quantiles = np.quantile(data.y, QUANTILES)
    return Said(
        np.tile(quantiles, (len(data.asked_z), 1)), np.full(len(data.asked_z), quantiles[4])
    )


def boosted(**options: Any) -> Any:
    is_text = make_column_selector(dtype_exclude="number")
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    columns = make_column_transformer((encoder, is_text), remainder="passthrough")
    return make_pipeline(columns, HistGradientBoostingRegressor(**TREES, **options))


def trees(family: Any, **options: Any) -> Any:
    """A point by boosting, and the spread of residuals of unseen rows."""

    def fit(data: Data) -> Said:
        model, y = boosted(**options), data.y.numpy()
        residuals = y - cross_val_predict(model, data.raw, y, cv=3)
        spread = residuals.std() if family is stats.norm else np.abs(residuals).mean()
        return Said.of(family, model.fit(data.raw, y).predict(data.asked_raw), spread)

    return fit


def quantile_trees(data: Data) -> Said:
    y = data.y.numpy()
    found = [
        boosted(loss="quantile", quantile=p).fit(data.raw, y).predict(data.asked_raw)
        for p in QUANTILES
    ]
    quantiles = np.sort(np.stack(found, -1), -1)
    return Said(quantiles, quantiles[:, len(QUANTILES) // 2])


OURS, MSE, GAUSSIAN, L1 = "ours", "MSE", "Gaussian", "L1 (Laplace)"
HEADS: dict[str, Callable[[Data], Said]] = {
    OURS: ours,
    MSE: mean_squared,
    GAUSSIAN: located(stats.norm, gaussian),
    L1: mean_absolute,
    "Student t": located(stats.t(FREEDOM), student),
    "plain Cauchy": located(stats.cauchy, cauchy),
    "Gaussian, in two steps": in_two_steps(stats.norm, gaussian, [1.0]),
    "Student t, in two steps": in_two_steps(stats.t(FREEDOM), student, NOISES),
    "quantiles": pinball,
}
REFERENCES: dict[str, Callable[[Data], Said]] = {
    "boosting L2 (raw)": trees(stats.norm),
    "boosting L1 (raw)": trees(stats.laplace, loss="absolute_error"),
    "boosting quantiles (raw)": quantile_trees,
    "training median": training_median,
}
