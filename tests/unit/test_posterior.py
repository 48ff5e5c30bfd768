"""Posterior draws against brute force, and reasons for empty results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from causal_qwen.analysis.posterior import (
    draw_cauchy,
    infer_individual,
    least_distance,
)
from causal_qwen.analysis.token_sequence import TokenSequence, observe
from causal_qwen.individuals import to_cauchy

Make = Callable[..., Any]

C, V, T = 4, 12, 3
NUM = 11
GAIN = 8.0
PROMPT = torch.tensor([3, 5, 2])
LEVEL = 1e-3  # of every goodness-of-fit test


@pytest.fixture(scope="module")
def model(make_model: Make) -> Any:
    return make_model(causal_size=C, vocab_size=V)


def generated_ids(model: Any, seed: int, length: int, **options: Any) -> Tensor:
    out = model.generate(
        PROMPT[None],
        attention_mask=torch.ones(1, T, dtype=torch.long),
        causal_mode="causal",
        individual=seed,
        noise_gain=GAIN,
        max_new_tokens=length,
        **options,
    )
    return out[0, T:]


def rejection_draws(
    model: Any, text: Tensor, position: int | None, min_density: float = 0.0, n: int = 200_000
) -> np.ndarray:
    """Rejection sampling: e of draws that generate the text, or its token at a position. (n', C)"""
    sequence = TokenSequence(torch.cat([PROMPT, text]), torch.zeros(T + len(text)).double())
    seen = observe(model, sequence, T)
    e = np.random.default_rng(0).random((n, C))
    t = to_cauchy(e, min_density)
    weight = model.lm_head.weight.detach().double().numpy()
    threshold = model.decision.threshold.detach().double().numpy()
    is_same = np.ones(n, dtype=bool)
    for place in range(len(text)) if position is None else [position]:
        loc, scale = (x[0, place].double().numpy() for x in (seen.loc_U, seen.scale_U))
        scores = (loc + GAIN * scale * t) @ weight.T - threshold
        is_same &= scores.argmax(-1) == int(text[place])
    return e[is_same]


# --- posterior draws against rejection sampling


@pytest.mark.parametrize(
    ("min_density", "n"),
    [
        (0.05, 200),
        pytest.param(0.05, 600, marks=pytest.mark.slow),
        pytest.param(0.0, 600, marks=pytest.mark.slow),
    ],
)
def test_shared_draws_match_rejection_sampling(model: Any, min_density: float, n: int) -> None:
    text = generated_ids(model, 11, 2, min_density=min_density)
    truth = rejection_draws(model, text, None, min_density)
    assert 500 < len(truth) < 150_000
    found = infer_individual(
        model,
        text,
        prompt=PROMPT,
        n=n,
        noise_gain=GAIN,
        sweeps=2,
        min_density=min_density,
        seed=1,
    )
    assert found.success_rate == 1.0
    assert found.effective_sample_size > n / 3
    e = np.stack([one.noise for one in found.individuals])
    for column in range(C):
        assert stats.ks_2samp(e[:, column], truth[:, column]).pvalue > LEVEL
    products = ((x - 0.5) @ np.array([1.0, -1.0, 1.0, 1.0]) for x in (e, truth))
    assert stats.ks_2samp(*products).pvalue > LEVEL  # jointly, not only one by one


def test_a_number_in_the_text_is_refused_with_a_cure(make_model: Make) -> None:
    reader = make_model(causal_size=C, vocab_size=V, num_token_id=NUM)
    text = TokenSequence(torch.tensor([NUM]), torch.tensor([2.5]).double())
    with pytest.raises(ValueError, match="put it into the prompt"):
        infer_individual(reader, text, prompt=PROMPT)


def test_inferred_individuals_have_the_models_saved_truncation_and_temperature(
    make_model: Make,
) -> None:
    model = make_model(causal_size=C, vocab_size=V)
    model.generation_config.min_density = 0.05
    model.generation_config.temperature = 0.5
    text = generated_ids(model, 11, 2)
    found = infer_individual(model, text, prompt=PROMPT, n=2, noise_gain=GAIN)
    assert [one.min_density for one in found.individuals] == [0.05, 0.05]
    assert [one.temperature for one in found.individuals] == [0.5, 0.5]
    assert found.success_rate == 1.0


# --- unreachable texts and invalid arguments


def test_unreachable_text_returns_empty_result_with_reason(model: Any) -> None:
    text = generated_ids(model, 11, 3)
    silent = infer_individual(model, (text + 1) % V, prompt=PROMPT, n=3, temperature=0.0)
    assert not silent
    assert silent.individuals == []
    assert "without noise" in silent.reason
    assert "empty" in repr(silent)
    hemmed = infer_individual(
        model, torch.tensor([9, 1, 10, 6]), prompt=PROMPT, n=3, noise_gain=0.01, min_density=0.9
    )
    assert not hemmed
    assert "with noise up to 0.333" in hemmed.reason


def test_equal_scales_make_some_texts_unreachable_for_one_individual(make_model: Make) -> None:
    """With equal scales an individual keeps its order of two tokens wherever their odds agree."""
    even = make_model(causal_size=C, vocab_size=V)
    with torch.no_grad():
        even.abduction.scale.weight.zero_()
    for first in range(V):
        for second in range(V):
            text = torch.tensor([first, second])
            sequence = TokenSequence(torch.cat([PROMPT, text]), torch.zeros(T + 2).double())
            loc = observe(even, sequence, T).logits[0].double()
            odds = loc[:, first] - loc[:, second]
            if first == second or odds[0] > odds[1] - 0.1:
                continue
            found = infer_individual(even, text, prompt=PROMPT, n=1, noise_gain=GAIN, burn_in=0)
            assert not found
            assert "no single individual" in found.reason
            assert f"'{first}' (position 3)" in found.reason
            return
    pytest.fail("no such pair of tokens")


def test_dominated_token_is_unreachable_and_named_with_its_position(make_model: Make) -> None:
    model = make_model(causal_size=C, vocab_size=V)
    with torch.no_grad():
        model.lm_head.weight[7] = model.lm_head.weight[8]
        model.decision.threshold[7] = model.decision.threshold[8] + 1
    found = infer_individual(model, torch.tensor([7]), prompt=PROMPT, n=2, noise_gain=GAIN)
    assert not found
    assert "'7' (position 3)" in found.reason


# --- the parts


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (2.0, 5.0), (-9.0, -4.0), (5e8, math.inf)])
def test_a_coordinate_is_a_truncated_cauchy(low: float, high: float) -> None:
    rng, t = np.random.default_rng(0), 1.5
    x = np.array([t + draw_cauchy(t, low - t, high - t, rng) for _ in range(2000)])
    assert low * (1 - 1e-9) <= x.min()
    assert x.max() <= high
    if high < math.inf:
        first, last = stats.cauchy.cdf(low), stats.cauchy.cdf(high)
        assert stats.kstest(x, lambda v: (stats.cauchy.cdf(v) - first) / (last - first)).pvalue > (
            LEVEL
        )
    else:  # far out the tail is low / x
        assert stats.kstest(low / x, "uniform").pvalue > LEVEL


@given(st.integers(0, 10_000))
def test_the_least_distance_is_feasible_and_least(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, inside = rng.normal(size=(12, 5)), rng.normal(size=5) * 10
    floor = rows @ inside - rng.random(12)
    q, weights = least_distance(rows, floor)
    assert q is not None
    assert (rows @ q - floor).min() > -1e-6
    assert np.linalg.norm(q) <= np.linalg.norm(inside) + 1e-9
    contradiction = np.concatenate([rows, -rows[:1]]), np.append(floor, 1.0 - floor[0])
    nothing, weights = least_distance(*contradiction)
    assert nothing is None
    assert weights[-1] > 0
