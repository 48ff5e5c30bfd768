"""Predict rows: X -> the distribution of every target, some rows at a time.

Several sources predict columns and texts; without them a chain per target reads frozen features,
or one trained model reads the sentence with the question for each target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.regression.features import batches_by_length, encode_texts, hidden_at_end
from causal_qwen.regression.inputs import ask_target, known_frame
from causal_qwen.regression.prediction import NumberPrediction
from causal_qwen.regression.reading import (
    check_backbone,
    max_tokens,
    read_features,
    read_frame,
    warn_long_texts,
)
from causal_qwen.tables.rows import name_rows, row_index

if TYPE_CHECKING:
    from causal_qwen.regression.regressor import CausalTextRegressor

BLOCK = 16384  # rows that are predicted at a time

Predictions = dict[str, NumberPrediction]  # by target


@torch.no_grad()
def predict_rows(
    regressor: CausalTextRegressor, X: Any, block: int | None = None
) -> Iterator[Predictions]:
    """The predictions of `block` rows (None: BLOCK) of a `known_table` at a time: U is large."""
    block, index = block or BLOCK, row_index(X)
    if regressor.source_ is not None:
        yield from _predict_sources(regressor, known_frame(regressor, X), block, index)
        return
    texts = regressor.sentences(X)
    if empty := [row for row, text in enumerate(texts) if not text.strip()]:
        raise ValueError(f"{name_rows(empty, index)} without a text; give at least one word.")
    warn_long_texts(regressor, texts, index=index)
    if regressor.backbone == "frozen":
        check_backbone(regressor)
        z = torch.from_numpy(read_features(regressor, texts))
    for start in range(0, max(len(texts), 1), block):
        rows = slice(start, start + block)
        certain = np.ones(len(texts[rows]))  # the next token is taken to be a number
        found = {}
        for name, target in regressor.targets_.items():
            if target.chain is not None:
                u, head = target.chain(z[rows])[0], target.chain.action.value
            else:
                u = _abduce(regressor, ask_target(regressor, texts[rows], name))
                head = regressor.model_.action.value
            found[name] = NumberPrediction.from_individuals(u, head, target.space, certain)
            _check_finite(name, found[name].y, start, index)
        yield found


def _predict_sources(
    regressor: CausalTextRegressor, frame: Any, block: int, index: Any
) -> Iterator[Predictions]:
    source = regressor.source_
    assert source is not None
    if source.uses_model:
        check_backbone(regressor)
    for start in range(0, max(len(frame), 1), block):
        rows = frame.iloc[start : start + block]
        z = read_frame(regressor, rows, source.poolings) if source.uses_model else None
        _, distance = source.table.beyond(rows)
        found = {}
        for name, (u, y) in source.predict(rows, z).items():
            target = regressor.targets_[name]
            limits, head = target.limits, source.targets[name].stack.chain.action.value
            wanted = y.scale.clamp(limits.least_scale, limits.most_scale)
            wider = wanted / y.scale * (1 + torch.from_numpy(distance))
            u = Cauchy(u.loc, u.scale * wider.unsqueeze(-1))
            certain = np.ones(len(rows))
            found[name] = NumberPrediction.from_individuals(u, head, target.space, certain)
            _check_finite(name, found[name].y, start, index)
        yield found


def _abduce(regressor: CausalTextRegressor, texts: list[str]) -> Cauchy:
    """U' of the trained model, in float64. -> (N, C)"""
    processor, model = regressor.processor_, regressor.model_
    encoded = encode_texts(texts, processor, max_tokens(regressor))
    loc, scale = torch.empty(2, len(texts), model.config.latent_size, dtype=torch.float64)
    for rows in batches_by_length(encoded):
        z = hidden_at_end(model, [encoded[row] for row in rows])
        u = model.action.widen(model.abduct(z))
        loc[rows], scale[rows] = u.loc.double().cpu(), u.scale.double().cpu()
    return Cauchy(loc, scale)


def _check_finite(name: str, y: Cauchy, start: int, index: Any) -> None:
    """Refuse predictions for the rows from `start` on that damaged weights make NaN or infinite."""
    broken = ~(y.loc.isfinite() & y.scale.isfinite())
    if broken.any():
        rows = start + np.flatnonzero(broken.numpy())
        raise ValueError(
            f"the prediction of {name!r} is not finite in {name_rows(rows, index)}; the "
            "regressor's weights are damaged: restore its files, or fit again."
        )
