"""The chain, stage by stage: embedding, abduction, action, and the output that holds them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from causal_qwen.decoding.decision import SCALE_FLOOR
from causal_qwen.decoding.noise import UNoise
from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.abduction import (
    AbductionNetwork,
    Float32Module,
)
from causal_qwen.modeling.action import score_pair
from causal_qwen.modeling.value_space import embed_values, symlog

Make = Callable[..., Any]
ACTIVATIONS = ("exp", "softplus", "abs")
NUM = 61  # the id of <NUM> in these tests

B, T, H, C, V = 3, 7, 32, 24, 97


def ids(seed: int = 0, rows: int = B, length: int = T, vocabulary: int = V) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (rows, length), generator=generator)


def close(actual: Tensor, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    wanted = expected.detach().double().numpy() if isinstance(expected, Tensor) else expected
    np.testing.assert_allclose(actual.detach().double().numpy(), wanted, rtol=rtol, atol=atol)


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


# --- embedding


def test_log_encoding_adds_the_signed_logarithm_along_the_direction(make_model: Make) -> None:
    model = make_model(num_token_id=NUM)
    direction = array(model.model.value_direction)
    tokens = torch.tensor([[5, NUM, 8], [NUM, NUM, 0]])
    values = torch.tensor([[0.0, 99.9, 0.0], [-3.0, 0.0, 7.0]])  # the 7.0 is not at a <NUM>
    expected = array(model.model.embed_tokens(tokens)).copy()
    expected[0, 1] += math.log(100.9) * direction
    expected[1, 0] -= math.log(4.0) * direction
    close(model.model.embed(tokens, values), expected)


def test_sigmoid_encoding_multiplies_the_number_token(make_model: Make) -> None:
    model = make_model(num_token_id=NUM, numeric_encoding="sigmoid")
    tokens = torch.tensor([[5, NUM, 8], [NUM, NUM, 0]])
    values = torch.tensor([[0.0, 2.0, 0.0], [-3.0, 0.0, 7.0]])
    expected = array(model.model.embed_tokens(tokens)).copy()
    expected[0, 1] /= 1 + math.exp(-2.0)
    expected[1, 0] /= 1 + math.exp(3.0)
    expected[1, 1] /= 2
    close(model.model.embed(tokens, values), expected)


def test_values_equal_in_bfloat16_have_different_embeddings() -> None:
    """999000, 1000500 and 1020000 are one number in bfloat16 logarithms: 13.8125."""
    million = torch.tensor([[999_000.0, 1_000_500.0, 1_020_000.0]])
    assert len(set(symlog(million).bfloat16().flatten().tolist())) == 1
    embeddings = torch.zeros(1, 3, 4, dtype=torch.bfloat16)
    embeddings[..., 0] = -13.8125
    direction = torch.tensor([1.0, 0.0, 0.0, 0.0])
    is_number = torch.ones(1, 3, dtype=torch.bool)
    out = embed_values(embeddings, million, is_number, direction, "log")
    assert out.dtype == torch.bfloat16
    assert len(set(out[0, :, 0].tolist())) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_without_numbers_is_embedded_bit_for_bit_as_in_qwen2(
    make_pair: Make, dtype: torch.dtype
) -> None:
    base, model = make_pair(num_token_id=NUM)
    base, model = base.to(dtype), model.to(dtype)
    tokens = ids()
    tokens[tokens == NUM] = 0
    values = torch.zeros(B, T)
    with torch.no_grad():
        expected = base(tokens).logits
        assert torch.equal(model(tokens).logits, expected)
        assert torch.equal(model(tokens, numeric_values=values).logits, expected)


def test_value_changes_later_positions_only(make_model: Make) -> None:
    model = make_model(num_token_id=NUM)
    tokens = ids()
    tokens[:, 3] = NUM
    values = torch.zeros(B, T)
    with torch.no_grad():
        before = model(tokens, numeric_values=values).logits
        values[1, 3] = 12.5
        after = model(tokens, numeric_values=values).logits
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1, :3], after[1, :3])
    assert (before[1, 3:] - after[1, 3:]).abs().amax(-1).min() > 1e-3


# --- abduction


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_abduction_is_one_linear_map_per_parameter(make_config: Make, activation: str) -> None:
    network = AbductionNetwork(make_config(causal_size=C, scale_activation=activation))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    z = torch.randn(B, T, H, generator=generator)
    u = network(z)
    loc, scale = network.loc, network.scale
    close(u.loc, array(z) @ array(loc.weight).T + array(loc.bias))
    raw = array(z) @ array(scale.weight).T + array(scale.bias)
    expected = {"exp": np.exp(raw), "softplus": np.log1p(np.exp(raw)), "abs": np.abs(raw) + 1e-6}
    close(u.scale, expected[activation])


@pytest.mark.parametrize("size", [C, H, H + 9])
def test_identity_initialisation_keeps_the_first_features(fresh_model: Make, size: int) -> None:
    model = fresh_model(causal_size=size)
    assert torch.equal(model.abduction.loc.weight, torch.eye(size, H))
    assert not model.abduction.loc.bias.any()
    with torch.no_grad():
        z = model.model(ids()).last_hidden_state
        loc = model(ids()).loc_U
    kept = min(size, H)
    assert torch.equal(loc[..., :kept], z[..., :kept])
    assert not loc[..., kept:].any()


# --- action


@pytest.mark.parametrize("head_bias", [False, True])
def test_exogenous_noise_changes_the_scale_only(make_model: Make, head_bias: bool) -> None:
    """loc_S = W loc_U; scale_S = |W| (scale_U + |b|) + |a| mean(scale_U + |b|)."""
    model = make_model(causal_size=C, head_bias=head_bias)
    with torch.no_grad():
        out = model(ids())
    weight, a = array(model.lm_head.weight), np.abs(array(model.action.decision_noise))
    widened = array(out.scale_U) + np.abs(array(model.action.b_noise))
    loc = np.einsum("vc,btc->btv", weight, array(out.loc_U))
    if head_bias:
        loc = loc + array(model.lm_head.bias)
    scale = np.einsum("vc,btc->btv", np.abs(weight), widened)
    scale = scale + a * widened.mean(-1, keepdims=True)
    close(out.loc_S, loc)
    close(out.scale_S, scale)
    value = model.action.value
    w = array(value.weight)[0]
    close(out.loc_Y, array(out.loc_U) @ w + array(value.bias))
    close(out.scale_Y, widened @ np.abs(w))


@pytest.mark.parametrize("head_bias", [False, True])
@pytest.mark.parametrize("regime", ["individual", "location"])
def test_noise_shifts_the_last_position(make_model: Make, regime: str, head_bias: bool) -> None:
    """shift_S = W (noise * scale_U) for an individual, W (noise * |b|) for location noise."""
    model = make_model(causal_size=C, head_bias=head_bias)
    noise = torch.randn(B, C, generator=torch.Generator().manual_seed(2)) * 50
    with torch.no_grad():
        still = model(ids())
        moved = model(ids(), u_noise=UNoise(noise, regime))
    size = still.scale_U[:, -1] if regime == "individual" else model.action.b_noise.abs()
    expected = (array(noise) * array(size)) @ array(model.lm_head.weight).T
    assert moved.shift_S.shape == (B, 1, V)
    close(moved.shift_S[:, 0], expected, atol=1e-4)
    close(moved.logits, still.logits, atol=1e-5)  # loc_S itself stays
    close(moved.scale_S, still.scale_S)
    assert still.shift_S is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cauchy_noise_does_not_overflow_half_precision(
    make_model: Make, dtype: torch.dtype
) -> None:
    head = make_model(causal_size=C).lm_head.to(dtype)
    loc = torch.randn(B, C, generator=torch.Generator().manual_seed(4)).to(dtype)
    shift = torch.full((B, C), 3e8)
    with torch.no_grad():
        scores, moved = score_pair(loc, shift, head)
    assert scores.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    expected = 3e8 * array(head.weight).sum(-1)
    close(moved / 3e8, np.tile(expected / 3e8, (B, 1)), rtol=tolerance, atol=tolerance)


def test_head_bias_does_not_round_the_noise_in_bfloat16(make_model: Make) -> None:
    head = make_model(causal_size=C, head_bias=True).lm_head.to(torch.bfloat16)
    shift = torch.randn(B, C, generator=torch.Generator().manual_seed(4)) * 100
    with torch.no_grad():
        head.bias.fill_(30.0)
        _, moved = score_pair(torch.zeros(B, C, dtype=torch.bfloat16), shift, head)
    expected = array(shift) @ array(head.weight).T
    error = np.abs(array(moved) - expected).max() / np.abs(expected).max()
    assert error < 0.02


def test_act_equals_the_forward_pass_after_abduction(make_model: Make) -> None:
    model = make_model(causal_size=C)
    with torch.no_grad():
        out = model(ids())
        s, y = model.act(out.u_dist)
    assert torch.equal(s.loc, out.loc_S)
    assert torch.equal(s.scale, out.scale_S)
    assert torch.equal(y.loc, out.loc_Y)
    assert torch.equal(y.scale, out.scale_Y)


def test_equalised_decision_noise_gives_every_token_the_same_scale(fresh_model: Make) -> None:
    from causal_qwen.conversion.calibration import set_decision_noise

    model = fresh_model(gamma_init=0.3)
    set_decision_noise(model)
    norms = array(model.lm_head.weight.abs().sum(-1))
    close(model.action.decision_noise, norms.max() - norms)
    with torch.no_grad():
        scale = array(model(ids()).scale_S)
    close(torch.from_numpy(scale), np.full((B, T, V), 0.6 * norms.max()), rtol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_zero_row_of_the_head_has_the_scale_floor_and_no_nan(make_model: Make, tied: bool) -> None:
    """`pad_token_id` zeroes its embedding row, and with it the tied head's."""
    model = make_model(tie_word_embeddings=tied)
    with torch.no_grad():
        model.action.decision_noise.zero_()
        model.lm_head.weight[5] = 0.0
    out = model(ids(), labels=ids())
    assert (out.scale_S[..., 5] == torch.tensor(SCALE_FLOOR)).all()
    p = model.decision(out.s_dist)
    assert torch.isfinite(p).all()
    assert float(p[..., 5].detach().max()) < 1e-10  # loc 0 is below every threshold here
    out.loss.backward()
    assert torch.isfinite(out.loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name
    generated = model.generate(ids(), max_new_tokens=3, pad_token_id=5)
    assert generated.shape == (B, T + 3)


# --- parameters that stay in float32

FLOAT32 = {
    "abduction.scale.weight",
    "abduction.scale.bias",
    "action.b_noise",
    "action.decision_noise",
    "action.value.weight",
    "action.value.bias",
    "decision.threshold",
}
NARROW = {"lm_head.weight", "abduction.loc.weight", "model.embed_tokens.weight"}

CASTS: dict[str, Callable[[Any], Any]] = {
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "to(float16)": lambda model: model.to(torch.float16),
    "half()": lambda model: model.half(),
    "bfloat16()": lambda model: model.bfloat16(),
    "to(device, dtype)": lambda model: model.to("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS)
def test_narrowing_the_model_keeps_causal_parameters_in_float32(
    make_model: Make, cast: str
) -> None:
    model = make_model(causal_size=C)
    before = copy.deepcopy(model.state_dict())
    after = CASTS[cast](model).state_dict()
    for name in FLOAT32:
        assert after[name].dtype == torch.float32, name
        assert torch.equal(after[name], before[name]), name
    for name in NARROW:
        assert after[name].dtype.itemsize == 2, name


def test_gradients_survive_a_narrowing_cast() -> None:
    class Lonely(Float32Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

    module = Lonely()
    module.weight.sum().backward()
    module.half()
    assert module.weight.dtype == torch.float32
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loading_in_half_precision_keeps_causal_parameters_in_float32(
    make_model: Make, tmp_path: Any, dtype: torch.dtype
) -> None:
    model = make_model(causal_size=C)
    model.save_pretrained(tmp_path)
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    state = loaded.state_dict()
    for name in FLOAT32 | {"model.value_direction"}:
        assert state[name].dtype == torch.float32, name
        assert torch.equal(state[name], model.state_dict()[name]), name
    for name in NARROW:
        assert state[name].dtype == dtype, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cauchy_parameters_are_computed_in_float32_in_a_narrow_model(
    make_model: Make, dtype: torch.dtype
) -> None:
    model = make_model(causal_size=C).to(dtype)
    with torch.no_grad():
        out = model(ids())
        z = model.model(ids()).last_hidden_state
    assert out.logits.dtype == dtype
    assert out.scale_U.dtype == out.scale_S.dtype == out.scale_Y.dtype == torch.float32
    scale = model.abduction.scale
    expected = np.exp(array(z) @ array(scale.weight).T + array(scale.bias))
    close(out.scale_U, expected)
    widened = expected + np.abs(array(model.action.b_noise))
    a = np.abs(array(model.action.decision_noise))
    per_token = np.einsum("vc,btc->btv", np.abs(array(model.lm_head.weight)), widened)
    close(out.scale_S, per_token + a * widened.mean(-1, keepdims=True))


# --- the output


def test_score_scales_can_be_omitted(make_model: Make) -> None:
    model = make_model(causal_size=C)
    with torch.no_grad():
        out, whole = model(ids(), output_scale_S=False), model(ids())
    assert out.scale_S is None
    assert torch.equal(out.logits, whole.logits)
    with pytest.raises(ValueError, match="output_scale_S"):
        out.s_dist  # noqa: B018 - the property itself is what raises


def test_omitting_score_scales_skips_the_second_product(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(causal_size=C)
    calls: list[bool] = []
    plain = model.lm_head.forward

    def counted(x: Tensor, absolute: bool = False, transposed: bool = False) -> Tensor:
        calls.append(absolute)
        return plain(x, absolute, transposed)

    monkeypatch.setattr(model.lm_head, "forward", counted)
    with torch.no_grad():
        model(ids(), output_scale_S=False)
        assert calls == [False]
        model(ids())
    assert calls == [False, False, True]


def test_logits_to_keep_applies_to_every_part_of_the_output(make_model: Make) -> None:
    model = make_model(causal_size=C)
    with torch.no_grad():
        whole, last = model(ids()), model(ids(), logits_to_keep=2)
        some = model(ids(), logits_to_keep=torch.tensor([1, 4]))
    for name in ("logits", "loc_U", "scale_U", "scale_S", "loc_Y", "scale_Y"):
        close(last[name], whole[name][:, -2:])
        close(some[name], whole[name][:, [1, 4]])


# --- resizing


def norms(model: Any) -> Tensor:
    return model.lm_head.weight.detach().abs().sum(-1)


@pytest.mark.parametrize("size", [V + 14, V - 20])
@pytest.mark.parametrize("head_bias", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_resizing_the_vocabulary_keeps_the_tokens_that_stay(
    make_model: Make, tied: bool, head_bias: bool, size: int
) -> None:
    model = make_model(tie_word_embeddings=tied, head_bias=head_bias)
    kept = min(size, V)
    tokens = ids(vocabulary=V - 20)
    with torch.no_grad():
        before = model(tokens)
        model.resize_token_embeddings(size)
        after = model(tokens)
    assert model.config.vocab_size == after.logits.shape[-1] == size
    close(after.logits[..., :kept], before.logits[..., :kept])
    close(after.scale_S[..., :kept], before.scale_S[..., :kept])
    assert len(model.decision.threshold) == len(model.action.decision_noise) == size
    assert model.decision.threshold.requires_grad
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert model.decision.threshold.grad.shape == (size,)
    for mode in ("standard", "sampling", "causal", "compatible"):
        out = model.generate(tokens, max_new_tokens=2, pad_token_id=0, causal_mode=mode)
        assert out.shape == (B, T + 2)
        assert int(out.max()) < size


def test_new_tokens_start_with_the_mean_threshold_and_scale(make_model: Make) -> None:
    model = make_model()
    threshold = model.decision.threshold.detach().median()
    usual = (norms(model) + model.action.decision_noise.detach().abs()).median()
    model.resize_token_embeddings(V + 3)
    assert (model.decision.threshold[V:] == threshold).all()
    expected = usual - norms(model)[V:]
    assert (expected > 0).all()
    close(model.action.decision_noise[V:], expected)


def test_equal_scales_stay_equal_when_tokens_are_added(fresh_model: Make) -> None:
    from causal_qwen.conversion.calibration import set_decision_noise

    model = fresh_model(gamma_init=0.3)
    set_decision_noise(model)
    model.resize_token_embeddings(V + 14)
    with torch.no_grad():
        out = model(ids())
    scale = array(out.scale_S)
    assert scale.max() / scale.min() - 1 < 1e-5
    assert torch.equal(model.decision.choose(out.s_dist), out.logits.argmax(-1))


def test_resized_model_survives_saving(make_model: Make, tmp_path: Any) -> None:
    model = make_model()
    model.resize_token_embeddings(V + 14)
    model.save_pretrained(tmp_path)
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids()).logits, model(ids()).logits)
        assert torch.equal(loaded(ids()).scale_S, model(ids()).scale_S)
