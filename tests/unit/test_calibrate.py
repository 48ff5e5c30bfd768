"""Calibration: what it saves, and how it searches. Its effect is measured by the promise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from causal_qwen import CausalQwenForCausalLM, Individual
from causal_qwen.conversion import calibration
from causal_qwen.conversion.convert import convert
from causal_qwen.generation.streaming import end_ids

Make = Callable[..., Any]


@pytest.fixture
def base(tiny_fields: dict[str, Any]) -> Qwen2ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2ForCausalLM(Qwen2Config(**tiny_fields)).eval()


@pytest.mark.parametrize(("saved", "ends"), [(None, set()), (2, {2}), ([2, 5], {2, 5})])
def test_zero_one_or_several_end_tokens(fresh_model: Make, saved: Any, ends: set[int]) -> None:
    model = fresh_model()
    model.generation_config.eos_token_id = saved
    assert end_ids(model) == ends


def test_conversion_reports_each_stage_once(base: Qwen2ForCausalLM, tmp_path: Path) -> None:
    base.save_pretrained(tmp_path / "base")
    stages: list[str] = []
    convert(tmp_path / "base", tmp_path / "out", measure_noise=False, progress=stages.append)
    assert stages.count("loading the base model") == 1
    assert len(set(stages)) == len(stages)


def test_shared_gain_is_multiplied_and_fresh_gain_is_found_under_truncation(
    base: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CausalQwenForCausalLM.from_qwen(base, measure_noise=False)
    calls: list[tuple[Any, ...]] = []

    def find(*arguments: Any) -> float:
        calls.append(arguments[4:])
        return 0.5

    monkeypatch.setattr(calibration, "find_gain", find)
    prompts = [torch.tensor([1, 2, 3])]
    assert calibration.calibrate_noise(model, prompts) == (2.0, 0.5)
    # untruncated and then multiplied; under the truncation that is saved
    assert calls == [("causal",), ("sampling", calibration.FRESH_RANGE, calibration.TRUNCATION)]
    assert model.generation_config.noise_gain == 2.0
    assert model.generation_config.fresh_noise_gain == 0.5


def test_typical_shared_gain_is_multiplied_too(base: Qwen2ForCausalLM) -> None:
    model = CausalQwenForCausalLM.from_qwen(base, measure_noise=False)
    shared, fresh = calibration.TYPICAL_NOISE
    saved = model.generation_config
    assert saved.noise_gain / saved.fresh_noise_gain == pytest.approx(4 * shared / fresh)


def test_saved_noise_settings_survive_saving_and_make_the_default_individual(
    base: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    model = CausalQwenForCausalLM.from_qwen(base, measure_noise=False)
    model.save_pretrained(tmp_path)
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path)
    for name in ("min_density", "noise_gain", "fresh_noise_gain"):
        saved = getattr(loaded.generation_config, name)
        assert saved == getattr(model.generation_config, name)
    assert loaded.generation_config.min_density == 0.05
    assert Individual.draw(loaded, seed=7).min_density == 0.05
    ids = torch.tensor([[1, 2, 3]])
    call = {"causal_mode": "causal", "individual": 7, "max_new_tokens": 8}
    explicit = loaded.generate(ids, **call, min_density=0.05, temperature=1.0)
    assert torch.equal(loaded.generate(ids, **call), explicit)


def test_plain_checkpoint_is_loaded_with_truncated_noise(
    base: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    base.save_pretrained(tmp_path)
    assert CausalQwenForCausalLM.from_pretrained(tmp_path).generation_config.min_density == 0.05


def test_documents_initialisation_saves_no_noise_settings(base: Qwen2ForCausalLM) -> None:
    saved = CausalQwenForCausalLM.from_qwen(base, init="documents").generation_config
    for name in ("min_density", "noise_gain", "fresh_noise_gain"):
        assert getattr(saved, name, None) is None


@pytest.mark.parametrize("mode", ["causal", "sampling"])
def test_gain_search_ignores_saved_truncation(base: Qwen2ForCausalLM, mode: str) -> None:
    model = CausalQwenForCausalLM.from_qwen(base, measure_noise=False)
    batch = calibration.pad_left([torch.tensor([1, 2, 3])] * 4, model)
    options = {"causal_mode": mode, "individual": [0, 1, 2, 3], "noise_gain": 20.0}
    found = []
    for min_density in (0.0, 0.9):
        model.generation_config.min_density = min_density
        found.append(calibration.liveliness(model, batch, **options))
    assert found[0] == found[1]
