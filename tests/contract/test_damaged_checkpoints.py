"""A damaged checkpoint loads to exactly its weights, or raises one sentence that names its file."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from _damage import copy_of, damage
from _fuzz import seeds

from causal_qwen.cli.program import main
from causal_qwen.conversion.convert import convert_model, open_model
from causal_qwen.engine import Engine
from causal_qwen.engine.weights import widen
from causal_qwen.model import CausalQwenForCausalLM

SEEDS = seeds(40, 300)
Weights = dict[str, Any]


def torch_weights(directory: Path) -> Weights:
    """Load with torch and generate a token."""
    processor, model = open_model(directory)
    ids = processor("Hello 5", return_tensors="pt")
    model.generate(**ids, max_new_tokens=1)
    return {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}


def numpy_weights(directory: Path) -> Weights:
    """Load with NumPy and generate a token."""
    engine = Engine.from_pretrained(directory)
    engine.generate([5, 6, 7], max_new_tokens=1)
    return {name: widen(stored) for name, stored in engine.parameters.items()}


def base_weights(directory: Path) -> Weights:
    """Convert a plain base."""
    model = convert_model(directory, model_class=CausalQwenForCausalLM)
    return {n: t.numpy() for n, t in model.state_dict().items() if n.startswith("model.layers")}


def check(load: Callable[[Path], Weights], whole: Weights, directory: Path, what: str) -> None:
    try:
        weights = load(directory)
    except (ValueError, OSError) as error:
        if "\n" in str(error) or str(directory) not in str(error):
            raise AssertionError(f"{what}: {error}") from error
        return
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert weights.keys() == whole.keys(), what
    for name, value in whole.items():
        assert np.array_equal(weights[name], value), f"{what}: {name}"


@pytest.mark.fuzz
@pytest.mark.filterwarnings("default")  # a damaged setting may be one that warns
@pytest.mark.parametrize("load", [torch_weights, numpy_weights, base_weights])
def test_damage_is_refused_in_one_sentence_or_changes_no_weight(
    load: Callable[[Path], Weights], tiny_directory: Path, tmp_path: Path, record_property: Any
) -> None:
    record_property("cases", len(SEEDS))
    source = tiny_directory.parent / "base" if load is base_weights else tiny_directory
    with torch.random.fork_rng(devices=[]):
        whole = load(source)
        for seed in SEEDS:
            directory = copy_of(source, tmp_path / "model")
            what = f"seed {seed}, {damage(directory, seed)}"
            check(load, whole, directory, what)


@pytest.mark.fuzz
@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_commands_end_without_a_traceback(
    engine: str, tiny_directory: Path, tmp_path: Path, record_property: Any
) -> None:
    record_property("cases", len(seeds(12, 60)))
    for seed in seeds(12, 60):
        directory = copy_of(tiny_directory, tmp_path / "model")
        what = f"seed {seed}, {damage(directory, seed)}"
        asked = ("generate", "Hello", "-m", str(directory), "--max-new-tokens", "1")
        code, error = run(*asked, "--engine", engine)
        error = error.replace("loading the model ...", "")
        assert "Traceback" not in error, what
        assert "--debug" not in error, f"{what}: {error}"  # an error without a sentence
        assert (code == 0) == (not error.strip()), f"{what}: {code}, {error}"


def run(*arguments: str) -> tuple[int, str]:
    """A command in this process. -> exit code, standard error"""
    out, error = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["causal-qwen", *arguments]),
        redirect_stdout(out),
        redirect_stderr(error),
        pytest.raises(SystemExit) as end,
    ):
        main()
    return int(end.value.code or 0), error.getvalue()
