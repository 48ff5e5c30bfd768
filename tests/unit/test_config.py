"""Configuration fields: each exists, is saved, has an effect, and raises for invalid values."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import causal_qwen.modeling.loss
from causal_qwen.model import CausalQwenForCausalLM, CausalQwenModel
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.modeling.one_vs_rest import LossSettings, one_vs_rest
from causal_qwen.modeling.value_space import symlog

Make = Callable[..., Any]

B, T, H, C, V = 3, 7, 32, 24, 97
NUM = 61

# field -> (its default, another value that is legal)
FIELDS: dict[str, tuple[Any, Any]] = {
    "causal_size": (None, C),
    "scale_activation": ("exp", "softplus"),
    "abduction_init_strategy": ("identity", "xavier"),
    "gamma_init": ("auto", 0.5),
    "b_noise_init": ("auto", 0.25),
    "ovr_threshold_init": ("auto", -3.5),
    "b_noise_trainable": (True, False),
    "threshold_trainable": (True, False),
    "decision_noise": ("equalize", "zero"),
    "threshold_context": ("none", "competition"),
    "head_bias": (False, True),
    "inference_mode": ("standard", "compatible"),
    "num_token_id": (None, NUM),
    "numeric_encoding": ("log", "sigmoid"),
    "value_direction_trainable": (False, True),
    "value_space": ("symlog", "linear"),
    "value_fields": (None, {"default": [1.5, 0.5]}),
    "encode_numbers": ("text", "value"),
    "classification_loss_weight": (1.0, 0.25),
    "regression_loss_weight": (1.0, 4.0),
    "compat_loss_weight": (0.0, 1.5),
    "gate_alpha": (0.0, 0.4),
    "gate_grad": (False, True),
    "ovr_reduction": ("sum", "mean"),
    "loss_chunk_size": ("auto", 4),
    "loss_precision": ("exact", "fast"),
}


def ids() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))


def numbers() -> dict[str, Tensor]:
    tokens = ids()
    tokens[:, 3] = NUM
    values = torch.zeros(B, T)
    values[:, 3] = torch.tensor([5.0, -70.0, 900.0])
    return {"input_ids": tokens, "numeric_values": values, "labels": tokens}


# --- defaults and keeping


def test_fields_are_exactly_those_of_the_contract() -> None:
    inherited = {field.name for field in dataclasses.fields(Qwen2Config)}
    ours = {field.name for field in dataclasses.fields(CausalQwen2Config)} - inherited
    assert ours == set(FIELDS)
    assert CausalQwen2Config.model_type == "causal_qwen2"


@pytest.mark.parametrize("field", FIELDS)
def test_field_has_its_documented_default(field: str) -> None:
    default, _ = FIELDS[field]
    declared = {f.name: f.default for f in dataclasses.fields(CausalQwen2Config)}
    assert declared[field] == default
    assert type(declared[field]) is type(default)
    if field == "causal_size":
        assert CausalQwen2Config(hidden_size=48).causal_size == 48
    else:
        assert getattr(CausalQwen2Config(), field) == default


@pytest.mark.parametrize("field", FIELDS)
def test_field_survives_saving_and_loading(field: str, make_config: Make, tmp_path: Path) -> None:
    _, other = FIELDS[field]
    config = make_config(**{field: other})
    assert getattr(config, field) == other
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[field] == other
    for loaded in (
        CausalQwen2Config.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
        CausalQwen2Config.from_dict(config.to_dict()),
    ):
        assert type(loaded) is CausalQwen2Config
        assert getattr(loaded, field) == other
        assert loaded.to_dict() == config.to_dict() | {
            name: loaded.to_dict()[name] for name in ("_name_or_path",) if name in loaded.to_dict()
        }


# --- every field is read: changing it changes something

Probe = Callable[[Make, Make], None]
PROBES: dict[str, Probe] = {}


def probe(check: Probe) -> Probe:
    PROBES[check.__name__] = check
    return check


def twins(make_model: Make, field: str, **fields: Any) -> tuple[Any, Any]:
    """Two models that differ in one field, and share every parameter they both have."""
    plain = make_model(**fields)
    changed = make_model(**fields, **{field: FIELDS[field][1]})
    changed.load_state_dict(plain.state_dict(), strict=False)
    return plain, changed


def loss(model: Any) -> float:
    with torch.no_grad():
        return float(model(**numbers()).loss)


@probe
def causal_size(fresh: Make, make: Make) -> None:
    assert fresh().lm_head.weight.shape == (V, H)
    model = fresh(causal_size=C)
    assert model.lm_head.weight.shape == (V, C)
    assert model(ids()).loc_U.shape == (B, T, C)


@probe
def scale_activation(fresh: Make, make: Make) -> None:
    plain, changed = twins(make, "scale_activation")
    with torch.no_grad():
        raw = plain(ids()).scale_U.log()
        torch.testing.assert_close(changed(ids()).scale_U, raw.exp().log1p())
    assert fresh(gamma_init=0.5, scale_activation="abs").abduction.scale.bias[
        0
    ].item() == pytest.approx(0.5 - 1e-6)


@probe
def abduction_init_strategy(fresh: Make, make: Make) -> None:
    assert torch.equal(fresh().abduction.loc.weight, torch.eye(H))
    weight = fresh(abduction_init_strategy="xavier").abduction.loc.weight.detach()
    assert weight.std() == pytest.approx(math.sqrt(2 / (H + H)), rel=0.1)


@probe
def gamma_init(fresh: Make, make: Make) -> None:
    with torch.no_grad():
        scale = fresh(gamma_init=0.5)(ids()).scale_U
    torch.testing.assert_close(scale, torch.full((B, T, H), 0.5))


@probe
def b_noise_init(fresh: Make, make: Make) -> None:
    assert torch.equal(fresh(b_noise_init=0.25).action.b_noise, torch.full((H,), 0.25))


@probe
def ovr_threshold_init(fresh: Make, make: Make) -> None:
    assert torch.equal(fresh().decision.threshold, torch.full((V,), 5.0))
    changed = fresh(ovr_threshold_init=-3.5).decision.threshold
    assert torch.equal(changed, torch.full((V,), -3.5))


@probe
def b_noise_trainable(fresh: Make, make: Make) -> None:
    frozen = fresh(b_noise_trainable=False)
    assert fresh().action.b_noise.requires_grad
    assert not frozen.action.b_noise.requires_grad
    frozen(ids(), labels=ids()).loss.backward()
    assert frozen.action.b_noise.grad is None


@probe
def threshold_trainable(fresh: Make, make: Make) -> None:
    frozen = fresh(threshold_trainable=False)
    assert fresh().decision.threshold.requires_grad
    assert not frozen.decision.threshold.requires_grad
    frozen(ids(), labels=ids()).loss.backward()
    assert frozen.decision.threshold.grad is None


@probe
def threshold_context(fresh: Make, make: Make) -> None:
    plain, changed = twins(make, "threshold_context")
    s = plain(ids()).s_dist
    over = Cauchy(s.loc.log_softmax(-1), s.scale)
    torch.testing.assert_close(changed.decision(s), over.sf(changed.decision.threshold))
    assert not torch.equal(changed.decision(s), plain.decision(s))
    assert torch.equal(fresh(threshold_context="competition").decision.threshold, torch.zeros(V))


@probe
def decision_noise(fresh: Make, make: Make) -> None:
    from causal_qwen.conversion.calibration import set_decision_noise

    plain, changed = twins(make, "decision_noise")
    for model in (plain, changed):
        set_decision_noise(model)
    norms = plain.lm_head.weight.detach().abs().sum(-1)
    torch.testing.assert_close(plain.action.decision_noise.detach(), norms.max() - norms)
    assert not changed.action.decision_noise.any()


@probe
def head_bias(fresh: Make, make: Make) -> None:
    plain, changed = twins(make, "head_bias")
    assert plain.lm_head.bias is None
    with torch.no_grad():
        difference = changed(ids()).logits - plain(ids()).logits
    expected = changed.lm_head.bias.detach().expand(B, T, V)
    torch.testing.assert_close(difference, expected, rtol=0, atol=1e-4)
    assert changed.lm_head.bias.requires_grad


@probe
def inference_mode(fresh: Make, make: Make) -> None:
    plain, changed = twins(make, "inference_mode")
    prompts = torch.randint(V, (9, T), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = plain(prompts)
    by_logits, by_p = out.logits[:, -1].argmax(-1), plain.decision.choose(out.s_dist)[:, -1]
    assert not torch.equal(by_logits, by_p)
    one = {"max_new_tokens": 1, "pad_token_id": 0}
    assert torch.equal(plain.generate(prompts, **one)[:, -1], by_p)
    assert torch.equal(changed.generate(prompts, **one)[:, -1], by_logits)


@probe
def num_token_id(fresh: Make, make: Make) -> None:
    plain, changed = twins(make, "num_token_id")
    data = numbers()
    with pytest.raises(ValueError, match="num_token_id"):
        plain(**data)
    embedded = changed.model.embed(data["input_ids"], data["numeric_values"])
    moved = (embedded - changed.model.embed_tokens(data["input_ids"])).abs().sum(-1) > 0
    assert torch.equal(moved, data["input_ids"] == NUM)


@probe
def numeric_encoding(fresh: Make, make: Make) -> None:
    plain, changed = twins(make, "numeric_encoding", num_token_id=NUM)
    tokens, values = torch.tensor([[NUM]]), torch.tensor([[7.0]])
    row = plain.model.embed_tokens.weight[NUM].detach()
    by_log = row + symlog(values[0]) * plain.model.value_direction
    torch.testing.assert_close(plain.model.embed(tokens, values)[0, 0].detach(), by_log.detach())
    by_sigmoid = row / (1 + math.exp(-7.0))
    torch.testing.assert_close(changed.model.embed(tokens, values)[0, 0].detach(), by_sigmoid)


@probe
def value_direction_trainable(fresh: Make, make: Make) -> None:
    plain, changed = twins(make, "value_direction_trainable", num_token_id=NUM)
    assert not plain.model.value_direction.requires_grad
    changed(**numbers()).loss.backward()
    assert changed.model.value_direction.grad.any()
    assert "model.value_direction" in plain.state_dict()


@probe
def value_space(fresh: Make, make: Make) -> None:
    plain, changed = twins(make, "value_space", num_token_id=NUM)
    data = numbers()
    with torch.no_grad():
        as_log = plain(**data).loss
        compressed = {**data, "numeric_targets": symlog(data["numeric_values"])}
        torch.testing.assert_close(changed(**compressed).loss, as_log)
    assert loss(plain) != pytest.approx(loss(changed), rel=1e-3)


@probe
def value_fields(fresh: Make, make: Make) -> None:
    plain, changed = twins(make, "value_fields", num_token_id=NUM, value_space="linear")
    data = numbers()
    standardised = {**data, "numeric_targets": (data["numeric_values"] - 1.5) / 0.5}
    with torch.no_grad():
        torch.testing.assert_close(changed(**data).loss, plain(**standardised).loss)
    assert loss(plain) != pytest.approx(loss(changed), rel=1e-3)


@probe
def encode_numbers(fresh: Make, make: Make) -> None:
    plain, changed = twins(make, "encode_numbers", num_token_id=NUM)
    tokens = torch.tensor([[1, 2]])
    assert plain.generate(tokens, max_new_tokens=1).shape == (1, 3)
    with pytest.raises(ValueError, match="value"):
        changed.generate(tokens, max_new_tokens=1)


@probe
def classification_loss_weight(fresh: Make, make: Make) -> None:
    only = {"num_token_id": NUM, "regression_loss_weight": 0.0}
    plain, changed = twins(make, "classification_loss_weight", **only)
    assert loss(changed) == pytest.approx(0.25 * loss(plain), rel=1e-5)


@probe
def regression_loss_weight(fresh: Make, make: Make) -> None:
    only = {"num_token_id": NUM, "classification_loss_weight": 0.0}
    plain, changed = twins(make, "regression_loss_weight", **only)
    assert loss(changed) == pytest.approx(4.0 * loss(plain), rel=1e-5)


@probe
def compat_loss_weight(fresh: Make, make: Make) -> None:
    plain, changed = twins(make, "compat_loss_weight", num_token_id=NUM)
    data = numbers()
    with torch.no_grad():
        logits = plain(**data).logits[:, :-1].flatten(0, 1)
    cross_entropy = torch.nn.functional.cross_entropy(logits, data["labels"][:, 1:].flatten())
    assert loss(changed) - loss(plain) == pytest.approx(1.5 * float(cross_entropy), rel=1e-4)


@probe
def gate_alpha(fresh: Make, make: Make) -> None:
    only = {"num_token_id": NUM, "classification_loss_weight": 0.0}
    plain, changed = twins(make, "gate_alpha", **only)
    opened = make(**only, gate_alpha=1.0)
    opened.load_state_dict(plain.state_dict())
    expected = 0.4 * loss(opened) + 0.6 * loss(plain)  # the gate is linear in alpha
    assert loss(changed) == pytest.approx(expected, rel=1e-5)
    assert loss(changed) != pytest.approx(loss(plain), rel=1e-2)


@probe
def gate_grad(fresh: Make, make: Make) -> None:
    only = {"num_token_id": NUM, "classification_loss_weight": 0.0}
    plain, changed = twins(make, "gate_grad", **only)
    for model in (plain, changed):
        model(**numbers()).loss.backward()
    assert not plain.decision.threshold.grad.any()
    assert changed.decision.threshold.grad[NUM] != 0


@probe
def ovr_reduction(fresh: Make, make: Make) -> None:
    only = {"num_token_id": NUM, "regression_loss_weight": 0.0}
    plain, changed = twins(make, "ovr_reduction", **only)
    assert loss(changed) == pytest.approx(loss(plain) / V, rel=1e-5)


@probe
def loss_chunk_size(fresh: Make, make: Make) -> None:
    plain, changed = twins(make, "loss_chunk_size", num_token_id=NUM)
    chunks: list[int] = []

    def spy(u: Any, head: Any, labels: Tensor, settings: LossSettings) -> Any:
        chunks.append(settings.chunk)
        return one_vs_rest(u, head, labels, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_qwen.modeling.loss, "one_vs_rest", spy)
        assert loss(changed) == pytest.approx(loss(plain), rel=1e-6)
    assert chunks == [4, B * (T - 1)]


@probe
def loss_precision(fresh: Make, make: Make) -> None:
    plain, changed = twins(make, "loss_precision", num_token_id=NUM)
    with pytest.MonkeyPatch.context() as patch:  # also where the processor has no bfloat16
        patch.setattr(causal_qwen.modeling.one_vs_rest, "has_bfloat16", lambda device: True)
        assert loss(changed) != loss(plain)
        assert loss(changed) == pytest.approx(loss(plain), rel=4e-3)


@pytest.mark.parametrize("field", FIELDS)
def test_changing_a_field_changes_something(
    field: str, fresh_model: Make, make_model: Make
) -> None:
    PROBES[field](fresh_model, make_model)


# --- the auto values


def test_auto_gamma_makes_probabilities_of_a_fresh_model_sum_to_about_1() -> None:
    config = CausalQwen2Config(
        vocab_size=5003,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = CausalQwenForCausalLM(config)
    with torch.no_grad():
        total = model.decision(model(ids()).s_dist).sum(-1)
    assert 0.8 < float(total.median()) < 1.25
    assert torch.equal(model.action.b_noise, torch.full((64,), config.initial_gamma))


@pytest.mark.parametrize("threshold", [2.0, 5.0, 20.0])
def test_auto_gamma_follows_its_formula(make_config: Make, threshold: float) -> None:
    """gamma + b = pi C / (V r), r the expected row norm; each takes half."""
    config = make_config(ovr_threshold_init=threshold, initializer_range=0.02)
    row_norm = H * 0.02 * math.sqrt(2 / math.pi)
    assert config.initial_gamma == pytest.approx(math.pi * threshold / (V * row_norm) / 2)
    assert config.initial_b_noise == config.initial_gamma
    assert make_config(gamma_init=0.7).initial_b_noise == 0.7
    assert make_config(gamma_init=0.7, b_noise_init=0).initial_b_noise == 0


# --- invalid values

INVALID: list[tuple[dict[str, Any], str]] = [
    ({"causal_size": 0}, r"causal_size=0"),
    ({"causal_size": C, "tie_word_embeddings": True}, rf"causal_size={C} .* hidden_size={H}"),
    ({"scale_activation": "relu"}, r"scale_activation='relu' .* exp, softplus, abs"),
    ({"gamma_init": -1.0}, r"gamma_init=-1\.0 .* \"auto\""),
    ({"ovr_threshold_init": math.inf}, r"ovr_threshold_init=inf"),
    (
        {"inference_mode": "greedy"},
        r"inference_mode='greedy' .* standard, sampling, causal, compat",
    ),
    ({"num_token_id": V}, rf"num_token_id={V} .* {V}"),
    ({"value_fields": {"a": [0.0, 0.0]}}, r"value_fields\['a'\]=.* above 0"),
    ({"regression_loss_weight": math.nan}, r"regression_loss_weight=nan"),
    ({"gate_alpha": 1.5}, r"gate_alpha=1\.5"),
    ({"loss_chunk_size": "big"}, r"loss_chunk_size='big' .*auto"),
]


@pytest.mark.parametrize(
    ("fields", "message"),
    INVALID,
    ids=["-".join(map(str, fields.values())) for fields, _ in INVALID],
)
def test_invalid_value_raises_with_field_value_and_cure(
    make_config: Make, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**fields)


# --- the state dict

ADDED = {
    "abduction.loc.weight": ("C", "H"),
    "abduction.loc.bias": ("C",),
    "abduction.scale.weight": ("C", "H"),
    "abduction.scale.bias": ("C",),
    "action.b_noise": ("C",),
    "action.decision_noise": ("V",),
    "action.value.weight": (1, "C"),
    "action.value.bias": (1,),
    "decision.threshold": ("V",),
    "decision.word_edges": ("V",),
    "model.value_direction": ("H",),
}


def shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize("direction", [False, True])
@pytest.mark.parametrize("size", [None, H, C], ids=["tied", "untied", "smaller C"])
def test_state_dict_is_the_base_models_plus_the_causal_parameters(
    make_model: Make, tiny_fields: dict[str, Any], size: int | None, direction: bool, tmp_path: Path
) -> None:
    tied = size is None
    model = make_model(
        causal_size=size, tie_word_embeddings=tied, value_direction_trainable=direction
    )
    base = Qwen2ForCausalLM(Qwen2Config(**{**tiny_fields, "tie_word_embeddings": tied}))
    sizes = {"C": size or H, "H": H, "V": V, 1: 1}
    expected = shapes(base.state_dict())
    expected["lm_head.weight"] = (V, size or H)
    expected |= {name: tuple(sizes[axis] for axis in axes) for name, axes in ADDED.items()}
    assert shapes(model.state_dict()) == expected

    model.save_pretrained(tmp_path)
    if tied:
        expected.pop("lm_head.weight")  # saved once, as the embedding
    assert shapes(load_file(tmp_path / "model.safetensors")) == expected


@pytest.mark.parametrize("size", [None, C], ids=["tied", "smaller C"])
def test_saved_model_loads_bit_for_bit(make_model: Make, tmp_path: Path, size: int | None) -> None:
    model = make_model(causal_size=size, head_bias=True, num_token_id=NUM)
    model.save_pretrained(tmp_path)
    for loader in (CausalQwenForCausalLM, AutoModelForCausalLM):
        loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is CausalQwenForCausalLM
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        state = loaded.state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(state[name], tensor), name
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (size is None)


def test_base_model_class_loads_the_backbone(make_model: Make, tmp_path: Path) -> None:
    model = make_model(num_token_id=NUM)
    model.save_pretrained(tmp_path)
    backbone = CausalQwenModel.from_pretrained(tmp_path).eval()
    data = {name: numbers()[name] for name in ("input_ids", "numeric_values")}
    with torch.no_grad():
        expected = model.model(**data).last_hidden_state
        assert torch.equal(backbone(**data).last_hidden_state, expected)


# --- from a plain Qwen2 configuration


def test_plain_qwen2_configuration_becomes_causal(
    tiny_fields: dict[str, Any], tmp_path: Path
) -> None:
    plain = Qwen2Config(**tiny_fields, rope_parameters={"rope_type": "default", "rope_theta": 7e5})
    plain.architectures = ["Qwen2ForCausalLM"]
    plain.save_pretrained(tmp_path)
    for config in (
        CausalQwen2Config.from_pretrained(tmp_path),
        CausalQwen2Config.from_base(plain),
    ):
        assert type(config) is CausalQwen2Config
        assert config.to_dict()["model_type"] == "causal_qwen2"
        assert config.architectures != ["Qwen2ForCausalLM"]
        for name in tiny_fields:
            assert getattr(config, name) == getattr(plain, name), name
        assert config.rope_parameters["rope_theta"] == 7e5
        for field, (default, _) in FIELDS.items():
            assert getattr(config, field) == (H if field == "causal_size" else default)


def test_overrides_replace_fields_of_a_plain_configuration(
    tiny_fields: dict[str, Any], tmp_path: Path
) -> None:
    plain = Qwen2Config(**tiny_fields)
    config = CausalQwen2Config.from_base(plain, inference_mode="causal", gate_alpha=0.2)
    assert (config.inference_mode, config.gate_alpha) == ("causal", 0.2)
    plain.save_pretrained(tmp_path)
    config = CausalQwen2Config.from_pretrained(tmp_path, inference_mode="causal")
    assert config.inference_mode == "causal"


def test_other_architecture_raises_by_name(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=H, num_attention_heads=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'llama'.*CausalLlamaConfig for this one"):
        CausalQwen2Config.from_pretrained(tmp_path)
