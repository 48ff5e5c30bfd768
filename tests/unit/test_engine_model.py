"""The NumPy engine on whole tiny models: the same numbers and the same tokens as the torch side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from causal_qwen.decoding.decision import choose, choose_pruned
from causal_qwen.individuals import Individual
from causal_qwen.numpy_engine import Engine, KeyValueCache, greedy_decode, qwen2
from causal_qwen.numpy_engine.weights import read_tensors, widen

PROMPT = [5, 17, 44, 3, 96, 60, 21, 8, 33, 71]
NUM = 7  # the id of <NUM>


@pytest.fixture
def saved(tmp_path: Path, make_model: Callable[..., Any]) -> Callable[..., Any]:
    """`saved(**fields)`: (a tiny torch model, the engine of its saved directory)."""

    def make(dtype: torch.dtype = torch.float32, **fields: Any) -> tuple[Any, Engine]:
        model = make_model(**fields).to(dtype)
        model.decision.threshold.data[NUM] = -1.0  # wanted often
        model.generation_config.noise_gain = 2.0
        model.generation_config.fresh_noise_gain = 1.5
        model.save_pretrained(tmp_path)
        return model, Engine.from_pretrained(tmp_path)

    return make


def plain(tmp_path: Path, fields: dict[str, Any], **more: Any) -> tuple[Any, Engine]:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**{**fields, **more})).eval()
    for layer in model.model.layers:  # biases are 0 in a fresh model
        for name in ("q_proj", "k_proj", "v_proj"):
            torch.nn.init.normal_(getattr(layer.self_attn, name).bias, std=0.5)
    model.save_pretrained(tmp_path)
    return model, Engine.from_pretrained(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tie_word_embeddings": False},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ],
    ids=["tied", "untied", "yarn"],
)
@pytest.mark.parametrize("block", [512, 16])
def test_logits_equal_qwen2s(
    more: dict[str, Any],
    block: int,
    tmp_path: Path,
    tiny_fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(qwen2, "BLOCK", block)
    model, engine = plain(tmp_path, tiny_fields, **more)
    ids = np.random.default_rng(1).integers(0, 97, (2, 50))
    expected = model(torch.from_numpy(ids)).logits.numpy()
    truth = model.double()(torch.from_numpy(ids)).logits.numpy()
    ours = engine.logits(ids)
    assert np.abs(ours - truth).max() <= 3 * np.abs(expected - truth).max() + 1e-6
    assert np.array_equal(ours.argmax(-1), expected.argmax(-1))


def test_cached_is_uncached_and_the_cache_grows(
    tmp_path: Path, tiny_fields: dict[str, Any]
) -> None:
    _, engine = plain(tmp_path, tiny_fields)
    model = engine.model
    ids = np.random.default_rng(1).integers(0, 97, (1, 40))
    whole = engine.logits(ids)
    cache = KeyValueCache(model.config, capacity=4)
    parts = [model.forward(model.embed(part), cache) for part in np.split(ids, [9, 10, 11, 30], 1)]
    assert np.abs(model.logits(np.concatenate(parts, 1)) - whole).max() < 1e-5 * np.abs(whole).max()
    assert cache.length == 40


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_greedy_decode_takes_the_sources_arguments(
    tied: bool, tmp_path: Path, tiny_fields: dict[str, Any]
) -> None:
    model, _ = plain(tmp_path, tiny_fields, tie_word_embeddings=tied)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    config = {name: tiny_fields[name] for name in (*names, "num_key_value_heads")}
    config |= {"rms_norm_eps": 1e-6, "rope_theta": 10000, "hidden_act": "silu"}
    parameters = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if tied:
        del parameters["lm_head.weight"]
    ids = greedy_decode(PROMPT, parameters, config, max_new_tokens=20)
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False)
    assert ids.tolist() == expected[0].tolist()
    assert greedy_decode([PROMPT], parameters, config, 20, int(ids[12])).shape == (1, 13)


@torch.no_grad()
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"causal_size": 24},
        {"tie_word_embeddings": False, "head_bias": True, "scale_activation": "softplus"},
        {"scale_activation": "abs", "value_space": "linear", "numeric_encoding": "sigmoid"},
        {"threshold_context": "competition"},
    ],
    ids=["tied", "smaller U", "untied with bias", "abs and sigmoid", "bar"],
)
def test_every_mode_generates_the_text_of_torch(
    fields: dict[str, Any], saved: Callable[..., Any]
) -> None:
    """Token for token and value for value, with <NUM> in the prompt and in the answer."""
    model, engine = saved(num_token_id=NUM, **fields)
    prompt, values = [*PROMPT, NUM, 50], [0.0] * 10 + [-1234.5, 0.0]
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, 12).long()}
    said = 0
    for options in (
        {"mode": "standard"},
        {"mode": "causal", "individual": 3},
        {"mode": "causal", "individual": 4, "temperature": 0.3, "min_density": 0.1},
        {"mode": "causal", "individual": 5, "persistence": 0.0},
        {"mode": "sampling", "individual": 6},
        {"mode": "sampling", "individual": 8, "top_k": 5, "top_p": 0.9},
        {"mode": "sampling", "individual": 8, "noise_gain": 0.5, "persistence": 1.0},
        {"mode": "compatible"},
        {"mode": "compatible", "repetition_penalty": 1.5},
        {"mode": "compatible", "normalization": "ovr"},
    ):
        ours = engine.generate(prompt, numeric_values=values, max_new_tokens=25, **options)
        theirs = model.generate(
            **inputs,
            numeric_values=torch.tensor([values], dtype=torch.float64),
            max_new_tokens=25,
            return_dict_in_generate=True,
            causal_mode=options["mode"],
            **{name: value for name, value in options.items() if name != "mode"},
        )
        assert ours.ids.tolist() == theirs.sequences[0].tolist(), options
        expected = theirs.numeric_values[0].numpy()
        assert np.allclose(ours.numeric_values, expected, rtol=1e-3, atol=1e-4), options
        said += int((ours.ids[ours.new] == NUM).sum())
    assert said > 0  # some number was spoken, and read again


@torch.no_grad()
def test_an_individual_given_by_hand_is_the_torch_sides(saved: Callable[..., Any]) -> None:
    model, engine = saved()
    noise = np.random.default_rng(3).uniform(0.05, 0.95, 32)
    somebody = Individual.draw(32, seed=9, min_density=0.2, temperature=0.7)
    moody = Individual.draw(32, seed=9, fresh=True)
    for mode, who in (
        ("causal", {"individual": noise}),
        ("causal", {"individual": somebody}),
        ("causal", {"individual": moody, "exogenous": 5}),
        ("sampling", {"individual": moody}),
        (
            "sampling",
            {"individual": Individual.draw(32, seed=1).mix(Individual.draw(32, seed=3), 0.5)},
        ),
    ):
        ours = engine.generate(PROMPT, mode=mode, max_new_tokens=12, **who)
        theirs = model.generate(torch.tensor([PROMPT]), causal_mode=mode, max_new_tokens=12, **who)
        assert ours.ids.tolist() == theirs[0].tolist(), who
    with pytest.raises(ValueError, match="contradicts"):
        engine.generate(PROMPT, mode="causal", individual=somebody, temperature=0.1)


@torch.no_grad()
def test_a_text_ends_with_its_stop_token(saved: Callable[..., Any]) -> None:
    _, engine = saved()
    options: dict[str, Any] = {"max_new_tokens": 12, "mode": "standard"}
    free = engine.generate(PROMPT, **options)
    stop = int(free.ids[free.new][3])
    bound = engine.generate(PROMPT, eos_token_id=stop, **options)
    said = free.ids[free.new].tolist()
    assert bound.ids[bound.new].tolist() == said[: said.index(stop) + 1]
    later = engine.generate(PROMPT, eos_token_id=stop, min_new_tokens=12, **options)
    assert stop not in later.ids[later.new]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_halves_run_as_their_float32_copies(
    dtype: torch.dtype, tmp_path: Path, saved: Callable[..., Any]
) -> None:
    _, engine = saved(dtype)
    wide = Engine.from_pretrained(tmp_path, dtype="float32")
    assert engine.model.embedding.stored.dtype.itemsize == 2
    assert wide.model.embedding.stored.dtype == np.float32
    assert np.abs(engine.logits(PROMPT) - wide.logits(PROMPT)).max() < 1e-5
    for mode in ("standard", "compatible"):
        ours = engine.generate(PROMPT, mode=mode, max_new_tokens=20)
        assert ours.ids.tolist() == wide.generate(PROMPT, mode=mode, max_new_tokens=20).ids.tolist()


def test_shards_are_one_checkpoint(tmp_path: Path, make_model: Callable[..., Any]) -> None:
    model = make_model()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = read_tensors(tmp_path / "one"), read_tensors(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(np.array_equal(widen(one[name]), widen(many[name])) for name in one)


def test_the_choice_is_that_of_every_scale_computed(saved: Callable[..., Any]) -> None:
    """Pruning changes nothing, also where it cannot exclude many."""
    _, engine = saved()
    heads = engine.heads
    assert heads is not None
    rng = np.random.default_rng(0)
    for spread in (0.0, 0.1, 2.0):
        for _ in range(30):
            loc = (3 * rng.standard_normal(97)).astype(np.float32)
            scale = np.exp(spread * rng.standard_normal(32)).astype(np.float32)
            whole = choose(loc, heads.score_scale(scale), heads.threshold)
            assert choose_pruned(loc, scale, heads) == whole


def test_stream_yields_each_token_with_its_probability(saved: Callable[..., Any]) -> None:
    _, engine = saved()
    whole = engine.generate(PROMPT, mode="causal", individual=2, max_new_tokens=8)
    steps = list(engine.stream(PROMPT, mode="causal", individual=2, max_new_tokens=8))
    assert [step.token for step in steps] == whole.ids[whole.new].tolist()
    for step in steps:
        assert step.probabilities.sum() == pytest.approx(1)
        best = np.argsort(-step.probabilities)[:3].tolist()
        assert step.likeliest(3) == [(token, step.probabilities[token]) for token in best]


def test_observers_see_every_layer(saved: Callable[..., Any]) -> None:
    _, engine = saved()
    seen: dict[str, Any] = {}
    engine.logits(PROMPT, observe=seen.__setitem__)
    assert [name for name in seen if name.startswith("layer")] == ["layer.0", "layer.1"]
    assert seen["attention.1"].shape == (1, 4, 10, 10)
    assert np.allclose(seen["attention.1"].sum(-1), 1, atol=1e-5)
    assert np.triu(seen["attention.0"][0, 0], 1).max() == 0
