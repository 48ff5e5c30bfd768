"""The four modes inside `generate`: each against a plain loop written from the specification."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    BaseStreamer,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopPLogitsWarper,
)

from causal_qwen.decoding.decision import choose
from causal_qwen.decoding.noise import UNoise
from causal_qwen.individuals import draw_noise, to_cauchy
from causal_qwen.model import CausalQwenForCausalLM

Make = Callable[..., Any]

B, T, H, C, V = 3, 7, 32, 24, 97
NEW = 12
MODES = ("standard", "sampling", "causal", "compatible")
NOISY = ("sampling", "causal")
SEED, GAIN = 5, 0.6


def prompts(rows: int = B, length: int = T, seed: int = 0) -> Tensor:
    """Without token 0, which is the padding here: generate() would mask it."""
    return torch.randint(1, V, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model(make_model: Make) -> Any:
    return make_model(causal_size=C)


@pytest.fixture(scope="module")
def pair(make_pair: Make) -> Any:
    """(Qwen2, ours with its weights)"""
    return make_pair()


@pytest.fixture
def own(make_model: Make) -> Any:
    """A model that a test may change."""
    return make_model(causal_size=C)


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What generation logs, said for the first time or not."""
    heard: list[str] = []

    def hear(message: object, *args: object, **kwargs: object) -> None:
        heard.append(str(message))

    for logger in ("transformers.generation.utils.logger", "causal_qwen.generation.mixin.logger"):
        for level in ("warning", "warning_once"):
            monkeypatch.setattr(f"{logger}.{level}", hear)
    return heard


def options(mode: str, **more: Any) -> dict[str, Any]:
    """What makes a run of `mode` repeatable."""
    noise = {"individual": SEED, "noise_gain": GAIN} if mode in NOISY else {}
    return {
        "causal_mode": mode,
        "max_new_tokens": NEW,
        "pad_token_id": 0,
        **noise,
        **more,
    }


def generate(model: Any, ids: Tensor, mode: str, **more: Any) -> list[list[int]]:
    """Only the new tokens."""
    out = model.generate(ids, **options(mode, **more))
    return out[:, ids.shape[1] :].tolist()


@torch.no_grad()
def by_hand(
    model: Any,
    prompt: Tensor,
    mode: str,
    *,
    seed: int = SEED,
    noise: Sequence[float] | None = None,
    temperature: float = 1.0,
    gain: float = GAIN,
    min_density: float = 0.0,
    fresh: bool | None = None,
    processors: Sequence[LogitsProcessor] = (),
    steps: int = NEW,
) -> list[int]:
    """One prompt (T,), no cache, no padding, one token after the other, as section 4 says."""
    weight, threshold = model.lm_head.weight.double(), model.decision.threshold.double()
    bias = 0.0 if model.lm_head.bias is None else model.lm_head.bias.double()
    b, a = model.action.b_noise.double().abs(), model.action.decision_noise.double().abs()
    fresh = (mode == "sampling") if fresh is None else fresh
    ids = prompt[None]
    for _ in range(steps):
        out = model(ids)
        loc_u, scale_u = out.loc_U[0, -1].double(), out.scale_U[0, -1].double()
        e = (
            noise
            if noise is not None
            else draw_noise(seed, len(b), ids.shape[1] - 1 if fresh else 0)
        )
        t = temperature * gain * torch.from_numpy(np.asarray(to_cauchy(e, min_density)))
        loc = weight @ loc_u + bias
        for processor in processors:
            loc = processor(ids, loc[None].float())[0].double()
        if mode == "causal":
            token = (loc + weight @ (t * scale_u) - threshold).argmax()
        elif mode == "compatible":
            token = loc.argmax()
        else:
            if mode == "sampling":
                loc = loc + weight @ (t * b)
            else:
                scale_u = scale_u + b
            token = choose(loc, weight.abs() @ scale_u + a * scale_u.mean(), threshold)
        ids = torch.cat([ids, token.reshape(1, 1)], dim=1)
    return ids[0, prompt.shape[0] :].tolist()


def all_by_hand(model: Any, ids: Tensor, mode: str, **more: Any) -> list[list[int]]:
    return [by_hand(model, row, mode, **more) for row in ids]


# --- what each mode does


@pytest.mark.parametrize("head_bias", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_generates_the_choices_of_its_rule(
    make_model: Make, mode: str, head_bias: bool
) -> None:
    model = make_model(causal_size=C, head_bias=head_bias)
    assert generate(model, prompts(), mode) == all_by_hand(model, prompts(), mode)


def test_modes_generate_different_texts(model: Any) -> None:
    """The guard of every comparison in this file: no two modes agree by accident."""
    texts = [str(generate(model, prompts(), mode)) for mode in MODES]
    assert len(set(texts)) == len(MODES)
    for mode in MODES:  # and a text is not one token over and over
        assert max(len(set(row)) for row in generate(model, prompts(), mode)) > 4


@pytest.mark.parametrize("mode", NOISY)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 2.0])
def test_temperature_scales_the_noise(model: Any, mode: str, temperature: float) -> None:
    expected = all_by_hand(model, prompts(), mode, temperature=temperature)
    assert generate(model, prompts(), mode, temperature=temperature) == expected


def test_temperature_changes_nothing_in_standard(model: Any) -> None:
    expected = generate(model, prompts(), "standard")
    for temperature in (0.0, 0.1, 5.0):
        assert generate(model, prompts(), "standard", temperature=temperature) == expected


@pytest.mark.parametrize("mode", NOISY)
@pytest.mark.parametrize("min_density", [0.01, 0.5])
def test_min_density_truncates_the_noise(model: Any, mode: str, min_density: float) -> None:
    expected = all_by_hand(model, prompts(), mode, min_density=min_density, gain=2.0)
    actual = generate(model, prompts(), mode, min_density=min_density, noise_gain=2.0)
    assert actual == expected
    assert actual != generate(model, prompts(), mode, noise_gain=2.0)


@pytest.mark.parametrize("mode", NOISY)
@pytest.mark.parametrize("fresh", [True, False])
def test_noise_can_be_fresh_or_shared_in_either_mode(model: Any, mode: str, fresh: bool) -> None:
    expected = all_by_hand(model, prompts(), mode, fresh=fresh)
    assert generate(model, prompts(), mode, persistence=0.0 if fresh else 1.0) == expected
    is_default = fresh == (mode == "sampling")
    assert (generate(model, prompts(), mode) == expected) == is_default


def test_fresh_noise_has_a_gain_of_its_own(own: Any) -> None:
    own.generation_config = GenerationConfig(noise_gain=0.3, fresh_noise_gain=0.9)
    plain = {"causal_mode": "causal", "individual": SEED, "max_new_tokens": NEW, "pad_token_id": 0}

    def run(**more: Any) -> list[list[int]]:
        return own.generate(prompts(), **plain | more)[:, T:].tolist()

    assert run() == all_by_hand(own, prompts(), "causal", gain=0.3)
    assert run(persistence=0.0) == all_by_hand(own, prompts(), "causal", gain=0.9, fresh=True)
    sampled = run(causal_mode="sampling")
    assert sampled == all_by_hand(own, prompts(), "sampling", gain=0.9)
    given = run(causal_mode="sampling", noise_gain=0.5)  # what the caller says is what counts
    assert given == all_by_hand(own, prompts(), "sampling", gain=0.5)


# --- the promise


@pytest.fixture(scope="module")
def promised(make_pair: Make) -> Any:
    """(Qwen2, ours as a conversion leaves it): equalised noise, constant scales and thresholds."""
    from causal_qwen.conversion.calibration import set_decision_noise

    base, model = make_pair()
    set_decision_noise(model)
    with torch.no_grad():
        model.abduction.scale.weight.zero_()
        model.abduction.scale.bias.fill_(-2.0)
        model.action.b_noise.fill_(0.1)
        model.decision.threshold.fill_(5.0)
    return base, model


@pytest.mark.parametrize("mode", MODES)
def test_untrained_model_at_temperature_0_generates_qwen2s_text_in_every_mode(
    promised: Any, mode: str
) -> None:
    base, model = promised
    ids = prompts(rows=5)
    expected = base.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    still = {"temperature": 0.0} if mode in NOISY else {}
    assert generate(model, ids, mode, max_new_tokens=20, **still) == expected[:, T:].tolist()


# --- which mode runs

CAUSAL: dict[str, Any] = {"causal_mode": "causal"}
# config.inference_mode, the model's generation config, the call -> the mode
RESOLUTION: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("standard", {}, {}, "standard"),
    ("sampling", {}, {}, "sampling"),
    ("causal", {}, {}, "causal"),
    ("compatible", {}, {}, "compatible"),
    ("causal", {"causal_mode": "sampling"}, {}, "sampling"),
    ("causal", {"causal_mode": "sampling"}, {"causal_mode": "compatible"}, "compatible"),
    ("causal", {}, {"causal_mode": "standard"}, "standard"),
    ("standard", {}, {"do_sample": True}, "sampling"),
    ("standard", {"do_sample": True}, {}, "sampling"),
    ("standard", {"do_sample": True}, {"do_sample": False}, "standard"),
    ("standard", {"causal_mode": "standard"}, {"do_sample": True}, "sampling"),
    ("standard", {"do_sample": True}, {"causal_mode": "standard"}, "standard"),
    ("standard", {}, {"causal_mode": "sampling"}, "sampling"),
    ("standard", {}, {"causal_mode": "sampling", "do_sample": False}, "sampling"),
    ("standard", {}, {"causal_mode": "causal", "do_sample": True}, "causal"),
    ("standard", {}, {"causal_mode": "causal", "do_sample": False}, "causal"),
    ("causal", {}, {"do_sample": True}, "causal"),
    ("sampling", {}, {"do_sample": False}, "sampling"),
    ("compatible", {}, {"do_sample": False}, "compatible"),
    ("causal", {}, {"do_sample": True, "causal_mode": "sampling"}, "sampling"),
]


@pytest.mark.parametrize(("inference_mode", "saved", "call", "mode"), RESOLUTION)
def test_a_call_runs_in_the_mode_it_resolves_to(
    own: Any, inference_mode: str, saved: dict[str, Any], call: dict[str, Any], mode: str
) -> None:
    own.config.inference_mode = inference_mode
    settings = {"max_new_tokens": NEW, "pad_token_id": 0, "individual": SEED, "noise_gain": GAIN}
    own.generation_config = GenerationConfig(**settings, **saved)
    expected = all_by_hand(own, prompts(), mode)
    assert own.generate(prompts(), **call)[:, T:].tolist() == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_generation_config_given_to_the_call_decides(own: Any, mode: str) -> None:
    own.generation_config = GenerationConfig(causal_mode="causal", noise_gain=77.0)
    given = GenerationConfig(**options(mode, temperature=0.5, do_sample=mode == "sampling"))
    before, saved = given.to_dict(), own.generation_config.to_dict()
    expected = all_by_hand(own, prompts(), mode, temperature=0.5)
    assert own.generate(prompts(), generation_config=given)[:, T:].tolist() == expected
    assert given.to_dict() == before  # and is left as it was
    assert own.generation_config.to_dict() == saved


def test_compatible_with_do_sample_samples_from_the_softmax(pair: Any) -> None:
    base, model = pair
    for seed in range(3):
        torch.manual_seed(seed)
        expected = base.generate(prompts(), do_sample=True, max_new_tokens=NEW, pad_token_id=0)
        torch.manual_seed(seed)
        actual = model.generate(prompts(), **options("compatible", do_sample=True))
        assert torch.equal(actual, expected)


def test_explicit_standard_contradicts_do_sample(model: Any) -> None:
    with pytest.raises(ValueError, match=r"'standard' .* contradicts do_sample=True; use"):
        generate(model, prompts(), "standard", do_sample=True)


@pytest.mark.parametrize("inference_mode", MODES)
def test_beams_without_explicit_mode_run_compatible_with_a_warning(
    own: Any, inference_mode: str, notices: list[str]
) -> None:
    own.config.inference_mode = inference_mode
    more = {"num_beams": 3, "max_new_tokens": NEW, "pad_token_id": 0}
    expected = own.generate(prompts(), causal_mode="compatible", **more)
    assert notices == []
    assert torch.equal(own.generate(prompts(), **more), expected)
    if inference_mode == "compatible":
        assert notices == []
    else:
        assert notices == ["num_beams=3 runs in causal_mode='compatible'."]


@pytest.mark.parametrize("mode", ["standard", "sampling", "causal"])
def test_beams_with_another_explicit_mode_raise(model: Any, mode: str) -> None:
    with pytest.raises(ValueError, match=rf"{mode}.*num_beams=2.*compatible"):
        generate(model, prompts(), mode, num_beams=2)


# --- cached = uncached = batched


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "how",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 3},
        {"cache_implementation": "static", "prefill_chunk_size": 2},
        {"output_scores": True},
    ],
    ids=lambda how: " ".join(how),
)
def test_caches_and_chunks_do_not_change_the_text(
    model: Any, mode: str, how: dict[str, Any]
) -> None:
    assert generate(model, prompts(), mode, **how) == generate(model, prompts(), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_left_padded_batch_generates_the_texts_of_its_rows_alone(
    model: Any, mode: str, use_cache: bool
) -> None:
    rows = [prompts(1, length, seed=length)[0] for length in (3, 7, 5)]
    ids = torch.zeros(3, 7, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, -len(row) :], mask[i, -len(row) :] = row, 1
    batched = generate(model, ids, mode, attention_mask=mask, use_cache=use_cache)
    assert batched == [generate(model, row[None], mode)[0] for row in rows]
    assert batched == [by_hand(model, row, mode) for row in rows]


@pytest.mark.parametrize("mode", MODES)
def test_embeddings_in_place_of_ids_give_the_same_text(model: Any, mode: str) -> None:
    embeddings = model.get_input_embeddings()(prompts())
    out = model.generate(inputs_embeds=embeddings, **options(mode))
    assert out.tolist() == generate(model, prompts(), mode)


# --- individuals


@pytest.mark.parametrize("mode", NOISY)
def test_every_row_has_the_individual_it_was_given(model: Any, mode: str) -> None:
    seeds = [11, 5, 2**63]
    texts = generate(model, prompts(), mode, individual=seeds)
    rows = zip(prompts(), seeds, strict=True)
    assert texts == [by_hand(model, row, mode, seed=seed) for row, seed in rows]


@pytest.mark.parametrize("mode", NOISY)
def test_num_return_sequences_are_successive_individuals(model: Any, mode: str) -> None:
    texts = generate(model, prompts(2), mode, num_return_sequences=3)
    expected = [
        by_hand(model, row, mode, seed=SEED + copy) for row in prompts(2) for copy in range(3)
    ]
    assert texts == expected
    assert len({str(text) for text in texts}) > 3


def test_noise_values_are_accepted_as_individual(model: Any) -> None:
    e = draw_noise(99, C)
    expected = all_by_hand(model, prompts(), "causal", seed=99)
    assert generate(model, prompts(), "causal", individual=e) == expected
    assert generate(model, prompts(), "causal", individual=e.tolist()) == expected
    assert generate(model, prompts(), "causal", individual=torch.from_numpy(e)) == expected
    each = [draw_noise(seed, C) for seed in (1, 2, 3)]
    assert generate(model, prompts(), "causal", individual=np.stack(each)) == [
        by_hand(model, row, "causal", noise=noise)
        for row, noise in zip(prompts(), each, strict=True)
    ]


def test_given_noise_is_shared_by_the_texts_of_a_prompt(model: Any) -> None:
    each = np.stack([draw_noise(seed, C) for seed in (1, 2)])
    texts = generate(model, prompts(2), "causal", individual=each, num_return_sequences=2)
    expected = [by_hand(model, prompts(2)[row], "causal", noise=each[row]) for row in (0, 0, 1, 1)]
    assert texts == expected


@pytest.mark.parametrize("mode", NOISY)
def test_returned_individuals_reproduce_the_text(model: Any, mode: str) -> None:
    torch.manual_seed(3)
    unnamed = {"individual": None, "return_dict_in_generate": True, "num_return_sequences": 2}
    out = model.generate(prompts(), **options(mode, **unnamed))
    assert len(out.individual) == 2 * B
    assert len(set(out.individual)) == 2 * B
    again = generate(model, prompts(), mode, individual=out.individual, num_return_sequences=2)
    assert again == out.sequences[:, T:].tolist()
    alone = generate(model, prompts()[1:2], mode, individual=out.individual[2])
    assert alone == out.sequences[2:3, T:].tolist()


@pytest.mark.parametrize("mode", NOISY)
def test_unnamed_individuals_follow_torchs_seed(model: Any, mode: str) -> None:
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(generate(model, prompts(), mode, individual=None))
    assert texts[0] == texts[1] != texts[2]


# --- processors act on loc_S


class Recorder(LogitsProcessor):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(scores.clone())
        return scores


class Only(LogitsProcessor):
    """Lets only some tokens through."""

    def __init__(self, allowed: list[int]) -> None:
        self.allowed = allowed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = torch.full_like(scores, -math.inf)
        masked[:, self.allowed] = scores[:, self.allowed]
        return masked


@pytest.mark.parametrize("mode", MODES)
def test_processors_see_loc_s_and_nothing_else(model: Any, mode: str) -> None:
    recorder = Recorder()
    out = model.generate(
        prompts(), **options(mode, logits_processor=LogitsProcessorList([recorder]))
    )
    assert len(recorder.seen) == NEW
    with torch.no_grad():
        logits = model(out).logits
    for step, seen in enumerate(recorder.seen):
        torch.testing.assert_close(seen, logits[:, T - 1 + step], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_custom_processor_restricts_the_choice(model: Any, mode: str) -> None:
    only = Only([3, 14, 15, 92, 65])
    actual = generate(model, prompts(), mode, logits_processor=LogitsProcessorList([only]))
    assert actual == all_by_hand(model, prompts(), mode, processors=[only])
    assert {token for row in actual for token in row} <= set(only.allowed)


@pytest.mark.parametrize("mode", MODES)
def test_min_length_suppresses_the_end_of_text_token(model: Any, mode: str) -> None:
    ids = prompts(1)
    plain = generate(model, ids, mode)[0]
    eos = plain[2]
    stopped = generate(model, ids, mode, eos_token_id=eos)[0]
    assert stopped == plain[: plain.index(eos) + 1]
    longer = generate(model, ids, mode, eos_token_id=eos, min_length=T + 8)[0]
    minimum = MinLengthLogitsProcessor(T + 8, eos, device="cpu")
    expected = by_hand(model, ids[0], mode, processors=[minimum])
    assert longer == expected[: len(longer)]
    assert eos not in longer[:8]


@pytest.mark.parametrize("mode", ["standard", "sampling", "causal"])
def test_the_implicit_top_k_of_50_does_not_cut(own: Any, mode: str) -> None:
    with torch.no_grad():
        logits = own(prompts()).logits[:, -1]
        rank = logits.argsort(-1, descending=True).argsort(-1)  # 0 is the best
        outsider = int((rank >= 60).all(0).nonzero()[0])
        own.decision.threshold[outsider] = -1e6
    one = {"max_new_tokens": 1}
    assert generate(own, prompts(), mode, **one) == [[outsider]] * B
    assert generate(own, prompts(), mode, do_sample=None, **one) == [[outsider]] * B
    cut = generate(own, prompts(), mode, top_k=50, **one)
    assert [outsider] not in cut
    assert all(int(rank[row, token]) < 50 for row, (token,) in enumerate(cut))


@pytest.mark.parametrize("mode", ["standard", "sampling", "causal"])
def test_an_explicit_top_p_leaves_the_nucleus_of_the_softmax(model: Any, mode: str) -> None:
    actual = generate(model, prompts(), mode, top_p=0.4)
    nucleus = TopPLogitsWarper(0.4)
    assert actual == all_by_hand(model, prompts(), mode, processors=[nucleus])
    assert actual != generate(model, prompts(), mode)


@pytest.mark.parametrize("mode", ["standard", "sampling", "causal"])
def test_temperature_does_not_widen_the_nucleus(model: Any, mode: str) -> None:
    """Outside `compatible`, temperature acts on noise only."""
    nucleus = TopPLogitsWarper(0.4)
    expected = all_by_hand(model, prompts(), mode, processors=[nucleus], temperature=2.0)
    assert generate(model, prompts(), mode, top_p=0.4, temperature=2.0) == expected


@pytest.mark.parametrize("mode", ["standard", "sampling", "causal"])
def test_saved_warpers_act_as_if_they_were_asked_for(own: Any, mode: str) -> None:
    """Qwen2.5-Instruct's generation_config.json has a temperature, top_k, top_p and a penalty."""
    saved = {"temperature": 0.5, "top_k": 60, "top_p": 0.4, "repetition_penalty": 1.3}
    own.generation_config = GenerationConfig(**saved)
    expected = all_by_hand(
        own,
        prompts(),
        mode,
        temperature=0.5,
        processors=[RepetitionPenaltyLogitsProcessor(1.3), TopPLogitsWarper(0.4)],
    )
    assert generate(own, prompts(), mode) == expected
    given = GenerationConfig(**options(mode))
    assert own.generate(prompts(), generation_config=given)[:, T:].tolist() == expected


# --- streamers, criteria, scores


class Listener(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.has_ended = False

    def put(self, value: Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("mode", MODES)
def test_streamer_receives_every_token(model: Any, mode: str) -> None:
    listener = Listener()
    ids = prompts(1)
    text = generate(model, ids, mode, streamer=listener)[0]
    assert listener.heard == [ids[0].tolist(), *([token] for token in text)]
    assert listener.has_ended


@pytest.mark.parametrize("mode", MODES)
def test_scores_cover_the_vocabulary_and_their_argmax_is_the_token(model: Any, mode: str) -> None:
    more = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(prompts(), **options(mode, **more))
    said = out.sequences[:, T:]
    assert said.tolist() == generate(model, prompts(), mode)
    assert len(out.scores) == len(out.logits) == NEW
    for step, scores in enumerate(out.scores):
        assert torch.isfinite(scores).all()
        assert torch.equal(scores.argmax(-1), said[:, step])


@torch.no_grad()
def test_scores_are_log_p_in_standard_and_the_individuals_margin_in_causal(model: Any) -> None:
    more = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 1}
    first = model(prompts())
    threshold = model.decision.threshold
    standard = model.generate(prompts(), **options("standard", **more)).scores[0]
    log_p = Cauchy64(first.s_dist).log_sf(threshold)[:, -1]
    torch.testing.assert_close(standard.double(), log_p, rtol=1e-4, atol=1e-5)

    causal = model.generate(prompts(), **options("causal", **more)).scores[0]
    t = GAIN * torch.from_numpy(to_cauchy(draw_noise(SEED, C)))
    u = first.loc_U[:, -1].double() + t * first.scale_U[:, -1].double()
    margin = u @ model.lm_head.weight.double().T - threshold.double()
    torch.testing.assert_close(causal.double(), margin, rtol=1e-4, atol=1e-4)

    sampling = model.generate(prompts(), **options("sampling", **more)).scores[0]
    t = GAIN * torch.from_numpy(to_cauchy(draw_noise(SEED, C, position=T - 1)))
    moved = first.loc_U[:, -1].double() + t * model.action.b_noise.double().abs()
    scale_u = first.scale_U[:, -1].double()
    weight = model.lm_head.weight.double()
    scale = scale_u @ weight.abs().T
    scale = scale + model.action.decision_noise.double().abs() * scale_u.mean(-1, keepdim=True)
    p = torch.atan2(scale, threshold.double() - moved @ weight.T) / math.pi
    torch.testing.assert_close(sampling.double(), p.log(), rtol=1e-4, atol=1e-4)


def Cauchy64(dist: Any) -> Any:
    return type(dist)(dist.loc.double(), dist.scale.double())


def test_the_argmax_of_the_scores_respects_ties(own: Any) -> None:
    """Equal scores whose scales differ by rounding: the lowest id, whatever float32 P says."""
    with torch.no_grad():
        own.lm_head.weight[20] = own.lm_head.weight[10]
        own.decision.threshold[[10, 20]] = -1e3
        own.action.decision_noise[10] = 10.0
        own.action.decision_noise[20] = 10.0 * (1 - 2e-6)
        out = own(prompts())
        p = Cauchy64(out.s_dist).log_sf(own.decision.threshold.double())[:, -1]
    assert p.argmax(-1).tolist() == [20] * B
    one = options("standard", max_new_tokens=1)
    assert own.generate(prompts(), **one)[:, -1].tolist() == [10] * B
    full = own.generate(prompts(), **one, output_scores=True, return_dict_in_generate=True)
    assert full.sequences[:, -1].tolist() == [10] * B
    assert full.scores[0].argmax(-1).tolist() == [10] * B
    assert torch.isfinite(full.scores[0]).all()


# --- normalisation by the sum


@torch.no_grad()
def test_ovr_normalisation_samples_from_p_over_its_sum(model: Any) -> None:
    draws = 6000
    ids = prompts(1)
    out = model(ids)
    p = Cauchy64(out.s_dist).sf(model.decision.threshold.double())[0, -1]
    expected = (draws * p / p.sum()).numpy()
    torch.manual_seed(8)
    more = {"do_sample": True, "top_k": 0, "num_return_sequences": draws, "max_new_tokens": 1}
    counts = np.zeros(V)
    for normalization in ("ovr", "softmax"):
        said = model.generate(ids, **options("compatible", normalization=normalization, **more))
        counts = np.bincount(said[:, -1], minlength=V)
        order = np.argsort(expected)
        # rare tokens together, so that every cell is expected often enough
        rare = order[np.cumsum(expected[order]) < 20]
        cells = np.setdiff1d(order, rare)
        observed_cells = np.append(counts[cells], counts[rare].sum())
        expected_cells = np.append(expected[cells], expected[rare].sum())
        keep = expected_cells > 0
        pvalue = stats.chisquare(observed_cells[keep], expected_cells[keep]).pvalue
        if normalization == "ovr":
            assert pvalue > 0.01
        else:
            assert pvalue < 1e-6  # the test can tell the two apart


@torch.no_grad()
def test_ovr_normalisation_without_sampling_takes_the_most_probable(model: Any) -> None:
    greedy = generate(model, prompts(), "compatible", normalization="ovr", max_new_tokens=1)
    assert greedy == model.decision.choose(model(prompts()).s_dist)[:, -1:].tolist()


# --- saved settings


def test_saved_generation_settings_are_kept(own: Any, tmp_path: Path) -> None:
    own.generation_config = GenerationConfig(
        causal_mode="causal", noise_gain=GAIN, min_density=0.01, individual=SEED, pad_token_id=0
    )
    own.save_pretrained(tmp_path)
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path)
    settings = loaded.generation_config
    assert (settings.causal_mode, settings.noise_gain) == ("causal", GAIN)
    assert (settings.min_density, settings.individual) == (0.01, SEED)
    expected = all_by_hand(own, prompts(), "causal", min_density=0.01)
    assert loaded.generate(prompts(), max_new_tokens=NEW)[:, T:].tolist() == expected


# --- what only `compatible` can do: Qwen2's own output


@pytest.mark.parametrize("do_sample", [False, True])
def test_beam_search_equals_qwen2s(pair: Any, do_sample: bool) -> None:
    base, model = pair
    more = {"num_beams": 4, "max_new_tokens": NEW, "pad_token_id": 0, "do_sample": do_sample}
    torch.manual_seed(0)
    expected = base.generate(prompts(), **more)
    torch.manual_seed(0)
    assert torch.equal(model.generate(prompts(), **more), expected)


def test_assisted_decoding_equals_qwen2s(pair: Any) -> None:
    base, model = pair
    more = {"max_new_tokens": NEW, "pad_token_id": 0}
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        for layer in assistant.model.layers:
            layer.mlp.down_proj.weight.mul_(0.9)  # a worse one, so that some drafts are refused
    expected = base.generate(prompts(1), **more, do_sample=False)
    for helper in (assistant, copy.deepcopy(base)):
        assert torch.equal(model.generate(prompts(1), assistant_model=helper, **more), expected)
    assert torch.equal(base.generate(prompts(1), assistant_model=assistant, **more), expected)


def test_prompt_lookup_changes_nothing(pair: Any) -> None:
    base, model = pair
    more = {"max_new_tokens": NEW, "pad_token_id": 0}
    repetitive = prompts(1, 4).repeat(1, 4)
    expected = base.generate(repetitive, **more, do_sample=False)
    actual = model.generate(repetitive, prompt_lookup_num_tokens=3, **more)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("mode", ["standard", "sampling", "causal"])
@pytest.mark.parametrize(
    "how",
    [
        "prompt lookup",
        "an assistant of ours",
        "an assistant of another kind",
    ],
)
def test_assisted_decoding_in_another_mode_is_refused(pair: Any, mode: str, how: str) -> None:
    base, model = pair
    more: dict[str, Any] = {
        "prompt lookup": {"prompt_lookup_num_tokens": 2},
        "an assistant of ours": {"assistant_model": model},
        "an assistant of another kind": {"assistant_model": base},
    }[how]
    with pytest.raises(ValueError, match=rf"'{mode}' .* assisted decoding; use .*compatible"):
        generate(model, prompts(1), mode, **more)


def test_continuous_batching_equals_qwen2s(pair: Any) -> None:
    from transformers import ContinuousBatchingConfig

    base, model = pair
    rows = [prompts(1, length, seed=length)[0].tolist() for length in (6, 4, 5)]
    settings = GenerationConfig(max_new_tokens=8, eos_token_id=V - 1, pad_token_id=0)
    small = ContinuousBatchingConfig(page_size=16, num_blocks=16, max_batch_tokens=32)
    served = model.generate_batch(
        rows, generation_config=settings, continuous_batching_config=small
    )
    texts = {tuple(out.prompt_ids): out.generated_tokens for out in served.values()}
    for row in rows:
        expected = base.generate(torch.tensor([row]), generation_config=settings, do_sample=False)
        assert texts[tuple(row)] == expected[0, len(row) :].tolist()


def test_continuous_batching_in_another_mode_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"causal.*continuous batching.*compatible"):
        model.generate_batch([[1, 2, 3]], causal_mode="causal")
    with pytest.raises(ValueError, match=r"causal.*continuous batching.*compatible"):
        model.init_continuous_batching(GenerationConfig(causal_mode="causal"))


# --- bad arguments

BAD: list[tuple[dict[str, Any], str]] = [
    ({"causal_mode": "wild"}, r"causal_mode='wild'"),
    ({"causal_mode": "causal", "temperature": math.nan}, r"temperature=nan must be"),
    ({"causal_mode": "causal", "temperature": 1e308}, r"temperature=1e\+308 .* at most 1e16"),
    (
        {"causal_mode": "causal", "temperature": 1e308, "noise_gain": 3.0},
        r"temperature=1e\+308 .* at most 1e15",
    ),
    ({"min_density": 1.5}, r"min_density=1\.5"),
    ({"causal_mode": "causal", "noise_gain": [1.0, 2.0]}, r"noise_gain=\[1.0, 2.0\] must be"),
    ({"causal_mode": "standard", "normalization": "ovr"}, r"normalization='ovr'.*'standard'"),
    ({"causal_mode": "standard", "individual": 3}, r"individual=.*'standard'.*'causal'"),
    ({"causal_mode": "causal", "individual": 2**64}, r"seed must lie in \[0, 2\*\*64\)"),
    ({"causal_mode": "causal", "individual": [1, 2, 3, 4]}, r"4 individuals were given for 3"),
    ({"causal_mode": "causal", "individual": [0.5] * (C - 1)}, rf"got shape \({C - 1},\)"),
    ({"causal_mode": "causal", "individual": [1.5] * C}, r"strictly between 0 and 1"),
    ({"cusal_mode": "causal"}, r"cusal_mode"),
    ({"causal_mode": "causal", "persistence": "maybe"}, r"persistence='maybe'"),
]


@pytest.mark.parametrize(
    ("bad", "message"),
    BAD,
    ids=lambda value: (
        "-".join(f"{k}={str(v)[:12]}" for k, v in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_invalid_argument_raises_and_names_it(
    model: Any, bad: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(prompts(), max_new_tokens=2, pad_token_id=0, **bad)


@pytest.mark.parametrize("mode", ["causal", "sampling"])
def test_the_largest_temperature_moves_no_score_to_infinity(model: Any, mode: str) -> None:
    shared = {"causal_mode": mode, "individual": 7, "max_new_tokens": 2, "pad_token_id": 0}
    largest = model.generate(prompts(), temperature=1e16, **shared)
    assert largest.tolist() == model.generate(prompts(), temperature=1e12, **shared).tolist()


def test_nan_weights_raise(own: Any) -> None:
    with torch.no_grad():
        own.lm_head.weight[3, 4] = math.nan
        own.model.embed_tokens.weight[int(prompts()[0, 0])] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        generate(own, prompts(), "standard")


# --- the head changes under a generating model


@pytest.mark.parametrize(
    "edit",
    [
        "in place",
        "new storage",
        "through .data",
    ],
)
def test_the_choice_follows_the_weights_of_the_head(own: Any, edit: str) -> None:
    """As after a training step, a loaded state dict, a merged LoRA: `weight.data += delta`."""
    ids = prompts(rows=9)
    generate(own, ids, "standard")
    factor = torch.rand(V, 1, generator=torch.Generator().manual_seed(0)) * 6
    with torch.no_grad():
        if edit == "in place":
            own.lm_head.weight.mul_(factor)
        elif edit == "new storage":
            own.lm_head.weight = torch.nn.Parameter(own.lm_head.weight * factor)
        else:
            own.lm_head.weight.data *= factor
    assert generate(own, ids, "standard") == all_by_hand(own, ids, "standard")


# --- precisions, training, compilation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", MODES)
def test_half_precision_runs_in_every_mode(own: Any, mode: str, dtype: torch.dtype) -> None:
    own.to(dtype)
    out = own.generate(prompts(), **options(mode, use_cache=False))
    assert out.shape == (B, T + NEW)
    assert torch.equal(out, own.generate(prompts(), **options(mode, use_cache=False)))
    assert len(set(out[:, T:].flatten().tolist())) > 4
    if mode in ("standard", "compatible"):  # what it says is what the whole text's scores say
        with torch.no_grad():
            whole = own(out)
        rule = own.decision.choose(whole.s_dist) if mode == "standard" else whole.logits.argmax(-1)
        agreement = (rule[:, T - 1 : -1] == out[:, T:]).float().mean()
        assert float(agreement) > 0.9  # attention over other lengths rounds differently


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_trains_the_same(make_model: Make, use_reentrant: bool) -> None:
    plain, checkpointed = (make_model(causal_size=C).train() for _ in range(2))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert checkpointed.is_gradient_checkpointing
    for model in (plain, checkpointed):
        model(prompts(), labels=prompts(), use_cache=False).loss.backward()
    for (name, expected), actual in zip(
        plain.named_parameters(), checkpointed.parameters(), strict=True
    ):
        torch.testing.assert_close(actual.grad, expected.grad, msg=name)
    assert plain.model.layers[0].self_attn.q_proj.weight.grad.any()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_one_compiled_graph_gives_the_eager_output(make_model: Make) -> None:
    model = make_model(causal_size=C)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    noise = torch.randn(B, C, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for more in ({}, {"u_noise": UNoise(noise), "output_scale_S": False}):
            eager = model(prompts(), use_cache=False, **more)
            graph = compiled(prompts(), use_cache=False, **more)
            for name in ("logits", "loc_U", "scale_U", "scale_S", "loc_Y", "scale_Y", "shift_S"):
                expected, actual = getattr(eager, name), getattr(graph, name)
                assert (actual is None) == (expected is None), name
                if expected is not None:
                    torch.testing.assert_close(actual, expected, msg=name)


def test_ordinary_calls_log_nothing(model: Any, notices: list[str]) -> None:
    for mode in MODES:
        generate(model, prompts(), mode)
    assert notices == []


# --- the bar of the context


@pytest.fixture(scope="module")
def barred(make_model: Make) -> Any:
    """Scales differ between tokens, so the bar decides between them."""
    return make_model(causal_size=C, threshold_context="competition")


@torch.no_grad()
def test_choices_are_over_the_bar_of_all_scores(barred: Any) -> None:
    ids = prompts(rows=40)
    s = barred(ids).s_dist
    expected = barred.decision.choose(s)
    assert not torch.equal(expected, choose(s.loc, s.scale, barred.decision.threshold))
    assert torch.equal(barred.inference(ids, "standard"), expected)
    for scores in (False, True):  # pruned, and by P itself
        options = {"output_scores": scores, "return_dict_in_generate": True, "max_new_tokens": 1}
        found = barred.generate(ids, causal_mode="standard", **options)
        assert torch.equal(found.sequences[:, -1], expected[:, -1]), scores


@torch.no_grad()
def test_fewer_candidates_do_not_lower_the_bar(barred: Any) -> None:
    """What a processor forbids is not chosen; the other tokens keep their P."""
    ids = prompts(rows=1)
    p = barred.decision(barred(ids).s_dist)[0, -1]
    likely = barred(ids).logits[0, -1].topk(4).indices
    options = {"top_k": 4, "normalization": "ovr", "causal_mode": "compatible", "do_sample": True}
    found = barred.generate(
        ids,
        max_new_tokens=1,
        output_scores=True,
        return_dict_in_generate=True,
        suppress_tokens=[int(likely[0])],
        **options,
    )
    shares = found.scores[0][0].softmax(-1)
    kept = (shares > 0).nonzero().flatten()
    assert int(likely[0]) not in kept.tolist()
    torch.testing.assert_close(shares[kept], p[kept] / p[kept].sum(), rtol=1e-4, atol=0)
