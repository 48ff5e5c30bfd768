"""The promise: before training, CausalQwen behaves exactly like the Qwen it came from."""

from __future__ import annotations

import argparse
import decimal
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from causal_qwen import CausalQwenForCausalLM
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import DOCUMENTS, default_model
from causal_qwen.numpy_engine.calibration import BAR_SUM

TINY = {
    "vocab_size": 331,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,  # logits that differ, unlike those of a fresh 0.02
    "eos_token_id": 2,
    "pad_token_id": 2,
}
# English prose in every Python installation
PROSE = " ".join(module.__doc__ for module in (statistics, random, decimal, argparse))


# bfloat16 is slow on many processors; in the default tier, the tiny models below use it.
@pytest.fixture(
    scope="module",
    params=[
        ("short", "float32"),
        pytest.param(("whole", "float32"), marks=pytest.mark.slow),
        pytest.param(("whole", "bfloat16"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def pair(request: Any, short_directory: Path) -> tuple[Any, Any, Any]:
    """The embedded model as CausalQwen and as plain Qwen2, from the same directory."""
    size, name = request.param
    path, dtype = short_directory if size == "short" else default_model(), getattr(torch, name)
    with quiet():
        base = Qwen2ForCausalLM.from_pretrained(path, dtype=dtype).eval()
        model = CausalQwenForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return AutoTokenizer.from_pretrained(path), base, model


def tiny_base(tied: bool, dtype: torch.dtype) -> Qwen2ForCausalLM:
    torch.manual_seed(3)
    config = Qwen2Config(**TINY, tie_word_embeddings=tied)
    return Qwen2ForCausalLM._from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize(
    "length",
    [128, pytest.param(1024, marks=pytest.mark.slow)],
)
@torch.no_grad()
def test_choice_at_every_position_of_real_text_is_the_base_models(pair: Any, length: int) -> None:
    tokenizer, base, model = pair
    ids = tokenizer(PROSE, return_tensors="pt").input_ids[:, :length]
    positions = 0
    for chunk in ids.split(256, dim=1):
        expected, output = base(chunk).logits, model(chunk)
        assert torch.equal(output.logits, expected)
        assert torch.equal(model.decision.choose(output.s_dist), expected.argmax(-1))
        positions += chunk.shape[1]
    assert positions == length


@pytest.mark.parametrize(
    "tokens",
    [16, pytest.param(200, marks=pytest.mark.slow)],  # a thousand tokens: over a minute
)
@torch.no_grad()
def test_generated_tokens_are_the_base_models(pair: Any, tokens: int) -> None:
    tokenizer, base, model = pair
    prompt = tokenizer("The history of bread begins", return_tensors="pt")
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    expected = base.generate(**prompt, do_sample=False, **length)
    for mode, noise in (
        ("standard", {}),
        ("compatible", {}),
        ("sampling", {"temperature": 0.0}),
        ("causal", {"temperature": 0.0}),
    ):
        actual = model.generate(**prompt, causal_mode=mode, **noise, **length)
        assert torch.equal(actual, expected), mode


@torch.no_grad()
def test_individuals_differ_and_replay(pair: Any) -> None:
    tokenizer, _, model = pair
    prompt = tokenizer("The old lighthouse keeper opened the door and", return_tensors="pt")
    options = {"max_new_tokens": 12, "temperature": 4.0, "individual": 10, "do_sample": True}
    first = model.generate(**prompt, **options, num_return_sequences=8)
    again = model.generate(**prompt, **options, num_return_sequences=8)
    assert torch.equal(first, again)
    assert len({tuple(row.tolist()) for row in first}) >= 6


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_converted_tiny_model_keeps_the_promise(tied: bool, dtype: torch.dtype) -> None:
    base = tiny_base(tied, dtype)
    model = CausalQwenForCausalLM.from_qwen(base)
    ids = torch.randint(TINY["vocab_size"], (8, 130), generator=torch.Generator().manual_seed(1))
    expected, output = base(ids).logits, model(ids)
    assert torch.equal(output.logits, expected)
    assert torch.equal(model.decision.choose(output.s_dist), expected.argmax(-1))
    greedy = base.generate(ids[:, :9], max_new_tokens=30, do_sample=False)
    for mode in ("standard", "compatible", "sampling", "causal"):
        noise = {"temperature": 0.0} if mode in ("sampling", "causal") else {}
        found = model.generate(ids[:, :9], max_new_tokens=30, causal_mode=mode, **noise)
        assert torch.equal(found, greedy), mode


@torch.no_grad()
def test_documents_initialisation_keeps_the_logits_but_not_the_choice() -> None:
    base = tiny_base(True, torch.float32)
    model = CausalQwenForCausalLM.from_qwen(base, init="documents")
    ids = torch.arange(300)[None]
    output = model(ids)
    assert torch.equal(output.logits, base(ids).logits)
    assert float(model.decision.threshold[0]) == DOCUMENTS["ovr_threshold_init"]
    torch.testing.assert_close(output.scale_U, torch.full_like(output.scale_U, 10.0))
    assert not torch.equal(model.decision.choose(output.s_dist), output.logits.argmax(-1))


@torch.no_grad()
@pytest.mark.parametrize(("context", "target"), [("none", 1.0), ("competition", BAR_SUM)])
def test_calibration_makes_one_vs_rest_probabilities_sum_to_its_target(
    context: str, target: float
) -> None:
    base = tiny_base(True, torch.float32)
    model = CausalQwenForCausalLM.from_qwen(base, threshold_context=context)
    assert model.calibration.sum_p_median == pytest.approx(target, abs=1e-3)
    scale = model(torch.arange(50)[None]).scale_S
    torch.testing.assert_close(scale, scale[:1, :1, :1].expand_as(scale), rtol=1e-5, atol=0)


@torch.no_grad()
def test_larger_causal_size_is_exact() -> None:
    base = tiny_base(True, torch.float32)
    model = CausalQwenForCausalLM.from_qwen(base, causal_size=64)
    ids = torch.arange(200)[None]
    output = model(ids)
    assert output.loc_U.shape[-1] == 64
    torch.testing.assert_close(output.logits, base(ids).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.decision.choose(output.s_dist), base(ids).logits.argmax(-1))


@torch.no_grad()
def test_smaller_causal_size_is_the_optimal_low_rank_head() -> None:
    from causal_qwen.conversion.convert import head_error

    base = tiny_base(False, torch.float32)
    model = CausalQwenForCausalLM.from_qwen(base, causal_size=20)
    singular = torch.linalg.svdvals(base.lm_head.weight.double())
    best = float((singular[20:].square().sum() / singular.square().sum()).sqrt())
    assert head_error(base, model) == pytest.approx(best, rel=1e-4)


@torch.no_grad()
def test_saved_model_loads_as_plain_qwen2(tmp_path: Any) -> None:
    base = tiny_base(True, torch.float32)
    CausalQwenForCausalLM.from_qwen(base).save_pretrained(tmp_path)
    with quiet():
        plain = Qwen2ForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(90)[None]
    assert torch.equal(plain(ids).logits, base(ids).logits)


@torch.no_grad()
def test_plain_qwen2_directory_loads_calibrated(tmp_path: Any) -> None:
    base = tiny_base(True, torch.float32)
    base.save_pretrained(tmp_path)
    model = CausalQwenForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(90)[None]
    assert model.config.model_type == "causal_qwen2"
    assert torch.equal(model.decision.choose(model(ids).s_dist), base(ids).logits.argmax(-1))
    assert model.generation_config.noise_gain > 0


@torch.no_grad()
def test_converted_llama_model_has_the_same_logits() -> None:
    torch.manual_seed(5)
    llama = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    model = CausalQwenForCausalLM.from_qwen(llama)
    ids = torch.arange(90)[None]
    assert torch.equal(model(ids).logits, llama(ids).logits)


@torch.no_grad()
def test_calibrated_values_survive_saving(tmp_path: Any) -> None:
    model = CausalQwenForCausalLM.from_qwen(tiny_base(True, torch.float32))
    model.save_pretrained(tmp_path)
    again = CausalQwenForCausalLM.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    for name in ("noise_gain", "fresh_noise_gain", "min_density"):
        assert getattr(again.generation_config, name) == getattr(model.generation_config, name)


@pytest.mark.parametrize("how", ["loaded", "cast"])
@torch.no_grad()
def test_equal_scales_survive_a_change_of_precision(tmp_path: Any, how: str) -> None:
    model = CausalQwenForCausalLM.from_qwen(tiny_base(True, torch.float32))
    model.save_pretrained(tmp_path)
    if how == "loaded":
        model = CausalQwenForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    else:
        model = model.to(torch.bfloat16)
    scale = model(torch.arange(50)[None]).scale_S
    torch.testing.assert_close(scale, scale[:1, :1, :1].expand_as(scale), rtol=1e-5, atol=0)


@torch.no_grad()
def test_trained_decision_noise_survives_a_change_of_precision() -> None:
    model = CausalQwenForCausalLM.from_qwen(tiny_base(True, torch.float32))
    model.action.decision_noise.mul_(torch.rand(TINY["vocab_size"]))
    before = model.action.decision_noise.clone()
    assert torch.equal(model.to(torch.bfloat16).action.decision_noise, before)
