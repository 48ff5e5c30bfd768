"""Inside: one token -> the scores, thresholds and chances from which it was chosen, and U.

Everything is read from the model's output *before* the token. A coordinate of U is unusual when
its location is far from where it usually is: its median over ordinary text, counted in
interquartile ranges. The law is linear, so what a coordinate adds to a token's score is
W_kc (loc_c - usual_c), exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from causal_qwen.analysis.token_sequence import TokenSequence, decode_tokens, observe, read_tokens
from causal_qwen.conversion.calibration import TEXTS
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import CausalModel, Processor

CANDIDATES = 8
COORDINATES = 8
LEVEL = 0.9


class Candidate(NamedTuple):
    """A token that could have come: S ~ Cauchy(loc, scale), wanted if S > threshold."""

    token: str
    is_said: bool
    loc: float
    low: float  # the central 90% of S
    high: float
    scale: float
    threshold: float  # C_k
    probability: float  # P_k
    softmax: float


class Coordinate(NamedTuple):
    """A coordinate of U, and what it adds to the score of the first candidate."""

    place: int  # in U
    loc: float
    usual: float
    distance: float  # from the usual, in interquartile ranges
    scale: float
    push: float


@dataclass(frozen=True)
class Usual:
    """Where the coordinates of U lie in ordinary text, (C,) each."""

    median: Tensor
    spread: Tensor  # interquartile range


@dataclass(frozen=True)
class Anatomy:
    """One decision."""

    before: str  # the token after which it was taken
    said: str | None  # what came, None where the text ends
    candidates: list[Candidate]  # by P_k; the said token is among them
    total: float  # sum of P_k over the whole vocabulary
    vocabulary: int
    coordinates: list[Coordinate]  # the most unusual first


@torch.no_grad()
def get_used_to(model: CausalModel, processor: Processor) -> Usual:
    """Where U usually is: over every position of a few built-in passages."""
    rows = []
    for text in TEXTS:
        inputs = read_tokens(model, text, processor).batch(model)
        output = model(**inputs, skip_logits=True, use_cache=False)
        rows.append(output.loc_U[0].float().cpu())
    loc = torch.cat(rows)  # (positions, C)
    low, median, high = loc.quantile(torch.tensor([0.25, 0.5, 0.75]), dim=0)
    return Usual(median, (high - low).clamp_min(torch.finfo(torch.float32).tiny))


def tokens_of(model: CausalModel, processor: Processor, text: str) -> list[str]:
    """The tokens that can be clicked."""
    return decode_tokens(model, read_tokens(model, text, processor), processor)


@torch.no_grad()
def look(model: CausalModel, processor: Processor, text: str, place: int, usual: Usual) -> Anatomy:
    """How the token at `place` was chosen; at the text's end, how the next one would be."""
    passage = read_tokens(model, text, processor)
    count = len(passage.ids)
    if place == 0:
        raise ValueError("Nothing stands before the first token; click a later one.")
    if not 0 < place <= count:
        raise ValueError(f"Token {place} is outside a text of {count} tokens.")
    said = int(passage.ids[place]) if place < count else None
    output = observe(model, passage.cut(place).then(_one(0)), place)
    s = Cauchy(*(x[0, -1].float().cpu() for x in output.s_dist))
    threshold = model.decision.threshold.detach().float().cpu()
    p = s.sf(threshold)
    best = p.topk(min(CANDIDATES, len(p))).indices.tolist()
    if said is not None and said not in best:
        best = [*best[:-1], said]
    names = [decode_tokens(model, passage.cut(place).then(_one(k)), processor)[-1] for k in best]
    low, high = s.interval(LEVEL)
    softmax = s.loc.softmax(-1)
    shown = decode_tokens(model, passage, processor)
    return Anatomy(
        before=shown[place - 1],
        said=None if said is None else shown[place],
        candidates=[
            Candidate(
                name,
                k == said,
                *(float(x[k]) for x in (s.loc, low, high, s.scale, threshold, p, softmax)),
            )
            for name, k in zip(names, best, strict=True)
        ],
        total=float(p.sum()),
        vocabulary=len(p),
        coordinates=_unusual(model, output, usual, best[0]),
    )


def _one(token: int) -> TokenSequence:
    return TokenSequence(torch.tensor([token]), torch.zeros(1, dtype=torch.float64))


def _unusual(model: CausalModel, output: Any, usual: Usual, token: int) -> list[Coordinate]:
    loc, scale = (x[0, -1].float().cpu() for x in output.u_dist)  # (C,)
    moved = loc - usual.median
    distance = moved / usual.spread
    push = model.lm_head.weight[token].detach().float().cpu() * moved
    best = distance.abs().topk(min(COORDINATES, len(loc))).indices.tolist()
    columns = (loc, usual.median, distance, scale, push)
    return [Coordinate(c, *(float(x[c]) for x in columns)) for c in best]
