"""Calibration: what it saves, and how it searches. Its effect is measured by the promise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from causal_qwen import CausalQwenForCausalLM, Individual
from causal_qwen.conversion import calibration
from causal_qwen.conversion.convert import convert
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.numpy_engine import calibration as core

Make = Callable[..., Any]
SAVED = (
    "min_density",
    "noise_gain",
    "fresh_noise_gain",
    "causal_min_p",
    "persistence",
    "whole_words",
)


@pytest.fixture
def base(tiny_fields: dict[str, Any]) -> Qwen2ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2ForCausalLM(Qwen2Config(**tiny_fields)).eval()


def test_conversion_reports_each_stage_once(base: Qwen2ForCausalLM, tmp_path: Path) -> None:
    base.save_pretrained(tmp_path / "base")
    stages: list[str] = []
    convert(tmp_path / "base", tmp_path / "out", progress=stages.append)
    assert stages.count("loading the base model") == 1
    assert len(set(stages)) == len(stages)


def cross_entropy(loc: torch.Tensor, threshold: float, gamma: float) -> float:
    """Of softmax and P over its sum, with scale_S = 2 gamma."""
    p = Cauchy(loc, torch.full_like(loc, 2 * gamma)).log_sf(threshold).log_softmax(-1)
    return float(-(loc.softmax(-1) * p).sum(-1).mean())


def test_over_the_bar_p_is_near_to_softmax_whatever_the_level_of_the_scores() -> None:
    rng = np.random.default_rng(0)
    loc = 3 * rng.standard_normal((60, 3000), np.float32)
    loc[:, 0] += np.linspace(8, 16, 60)  # from uncertain to sure
    loc += 7 * rng.standard_normal((60, 1), np.float32)  # the level
    ones = np.ones(3000, np.float32)
    fixed = core.find_scales(loc, ones, has_bar=False)
    assert fixed.threshold == pytest.approx(np.quantile(loc.max(-1), core.TOP_QUANTILE))
    before = cross_entropy(torch.from_numpy(loc), fixed.threshold, fixed.gamma)

    over = torch.from_numpy(loc).log_softmax(-1)
    threshold, gamma, b_noise, median = core.find_scales(loc, ones, has_bar=True)
    sums = Cauchy(over, torch.full_like(over, gamma + b_noise)).sf(threshold).sum(-1)
    assert float(sums.median()) == pytest.approx(core.BAR_SUM, abs=1e-3)
    assert median == pytest.approx(float(sums.median()), abs=1e-4)
    assert float(sums.quantile(core.BAR_MAJORITY)) <= core.BAR_MOST + 0.05
    assert cross_entropy(over, threshold, gamma) < before - 2


def softmax_rate(model: Any, texts: list[torch.Tensor], min_p: float = core.MIN_P) -> float:
    """The share of softmax draws with min-p that are not the likeliest token."""
    rates = []
    for ids in texts:
        p = model(ids[None]).logits[0].double().softmax(-1)
        best = p.amax(-1, keepdim=True)
        kept = p.where(p >= min_p * best, 0.0)
        rates.append(1 - best[:, 0] / kept.sum(-1))
    return float(torch.cat(rates).mean())


@pytest.mark.parametrize("mode", ["causal", "sampling"])
@pytest.mark.parametrize("is_trained", [False, True])
@torch.no_grad()
def test_noise_of_gain_kappa_changes_as_many_choices_as_softmax_with_min_p(
    base: Qwen2ForCausalLM, mode: str, is_trained: bool
) -> None:
    """The choices of real generation after real texts, by individuals that were not drawn before;
    also where scale_U depends on the context."""
    model = CausalQwenForCausalLM.from_qwen(base)
    if is_trained:
        torch.manual_seed(1)
        model.abduction.scale.weight.normal_(std=0.02)
        model.action.b_noise.mul_(torch.rand(model.config.latent_size) * 4)
    texts = list(torch.randint(model.config.vocab_size, (8, 32)))
    calibration.calibrate_gains(model, calibration.read_texts(model, texts))
    expected, changed = softmax_rate(model, texts), []
    for stop in range(1, 33, 2):
        prompts = torch.stack(texts)[:, :stop]
        call = {"causal_mode": mode, "individual": 1000 + stop, "num_return_sequences": 16}
        call |= {"whole_words": False, "avoid_repeats": 0}
        said = model.generate(prompts, **call, max_new_tokens=1)[:, -1]
        changed.append(said.reshape(8, 16) != model(prompts).logits[:, -1].argmax(-1)[:, None])
    rate = float(torch.cat(changed).float().mean())
    assert expected > 0.1
    assert rate == pytest.approx(expected, abs=0.06)


def test_gain_is_found_at_any_scale_of_the_weights(base: Qwen2ForCausalLM) -> None:
    gains = []
    texts = [torch.arange(3, 40)]
    for factor in (1.0, 1e-3):
        model = CausalQwenForCausalLM.from_qwen(base)
        model.action.b_noise.data *= factor
        hidden = calibration.read_texts(model, texts)
        gains.append(calibration.calibrate_gains(model, hidden)[1])
    assert gains[1] == pytest.approx(1000 * gains[0], rel=1e-3)


def test_texts_with_one_candidate_everywhere_leave_kappa_at_1(
    base: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "MIN_P", 1.0)
    model = CausalQwenForCausalLM.from_qwen(base)
    hidden = calibration.read_texts(model, [torch.arange(9)])
    assert calibration.calibrate_gains(model, hidden) == (1.0, 1.0)


def test_saved_noise_settings_survive_saving_and_make_the_default_individual(
    base: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    model = CausalQwenForCausalLM.from_qwen(base)
    model.save_pretrained(tmp_path)
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path)
    for name in SAVED:
        saved = getattr(loaded.generation_config, name)
        assert saved == getattr(model.generation_config, name)
    assert loaded.generation_config.causal_min_p == core.MIN_P
    assert Individual.draw(loaded, seed=7).persistence == core.DEFAULTS["persistence"]
    ids = torch.tensor([[1, 2, 3]])
    call = {"individual": 7, "max_new_tokens": 8}
    named = {name.removeprefix("causal_"): value for name, value in core.DEFAULTS.items()}
    explicit = loaded.generate(ids, **call, **named, temperature=1.0)
    assert torch.equal(loaded.generate(ids, **call), explicit)


def test_plain_checkpoint_is_loaded_with_candidates_and_persistence(
    base: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    base.save_pretrained(tmp_path)
    saved = CausalQwenForCausalLM.from_pretrained(tmp_path).generation_config
    assert {name: getattr(saved, name) for name in core.DEFAULTS} == core.DEFAULTS


def test_documents_initialisation_saves_no_noise_settings(base: Qwen2ForCausalLM) -> None:
    saved = CausalQwenForCausalLM.from_qwen(base, init="documents").generation_config
    for name in SAVED:
        assert getattr(saved, name, None) is None
