"""Regressor: texts or tables -> calibrated numbers, by scikit-learn's conventions.

    regressor = CausalTextRegressor().fit(train, "price")      # a DataFrame, or texts and values
    regressor.calibrate(held_out, "price")
    low, high = regressor.predict_interval(test, level=0.9)

Every text ends where its number would stand; there the individual is abduced, and one linear law
says the number (the value is always wanted: no gate). Three backbones:

    frozen    the embedded model as it is; only the causal chain is fitted, on features kept on disk
    finetune  the chain is fitted, then the whole model is trained
    scratch   a small model of its own, which reads numbers as values
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import default_model, open_model
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.modeling.value_space import ValueSpace, field_space, fit_field
from causal_qwen.options import VALUE_SPACES, check_choice
from causal_qwen.paths import EMBEDDED, cache_directory, new_directory
from causal_qwen.regression.conformal import Conformal
from causal_qwen.regression.features import (
    CACHE_FILE,
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
    Lesson,
    fit_chain,
    start_from_chain,
    start_from_nothing,
    teach,
)
from causal_qwen.regression.prediction import NumberPrediction
from causal_qwen.regression.sentences import (
    ask_for,
    empty_columns,
    is_table,
    join_sentences,
    name_rows,
    read_targets,
    read_texts,
    require_columns,
    to_sentences,
    used_columns,
)
from causal_qwen.terminal import progress_bar, status
from causal_qwen.training.from_scratch import new_model

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.metrics import r2_score
    from sklearn.utils.validation import check_is_fitted
except ModuleNotFoundError:
    raise ImportError(
        "CausalTextRegressor needs scikit-learn, which is not installed: "
        "pip install 'causal-qwen[tables]'"
    ) from None

Array = NDArray[np.float64]

BACKBONES = ("frozen", "finetune", "scratch")
SPACES = ("auto", *VALUE_SPACES)
RATES = {"finetune": 2e-5, "scratch": 1e-3}
EPOCHS = {"finetune": 3, "scratch": 40}
PATIENCE = {"finetune": 1, "scratch": 10}
LENGTH = 512  # tokens of a text, unless asked otherwise
SETTINGS, TENSORS, MODEL = "regressor.json", "regressor.safetensors", "model"


@dataclass
class Target:
    """A named number: its scale, its own chain (frozen) and its calibration."""

    space: ValueSpace
    chain: Chain | None = None
    conformal: Conformal | None = None


class OpenModel:
    """A processor and a model that are open already, to be shared instead of opened again.

        processor, model = open_model(path)
        CausalTextRegressor(model=OpenModel(processor, model))

    It stands for its directory, and is never copied: scikit-learn's clones and deep copies hold
    the same one, a pickle or a saved regressor holds the name of the directory.
    """

    def __init__(self, processor: Processor, model: CausalModel) -> None:
        self.processor, self.model = processor, model

    @property
    def name(self) -> str:
        """The directory or hub name it was opened from; empty if it was made in memory."""
        return str(self.model.name_or_path)

    def __fspath__(self) -> str:
        if not self.name:
            raise ValueError(
                "the open model lies in no directory, so it cannot be kept by name: write it and "
                "its processor with save_pretrained, and open that directory."
            )
        return self.name

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenModel:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (os.fspath(self),)

    def __repr__(self) -> str:
        return f"OpenModel({self.name!r})"


class CausalTextRegressor(RegressorMixin, BaseEstimator):
    """Numbers, with their uncertainty, from texts or from the rows of a table.

    Args:
        backbone: `frozen` (the embedded model's features; minutes), `finetune` or `scratch`.
        model: a converted model's directory instead of the embedded one, or an `OpenModel`.
        template: such as "A {carat} carat diamond, cut {cut}", for tables; made by itself if None.
        text: the table's column (or columns) of free text, told in its own words.
        units: column -> unit, for tables without a template.
        question: what every text ends with; None asks for the targets ("The price is"), or leaves
            it to the template.
        value_space: `symlog`, `linear`, or `auto`: what explains held-out values better (frozen;
            else `symlog` unless values of both signs occur).
        bad_rows: `raise`, or `skip`: rows without a text or a finite target are left out, named.
        max_length: tokens of a text; what is longer loses its beginning, and is named.
        cache: keep frozen features on disk, in the cache directory of the embedded model.
        folds: of the cross-validation that chooses the penalty (frozen).
        size: of a model from scratch: `tiny`, `small`, `medium`, or (hidden size, layers).
        learning_rate, epochs, batch_size, held_out, patience: of `finetune` and `scratch`; training
            ends after `patience` epochs that are no better on the held-out share of rows.
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
        weights = _weights(sample_weight, len(texts))
        texts, values, weights = self._good_rows(texts, values, weights)
        for name, column in values.items():
            _check_variety(name, column)
        if self.backbone != "scratch":  # its tokenizer is yet to be learned
            self._name_long_texts(texts)
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
        texts, values, _ = self._good_rows(self.sentences(X), values, np.ones(len(X)))
        if len(values) != len(self.targets_):
            raise ValueError(
                f"y has {len(values)} targets; fitted were {', '.join(self.targets_)}."
            )
        predictions = self._distributions(texts)
        for (name, target), column in zip(self.targets_.items(), values.values(), strict=True):
            encoded = target.space.encode(torch.from_numpy(column))
            target.conformal = Conformal.fit(predictions[name].y, encoded)
        return self

    def _fit_chains(self, texts: list[str], values: dict[str, Array], weights: Array) -> None:
        z = torch.from_numpy(self._features(texts))
        self.backbone_ = {
            "name": self._backbone_name(),
            "fingerprint": self._fingerprint(),
        }
        with progress_bar("fitting", self.verbose) as progress:
            for name, column in values.items():
                self.targets_[name] = self._fit_chain(z, column, weights, progress)

    def _fit_chain(
        self, z: Tensor, values: Array, weights: Array, progress: Callable[[int, int], None]
    ) -> Target:
        """The chain in the space in which values that it has not seen are likelier."""
        v, w = torch.from_numpy(values), torch.from_numpy(weights)
        kinds = ("symlog", "linear") if self.value_space == "auto" else (self.value_space,)
        found = []
        for kind in kinds:
            space = ValueSpace(kind, *fit_field(v, kind))
            chain, loss = fit_chain(
                z,
                space.encode(v),
                weights=w,
                folds=self.folds,
                seed=self.random_state,
                progress=progress,
            )
            slope = float((space.log_slope(v) * w).sum() / w.sum())
            found.append((loss - slope, Target(space, chain)))
        return min(found, key=lambda one: one[0])[1]

    def _fit_model(self, texts: list[str], values: dict[str, Array], weights: Array) -> None:
        """One model for all targets: every text is asked for each of them."""
        kind = self._model_space(values)
        fields: dict[str, Any] = {"gate_alpha": 1.0, "value_space": kind}
        asked = [text for name in values for text in self._asked(texts, name)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.random_state)
            if self.backbone == "scratch":
                self.processor_, self.model_ = new_model(
                    asked, self.size, max_length=self.max_length, encode_numbers="value", **fields
                )
                self.processor_.encode_numbers = "value"
                self._name_long_texts(asked)
            else:
                self.processor_, self.model_ = self._open_own()
                for name, value in fields.items():
                    setattr(self.model_.config, name, value)
        for name, column in values.items():
            self.model_.fit_value_field(name, column)
            self.targets_[name] = Target(field_space(self.model_.config, name))
        y = [
            self.targets_[name].space.encode(torch.from_numpy(column))
            for name, column in values.items()
        ]
        encoded = encode_texts(asked, self.processor_, self._longest())
        lesson = Lesson(
            self.model_,
            encoded,
            torch.cat(y).float(),
            torch.from_numpy(np.tile(weights, len(values))).float(),
        )
        if self.backbone == "scratch":
            start_from_nothing(self.model_)
        else:
            z = torch.from_numpy(self._features(asked))
            chain, _ = fit_chain(
                z, lesson.y, weights=lesson.weights, folds=self.folds, seed=self.random_state
            )
            start_from_chain(self.model_, chain)
            self.model_.abduction.loc.requires_grad_(False)  # the coordinates stay what they are
        with progress_bar("training", self.verbose) as progress:
            teach(
                self.model_,
                lesson,
                len(asked),
                rate=self.learning_rate or RATES[self.backbone],
                epochs=self.epochs or EPOCHS[self.backbone],
                batch_size=self.batch_size,
                held_out=self.held_out,
                patience=self.patience or PATIENCE[self.backbone],
                seed=self.random_state,
                progress=progress,
            )

    # ------------------------------------------------------------ predicting

    def predict(self, X: Any) -> Array:
        """Medians: (N,), or (N, targets) for several."""
        return self._gather(X, lambda number, _: number.median)

    def predict_interval(
        self, X: Any, level: float = 0.9, *, calibrated: bool | None = None
    ) -> tuple[Array, Array]:
        """The central interval of every number: two arrays shaped as `predict`.

        `calibrated`: by split conformal, or False for the Cauchy's own; None takes what there is.
        """

        def bounds(number: NumberPrediction, target: Target) -> Array:
            conformal = self._conformal(target, calibrated)
            if conformal is None:
                return np.stack(number.interval(level), -1)
            radius = conformal.radius(level)
            return np.stack([_at(number, -radius), _at(number, radius)], -1)

        both = self._gather(X, bounds)
        return both[..., 0], both[..., 1]

    def predict_quantiles(
        self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95), *, calibrated: Any = None
    ) -> Array:
        """(N, quantiles), or (N, targets, quantiles) for several targets."""

        def curve(number: NumberPrediction, target: Target) -> Array:
            conformal = self._conformal(target, calibrated)
            if conformal is None:
                return np.asarray(number.quantile(list(quantiles)))
            return np.stack([_at(number, conformal.quantile(p)) for p in quantiles], -1)

        return self._gather(X, curve)

    def predict_distribution(self, X: Any) -> NumberPrediction | dict[str, NumberPrediction]:
        """The uncalibrated distributions; a dict of them for several targets."""
        found = self._distributions(self.sentences(X))
        return next(iter(found.values())) if self.is_single_ else found

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2, by scikit-learn's convention: averaged over targets."""
        values, _ = read_targets(X, y)
        told = np.stack(list(values.values()), -1)
        predicted = self.predict(X)
        return float(r2_score(told, predicted.reshape(told.shape), sample_weight=sample_weight))

    def _gather(self, X: Any, ask: Callable[[NumberPrediction, Target], Array]) -> Array:
        """What every target's prediction answers, side by side on axis 1 if there are several."""
        found = self._distributions(self.sentences(X))
        answers = [np.asarray(ask(found[name], t)) for name, t in self.targets_.items()]
        return answers[0] if self.is_single_ else np.stack(answers, 1)

    def _conformal(self, target: Target, calibrated: bool | None) -> Conformal | None:
        if calibrated and target.conformal is None:
            raise ValueError(
                "calibrated=True needs calibrate(X, y) on rows that fit has not seen; "
                "calibrated=False gives the Cauchy's own intervals."
            )
        return None if calibrated is False else target.conformal

    def _distributions(self, texts: list[str]) -> dict[str, NumberPrediction]:
        if empty := [row for row, text in enumerate(texts) if not text.strip()]:
            raise ValueError(f"{name_rows(empty)} without a text; give at least one word.")
        self._name_long_texts(texts)
        found = {}
        z = None
        if self.backbone == "frozen":
            self._check_backbone()
            z = torch.from_numpy(self._features(texts))
        for name, target in self.targets_.items():
            if target.chain is not None and z is not None:
                u, y = target.chain(z)
                law = target.chain.action.value
            else:
                u, y = self._ask_model(self._asked(texts, name))
                law = self.model_.action.value
            weight, bias = law.weight.detach()[0].double().cpu(), float(law.bias.detach())
            certain = np.ones(len(texts))  # the value is always wanted
            found[name] = NumberPrediction(y, target.space, certain, u, weight, bias)
        return found

    @torch.no_grad()
    def _ask_model(self, texts: list[str]) -> tuple[Cauchy, Cauchy]:
        """U' (N, C) and Y (N,) of the trained model, in float64."""
        action = self.model_.action
        encoded = encode_texts(texts, self.processor_, self._longest())
        size = self.model_.config.latent_size
        loc, scale = torch.empty(2, len(texts), size, dtype=torch.float64)
        for places in batches_by_length(encoded):
            z = hidden_at_end(self.model_, [encoded[place] for place in places])
            u = action.widen(self.model_.abduct(z))
            loc[places], scale[places] = u.loc.double().cpu(), u.scale.double().cpu()
        u = Cauchy(loc, scale)
        law = action.value
        weight = law.weight[0].double().cpu()
        return u, Cauchy(loc @ weight + float(law.bias.detach()), scale @ weight.abs())

    # ------------------------------------------------------------ texts and rows

    def sentences(self, X: Any) -> list[str]:
        """What the model reads of every row: a text that ends where the number would stand."""
        check_is_fitted(self, "targets_")
        return self._texts(X, list(self.targets_))

    def of_sentences(self) -> Self:
        """The same regressor, asked with whole sentences instead of rows; what it knows is shared.

        regressor.of_sentences().predict(regressor.sentences(X))      # is predict(X)
        """
        check_is_fitted(self, "targets_")
        reader = copy.copy(self).set_params(template=None, text=None, question="")
        reader.columns_ = None
        return reader

    def _check_settings(self) -> None:
        for name, allowed in (
            ("backbone", BACKBONES),
            ("value_space", SPACES),
            ("bad_rows", ("raise", "skip")),
        ):
            check_choice(name, getattr(self, name), allowed)
        if not isinstance(self.model, str | os.PathLike | None):
            raise TypeError(
                f"model is a {type(self.model).__name__}; give a directory, or what is open "
                "already as OpenModel(processor, model)."
            )
        if self.folds < 2:
            raise ValueError(f"folds={self.folds} leaves no row unseen; give at least 2.")
        if self.max_length < 2:
            raise ValueError(f"max_length={self.max_length} must be at least 2.")

    def _columns(self, X: Any, targets: list[str]) -> list[Any] | None:
        """The columns that sentences are made of; those without any value are left out, named."""
        if not is_table(X):
            if self.template is not None or self.text is not None:
                raise ValueError("template and text are for tables; X holds texts already.")
            return None
        columns = used_columns(X, template=self.template, without=targets)
        require_columns(X, self._text_columns())
        if not len(X):
            return columns
        empty = empty_columns(X, columns)
        if told := [column for column in empty if column in self._text_columns()]:
            raise ValueError(f"the text column {told[0]!r} is empty: no row has a value.")
        if empty:
            warnings.warn(
                f"{len(empty)} columns without any value are left out: "
                f"{', '.join(map(repr, empty))}.",
                stacklevel=3,
            )
        kept = [column for column in columns if column not in empty or self.template is not None]
        if not kept:
            raise ValueError("the table has no column with values beside its targets.")
        return kept

    def _text_columns(self) -> list[str]:
        if self.text is None:
            return []
        return [self.text] if isinstance(self.text, str) else list(self.text)

    def _texts(self, X: Any, targets: list[str]) -> list[str]:
        """A text for every row, as `fit` saw them."""
        question = self.question
        if question is None:
            question = "" if self.template or self._asks_each() else ask_for(targets)
        if self.columns_ is None:
            return [
                join_sentences(text, question) if text.strip() else "" for text in read_texts(X)
            ]
        if not is_table(X):
            raise ValueError("fit has seen a table; X must be a DataFrame with its columns.")
        return to_sentences(
            X,
            self.columns_,
            template=self.template,
            text=self._text_columns(),
            units=self.units,
            question=question,
        )

    def _asks_each(self) -> bool:
        """Whether one model tells several targets apart by what it is asked."""
        return self.backbone != "frozen" and not self.is_single_

    def _asked(self, texts: list[str], name: str) -> list[str]:
        return (
            [join_sentences(text, ask_for([name])) for text in texts]
            if self._asks_each()
            else texts
        )

    def _good_rows(
        self, texts: list[str], values: dict[str, Array], weights: Array
    ) -> tuple[list[str], dict[str, Array], Array]:
        """Rows with a text and finite targets; others are refused or skipped, and named."""
        for name, column in values.items():
            if len(column) != len(texts):
                raise ValueError(f"target {name!r} has {len(column)} values for {len(texts)} rows.")
        is_good = np.array([bool(text.strip()) for text in texts], dtype=bool)
        why = [] if is_good.all() else [f"{name_rows(np.flatnonzero(~is_good))} without a text"]
        for name, column in values.items():
            is_finite = np.isfinite(column)
            if not is_finite.all():
                why.append(
                    f"target {name!r} is NaN or infinite in {name_rows(np.flatnonzero(~is_finite))}"
                )
            is_good &= is_finite
        if why and self.bad_rows == "raise":
            raise ValueError(f"{'; '.join(why)}: correct them, drop them, or say bad_rows='skip'.")
        if why:
            warnings.warn(
                f"{int((~is_good).sum())} rows are skipped: {'; '.join(why)}.", stacklevel=3
            )
        kept = [text for text, good in zip(texts, is_good, strict=True) if good]
        return kept, {name: column[is_good] for name, column in values.items()}, weights[is_good]

    def _longest(self) -> int:
        """Tokens of a text: as many as are asked for, and as the model has positions."""
        positions: int = self._open()[1].config.max_position_embeddings
        return min(self.max_length, positions)

    def _name_long_texts(self, texts: list[str]) -> None:
        rows = too_long(texts, self._open()[0], self._longest())
        if rows:
            warnings.warn(
                f"{len(rows)} of {len(texts)} texts are longer than {self._longest()} tokens "
                f"(max_length, or the model's context) and lose their beginning: "
                f"{name_rows(rows)}.",
                stacklevel=4,
            )

    # ------------------------------------------------------------ the backbone

    def _model_space(self, values: dict[str, Array]) -> str:
        if self.value_space != "auto":
            return self.value_space
        is_mixed = any(column.min() < 0 < column.max() for column in values.values())
        return "linear" if is_mixed else "symlog"

    def _path(self) -> Path:
        if self.model is None:
            with status(self.verbose) as progress:
                return default_model(progress)
        return Path(self.model)

    def _backbone_name(self) -> str:
        if isinstance(self.model, OpenModel):
            return self.model.name
        return EMBEDDED if self.model is None else os.fspath(self.model)

    def _open(self) -> tuple[Any, Any]:
        """Processor and model: those that were trained, else the backbone."""
        return (self.processor_, self.model_) if hasattr(self, "model_") else self._open_backbone()

    def _open_backbone(self) -> tuple[Any, Any]:
        """As it is; opened once, and shared."""
        if isinstance(self.model, OpenModel):
            return self.model.processor, self.model.model
        return _open_once(self._path())

    def _open_own(self) -> tuple[Any, Any]:
        """The backbone once more, to be trained."""
        if isinstance(self.model, OpenModel):
            return copy.deepcopy((self.model.processor, self.model.model))
        return open_model(self._path())

    def _features(self, texts: list[str]) -> NDArray[np.float32]:
        processor, model = self._open_backbone()
        with progress_bar("reading", self.verbose) as progress:
            return features(
                texts,
                model,
                processor,
                max_length=self._longest(),
                cache=cache_directory() / CACHE_FILE if self.cache else None,
                progress=progress,
            )

    def _fingerprint(self) -> str:
        processor, model = self._open()
        return fingerprint(model, processor, self._longest())

    def _check_backbone(self) -> None:
        if self._fingerprint() != self.backbone_["fingerprint"]:
            raise ValueError(
                f"the backbone {self.backbone_['name']} is not the one that this regressor "
                "was fitted on, or max_length is another; fit it again."
            )

    # ------------------------------------------------------------ keeping

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a directory, whole or not at all. Frozen: the chains, and which backbone."""
        check_is_fitted(self, "targets_")
        tensors: dict[str, Tensor] = {}
        for place, target in enumerate(self.targets_.values()):
            if target.chain is not None:
                for name, tensor in target.chain.state_dict().items():
                    tensors[f"{place}.{name}"] = tensor.contiguous()
            if target.conformal is not None:
                tensors[f"{place}.scores"] = torch.from_numpy(target.conformal.scores)
        settings = {
            "parameters": self.get_params() | {"model": self.model and os.fspath(self.model)},
            "columns": self.columns_,
            "is_single": self.is_single_,
            "targets": {name: list(target.space) for name, target in self.targets_.items()},
            "backbone": getattr(self, "backbone_", None),
        }
        with new_directory(Path(path), overwrite) as directory:
            (directory / SETTINGS).write_text(json.dumps(settings, indent=1), encoding="utf-8")
            save_file(tensors, directory / TENSORS)
            if hasattr(self, "model_"):
                with quiet():
                    self.model_.save_pretrained(directory / MODEL)
                self.processor_.save_pretrained(directory / MODEL)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, model: str | os.PathLike[str] | None = None
    ) -> Self:
        """What `save` has written. A frozen backbone is opened by the name that was saved, or is
        `model`: the directory to which it has moved, or an `OpenModel`."""
        directory = Path(path)
        if not (directory / SETTINGS).is_file():
            raise FileNotFoundError(f"{directory} holds no {SETTINGS}; is it a saved regressor?")
        settings = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
        tensors = load_file(directory / TENSORS)
        moved = {} if model is None else {"model": model}
        regressor = cls(**settings["parameters"] | moved)
        regressor.columns_, regressor.is_single_ = settings["columns"], settings["is_single"]
        if settings["backbone"] is not None:
            regressor.backbone_ = settings["backbone"]
        regressor.targets_ = {}
        for place, (name, space) in enumerate(settings["targets"].items()):
            mine = {
                key.partition(".")[2]: tensor
                for key, tensor in tensors.items()
                if key.startswith(f"{place}.")
            }
            scores = mine.pop("scores", None)
            regressor.targets_[name] = Target(
                ValueSpace(*space),
                _chain_of(mine) if mine else None,
                None if scores is None else Conformal(scores.numpy()),
            )
        if (directory / MODEL).is_dir():
            regressor.processor_, regressor.model_ = open_model(directory / MODEL)
        else:
            regressor._check_backbone()
        return regressor


# ---------------------------------------------------------------- checks


def _weights(sample_weight: Any, rows: int) -> Array:
    if sample_weight is None:
        return np.ones(rows)
    weights = np.asarray(sample_weight, dtype=np.float64)
    if weights.shape != (rows,) or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(f"sample_weight must be {rows} finite numbers of at least 0.")
    if not weights.any():
        raise ValueError("sample_weight is 0 for every row.")
    return weights


def _check_variety(name: str, values: Array) -> None:
    if len(values) < 2:
        raise ValueError(f"{len(values)} rows are too few to learn from; give at least 2.")
    if values.min() == values.max():
        raise ValueError(
            f"target {name!r} is constant ({values[0]:g} in all {len(values)} rows): there is "
            "nothing to learn."
        )


def _at(number: NumberPrediction, scales: float) -> Array:
    """The value so many predicted scales away from the median."""
    if np.isinf(scales):
        return np.full(len(number.y.loc), scales)
    value: Tensor = number.space.decode(number.y.loc + scales * number.y.scale)
    return value.numpy()


def _chain_of(tensors: dict[str, Tensor]) -> Chain:
    causal_size, hidden_size = tensors["abduction.loc.weight"].shape
    chain = Chain(hidden_size, causal_size)
    chain.load_state_dict(tensors)
    return chain


@lru_cache(maxsize=1)
def _open_once(path: Path) -> tuple[Any, Any]:
    return open_model(path)
