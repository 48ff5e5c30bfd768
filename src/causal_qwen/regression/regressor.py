"""Regressor: texts or tables -> numbers with calibrated intervals, by scikit-learn's conventions.

    regressor = CausalTextRegressor().fit(train, "price")      # a DataFrame, or texts and values
    regressor.calibrate(held_out, "price")
    low, high = regressor.predict_interval(test, level=0.9)

Every text ends where its number would follow; U is abduced there, and Y is a linear function of
U. The value is predicted without the gate P_<NUM>. Three backbones:

    frozen    the embedded model as it is; only the causal chain is fitted, on cached features
    finetune  the chain is fitted, then the whole model is trained
    scratch   a small untrained model that reads numbers as values
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import open_model
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.value_space import ValueSpace, field_space, fit_field
from causal_qwen.options import VALUE_SPACES, check_choice
from causal_qwen.outputs import MANIFEST, damaged_files, file_sha256, new_directory
from causal_qwen.paths import cache_directory, install_hint
from causal_qwen.regression import sentences, workload
from causal_qwen.regression.backbone import (
    OpenModel,
    Pair,
    Source,
    loaded_record,
    located,
    open_copy,
    open_shared,
    record_of,
    saved_record,
)
from causal_qwen.regression.conformal import Conformal
from causal_qwen.regression.feature_cache import CACHE_FILE
from causal_qwen.regression.features import (
    Progress,
    batches_by_length,
    encode_texts,
    features,
    fingerprint,
    hidden_at_end,
    too_long,
)
from causal_qwen.regression.head import (
    FOLDS,
    Chain,
    ValueLoss,
    fit_chain,
    init_from_chain,
    init_number_head,
    train_model,
)
from causal_qwen.regression.prediction import NumberPrediction
from causal_qwen.regression.saved import (
    CURE,
    FORMAT,
    MODEL,
    SETTINGS,
    TENSORS,
    read_settings,
    read_tensors,
    wrong,
)
from causal_qwen.regression.sentences import (
    is_table,
    join_sentences,
    name_rows,
    read_targets,
    row_index,
)
from causal_qwen.terminal import counted, progress_bar
from causal_qwen.training.from_scratch import new_model

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.metrics import r2_score
    from sklearn.utils.validation import check_is_fitted
except ModuleNotFoundError:
    raise ImportError(
        "CausalTextRegressor needs scikit-learn, which is not installed: " + install_hint("tables")
    ) from None

__all__ = ["CausalTextRegressor", "OpenModel", "Target"]

Array = NDArray[np.float64]

BACKBONES = ("frozen", "finetune", "scratch")
DEFAULTS: dict[str, dict[str, Any]] = {  # of training, where None is given
    "finetune": {"learning_rate": 2e-5, "epochs": 3, "patience": 1},
    "scratch": {"learning_rate": 1e-3, "epochs": 40, "patience": 10},
}
FORWARDS_OF_A_STEP = 3  # the time of a training step: forward and backward
BLOCK = 16384  # rows that are predicted at a time
LENGTH = 512  # tokens of a text, by default


@dataclass
class Target:
    """A named number: its scale, its own chain (frozen) and its calibration."""

    space: ValueSpace
    chain: Chain | None = None
    conformal: Conformal | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The chain and the calibration, as they are saved."""
        found = {} if self.chain is None else dict(self.chain.state_dict())
        if self.conformal is not None:
            found["scores"] = torch.from_numpy(self.conformal.scores)
        return found

    @classmethod
    def from_tensors(cls, space: ValueSpace, tensors: dict[str, Tensor]) -> Target:
        target, scores = cls(space), tensors.pop("scores", None)
        if tensors:
            causal_size, hidden_size = tensors[Chain.SIZES].shape
            target.chain = Chain(hidden_size, causal_size)
            target.chain.load_state_dict(tensors)
        if scores is not None:
            target.conformal = Conformal(scores.numpy())
        return target


class CausalTextRegressor(RegressorMixin, BaseEstimator):
    """Numbers, with their uncertainty, from texts or from the rows of a table.

    Args:
        backbone: `frozen` (the embedded model's features; minutes), `finetune` or `scratch`.
        model: a converted model's directory instead of the embedded one, or an `OpenModel`.
        template: such as "A {carat} carat diamond, cut {cut}", for tables; None lists the columns.
        text: the table's column (or columns) of free text, used verbatim.
        units: column -> unit, for tables without a template.
        question: the end of every text; None asks for the targets ("The price is"), or leaves
            it to the template.
        value_space: `symlog`, `linear`, or `auto`: the better one on held-out values (frozen;
            else `symlog` unless values of both signs occur).
        bad_rows: `raise`, or `skip` rows without a text or a finite target, with a warning.
        max_length: tokens of a text; longer ones lose their beginning, with a warning.
        cache: keep frozen features on disk, in the cache directory of the embedded model.
        folds: of the cross-validation that chooses the penalty (frozen).
        size: of a model from scratch: `tiny`, `small`, `medium`, or (hidden size, layers).
        learning_rate, epochs, batch_size: of `finetune` and `scratch`; None is their default.
        held_out: the share of rows on which training is validated.
        patience: training stops after so many epochs that are no better on the held-out rows;
            0, like 1, stops after the first.
        random_state: an int, the seed of folds, weights and batches.
        verbose: show progress on the standard error stream.
    """

    targets_: dict[str, Target]
    columns_: list[Any] | None  # of the table, None for texts
    is_single_: bool

    def __init__(
        self,
        backbone: str = "frozen",
        *,
        model: str | os.PathLike[str] | None = None,
        template: str | None = None,
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
        random_state: int = 0,
        verbose: bool = True,
    ) -> None:
        self.backbone = backbone
        self.model = model
        self.template = template
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

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from texts (or a table) and values.

        `y` is one number per row, or several: a 2-D array, a DataFrame, a dict of names, or the
        names of columns of the table `X`.
        """
        self._check_settings()
        for name in ("model_", "processor_", "backbone_"):  # of an earlier fit
            self.__dict__.pop(name, None)
        values, self.is_single_ = read_targets(X, y)
        self.columns_ = self._columns(X, list(values))
        texts = self._texts(X, list(values))
        weights = sentences.read_weights(sample_weight, len(texts))
        index = row_index(X)
        texts, values, is_usable = sentences.usable_rows(texts, values, self.bad_rows, index)
        weights, index = weights[is_usable], None if index is None else index[is_usable]
        for name, column in values.items():
            _check_variety(name, column)
        if self.backbone != "scratch":  # whose tokenizer does not exist yet
            self._warn_long_texts(texts, index=index)
            self._announce(texts)
        self.targets_ = {name: Target(ValueSpace()) for name in values}
        if self.backbone == "frozen":
            self._fit_chains(texts, values, weights)
        else:
            self._fit_model(texts, values, weights)
        return self

    def calibrate(self, X: Any, y: Any) -> Self:
        """Split-conformal calibration on rows that `fit` has not seen; see `conformal`."""
        check_is_fitted(self, "targets_")
        values, _ = read_targets(X, y)
        texts, values, is_usable = sentences.usable_rows(
            self.sentences(X), values, self.bad_rows, index := row_index(X)
        )
        index = None if index is None else index[is_usable]
        if len(values) != len(self.targets_):
            names = ", ".join(self.targets_)
            raise ValueError(f"y has {counted(len(values), 'target')}; give those of fit: {names}.")
        blocks = [
            {name: number.y for name, number in found.items()}
            for found in self._predictions(texts, BLOCK, index)
        ]
        for (name, target), column in zip(self.targets_.items(), values.values(), strict=True):
            encoded = target.space.encode(torch.from_numpy(column))
            parts = zip(*(y_dists[name] for y_dists in blocks), strict=True)  # locs, scales
            target.conformal = Conformal.fit(Cauchy(*map(torch.cat, parts)), encoded)
        return self

    def _fit_chains(self, texts: list[str], values: dict[str, Array], weights: Array) -> None:
        z = torch.from_numpy(self._features(texts))
        self.backbone_ = {**record_of(self.model), "fingerprint": self._fingerprint()}
        with progress_bar("fitting", self.verbose) as progress:
            for name, column in values.items():
                self.targets_[name] = self._fit_chain(z, column, weights, progress)

    def _fit_chain(self, z: Tensor, values: Array, weights: Array, progress: Progress) -> Target:
        """The chain in the space in which unseen values are likelier."""
        v, w = torch.from_numpy(values), torch.from_numpy(weights)
        found = []
        for kind in ("symlog", "linear") if self.value_space == "auto" else (self.value_space,):
            space = ValueSpace(kind, *fit_field(v, kind))
            chain, loss = fit_chain(
                z, space.encode(v), w, folds=self.folds, seed=self.random_state, progress=progress
            )
            slope = float((space.log_slope(v) * w).sum() / w.sum())
            found.append((loss - slope, Target(space, chain)))
        return min(found, key=lambda candidate: candidate[0])[1]

    def _fit_model(self, texts: list[str], values: dict[str, Array], weights: Array) -> None:
        """One model for all targets: every text is repeated with the question for each target."""
        asked = [text for name in values for text in self._asked(texts, name)]
        self.processor_, self.model_ = self._new_or_copied_model(asked, values)
        given = {name: getattr(self, name) for name in DEFAULTS[self.backbone]}
        given = {name: value for name, value in given.items() if value is not None}
        options = DEFAULTS[self.backbone] | given
        self._announce(asked, passes=FORWARDS_OF_A_STEP * options["epochs"], is_kept=True)
        y = []
        for name, column in values.items():
            self.model_.fit_value_field(name, column)
            self.targets_[name] = Target(space := field_space(self.model_.config, name))
            y.append(space.encode(torch.from_numpy(column)).float())
        loss = ValueLoss(
            self.model_,
            encode_texts(asked, self.processor_, self._max_tokens()),
            torch.cat(y),
            torch.from_numpy(np.tile(weights, len(values))).float(),
        )
        if self.backbone == "scratch":
            init_number_head(self.model_)
        else:
            z = torch.from_numpy(self._features(asked))
            seed, folds = self.random_state, self.folds
            chain, _ = fit_chain(z, loss.y, loss.weights, folds=folds, seed=seed)
            init_from_chain(self.model_, chain)
            self.model_.abduction.loc.requires_grad_(False)  # coordinates keep their meaning
        with progress_bar("training", self.verbose) as progress:
            train_model(
                self.model_,
                loss,
                len(asked),
                batch_size=self.batch_size,
                held_out=self.held_out,
                seed=self.random_state,
                progress=progress,
                **options,
            )

    def _new_or_copied_model(self, texts: list[str], values: dict[str, Array]) -> Pair:
        """The model to train: untrained, with a tokenizer learned from `texts`, or the backbone."""
        space = self.value_space
        if space == "auto":
            is_mixed = any(column.min() < 0 < column.max() for column in values.values())
            space = "linear" if is_mixed else "symlog"
        fields: dict[str, Any] = {"gate_alpha": 1.0, "value_space": space}
        if self.backbone == "finetune":
            processor, model = open_copy(self.model, self.verbose)
            for name, value in fields.items():
                setattr(model.config, name, value)
            return processor, model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.random_state)
            processor, model = new_model(
                texts, self.size, max_length=self.max_length, encode_numbers="value", **fields
            )
        processor.encode_numbers = "value"
        self._warn_long_texts(texts, processor)
        return processor, model

    # ------------------------------------------------------------ predicting

    def predict(self, X: Any) -> Array:
        """Medians: (N,), or (N, targets) for several."""
        return self._per_target(X, lambda number, _: number.median)

    def predict_interval(
        self, X: Any, level: float = 0.9, *, calibrated: bool | None = None
    ) -> tuple[Array, Array]:
        """The central interval of every number: two arrays shaped as `predict`.

        `calibrated`: True for split conformal, False for the Cauchy's own; None prefers the first.
        """

        def bounds(number: NumberPrediction, target: Target) -> Array:
            conformal = _conformal(target, calibrated)
            if conformal is None:
                return np.stack(number.interval(level), -1)
            radius = conformal.radius(level)
            return np.stack([_at(number, -radius), _at(number, radius)], -1)

        both = self._per_target(X, bounds)
        return both[..., 0], both[..., 1]

    def predict_quantiles(
        self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95), *, calibrated: Any = None
    ) -> Array:
        """(N, quantiles), or (N, targets, quantiles) for several targets."""

        def curve(number: NumberPrediction, target: Target) -> Array:
            conformal = _conformal(target, calibrated)
            if conformal is None:
                return np.asarray(number.quantile(list(quantiles)))
            return np.stack([_at(number, conformal.quantile(p)) for p in quantiles], -1)

        return self._per_target(X, curve)

    def predict_distribution(self, X: Any) -> NumberPrediction | dict[str, NumberPrediction]:
        """The uncalibrated distributions; a dict of them for several targets."""
        texts = self.sentences(X)
        (found,) = self._predictions(texts, max(len(texts), 1), row_index(X))
        return next(iter(found.values())) if self.is_single_ else found

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2, by scikit-learn's convention: averaged over targets."""
        truth = np.stack(list(read_targets(X, y)[0].values()), -1)
        predicted = self.predict(X).reshape(truth.shape)
        return float(r2_score(truth, predicted, sample_weight=sample_weight))

    def _per_target(self, X: Any, compute: Callable[[NumberPrediction, Target], Array]) -> Array:
        """`compute` of every target's prediction, stacked on axis 1 if there are several."""
        parts = []
        for found in self._predictions(self.sentences(X), BLOCK, row_index(X)):
            columns = [np.asarray(compute(found[name], t)) for name, t in self.targets_.items()]
            parts.append(columns[0] if self.is_single_ else np.stack(columns, 1))
        return np.concatenate(parts)

    @torch.no_grad()
    def _predictions(
        self, texts: list[str], block: int, index: Any = None
    ) -> Iterator[dict[str, NumberPrediction]]:
        """The predictions by target, for `block` rows at a time: U of a row is large."""
        if empty := [row for row, text in enumerate(texts) if not text.strip()]:
            raise ValueError(f"{name_rows(empty, index)} without a text; give at least one word.")
        self._warn_long_texts(texts, index=index)
        if self.backbone == "frozen":
            self._check_backbone()
            z = torch.from_numpy(self._features(texts))
        for start in range(0, max(len(texts), 1), block):
            rows = slice(start, start + block)
            certain = np.ones(len(texts[rows]))  # the next token is taken to be a number
            found = {}
            for name, target in self.targets_.items():
                if target.chain is not None:
                    u, head = target.chain(z[rows])[0], target.chain.action.value
                else:
                    u, head = self._abduce(self._asked(texts[rows], name)), self.model_.action.value
                found[name] = NumberPrediction.from_individuals(u, head, target.space, certain)
                _check_finite(name, found[name].y, start, index)
            yield found

    def _abduce(self, texts: list[str]) -> Cauchy:
        """U' of the trained model, in float64. -> (N, C)"""
        encoded = encode_texts(texts, self.processor_, self._max_tokens())
        size = self.model_.config.latent_size
        loc, scale = torch.empty(2, len(texts), size, dtype=torch.float64)
        for rows in batches_by_length(encoded):
            z = hidden_at_end(self.model_, [encoded[row] for row in rows])
            u = self.model_.action.widen(self.model_.abduct(z))
            loc[rows], scale[rows] = u.loc.double().cpu(), u.scale.double().cpu()
        return Cauchy(loc, scale)

    # ------------------------------------------------------------ texts and rows

    def sentences(self, X: Any) -> list[str]:
        """The text that the model reads for every row; it ends where the number would follow."""
        check_is_fitted(self, "targets_")
        return self._texts(X, list(self.targets_))

    def of_sentences(self) -> Self:
        """The same regressor for whole sentences instead of rows; the fitted state is shared.

        regressor.of_sentences().predict(regressor.sentences(X))      # is predict(X)
        """
        check_is_fitted(self, "targets_")
        reader = copy.copy(self).set_params(template=None, text=None, question="")
        reader.columns_ = None
        return reader

    def _check_settings(self) -> None:
        check_choice("backbone", self.backbone, BACKBONES)
        check_choice("value_space", self.value_space, ("auto", *VALUE_SPACES))
        check_choice("bad_rows", self.bad_rows, ("raise", "skip"))
        if not isinstance(self.model, str | os.PathLike | None):
            raise TypeError(
                f"model is a {type(self.model).__name__}; give a directory, or a loaded model as "
                "OpenModel(processor, model)."
            )
        least = {"folds": 2, "max_length": 2, "batch_size": 1, "epochs": 1, "patience": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and not value >= lowest:
                raise ValueError(f"{name}={value} must be at least {lowest}.")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be greater than 0.")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out={self.held_out} must be a share of rows, 0 to below 1.")

    def _columns(self, X: Any, targets: list[str]) -> list[Any] | None:
        """The columns that sentences are made of; those without any value are dropped."""
        if not is_table(X):
            if self.template is not None or self.text is not None:
                raise ValueError("template and text are for tables, and X holds texts; drop them.")
            return None
        columns = sentences.used_columns(X, template=self.template, without=targets)
        sentences.require_columns(X, self._text_columns())
        if not len(X):
            return columns
        empty = sentences.empty_columns(X, columns)
        if texts := [column for column in empty if column in self._text_columns()]:
            raise ValueError(f"the text column {texts[0]!r} is empty; name a column with values.")
        if empty:
            names = ", ".join(map(repr, empty))
            what = "without values"
            columns_are = counted(len(empty), f"column {what} is", f"columns {what} are")
            warnings.warn(f"{columns_are} dropped: {names}.", stacklevel=3)
        kept = [column for column in columns if column not in empty or self.template is not None]
        if not kept:
            raise ValueError("the table has no column with values beside its targets.")
        return kept

    def _text_columns(self) -> list[str]:
        return [self.text] if isinstance(self.text, str) else list(self.text or ())

    def _texts(self, X: Any, targets: list[str]) -> list[str]:
        """A text for every row, as in `fit`."""
        question = self.question
        if question is None:
            question = "" if self.template or self._asks_each() else sentences.ask_for(targets)
        if self.columns_ is None:
            texts = sentences.read_texts(X)
            return [join_sentences(text, question) if text.strip() else "" for text in texts]
        if not is_table(X):
            raise ValueError("X is not a DataFrame; give one with the columns seen in fit.")
        return sentences.to_sentences(
            X,
            self.columns_,
            template=self.template,
            text=self._text_columns(),
            units=self.units,
            question=question,
        )

    def _asks_each(self) -> bool:
        """Whether one model predicts several targets, distinguished by the question."""
        return self.backbone != "frozen" and not self.is_single_

    def _asked(self, texts: list[str], name: str) -> list[str]:
        if not self._asks_each():
            return texts
        return [join_sentences(text, sentences.ask_for([name])) for text in texts]

    # ------------------------------------------------------------ the backbone

    def _open(self) -> Pair:
        """The trained processor and model, else the backbone."""
        if hasattr(self, "model_"):
            return self.processor_, self.model_
        return open_shared(self._source(), self.verbose)

    def _source(self) -> Source:
        """The backbone's recorded place; `model` may be relative to another directory."""
        return located(self.model, getattr(self, "backbone_", None))

    def _max_tokens(self) -> int:
        """`max_length`, or fewer if the model has fewer positions."""
        positions: int = self._open()[1].config.max_position_embeddings
        return min(self.max_length, positions)

    def _warn_long_texts(self, texts: list[str], processor: Any = None, index: Any = None) -> None:
        most = self.max_length if processor else self._max_tokens()
        if rows := too_long(texts, processor or self._open()[0], most):
            warnings.warn(
                f"texts longer than {most} tokens (max_length, or the model's context) lose their "
                f"beginning, {len(rows)} of {len(texts)}: {name_rows(rows, index)}.",
                stacklevel=4,
            )

    def _announce(self, texts: list[str], **how: Any) -> None:
        """Say what a large table needs before the work, and refuse what cannot be done."""
        if len(texts) < workload.LARGE:
            return
        processor, model = self._open()
        need = workload.estimate(texts, model, processor, self._max_tokens(), **how)
        workload.check_memory(need)
        disk = workload.cache_size(len(texts), model.config.hidden_size)
        more = f"; the feature cache grows by up to {disk}, without --no-cache (cache=False)"
        if self.verbose:
            print(f"{need}{more if self.cache and not how else ''}.", file=sys.stderr, flush=True)

    def _features(self, texts: list[str]) -> NDArray[np.float32]:
        processor, model = open_shared(self._source(), self.verbose)
        cache = cache_directory() / CACHE_FILE if self.cache else None
        options: dict[str, Any] = {"max_length": self._max_tokens(), "cache": cache}
        with progress_bar("reading", self.verbose) as progress:
            return features(texts, model, processor, progress=progress, **options)

    def _fingerprint(self) -> str:
        processor, model = self._open()
        return fingerprint(model, processor, self._max_tokens())

    def _check_backbone(self) -> None:
        if self._fingerprint() != self.backbone_["fingerprint"]:
            raise ValueError(
                f"the backbone {self.backbone_['name']} or max_length has changed since this "
                "regressor was fitted; fit it again."
            )

    # ------------------------------------------------------------ saving

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a directory, completely or not at all. Frozen: the chains, the backbone's name."""
        check_is_fitted(self, "targets_")
        settings = {
            "format": FORMAT,
            "parameters": self.get_params() | {"model": self.model and os.fspath(self.model)},
            "columns": self.columns_,
            "is_single": self.is_single_,
            "targets": {name: list(target.space) for name, target in self.targets_.items()},
            "backbone": saved_record(self.backbone_, Path(path))
            if hasattr(self, "backbone_")
            else None,
        }
        tensors = {
            f"{place}.{name}": tensor.contiguous()
            for place, target in enumerate(self.targets_.values())
            for name, tensor in target.tensors().items()
        }
        with new_directory(Path(path), overwrite) as directory:
            (directory / TENSORS).write_bytes(safetensors_bytes(tensors))  # with the umask
            settings["tensors_sha256"] = file_sha256(directory / TENSORS)
            (directory / SETTINGS).write_text(json.dumps(settings, indent=1), encoding="utf-8")
            if hasattr(self, "model_"):
                with quiet():
                    self.model_.save_pretrained(directory / MODEL)
                self.processor_.save_pretrained(directory / MODEL)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, model: str | os.PathLike[str] | None = None
    ) -> Self:
        """Read what `save` wrote. `model` replaces the saved name of a frozen backbone: the
        directory to which it has moved, or an `OpenModel`."""
        directory = Path(path)
        saved = read_settings(directory)
        regressor = cls(**saved.parameters)
        try:
            regressor._check_settings()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{directory / SETTINGS}: {error}") from None
        if model is not None:
            regressor.set_params(model=model)
        regressor.columns_, regressor.is_single_ = saved.columns, saved.is_single
        tensors = read_tensors(directory, saved)
        has_manifest = (directory / MANIFEST).is_file()
        if not has_manifest and saved.tensors_sha256 is not None:  # 0.3.0 wrote neither
            warnings.warn(
                f"{directory} has no {MANIFEST}, so an edited value is found only if it is "
                "impossible; restore the file, or fit again.",
                stacklevel=2,
            )
        if has_manifest and (damage := damaged_files(directory, hashes=True)):
            raise ValueError(f"{directory / damage[0]}; {CURE}.")
        regressor.targets_ = {
            name: Target.from_tensors(space, of_target)
            for (name, space), of_target in zip(saved.spaces.items(), tensors, strict=True)
        }
        if saved.backbone is not None:
            regressor.backbone_ = loaded_record(saved.backbone, directory, model)
            regressor._check_backbone()
            regressor._check_chains(directory / TENSORS)
            return regressor
        if not (directory / MODEL).is_dir():
            raise FileNotFoundError(f"{directory / MODEL} is missing; restore it, or fit again.")
        regressor.processor_, regressor.model_ = open_model(directory / MODEL)
        return regressor

    def _check_chains(self, file: Path) -> None:
        size = self._open()[1].config.hidden_size
        for name, target in self.targets_.items():
            assert target.chain is not None  # `read_tensors` has found one
            if (found := target.chain.abduction.loc.weight.shape[1]) != size:
                raise wrong(
                    file, f"the hidden size of {name}", str(found), f"the backbone's {size}"
                )


def _check_variety(name: str, values: Array) -> None:
    if len(values) < 2:
        rows_are = counted(len(values), "row is", "rows are")
        raise ValueError(f"{rows_are} too few to learn from; give at least 2.")
    if values.min() == values.max():
        raise ValueError(
            f"target {name!r} is constant ({values[0]:g} in all {len(values)} rows); give rows "
            "with different values."
        )


def _check_finite(name: str, y: Cauchy, start: int, index: Any) -> None:
    """Refuse predictions for the rows from `start` on that damaged weights make NaN or infinite."""
    broken = ~(y.loc.isfinite() & y.scale.isfinite())
    if broken.any():
        rows = start + np.flatnonzero(broken.numpy())
        raise ValueError(
            f"the prediction of {name!r} is not finite in {name_rows(rows, index)}; the "
            "regressor's weights are damaged: restore its files, or fit again."
        )


def _conformal(target: Target, calibrated: bool | None) -> Conformal | None:
    if calibrated and target.conformal is None:
        raise ValueError(
            "calibrated=True needs calibrate(X, y) on rows that fit has not seen; "
            "calibrated=False gives the Cauchy's own intervals."
        )
    return None if calibrated is False else target.conformal


def _at(number: NumberPrediction, scales: float) -> Array:
    """The value so many predicted scales away from the median."""
    if np.isinf(scales):
        return np.full(len(number.y.loc), scales)
    value: Tensor = number.space.decode(number.y.loc + scales * number.y.scale)
    return value.numpy()
