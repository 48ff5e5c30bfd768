"""Source model: rows -> features of all sources -> experts -> the chain of every target.

    model = SourceModel(schema, sources)
    evidence = model.fit(frame, z, values, weights, splits)    # z of the backbone, or None
    y = model.targets["price"].stack.chain(model.coordinates(frame, z)["price"])

Cross-validation chooses the space of the values, the weight of words beside columns, the layer and
pooling of z, credible labels, and the experts' weights. A source that no expert uses is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.kernel_approximation import Nystroem
from threadpoolctl import threadpool_limits

from causal_qwen.modeling.value_space import ValueSpace, fit_field
from causal_qwen.regression import experts
from causal_qwen.regression.audit import Judged
from causal_qwen.regression.conformal import Conformal, Limits, Target
from causal_qwen.regression.experts import Design, Evidence, Splits, Stack
from causal_qwen.regression.features import Progress
from causal_qwen.regression.sources import Schema, TableFeatures, similarity

Array = NDArray[np.float64]
Hidden = Mapping[int, NDArray[np.float32]]  # place in `MIDDLE` -> z by that pooling, (N, H)

SPACES = ("symlog", "linear")
WORD_FACTORS = (1.0, 3.0, 10.0)
LINEAR = ("columns", "words")  # sources of the linear expert
MANY_ROWS = 20_000
DENSE = 500  # features; fewer are kept as a dense matrix
STRETCH = 2.0  # by which a predicted scale may leave the range of those of unseen rows


def few_threads(rows: int) -> Any:
    """One OpenMP thread for the trees of a small table: two would mostly wait for each other."""
    return threadpool_limits(1 if rows < MANY_ROWS else None, user_api="openmp")


class Reading(NamedTuple):
    """The pooling of z that a target uses, standardised."""

    pooling: int  # of `MIDDLE`
    center: Array  # (H,)
    spread: Array  # (H,)

    @classmethod
    def of(cls, z: Hidden, place: int) -> Reading:
        pooled = z[place].astype(np.float64)
        spread = np.where(pooled.std(0) > 0, pooled.std(0), 1.0) * np.sqrt(pooled.shape[1])
        return cls(place, pooled.mean(0), spread)

    def __call__(self, z: Hidden) -> Array:
        """-> (N, H); each row has length 1 on average"""
        return (z[self.pooling].astype(np.float64) - self.center) / self.spread


@dataclass
class TargetModel:
    """One number: its scale, how it reads words and z, and its experts."""

    space: ValueSpace
    word_factor: float
    reading: Reading | None  # None if no expert reads z
    kernel: Nystroem | None  # None if no expert reads similarities
    stack: Stack = field(init=False)


class SourceModel:
    """The features of a table, and a model of every target."""

    def __init__(self, schema: Schema, sources: Sequence[str]) -> None:
        self.table = TableFeatures(schema, sources)
        self.targets: dict[str, TargetModel] = {}
        self.shares: dict[str, dict[str, float]] = {}  # target -> expert -> share

    @property
    def uses_model(self) -> bool:
        return bool(self.poolings)

    @property
    def poolings(self) -> list[int]:
        """The places in `MIDDLE` that predictions need."""
        readings = (target.reading for target in self.targets.values())
        return sorted({reading.pooling for reading in readings if reading is not None})

    def fit(
        self,
        frame: Any,
        z: Hidden | None,
        values: dict[str, Array],
        weights: Array,
        splits: Splits,
        *,
        seed: int = 0,
        progress: Progress = lambda done, total: None,
        is_random: bool = True,
    ) -> dict[str, Evidence]:
        """Fit all targets. Value spaces, words and readings are chosen on the test rows of
        `splits`; if these are random, by leave-one-out, which is faster."""
        features, evidence = self.table.fit(frame), {}
        trial = _Trial(weights, None if is_random else splits)
        categories = len(self.table.schema.categories)
        with few_threads(len(frame)):
            for place, (name, labels) in enumerate(values.items()):
                progress(place, len(values))
                found, y, linear = self._choose(features, z, labels, trial, seed)
                read = self._read(found, features, z, linear)
                found.stack, evidence[name] = experts.fit_stack(
                    read, y, weights, splits, categories=categories, seed=seed
                )
                used = {expert.source for expert, _ in found.stack.experts}
                found.reading = found.reading if "model" in used else None
                found.kernel = found.kernel if "kernel" in used else None
                self.targets[name] = found
                self.shares[name] = _shares(found.stack, evidence[name].unseen)
        return evidence

    def _choose(
        self,
        features: dict[str, Any],
        z: Hidden | None,
        labels: Array,
        trial: _Trial,
        seed: int,
    ) -> tuple[TargetModel, Array, Design | None]:
        """A target without its experts: the space of its labels, and what they read; the labels in
        that space; columns and words. Products of pairs of rows are computed once per source."""
        blocks = {name: sparse.csr_array(features[name]) for name in LINEAR if name in features}
        is_wide = len(labels) <= sum(one.shape[1] for one in blocks.values())
        products = {name: (x @ x.T).toarray() for name, x in blocks.items() if is_wide}

        def design(factor: float) -> Any:
            if (x := _linear(features, factor)) is None or not products:
                return None if x is None else Design.of(x)
            scales = {"columns": 1.0, "words": factor**2}
            return Design(x, np.sum([scales[name] * one for name, one in products.items()], axis=0))

        v, counted = torch.tensor(labels), torch.tensor(labels[trial.weights > 0])
        candidates = [ValueSpace(kind, *fit_field(counted, kind)) for kind in SPACES]
        first = design(1.0)
        if first is None and z is not None:
            first = Design.of(Reading.of(z, min(z))(z))
        if first is None:
            first = Design.of(np.zeros((len(labels), 1)))
        space, y, residuals = trial.choose_space(candidates, v, first)

        def loss(x: Any) -> float:
            return trial.loss(x, y, residuals)

        found = TargetModel(space, 1.0, None, None)
        if "words" in features and "columns" in features:
            found.word_factor = min(WORD_FACTORS, key=lambda one: loss(design(one)))
        if z is not None:
            found.reading = min((Reading.of(z, one) for one in z), key=lambda one: loss(one(z)))
        linear = design(found.word_factor)
        if "kernel" in self.table.sources and linear is not None and len(y) <= MANY_ROWS:
            found.kernel = similarity(linear.x, seed)
        return found, y, linear

    def _read(
        self, target: TargetModel, features: dict[str, Any], z: Hidden | None, design: Any = None
    ) -> dict[str, Any]:
        """What the experts of a target read, by source; `design` is that of columns and words, if
        it is known."""
        found = {"boosting": features["boosting"]} if "boosting" in features else {}
        linear = _linear(features, target.word_factor) if design is None else design.x
        if linear is not None:
            found["linear"] = linear if design is None else design
            if target.kernel is not None:
                found["kernel"] = target.kernel.transform(linear)
        if target.reading is not None and z is not None:
            found["model"] = target.reading(z)
        return found

    def coordinates(self, frame: Any, z: Hidden | None) -> dict[str, torch.Tensor]:
        """What the chain of every target reads. (N, m + 1)"""
        features, found = self.table.transform(frame), {}
        with few_threads(len(frame)):
            for name, one in self.targets.items():
                read = one.stack.coordinates(self._read(one, features, z))
                found[name] = torch.from_numpy(read)
        return found


def judge_target(
    model: TargetModel,
    rows: Any,
    values: Array,
    weights: Array,
    evidence: Evidence,
) -> tuple[Target, Judged]:
    """Limits, calibration by cross-validation, and what is reported of a target; `rows` is the
    index of the training rows.

    A row calibrates by its weight (1 on average) times the credibility of its label.
    """
    trust, counts = evidence.credibility.probability, weights > 0
    tested = np.isfinite(evidence.unseen).all(1)
    y_dist = model.stack.chain(torch.from_numpy(experts.with_spread(evidence.unseen[tested])))
    scale = y_dist.scale[torch.from_numpy(counts[tested])]
    limits = Limits.find(values[counts], trust[counts])._replace(
        least_scale=float(scale.min()) / STRETCH,
        most_scale=float(scale.max()) * STRETCH,
    )
    target = Target(model.space, model.stack.chain, limits)
    share = trust * weights / weights[counts].mean()
    target.conformal = Conformal.fit(target.scores(values[tested], y_dist), share[tested])
    peers = {peer: target.decode(found[tested]) for peer, found in evidence.peers.items()}
    return target, Judged(rows[tested], values[tested], y_dist, trust[tested], peers)


def _shares(stack: Stack, unseen: Array) -> dict[str, float]:
    """Expert -> its share of the variance of Y on unseen rows: cov(its part, Y) / var(Y)."""
    parts = unseen[np.isfinite(unseen).all(1)] * stack.chain.weight  # (N, m)
    total, found = parts.sum(1), dict[str, float]()
    variance = max(float(total.var(ddof=1)), 1e-300)
    for (expert, _), part in zip(stack.experts, parts.T, strict=True):
        share = float(np.cov(part, total)[0, 1]) / variance
        found[expert.source] = found.get(expert.source, 0.0) + share
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _linear(features: dict[str, Any], factor: float) -> Any:
    """Columns and words side by side; None without either."""
    parts = [sparse.csr_array(features["columns"])] if "columns" in features else []
    parts += [factor * sparse.csr_array(features["words"])] if "words" in features else []
    if not parts:
        return None
    joined = sparse.hstack(parts, format="csr")
    return joined if joined.shape[1] > DENSE else joined.toarray()


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
            return experts.fit_ridge(x, y, weights, robust=robust).unseen
        design, found = Design.of(x), np.zeros(len(y))
        for training, test in self.splits:
            part = design.take(training), y[training], weights[training]
            found[test] = experts.fit_ridge(*part, robust=robust).predict(design.x[test])
        return found

    def loss(self, x: Any, y: Array, residuals: Array) -> float:
        """Of a linear head, fitted with the weights of rows whose first residuals were large."""
        usual = np.ones(len(y))
        usual[self.is_tested] = experts.tail_weights(residuals[self.is_tested])
        return self.cauchy(y - self.unseen(x, y, self.weights * usual))

    def cauchy(self, residuals: Array) -> float:
        return experts.cauchy_loss(residuals[self.is_tested], self.weights[self.is_tested])

    def choose_space(
        self, candidates: Sequence[ValueSpace], v: torch.Tensor, x: Design
    ) -> tuple[ValueSpace, Array, Array]:
        """The space in which unseen labels are likelier under a robust linear head, the labels in
        it, and the head's residuals."""
        found = []
        for space in candidates:
            y, slopes = space.encode(v).numpy(), space.log_slope(v).numpy()
            residuals = y - self.unseen(x, y, self.weights, robust=True)
            slope = np.average(slopes[self.is_tested], weights=self.weights[self.is_tested])
            found.append((self.cauchy(residuals) - float(slope), space, y, residuals))
        return min(found, key=lambda one: one[0])[1:]
