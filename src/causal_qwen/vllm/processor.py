"""Processor: the logits processors that vLLM calls with the scores of every step.

vLLM's first model runner says which requests join, move and leave the batch; the second gives every
request a slot, and every step the slots of its rows. `validate_params` runs in the process that
receives requests, where `plugin` has left what it needs to know of the model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotLogitsProcessor

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


class CausalSlotProcessor(SlotLogitsProcessor):
    """For vLLM's second model runner. Runs after vLLM's own processors and penalties."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.vllm_config, self.served = vllm_config, Served.of(vllm_config)
        self.texts = req_states.all_token_ids  # (slots, length)
        self.rows: list[Row | None] = [None] * req_states.max_num_reqs

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        validate(sampling_params)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        model = loaded_model(self.vllm_config)
        row = make_row(model.law, admitted_settings(sampling_params, self.served))
        self.rows[req_idx] = row  # vLLM does not say when it leaves: it stays until the next one
        model.needs_bar = any(one is not None and one.needs_bar for one in self.rows)
        return row is not None or model.config.num_token_id is not None

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        steps = []
        slots, lengths = ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist()
        for place, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            if (row := self.rows[slot]) is not None:
                text = self.texts.gpu[slot, row.begin(length) : length].tolist()
                steps.append(Step(place, row, length, text))
        return decide_rows(loaded_model(self.vllm_config), logits, steps)
