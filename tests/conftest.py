"""Shared fixtures: tiny models that are nowhere at a special point of their parameter space.

Sizes are all distinct, so that a transposed or mixed-up axis cannot pass unnoticed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _fuzz import IS_ON, summary
from _tiny import TINY
from hypothesis import settings

# One fixed set of examples by default; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


OUTER = {"browser", "test_pages.py", "test_notebooks.py", "test_benchmarks.py", "test_wheel.py"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """What users see, rather than what the code computes, is in the tier of `make test-all`."""
    if OUTER & {*item.path.parts}:
        item.add_marker("outer")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """`make fuzz` ends with the number of cases of every law."""
    if IS_ON:
        terminalreporter.write_sep("=", "fuzz")
        terminalreporter.write("\n".join([*summary(terminalreporter.stats), ""]))


@pytest.fixture(scope="session")
def tiny_fields() -> dict[str, Any]:
    """Fields of a tiny Qwen2 configuration."""
    return dict(TINY)


@pytest.fixture(scope="session")
def make_config(tiny_fields: dict[str, Any]) -> Callable[..., Any]:
    """`make_config(**fields)`: a tiny CausalQwen2Config; an own `causal_size` unties the head."""
    from causal_qwen.modeling.configuration import CausalQwen2Config

    def make(**fields: Any) -> Any:
        if fields.get("causal_size") is not None:
            fields = {"tie_word_embeddings": False, **fields}
        return CausalQwen2Config(**{**tiny_fields, **fields})

    return make


@pytest.fixture(scope="session")
def fresh_model(make_config: Callable[..., Any]) -> Callable[..., Any]:
    """`fresh_model(**fields)`: a tiny model exactly as its config initialises it."""
    import torch

    from causal_qwen.model import CausalQwenForCausalLM

    def make(seed: int = 0, **fields: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return CausalQwenForCausalLM(make_config(**fields)).eval()

    return make


@pytest.fixture(scope="session")
def make_model(fresh_model: Callable[..., Any]) -> Callable[..., Any]:
    """`make_model(**fields)`: a tiny model whose every causal parameter is random."""

    def make(seed: int = 0, **fields: Any) -> Any:
        return shake(fresh_model(seed, **fields), seed)

    return make


@pytest.fixture(scope="session")
def make_pair(make_model: Callable[..., Any]) -> Callable[..., Any]:
    """`make_pair(**fields)`: (a tiny Qwen2ForCausalLM, the causal model with its weights).

    W_loc is the identity, as after a conversion; all else of the causal chain is random.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def make(seed: int = 0, **fields: Any) -> Any:
        model = make_model(seed, **fields)
        with torch.no_grad():
            model.abduction.loc.weight.copy_(torch.eye(model.config.hidden_size))
            model.abduction.loc.bias.zero_()
        plain = {name: getattr(model.config, name) for name in TINY}
        base = Qwen2ForCausalLM(Qwen2Config(**plain)).eval()
        missing, _ = base.load_state_dict(model.state_dict(), strict=False)
        assert not missing
        return base, model

    return make


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Any]:
    """`byte_tokenizer(**options)`: a fresh tokenizer with one token per byte, and <pad>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(**options: Any) -> Any:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {letter: i for i, letter in enumerate(["<pad>", *alphabet])}
        core = Tokenizer(models.BPE(vocabulary, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", **options)

    return make


SHORT = 8  # layers of 30; with fewer, the irises of the playground are not learned


@pytest.fixture(scope="session")
def short_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model without most of its layers: the same words in half of the time.

    Made once for all workers.
    """
    from filelock import FileLock
    from safetensors.torch import load_file, save_file

    from causal_qwen.conversion.convert import default_model

    root = tmp_path_factory.getbasetemp()
    directory = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "short-model"
    with FileLock(f"{directory}.lock"):
        if not (directory / "config.json").exists():
            whole, unread = default_model(), ("model.safetensors", "config.json")
            shutil.copytree(whole, directory, ignore=shutil.ignore_patterns(*unread))
            dropped = tuple(f"model.layers.{layer}." for layer in range(SHORT, 100))
            kept = {
                name: tensor
                for name, tensor in load_file(whole / "model.safetensors").items()
                if not name.startswith(dropped)
            }
            save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((whole / "config.json").read_text("utf-8"))
            config |= {"num_hidden_layers": SHORT, "layer_types": config["layer_types"][:SHORT]}
            (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return directory


@pytest.fixture
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of boosting's trees, for tests of all that surrounds them."""
    from causal_qwen.regression import experts

    monkeypatch.setattr(experts, "STEPS", (15, 30))
    monkeypatch.setattr(experts.Expert.__new__, "__defaults__", (30,))  # of `steps`


def shake(model: Any, seed: int) -> Any:
    """Random causal parameters: U varies in scale, thresholds and noises differ by token."""
    import torch

    config = model.config
    generator = torch.Generator().manual_seed(seed + 1000)

    def normal(like: Any, std: float) -> Any:
        return torch.randn(like.shape, generator=generator) * std

    def uniform(like: Any, low: float, high: float) -> Any:
        return torch.rand(like.shape, generator=generator) * (high - low) + low

    with torch.no_grad():
        scale, action = model.abduction.scale, model.action
        scale.weight.copy_(normal(scale.weight, 0.1))
        scale.bias.copy_(uniform(scale.bias, -3.0, -1.0))
        location = model.abduction.loc
        location.weight.add_(normal(location.weight, 0.05))
        location.bias.copy_(normal(location.bias, 0.1))
        # signs included: b and a act by their absolute value
        action.b_noise.copy_(uniform(action.b_noise, -0.2, 0.2))
        action.decision_noise.copy_(uniform(action.decision_noise, -20.0, 20.0))
        action.value.weight.copy_(normal(action.value.weight, 0.3))
        action.value.bias.copy_(normal(action.value.bias, 0.3))
        model.decision.threshold.copy_(uniform(model.decision.threshold, 2.0, 8.0))
        if config.head_bias:
            model.lm_head.bias.copy_(normal(model.lm_head.bias, 1.0))
    return model
