"""Rows: one request as it is decoded, and the choice of all rows of a step.

    loc_S -> penalties, candidates -> + W (noise) -> rule of the mode -> one token

Rows with equal rules are a group, which passes together through the logits processors that
`generate` applies; the last one is the mode's. Every row keeps its own noise and text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from causal_qwen.decoding.noise import DecodingNoise, JoinedNoise
from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.decoding.step import REACH
from causal_qwen.generation.logits import DecisionProcessor, to_tensors
from causal_qwen.modeling.action import score_shift
from causal_qwen.modeling.cauchy import Cauchy


class Rule(NamedTuple):
    """What a choice depends on beside the scores, the text and the noise."""

    mode: str
    normalization: str
    repetition_penalty: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    whole_words: bool
    avoid_repeats: int


class Group:
    """The choice of rows with one rule."""

    def __init__(self, law: Any, settings: DecodingSettings, noise: DecodingNoise) -> None:
        self.law, self.settings = law, settings
        self.needs_bar = law.decision.has_bar and settings.mode != "causal"  # as in `generate`
        self.min_p = settings.min_p if settings.mode != "compatible" else 0.0  # vLLM cuts later
        self.cuts = _cuts(settings)
        self.decision = DecisionProcessor(law, noise, want_scores=False, min_p=self.min_p)

    def decide(
        self, scores: Tensor, u: Cauchy, bar: Tensor | None, steps: Sequence[Step]
    ) -> Tensor:
        """loc_S, U and the texts, or their ends -> the choices; in `compatible`, log(P_k / sum P).
        (n, V) -> (n,) or (n, V)"""
        if self.needs_bar and bar is None:
            raise RuntimeError("The bar of a row is missing: nobody told the model to compute it.")
        texts = [step.text for step in steps]
        if self.cuts:
            scores = self.cuts(pad_texts(texts).to(scores.device), scores)
        texts = [text[-REACH:] for text in texts]  # what follows reads no more
        decision = self.decision
        decision.noise = JoinedNoise([step.row.noise for step in steps])
        decision.u, decision.bar = u, bar
        decision.shift_u = decision.shift = None
        if (noise := decision.noise.at([step.length - 1 for step in steps])) is not None:
            moved = self.law.action.displacement(u, to_tensors(noise, u.scale))  # (n, C)
            decision.shift_u = moved
            if not self.min_p:  # all tokens are candidates
                decision.shift = score_shift(moved, self.law.lm_head, u.loc.dtype)
        decision.positions = [len(text) - 1 for text in texts]
        ids = pad_texts(texts)
        if self.settings.mode == "compatible":
            return decision(ids, scores)
        return decision.choose(ids, scores)


class Row:
    """A request in a mode of ours, or in `compatible` with normalization="ovr"."""

    def __init__(self, law: Any, settings: DecodingSettings) -> None:
        self.noise = DecodingNoise(settings, 1, 1, law.config.latent_size, _no_draws)
        rule = Rule(*(getattr(settings, name) for name in Rule._fields))
        if (group := law.groups.get(rule)) is None:
            group = law.groups[rule] = Group(law, settings, self.noise)
        self.group: Group = group  # `law.groups` forgets it with its last row
        self.needs_bar: bool = group.needs_bar
        self.reads_all = settings.repetition_penalty != 1

    def begin(self, length: int) -> int:
        """The place in a text from which the row reads: enough for `avoid_repeats`, or all."""
        return 0 if self.reads_all else max(length - REACH, 0)


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
    if (number := model.config.num_token_id) is not None:  # its value could not be fed back
        scores[:, number] = -torch.inf
    groups: dict[Group, list[Step]] = {}
    for step in steps:
        groups.setdefault(step.row.group, []).append(step)
    for group, members in groups.items():
        places = [step.place for step in members]
        here = torch.tensor(places, device=scores.device)
        is_whole = places == list(range(len(scores)))
        rows = scores if is_whole else scores[here]  # (n, V), not copied without need
        u = Cauchy(model.u.loc[here], model.u.scale[here])
        bar = None if model.bar is None else model.bar[here]
        decided = group.decide(rows, u, bar, members)
        if group.settings.mode == "compatible":
            scores[here] = decided.to(scores.dtype)
        else:
            scores.index_fill_(0, here, -torch.inf)
            scores[here, decided] = 0.0
    return scores


def pad_texts(texts: Sequence[Sequence[int]]) -> Tensor:
    """Texts of different lengths; each is padded on the left with its own first token, which a
    repetition penalty counts once. -> (n, T)"""
    longest = max(len(text) for text in texts)
    return torch.tensor([[*text[:1]] * (longest - len(text)) + [*text] for text in texts])


def _cuts(settings: DecodingSettings) -> LogitsProcessorList:
    """Hugging Face's processors before the choice, in its order; `min_p` follows them."""
    cuts = LogitsProcessorList()
    if settings.mode == "compatible":  # of P_k / sum P, vLLM cuts later
        return cuts
    if settings.repetition_penalty != 1:
        cuts.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.top_k:
        cuts.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p is not None and settings.top_p < 1:
        cuts.append(TopPLogitsWarper(settings.top_p))
    return cuts


def text_end(row: Row, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """The end of a text that the row reads."""
    begin = row.begin(len(prompt) + len(output))
    return [*prompt[begin:], *output[max(begin - len(prompt), 0) :]]


def _no_draws(rows: int) -> list[int]:
    raise ValueError("A request reached the model without an individual; it was not admitted.")
