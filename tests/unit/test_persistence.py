"""Persistence: a share p of the noise is the individual's own, the rest chance at each position.

u = loc_U + T kappa (c scale_U t + (1 - c) b eps), with c a coin of odds p
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _stability import Stability, stability
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from causal_qwen.analysis.counterfactual import (
    ChangedPrompt,
    counterfactual,
)
from causal_qwen.analysis.posterior import infer_individual
from causal_qwen.decoding.noise import NoiseGains
from causal_qwen.individuals import Individual
from causal_qwen.numpy_engine import Engine

C = 32
SHARES = st.floats(0, 1)
PROMPT = torch.tensor([[5, 17, 3, 44]])
NEW = 12


def mixed(persistence: float, seed: int, position: int) -> np.ndarray:
    who = Individual.draw(400, seed=seed, persistence=persistence)
    gains = NoiseGains()
    shared = gains.noise([who], [position])[0]
    chance = gains.exogenous([who], None, [position])
    return shared if chance is None else shared + chance[0]


@pytest.mark.parametrize("persistence", [0.0, 0.3, 0.6, 1.0])
def test_noise_is_standard_cauchy_for_every_persistence(persistence: float) -> None:
    """Persistence changes what positions share, not how much noise."""
    noise = np.concatenate([mixed(persistence, seed, 5) for seed in range(20)])
    assert stats.kstest(noise, "cauchy").pvalue > 1e-3


def test_a_mixture_is_the_individual_at_a_share_p_of_positions_and_chance_at_the_others() -> None:
    who = Individual.draw(C, seed=4, persistence=0.3)
    gains, count = NoiseGains(2.0), 2000
    is_own = []
    for position in range(count):
        own, chance = gains.noise([who], [position])[0], gains.exogenous([who], None, [position])[0]
        is_own.append(own.any())
        expected = (who.cauchy(), 0.0) if own.any() else (0.0, who.chance(position))
        np.testing.assert_array_equal(own, 2.0 * expected[0] * np.ones(C))
        np.testing.assert_array_equal(chance, 2.0 * expected[1] * np.ones(C))
    assert np.mean(is_own) == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / count))


@given(SHARES, st.integers(0, 2**63), st.integers(0, 1000))
def test_the_shared_part_is_the_same_at_all_positions_and_chance_is_not(
    persistence: float, seed: int, position: int
) -> None:
    who = Individual.draw(C, seed=seed, persistence=persistence)
    gains = NoiseGains(shared=3.0)
    both = gains.noise([who, who], [position, position + 1])
    shares = [gains.own_share(who, place) for place in (position, position + 1)]
    for found, share in zip(both, shares, strict=True):
        np.testing.assert_array_equal(found, 3.0 * share * who.cauchy())
    chance = gains.exogenous([who, who], None, [position, position + 1])
    if persistence == 1:
        assert chance is None
    else:
        np.testing.assert_array_equal(chance[0], 3.0 * (1 - shares[0]) * who.chance(position))
        assert not np.array_equal(who.chance(position), who.chance(position + 1))


def test_exogenous_noise_beside_an_individual_is_the_structural_equation(
    make_model: Callable[..., Any],
) -> None:
    """u = loc_U + scale_U t + b eps"""
    model = make_model()
    who, source = (Individual.draw(model, seed=seed, fresh=seed == 4) for seed in (3, 4))
    settings = model.resolve_settings(causal_mode="causal", individual=who, exogenous=source)
    noise = model.decoding_noise(settings).at([9])
    u = model.abduct(torch.randn(1, model.config.hidden_size))
    moved = model.action.displacement(
        u,
        noise._replace(values=torch.tensor(noise.values), exogenous=torch.tensor(noise.exogenous)),
    )
    t, eps = torch.tensor(who.cauchy()), torch.tensor(source.cauchy(9))
    expected = u.scale * t + model.action.b_noise.abs() * eps
    torch.testing.assert_close(moved[0], expected[0])


def test_chance_is_never_the_shared_noise() -> None:
    who = Individual.draw(C, seed=8, persistence=0.5)
    for position in range(20):
        assert not np.array_equal(who.chance(position), who.cauchy())


def test_equal_e_is_the_same_individual(make_model: Callable[..., Any]) -> None:
    model = make_model()
    ada, bob = (Individual.draw(model, seed=seed, persistence=0.5) for seed in (7, 8))
    expected = said(model, individual=ada)
    assert said(model, individual=7, persistence=0.5) == expected
    assert said(model, individual=ada.noise, persistence=0.5) == expected
    assert said(model, individual=ada.mix(bob, 0)) == expected
    assert said(model, individual=bob.mix(ada, 1)) == expected
    e = Individual.draw(C, seed=1).noise
    who, again = (Individual(e, persistence=0.5) for _ in range(2))
    np.testing.assert_array_equal(who.chance(4), again.chance(4))
    other = Individual(e[::-1], persistence=0.5)
    assert not np.array_equal(who.chance(4), other.chance(4))


def said(model: Any, **options: Any) -> list[int]:
    options = {"causal_mode": "causal", "individual": 7, "noise_gain": 3.0, **options}
    return model.generate(PROMPT, max_new_tokens=NEW, **options)[0, 4:].tolist()


def test_a_saved_persistence_and_saved_candidates_are_the_defaults(
    make_model: Callable[..., Any],
) -> None:
    model = make_model()
    explicit = said(model, persistence=0.5, min_p=0.3)
    assert explicit != said(model, persistence=0.5)
    model.generation_config.persistence = 0.5
    model.generation_config.causal_min_p = 0.3
    assert said(model) == explicit
    assert said(model, min_p=0.0) == said(model, persistence=0.5, min_p=0.0)
    assert model.resolve_settings(causal_mode="sampling").min_p == 0.3
    assert model.resolve_settings(causal_mode="standard").min_p is None
    assert model.resolve_settings(causal_mode="compatible", do_sample=True).min_p is None


def test_violations_by_candidates_are_counted(make_model: Callable[..., Any]) -> None:
    """Where scales are equal, a choice changes against the odds only if a candidate is lost."""
    model = make_model()
    model.abduction.scale.weight.data.zero_()
    edits = [ChangedPrompt(torch.tensor([[5, 17, 3, k]])) for k in (45, 50, 55)]

    def count(min_p: float) -> Stability:
        options = {"max_new_tokens": NEW, "noise_gain": 30.0, "min_p": min_p}
        pairs = itertools.product(range(4), edits)
        runs = (counterfactual(model, PROMPT, who, edit, **options) for who, edit in pairs)
        return stability(model, *runs, **options)

    some, none = count(0.05), count(0.0)
    assert some.violations == some.by_candidates > 0
    assert (none.violations, none.by_candidates) == (0, 0)


@pytest.mark.parametrize("mode", ["causal", "sampling"])
def test_chosen_tokens_are_candidates(mode: str, make_model: Callable[..., Any]) -> None:
    model = make_model()
    model.generation_config.causal_min_p = 0.2
    options = {"causal_mode": mode, "individual": 7, "noise_gain": 1e6}
    ids = model.generate(PROMPT, max_new_tokens=NEW, **options)
    p = model(ids).logits[0, 3:-1].softmax(-1)
    chosen = p.gather(-1, ids[0, 4:, None]).squeeze(-1)
    assert (chosen >= 0.2 * p.amax(-1) * (1 - 1e-5)).all()
    assert (ids[0, 4:] != p.argmax(-1)).any()  # such noise does move the choice


def test_both_engines_choose_the_same_tokens(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_model()
    model.generation_config.persistence = 0.4
    model.generation_config.causal_min_p = 0.1
    model.generation_config.noise_gain = 3.0
    model.save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path)
    for seed in range(6):
        expected = model.generate(PROMPT, individual=seed, max_new_tokens=NEW)[0, 4:].tolist()
        found = engine.generate(PROMPT[0].numpy(), individual=seed, max_new_tokens=NEW)
        assert found.ids[found.new].tolist() == expected


def test_disco_redraws_chance_and_keeps_the_individual(make_model: Callable[..., Any]) -> None:
    model = make_model()
    who = Individual.draw(model, seed=7, persistence=0.5)
    options, edit = {"max_new_tokens": NEW, "noise_gain": 3.0}, ChangedPrompt(PROMPT)
    same = counterfactual(model, PROMPT, who, edit, **options)
    assert same.divergence is None
    redrawn = counterfactual(model, PROMPT, who, edit, semantics="disco", **options)
    assert redrawn.divergence is not None
    assert redrawn.factual.new_ids == same.factual.new_ids == said(model, individual=who)
    alone = replace(who, persistence=1.0)
    same = counterfactual(model, PROMPT, alone, edit, **options)
    assert same.divergence is None


def test_a_text_outside_the_candidates_is_a_finding(make_model: Callable[..., Any]) -> None:
    model = make_model()
    model.generation_config.causal_min_p = 0.5
    unlikely = int(model(PROMPT).logits[0, -1].argmin())
    found = infer_individual(model, torch.tensor([unlikely]), prompt=PROMPT[0], n=2, noise_gain=3.0)
    assert not found
    assert "min_p=0.5" in found.reason
    text = torch.tensor(said(model, individual=3, persistence=1.0)[:3])
    with pytest.raises(ValueError, match="omit persistence"):
        infer_individual(model, text, prompt=PROMPT[0], persistence=0.5)
    found = infer_individual(model, text, prompt=PROMPT[0], n=4, noise_gain=3.0, burn_in=5)
    assert found.success_rate == 1.0
    assert {one.persistence for one in found.individuals} == {1.0}
