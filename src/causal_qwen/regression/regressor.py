"""Regressor: texts or tables -> numbers with calibrated intervals, by scikit-learn's conventions.

    regressor = CausalTextRegressor().fit(train, "price")      # a DataFrame, or texts and values
    low, high = regressor.predict_interval(test, level=0.9)    # calibrated by cross-validation

A row is read in several ways (`sources`): columns, words, kernel, boosting, and the language model
for texts. Their predictions of unseen rows are the coordinates of U, and Y is a linear function of
U (`experts`). With `sources=["model"]` every row is a sentence that ends where its number would
follow, and U is abduced there. The value is predicted without the gate P_<NUM>. Three backbones:

    frozen    the embedded model as it is; only the causal chain is fitted, on cached features
    finetune  the chain is fitted, then the whole model is trained
    scratch   a small untrained model that reads numbers as values
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from causal_qwen.paths import install_hint

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.metrics import r2_score
    from sklearn.utils.validation import check_is_fitted
except ModuleNotFoundError:
    raise ImportError(
        "CausalTextRegressor needs scikit-learn, which is not installed: " + install_hint("tables")
    ) from None

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.value_space import ValueSpace
from causal_qwen.regression import audit, inputs, whatif
from causal_qwen.regression.backbone import OpenModel
from causal_qwen.regression.conformal import Conformal, rows_needed
from causal_qwen.regression.credibility import NEGLIGIBLE, find_credibility
from causal_qwen.regression.explanation import Explanation, explain_predictions
from causal_qwen.regression.fit_sentences import fit_chains, fit_model
from causal_qwen.regression.fit_sources import fit_sources
from causal_qwen.regression.fitted import (
    LEVEL,
    Target,
    TargetEvidence,
    find_limits,
    interval_of,
    median_of,
    quantiles_of,
    say_credibility,
)
from causal_qwen.regression.head import FOLDS, TrainingReport
from causal_qwen.regression.predict_rows import predict_rows
from causal_qwen.regression.prediction import NumberPrediction
from causal_qwen.regression.reading import announce, warn_long_texts
from causal_qwen.regression.saved_regressor import load_regressor, save_regressor
from causal_qwen.regression.sentences import read_weights, usable_rows
from causal_qwen.regression.settings import check_settings, to_seed
from causal_qwen.regression.source_choice import source_names
from causal_qwen.regression.source_model import SourceModel
from causal_qwen.tables.rows import row_index
from causal_qwen.tables.targets import check_variety, read_targets
from causal_qwen.terminal import counted

__all__ = ["CausalTextRegressor", "OpenModel", "Target"]

Array = NDArray[np.float64]

FITTED = (
    *("model_", "processor_", "backbone_", "source_", "evidence_", "rows_", "baseline_"),
    *("text_columns_", "finetune_report_"),
)
LENGTH = 512  # tokens of a text, by default


class CausalTextRegressor(RegressorMixin, BaseEstimator):
    """Numbers, with their uncertainty, from texts or from the rows of a table.

    Args:
        backbone: `frozen` (the embedded model as it is), `finetune` or `scratch`.
        sources: `auto`, or some of `columns`, `words`, `kernel`, `boosting`, `model` (frozen).
            `auto` asks the language model only where there are texts; `["model"]` alone reads every
            row as a sentence, as version 0.3 did.
        support: `auto`, `real`, `positive` (at least 0), `count` (whole, at least 0), or (low,
            high): medians, quantiles and intervals stay inside.
        cv: a splitter of scikit-learn (`TimeSeriesSplit()`), for cross-validation within `fit`;
            None splits at random into `folds`, by `groups` if they are given.
        model: a converted model's directory instead of the embedded one, or an `OpenModel`.
        device: of the language model: `auto` (an accelerator if there is one), `cpu`, `cuda`,
            `cuda:1`, `mps`. A saved regressor does not record it.
        dtype: of its weights in memory: `auto` (as in the file), `float32`, `bfloat16`, `float16`.
        template: such as "A {carat} carat diamond, cut {cut}", for tables; None lists the columns.
        columns: the table's columns to learn from; None takes all but the targets and columns that
            only name rows.
        text: the table's column (or columns) of free text, used verbatim.
        units: column -> unit, for tables without a template.
        question: the end of every text; None asks for the targets ("The price is"), or leaves
            it to the template.
        value_space: `symlog`, `linear`, or `auto`: the better one on held-out values (frozen;
            else `symlog` unless values of both signs occur).
        bad_rows: `raise`, or `skip` rows without a text or a finite target, with a warning.
        max_length: tokens of a text; longer ones lose their beginning, with a warning.
        cache: keep frozen features on disk, in the cache directory of the embedded model.
        folds: of the cross-validation within `fit` (frozen).
        size: of a model from scratch: `tiny`, `small`, `medium`, or (hidden size, layers).
        learning_rate, epochs, batch_size: of `finetune` and `scratch`; None is their default.
        held_out: the share of rows on which training is validated.
        patience: training stops after so many epochs that are no better on the held-out rows;
            0, like 1, stops after the first.
        random_state: the seed of folds, weights and batches; None draws one.
        verbose: show progress on the standard error stream.
    """

    targets_: dict[str, Target]
    columns_: list[Any] | None  # of the table, None for texts
    is_single_: bool
    source_: SourceModel | None = None  # of several sources
    evidence_: dict[str, TargetEvidence]  # of the training rows; not saved
    finetune_report_: TrainingReport  # of backbone="finetune"; not saved
    text_columns_: list[str]  # that the language model reads beside other sources
    rows_: Any  # the index of the training rows; not saved
    baseline_: Any = None  # a typical training row, a DataFrame of one row; see `explanation`

    def __init__(
        self,
        backbone: str = "frozen",
        *,
        sources: str | Sequence[str] = "auto",
        support: str | tuple[float, float] = "auto",
        cv: Any = None,
        model: str | os.PathLike[str] | None = None,
        device: str = "auto",
        dtype: str = "auto",
        template: str | None = None,
        columns: Sequence[str] | None = None,
        text: str | Sequence[str] | None = None,
        units: dict[str, str] | None = None,
        question: str | None = None,
        value_space: str = "auto",
        bad_rows: str = "raise",
        max_length: int = LENGTH,
        cache: bool = True,
        folds: int = FOLDS,
        size: str | tuple[int, int] = "small",
        learning_rate: float | None = None,
        epochs: int | None = None,
        batch_size: int = 16,
        held_out: float = 0.1,
        patience: int | None = None,
        random_state: Any = 0,
        verbose: bool = True,
    ) -> None:
        self.backbone = backbone
        self.sources = sources
        self.support = support
        self.cv = cv
        self.model = model
        self.device = device
        self.dtype = dtype
        self.template = template
        self.columns = columns
        self.text = text
        self.units = units
        self.question = question
        self.value_space = value_space
        self.bad_rows = bad_rows
        self.max_length = max_length
        self.cache = cache
        self.folds = folds
        self.size = size
        self.learning_rate = learning_rate
        self.epochs = epochs
        self.batch_size = batch_size
        self.held_out = held_out
        self.patience = patience
        self.random_state = random_state
        self.verbose = verbose

    # ------------------------------------------------------------ learning

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Learn from texts (or a table) and values.

        `y` is one number per row, or several: a 2-D array, a DataFrame, a dict of names, or the
        names of columns of the table `X`. Rows of one group are never on both sides of a split.
        """
        check_settings(self)
        for name in FITTED:  # of an earlier fit
            self.__dict__.pop(name, None)
        try:
            return self._fit(inputs.as_table(X), y, sample_weight, groups)
        except BaseException:  # half a fit is none
            self.__dict__.pop("targets_", None)
            raise

    def _fit(self, X: Any, y: Any, sample_weight: Any, groups: Any) -> Self:
        values, self.is_single_ = read_targets(X, y)
        self.columns_ = inputs.choose_columns(self, X, list(values))
        self.seed_ = to_seed(self.random_state)
        inputs.name_features(self)
        texts = inputs.describe_rows(self, X, list(values))
        weights = read_weights(sample_weight, len(texts))
        index = row_index(X)
        texts, values, is_usable = usable_rows(texts, values, self.bad_rows, index)
        weights, index = weights[is_usable], None if index is None else index[is_usable]
        for name, column in values.items():
            check_variety(name, column[weights > 0])
        self.targets_ = {name: Target(ValueSpace()) for name in values}
        if not self.reads_sentences():
            groups = None if groups is None else np.asarray(groups)[is_usable]
            fit_sources(self, inputs.known_frame(self, X)[is_usable], values, weights, groups)
            return self
        if groups is not None or self.cv is not None:
            warnings.warn(
                "the language model alone splits rows at random: groups and cv are not used.",
                stacklevel=3,
            )
        if self.backbone != "scratch":  # whose tokenizer does not exist yet
            warn_long_texts(self, texts, index=index)
            announce(self, texts)
        if self.backbone == "frozen":
            fit_chains(self, texts, values, weights)
        else:
            fit_model(self, texts, values, weights)
        if self.support not in ("auto", "real"):
            for name, column in values.items():
                limits = find_limits(self.support, column, np.ones(len(column)))
                self.targets_[name].limits = limits
        return self

    def calibrate(self, X: Any, y: Any, trusted: Any = None) -> Self:
        """Split-conformal calibration on rows that `fit` has not seen; see `conformal`.

        `trusted` marks the rows whose labels are right (True) and the only ones to use. Without it
        labels that look wrong are weighted by their credibility, and a warning gives their share.
        """
        X = inputs.known_table(self, X)
        values, described = (
            inputs.known_targets(self, X, y),
            inputs.describe_rows(self, X, list(self.targets_)),
        )
        _, values, is_usable = usable_rows(described, values, self.bad_rows, row_index(X))
        if trusted is not None:
            trusted = np.asarray(trusted, dtype=bool)
            if trusted.shape != is_usable.shape or not (trusted & is_usable).any():
                raise ValueError(
                    f"trusted must be {len(is_usable)} truth values, at least one of them true."
                )
            values = {name: column[trusted[is_usable]] for name, column in values.items()}
            is_usable = is_usable & trusted
        blocks = [
            {name: number.y for name, number in found.items()}
            for found in predict_rows(self, inputs.take_rows(X, is_usable))
        ]
        for (name, target), column in zip(self.targets_.items(), values.values(), strict=True):
            encoded = target.space.encode(torch.from_numpy(column)).numpy()
            parts = zip(*(y_dists[name] for y_dists in blocks), strict=True)  # locs, scales
            y_dist = Cauchy(*map(torch.cat, parts))
            weights = np.ones(len(encoded))
            if trusted is None:
                scores = (encoded - y_dist.loc.numpy()) / y_dist.scale.numpy()
                least = NEGLIGIBLE / float(y_dist.scale.median())
                weights, share = find_credibility(scores, weights, least)
                say_credibility(name, share)
            target.conformal = Conformal.fit(y_dist, encoded, weights)
            target.shifts_median = True
        return self

    def calibrate_trusted(self, trusted: Any) -> Self:
        """Calibrate on the cross-validated training rows that are marked: those whose labels are
        known to be right."""
        if not getattr(self, "evidence_", None):
            raise ValueError("this regressor was not cross-validated here; use calibrate(X, y).")
        marked = np.asarray(trusted, dtype=bool)
        for name, evidence in self.evidence_.items():
            if marked.shape != evidence.scores.shape:
                raise ValueError(f"trusted must be {len(evidence.scores)} truth values.")
            scores = np.sort(evidence.scores[marked & np.isfinite(evidence.scores)])
            if len(scores) < (least := rows_needed(LEVEL)):
                rows_are = counted(len(scores), "trusted row is", "trusted rows are")
                raise ValueError(f"{rows_are} too few for {LEVEL:.0%} intervals; mark {least}.")
            self.targets_[name].conformal = Conformal(scores, np.ones(len(scores)))
        return self

    # ------------------------------------------------------------ predicting

    def predict(self, X: Any) -> Array:
        """Medians: (N,), or (N, targets) for several. Calibrated, if the regressor is."""
        return self._per_target(X, median_of)

    def predict_interval(
        self, X: Any, level: float = 0.9, *, calibrated: bool | None = None
    ) -> tuple[Array, Array]:
        """The central interval of every number: two arrays shaped as `predict`.

        `calibrated`: True for conformal, False for the Cauchy's own; None prefers the first.
        """
        both = self._per_target(
            X, lambda number, target: interval_of(number, target, level, calibrated)
        )
        return both[..., 0], both[..., 1]

    def predict_quantiles(
        self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95), *, calibrated: Any = None
    ) -> Array:
        """(N, quantiles), or (N, targets, quantiles) for several targets."""
        return self._per_target(
            X, lambda number, target: quantiles_of(number, target, quantiles, calibrated)
        )

    def predict_numbers(
        self,
        X: Any,
        levels: Sequence[float] = (0.9,),
        quantiles: Sequence[float] = (),
        *,
        calibrated: bool | None = None,
    ) -> tuple[Array, Array, Array]:
        """Medians as `predict`, intervals (..., levels, 2) and quantiles (..., quantiles), while X
        is read once."""

        def compute(number: NumberPrediction, target: Target) -> Array:
            parts = [median_of(number, target)[:, None]]
            parts += [interval_of(number, target, level, calibrated) for level in levels]
            if quantiles:
                parts.append(quantiles_of(number, target, quantiles, calibrated))
            return np.concatenate(parts, -1)

        found, end = self._per_target(X, compute), 1 + 2 * len(levels)
        intervals = found[..., 1:end].reshape(*found.shape[:-1], len(levels), 2)
        return found[..., 0], intervals, found[..., end:]

    def predict_distribution(self, X: Any) -> NumberPrediction | dict[str, NumberPrediction]:
        """The uncalibrated distributions; a dict of them for several targets."""
        X = inputs.known_table(self, X)
        (found,) = predict_rows(self, X, max(len(X), 1))
        return next(iter(found.values())) if self.is_single_ else found

    def beyond_training(self, X: Any) -> list[str]:
        """Per row: which numbers are outside of the range of the training rows, in words ("" for
        none). Intervals of such rows are wider."""
        X = inputs.known_table(self, X)
        if self.source_ is None:
            return [""] * len(X)
        return self.source_.table.beyond(inputs.known_frame(self, X))[0]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2, by scikit-learn's convention: averaged over targets."""
        X = inputs.known_table(self, X)
        truth = np.stack(list(inputs.known_targets(self, X, y).values()), -1)
        predicted = self.predict(X).reshape(truth.shape)
        return float(r2_score(truth, predicted, sample_weight=sample_weight))

    def _per_target(self, X: Any, compute: Callable[[NumberPrediction, Target], Array]) -> Array:
        """`compute` of every target's prediction, stacked on axis 1 if there are several."""
        parts = []
        for found in predict_rows(self, inputs.known_table(self, X)):
            columns = [np.asarray(compute(found[name], t)) for name, t in self.targets_.items()]
            parts.append(columns[0] if self.is_single_ else np.stack(columns, 1))
        return np.concatenate(parts)

    # ------------------------------------------------------------ what was found

    def shares(self) -> dict[str, dict[str, float]]:
        """Target -> source -> its share of the variance of the medians of training rows."""
        check_is_fitted(self, "targets_")
        if self.source_ is None:  # the language model alone
            return {name: {"model": 1.0} for name in self.targets_}
        return {name: dict(found) for name, found in self.source_.shares.items()}

    def summary(self) -> str:
        """Which sources are used and how much, and errors on unseen rows beside single methods."""
        lines = []
        for name, of_target in self.shares().items():
            shares = ", ".join(f"{s} {share:.2f}" for s, share in of_target.items())
            lines.append(f"{name}: {shares}")
            if name not in getattr(self, "evidence_", {}):  # loaded, or not cross-validated
                continue
            errors = self.evidence_[name].errors()
            ours = errors.pop("together")
            best = min(errors, key=lambda peer: errors[peer])
            listed = ", ".join(f"{peer} {error:.4g}" for peer, error in errors.items())
            verdict = "" if ours <= errors[best] else f"; {best} alone is better here"
            lines.append(f"  median error on unseen rows {ours:.4g} ({listed}){verdict}")
        if self.source_ is not None and not self.source_.uses_model:
            was_tried = getattr(self, "text_columns_", None)
            why = ": columns and words tell as much" if was_tried else ""
            lines.append(f"  the language model is not used{why}")
        return "\n".join(lines)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = True
        tags.input_tags.categorical = True
        tags.target_tags.multi_output = True
        return tags

    # ------------------------------------------------------------ texts and rows

    def sentences(self, X: Any) -> list[str]:
        """The text that the model reads for every row; it ends where the number would follow."""
        return inputs.to_sentences(self, inputs.known_table(self, X), list(self.targets_))

    def reads_sentences(self) -> bool:
        """Whether the language model alone reads every row, as a sentence; `fit` then does not
        calibrate."""
        return self.backbone != "frozen" or source_names(self.sources) == ["model"]

    def of_sentences(self) -> Self:
        """The same regressor for whole sentences instead of rows; the fitted state is shared.

        regressor.of_sentences().predict(regressor.sentences(X))      # is predict(X)
        """
        check_is_fitted(self, "targets_")
        if self.source_ is not None and self.columns_ is not None:
            raise ValueError(
                "this regressor reads columns, not sentences; fit one with sources=['model'] "
                "(causal-qwen fit --source model)."
            )
        reader = copy.copy(self).set_params(template=None, columns=None, text=None, question="")
        reader.columns_ = None
        return reader

    # ------------------------------------------------------------ saving

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a directory, completely or not at all. Frozen: the chains, the backbone's name."""
        check_is_fitted(self, "targets_")
        save_regressor(self, Path(path), overwrite)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model: str | os.PathLike[str] | None = None,
        device: str = "auto",
    ) -> Self:
        """Read what `save` wrote. `model` replaces the saved name of a frozen backbone: the
        directory to which it has moved, or an `OpenModel`. The weights have the dtype of `fit`."""
        return load_regressor(cls, Path(path), model, device)

    # ------------------------------------------------------------ audit, what-if, explanation

    def suspicious(self, X: Any = None, y: Any = None) -> Any:
        """The rows, the least credible label first: a DataFrame; see `audit`.

        Without arguments the training rows, as cross-validation saw them. With X and y, rows that
        `fit` has not seen.
        """
        check_is_fitted(self, "targets_")
        return audit.find_suspicious(self, X, y)

    def counterfactual(
        self,
        row: Any,
        observed: float,
        changes: dict[str, Any] | None = None,
        *,
        target: str | None = None,
        level: float = LEVEL,
        semantics: str = "individual",
        **columns: Any,
    ) -> whatif.NumberCounterfactual:
        """What this number would have been, had some columns of its row been different.

            regressor.counterfactual(rings.iloc[3], observed=2835, carat=1.0)

        `row` is a row of a table, or a text (`text="..."` is then the edit); `changes` takes
        columns whose names are no words of Python. `semantics`: "individual" infers the
        individual's own noise from `observed`, keeps it and draws exogenous noise again; "pearl"
        keeps both. See `whatif`.
        """
        check_is_fitted(self, "targets_")
        edits = {**(changes or {}), **columns}
        return whatif.number_counterfactual(
            self, row, observed, edits, target=target, level=level, semantics=semantics
        )

    def explain(self, X: Any, *, target: str | None = None, permutations: int = 8) -> Explanation:
        """What every column and group of words adds to the medians and widths; see `explanation`.

        With more parts than orders can be tried, `permutations` of them are drawn.
        """
        check_is_fitted(self, "targets_")
        return explain_predictions(self, X, target, permutations)

    def target_name(self, target: str | None) -> str:
        """A target that exists; None is the only one."""
        names = list(self.targets_)
        if target is None and len(names) > 1:
            raise ValueError(f"there are several targets; give target=, one of {', '.join(names)}.")
        if target is not None and target not in names:
            raise ValueError(
                f"target={target!r} is unknown; this regressor has {', '.join(names)}."
            )
        return names[0] if target is None else target
