"""The four scripts pass on a sound model and fail on a damaged one; mutants are caught."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import GenerationConfig
from transformers.utils import logging

from causal_qwen import CausalQwen2Config, CausalQwenForCausalLM

SCRIPTS = Path(__file__).parents[2] / "scripts"
NAMES = (
    "causal_qwen_v2_validation_test",
    "qwen_compatibility_test",
    "simple_demo_v2",
    "end_to_end_comparison_test_v2",
)


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    """Restore the verbosity that the scripts change."""
    verbosity = logging.get_verbosity()
    yield
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], int]:
    def call(name: str, model: Path) -> int:
        monkeypatch.syspath_prepend(str(SCRIPTS))
        script = load(name)
        with pytest.raises(typer.Exit) as stop:
            script.main(model=model)
        return stop.value.exit_code

    return call


def sound_model() -> Any:
    """Like a converted model, without the noise gain, whose calibration is slow."""
    config = CausalQwen2Config(
        vocab_size=300,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CausalQwenForCausalLM(config)
    norms = model.lm_head.weight.detach().abs().sum(-1)
    model.action.decision_noise.data.copy_(norms.max() - norms)
    model.generation_config = GenerationConfig()
    return model


def no_exogenous_noise(model: Any) -> None:
    model.action.b_noise.data.zero_()


def uneven_scales(model: Any) -> None:
    model.action.decision_noise.data[::2] += 20


def no_noise_gain(model: Any) -> None:
    model.generation_config.noise_gain = 0.0


@pytest.mark.parametrize("name", NAMES)
def test_a_script_passes_on_a_sound_model_without_a_tokenizer(
    name: str, run: Callable[[str, Path], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound_model().save_pretrained(tmp_path)
    assert run(name, tmp_path) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "damage", "claim"),
    [
        (NAMES[0], no_exogenous_noise, "noise widens every token"),
        (NAMES[1], uneven_scales, "plain"),
        (NAMES[2], no_noise_gain, "different texts"),
        (NAMES[3], uneven_scales, "standard chooses what the base model would"),
    ],
)
def test_a_script_fails_on_a_damaged_model_and_names_the_claim(
    name: str,
    damage: Callable[[Any], None],
    claim: str,
    run: Callable[[str, Path], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = sound_model()
    damage(model)
    model.save_pretrained(tmp_path)
    assert run(name, tmp_path) == 1
    summary = capsys.readouterr().out.split(" failed")[-1]
    assert claim in summary.replace("\n", " ")


@pytest.mark.slow  # a process that imports torch
def test_a_directory_without_a_model_exits_with_2_and_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "simple_demo_v2.py"), "--model", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 2
    assert "config.json" in done.stdout


# --- mutants


def test_every_mutant_breaks_one_line_and_names_tests_of_the_default_tier() -> None:
    mutants = load("mutants")
    assert len(set(mutants.MUTANTS)) == len(mutants.MUTANTS) == 40
    assert not [reason for one in mutants.MUTANTS if (reason := mutants.misplaced(one))]
    for one in mutants.MUTANTS:
        assert one.old != one.new
        for test in one.tests.split():
            file, name = test.split("::")
            assert f"def {name}(" in (SCRIPTS.parent / "tests" / file).read_text("utf-8"), test


@pytest.mark.parametrize("old", ["no such line", "import"])
def test_a_mutant_whose_line_is_not_found_once_fails_by_name(
    old: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutants = load("mutants")
    lost = mutants.MUTANTS[0]._replace(old=old)
    monkeypatch.setattr(mutants, "MUTANTS", (lost,))
    assert mutants.main([]) == 1
    assert old in capsys.readouterr().out


@pytest.mark.slow  # some minutes: a process for every mutant
def test_every_mutant_is_caught() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "mutants.py")],
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
