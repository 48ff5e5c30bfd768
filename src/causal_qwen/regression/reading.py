"""Reading: texts of a regressor -> what its language model makes of them.

The model is opened when it is first needed: the trained one, else the backbone, which is shared.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.paths import cache_directory
from causal_qwen.regression import workload
from causal_qwen.regression.backbone import Pair, Record, located, open_shared, record_of
from causal_qwen.regression.feature_cache import CACHE_FILE
from causal_qwen.regression.features import MIDDLE, Pooling, features, fingerprint, too_long
from causal_qwen.regression.inputs import source_texts
from causal_qwen.regression.source_model import Hidden
from causal_qwen.tables.rows import name_rows
from causal_qwen.terminal import progress_bar

if TYPE_CHECKING:
    from causal_qwen.regression.regressor import CausalTextRegressor


def open_reader(regressor: CausalTextRegressor) -> Pair:
    """The trained processor and model, else the backbone."""
    if hasattr(regressor, "model_"):
        return regressor.processor_, regressor.model_
    return _open_backbone(regressor)


def _open_backbone(regressor: CausalTextRegressor) -> Pair:
    """At its recorded place; `model` may be relative to another directory."""
    source = located(regressor.model, getattr(regressor, "backbone_", None))
    return open_shared(source, regressor.verbose, regressor.device, regressor.dtype)


def max_tokens(regressor: CausalTextRegressor) -> int:
    """`max_length`, or fewer if the model has fewer positions."""
    positions: int = open_reader(regressor)[1].config.max_position_embeddings
    return min(regressor.max_length, positions)


# ---------------------------------------------------------------- before the work


def warn_long_texts(
    regressor: CausalTextRegressor, texts: list[str], processor: Any = None, index: Any = None
) -> None:
    most = regressor.max_length if processor else max_tokens(regressor)
    if rows := too_long(texts, processor or open_reader(regressor)[0], most):
        warnings.warn(
            f"texts longer than {most} tokens (max_length, or the model's context) lose their "
            f"beginning, {len(rows)} of {len(texts)}: {name_rows(rows, index)}.",
            stacklevel=4,
        )


def announce(regressor: CausalTextRegressor, texts: list[str], **how: Any) -> None:
    """Print what a large table needs before the work, and refuse what cannot be done."""
    if len(texts) < workload.LARGE:
        return
    processor, model = open_reader(regressor)
    need = workload.estimate(texts, model, processor, max_tokens(regressor), **how)
    workload.check_memory(need)
    disk = workload.cache_size(len(texts), model.config.hidden_size)
    more = f"; the feature cache grows by up to {disk} (cache=False, --no-cache: not at all)"
    if regressor.verbose:
        print(f"{need}{more if regressor.cache and not how else ''}.", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- features


def read_features(
    regressor: CausalTextRegressor, texts: list[str], poolings: Sequence[Pooling] = ()
) -> NDArray[np.float32]:
    """z of the backbone, from the cache if there is one. -> (N, H), or (N, P, H) with poolings"""
    processor, model = _open_backbone(regressor)
    cache = cache_directory() / CACHE_FILE if regressor.cache else None
    options: dict[str, Any] = {"max_length": max_tokens(regressor), "cache": cache}
    with progress_bar("reading", regressor.verbose) as progress:
        return features(texts, model, processor, poolings=poolings, progress=progress, **options)


def read_frame(regressor: CausalTextRegressor, frame: Any, places: Sequence[int]) -> Hidden:
    """The text columns of every row, by these poolings of `MIDDLE`: place -> (N, H)."""
    texts = source_texts(regressor, frame)
    z = read_features(regressor, texts, [MIDDLE[place] for place in places])
    return dict(zip(places, z.swapaxes(0, 1), strict=True))


# ---------------------------------------------------------------- the same backbone later


def backbone_record(regressor: CausalTextRegressor) -> Record:
    """Name, place and fingerprint, by which `check_backbone` knows it again."""
    return {**record_of(regressor.model), "fingerprint": _fingerprint(regressor)}


def check_backbone(regressor: CausalTextRegressor) -> None:
    if _fingerprint(regressor) != regressor.backbone_["fingerprint"]:
        raise ValueError(
            f"the backbone {regressor.backbone_['name']} or max_length has changed since this "
            "regressor was fitted; fit it again."
        )


def _fingerprint(regressor: CausalTextRegressor) -> str:
    processor, model = open_reader(regressor)
    return fingerprint(model, processor, max_tokens(regressor))
