"""The source documents' names and calls: they exist, and they do what the documents say."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import causal_qwen
import causal_qwen_mvp
from causal_qwen.individuals import draw_noise, to_cauchy
from causal_qwen_mvp import (
    AbductionNetwork,
    ActionNetwork,
    CauchyMath,
    CausalMVPOutput,
    CausalQwen2Config,
    CausalQwenMVPForCausalLM,
    OvRClassifier,
)
from causal_qwen_mvp.training import compute_ovr_loss, training_step

B, T, H, V = 3, 5, 24, 83
IDS_MODES = ("standard", "sampling", "causal")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_config(**fields: Any) -> CausalQwen2Config:
    sizes = {
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "eos_token_id": None,
    }
    return CausalQwen2Config(**{**sizes, **fields})


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


@pytest.fixture
def model() -> CausalQwenMVPForCausalLM:
    """A model in which every causal parameter varies, so that leaving one out is seen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CausalQwenMVPForCausalLM(tiny_config()).eval()
    with torch.no_grad():
        model.abduction.loc.bias.copy_(0.3 * normal(H, seed=1))
        model.abduction.scale.weight.copy_(0.3 * normal(H, H, seed=2))
        model.action.b_noise.copy_(0.05 * normal(H, seed=3))
        model.action.decision_noise.copy_(normal(V, seed=4))
        model.decision.threshold.copy_(2 + 0.3 * normal(V, seed=5))
    model.generation_config.noise_gain = 3.0
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(V, (B, T), generator=seeded(7))


# Names


def test_mvp_model_class_is_the_model_class() -> None:
    assert CausalQwenMVPForCausalLM is causal_qwen.CausalQwenForCausalLM
    assert CausalQwen2Config is causal_qwen.CausalQwen2Config
    assert CausalMVPOutput is causal_qwen.CausalQwenOutput


def test_exactly_the_names_of_all_exist() -> None:
    assert dir(causal_qwen_mvp) == sorted(causal_qwen_mvp.__all__)
    for name in causal_qwen_mvp.__all__:
        assert getattr(causal_qwen_mvp, name).__module__.startswith("causal_qwen")
    with pytest.raises(AttributeError, match="InferenceValidator"):
        causal_qwen_mvp.InferenceValidator  # noqa: B018


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "import sys, causal_qwen_mvp; print({'torch', 'transformers'} & set(sys.modules))",
            "set()",
        ),
        (
            "import sys; sys.modules['torch'] = None\n"
            "try:\n    from causal_qwen_mvp import CauchyMath\n"
            "except ImportError as error:\n    print(error)",
            "CausalQwenForCausalLM needs torch, which is not installed: "
            "pip install '.[torch]' in a clone of the project",
        ),
    ],
    ids=["light", "without torch"],
)
def test_package_imports_without_torch_and_names_raise_one_sentence(
    code: str, expected: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=1800, check=True
    )
    assert done.stdout.strip() == expected


# The networks, alone


def test_cauchy_math_maps_locations_by_w_and_scales_by_its_absolute_value() -> None:
    weight = torch.tensor([[1.0, -2.0], [0.0, 3.0]])
    loc = CauchyMath.cauchy_linear_stable_loc(
        torch.tensor([3.0, 4.0]), weight, torch.tensor([10.0, 20.0])
    )
    scale = CauchyMath.cauchy_linear_stable_scale(torch.tensor([0.5, 0.25]), weight)
    assert loc.tolist() == [5.0, 32.0]
    assert scale.tolist() == [1.0, 0.75]


def test_abduction_starts_as_the_identity_with_scale_gamma() -> None:
    network = AbductionNetwork(tiny_config(gamma_init=0.25))
    z = normal(B, T, H)
    loc_U, scale_U = network(z)
    assert torch.equal(loc_U, z)
    torch.testing.assert_close(scale_U, torch.full((B, T, H), 0.25))
    assert torch.equal(network.loc_net.weight, torch.eye(H))


def test_abduction_with_abs_is_the_documents_formula() -> None:
    network = AbductionNetwork(tiny_config(scale_activation="abs", causal_size=H + 6))
    with torch.no_grad():
        network.scale_net.weight.copy_(normal(H + 6, H))
        network.scale_net.bias.zero_()
    z = normal(B, T, H, seed=1)
    torch.testing.assert_close(network(z)[1], (z @ network.scale_net.weight.T).abs() + 1e-6)


@pytest.fixture
def action() -> ActionNetwork:
    network = ActionNetwork(tiny_config())
    with torch.no_grad():
        network.lm_head.weight.copy_(normal(V, H, seed=1))
        network.b_noise.copy_(normal(H, seed=2))  # of either sign: its absolute value counts
    return network


@pytest.fixture
def u() -> tuple[Tensor, Tensor]:
    return normal(B, T, H, seed=3), normal(B, T, H, seed=4).exp()


def test_action_network_is_initialised_from_a_bare_config() -> None:
    config = tiny_config(b_noise_init=0.25)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ActionNetwork(config)
    assert torch.equal(network.b_noise, torch.full((H,), 0.25))
    assert network.lm_head.weight.std().item() == pytest.approx(0.3, rel=0.05)
    assert network.lm_head.bias is None
    assert ActionNetwork(tiny_config()).b_noise[0].item() == pytest.approx(config.initial_gamma)


def test_without_sampling_noise_changes_the_scale_only(
    action: ActionNetwork, u: tuple[Tensor, Tensor]
) -> None:
    loc_U, scale_U = (x.double() for x in u)
    weight, b_noise = action.lm_head.weight.double(), action.b_noise.double()
    loc_S, scale_S = action(*u)
    torch.testing.assert_close(loc_S.double(), loc_U @ weight.T, rtol=1e-5, atol=1e-5)
    expected = (scale_U + b_noise.abs()) @ weight.abs().T
    torch.testing.assert_close(scale_S.double(), expected, rtol=1e-5, atol=0)


def test_with_sampling_noise_changes_the_location_only(
    action: ActionNetwork, u: tuple[Tensor, Tensor]
) -> None:
    loc_U, scale_U = (x.double() for x in u)
    weight, b_noise = action.lm_head.weight.double(), action.b_noise.double()
    loc_S, scale_S = action(*u, do_sample=True, temperature=0.7, generator=seeded(5))

    uniform = torch.rand(B, T, H, generator=seeded(5)).double()
    epsilon = torch.tan(torch.pi * (uniform - 0.5))
    moved = loc_U + 0.7 * b_noise.abs() * epsilon
    bound = (moved.abs() @ weight.abs().T) * 1e-5  # rounding, relative to what was summed
    assert ((loc_S.double() - moved @ weight.T).abs() <= bound).all()
    torch.testing.assert_close(scale_S.double(), scale_U @ weight.abs().T, rtol=1e-5, atol=0)


def test_temperature_acts_on_sampling_only(action: ActionNetwork, u: tuple[Tensor, Tensor]) -> None:
    cold, hot = action(*u, temperature=0.1), action(*u, temperature=9.0)
    assert torch.equal(cold[0], hot[0])
    assert torch.equal(cold[1], hot[1])

    def sampled(temperature: float) -> Tensor:
        return action(*u, do_sample=True, temperature=temperature, generator=seeded(6))[0]

    still = sampled(0.0)
    assert torch.equal(still, action(*u)[0])
    # Cauchy draws are large: half of their linear map is its map of half, up to rounding
    torch.testing.assert_close(
        sampled(2.0) - still, 4 * (sampled(0.5) - still), rtol=1e-3, atol=1e-3
    )
    assert not torch.equal(sampled(2.0), still)


def test_head_bias_starts_at_zero_and_is_added_to_locations_only(
    u: tuple[Tensor, Tensor],
) -> None:
    network = ActionNetwork(tiny_config(head_bias=True))
    before = network(*u)
    with torch.no_grad():
        network.lm_head.bias.add_(1.5)
    after = network(*u)
    torch.testing.assert_close(after[0], before[0] + 1.5)
    assert torch.equal(after[1], before[1])
    torch.testing.assert_close(before[0], u[0] @ network.lm_head.weight.T)


def test_classifier_gives_the_documents_probability() -> None:
    classifier = OvRClassifier(tiny_config(ovr_threshold_init=1.5))
    assert torch.equal(classifier.thresholds, torch.full((V,), 1.5))
    loc_S, scale_S = 3 * normal(B, T, V, seed=1), normal(B, T, V, seed=2).exp()
    p = classifier(loc_S, scale_S)
    expected = 0.5 + torch.atan((loc_S.double() - 1.5) / scale_S.double()) / torch.pi
    torch.testing.assert_close(p.double(), expected, rtol=1e-5, atol=0)


def test_classifier_is_accurate_where_the_documents_form_cancels_in_float32() -> None:
    classifier = OvRClassifier(tiny_config(ovr_threshold_init=100.0))
    p = classifier(torch.zeros(1, 1, V), torch.full((1, 1, V), 1e-6))
    torch.testing.assert_close(p, torch.full((1, 1, V), 1e-8 / math.pi), rtol=1e-5, atol=0)


# The networks, inside the model


def test_networks_of_the_model_compute_the_same_as_the_model(
    model: CausalQwenMVPForCausalLM, ids: Tensor
) -> None:
    output = model(ids)
    hidden = model.model(ids).last_hidden_state
    loc_U, scale_U = model.abduction_network(hidden)
    loc_S, scale_S = model.action_network(loc_U, scale_U)
    for name, value in {
        "loc_U": loc_U,
        "scale_U": scale_U,
        "loc_S": loc_S,
        "scale_S": scale_S,
    }.items():
        assert torch.equal(getattr(output, name), value), name
    assert torch.equal(output.logits, loc_S)
    assert torch.equal(model.ovr_classifier(loc_S, scale_S), model.decision(output.s_dist))


# inference


def test_standard_inference_takes_the_most_probable_token_of_every_position(
    model: CausalQwenMVPForCausalLM, ids: Tensor
) -> None:
    output = model(ids)
    p = model.ovr_classifier(output.loc_S.double(), output.scale_S.double())
    chosen = model.inference(ids)
    assert chosen.shape == (B, T)
    assert torch.equal(chosen, p.argmax(-1))
    assert not torch.equal(chosen, output.logits.argmax(-1)), "the widths have no say here"


@pytest.mark.parametrize("is_fresh", [False, True], ids=["shared", "fresh"])
def test_causal_inference_uses_one_individual(
    model: CausalQwenMVPForCausalLM, ids: Tensor, is_fresh: bool
) -> None:
    chosen = model.inference(
        ids, "causal", individual=[4, 5, 6], temperature=0.8, persistence=0.0 if is_fresh else 1.0
    )
    output = model(ids)
    for row, seed in enumerate([4, 5, 6]):
        for place in range(T):
            noise = to_cauchy(draw_noise(seed, H, place if is_fresh else 0))
            scale = output.scale_U[row, place].double()
            u = output.loc_U[row, place].double() + 0.8 * 3.0 * scale * torch.from_numpy(noise)
            scores = model.lm_head.weight.double() @ u - model.decision.threshold.double()
            assert chosen[row, place] == scores.argmax(), (row, place)


def test_sampling_inference_shifts_the_location_by_exogenous_noise(
    model: CausalQwenMVPForCausalLM, ids: Tensor
) -> None:
    chosen = model.inference(ids, "sampling", individual=4, noise_gain=5.0)
    output = model(ids)
    weight, b_noise = model.lm_head.weight.double(), model.action.b_noise.double().abs()
    for row in range(B):
        for place in range(T):
            noise = torch.from_numpy(to_cauchy(draw_noise(4, H, place)))
            scale = output.scale_U[row, place].double()
            loc_S = weight @ (output.loc_U[row, place].double() + 5.0 * b_noise * noise)
            own = model.action.decision_noise.double().abs() * scale.mean()
            scale_S = weight.abs() @ scale + own
            p = model.ovr_classifier(loc_S, scale_S)
            assert chosen[row, place] == p.argmax(), (row, place)


def test_compatible_inference_is_the_softmax_of_the_logits(
    model: CausalQwenMVPForCausalLM, ids: Tensor
) -> None:
    logits = model(ids).logits
    model.generation_config.update(do_sample=True, temperature=0.3, top_k=2, top_p=0.4)
    p = model.inference(ids, "compatible")
    torch.testing.assert_close(p, logits.softmax(-1))
    cold = model.inference(ids, "compatible", temperature=0.5)
    torch.testing.assert_close(cold, (logits / 0.5).softmax(-1))
    few = model.inference(ids, "compatible", top_k=4)
    assert torch.equal((few > 0).sum(-1), torch.full((B, T), 4))
    torch.testing.assert_close(few.sum(-1), torch.ones(B, T))


@pytest.mark.parametrize("mode", IDS_MODES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 3},
        {"temperature": 0.5, "min_density": 0.05},
        {"persistence": 0.5, "min_p": 0.2},
        {"persistence": 0.5},
    ],
)
def test_last_position_predicts_the_next_token_of_generate(
    model: CausalQwenMVPForCausalLM, mode: str, options: dict[str, Any]
) -> None:
    ids = torch.randint(V, (4, 6), generator=seeded(1))
    mask = torch.tensor([[1] * 6, [0] + [1] * 5, [0] * 3 + [1] * 3, [1] * 6])
    if mode != "standard":
        options = {**options, "individual": 11}
    chosen = model.inference(ids, mode, attention_mask=mask, **options)
    generated = model.generate(
        ids, attention_mask=mask, max_new_tokens=1, causal_mode=mode, do_sample=None, **options
    )
    assert torch.equal(chosen[:, -1], generated[:, -1])


# generate_step_by_step


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("standard", {}),
        ("causal", {"individual": [1, 2, 3]}),
        ("causal", {"individual": 1, "persistence": 0.0, "temperature": 2.0}),
        ("sampling", {"individual": 9, "noise_gain": 10.0}),
    ],
)
def test_generate_step_by_step_repeats_inference(
    model: CausalQwenMVPForCausalLM, ids: Tensor, mode: str, options: dict[str, Any]
) -> None:
    text = ids
    for _ in range(6):
        text = torch.cat([text, model.inference(text, mode, **options)[:, -1:]], dim=-1)
    assert torch.equal(model.generate_step_by_step(ids, 6, mode, **options), text)


@pytest.mark.parametrize("normalization", ["softmax", "ovr"])
def test_generate_step_by_step_draws_compatible_tokens_from_the_whole_distribution(
    model: CausalQwenMVPForCausalLM, ids: Tensor, normalization: str
) -> None:
    draws = 4000
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)  # flat enough that every token is drawn
    p = model.inference(ids[:1], "compatible", normalization=normalization)[0, -1].double()
    prompts = ids[:1].expand(draws, -1)
    torch.manual_seed(3)
    text = model.generate_step_by_step(prompts, 1, "compatible", normalization=normalization)
    counts = torch.bincount(text[:, -1], minlength=V).double()
    # 83 tokens at 4.5 standard deviations: one false alarm in 2000 seeds, and the seed is fixed
    assert ((counts - draws * p).abs() <= 4.5 * (draws * p * (1 - p)).sqrt() + 1).all()
    assert (p.sort().values[: V - 50] * draws > 10).all(), "a cut to 50 tokens would go unseen"


def test_every_row_ends_at_its_own_end_token(model: CausalQwenMVPForCausalLM, ids: Tensor) -> None:
    free = model.generate_step_by_step(ids, 6)
    end = int(free[0, T])
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = 0
    ended = model.generate_step_by_step(ids, 6)
    assert ended[0, T] == end
    assert (ended[0, T + 1 :] == 0).all()
    others = [row for row in range(1, B) if end not in free[row, T:]]
    assert others, "every row ends where the first one does"
    for row in others:
        assert torch.equal(ended[row], free[row])


# debug_forward_pass and training


def test_debug_pass_shows_every_stage_and_returns_the_scores(
    model: CausalQwenMVPForCausalLM, ids: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    loc_S, scale_S = model.debug_forward_pass(ids)
    output = model(ids)
    assert torch.equal(loc_S, output.loc_S)
    assert torch.equal(scale_S, output.scale_S)
    shown = capsys.readouterr().out
    for shape in ((B, T, H), (B, T, V)):
        assert str(shape) in shown
    for value in (output.loc_U, output.scale_U, output.loc_S, output.scale_S):
        assert f"{value.median():.4g} [{value.min():.4g}, {value.max():.4g}]" in shown
    assert "mean" not in shown
    assert not loc_S.requires_grad


def test_training_step_gives_the_models_loss(model: CausalQwenMVPForCausalLM, ids: Tensor) -> None:
    labels = ids.clone()
    labels[:, :2] = -100
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    loss = training_step(model, batch)
    assert torch.equal(loss, model(**batch).loss)
    assert torch.equal(loss, model.training_step(batch))
    loss.backward()
    assert model.action.b_noise.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="labels"):
        model.training_step({"input_ids": ids})


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_ovr_loss_is_the_documents_cross_entropy_of_the_next_token(
    model: CausalQwenMVPForCausalLM, ids: Tensor, reduction: str
) -> None:
    model.config.ovr_reduction = reduction
    output = model(ids)
    p = model.ovr_classifier(output.loc_S.double(), output.scale_S.double())[:, :-1]
    targets = F.one_hot(ids[:, 1:], V).double()
    expected = F.binary_cross_entropy(p, targets, reduction="mean")
    if reduction == "sum":
        expected = expected * V
    loss = compute_ovr_loss(model, output, ids)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(loss, model(ids, labels=ids).loss)
