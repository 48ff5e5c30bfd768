"""Stability: how often an edit changes a choice against the odds.

Where scale_U is constant, an alternative that the edit makes relatively less likely under
softmax(loc_S) cannot replace the factual token; docs/counterfactuals.md has the proof. Where scales
vary, or the edit changes who is a candidate, it can: this counts how often.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from causal_qwen.analysis.counterfactual import DECISIVE, Counterfactual, is_baseline
from causal_qwen.analysis.token_sequence import cuts_of, observe
from causal_qwen.decoding.step import Cuts, candidates_along
from causal_qwen.modeling.protocols import CausalModel

TOLERANCE = 1e-4  # differences of scores that rounding can explain


class Stability(NamedTuple):
    """Of `steps` compared choices, `changed` differ and `violations` break the rule.

    `by_candidates` of the violations happened because the edit changed who may be chosen: the
    factual choice is no candidate in the other world, or the other choice is none in the factual.
    """

    steps: int
    changed: int
    violations: int
    by_candidates: int


def stability(
    model: CausalModel, *results: Counterfactual, mode: str = "causal", **options: Any
) -> Stability:
    """The counts of some counterfactuals of a model together; `options` are those of their call."""
    counts = [_count(model, result, _cuts(model, result, mode, options)) for result in results]
    return Stability(*np.reshape(counts, (-1, 4)).sum(0, dtype=int).tolist())


def _count(model: CausalModel, result: Counterfactual, cuts: Cuts) -> tuple[int, ...]:
    """Each pair of steps is one comparison: contexts may differ by the edit and all it caused. A
    step that the edit itself decided does not count."""
    worlds = result.factual, result.counterfactual
    steps = min(len(world.new_ids) for world in worlds)
    if not steps:
        return 0, 0, 0, 0
    chosen = torch.tensor([world.new_ids[:steps] for world in worlds])  # (2, steps)
    rows, odds, is_outside = torch.arange(steps), [], torch.zeros(steps, dtype=torch.bool)
    for world, others in zip(worlds, chosen.flip(0), strict=True):
        loc = observe(model, world.sequence, world.start).logits[0].float().cpu()  # (N, V)
        odds.append((loc[rows, chosen[0]] - loc[rows, chosen[1]]).double())
        candidates = candidates_along(loc, world.sequence.ids, cuts)
        is_outside |= candidates[rows, others] == -math.inf
    is_choice = rows != (-1 if result.forced is None else result.forced)
    is_changed = is_choice & (chosen[0] != chosen[1])
    is_violation = is_changed & (odds[1] - odds[0] > TOLERANCE)
    counts = (is_choice, is_changed, is_violation, is_violation & is_outside)
    return tuple(int(flags.sum()) for flags in counts)


def _cuts(model: Any, result: Counterfactual, mode: str, options: dict[str, Any]) -> Cuts:
    """What makes the candidates of a world."""
    if is_baseline(result.individual):
        return Cuts(options.get("min_p") or 0.0)
    asked = {name: options[name] for name in DECISIVE if name in options}
    named = {"causal_mode": mode, "individual": result.individual}
    return cuts_of(model, model.resolve_settings(**named, **asked))
