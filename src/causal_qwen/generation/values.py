"""Values: the numbers beside the tokens of one call of `generate`."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from causal_qwen.modeling.value_embedding import check_values
from causal_qwen.modeling.value_space import ValueSpace, warn_if_clamped


class ValueTracker:
    """The values of the prompt and of the generated tokens, aligned with the ids.

    HF exposes outputs before the token is chosen, so each step appends a tentative value; it is
    zeroed if the token is not `<NUM>`.
    """

    def __init__(self, num_token_id: int, space: ValueSpace, num_beams: int) -> None:
        self.num_token_id = num_token_id
        self.space = space
        self.num_beams = num_beams
        self.values = torch.empty(0)  # (B, T), of the running texts
        self.ids: Tensor | None = None  # (B, T) or one less, of the running texts
        self.prompt = torch.empty(0)  # (B, P)
        self.tentative: list[Tensor] = []  # one (B,) for every step
        self.past: int | None = None  # length of the cache at the start of the call

    def start(self, ids: Tensor, values: Tensor | None) -> None:
        """Take the values of the prompt."""
        check_values(ids, values, self.num_token_id)
        if values is None:
            values = torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
        self.values = self.prompt = values.to(torch.float64)

    def append(self, outputs: ModelOutput) -> None:
        """Append the value of the next token, should it be a number."""
        y = outputs.loc_Y[:, -1]
        if outputs.shift_Y is not None:
            y = y + outputs.shift_Y[:, -1]
        value = self.space.clamped(y).to(self.values.device)
        self.tentative.append(value)
        self.values = torch.cat([self.values, value.unsqueeze(-1)], dim=-1)

    def values_of(self, ids: Tensor, inputs: Tensor, past: int) -> Tensor | None:
        """The values of `inputs`, the part of the running texts `ids` that the model reads next;
        None if it holds no number."""
        size = inputs.shape[1]
        self.past = past if self.past is None else self.past
        if ids.shape[1] == self.values.shape[1]:
            self._follow(ids)
            values = self.values[:, self.values.shape[1] - size :]
        else:  # a chunk of the prompt
            start = past if self.values.shape[1] >= past + size else past - self.past
            values = self.values[:, start : start + size]
        return values.to(inputs.device) if (inputs == self.num_token_id).any() else None

    def finish(self, result: ModelOutput) -> None:
        """Add `numeric_values` to the result, aligned with its sequences."""
        sequences = result.sequences
        is_number = sequences == self.num_token_id
        prompts, steps = self.prompt.shape[1], sequences.shape[1] - self.prompt.shape[1]
        if (beams := result.get("beam_indices")) is None:
            values = self.values
        else:
            rows = self.prompt[beams[:, 0].clamp_min(0)]
            tentative = torch.stack(self.tentative[:steps], dim=-1)  # (B beams, steps)
            chosen = tentative.gather(0, beams[:, :steps].clamp_min(0).long())
            values = torch.cat([rows, chosen], dim=-1)
        values = values[:, : prompts + steps].to(sequences.device).where(is_number, 0.0)
        warn_if_clamped(values)
        result["numeric_values"] = values

    def _follow(self, ids: Tensor) -> None:
        """Zero the values of tokens that are not numbers; with beams, reorder the rows first.

        A row continues the row of its own prompt that had its tokens; equal texts have equal
        values, so any of them will do.
        """
        if self.num_beams > 1 and self.ids is not None and self.ids.shape[1] < ids.shape[1]:
            groups = self.ids.unflatten(0, (-1, self.num_beams))  # (B, beams, T)
            before = ids[:, : groups.shape[-1]].unflatten(0, (-1, self.num_beams))
            is_parent = (before.unsqueeze(2) == groups.unsqueeze(1)).all(-1)  # (B, beams, beams)
            offset = torch.arange(len(groups), device=ids.device).unsqueeze(-1) * self.num_beams
            self.values = self.values[(is_parent.int().argmax(-1) + offset).flatten()]
        self.values = self.values.where(ids == self.num_token_id, 0.0)
        self.ids = ids
