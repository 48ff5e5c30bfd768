"""The Gumbel-max baseline: softmax sampling whose noise is kept, and found again in hindsight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from causal_qwen.analysis import gumbel
from causal_qwen.analysis.counterfactual import ChangedPrompt, counterfactual
from causal_qwen.analysis.gumbel import GumbelIndividual, infer_gumbel
from causal_qwen.analysis.posterior import infer_individual
from causal_qwen.analysis.token_sequence import TokenSequence, observe
from causal_qwen.individuals.noise import draw_noise

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


def test_padding_and_other_rows_do_not_change_the_text(model: Any) -> None:
    people = [GumbelIndividual.draw(model, seed=seed) for seed in (1, 2)]
    ids = torch.stack([torch.tensor([0, 0, *PROMPT[:2]]), PROMPT])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    together = gumbel.generate(model, people, mask, input_ids=ids, max_new_tokens=6, pad_token_id=0)
    alone = gumbel.generate(
        model, people[:1], mask[:1, 2:], input_ids=ids[:1, 2:], max_new_tokens=6, pad_token_id=0
    )
    assert together[0, 4:].tolist() == alone[0, 2:].tolist()
    assert together[1, 4:].tolist() == say(model, people[1:], 6)[0].tolist()


def test_inferred_noise_replays_the_text(model: Any) -> None:
    text = torch.tensor([1, 1, 12, 0, 6])  # nobody planned it
    found = infer_individual(model, text, prompt=PROMPT, mode="gumbel", n=50)
    assert found.success_rate == 1.0
    assert len(found.individuals) == 50
    assert say(model, found.individuals, 5).tolist() == [text.tolist()] * 50


def test_inferred_noise_matches_rejection_sampling(model: Any) -> None:
    """Against rejection: of many speakers, those who said the token."""
    said = 5
    passage = TokenSequence(torch.cat([PROMPT, torch.tensor([said])]), torch.zeros(T + 1).double())
    logits = observe(model, passage, T).logits[0, 0].double().numpy()
    free = np.random.default_rng(0).gumbel(size=(200_000, V))
    truth = free[(logits + free).argmax(1) == said]
    assert len(truth) > 200
    found = infer_gumbel(model, passage, T, 2000, seed=1)
    noise = np.stack([one.at(T - 1) for one in found])
    for token in range(V):
        assert stats.ks_2samp(noise[:, token], truth[:, token]).pvalue > 1e-3


def test_counterfactual_accepts_gumbel_individuals(model: Any) -> None:
    one = GumbelIndividual.draw(model, seed=3)
    same = counterfactual(model, PROMPT, one, ChangedPrompt(PROMPT), max_new_tokens=8)
    assert same.divergence is None
    assert same.factual.new_ids == say(model, [one], 8)[0].tolist()
    longer = torch.cat([torch.tensor([1]), PROMPT])
    other = counterfactual(model, PROMPT, one, ChangedPrompt(longer), max_new_tokens=8)
    assert other.stability().violations == 0  # Gumbel noise never depends on the context
    with pytest.raises(ValueError, match="use 'pearl'"):
        counterfactual(model, PROMPT, one, ChangedPrompt(longer), semantics="disco")
    with pytest.raises(ValueError, match="temperature=0"):
        GumbelIndividual.draw(model, seed=1, temperature=0)
