"""One contract: torch, NumPy and the command line resolve a call alike, to the same tokens."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner

from causal_qwen.cli.program import app
from causal_qwen.conversion.opening import open_model
from causal_qwen.decoding.settings import DecodingSettings, resolve_settings
from causal_qwen.numpy_engine import Engine

PROMPT = "The train was late, so"
NEW = 8
OURS = {"noise_gain": 3.0, "fresh_noise_gain": 2.0, "min_density": 0.02}
SAVED: dict[str, dict[str, Any]] = {
    "none": {},
    "do_sample": {"do_sample": True},
    "temperature": {"do_sample": True, "temperature": 0.7},
    "top_p": {"do_sample": True, "top_p": 0.8},
    "top_k and min_p": {"do_sample": True, "top_k": 5, "min_p": 0.05},
}
MODES = (None, "standard", "sampling", "causal", "compatible")
# Softmax draws of torch and NumPy differ; both engines are compared where nothing is drawn.
NO_DRAW = {"compatible": {"do_sample": False}}


@pytest.fixture(scope="module", params=SAVED)
def directory(
    request: pytest.FixtureRequest, tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A converted model with other saved generation settings."""
    path = tmp_path_factory.mktemp("saved") / "model"
    shutil.copytree(tiny_directory, path)
    file = path / "generation_config.json"
    saved = json.loads(file.read_text(encoding="utf-8")) | OURS | SAVED[request.param]
    file.write_text(json.dumps(saved), encoding="utf-8")
    return path


def comparable(settings: DecodingSettings) -> dict[str, Any]:
    return {**settings.to_dict(), "individual": settings.individual, "named": settings.named}


@pytest.mark.parametrize("mode", MODES)
def test_torch_and_numpy_resolve_a_call_alike_and_choose_the_same_tokens(
    directory: Path, mode: str | None
) -> None:
    processor, model = open_model(directory)
    engine = Engine.from_pretrained(directory)
    resolved = engine.resolve(mode)
    call: dict[str, Any] = {"individual": 7} if resolved.is_noisy else {}
    call |= NO_DRAW.get(resolved.mode, {})
    in_torch = model.resolve_settings(causal_mode=mode, **call)
    in_numpy = engine.resolve(mode, **call)
    assert comparable(in_torch) == comparable(in_numpy)
    inputs = processor(PROMPT, return_tensors="pt")
    with torch.no_grad():
        theirs = model.generate(
            **inputs, causal_mode=mode, max_new_tokens=NEW, return_dict_in_generate=True, **call
        )
    ours = engine.generate(PROMPT, mode=mode, max_new_tokens=NEW, **call)
    assert ours.ids.tolist() == theirs.sequences[0].tolist()
    assert comparable(theirs.settings) == comparable(ours.settings or DecodingSettings())


@pytest.mark.parametrize("mode", MODES)
def test_the_command_line_resolves_as_python_does(directory: Path, mode: str | None) -> None:
    engine = Engine.from_pretrained(directory)
    options = [] if mode is None else ["--mode", mode]
    call: dict[str, Any] = {}
    if engine.resolve(mode).is_noisy:
        options += ["--individual", "7"]
        call["individual"] = 7
    settings = engine.resolve(mode, **call)
    expected = engine.generate(PROMPT, mode=mode, max_new_tokens=NEW, **call)
    for name in ("torch", "numpy"):
        arguments = ["generate", PROMPT, "--model", str(directory), "--engine", name, *options]
        run = CliRunner().invoke(app, [*arguments, "--max-new-tokens", str(NEW), "--json"])
        assert run.exit_code == 0, run.output
        record = json.loads(run.stdout.splitlines()[-1])
        wanted = settings.to_dict()
        assert {name: record[name] for name in wanted} == wanted
        assert record["individual"] == call.get("individual")
        if not settings.do_sample:
            assert record["text"] == expected.text


@pytest.mark.parametrize("saved", SAVED.values(), ids=SAVED)
def test_an_explicit_mode_is_not_overruled_by_a_saved_do_sample(saved: dict[str, Any]) -> None:
    assert resolve_settings({"causal_mode": "standard"}, saved).mode == "standard"
    assert resolve_settings({}, saved).mode == ("sampling" if saved else "standard")
    with pytest.raises(ValueError, match="do_sample=True"):
        resolve_settings({"causal_mode": "standard", "do_sample": True}, saved)


def test_an_individual_without_a_mode_means_causal() -> None:
    for saved in SAVED.values():
        assert resolve_settings({"individual": 7}, saved).mode == "causal"
        assert resolve_settings({"individual": 7, "do_sample": True}, saved).mode == "sampling"
    with pytest.raises(ValueError, match="individual="):
        resolve_settings({"individual": 7, "causal_mode": "standard"}, {})


def test_a_call_ranks_before_its_config_and_its_config_before_the_saved_one() -> None:
    saved = {"min_density": 0.1, "noise_gain": 2.0, "temperature": 0.7}
    config = {"min_density": 0.2, "noise_gain": 3.0}
    settings = resolve_settings({"causal_mode": "causal", "min_density": 0.3}, saved, config=config)
    assert (settings.min_density, settings.noise_gain, settings.temperature) == (0.3, 3.0, 0.7)
    assert settings.fresh_noise_gain == 3.0  # a gain given with the call is that of all noise
    assert settings.named == {"min_density": 0.3}  # a config does not contradict an Individual


@pytest.mark.parametrize("mode", ["causal", "compatible"])
def test_both_engines_take_the_default_mode_of_the_config(
    tiny_directory: Path, tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_directory, path)
    fields = json.loads((path / "config.json").read_text("utf-8")) | {"inference_mode": mode}
    (path / "config.json").write_text(json.dumps(fields), "utf-8")
    assert open_model(path)[1].resolve_settings().mode == mode
    assert Engine.from_pretrained(path).resolve().mode == mode


def test_softmax_sampling_has_hugging_faces_implicit_top_k_in_both_engines() -> None:
    assert resolve_settings({"causal_mode": "compatible", "do_sample": True}, {}).top_k == 50
    assert resolve_settings({"causal_mode": "compatible"}, {}).top_k is None
    assert resolve_settings({"causal_mode": "sampling"}, {"do_sample": True}).top_k is None


def test_the_engine_refuses_what_it_cannot_do(directory: Path) -> None:
    engine = Engine.from_pretrained(directory)
    with pytest.raises(TypeError, match="temprature"):
        engine.generate(PROMPT, temprature=1.0)
    engine.saved["typical_p"] = 0.9
    with pytest.raises(ValueError, match="typical_p"):
        engine.generate(PROMPT)


def test_a_generation_config_of_the_call_asks_for_repeats_and_words_in_sampling(
    tiny_directory: Path,
) -> None:
    _, model = open_model(tiny_directory)
    given = GenerationConfig(do_sample=True, avoid_repeats=3, whole_words=True)
    found = model.resolve_settings(generation_config=given)
    assert (found.mode, found.avoid_repeats, found.whole_words) == ("sampling", 3, True)
    saved = copy.deepcopy(model.generation_config)
    assert (saved.avoid_repeats, saved.whole_words) == (2, True)
    plain = model.resolve_settings(generation_config=saved)
    assert (plain.mode, plain.avoid_repeats, plain.whole_words) == ("standard", 0, False)
