"""Settings: the arguments of a regressor, checked before any row is read, and their defaults."""

from __future__ import annotations

import numbers
import os
from typing import TYPE_CHECKING, Any

from sklearn.utils import check_random_state

from causal_qwen.conversion.placement import resolve_device, resolve_dtype
from causal_qwen.options import VALUE_SPACES, check_choice
from causal_qwen.regression.fitted import SUPPORTS
from causal_qwen.regression.source_choice import source_names
from causal_qwen.regression.sources import SOURCES

if TYPE_CHECKING:
    from causal_qwen.regression.regressor import CausalTextRegressor

BACKBONES = ("frozen", "finetune", "scratch")
DEFAULTS: dict[str, dict[str, Any]] = {  # of training, where None is given
    "finetune": {"learning_rate": 2e-5, "epochs": 3, "patience": 1},
    "scratch": {"learning_rate": 1e-3, "epochs": 40, "patience": 10},
}


def check_settings(regressor: CausalTextRegressor) -> None:
    check_choice("backbone", regressor.backbone, BACKBONES)
    if regressor.sources != "auto":
        for source in source_names(regressor.sources) or [""]:
            check_choice("sources", source, ("auto", *SOURCES))
    support = regressor.support
    if isinstance(support, str):
        check_choice("support", support, SUPPORTS)
    elif not support[0] < support[1]:
        raise ValueError(f"support={support!r} must be (low, high), low below high.")
    check_choice("value_space", regressor.value_space, ("auto", *VALUE_SPACES))
    check_choice("bad_rows", regressor.bad_rows, ("raise", "skip"))
    resolve_device(regressor.device)
    resolve_dtype(regressor.dtype)
    if not isinstance(regressor.model, str | os.PathLike | None):
        raise TypeError(
            f"model is a {type(regressor.model).__name__}; give a directory, or a loaded model as "
            "OpenModel(processor, model)."
        )
    least = {"folds": 2, "max_length": 2, "batch_size": 1, "epochs": 1, "patience": 0}
    for name, lowest in least.items():
        value = getattr(regressor, name)
        if value is not None and not value >= lowest:
            raise ValueError(f"{name}={value} must be at least {lowest}.")
    rate, held_out = regressor.learning_rate, regressor.held_out
    if rate is not None and not rate > 0:
        raise ValueError(f"learning_rate={rate} must be greater than 0.")
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out={held_out} must be a share of rows, 0 to below 1.")


def training_options(regressor: CausalTextRegressor) -> dict[str, Any]:
    """learning_rate, epochs and patience: as given, else the defaults of the backbone."""
    defaults = DEFAULTS[regressor.backbone]
    given = {name: getattr(regressor, name) for name in defaults}
    return defaults | {name: value for name, value in given.items() if value is not None}


def value_spaces(value_space: str) -> tuple[str, ...]:
    """The candidates, of which unseen values choose."""
    return ("symlog", "linear") if value_space == "auto" else (value_space,)


def to_seed(random_state: Any) -> int:
    if isinstance(random_state, numbers.Integral):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31))
