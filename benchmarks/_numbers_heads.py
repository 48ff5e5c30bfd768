"""Heads of the benchmark of numbers: ours and common alternatives, on the same frozen features.

Every linear head has the same optimiser, penalties, folds and early stopping
(`causal_qwen.regression.head`) and works in the same space. Ours has more than its loss: it also
chooses one of four noises by cross-validation, and fits its scale to residuals of unseen rows,
where other heads with a scale train it together with the location. The Gaussian and Student's t
therefore appear a second time, fitted "in two steps" like ours, which separates the effect of the
Cauchy from that of the fitting. References use the table's raw columns.
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
from causal_qwen.regression import head as heads
from causal_qwen.regression.head import Loss, Output

Array = NDArray[np.float64]
Density = Callable[[Tensor, Tensor, Tensor], Tensor]  # loc, log scale, y -> negative log-density

LEVELS = (0.5, 0.8, 0.9, 0.95)
QUANTILES = (0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975)
MEDIAN = len(QUANTILES) // 2
FREEDOM = 4.0  # of Student's t
SCALE_PENALTY = 10.0  # a scale is penalised more than a location
TREES: dict[str, Any] = {"max_iter": 100, "random_state": 0}


class Prediction(NamedTuple):
    """Predictions in the head's space: quantiles (N, Q), and loc and scale if the head has them."""

    quantiles: Array
    loc: Array
    scale: Array | None = None

    def central(self, place: int) -> tuple[Array, Array]:
        """The bounds of the interval of LEVELS[place - 1]."""
        return self.quantiles[:, MEDIAN - place], self.quantiles[:, MEDIAN + place]

    def crps(self, y: Array) -> float:
        """By the pinball losses, in the head's space: in units of the value a Cauchy's is inf."""
        p, error = np.array(QUANTILES), y[:, None] - self.quantiles
        pinball = np.maximum(p * error, (p - 1) * error).mean(0)
        edges = np.concatenate([[0.0], (p[1:] + p[:-1]) / 2, [1.0]])
        return float(2 * (pinball * np.diff(edges)).sum())


def of_family(family: Any, loc: Any, scale: Any) -> Prediction:
    loc, scale = np.asarray(loc, float), np.broadcast_to(np.asarray(scale, float), len(loc))
    return Prediction(loc[:, None] + scale[:, None] * family.ppf(QUANTILES), loc, scale)


def of_quantiles(quantiles: Array) -> Prediction:
    quantiles = np.sort(quantiles, -1)
    return Prediction(quantiles, quantiles[:, MEDIAN])


class Data(NamedTuple):
    """Training rows, and the features of test rows."""

    z: Tensor
    raw: Any  # a DataFrame
    y: Tensor
    test_z: Tensor
    test_raw: Any
    seed: int

    def fit(
        self, loss: Loss, outputs: Sequence[Output] = (Output(),), **options: Any
    ) -> heads.LinearHead:
        return heads.fit_head(
            self.z, options.pop("y", self.y), loss, outputs, seed=self.seed, **options
        )


Fit = Callable[[Data], Prediction]


# ---------------------------------------------------------------- linear heads


def ours(data: Data) -> Prediction:
    chain, _ = heads.fit_chain(data.z, data.y, seed=data.seed)
    return of_family(stats.cauchy, *chain(data.test_z)[1])


def point(family: Any, loss: Loss, spread: Callable[[Tensor], Tensor]) -> Fit:
    """A location, and the spread of the residuals of unseen rows."""

    def fit(data: Data) -> Prediction:
        head = data.fit(loss)
        loc = head(data.test_z.double())[:, 0]
        return of_family(family, loc, spread(data.y - head.unseen[:, 0]))

    return fit


def joint(family: Any, density: Density) -> Fit:
    """A location and the logarithm of a scale, trained together."""

    def fit(data: Data) -> Prediction:
        outputs = [Output(), Output(math.log(0.5), SCALE_PENALTY)]
        head = data.fit(lambda o, y: density(o[..., 0], o[..., 1], y), outputs)
        loc, log_scale = head(data.test_z.double()).unbind(-1)
        return of_family(family, loc, log_scale.exp())

    return fit


def in_two_steps(family: Any, density: Density, noises: Sequence[float]) -> Fit:
    """As `fit_chain`: the location under an annealed noise, the scale on unseen residuals."""

    def location_loss(noise: float, outputs: Tensor, y: Tensor) -> Tensor:
        loc = outputs[..., 0]
        return density(loc, torch.full_like(loc, math.log(noise)), y) * noise**2

    def residual_loss(residuals: Tensor) -> float:
        scale = residuals.abs().median().clamp_min(1e-9) / family.ppf(0.75)
        return float(scale.log() - family.logpdf((residuals / scale).numpy()).mean())

    def fit(data: Data) -> Prediction:
        fitted = [
            data.fit(
                partial(location_loss, noise),
                training_loss=partial(heads.annealed, location_loss, noise),
            )
            for noise in noises
        ]
        location = min(fitted, key=lambda head: residual_loss(data.y - head.unseen[:, 0]))
        residuals = data.y - location.unseen[:, 0]
        start = Output(math.log(float(residuals.abs().median().clamp_min(1e-6))))
        scale = data.fit(
            lambda o, r: density(torch.zeros_like(o[..., 0]), o[..., 0], r),
            [start],
            y=residuals,
            penalties=heads.SCALE_PENALTIES,
        )
        z = data.test_z.double()
        return of_family(family, location(z)[:, 0], scale(z)[:, 0].exp())

    return fit


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[..., 0] - y) ** 2 / 2


def gaussian(loc: Tensor, log_scale: Tensor, y: Tensor) -> Tensor:
    return log_scale + ((y - loc) * (-log_scale).exp()) ** 2 / 2


def student(loc: Tensor, log_scale: Tensor, y: Tensor) -> Tensor:
    z2 = ((y - loc) * (-log_scale).exp()) ** 2
    return log_scale + (FREEDOM + 1) / 2 * (z2 / FREEDOM).log1p()


def cauchy(loc: Tensor, log_scale: Tensor, y: Tensor) -> Tensor:
    return Cauchy(loc, log_scale.exp()).nll(y)


def pinball(data: Data) -> Prediction:
    p = torch.tensor(QUANTILES)

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        error = y.unsqueeze(-1) - outputs
        return torch.maximum(p * error, (p - 1) * error).sum(-1)

    head = data.fit(loss, [Output(float(start)) for start in 0.7 * stats.norm.ppf(QUANTILES)])
    return of_quantiles(head(data.test_z.double()).numpy())


# ---------------------------------------------------------------- references


def training_median(data: Data) -> Prediction:
    return of_quantiles(np.tile(np.quantile(data.y, QUANTILES), (len(data.test_z), 1)))


def boosted(**options: Any) -> Any:
    is_text = make_column_selector(dtype_exclude="number")
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    columns = make_column_transformer((encoder, is_text), remainder="passthrough")
    return make_pipeline(columns, HistGradientBoostingRegressor(**TREES, **options))


def trees(family: Any, **options: Any) -> Fit:
    """A point by boosting, and the spread of residuals of unseen rows."""

    def fit(data: Data) -> Prediction:
        model, y = boosted(**options), data.y.numpy()
        residuals = y - cross_val_predict(model, data.raw, y, cv=3)
        spread = residuals.std() if family is stats.norm else np.abs(residuals).mean()
        return of_family(family, model.fit(data.raw, y).predict(data.test_raw), spread)

    return fit


def quantile_trees(data: Data) -> Prediction:
    models = [boosted(loss="quantile", quantile=p).fit(data.raw, data.y.numpy()) for p in QUANTILES]
    return of_quantiles(np.stack([model.predict(data.test_raw) for model in models], -1))


OURS, MSE, GAUSSIAN, L1 = "ours", "MSE", "Gaussian", "L1 (Laplace)"
HEADS: dict[str, Fit] = {
    OURS: ours,
    MSE: point(
        stats.norm, lambda o, y: (o[..., 0] - y) ** 2 / 2, lambda r: r.square().mean().sqrt()
    ),
    GAUSSIAN: joint(stats.norm, gaussian),
    L1: point(stats.laplace, lambda o, y: (o[..., 0] - y).abs(), lambda r: r.abs().mean()),
    "Student t": joint(stats.t(FREEDOM), student),
    "plain Cauchy": joint(stats.cauchy, cauchy),
    "Gaussian, in two steps": in_two_steps(stats.norm, gaussian, [1.0]),
    "Student t, in two steps": in_two_steps(stats.t(FREEDOM), student, heads.NOISES),
    "quantiles": pinball,
}
REFERENCES: dict[str, Fit] = {
    "boosting L2 (raw)": trees(stats.norm),
    "boosting L1 (raw)": trees(stats.laplace, loss="absolute_error"),
    "boosting quantiles (raw)": quantile_trees,
    "training median": training_median,
}
