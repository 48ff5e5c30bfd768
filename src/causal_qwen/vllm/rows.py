"""Rows: one request as it is decoded, and the choice of all rows of a step.

    loc_S -> penalties, candidates -> + W (noise) -> rule of the mode -> one token

Every row has the logits processors that `generate` applies to it; the last one is the mode's. All
noise of a step is multiplied with W together, for rows that have some. Where scale_U is constant,
an individual that leaves nothing to chance adds the same vector to the scores at every step: it is
computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from causal_qwen.decoding.candidates import REACH
from causal_qwen.decoding.noise import DecodingNoise, stack_noise
from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.generation.logits import DecisionProcessor, to_tensors
from causal_qwen.modeling.action import score_shift
from causal_qwen.modeling.cauchy import Cauchy


class Row:
    """A request in a mode of ours, or in `compatible` with normalization="ovr"."""

    def __init__(self, law: Any, settings: DecodingSettings) -> None:
        self.settings = settings
        self.noise = DecodingNoise(settings, 1, 1, law.config.latent_size, _no_draws)
        self.decision = DecisionProcessor(law, self.noise, want_scores=False)
        self.cuts = _cuts(settings)
        self.reads_all = settings.repetition_penalty != 1
        self.shift: Tensor | None = None  # W times a noise that is the same everywhere, (1, V)

    @property
    def needs_bar(self) -> bool:
        return self.settings.mode != "causal"

    def choose(self, scores: Tensor, text: Sequence[int]) -> Tensor:
        """loc_S and the text, or its end -> scores that vLLM samples from. (1, V) -> (V,)"""
        ids = torch.tensor([list(text)])
        scores = self.cuts(ids.to(scores.device), scores)
        self.decision.positions = [len(text) - 1]
        decided = self.decision(ids, scores)
        if self.settings.mode == "compatible":
            return decided[0].to(scores.dtype)
        chosen = torch.full_like(scores[0], -torch.inf)
        chosen[decided[0].argmax()] = 0.0
        return chosen


class Step(NamedTuple):
    """A row of the batch at one step."""

    place: int  # in the batch
    row: Row
    length: int  # tokens of the text so far
    text: Sequence[int]  # them, or the last REACH of them unless the row reads all


def make_row(law: Any, settings: DecodingSettings) -> Row | None:
    """None where vLLM's own sampler decides: softmax of loc_S."""
    if settings.mode == "compatible" and settings.normalization == "softmax":
        return None
    return Row(law, settings)


def decide_rows(model: Any, scores: Tensor, steps: Sequence[Step]) -> Tensor:
    """The choice of every row: all scores but that of the chosen token become -inf. (B, V)"""
    if len(model.u.loc) != len(scores):
        raise RuntimeError(
            f"vLLM sampled {len(scores)} rows, and the model computed {len(model.u.loc)}; this "
            "version of vLLM is not supported."
        )
    shifts = _shifts(model, steps)
    if (number := model.config.num_token_id) is not None:  # its value could not be fed back
        scores[:, number] = -torch.inf
    for (place, row, _, text), shift in zip(steps, shifts, strict=True):
        here, decision = slice(place, place + 1), row.decision
        decision.u = Cauchy(model.u.loc[here], model.u.scale[here])
        decision.shift = shift
        decision.bar = model.bar[here] if row.needs_bar and model.bar is not None else None
        scores[place] = row.choose(scores[here], text)
    return scores


def _shifts(model: Any, steps: Sequence[Step]) -> list[Tensor | None]:
    """W times the noise of every row; None for rows that are not moved. -> (1, V) each"""
    shifts = [step.row.shift for step in steps]
    pending = [
        (i, noise)
        for i, step in enumerate(steps)
        if step.row.shift is None and (noise := step.row.noise.at([step.length - 1])) is not None
    ]
    if not pending:
        return shifts
    places = torch.tensor([steps[i].place for i, _ in pending], device=model.u.loc.device)
    u = Cauchy(model.u.loc[places], model.u.scale[places])
    noise = to_tensors(stack_noise([noise for _, noise in pending]), u.scale)
    product = score_shift(model.law.action.displacement(u, noise), model.law.lm_head, u.loc.dtype)
    for (i, _), shift in zip(pending, product.split(1), strict=True):
        shifts[i] = shift
        row = steps[i].row
        row.shift = shift if model.has_constant_scale and row.noise.is_shared else None
    return shifts


def _cuts(settings: DecodingSettings) -> LogitsProcessorList:
    """Hugging Face's processors before the choice, in its order."""
    cuts = LogitsProcessorList()
    if settings.mode == "compatible":  # of P_k / sum P, vLLM cuts later
        return cuts
    if settings.repetition_penalty != 1:
        cuts.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.top_k:
        cuts.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p is not None and settings.top_p < 1:
        cuts.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        cuts.append(MinPLogitsWarper(settings.min_p))
    return cuts


def text_end(row: Row, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """The end of a text that the row reads: enough for `avoid_repeats`, or all."""
    if row.reads_all:
        return [*prompt, *output]
    missing = max(REACH - len(output), 0)
    return [*prompt[len(prompt) - min(missing, len(prompt)) :], *output[-REACH:]]


def _no_draws(rows: int) -> list[int]:
    raise ValueError("A request reached the model without an individual; it was not admitted.")
