"""The Gumbel-max baseline of the benchmarks: softmax sampling whose noise is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _gumbel as gumbel
import numpy as np
import pytest
import torch
from _gumbel import GumbelIndividual
from _stability import stability
from scipy import stats

from causal_qwen.analysis.counterfactual import ChangedPrompt, counterfactual
from causal_qwen.individuals import draw_noise

Make = Callable[..., Any]

C, V, T = 6, 13, 4
PROMPT = torch.tensor([3, 5, 2, 7])


@pytest.fixture(scope="module")
def model(make_model: Make) -> Any:
    return make_model(causal_size=C, vocab_size=V)


def say(model: Any, people: list[GumbelIndividual], length: int) -> torch.Tensor:
    ids = PROMPT.repeat(len(people), 1)
    out = gumbel.generate(model, people, torch.ones_like(ids), input_ids=ids, max_new_tokens=length)
    return out[:, T:]


def test_choices_are_draws_from_the_softmax(model: Any) -> None:
    people = [GumbelIndividual.draw(model, seed=seed, temperature=2.0) for seed in range(2000)]
    said = say(model, people, 1)[:, 0].numpy()
    with torch.no_grad():
        p = (model(PROMPT[None]).logits[0, -1].double() / 2.0).softmax(-1).numpy()
    counts = np.bincount(said, minlength=V)
    common = p * len(people) >= 5
    observed = [*counts[common], counts[~common].sum()]
    expected = [*p[common], p[~common].sum()]
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    assert stats.chisquare(observed, np.array(expected) * len(people)).pvalue > 0.01


def test_noise_depends_only_on_seed_and_position(model: Any) -> None:
    one = GumbelIndividual.draw(model, seed=9)
    np.testing.assert_array_equal(one.at(4), -np.log(-np.log(draw_noise(9, V, 4))))
    np.testing.assert_array_equal(one.shift(3).at(7), one.at(4))
    shared = GumbelIndividual.draw(model, seed=9, fresh=False)
    np.testing.assert_array_equal(shared.at(4), shared.at(5))
    assert shared.shift(3) is shared


def test_counterfactual_accepts_gumbel_individuals(model: Any) -> None:
    one = GumbelIndividual.draw(model, seed=3)
    same = counterfactual(model, PROMPT, one, ChangedPrompt(PROMPT), max_new_tokens=8)
    assert same.divergence is None
    assert same.factual.new_ids == say(model, [one], 8)[0].tolist()
    longer = torch.cat([torch.tensor([1]), PROMPT])
    other = counterfactual(model, PROMPT, one, ChangedPrompt(longer), max_new_tokens=8)
    assert stability(model, other).violations == 0  # Gumbel noise never depends on the context
    with pytest.raises(ValueError, match="use 'pearl'"):
        counterfactual(model, PROMPT, one, ChangedPrompt(longer), semantics="disco")
    with pytest.raises(ValueError, match="temperature=0"):
        GumbelIndividual.draw(model, seed=1, temperature=0)
