"""Regressor: texts or tables -> numbers with calibrated intervals, by scikit-learn's conventions.

    regressor = CausalTextRegressor().fit(train, "price")      # a DataFrame, or texts and values
    low, high = regressor.predict_interval(test, level=0.9)    # calibrated by cross-validation

A row is read in several ways (`sources`): columns, words, kernel, boosting, and the language model
for texts, which stays as it is. Their predictions of unseen rows are the coordinates of U, and Y is
a linear function of U (`experts`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.outputs import new_directory
from causal_qwen.paths import cache_directory
from causal_qwen.regression import audit, backbone, conformal, features, sources, whatif
from causal_qwen.regression.backbone import OpenModel
from causal_qwen.regression.conformal import LEVEL, Conformal, Target
from causal_qwen.regression.credibility import NEGLIGIBLE, find_credibility
from causal_qwen.regression.experts import Evidence
from causal_qwen.regression.explanation import Explanation, explain_rows
from causal_qwen.regression.prediction import NumberPrediction
from causal_qwen.regression.saving import FILE, read_state, write_state
from causal_qwen.regression.source_model import Hidden, SourceModel, judge_target
from causal_qwen.tables import frames
from causal_qwen.tables.frames import TEXT, as_table, is_table, require_columns
from causal_qwen.tables.targets import check_rows, check_variety, read_targets
from causal_qwen.terminal import progress_bar

__all__ = ["CausalTextRegressor", "OpenModel", "Target"]

Array = NDArray[np.float64]

SAVED = (  # fitted attributes; the others are of the training rows
    *("columns_", "is_single_", "seed_", "rows_", "targets_", "source_", "baseline_", "backbone_"),
    *("n_features_in_", "feature_names_in_"),
)
FITTED = ("evidence_", *SAVED)
LENGTH = 512  # tokens of a text, by default
MANY_TEXTS = 2000  # distinct ones, of which a sample shows how the language model is to read
SAMPLE = 1000  # rows
FOLDS = 5


class Labels(NamedTuple):
    """What is known of the rows to learn from: the values of every target, weights and groups."""

    values: dict[str, Array]
    weights: Array
    groups: Any = None

    def take(self, rows: Any) -> Labels:
        some = {name: column[rows] for name, column in self.values.items()}
        groups = None if self.groups is None else self.groups[rows]
        return Labels(some, self.weights[rows], groups)


class CausalTextRegressor(RegressorMixin, BaseEstimator):
    """Numbers, with their uncertainty, from texts or from the rows of a table.

    Args:
        sources: `auto`, or some of `columns`, `words`, `kernel`, `boosting`, `model`.
            `auto` asks the language model only where there are texts; where it is named, it reads a
            table without texts as "carat is 0.9, cut is Ideal".
        cv: a splitter of scikit-learn (`TimeSeriesSplit()`), for cross-validation within `fit`;
            None splits at random into `folds`, by `groups` if they are given.
        model: a converted model's directory instead of the embedded one, or an `OpenModel`.
        device: of the language model: `auto` (an accelerator if there is one), `cpu`, `cuda`,
            `cuda:1`, `mps`. A saved regressor does not record it.
        dtype: of its weights in memory: `auto` (as in the file), `float32`, `bfloat16`, `float16`.
        columns: the table's columns to learn from; None takes all but the targets and columns that
            only name rows.
        text: the table's column (or columns) of free text, used verbatim.
        max_length: tokens of a text; longer ones lose their beginning, with a warning.
        cache: keep features on disk, in the cache directory of the embedded model.
        folds: of the cross-validation within `fit`.
        random_state: the seed of folds and weights; None draws one.
        verbose: show progress on the standard error stream.
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "max_length": [Interval(Integral, 2, None, closed="left")],
        "folds": [Interval(Integral, 2, None, closed="left")],
    }

    targets_: dict[str, Target]
    columns_: list[Any] | None  # of the table, None for texts
    is_single_: bool
    source_: SourceModel
    rows_: int  # that were learned from
    evidence_: dict[str, audit.Judged]  # of the training rows; not saved
    backbone_: str  # the fingerprint of the language model, if it is used
    baseline_: dict[str, Any]  # a typical training row; see `explanation`

    def __init__(
        self,
        *,
        sources: str | Sequence[str] = "auto",
        cv: Any = None,
        model: str | os.PathLike[str] | None = None,
        device: str = "auto",
        dtype: str = "auto",
        columns: Sequence[str] | None = None,
        text: str | Sequence[str] | None = None,
        max_length: int = LENGTH,
        cache: bool = True,
        folds: int = FOLDS,
        random_state: Any = 0,
        verbose: bool = True,
    ) -> None:
        self.sources = sources
        self.cv = cv
        self.model = model
        self.device = device
        self.dtype = dtype
        self.columns = columns
        self.text = text
        self.max_length = max_length
        self.cache = cache
        self.folds = folds
        self.random_state = random_state
        self.verbose = verbose

    # ------------------------------------------------------------ learning

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Learn from texts (or a table) and values.

        `y` is one number per row, or several: a 2-D array, a DataFrame, a dict of names, or the
        names of columns of the table `X`. Rows of one group are never on both sides of a split.
        """
        self._validate_params()
        for name in FITTED:  # of an earlier fit
            self.__dict__.pop(name, None)
        X = as_table(X)
        values, self.is_single_ = read_targets(X, y)
        self.columns_ = self._choose_columns(X, list(values))
        self.seed_ = to_seed(self.random_state)
        frame = self._known_frame(X)
        validate_data(self, frame, skip_check_array=True)  # sets feature_names_in_
        check_rows(frame.index, values)
        checks: dict[str, Any] = {"dtype": np.float64, "ensure_non_negative": True}
        weights = _check_sample_weight(sample_weight, frame, **checks)
        labels = Labels(values, weights, None if groups is None else np.asarray(groups))
        for name, column in values.items():
            check_variety(name, column[weights > 0])
        self.targets_, self.rows_ = self._fit_sources(frame, labels), len(frame)
        return self

    def _fit_sources(self, frame: Any, labels: Labels) -> dict[str, Target]:
        """Set `source_`, `evidence_` and, if the language model reads, `backbone_`.

        Rows are sorted by their labels and cells, so that their order decides no split and no
        landmark; a splitter (`cv`) is given them in their own order, which may be that of time.
        """
        texts = [TEXT] if self.columns_ is None else frames.listed(self.text)
        kinds = frames.column_kinds(frame) | dict.fromkeys(texts, "text")
        kinds = sources.without_ids(kinds, is_asked_for=self.columns is not None)
        schema = sources.Schema.of_frame(kinds, frame)
        if self.cv is None:
            order = _sorted_rows(sources.typed_cells(frame, schema), labels)
            frame, labels = frame.iloc[order], labels.take(order)
        chosen, z = sources.choose_sources(self.sources, schema), None
        if "model" in chosen:
            places = self._useful_poolings(schema, chosen, frame, labels)
            if places:
                z, self.backbone_ = self._read_frame(frame, schema, places), self._fingerprint()
            else:
                chosen = [name for name in chosen if name != "model"]
        source = SourceModel(schema, chosen)
        evidence = self._fit_source(source, frame, z, labels)
        if not source.uses_model:
            self.__dict__.pop("backbone_", None)
        self.source_, self.evidence_, targets = source, {}, {}
        for name, found in evidence.items():
            given = frame.index, labels.values[name], labels.weights
            targets[name], self.evidence_[name] = judge_target(source.targets[name], *given, found)
            conformal.warn_of_wrong_labels(name, found.credibility.share)
        self.baseline_ = sources.typical_row(frame, schema)
        return targets

    def _fit_source(
        self, source: SourceModel, frame: Any, z: Hidden | None, labels: Labels
    ) -> dict[str, Evidence]:
        """Fit `source` in place, with a progress bar."""
        values, weights, groups = labels
        splits = sources.split_rows(len(frame), groups, self.cv, self.folds, self.seed_)
        with progress_bar("fitting", self.verbose) as progress:
            is_random = self.cv is None and groups is None
            options: dict[str, Any] = {"seed": self.seed_, "progress": progress}
            return source.fit(frame, z, values, weights, splits, is_random=is_random, **options)

    def _useful_poolings(
        self, schema: sources.Schema, chosen: list[str], frame: Any, labels: Labels
    ) -> list[int]:
        """Those by which the language model is to read all rows: of many texts, those that a trial
        fit to some rows uses; none if unseen labels are not likelier with it."""
        texts, every = self._texts(frame, schema), list(range(len(features.MIDDLE)))
        rows = np.random.default_rng(self.seed_).permutation(len(frame))[:SAMPLE]
        is_split = labels.groups is None or len(set(labels.groups[rows])) > 1
        if self.cv is not None or len(set(texts)) < MANY_TEXTS or not is_split:
            return every
        trial, some = SourceModel(schema, chosen), frame.iloc[rows]
        self._fit_source(trial, some, self._read_frame(some, schema, every), labels.take(rows))
        return trial.poolings

    def calibrate(self, X: Any, y: Any) -> Self:
        """Split-conformal calibration on rows that `fit` has not seen; see `conformal`.

        Labels that look wrong are weighted by their credibility, and a warning gives their share.
        """
        frame = self._known_frame(X)
        values = read_targets(as_table(X), y)[0]
        if values.keys() != self.targets_.keys():  # by their places
            values = dict(zip(self.targets_, values.values(), strict=True))
        check_rows(frame.index, values)
        found = self._distributions(frame)
        for name, target in self.targets_.items():
            y_dist = found[name]
            scores, least = target.scores(values[name], y_dist), float(y_dist.scale.median())
            weights, share = find_credibility(scores, np.ones(len(scores)), NEGLIGIBLE / least)
            conformal.warn_of_wrong_labels(name, share)
            target.conformal = Conformal.fit(scores, weights)
        return self

    # ------------------------------------------------------------ predicting

    def predict(self, X: Any) -> Array:
        """Medians: (N,), or (N, targets) for several."""
        return self.predict_numbers(X, ())[0]

    def predict_interval(self, X: Any, level: float = LEVEL) -> tuple[Array, Array]:
        """The central interval of every number, calibrated: two arrays shaped as `predict`."""
        both = self.predict_numbers(X, [level])[1]
        return both[..., 0, 0], both[..., 0, 1]

    def predict_quantiles(self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> Array:
        """(N, quantiles), or (N, targets, quantiles) for several targets."""
        return self.predict_numbers(X, (), quantiles)[2]

    def predict_numbers(
        self, X: Any, levels: Sequence[float] = (LEVEL,), quantiles: Sequence[float] = ()
    ) -> tuple[Array, Array, Array]:
        """Medians as `predict`, intervals (..., levels, 2) and quantiles (..., quantiles), while X
        is read once."""
        columns = []
        for name, y_dist in self._distributions(self._known_frame(X)).items():
            target = self.targets_[name]
            parts = [target.median(y_dist)[:, None]]
            parts += [target.interval(y_dist, level) for level in levels]
            if len(quantiles):
                parts.append(target.quantiles(y_dist, quantiles))
            columns.append(np.concatenate(parts, -1))
        found = columns[0] if self.is_single_ else np.stack(columns, 1)
        end = 1 + 2 * len(levels)
        intervals = found[..., 1:end].reshape(*found.shape[:-1], len(levels), 2)
        return found[..., 0], intervals, found[..., end:]

    def predict_distribution(self, X: Any) -> NumberPrediction | dict[str, NumberPrediction]:
        """The uncalibrated distributions; a dict of them for several targets."""
        found = {
            name: NumberPrediction(y_dist, self.targets_[name].space, np.ones(len(y_dist.loc)))
            for name, y_dist in self._distributions(self._known_frame(X)).items()
        }
        return next(iter(found.values())) if self.is_single_ else found

    def beyond_training(self, X: Any) -> Array:
        """How far the numbers of every row are outside of the range of the training rows, in widths
        of that range; 0 inside. Intervals are 1 + this times as wide."""
        return self.source_.table.beyond(self._known_frame(X))

    def _distributions(self, frame: Any) -> dict[str, Cauchy]:
        """Of every target in the rows of a known frame, in the head's space."""
        found, distance = {}, torch.from_numpy(self.source_.table.beyond(frame))
        for name, read in self._read(frame).items():
            limits, y_dist = self.targets_[name].limits, self.targets_[name].chain(read)
            scale = y_dist.scale.clamp(limits.least_scale, limits.most_scale)
            found[name] = Cauchy(y_dist.loc, scale * (1 + distance))
        return found

    def _read(self, frame: Any) -> dict[str, torch.Tensor]:
        """What the chain of every target reads of a known frame, (N, m + 1)."""
        z = None
        if self.source_.uses_model:
            self._check_backbone()
            z = self._read_frame(frame, self.source_.table.schema, self.source_.poolings)
        return self.source_.coordinates(frame, z)

    # ------------------------------------------------------------ what was found

    def shares(self) -> dict[str, dict[str, float]]:
        """Target -> expert -> its share of the variance of the medians of training rows. Columns
        and words have one expert, `linear`."""
        check_is_fitted(self, "targets_")
        return {name: dict(found) for name, found in self.source_.shares.items()}

    def errors(self) -> dict[str, dict[str, float]]:
        """Target -> method -> its median absolute error on unseen rows; ours is "together". Of a
        loaded regressor nothing is known."""
        found = getattr(self, "evidence_", {})
        return {name: judged.errors(self.targets_[name]) for name, judged in found.items()}

    def summary(self) -> str:
        """Which sources are used and how much, and errors on unseen rows beside single methods."""
        lines = []
        for name, of_target in self.shares().items():
            shares = ", ".join(f"{s} {share:.2f}" for s, share in of_target.items())
            lines.append(f"{name}: {shares}")
        for name, errors in self.errors().items():
            ours = errors.pop("together")
            best = min(errors, key=lambda peer: errors[peer])
            peers = ", ".join(f"{peer} {error:.4g}" for peer, error in errors.items())
            verdict = "" if ours <= errors[best] else f"; {best} alone is better here"
            lines.append(f"{name}: median error on unseen rows {ours:.4g} ({peers}){verdict}")
        if not self.source_.uses_model:
            lines.append("the language model is not used")
        return "\n".join(lines)

    def suspicious(self) -> Any:
        """The training rows, as cross-validation saw them, the least credible label first: a
        DataFrame; see `audit`."""
        check_is_fitted(self, "evidence_", msg="a loaded %(name)s has no training rows; fit again.")
        return audit.suspicion_table(self.evidence_, self.targets_)

    def counterfactual(
        self,
        row: Any,
        observed: float,
        changes: Mapping[str, Any],
        *,
        target: str | None = None,
        level: float = LEVEL,
        semantics: str = "disco",
    ) -> whatif.NumberCounterfactual:
        """What this number would have been, had some columns of its row been different.

            regressor.counterfactual(rings.iloc[3], 2835, {"carat": 1.0})

        `row` is a row of a table, or a text, whose edit is {"text": "..."}. `semantics`: "disco"
        infers the individual's own noise from `observed`, keeps it and draws exogenous noise again;
        "pearl" keeps both. See `whatif`.
        """
        frame = self._known_frame([row] if isinstance(row, str) else row).astype(object)
        name = self.target_name(target)
        if len(frame) != 1:
            raise ValueError(f"row has {len(frame)} rows; give one, such as table.iloc[[3]].")
        other = whatif.edit_row(frame, changes, self.source_)
        here, there = self._world(frame, name), self._world(other, name)
        return whatif.NumberCounterfactual(
            target=name,
            observed=float(observed),
            factual=here.median,
            level=level,
            semantics=semantics,
            changes={name: (frame[name].iloc[0], value) for name, value in changes.items()},
            **whatif.answer(float(observed), here, there, self.targets_[name], level, semantics),
        )

    def _world(self, frame: Any, name: str) -> whatif.World:
        """The law of one row, its scale divided into the individual's share and chance."""
        target, chain = self.targets_[name], self.targets_[name].chain
        y_dist = self._distributions(frame)[name]
        loc, scale = float(y_dist.loc[0]), float(y_dist.scale[0])
        of_chain = float(chain(self._read(frame)[name]).scale[0])  # not clamped or widened
        noise = float(np.abs(chain.weight).sum() * chain.noise)
        exogenous = scale * min(noise / of_chain, 1 - 1e-9)
        median = float(target.median(y_dist)[0])
        return whatif.World(loc, scale - exogenous, exogenous, median)

    def explain(self, X: Any, *, target: str | None = None, permutations: int = 8) -> Explanation:
        """What every column and group of words adds to the medians; see `explanation`.

        With more parts than orders can be tried, `permutations` of them are drawn.
        """
        frame = self._known_frame(X)
        place = list(self.targets_).index(self.target_name(target))

        def predict(rows: Any) -> Array:
            return self.predict(rows).reshape(len(rows), -1)[:, place]

        texts = self.source_.table.schema.texts
        return explain_rows(frame, self.baseline_, texts, predict, permutations, self.seed_)

    def target_name(self, target: str | None) -> str:
        """A target that exists; None is the only one."""
        names = list(self.targets_)
        found = names[0] if target is None and len(names) == 1 else target
        if found not in names:
            raise ValueError(f"target={target!r} is none of the targets: {', '.join(names)}.")
        return str(found)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = True
        tags.input_tags.categorical = True
        tags.target_tags.multi_output = True
        return tags

    # ------------------------------------------------------------ texts and rows

    def _known_frame(self, X: Any) -> Any:
        """A DataFrame of the columns that were seen in fit; of texts one column. Columns that only
        name rows may be missing. X may be one row: a Series, or a dict."""
        check_is_fitted(self, "columns_")
        if self.columns_ is None:
            return pd.DataFrame({TEXT: frames.read_texts(X)})
        if isinstance(X, np.ndarray) and X.ndim == 2 and X.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {X.shape[1]} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input."
            )
        is_series = getattr(X, "ndim", 2) == 1 and hasattr(X, "index")
        if is_series or (isinstance(X, dict) and all(np.ndim(cell) == 0 for cell in X.values())):
            X = pd.DataFrame([dict(X)])
        table = as_table(X)
        if not is_table(table):
            raise ValueError("X is not a DataFrame; give one with the columns seen in fit.")
        if hasattr(self, "source_"):
            schema = self.source_.table.schema
            used = {*schema.numbers, *schema.categories, *schema.texts}
            require_columns(table, [name for name in self.columns_ if name in used])
        return table.reindex(columns=self.columns_)

    def _choose_columns(self, X: Any, targets: Sequence[str]) -> list[Any] | None:
        """The columns to learn from, None for texts; those without any value are dropped."""
        texts = frames.listed(self.text)
        if not is_table(X):
            if texts:
                raise ValueError("text= is for tables, and X holds texts; drop it.")
            return None
        wanted = list(X.columns) if self.columns is None else [*self.columns, *texts]
        require_columns(X, [*wanted, *texts])
        columns = [name for name in X.columns if name in wanted and name not in targets]
        if empty := [name for name in columns if len(X) and X[name].isna().all()]:
            columns = [name for name in columns if name not in empty]
            warnings.warn(f"columns without values: {', '.join(map(repr, empty))}.", stacklevel=3)
        if not columns:
            raise ValueError("there are no values in the columns beside the targets.")
        return columns

    def _texts(self, frame: Any, schema: sources.Schema) -> list[str]:
        """What the language model reads of every row: at least a word."""
        is_table = self.columns_ is not None
        texts = sources.row_texts(frame, schema) if is_table else frame[TEXT].tolist()
        return [text or "unknown" for text in texts]

    # ------------------------------------------------------------ the language model

    def _open(self) -> tuple[Any, Any, int]:
        """Processor, model and the most tokens of a text."""
        found = backbone.open_shared(self.model, self.verbose, self.device, self.dtype)
        return *found, min(self.max_length, found[1].config.max_position_embeddings)

    def _read_frame(self, frame: Any, schema: sources.Schema, places: Sequence[int]) -> Hidden:
        """The texts of every row, by these poolings of `MIDDLE`: place -> (N, H)."""
        processor, model, most = self._open()
        cache = cache_directory() / features.CACHE if self.cache else None
        texts, poolings = self._texts(frame, schema), [features.MIDDLE[place] for place in places]
        options: dict[str, Any] = {"max_length": most, "cache": cache}
        with progress_bar("reading", self.verbose) as progress:
            z = features.features(texts, model, processor, poolings, progress=progress, **options)
        return dict(zip(places, z.swapaxes(0, 1), strict=True))

    def _check_backbone(self) -> None:
        if self._fingerprint() != self.backbone_:
            raise ValueError(
                "the language model or max_length has changed since this regressor was fitted; "
                "give the model of then (model=), or fit it again."
            )

    def _fingerprint(self) -> str:
        processor, model, most = self._open()
        return features.fingerprint(model, processor, most)

    # ------------------------------------------------------------ saving

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a directory, completely or not at all: what was fitted, and the name of the
        language model, if it is used."""
        check_is_fitted(self, "targets_")
        fitted = {name: vars(self)[name] for name in SAVED if name in vars(self)}
        # a splitter and a generator are not saved (`seed_` is what was drawn), nor is a device
        given = self.get_params() | {"cv": None, "device": "auto", "model": None}
        is_seed = isinstance(self.random_state, Integral)
        given["random_state"] = int(self.random_state) if is_seed else None
        for name in ("sources", "columns", "text"):
            if not isinstance(given[name], str | None):
                given[name] = list(given[name])
        if self.source_.uses_model and self.model is not None:
            name = os.fspath(self.model)
            given["model"] = os.path.abspath(name) if os.path.isdir(name) else name
        content = write_state({"parameters": given, "fitted": fitted})
        with new_directory(Path(path), overwrite) as directory:
            (directory / FILE).write_bytes(content)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model: str | os.PathLike[str] | None = None,
        device: str = "auto",
    ) -> Self:
        """Read what `save` wrote. `model` replaces the saved name of the language model: the
        directory to which it has moved, or an `OpenModel`. The weights have the dtype of `fit`."""
        state = read_state(Path(path) / FILE)
        regressor = cls(**state["parameters"] | {"device": device})
        regressor.__dict__.update(state["fitted"])
        if regressor.source_.uses_model:
            if model is not None:
                regressor.set_params(model=model)
            regressor._check_backbone()
        return regressor


def to_seed(random_state: Any) -> int:
    if isinstance(random_state, Integral):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31))


def _sorted_rows(cells: Any, labels: Labels) -> NDArray[np.int64]:
    """The rows by their labels, then by all else that is known of them: equal rows are alike."""
    columns = (np.asarray(column) for _, column in cells.items())
    keys = [*labels.values.values(), *columns, labels.weights]
    keys += [] if labels.groups is None else [labels.groups]
    codes = [
        np.unique(key if key.dtype.kind in "biuf" else key.astype(str), return_inverse=True)[1]
        for key in reversed(keys)
    ]
    return np.lexsort(codes)
