"""Token view: one token -> the scores, thresholds and probabilities that chose it.

Everything is read from the model's output *before* the token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from causal_qwen.analysis.shares import People
from causal_qwen.analysis.token_sequence import (
    TokenSequence,
    decode_tokens,
    observe,
    read_tokens,
    shares_at,
)
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import CausalModel, Processor

CANDIDATES = 8
PEOPLE = 1000
LEVEL = 0.9


class Candidate(NamedTuple):
    """A token and its score S ~ Cauchy(loc, scale)."""

    token: str
    is_actual: bool
    loc: float
    low: float  # the central 90% of S
    high: float
    scale: float
    threshold: float  # C_k + h, with the bar h of the context
    share: float  # of PEOPLE individuals who would choose it
    softmax: float
    probability: float  # P_k = P(S > C_k + h)


class TokenView(NamedTuple):
    """One decision."""

    before: str  # the token before it
    actual: str | None  # the token of the text; None at its end
    candidates: list[Candidate]  # by P_k; the actual token is among them
    total: float  # sum of P_k over the whole vocabulary
    vocabulary: int
    level: float = LEVEL  # of the candidates' intervals

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self._asdict(), "candidates": [one._asdict() for one in self.candidates]}


def split_tokens(model: CausalModel, processor: Processor, text: str) -> list[str]:
    return decode_tokens(model, read_tokens(model, text, processor), processor)


@torch.no_grad()
def explain_token(model: CausalModel, processor: Processor, text: str, index: int) -> TokenView:
    """How the token at `index` was chosen; at the end of the text, how the next one would be."""
    sequence = read_tokens(model, text, processor)
    count = len(sequence.ids)
    if index == 0:
        raise ValueError("The first token has no context; click a later one.")
    if not 0 < index <= count:
        raise ValueError(f"Token {index} is outside a text of {count} tokens.")
    actual = int(sequence.ids[index]) if index < count else None
    before = sequence.cut(index)
    output = observe(model, before.then(_one_token(0)), index)
    s = Cauchy(*(x[0, -1].float().cpu() for x in output.s_dist))
    p = model.decision(output.s_dist)[0, -1].float().cpu()
    threshold = model.decision.level(output.logits[0, -1]).float().cpu()
    best = p.topk(min(CANDIDATES, len(p))).indices.tolist()
    if actual is not None and actual not in best:
        best = [*best[:-1], actual]
    names = [decode_tokens(model, before.then(_one_token(k)), processor)[-1] for k in best]
    tokens = decode_tokens(model, sequence, processor)
    people = People(model.resolve_settings, model.config.latent_size, PEOPLE)
    share = torch.zeros(len(p))
    for k, part in shares_at(model, output, -1, before.ids, people).items():
        share[k] = part
    columns = (s.loc, *s.interval(LEVEL), s.scale, threshold, share, s.loc.softmax(-1), p)
    return TokenView(
        before=tokens[index - 1],
        actual=None if actual is None else tokens[index],
        candidates=[
            Candidate(name, k == actual, *(float(x[k]) for x in columns))
            for name, k in zip(names, best, strict=True)
        ],
        total=float(p.sum()),
        vocabulary=len(p),
    )


def _one_token(token: int) -> TokenSequence:
    return TokenSequence(torch.tensor([token]), torch.zeros(1, dtype=torch.float64))
