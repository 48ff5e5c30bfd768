"""Calibration of a torch model: a few texts -> decision noise, thresholds, gamma and noise gains.

`numpy_engine.calibration` says what they are, and finds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from causal_qwen.modeling.abduction import inverse_activation
from causal_qwen.modeling.action import row_norms
from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.numpy_engine.calibration import (
    DEFAULTS,
    NOISE_POSITIONS,
    POSITIONS,
    Scales,
    evenly_spaced,
    find_gain,
    find_scales,
)


@dataclass(frozen=True)
class Calibration:
    """The calibrated values, for the conversion report."""

    threshold: float
    gamma: float
    b_noise: float
    sum_p_median: float
    noise_gain: float
    fresh_noise_gain: float


@torch.no_grad()
def calibrate(
    model: CausalModel,
    texts: Sequence[Tensor],
    progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Set a, C, gamma, b and the noise gains of a model with its base model's scores.

    texts are token ids. If the configuration has a number instead of "auto" for one of C, gamma and
    b, all three stay as they begin.
    """
    progress("decision noise")
    set_decision_noise(model)
    progress("thresholds and scales")
    hidden = read_texts(model, texts)
    scales = calibrate_scales(model, hidden)
    progress("noise gains")
    gains = calibrate_gains(model, hidden)
    return Calibration(*scales, *gains)


@torch.no_grad()
def read_texts(model: CausalModel, texts: Sequence[Tensor]) -> Tensor:
    """The backbone's states at all positions of the texts. -> (N, H)"""
    was_training = model.training
    model.eval()
    rows = (ids.reshape(1, -1).to(model.device) for ids in texts)
    hidden = torch.cat([model.model(ids).last_hidden_state[0] for ids in rows])
    model.train(was_training)
    return hidden


@torch.no_grad()
def calibrate_scales(model: CausalModel, hidden: Tensor) -> Scales:
    """Set C, gamma and b from states (N, H), unless the configuration has numbers."""
    config = model.config
    if any(
        x != "auto" for x in (config.ovr_threshold_init, config.gamma_init, config.b_noise_init)
    ):
        begun = config.initial_threshold, config.initial_gamma, config.initial_b_noise
        return Scales(*begun, math.nan)
    loc = model.lm_head(model.abduct(evenly_spaced(hidden, POSITIONS)).loc)  # (N, V)
    per_token = row_norms(model.lm_head.weight) + model.action.decision_noise.abs()
    per_token = _array(per_token) / np.float32(config.logit_divisor)
    scales = find_scales(_array(loc), per_token, config.threshold_context == "competition")
    model.decision.threshold.fill_(scales.threshold)
    model.abduction.scale.bias.fill_(inverse_activation(scales.gamma, config.scale_activation))
    model.action.b_noise.fill_(scales.b_noise)
    return scales


@torch.no_grad()
def set_decision_noise(model: CausalModel) -> None:
    """a_k = max_j ||W_j||_1 - ||W_k||_1 ("equalize"), or 0 ("zero")."""
    noise = torch.zeros_like(model.action.decision_noise)
    if model.config.decision_noise == "equalize":
        norms = row_norms(model.lm_head.weight)
        noise = (norms.max() - norms).to(noise)
    model.action.decision_noise.copy_(noise)


@torch.no_grad()
def calibrate_gains(model: CausalModel, hidden: Tensor) -> tuple[float, float]:
    """Find and save the noise gains, and the other defaults of individuals. states (N, H)

    With noise of gain kappa the choice among the candidates, at positions of the texts, leaves the
    likeliest token as often as under softmax sampling with the same `min_p`. Texts are read, not
    generated: a model's own loops would pass for good text.
    """
    u = model.abduct(evenly_spaced(hidden, NOISE_POSITIONS))
    loc = _array(model.lm_head(u.loc))  # (N, V)
    weight: Any = model.lm_head.weight
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # FSDP

    def rows(keep: np.ndarray) -> np.ndarray:
        found = _array(weight[torch.from_numpy(keep).to(weight.device)])
        return found / np.float32(model.config.logit_divisor)

    chance = model.action.b_noise.abs().expand_as(u.scale)
    shared, fresh = (find_gain(loc, _array(scale), rows) for scale in (u.scale, chance))
    saved = model.generation_config
    for name, value in {**DEFAULTS, "noise_gain": shared, "fresh_noise_gain": fresh}.items():
        setattr(saved, name, value)
    return shared, fresh


def _array(tensor: Tensor) -> Any:
    return tensor.detach().float().cpu().numpy()
