"""Source model: rows -> features of all sources -> experts -> the chain of every target.

    model = SourceModel(schema, sources)
    evidence = model.fit(frame, z, values, weights, splits)    # z of the backbone, or None
    u, y = model.predict(frame, z)["price"]

What cross-validation chooses: the space of the values, the weight of words beside columns, the
layer and pooling of z, credible labels, and the experts' weights. A source that no expert uses is
dropped, so that a table whose information is in its columns needs no language model afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.kernel_approximation import Nystroem
from threadpoolctl import threadpool_limits

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.value_space import ValueSpace, fit_field
from causal_qwen.regression.experts import (
    Blocks,
    Evidence,
    Splits,
    Stack,
    cauchy_loss,
    fit_stack,
)
from causal_qwen.regression.features import MIDDLE, Pooling
from causal_qwen.regression.ridge import Design, fit_ridge, tail_weights
from causal_qwen.regression.sources import Schema, TableFeatures, similarity

Array = NDArray[np.float64]
Hidden = Mapping[int, NDArray[np.float32]]  # place in `MIDDLE` -> z by that pooling, (N, H)

WORD_FACTORS = (1.0, 3.0, 10.0)
LINEAR = ("columns", "words")  # sources of the linear expert
MANY_ROWS = 20_000
DENSE = 500  # features; fewer are kept as a dense matrix


def few_threads(rows: int) -> Any:
    """One OpenMP thread for the trees of a small table: two would mostly wait for each other."""
    return threadpool_limits(1 if rows < MANY_ROWS else None, user_api="openmp")


class Reading(NamedTuple):
    """The pooling of z that a target uses, standardised."""

    pooling: int  # of `MIDDLE`
    center: Array  # (H,)
    spread: Array  # (H,)

    def __call__(self, z: Hidden) -> Array:
        """-> (N, H); each row has length 1 on average"""
        pooled = z[self.pooling].astype(np.float64)
        return (pooled - self.center) / self.spread

    @property
    def name(self) -> Pooling:
        return MIDDLE[self.pooling]


@dataclass
class TargetModel:
    """One number: its scale, how it reads words and z, and its experts."""

    space: ValueSpace
    word_factor: float
    reading: Reading | None  # None if no expert reads z
    kernel: Nystroem | None  # None if no expert reads similarities
    stack: Stack

    @property
    def uses_model(self) -> bool:
        return self.uses("model")

    def uses(self, source: str) -> bool:
        return any(one.expert.source == source for one in self.stack.experts)


class SourceModel:
    """The features of a table, and a model of every target."""

    def __init__(self, schema: Schema, sources: Sequence[str]) -> None:
        self.table = TableFeatures(schema, sources)
        self.targets: dict[str, TargetModel] = {}
        self.shares: dict[str, dict[str, float]] = {}  # target -> source -> share

    @property
    def uses_model(self) -> bool:
        return bool(self.poolings)

    @property
    def poolings(self) -> list[int]:
        """The places in `MIDDLE` that predictions need."""
        readings = (target.reading for target in self.targets.values() if target.uses_model)
        return sorted({reading.pooling for reading in readings if reading is not None})

    def fit(
        self,
        frame: Any,
        z: Hidden | None,
        values: dict[str, Array],
        weights: Array,
        splits: Splits,
        *,
        spaces: Sequence[str],
        seed: int = 0,
        done: Callable[[], None] = lambda: None,
        is_random: bool = True,
    ) -> dict[str, Evidence]:
        """Fit all targets; `spaces` are the value spaces to choose from. Spaces, words and readings
        are chosen on the test rows of `splits`; if these are random, by leave-one-out, which is
        faster."""
        features = self.table.fit(frame)
        evidence = {}
        with few_threads(len(frame)):
            for name, labels in values.items():
                found, evidence[name] = self._fit_target(
                    features, z, labels, weights, splits, spaces, seed, done, is_random
                )
                self.targets[name] = found
                self.shares[name] = _shares(found, evidence[name].unseen, features)
        return evidence

    def _fit_target(
        self,
        features: dict[str, Any],
        z: Hidden | None,
        labels: Array,
        weights: Array,
        splits: Splits,
        spaces: Sequence[str],
        seed: int,
        done: Callable[[], None],
        is_random: bool,
    ) -> tuple[TargetModel, Evidence]:
        v = torch.from_numpy(labels)
        counted = torch.from_numpy(labels[weights > 0])
        candidates = [ValueSpace(kind, *fit_field(counted, kind)) for kind in spaces]
        linear = _Linear(features)
        first = linear.design(1.0)
        if first is None and z is not None:
            first = Design.of(_read(z, min(z))(z))
        trial = _Trial(weights, None if is_random else splits)
        space, y, residuals = _choose_space(candidates, v, first, features.get("boosting"), trial)
        factor = 1.0
        if "words" in features and "columns" in features:
            factor = min(
                WORD_FACTORS,
                key=lambda one: trial.loss(linear.design(one), y, residuals),
            )
        reading = None
        if z is not None:
            every = [_read(z, place) for place in z]
            reading = min(every, key=lambda one: trial.loss(one(z), y, residuals))
        design, kernel = linear.design(factor), None
        if "kernel" in self.table.sources and design is not None and len(y) <= MANY_ROWS:
            kernel = similarity(design.x, seed)
        blocks = _blocks(features, factor, reading, kernel, z, self.categories, design)
        stack, evidence = fit_stack(blocks, y, weights, splits, seed=seed, done=done)
        found = TargetModel(space, factor, reading, kernel, stack)
        found.reading = reading if found.uses("model") else None
        found.kernel = kernel if found.uses("kernel") else None
        return found, evidence

    @property
    def categories(self) -> int:
        return len(self.table.schema.categories)

    def coordinates(self, frame: Any, z: Hidden | None) -> dict[str, Array]:
        """What the chain of every target reads. -> (N, m + 1)"""
        if not len(frame):  # which scikit-learn's transformers refuse
            counts = {name: len(target.stack.experts) for name, target in self.targets.items()}
            return {name: np.empty((0, count + 1)) for name, count in counts.items()}
        features = self.table.transform(frame)
        with few_threads(len(frame)):
            return {
                name: target.stack.coordinates(
                    _blocks(
                        features,
                        target.word_factor,
                        target.reading,
                        target.kernel,
                        z,
                        self.categories,
                    )
                )
                for name, target in self.targets.items()
            }

    def predict(self, frame: Any, z: Hidden | None) -> dict[str, tuple[Cauchy, Cauchy]]:
        """U' (N, m) and Y (N,) of every target"""
        return {
            name: self.targets[name].stack.chain(torch.from_numpy(found))
            for name, found in self.coordinates(frame, z).items()
        }


def _shares(target: TargetModel, unseen: Array, features: dict[str, Any]) -> dict[str, float]:
    """Source -> its share of the variance of Y on unseen rows: cov(its part, Y) / var(Y).

    The linear expert's share is split by the parts that columns and words have in it.
    """
    rows = np.isfinite(unseen).all(1)
    parts = unseen[rows] * target.stack.chain.action.value.weight[0].numpy()  # (N, m)
    total = parts.sum(1)
    found: dict[str, float] = {}
    for fitted, part in zip(target.stack.experts, parts.T, strict=True):
        share = float(np.cov(part, total)[0, 1] / max(float(total.var(ddof=1)), 1e-300))
        source = fitted.expert.source
        if source != "linear":
            found[source] = found.get(source, 0.0) + share
            continue
        at, whole = 0, np.zeros(len(unseen))
        inner = {}
        for name in LINEAR:
            if name in features:
                block = sparse.csr_array(features[name])
                inner[name] = block @ fitted.predictor.coefficients[at : at + block.shape[1]]
                inner[name] = inner[name] * (target.word_factor if name == "words" else 1.0)
                at, whole = at + block.shape[1], whole + inner[name]
        spread = max(float(whole.var(ddof=1)), 1e-300)
        for name, one in inner.items():
            part = share * float(np.cov(one, whole)[0, 1]) / spread
            found[name] = found.get(name, 0.0) + part
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _linear(features: dict[str, Any], factor: float) -> Any:
    """Columns and words side by side; None without either."""
    parts = [sparse.csr_array(features["columns"])] if "columns" in features else []
    parts += [factor * sparse.csr_array(features["words"])] if "words" in features else []
    if not parts:
        return None
    joined = sparse.hstack(parts, format="csr")
    return joined if joined.shape[1] > DENSE else joined.toarray()


class _Linear:
    """Columns and words side by side. Products of pairs of rows are computed once per source;
    scaling words by f scales theirs by f^2."""

    def __init__(self, features: dict[str, Any]) -> None:
        self.features = {n: sparse.csr_array(features[n]) for n in LINEAR if n in features}
        shapes = [block.shape for block in self.features.values()]
        is_wide = bool(shapes) and shapes[0][0] <= sum(shape[1] for shape in shapes)
        self.products = (
            {name: (block @ block.T).toarray() for name, block in self.features.items()}
            if is_wide
            else {}
        )

    def design(self, factor: float) -> Design | None:
        """None without columns and words."""
        x = _linear(self.features, factor)
        if x is None or not self.products:
            return None if x is None else Design.of(x)
        factors = {"columns": 1.0, "words": factor**2}
        return Design(x, np.sum([factors[n] * one for n, one in self.products.items()], axis=0))


def _blocks(
    features: dict[str, Any],
    factor: float,
    reading: Reading | None,
    kernel: Nystroem | None,
    z: Hidden | None,
    categories: int,
    design: Design | None = None,
) -> Blocks:
    """`design` is that of columns and words, if it is known."""
    found: dict[str, Any] = {}
    if (linear := _linear(features, factor) if design is None else design.x) is not None:
        found["linear"] = linear
        if kernel is not None:
            found["kernel"] = kernel.transform(linear)
    if reading is not None and z is not None:
        found["model"] = reading(z)
    if "boosting" in features:
        found["boosting"] = features["boosting"]
    return Blocks(found, categories, None if design is None else {"linear": design})


def _read(z: Hidden, place: int) -> Reading:
    pooled = z[place].astype(np.float64)
    spread = pooled.std(0)
    return Reading(
        place, pooled.mean(0), np.where(spread > 0, spread, 1.0) * np.sqrt(pooled.shape[1])
    )


def _choose_space(
    candidates: Sequence[ValueSpace], v: torch.Tensor, x: Any, trees: Any, trial: _Trial
) -> tuple[ValueSpace, Array, Array]:
    """The space in which unseen labels are likelier under a robust linear head, the labels in it,
    and the head's residuals. Without linear features the head reads those of the trees."""
    if x is None:
        x = np.nan_to_num(trees)
        x = Design.of((x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1.0))
    found = []
    for space in candidates:
        y = space.encode(v).numpy()
        residuals = y - trial.unseen(x, y, trial.weights, robust=True)
        slope = trial.average(space.log_slope(v).numpy())
        found.append((trial.cauchy(residuals) - slope, space, y, residuals))
    return min(found, key=lambda one: one[0])[1:]


class _Trial:
    """Linear heads compared on rows that they have not seen: the test rows of `splits`, or all rows
    by leave-one-out."""

    def __init__(self, weights: Array, splits: Splits | None) -> None:
        self.weights, self.splits = weights, splits
        tested = slice(None) if splits is None else np.concatenate([test for _, test in splits])
        self.is_tested = np.zeros(len(weights), dtype=bool)
        self.is_tested[tested] = True

    def unseen(self, x: Any, y: Array, weights: Array, *, robust: bool = False) -> Array:
        """Rows that no split tests keep 0, and count nowhere."""
        if self.splits is None:
            return fit_ridge(x, y, weights, robust=robust).unseen
        design, found = x if isinstance(x, Design) else Design.of(x), np.zeros(len(y))
        for training, test in self.splits:
            part = design.take(training), y[training], weights[training]
            found[test] = fit_ridge(*part, robust=robust)(design.x[test])
        return found

    def loss(self, x: Any, y: Array, residuals: Array) -> float:
        """Of a linear head, fitted with the weights of rows whose first residuals were large."""
        usual = np.ones(len(y))
        usual[self.is_tested] = tail_weights(residuals[self.is_tested])
        return self.cauchy(y - self.unseen(x, y, self.weights * usual))

    def cauchy(self, residuals: Array) -> float:
        return cauchy_loss(residuals[self.is_tested], self.weights[self.is_tested])

    def average(self, values: Array) -> float:
        return float(np.average(values[self.is_tested], weights=self.weights[self.is_tested]))
