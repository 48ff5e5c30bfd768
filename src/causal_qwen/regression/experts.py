"""Experts: several predictors of one number, and the Cauchy that weighs them.

    features of every source, labels -> U: predictions of the experts -> Y = w.U + c

Two passes. The first is robust: a linear head by the Cauchy likelihood (`fit_ridge`), boosting by
absolute errors, each predicting rows that it has not seen. Its residuals give every label a
credibility (`credibility`). The second pass fits these experts again with the credibilities as
weights, and others by squared errors beside them.

The linear experts are ridge regressions, their penalty chosen by leave-one-out:

    minimise  sum_i w_i (y_i - x_i.a - c)^2 + penalty |a|^2 + (penalty / m) c^2,   m = mean |x_i|^2

Residuals without row i come from the leverages, so that every penalty costs one product once the
Gram matrix of the smaller side (rows or features) is diagonalised. The *robust* fit iterates the
weights w_i / (1 + (r_i / 2s)^2), r_i the leave-one-out residuals and s their median size: the
stationary points of these weights are those of a Cauchy likelihood with scale 2s. Outliers hide in
residuals of rows that were fitted; hence leave-one-out.

The experts' predictions of unseen rows are the coordinates of U. One chain turns them into Y: its
weights w >= 0 maximise the Cauchy likelihood, its scale follows the predictions and how much
they disagree (`head`). Experts of weight 0 are dropped, and are not asked when predicting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize
from sklearn.ensemble import HistGradientBoostingRegressor

from causal_qwen.regression.credibility import NEGLIGIBLE, Credibility, find_credibility
from causal_qwen.regression.head import Chain, fit_scale

Array = NDArray[np.float64]
Splits = Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]  # (training, test) rows

LEAST_ROWS = 60  # of kernel and boosting beside other experts
DOUBTFUL = 0.5  # labels that are less credible do not count in absolute errors
PRIOR_ROWS = 10.0  # of equal weights
LEAST_SHARE = 0.02  # of all weights; an expert with less is dropped
MODEL_EVIDENCE = 2.0  # nats by which the language model must raise the likelihood of all labels
TREES: dict[str, Any] = {
    "learning_rate": 0.07,
    "max_features": 0.5,
    "l2_regularization": 1.0,
    "early_stopping": False,
}
STEPS = (30, 60, 100, 150, 220, 300)  # numbers of trees, of which cross-validation chooses
BINS = 255  # of a column, as in scikit-learn's boosting
LEAF_ROWS = 4, 20  # at least, in a leaf: a sixtieth of the rows, within these bounds
LEAVES = 6, 15  # of a tree: a thirtieth of the rows, within these bounds
SQUARED_ROWS = 300  # of fewer, trees by absolute errors alone are as good
PENALTIES = tuple(10.0**power for power in (-4, -3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5, 1))
ROBUST_STEPS = 3
WIDTH = 2.0  # scale of the Cauchy, in median sizes of residuals
LEAST_WEIGHT = 1e-6  # of a row, relative to the largest
HALF = 0.5  # of the labels with one value: residuals are then no scale for the others


class Expert(NamedTuple):
    """A kind of predictor on one block of features."""

    source: str  # the features that it reads
    loss: str  # "squared_error", "absolute_error" (boosting), "cauchy" (linear)
    steps: int = STEPS[-1]  # of boosting


class Problem(NamedTuple):
    """What the experts learn from. `trust` (N,) is the credibility of every label."""

    features: dict[str, Any]  # by source: a `Design`, of boosting an array (N, H)
    categories: int  # the first columns of boosting
    y: Array
    weights: Array
    splits: Splits

    def fit(self, expert: Expert, trust: Array, rows: Any) -> Any:
        """A `Ridge`, or scikit-learn's boosting, of some rows."""
        if expert.source == "boosting":
            return Growing(expert, self, trust, rows).grow(expert.steps)
        design, weights = self.features[expert.source].take(rows), (self.weights * trust)[rows]
        is_robust = expert.loss == "cauchy"
        return fit_ridge(design, self.y[rows], weights, robust=is_robust)


@dataclass
class Stack:
    """The experts that are kept, and the chain on their predictions: each is the location of a
    coordinate of U; the spread of all is read by the scale alone."""

    experts: list[tuple[Expert, Any]]  # with what `Problem.fit` gave
    chain: Chain

    def coordinates(self, features: Mapping[str, Any]) -> Array:
        """What the chain reads of features by source, (N, H) each: the predictions, and the
        logarithm of their spread. (N, m + 1)"""
        found = [fitted.predict(features[expert.source]) for expert, fitted in self.experts]
        return with_spread(np.stack(found, 1))


class Evidence(NamedTuple):
    """What cross-validation found; rows without a prediction of unseen rows have NaN."""

    unseen: Array  # (N, m): predictions of the experts that are kept
    credibility: Credibility
    peers: dict[str, Array]  # name -> predictions of unseen rows, of single methods


def with_spread(predictions: Array) -> Array:
    spread = np.log(predictions.std(1, keepdims=True) + 1e-3)
    return np.hstack([predictions, spread])


class Growing:
    """Boosting on some rows, to which trees are added: `grow(60)` after `grow(30)` adds 30, and
    gives what `grow(60)` alone would."""

    def __init__(self, expert: Expert, problem: Problem, trust: Array, rows: Any) -> None:
        x, y = problem.features["boosting"][rows], problem.y[rows]
        weights, trust = problem.weights[rows], trust[rows]
        if expert.loss == "absolute_error":  # weighted medians of leaves take ten times as long
            is_kept = trust >= DOUBTFUL
            x, y, weights = x[is_kept], y[is_kept], weights[is_kept]
        else:
            weights = weights * trust
        count, categories = len(y), problem.categories
        x = np.where(np.isfinite(x).any(0), x, 0.0)  # scikit-learn bins no column without values
        self.rows: tuple[Any, Array, Array | None] = x, y, None
        if weights.min() < weights.max():
            self.rows = round_to_bins(x, categories), y, weights
        self.trees = HistGradientBoostingRegressor(
            loss=expert.loss,
            min_samples_leaf=int(np.clip(count // 60, *LEAF_ROWS)),
            max_leaf_nodes=int(np.clip(count // 30, *LEAVES)),
            categorical_features=list(range(categories)) or None,
            random_state=0,
            warm_start=True,
            **TREES,
        )

    def grow(self, trees: int) -> Any:
        return self.trees.set_params(max_iter=trees).fit(*self.rows)


def round_to_bins(x: Array, first: int = 0) -> Array:
    """Columns from `first` on with at most BINS values each: means of bins of equally many rows.

    scikit-learn would find such bins itself, but one by one where rows have weights (1.9), which
    takes most of the time of a fit. (N, H)
    """
    rounded = x.copy()
    for column in range(first, x.shape[1]):
        is_known = np.isfinite(x[:, column])
        values = x[is_known, column]
        if len(np.unique(values)) > BINS:
            edges = np.quantile(values, np.arange(1, BINS) / BINS)
            bins = np.searchsorted(edges, values)
            means = np.bincount(bins, values) / np.maximum(np.bincount(bins), 1)
            rounded[is_known, column] = means[bins]
    return rounded


def predict_unseen(
    experts: Sequence[Expert], problem: Problem, trust: Array
) -> tuple[list[Expert], Array]:
    """The experts, each with its best number of trees, and their predictions of rows that they
    have not seen; NaN for rows in no test set. -> (N, m)"""
    features, _, y, weights, splits = problem
    chosen, columns = [], []
    for expert in experts:
        x, unseen = features[expert.source], np.full(len(y), np.nan)
        if expert.source == "boosting":
            growing = [Growing(expert, problem, trust, training) for training, _ in splits]
            tests = [(test, x[test]) for _, test in splits]
            steps, unseen = _grow_together(growing, tests, y, weights * trust)
            expert = expert._replace(steps=steps)
        else:
            for training, test in splits:
                unseen[test] = problem.fit(expert, trust, training).predict(x.x[test])
        chosen.append(expert)
        columns.append(unseen)
    return chosen, np.stack(columns, 1)


def _grow_together(
    growing: Sequence[Growing], tests: Sequence[tuple[Any, Any]], y: Array, weights: Array
) -> tuple[int, Array]:
    """The number of trees with the best Cauchy likelihood of unseen labels, and the predictions.

    All folds grow at once, until a stage of STEPS is worse than the one before.
    """
    best, steps, kept = math.inf, STEPS[0], np.full(len(y), np.nan)
    for stage in STEPS:
        unseen = np.full(len(y), np.nan)
        for one, (test, x) in zip(growing, tests, strict=True):
            unseen[test] = one.grow(stage).predict(x)
        tested = np.isfinite(unseen)
        loss = cauchy_loss(y[tested] - unseen[tested], weights[tested])
        if loss >= best:
            break
        best, steps, kept = loss, stage, unseen
    return steps, kept


def cauchy_loss(residuals: Array, weights: Array) -> float:
    """The mean negative log-likelihood, less ln(pi), with the median size as the scale."""
    scale = max(float(np.median(np.abs(residuals))), 1e-12)
    return float(np.average(np.log(scale) + np.log1p((residuals / scale) ** 2), weights=weights))


def fit_stack(
    features: Mapping[str, Any],
    y: Array,
    weights: Array,
    splits: Splits,
    *,
    categories: int = 0,
    seed: int = 0,
) -> tuple[Stack, Evidence]:
    """Features (N, H) or designs by source, whose first `categories` columns of boosting are such;
    labels y (N,), standardised by median and interquartile range."""
    linear = ("linear", "kernel", "model") if len(y) >= LEAST_ROWS else ("linear", "model")
    experts = [Expert(name, "cauchy") for name in linear if name in features]
    if "boosting" in features and (len(y) >= LEAST_ROWS or not experts):
        experts.append(Expert("boosting", "absolute_error"))
    designs = {name: x if name == "boosting" else Design.of(x) for name, x in features.items()}
    problem = Problem(designs, categories, y, weights, splits)
    trust = np.ones(len(y))
    experts, first = predict_unseen(experts, problem, trust)
    is_tested = np.isfinite(first).all(1) & (weights > 0)
    robust = stack_weights(first[is_tested], y[is_tested], weights[is_tested])
    residuals = y[is_tested] - robust(first[is_tested])
    found = find_credibility(residuals, weights[is_tested], NEGLIGIBLE)
    most_frequent = np.unique(y[is_tested], return_counts=True)[1].max()
    if most_frequent >= HALF * is_tested.sum():  # zeros of a count: the others are no mistakes
        found = Credibility(np.ones(len(residuals)), 0.0)
    trust[is_tested] = found.probability
    peers = dict(zip((one.source for one in experts), first.T, strict=True))

    # Least squares, labels weighted by credibility, beside the robust experts. These stay because
    # right labels have tails, too: one auction at ten times the usual price is no mistake, and
    # ruins least squares. Where all labels are credible they are the same again.
    squared = [
        one._replace(loss="squared_error")
        for one in experts
        if one.source != "boosting" or len(y) >= SQUARED_ROWS or len(experts) == 1
    ]
    squared, unseen = predict_unseen(squared, problem, trust)
    if trust.min() < 1:
        experts, first = predict_unseen(experts, problem, trust)
    experts, unseen = squared + experts, np.hstack([unseen, first])
    tested = unseen[is_tested], y[is_tested], (weights * trust)[is_tested]
    kept, mix = _choose(experts, *tested)
    every = np.arange(len(y))
    fitted = [(experts[place], problem.fit(experts[place], trust, every)) for place in kept]
    predictions = tested[0][:, kept]
    scale = fit_scale(
        torch.from_numpy(with_spread(predictions)),
        torch.from_numpy(tested[1] - mix(predictions)),
        torch.from_numpy(tested[2]),
        seed,
    )
    chain = Chain.of(mix.weights, mix.intercept, scale)
    evidence = Evidence(unseen[:, kept], found._replace(probability=trust), peers)
    return Stack(fitted, chain), evidence


def _choose(
    experts: Sequence[Expert], predictions: Array, y: Array, weights: Array
) -> tuple[list[int], Mix]:
    """The experts that count, at least one, and their weights. The language model is slow, so it is
    kept only if unseen labels are clearly likelier with it (`MODEL_EVIDENCE`)."""
    mix = stack_weights(predictions, y, weights)
    kept = np.flatnonzero(mix.weights >= LEAST_SHARE * mix.weights.sum()).tolist()
    if mix.weights.sum() == 0:
        kept = [0]
    if len(kept) < predictions.shape[1]:
        mix = stack_weights(predictions[:, kept], y, weights)
    cheap = [place for place in kept if experts[place].source != "model"]
    if not cheap or len(cheap) == len(kept):
        return kept, mix
    without = stack_weights(predictions[:, cheap], y, weights)
    gain = cauchy_loss(y - without(predictions[:, cheap]), weights)
    gain -= cauchy_loss(y - mix(predictions[:, kept]), weights)
    return (kept, mix) if len(y) * gain >= MODEL_EVIDENCE else (cheap, without)


class Mix(NamedTuple):
    """Y = predictions . weights + intercept"""

    weights: Array  # (m,), at least 0
    intercept: float

    def __call__(self, predictions: Array) -> Array:
        return predictions @ self.weights + self.intercept


def stack_weights(predictions: Array, y: Array, weights: Array) -> Mix:
    """The weights that maximise the Cauchy likelihood of y: started from the mean and from every
    expert alone, because the likelihood has several maxima. `PRIOR_ROWS` pull them towards their
    mean: differences that a few rows cannot show are not believed."""
    count = predictions.shape[1]
    share, prior = weights / weights.sum(), PRIOR_ROWS / len(y)
    width = max(float(np.median(np.abs(y - np.median(predictions, 1)))), 1e-9)

    def loss(parameters: Array) -> tuple[float, Array]:
        scale = math.exp(parameters[-1])
        r = (y - predictions @ parameters[:count] - parameters[count]) / scale
        pull = share * 2 * r / (1 + r * r)
        of_weights, of_scale = -(pull @ predictions) / scale, 1 - float(pull @ r)
        value = parameters[-1] + float(share @ np.log1p(r * r))
        apart = parameters[:count] - 1 / count
        value, of_weights = value + prior * float(apart @ apart), of_weights + 2 * prior * apart
        return value, np.concatenate([of_weights, [-pull.sum() / scale, of_scale]])

    bounds = [(0.0, None)] * count + [(None, None), (math.log(width) - 10, math.log(width) + 10)]
    starts = (np.full(count, 1 / count), *np.eye(count))
    found = [
        optimize.minimize(
            loss, [*start, 0.0, math.log(width)], jac=True, method="L-BFGS-B", bounds=bounds
        )
        for start in starts
    ]
    best = min(found, key=lambda one: float(one.fun)).x
    return Mix(best[:count], float(best[count]))


# ---------------------------------------------------------------- linear experts


class Ridge(NamedTuple):
    """y = x.coefficients + intercept"""

    coefficients: Array  # (H,)
    intercept: float
    unseen: Array  # (N,): leave-one-out predictions of the rows it was fitted on

    def predict(self, x: Any) -> Array:
        """(N, H), dense or sparse -> (N,)"""
        return np.asarray(x @ self.coefficients) + self.intercept


@dataclass(frozen=True)
class Design:
    """Features of some rows, and the products of all pairs of rows."""

    x: Any  # (N, H), dense or a SciPy sparse matrix
    products: Array | None = None  # (N, N); None where there are fewer features than rows

    @classmethod
    def of(cls, x: Any) -> Design:
        if isinstance(x, Design):
            return x
        return cls(x, _dense(x @ x.T) if x.shape[0] <= x.shape[1] else None)

    @cached_property
    def level(self) -> float:
        """m, of the constant column, too."""
        squares = self.x.multiply(self.x) if hasattr(self.x, "multiply") else self.x * self.x
        return max(float(squares.sum()) / self.x.shape[0], 1e-12)

    def take(self, rows: Any) -> Design:
        """Some rows, by their numbers."""
        if self.products is None:
            return Design.of(self.x[rows])
        return Design(self.x[rows], self.products[np.ix_(rows, rows)])


def fit_ridge(x: Any, y: Array, weights: Array, *, robust: bool = False) -> Ridge:
    """x (N, H), dense or a SciPy sparse matrix, or a `Design`; y, weights (N,)"""
    design = Design.of(x)
    if not robust:
        return _solve(design, y, weights, float(np.average(y, weights=weights)))
    found = _solve(design, y, weights, float(np.median(y)), robust=True)
    for _ in range(ROBUST_STEPS):
        tails = weights * tail_weights(y - found.unseen)
        found = _solve(design, y, tails, found.intercept, robust=True)
    return found


def tail_weights(residuals: Array) -> Array:
    """1 / (1 + (r / 2s)^2), s the median size of the residuals."""
    scale = WIDTH * np.median(np.abs(residuals))
    return 1 / (1 + (residuals / max(scale, 1e-12)) ** 2)


def _solve(design: Design, y: Array, weights: Array, center: float, robust: bool = False) -> Ridge:
    """The penalty with the smallest leave-one-out loss: squared, or the Cauchy's."""
    weights = np.maximum(weights / weights.max(), LEAST_WEIGHT)
    root, target, level = np.sqrt(weights), y - center, design.level
    is_dual = design.products is not None
    solutions = (_dual if is_dual else _primal)(design, root, target)

    def loss(candidate: tuple[Array, Array]) -> float:
        residuals = target - candidate[1]
        squares = float(np.average(residuals**2, weights=weights))
        return cauchy_loss(residuals, weights) if robust else squares

    solution, unseen = min(solutions, key=loss)
    if is_dual:
        solution = np.append(design.x.T @ solution, np.sqrt(level) * solution.sum())
    intercept = center + float(np.sqrt(level) * solution[-1])
    return Ridge(solution[:-1], intercept, unseen + center)


def _dual(design: Design, root: Array, target: Array) -> Iterator[tuple[Array, Array]]:
    """Row weights of every penalty, with leave-one-out predictions."""
    assert design.products is not None
    values, vectors = np.linalg.eigh(root[:, None] * (design.products + design.level) * root)
    turned = vectors.T @ (root * target)
    for penalty in PENALTIES:
        scaled = vectors / (values.clip(0) + penalty * design.level)
        dual = scaled @ turned
        unseen = target - dual / (scaled * vectors).sum(1) / root
        yield root * dual, unseen


def _primal(design: Design, root: Array, target: Array) -> Iterator[tuple[Array, Array]]:
    """Coefficients of every penalty, the constant's last, with leave-one-out predictions."""
    constant = np.full((len(root), 1), np.sqrt(design.level))
    weighted = root[:, None] * np.hstack([_dense(design.x), constant])
    values, vectors = np.linalg.eigh(weighted.T @ weighted)
    turned = weighted @ vectors  # (N, H + 1)
    projected = turned.T @ (root * target)
    for penalty in PENALTIES:
        shrunk = 1 / (values.clip(0) + penalty * design.level)
        fitted = turned @ (shrunk * projected)
        left = 1 - (turned**2 @ shrunk).clip(0, 1 - 1e-9)
        unseen = target - (root * target - fitted) / left / root
        yield vectors @ (shrunk * projected), unseen


def _dense(matrix: Any) -> Array:
    return np.asarray(matrix.toarray() if hasattr(matrix, "toarray") else matrix, dtype=np.float64)
