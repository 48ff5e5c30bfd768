"""A drop-in replacement for Qwen2 in Hugging Face tools."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    pipeline,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from causal_qwen import CausalQwen2Config, CausalQwenForCausalLM, CausalQwenModel
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import default_model
from causal_qwen.modeling.processor import CausalQwenProcessor

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    CausalQwenForCausalLM(CausalQwen2Config(**TINY)).save_pretrained(tmp_path)
    return tmp_path


def opened(path: Path) -> tuple[Any, Any]:
    with quiet():
        model = CausalQwenForCausalLM.from_pretrained(path).eval()
    return AutoTokenizer.from_pretrained(path), model


@pytest.fixture(scope="module")
def short(short_directory: Path) -> tuple[Any, Any]:
    return opened(short_directory)


def test_auto_classes_load_it(saved: Path) -> None:
    assert type(AutoConfig.from_pretrained(saved)) is CausalQwen2Config
    assert type(AutoModelForCausalLM.from_pretrained(saved)) is CausalQwenForCausalLM
    assert type(AutoModel.from_pretrained(saved)) is CausalQwenModel


@pytest.mark.slow  # each a process that imports torch
@pytest.mark.parametrize(
    "imports",
    [
        "import causal_qwen; from transformers import AutoConfig, AutoModelForCausalLM",
        "import causal_qwen; from transformers import AutoModelForCausalLM",
        "from transformers import AutoModelForCausalLM; import causal_qwen",
        "import causal_qwen.modeling.action; from transformers import AutoModelForCausalLM",
        "import causal_qwen; from transformers import LlamaForCausalLM, AutoModelForCausalLM",
        "from causal_qwen.modeling.configuration import CausalQwen2Config; "
        "from transformers import AutoModelForCausalLM",
    ],
)
def test_auto_classes_load_it_in_any_import_order(saved: Path, imports: str) -> None:
    code = f"{imports}; print(type(AutoModelForCausalLM.from_pretrained({str(saved)!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "CausalQwenForCausalLM", done.stderr


def test_remote_code_beside_the_weights_is_our_classes(saved: Path) -> None:
    for auto, name in json.loads((saved / "config.json").read_text("utf-8"))["auto_map"].items():
        found = get_class_from_dynamic_module(name, str(saved))
        assert found.__module__.startswith("causal_qwen."), auto
        assert found.__name__ == name.partition(".")[2]


@pytest.mark.slow  # a process that imports torch
@pytest.mark.ecosystem("trust_remote_code=True without importing us", "works")
def test_trust_remote_code_loads_our_classes_without_importing_us(saved: Path) -> None:
    """`trust_remote_code=True` runs the one-line module beside the weights."""
    code = (
        "import sys; from transformers import AutoModelForCausalLM;"
        "assert 'causal_qwen' not in sys.modules;"
        f"model = AutoModelForCausalLM.from_pretrained({str(saved)!r}, trust_remote_code=True);"
        "print(type(model).__module__, type(model).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["causal_qwen.model", "CausalQwenForCausalLM"]


@pytest.mark.slow  # a process that imports torch
@pytest.mark.ecosystem("AutoProcessor with trust_remote_code=True without importing us", "works")
def test_trust_remote_code_loads_our_processor_without_importing_us(
    saved: Path, byte_tokenizer: Callable[..., Any]
) -> None:
    CausalQwenProcessor(byte_tokenizer()).save_pretrained(saved)
    code = (
        "import sys; from transformers import AutoProcessor;"
        "assert 'causal_qwen' not in sys.modules;"
        f"found = AutoProcessor.from_pretrained({str(saved)!r}, trust_remote_code=True);"
        "print(type(found).__module__, type(found).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["causal_qwen.modeling.processor", "CausalQwenProcessor"]


@pytest.mark.ecosystem("device_map", "works")
def test_device_map_is_supported(saved: Path) -> None:
    model = CausalQwenForCausalLM.from_pretrained(saved, device_map="auto")
    plain = CausalQwenForCausalLM.from_pretrained(saved)
    ids = torch.arange(12)[None]
    assert torch.equal(model.generate(ids, max_new_tokens=4), plain.generate(ids, max_new_tokens=4))


@pytest.mark.ecosystem("pipeline", "works")
def test_pipeline_returns_the_text_of_generate(short: Any) -> None:
    tokenizer, model = short
    prompt = "The train was late, so"
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    found = pipe(prompt, max_new_tokens=8, do_sample=False, return_full_text=False)
    ids = tokenizer(prompt, return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert found[0]["generated_text"] == tokenizer.decode(
        expected[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
    )


def test_pipeline_accepts_mode_and_individual(short: Any) -> None:
    tokenizer, model = short
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"causal_mode": "causal", "max_new_tokens": 8, "return_full_text": False}
    texts = [
        pipe("The king's daughter", individual=seed, **options)[0]["generated_text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_pipeline_applies_the_chat_template() -> None:
    """With the whole embedded model, which knows the answer."""
    tokenizer, model = opened(default_model())
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    reply = pipe(messages, max_new_tokens=12, do_sample=False)[0]["generated_text"][-1]
    assert reply["role"] == "assistant"
    assert "Paris" in reply["content"]
