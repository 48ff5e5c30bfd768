"""Rows: one request as it is decoded, and the choice of all rows of a step.

    loc_S -> penalties, candidates -> + W (noise) -> rule of the mode -> one token

Every row has the logits processors that `generate` applies to it; the last one is the mode's. Noise
is multiplied with the rows of W that belong to candidates; where `min_p` is 0 and all tokens are
candidates, with all of W, for the rows of a step together.
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
from causal_qwen.decoding.noise import DecodingNoise, UNoise, stack_noise
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

    def begin(self, length: int) -> int:
        """The place in a text from which the row reads: enough for `avoid_repeats`, or all."""
        return 0 if self.reads_all else max(length - REACH, 0)

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
    _move(model, steps)
    if (number := model.config.num_token_id) is not None:  # its value could not be fed back
        scores[:, number] = -torch.inf
    for place, row, _, text in steps:
        here, decision = slice(place, place + 1), row.decision
        decision.u = Cauchy(model.u.loc[here], model.u.scale[here])
        decision.bar = None if model.bar is None else model.bar[here]
        scores[place] = row.choose(scores[here], text)
    return scores


def _move(model: Any, steps: Sequence[Step]) -> None:
    """Tell every row what its noise adds to U, and to S if all tokens are candidates."""
    moved: list[tuple[Step, UNoise]] = []
    for step in steps:
        step.row.decision.shift_u = step.row.decision.shift = None
        if (noise := step.row.noise.at([step.length - 1])) is not None:
            moved.append((step, noise))
    if not moved:
        return
    places = torch.tensor([step.place for step, _ in moved], device=model.u.loc.device)
    u = Cauchy(model.u.loc[places], model.u.scale[places])
    noise = to_tensors(stack_noise([noise for _, noise in moved]), u.scale)
    shift_u = model.law.action.displacement(u, noise)  # (N, C)
    for (step, _), one in zip(moved, shift_u.split(1), strict=True):
        step.row.decision.shift_u = one
    many = [place for place, (step, _) in enumerate(moved) if not step.row.settings.min_p]
    if many:
        product = score_shift(shift_u[many], model.law.lm_head, u.loc.dtype)
        for place, one in zip(many, product.split(1), strict=True):
            moved[place][0].row.decision.shift = one


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
    """The end of a text that the row reads."""
    begin = row.begin(len(prompt) + len(output))
    return [*prompt[begin:], *output[max(begin - len(prompt), 0) :]]


def _no_draws(rows: int) -> list[int]:
    raise ValueError("A request reached the model without an individual; it was not admitted.")
