"""Fit of sentences, which the language model alone reads: a chain per target on frozen features,
or one trained model for all targets.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from causal_qwen.conversion.placement import place_model
from causal_qwen.modeling.value_space import ValueSpace, field_space, fit_field
from causal_qwen.regression.backbone import Pair, open_copy
from causal_qwen.regression.features import Progress, encode_texts
from causal_qwen.regression.fitted import Target
from causal_qwen.regression.head import (
    TrainingReport,
    ValueLoss,
    fit_chain,
    init_from_chain,
    init_number_head,
    train_model,
)
from causal_qwen.regression.inputs import ask_target
from causal_qwen.regression.reading import (
    announce,
    backbone_record,
    max_tokens,
    read_features,
    warn_long_texts,
)
from causal_qwen.regression.settings import training_options, value_spaces
from causal_qwen.terminal import progress_bar
from causal_qwen.training.from_scratch import new_model

if TYPE_CHECKING:
    from causal_qwen.regression.regressor import CausalTextRegressor

Array = NDArray[np.float64]

FORWARDS_OF_A_STEP = 3  # the time of a training step: forward and backward


# ---------------------------------------------------------------- frozen


def fit_chains(
    regressor: CausalTextRegressor, texts: list[str], values: dict[str, Array], weights: Array
) -> None:
    """Set `targets_` and `backbone_`."""
    z = torch.from_numpy(read_features(regressor, texts))
    regressor.backbone_ = backbone_record(regressor)
    with progress_bar("fitting", regressor.verbose) as progress:
        for name, column in values.items():
            regressor.targets_[name] = _fit_target(regressor, z, column, weights, progress)


def _fit_target(
    regressor: CausalTextRegressor, z: Tensor, values: Array, weights: Array, progress: Progress
) -> Target:
    """The chain in the space in which unseen values are likelier."""
    v, w = torch.from_numpy(values), torch.from_numpy(weights)
    folds, seed = regressor.folds, regressor.seed_
    found = []
    for kind in value_spaces(regressor.value_space):
        space = ValueSpace(kind, *fit_field(v, kind))
        chain, loss = fit_chain(z, space.encode(v), w, folds=folds, seed=seed, progress=progress)
        slope = float((space.log_slope(v) * w).sum() / w.sum())
        found.append((loss - slope, Target(space, chain)))
    return min(found, key=lambda candidate: candidate[0])[1]


# ---------------------------------------------------------------- finetune and scratch


def fit_model(
    regressor: CausalTextRegressor, texts: list[str], values: dict[str, Array], weights: Array
) -> None:
    """Set `targets_`, `processor_` and `model_`: one model for all targets. Every text is repeated
    with the question for each target."""
    asked = [text for name in values for text in ask_target(regressor, texts, name)]
    processor, model = _new_or_copied_model(regressor, asked, values)
    regressor.processor_, regressor.model_ = processor, model
    options = training_options(regressor)
    announce(regressor, asked, passes=FORWARDS_OF_A_STEP * options["epochs"], is_kept=True)
    y = []
    for name, column in values.items():
        model.fit_value_field(name, column)
        regressor.targets_[name] = Target(space := field_space(model.config, name))
        y.append(space.encode(torch.from_numpy(column)).float())
    loss = ValueLoss(
        model,
        encode_texts(asked, processor, max_tokens(regressor)),
        torch.cat(y),
        torch.from_numpy(np.tile(weights, len(values))).float(),
    )
    seed = regressor.seed_
    if regressor.backbone == "scratch":
        init_number_head(model)
    else:
        z = torch.from_numpy(read_features(regressor, asked))
        chain, _ = fit_chain(z, loss.y, loss.weights, folds=regressor.folds, seed=seed)
        init_from_chain(model, chain)
        model.abduction.loc.requires_grad_(False)  # coordinates keep their meaning
    with progress_bar("training", regressor.verbose) as progress:
        report = train_model(
            model,
            loss,
            len(asked),
            batch_size=regressor.batch_size,
            held_out=regressor.held_out,
            seed=seed,
            progress=progress,
            **options,
        )
    _report_training(regressor, report)


def _report_training(regressor: CausalTextRegressor, report: TrainingReport) -> None:
    """Which weights were kept, and why."""
    if regressor.verbose:
        print(f"{regressor.backbone}: {report}.", file=sys.stderr, flush=True)
    if regressor.backbone != "finetune":
        return
    regressor.finetune_report_ = report
    if report.kept == 0:
        warnings.warn(
            f"finetuning is undone, and the head on the frozen model is kept: {report}; try "
            "another learning_rate, or more rows.",
            stacklevel=4,
        )


def _new_or_copied_model(
    regressor: CausalTextRegressor, texts: list[str], values: dict[str, Array]
) -> Pair:
    """The model to train: untrained, with a tokenizer learned from `texts`, or the backbone."""
    space, device, dtype = regressor.value_space, regressor.device, regressor.dtype
    if space == "auto":
        is_mixed = any(column.min() < 0 < column.max() for column in values.values())
        space = "linear" if is_mixed else "symlog"
    fields: dict[str, Any] = {"gate_alpha": 1.0, "value_space": space}
    if regressor.backbone == "finetune":
        processor, model = open_copy(regressor.model, regressor.verbose, device, dtype)
        for name, value in fields.items():
            setattr(model.config, name, value)
        return processor, model
    length = regressor.max_length
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(regressor.seed_)
        processor, model = new_model(
            texts, regressor.size, max_length=length, encode_numbers="value", **fields
        )
    processor.encode_numbers = "value"
    warn_long_texts(regressor, texts, processor)
    return processor, place_model(model, device, dtype)
