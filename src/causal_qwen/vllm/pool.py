"""Pool: the few tokens among which the rows of a group choose, as a vocabulary of its own.

    V tokens -> candidates of any row, and tokens of the texts -> K columns, in the order of ids

A cut by `min_p` leaves some tens of tokens. What follows it (whole words, repeats, noise, the rule
of the mode) reads K columns instead of V. Texts become texts of columns, so that the rules which
compare tokens work unchanged; a token of a text that is no candidate has the score -inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from causal_qwen.decoding.candidates import FEW, keep_min_p
from causal_qwen.generation.logits import in_any_row

Text = Sequence[int]


class Pool:
    """Columns of a group: token ids, ascending. (K,)"""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.ids = tokens, tokens.cpu().numpy()

    def columns(self, text: Text) -> list[int]:
        """A text of tokens, all of them in the pool -> of columns."""
        found: list[int] = np.searchsorted(self.ids, np.asarray(text, np.int64)).tolist()
        return found

    def column(self, token: int | None) -> int | None:
        """None for a token that is not in the pool."""
        if token is None or token not in self.ids:
            return None
        return self.columns([token])[0]

    def law(self, law: Any) -> Any:
        """The parts that decide, for these tokens alone."""
        tokens, decision, action = self.tokens, law.decision, law.action
        head = law.lm_head
        return SimpleNamespace(
            config=SimpleNamespace(num_token_id=self.column(law.config.num_token_id)),
            lm_head=SimpleNamespace(weight=head.weight[tokens], divisor=head.divisor),
            action=SimpleNamespace(
                b_noise=action.b_noise, decision_noise=action.decision_noise[tokens]
            ),
            decision=SimpleNamespace(
                threshold=decision.threshold[tokens], word_edges=decision.word_edges[tokens]
            ),
        )


def make_pool(scores: Tensor, min_p: float, texts: Sequence[Text]) -> tuple[Pool, Tensor] | None:
    """The pool of rows that `min_p` cuts, and their scores in it; None where candidates are many.
    (n, V) -> (n, K)"""
    bar = scores.amax(-1, keepdim=True) + math.log(min_p)
    tokens = in_any_row(scores >= bar)
    if not 0 < len(tokens) <= FEW:
        return None
    if texts:
        own = np.unique(np.concatenate([np.asarray(text, np.int64) for text in texts]))
        tokens = torch.from_numpy(np.union1d(tokens.cpu().numpy(), own)).to(tokens.device)
    return Pool(tokens), keep_min_p(scores[:, tokens], min_p)
