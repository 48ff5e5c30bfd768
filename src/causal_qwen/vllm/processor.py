"""Processor: the logits processor that vLLM calls with the scores of every step.

vLLM tells it which requests join, move and leave the batch; it knows their texts, and builds the
steps of `rows.decide_rows`. `validate_params` runs in the process that receives requests, where
`plugin` has left what it needs to know of the model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import LogitsProcessor

from causal_qwen.vllm.admission import Served, admit, admitted_settings
from causal_qwen.vllm.model import CausalQwenForCausalLM, loaded_model
from causal_qwen.vllm.rows import Row, Step, decide_rows, make_row, text_end

_served: Served | None = None  # by this process


def serve(served: Served) -> None:
    """Remember the model whose requests this process admits."""
    global _served
    _served = served


def validate(params: Any) -> None:
    if _served is None:
        raise ValueError(
            "This process admits requests of a model that it has not read; start vLLM with "
            "--api-server-count 1."
        )
    admit(params, _served)


class CausalLogitsProcessor(LogitsProcessor):
    """For vLLM's first model runner. Runs after vLLM's own processors, before its penalties."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.vllm_config, self.served = vllm_config, Served.of(vllm_config)
        self.rows: dict[int, tuple[Row, list[int], list[int]]] = {}  # with prompt and output

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        validate(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.rows, batch_update, self._added)
        self.model.needs_bar = any(row.needs_bar for row, _, _ in self.rows.values())

    def apply(self, logits: Tensor) -> Tensor:
        steps = [
            Step(place, row, len(prompt) + len(output), text_end(row, prompt, output))
            for place, (row, prompt, output) in self.rows.items()
        ]
        return decide_rows(self.model, logits, steps)

    @property
    def model(self) -> CausalQwenForCausalLM:
        return loaded_model(self.vllm_config)

    def _added(self, params: Any, prompt: list[int] | None, output: list[int]) -> Any:
        row = make_row(self.model.law, admitted_settings(params, self.served))
        return None if row is None else (row, prompt or [], output)
