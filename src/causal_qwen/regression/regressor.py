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
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from causal_qwen.paths import install_hint

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.metrics import r2_score
    from sklearn.utils import check_random_state
    from sklearn.utils._param_validation import Interval, StrOptions
    from sklearn.utils.validation import check_is_fitted
except ModuleNotFoundError:
    raise ImportError(
        "CausalTextRegressor needs scikit-learn, which is not installed: " + install_hint("tables")
    ) from None

from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import open_model
from causal_qwen.conversion.placement import place_model, resolve_device, resolve_dtype
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.value_space import ValueSpace, field_space, fit_field
from causal_qwen.options import VALUE_SPACES, check_choice
from causal_qwen.outputs import new_directory
from causal_qwen.paths import cache_directory
from causal_qwen.regression import audit, sentences, whatif, workload
from causal_qwen.regression.backbone import (
    OpenModel,
    Pair,
    Record,
    loaded_record,
    located,
    open_copy,
    open_shared,
    record_of,
    saved_record,
)
from causal_qwen.regression.conformal import Conformal, rows_needed
from causal_qwen.regression.credibility import NEGLIGIBLE, find_credibility
from causal_qwen.regression.experts import Evidence
from causal_qwen.regression.explanation import (
    Explanation,
    baseline_cells,
    baseline_frame,
    baseline_row,
    explain_predictions,
)
from causal_qwen.regression.feature_cache import CACHE_FILE
from causal_qwen.regression.features import (
    MIDDLE,
    Pooling,
    Progress,
    batches_by_length,
    encode_texts,
    features,
    fingerprint,
    hidden_at_end,
    too_long,
)
from causal_qwen.regression.fitted import (
    LEVEL,
    SUPPORTS,
    Target,
    TargetEvidence,
    find_limits,
    fit_target,
    interval_of,
    median_of,
    quantiles_of,
    say_credibility,
)
from causal_qwen.regression.head import (
    FOLDS,
    TrainingReport,
    ValueLoss,
    fit_chain,
    init_from_chain,
    init_number_head,
    train_model,
)
from causal_qwen.regression.prediction import NumberPrediction
from causal_qwen.regression.saving import FILE, MODEL, read_state, write_state
from causal_qwen.regression.sentences import (
    UNKNOWN,
    ask_for,
    join_sentences,
    read_texts,
    read_weights,
    text_names,
    usable_rows,
)
from causal_qwen.regression.source_model import Hidden, SourceModel
from causal_qwen.regression.sources import (
    SOURCES,
    Schema,
    choose_sources,
    source_names,
    split_rows,
    typed_cells,
    with_inner_numbers,
    without_ids,
)
from causal_qwen.tables.frames import as_table, column_kinds, require_pandas
from causal_qwen.tables.rows import TEXT, is_table, name_rows, require_columns, row_index
from causal_qwen.tables.targets import check_variety, read_targets
from causal_qwen.terminal import counted, progress_bar
from causal_qwen.training.from_scratch import new_model

__all__ = ["CausalTextRegressor", "OpenModel", "Target"]

Array = NDArray[np.float64]
Predictions = dict[str, NumberPrediction]  # by target

SAVED = (  # fitted attributes; the others are of the training rows, or the trained model
    *("columns_", "is_single_", "seed_", "targets_", "source_", "baseline_"),
    *("text_columns_", "backbone_"),
)
FITTED = ("model_", "processor_", "evidence_", "rows_", "finetune_report_", *SAVED)
LENGTH = 512  # tokens of a text, by default
MANY_TEXTS = 2000  # distinct ones, of which a sample shows how the language model is to read
SAMPLE = 1000  # rows
BLOCK = 16384  # rows that are predicted at a time
FORWARDS_OF_A_STEP = 3  # the time of a training step: forward and backward
DEFAULTS: dict[str, dict[str, Any]] = {  # of training, where None is given
    "finetune": {"learning_rate": 2e-5, "epochs": 3, "patience": 1},
    "scratch": {"learning_rate": 1e-3, "epochs": 40, "patience": 10},
}


class CausalTextRegressor(RegressorMixin, BaseEstimator):
    """Numbers, with their uncertainty, from texts or from the rows of a table.

    Args:
        backbone: `frozen` (the embedded model as it is), `finetune` or `scratch`.
        sources: `auto`, or some of `columns`, `words`, `kernel`, `boosting`, `model` (frozen).
            `auto` asks the language model only where there are texts; `["model"]` alone reads every
            row as a sentence.
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

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "backbone": [StrOptions({"frozen", *DEFAULTS})],
        "support": [StrOptions({*SUPPORTS}), tuple, list],
        "value_space": [StrOptions({"auto", *VALUE_SPACES})],
        "bad_rows": [StrOptions({"raise", "skip"})],
        "max_length": [Interval(Integral, 2, None, closed="left")],
        "folds": [Interval(Integral, 2, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither"), None],
        "epochs": [Interval(Integral, 1, None, closed="left"), None],
        "batch_size": [Interval(Integral, 1, None, closed="left")],
        "held_out": [Interval(Real, 0, 1, closed="left")],
        "patience": [Interval(Integral, 0, None, closed="left"), None],
    }

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
        self._check_parameters()
        for name in FITTED:  # of an earlier fit
            self.__dict__.pop(name, None)
        try:
            return self._fit(as_table(X), y, sample_weight, groups)
        except BaseException:  # half a fit is none
            self.__dict__.pop("targets_", None)
            raise

    def _fit(self, X: Any, y: Any, sample_weight: Any, groups: Any) -> Self:
        values, self.is_single_ = read_targets(X, y)
        if is_table(X):
            used = X.columns if self.columns is None else self.columns
            workload.check_columns(len(X), len(used), self.verbose)
        self.columns_ = self._choose_columns(X, list(values))
        self.seed_ = to_seed(self.random_state)
        self._name_features()
        texts = self._describe_rows(X, list(values))
        weights = read_weights(sample_weight, len(texts))
        index = row_index(X)
        texts, values, is_usable = usable_rows(texts, values, self.bad_rows, index)
        weights, index = weights[is_usable], None if index is None else index[is_usable]
        for name, column in values.items():
            check_variety(name, column[weights > 0])
        self.targets_ = {name: Target(ValueSpace()) for name in values}
        if not self.reads_sentences():
            groups = None if groups is None else np.asarray(groups)[is_usable]
            self._fit_sources(self._known_frame(X)[is_usable], values, weights, groups)
            return self
        if groups is not None or self.cv is not None:
            warnings.warn(
                "the language model alone splits rows at random: groups and cv are not used.",
                stacklevel=3,
            )
        if self.backbone != "scratch":  # whose tokenizer does not exist yet
            self._warn_long_texts(texts, index=index)
            self._announce(texts)
        columns = list(values.values())
        order = sorted(range(len(texts)), key=lambda row: (*(c[row] for c in columns), texts[row]))
        texts, weights = [texts[row] for row in order], weights[order]
        values = {name: column[order] for name, column in values.items()}
        if self.backbone == "frozen":
            self._fit_chains(texts, values, weights)
        else:
            self._fit_model(texts, values, weights)
        if self.support not in ("auto", "real"):
            for name, column in values.items():
                limits = find_limits(self.support, column, np.ones(len(column)))
                self.targets_[name].limits = limits
        return self

    def _fit_sources(
        self,
        frame: Any,
        values: dict[str, Array],
        weights: Array,
        groups: Any,
    ) -> None:
        """Set `source_`, `targets_`, `evidence_` and, if the language model reads, `backbone_`.

        Rows are sorted by their labels and cells, so that their order decides no split and no
        landmark; a splitter (`cv`) is given them in their own order, which may be that of time.
        """
        kinds = column_kinds(frame)
        if self.columns_ is None:
            kinds = {TEXT: "text"}
        kinds |= dict.fromkeys(text_names(self.text), "text")
        kinds = without_ids(kinds, self.columns is not None)
        dates = [name for name, kind in kinds.items() if kind == "date"]
        schema = with_inner_numbers(Schema.of_kinds(kinds), frame, dates)
        self.rows_, order = frame.index, np.arange(len(frame))
        if self.cv is None:
            order = _sorted_rows(typed_cells(frame, schema, is_said=False), values, weights, groups)
        frame, weights = frame.iloc[order], weights[order]
        values = {name: column[order] for name, column in values.items()}
        groups = None if groups is None else groups[order]
        chosen, labels = choose_sources(self.sources, schema), (values, weights, groups)
        z = None
        if "model" in chosen:
            self.text_columns_ = schema.texts or list(kinds)
            texts = self._source_texts(frame)
            self._warn_long_texts(texts, index=frame.index)
            self._announce(texts)
            places: Sequence[int] = range(len(MIDDLE))
            if self.cv is None and len(set(texts)) >= MANY_TEXTS:
                places = self._useful_poolings(SourceModel(schema, chosen), frame, *labels)
            if places:
                z = self._read_frame(frame, places)
                self.backbone_ = self._backbone_record()
            else:
                chosen = [name for name in chosen if name != "model"]
        source = SourceModel(schema, chosen)
        evidence = self._fit_source(source, frame, z, *labels)
        self.source_ = source
        if not source.uses_model:
            self.__dict__.pop("backbone_", None)
        self.evidence_ = {}
        for name, found in evidence.items():
            fitted = fit_target(source.targets[name], values[name], weights, found, self.support)
            self.targets_[name] = fitted[0]
            self.evidence_[name] = fitted[1].take(np.argsort(order))
            say_credibility(name, found.credibility.share)
        self.baseline_ = baseline_row(frame, source.table.schema)

    def _fit_source(
        self,
        source: SourceModel,
        frame: Any,
        z: Hidden | None,
        values: dict[str, Array],
        weights: Array,
        groups: Any,
    ) -> dict[str, Evidence]:
        """Fit `source` in place, with a progress bar."""
        stages, total = 0, len(values) * (3 if len(source.table.sources) == 1 else 8)
        with progress_bar("fitting", self.verbose) as progress:

            def done() -> None:
                nonlocal stages
                stages += 1
                if stages < total:  # an estimate
                    progress(stages, total)

            evidence = source.fit(
                frame,
                z,
                values,
                weights,
                split_rows(len(frame), groups, self.cv, self.folds, self.seed_, weights),
                spaces=value_spaces(self.value_space),
                seed=self.seed_,
                done=done,
                is_random=self.cv is None and groups is None,
            )
            progress(total, total)
        return evidence

    def _useful_poolings(
        self,
        trial: SourceModel,
        frame: Any,
        values: dict[str, Array],
        weights: Array,
        groups: Any,
    ) -> list[int]:
        """Those that a trial fit to some rows uses, so that the language model reads the other rows
        no further; none if unseen labels are not likelier with it."""
        rows = np.random.default_rng(self.seed_).permutation(len(frame))[:SAMPLE]
        some = {name: column[rows] for name, column in values.items()}
        of_group = None if groups is None else groups[rows]
        every = list(range(len(MIDDLE)))
        if of_group is not None and len(set(of_group)) < 2:  # which cannot be split
            return every
        z = self._read_frame(frame.iloc[rows], every)
        self._fit_source(trial, frame.iloc[rows], z, some, weights[rows], of_group)
        if self.verbose and not trial.uses_model:
            what = f"{SAMPLE:,} rows are not predicted better with the language model"
            print(f"{what}, which does not read the others.", file=sys.stderr, flush=True)
        return trial.poolings

    def _fit_chains(self, texts: list[str], values: dict[str, Array], weights: Array) -> None:
        """Set `targets_` and `backbone_`."""
        z = torch.from_numpy(self._read_features(texts))
        self.backbone_ = self._backbone_record()
        with progress_bar("fitting", self.verbose) as progress:
            for name, column in values.items():
                self.targets_[name] = self._fit_chain(z, column, weights, progress)

    def _fit_chain(self, z: Tensor, values: Array, weights: Array, progress: Progress) -> Target:
        """The chain in the space in which unseen values are likelier."""
        v, w = torch.from_numpy(values), torch.from_numpy(weights)
        folds, seed = self.folds, self.seed_
        found = []
        for kind in value_spaces(self.value_space):
            space = ValueSpace(kind, *fit_field(v, kind))
            chain, loss = fit_chain(
                z, space.encode(v), w, folds=folds, seed=seed, progress=progress
            )
            slope = float((space.log_slope(v) * w).sum() / w.sum())
            found.append((loss - slope, Target(space, chain)))
        return min(found, key=lambda candidate: candidate[0])[1]

    def _fit_model(self, texts: list[str], values: dict[str, Array], weights: Array) -> None:
        """Set `targets_`, `processor_` and `model_`: one model for all targets. Every text is
        repeated with the question for each target."""
        asked = [text for name in values for text in self._ask_target(texts, name)]
        processor, model = self._new_or_copied_model(asked, values)
        self.processor_, self.model_ = processor, model
        options = self._training_options()
        self._announce(asked, passes=FORWARDS_OF_A_STEP * options["epochs"], is_kept=True)
        y = []
        for name, column in values.items():
            model.fit_value_field(name, column)
            self.targets_[name] = Target(space := field_space(model.config, name))
            y.append(space.encode(torch.from_numpy(column)).float())
        loss = ValueLoss(
            model,
            encode_texts(asked, processor, self._max_tokens()),
            torch.cat(y),
            torch.from_numpy(np.tile(weights, len(values))).float(),
        )
        seed = self.seed_
        if self.backbone == "scratch":
            init_number_head(model)
        else:
            z = torch.from_numpy(self._read_features(asked))
            chain, _ = fit_chain(z, loss.y, loss.weights, folds=self.folds, seed=seed)
            init_from_chain(model, chain)
            model.abduction.loc.requires_grad_(False)  # coordinates keep their meaning
        with progress_bar("training", self.verbose) as progress:
            report = train_model(
                model,
                loss,
                len(asked),
                batch_size=self.batch_size,
                held_out=self.held_out,
                seed=seed,
                progress=progress,
                **options,
            )
        self._report_training(report)

    def _report_training(self, report: TrainingReport) -> None:
        """Which weights were kept, and why."""
        if self.verbose:
            print(f"{self.backbone}: {report}.", file=sys.stderr, flush=True)
        if self.backbone != "finetune":
            return
        self.finetune_report_ = report
        if report.kept == 0:
            warnings.warn(
                f"finetuning is undone, and the head on the frozen model is kept: {report}; try "
                "another learning_rate, or more rows.",
                stacklevel=4,
            )

    def _new_or_copied_model(self, texts: list[str], values: dict[str, Array]) -> Pair:
        """The model to train: untrained, with a tokenizer learned from `texts`, or the backbone."""
        space, device, dtype = self.value_space, self.device, self.dtype
        if space == "auto":
            is_mixed = any(column.min() < 0 < column.max() for column in values.values())
            space = "linear" if is_mixed else "symlog"
        fields: dict[str, Any] = {"gate_alpha": 1.0, "value_space": space}
        if self.backbone == "finetune":
            processor, model = open_copy(self.model, self.verbose, device, dtype)
            for name, value in fields.items():
                setattr(model.config, name, value)
            return processor, model
        length = self.max_length
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed_)
            processor, model = new_model(
                texts, self.size, max_length=length, encode_numbers="value", **fields
            )
        processor.encode_numbers = "value"
        self._warn_long_texts(texts, processor)
        return processor, place_model(model, device, dtype)

    def _check_parameters(self) -> None:
        self._validate_params()
        for source in [] if self.sources == "auto" else source_names(self.sources) or [""]:
            check_choice("sources", source, ("auto", *SOURCES))
        if not isinstance(self.support, str) and not self.support[0] < self.support[1]:
            raise ValueError(f"support={self.support!r} must be (low, high), low below high.")
        resolve_device(self.device)
        resolve_dtype(self.dtype)
        if not isinstance(self.model, str | os.PathLike | None):
            raise TypeError(
                f"model is a {type(self.model).__name__}; give a directory, or a loaded model as "
                "OpenModel(processor, model)."
            )

    def _training_options(self) -> dict[str, Any]:
        """learning_rate, epochs and patience: as given, else the defaults of the backbone."""
        defaults = DEFAULTS[self.backbone]
        given = {name: getattr(self, name) for name in defaults}
        return defaults | {name: value for name, value in given.items() if value is not None}

    def calibrate(self, X: Any, y: Any, trusted: Any = None) -> Self:
        """Split-conformal calibration on rows that `fit` has not seen; see `conformal`.

        `trusted` marks the rows whose labels are right (True) and the only ones to use. Without it
        labels that look wrong are weighted by their credibility, and a warning gives their share.
        """
        X = self._known_table(X)
        values = self._known_targets(X, y)
        described = self._describe_rows(X, list(self.targets_))
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
            for found in self._predict_rows(take_rows(X, is_usable))
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
        X = self._known_table(X)
        (found,) = self._predict_rows(X, max(len(X), 1))
        return next(iter(found.values())) if self.is_single_ else found

    def beyond_training(self, X: Any) -> list[str]:
        """Per row: which numbers are outside of the range of the training rows, in words ("" for
        none). Intervals of such rows are wider."""
        X = self._known_table(X)
        if self.source_ is None:
            return [""] * len(X)
        return self.source_.table.beyond(self._known_frame(X))[0]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2, by scikit-learn's convention: averaged over targets."""
        X = self._known_table(X)
        truth = np.stack(list(self._known_targets(X, y).values()), -1)
        predicted = self.predict(X).reshape(truth.shape)
        return float(r2_score(truth, predicted, sample_weight=sample_weight))

    def _per_target(self, X: Any, compute: Callable[[NumberPrediction, Target], Array]) -> Array:
        """`compute` of every target's prediction, stacked on axis 1 if there are several."""
        parts = []
        for found in self._predict_rows(self._known_table(X)):
            columns = [np.asarray(compute(found[name], t)) for name, t in self.targets_.items()]
            parts.append(columns[0] if self.is_single_ else np.stack(columns, 1))
        return np.concatenate(parts)

    @torch.no_grad()
    def _predict_rows(self, X: Any, block: int | None = None) -> Iterator[Predictions]:
        """The predictions of `block` rows (None: BLOCK) of a known table at a time: U is large."""
        block, index = block or BLOCK, row_index(X)
        if self.source_ is not None:
            yield from self._predict_sources(self._known_frame(X), block, index)
            return
        texts = self.sentences(X)
        if empty := [row for row, text in enumerate(texts) if not text.strip()]:
            raise ValueError(f"{name_rows(empty, index)} without a text; give at least one word.")
        self._warn_long_texts(texts, index=index)
        if self.backbone == "frozen":
            self._check_backbone()
            z = torch.from_numpy(self._read_features(texts))
        for start in range(0, max(len(texts), 1), block):
            rows = slice(start, start + block)
            certain = np.ones(len(texts[rows]))  # the next token is taken to be a number
            found = {}
            for name, target in self.targets_.items():
                if target.chain is not None:
                    u, head = target.chain(z[rows])[0], target.chain.action.value
                else:
                    u = self._abduce(self._ask_target(texts[rows], name))
                    head = self.model_.action.value
                found[name] = NumberPrediction.from_individuals(u, head, target.space, certain)
                _check_finite(name, found[name].y, start, index)
            yield found

    def _predict_sources(self, frame: Any, block: int, index: Any) -> Iterator[Predictions]:
        source = self.source_
        assert source is not None
        if source.uses_model:
            self._check_backbone()
        for start in range(0, max(len(frame), 1), block):
            rows = frame.iloc[start : start + block]
            z = self._read_frame(rows, source.poolings) if source.uses_model else None
            _, distance = source.table.beyond(rows)
            found = {}
            for name, (u, y) in source.predict(rows, z).items():
                target = self.targets_[name]
                limits, head = target.limits, source.targets[name].stack.chain.action.value
                wanted = y.scale.clamp(limits.least_scale, limits.most_scale)
                wider = wanted / y.scale * (1 + torch.from_numpy(distance))
                u = Cauchy(u.loc, u.scale * wider.unsqueeze(-1))
                certain = np.ones(len(rows))
                found[name] = NumberPrediction.from_individuals(u, head, target.space, certain)
                _check_finite(name, found[name].y, start, index)
            yield found

    def _abduce(self, texts: list[str]) -> Cauchy:
        """U' of the trained model, in float64. -> (N, C)"""
        processor, model = self.processor_, self.model_
        encoded = encode_texts(texts, processor, self._max_tokens())
        loc, scale = torch.empty(2, len(texts), model.config.latent_size, dtype=torch.float64)
        for rows in batches_by_length(encoded):
            z = hidden_at_end(model, [encoded[row] for row in rows])
            u = model.action.widen(model.abduct(z))
            loc[rows], scale[rows] = u.loc.double().cpu(), u.scale.double().cpu()
        return Cauchy(loc, scale)

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
        return self._to_sentences(self._known_table(X), list(self.targets_))

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

    # ------------------------------------------------------------ X and y

    def _known_table(self, X: Any) -> Any:
        """`as_table`; the columns of an array have no names, so they are counted."""
        check_is_fitted(self, "targets_")
        if self.columns_ is not None and _is_row(X):
            X = require_pandas().DataFrame([dict(X)])
        table = as_table(X)
        if self.columns_ is None or not (isinstance(X, np.ndarray) and is_table(table)):
            return table
        has_target = any(name in table.columns for name in self.targets_)
        if len(table.columns) != self.n_features_in_ and not has_target:
            raise ValueError(
                f"X has {len(table.columns)} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input."
            )
        return table

    def _known_frame(self, X: Any) -> Any:
        """The columns that were seen in fit; texts are one column. Those that only name rows may be
        missing."""
        if self.columns_ is None:
            return require_pandas().DataFrame({TEXT: read_texts(X)})
        if not is_table(X):
            raise ValueError("X is not a table; give one with the columns seen in fit.")
        needed = self.columns_
        if self.source_ is not None:
            schema = self.source_.table.schema
            used = {*schema.numbers, *schema.categories, *schema.texts}
            needed = [name for name in needed if name in used]
        require_columns(X, needed)
        return X.reindex(columns=self.columns_)

    def _to_input(self, frame: Any) -> Any:
        """A known frame in the form that `predict` takes: of a regressor of texts, the texts."""
        return frame[TEXT].tolist() if self.columns_ is None else frame

    def _known_targets(self, X: Any, y: Any) -> dict[str, Array]:
        """The values of the targets of `fit`, in its order: by their names, or by their places if
        no name is that of a target."""
        values, _ = read_targets(X, y)
        known = self.targets_
        names = ", ".join(known)
        if len(values) != len(known):
            raise ValueError(f"y has {counted(len(values), 'target')}; give those of fit: {names}.")
        if values.keys() == known.keys():
            return {name: values[name] for name in known}
        if len(values) > 1 and values.keys() & known.keys():
            raise ValueError(f"y has {', '.join(values)}; give the targets of fit: {names}.")
        return dict(zip(known, values.values(), strict=True))

    def _choose_columns(self, X: Any, targets: Sequence[str]) -> list[Any] | None:
        """The columns to learn from, None for texts; those without any value are dropped."""
        texts = text_names(self.text)
        if not is_table(X):
            if self.template is not None or self.text is not None:
                raise ValueError("template and text are for tables, and X holds texts; drop them.")
            return None
        columns = sentences.used_columns(X, template=self.template, without=targets)
        if self.columns is not None:
            require_columns(X, self.columns)
            wanted = {*self.columns, *texts}
            columns = [column for column in columns if column in wanted]
        require_columns(X, texts)
        if not len(X):
            return columns
        empty = sentences.empty_columns(X, columns)
        if empty_texts := [column for column in empty if column in texts]:
            raise ValueError(
                f"the text column {empty_texts[0]!r} is empty; name a column with values."
            )
        if empty:
            names = ", ".join(map(repr, empty))
            what = "without values"
            columns_are = counted(len(empty), f"column {what} is", f"columns {what} are")
            warnings.warn(f"{columns_are} dropped: {names}.", stacklevel=3)
        kept = [column for column in columns if column not in empty or self.template is not None]
        if not kept:
            raise ValueError("the table has no column with values beside its targets.")
        return kept

    def _name_features(self) -> None:
        """Set scikit-learn's own attributes; texts are one feature without a name."""
        columns = self.columns_
        self.__dict__.pop("feature_names_in_", None)
        self.n_features_in_ = 1 if columns is None else len(columns)
        if columns is not None:
            self.feature_names_in_ = np.array(columns, dtype=object)

    def _describe_rows(self, X: Any, targets: Sequence[str]) -> list[str]:
        """The sentence of every row; for several sources any text, "" where a row has no value."""
        if self.reads_sentences():
            return self._to_sentences(X, targets)
        if self.columns_ is None:
            return read_texts(X)
        has_value = self._known_frame(X).notna().any(axis=1)
        return ["row" if has else "" for has in has_value]

    def _to_sentences(self, X: Any, targets: Sequence[str]) -> list[str]:
        """A sentence for every row, which ends with the question."""
        question = self.question
        if question is None:
            is_asked = self.template or self._asks_each()
            question = "" if is_asked else ask_for(targets)
        if self.columns_ is None:
            texts = read_texts(X)
            return [join_sentences(text, question) if text.strip() else "" for text in texts]
        if not is_table(X):
            raise ValueError("X is not a DataFrame; give one with the columns seen in fit.")
        return sentences.to_sentences(
            X,
            self.columns_,
            template=self.template,
            text=text_names(self.text),
            units=self.units,
            question=question,
        )

    def _ask_target(self, texts: list[str], name: str) -> list[str]:
        """The sentences with the question for one target, if one model predicts several."""
        if not self._asks_each():
            return texts
        return [join_sentences(text, ask_for([name])) for text in texts]

    def _asks_each(self) -> bool:
        """Whether one model predicts several targets, distinguished by the question."""
        return self.backbone != "frozen" and not self.is_single_

    def _source_texts(self, frame: Any) -> list[str]:
        """The text columns of every row, which the language model reads beside other sources."""
        columns = self.text_columns_
        if self.columns_ is None:
            texts: list[str] = frame[TEXT].tolist()
            return texts
        is_text = columns if columns != self.columns_ else ()
        made = sentences.to_sentences(frame, columns, text=is_text, units=self.units)
        return [text or UNKNOWN for text in made]

    # ------------------------------------------------------------ the language model

    def _open_reader(self) -> Pair:
        """The trained processor and model, else the backbone."""
        if hasattr(self, "model_"):
            return self.processor_, self.model_
        return self._open_backbone()

    def _open_backbone(self) -> Pair:
        """At its recorded place; `model` may be relative to another directory."""
        source = located(self.model, getattr(self, "backbone_", None))
        return open_shared(source, self.verbose, self.device, self.dtype)

    def _max_tokens(self) -> int:
        """`max_length`, or fewer if the model has fewer positions."""
        positions: int = self._open_reader()[1].config.max_position_embeddings
        return min(self.max_length, positions)

    def _warn_long_texts(self, texts: list[str], processor: Any = None, index: Any = None) -> None:
        most = self.max_length if processor else self._max_tokens()
        if rows := too_long(texts, processor or self._open_reader()[0], most):
            warnings.warn(
                f"texts longer than {most} tokens (max_length, or the model's context) lose their "
                f"beginning, {len(rows)} of {len(texts)}: {name_rows(rows, index)}.",
                stacklevel=4,
            )

    def _announce(self, texts: list[str], **how: Any) -> None:
        """Print what a large table needs before the work, and refuse what cannot be done."""
        if len(texts) < workload.LARGE:
            return
        processor, model = self._open_reader()
        need = workload.estimate(texts, model, processor, self._max_tokens(), **how)
        workload.check_memory(need)
        disk = workload.cache_size(len(texts), model.config.hidden_size)
        more = f"; the feature cache grows by up to {disk} (cache=False, --no-cache: not at all)"
        if self.verbose:
            print(f"{need}{more if self.cache and not how else ''}.", file=sys.stderr, flush=True)

    def _read_features(
        self, texts: list[str], poolings: Sequence[Pooling] = ()
    ) -> NDArray[np.float32]:
        """z of the backbone, or from the cache. -> (N, H), or (N, P, H) with poolings"""
        processor, model = self._open_backbone()
        cache = cache_directory() / CACHE_FILE if self.cache else None
        options: dict[str, Any] = {"max_length": self._max_tokens(), "cache": cache}
        with progress_bar("reading", self.verbose) as progress:
            return features(
                texts, model, processor, poolings=poolings, progress=progress, **options
            )

    def _read_frame(self, frame: Any, places: Sequence[int]) -> Hidden:
        """The text columns of every row, by these poolings of `MIDDLE`: place -> (N, H)."""
        texts = self._source_texts(frame)
        z = self._read_features(texts, [MIDDLE[place] for place in places])
        return dict(zip(places, z.swapaxes(0, 1), strict=True))

    def _backbone_record(self) -> Record:
        """Name, place and fingerprint, by which `_check_backbone` knows it again."""
        return {**record_of(self.model), "fingerprint": self._fingerprint()}

    def _check_backbone(self) -> None:
        if self._fingerprint() != self.backbone_["fingerprint"]:
            raise ValueError(
                f"the backbone {self.backbone_['name']} or max_length has changed since this "
                "regressor was fitted; fit it again."
            )

    def _fingerprint(self) -> str:
        processor, model = self._open_reader()
        return fingerprint(model, processor, self._max_tokens())

    # ------------------------------------------------------------ saving

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a directory, completely or not at all. Frozen: the chains, the backbone's name."""
        check_is_fitted(self, "targets_")
        fitted = {name: vars(self)[name] for name in SAVED if name in vars(self)}
        if "backbone_" in fitted:
            fitted["backbone_"] = saved_record(fitted["backbone_"], Path(path))
        if "baseline_" in fitted:
            fitted["baseline_"] = baseline_cells(fitted["baseline_"])
        content = write_state({"parameters": self._saved_parameters(), "fitted": fitted})
        with new_directory(Path(path), overwrite) as directory:
            (directory / FILE).write_bytes(content)
            if hasattr(self, "model_"):
                with quiet():
                    self.model_.save_pretrained(directory / MODEL)
                self.processor_.save_pretrained(directory / MODEL)

    def _saved_parameters(self) -> dict[str, Any]:
        """A splitter and a generator are not saved (`seed_` is what was drawn), nor is a device."""
        found = self.get_params() | {"cv": None, "device": "auto"}
        is_seed = isinstance(self.random_state, Integral)
        found["random_state"] = int(self.random_state) if is_seed else None
        for name in ("sources", "columns", "text"):
            if not isinstance(found[name], str | None):
                found[name] = list(found[name])
        is_unused = self.source_ is not None and not self.source_.uses_model
        if is_unused and isinstance(self.model, OpenModel) and not self.model.name:
            return found | {"model": None}
        return found | {"model": self.model and os.fspath(self.model)}

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
        resolve_device(device)
        directory = Path(path)
        state = read_state(directory / FILE)
        regressor = cls(**state["parameters"] | {"device": device})
        if model is not None:
            regressor.set_params(model=model)
        regressor.__dict__.update(state["fitted"])
        regressor._name_features()
        if regressor.source_ is not None:
            regressor.evidence_ = {}
            regressor.baseline_ = baseline_frame(regressor.baseline_)
        if hasattr(regressor, "backbone_"):
            regressor.backbone_ = loaded_record(regressor.backbone_, directory, model)
            regressor._check_backbone()
        elif regressor.source_ is None:
            if not (directory / MODEL).is_dir():
                raise FileNotFoundError(
                    f"{directory / MODEL} is missing; restore it, or fit again."
                )
            regressor.processor_, regressor.model_ = open_model(
                directory / MODEL, device, regressor.dtype
            )
        return regressor

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
        semantics: str = "disco",
        **columns: Any,
    ) -> whatif.NumberCounterfactual:
        """What this number would have been, had some columns of its row been different.

            regressor.counterfactual(rings.iloc[3], observed=2835, carat=1.0)

        `row` is a row of a table, or a text (`text="..."` is then the edit); `changes` takes
        columns whose names are no words of Python. `semantics`: "disco" infers the
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


def _is_row(X: Any) -> bool:
    """Whether X is one row of a table: a Series, or a dict of values that are no columns."""
    if isinstance(X, dict):
        return all(np.ndim(value) == 0 for value in X.values())
    return hasattr(X, "index") and getattr(X, "ndim", 2) == 1


def take_rows(X: Any, is_taken: NDArray[np.bool_]) -> Any:
    if is_table(X):
        return X[is_taken]
    return [text for text, taken in zip(read_texts(X), is_taken, strict=True) if taken]


def value_spaces(value_space: str) -> tuple[str, ...]:
    """The candidates, of which unseen values choose."""
    return ("symlog", "linear") if value_space == "auto" else (value_space,)


def to_seed(random_state: Any) -> int:
    if isinstance(random_state, Integral):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31))


def _sorted_rows(
    cells: Any, values: dict[str, Array], weights: Array, groups: Any
) -> NDArray[np.int64]:
    """The rows by their labels, then by all else that is known of them: equal rows are alike."""
    keys = [*values.values(), *(cells[name].to_numpy() for name in cells.columns), weights]
    keys += [] if groups is None else [groups]
    codes = [
        np.unique(key if key.dtype.kind in "biuf" else key.astype(str), return_inverse=True)[1]
        for key in reversed(keys)
    ]
    return np.lexsort(codes)


def _check_finite(name: str, y: Cauchy, start: int, index: Any) -> None:
    """Refuse predictions for the rows from `start` on that damaged weights make NaN or infinite."""
    broken = ~(y.loc.isfinite() & y.scale.isfinite())
    if broken.any():
        rows = start + np.flatnonzero(broken.numpy())
        raise ValueError(
            f"the prediction of {name!r} is not finite in {name_rows(rows, index)}; the "
            "regressor's weights are damaged: restore its files, or fit again."
        )
