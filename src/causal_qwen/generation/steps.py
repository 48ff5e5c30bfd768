"""Steps: what a call of `generate` has written so far, shown after every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.individuals.individual import Individual

# the criterion, ids (B, T), values (B, T) -> whether to stop
OnStep = Callable[["RunningTexts", Tensor, Tensor], bool]


class RunningTexts(StoppingCriteria):
    """A stopping criterion that passes ids and values on; `_sample` tells it whose they are."""

    settings: DecodingSettings | None = None
    individuals: list[Individual] | None = None

    def __init__(self, on_step: OnStep) -> None:
        self.on_step = on_step
        self.tracker: Any = None

    def begin(self, model_kwargs: dict[str, Any]) -> None:
        self.settings, self.tracker = model_kwargs.get("settings"), model_kwargs.get("tracker")
        if (processor := model_kwargs.get("decision_processor")) is not None:
            self.individuals = processor.noise.individuals or None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        values = torch.zeros(input_ids.shape, dtype=torch.float64, device=input_ids.device)
        if self.tracker is not None:
            is_number = input_ids == self.tracker.num_token_id
            values = self.tracker.values.to(input_ids.device).where(is_number, 0.0)
        is_over = self.on_step(self, input_ids, values)
        return torch.full((len(input_ids),), is_over, device=input_ids.device)
