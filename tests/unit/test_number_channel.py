"""The number channel: values through forward, loss and every kind of generation.

The reference is a replay: a finished text is read again without cache, batch or padding, and the
value of each of its numbers is computed by the formula from the values generated before it (not
from the replayed ones: rounding grows when it is fed back).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from causal_qwen.individuals import draw_noise, to_cauchy

NUM, PAD = 11, 0
PROMPT = [3, NUM, 8, 20]
VALUES = [0.0, 42.5, 0.0, 0.0]
NEW = 14
CLOSE = {"rtol": 1e-3, "atol": 1e-3}
NOISE = {"noise_gain": 0.4, "individual": 5}
MODES: dict[str, dict[str, Any]] = {
    "standard": {"causal_mode": "standard"},
    "sampling": {"causal_mode": "sampling", **NOISE},
    "sampling, shared": {"causal_mode": "sampling", "persistence": 1.0, **NOISE},
    "causal": {"causal_mode": "causal", **NOISE},
    "causal, fresh": {"causal_mode": "causal", "persistence": 0.0, **NOISE},
    "compatible": {"causal_mode": "compatible"},
}


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Any]) -> Any:
    """A tiny model that generates numbers often: the bias raises the score of `<NUM>`."""
    model = make_model(num_token_id=NUM, head_bias=True, pad_token_id=PAD)
    with torch.no_grad():
        model.lm_head.bias[NUM] += 8.0
        model.action.value.weight *= 0.3  # rounding grows when values are fed back: not too fast
    return model


def generate(
    model: Any, prompts: list[list[int]], values: list[list[float]], **options: Any
) -> Any:
    """Left-padded prompts -> the result of generate."""
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(row)) + row for row in prompts]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
    padded_values = [[0.0] * (width - len(row)) + row for row in values]
    return model.generate(
        torch.tensor(ids),
        attention_mask=torch.tensor(mask),
        numeric_values=torch.tensor(padded_values, dtype=torch.float64),
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        **options,
    )


@torch.no_grad()
def check_by_replay(model: Any, ids: Tensor, generated: Tensor, start: int, **options: Any) -> None:
    """Values of one finished text, from `start` on, follow its mode's formula."""
    mode, gain = options["causal_mode"], options.get("noise_gain", 0.0)
    is_fresh = options.get("persistence", 0.0 if mode == "sampling" else 1.0) == 0
    head = model.action.value
    for position in range(start, len(ids)):
        if ids[position] != NUM:
            assert generated[position] == 0
            continue
        output = model(ids[None, :position], numeric_values=generated[None, :position])
        u = output.loc_U[0, -1].double()
        if mode in ("sampling", "causal"):
            e = draw_noise(options["individual"], len(u), position - 1 if is_fresh else 0)
            own = output.scale_U[0, -1] if mode == "causal" else model.action.b_noise.abs()
            u = u + gain * own.double() * torch.from_numpy(to_cauchy(e))
        y = (u @ head.weight[0].double() + head.bias[0].double()).item()
        assert generated[position].item() == pytest.approx(
            math.copysign(math.expm1(abs(y)), y), rel=1e-4, abs=1e-4
        )


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_generated_number_has_the_value_of_its_mode_and_is_fed_back(
    model: Any, name: str, use_cache: bool
) -> None:
    result = generate(model, [PROMPT], [VALUES], use_cache=use_cache, **MODES[name])
    ids = result.sequences[0]
    assert 2 <= (ids == NUM)[len(PROMPT) :].sum() < NEW  # both numbers and other tokens
    assert result.numeric_values[0, : len(PROMPT)].tolist() == VALUES
    check_by_replay(model, ids, result.numeric_values[0], len(PROMPT), **MODES[name])


def test_fed_back_value_changes_later_tokens(model: Any) -> None:
    """Were it lost, later values would not depend on it, and the replay would prove nothing."""
    first = generate(model, [PROMPT], [VALUES], **MODES["standard"])
    other = generate(model, [PROMPT], [[0.0, -9e5, 0.0, 0.0]], **MODES["standard"])
    assert (first.numeric_values != other.numeric_values)[:, len(PROMPT) :].any()


@pytest.mark.parametrize("name", MODES)
def test_batching_and_padding_change_nothing(model: Any, name: str) -> None:
    prompts, values = [PROMPT, [7, 9], [NUM, 4, NUM]], [VALUES, [0.0, 0.0], [1e-3, 0.0, -7e8]]
    together = generate(model, prompts, values, **MODES[name])
    for row, (prompt, beside) in enumerate(zip(prompts, values, strict=True)):
        alone = generate(model, [prompt], [beside], **MODES[name])
        padding = together.sequences.shape[1] - alone.sequences.shape[1]
        assert together.sequences[row, padding:].tolist() == alone.sequences[0].tolist()
        torch.testing.assert_close(
            together.numeric_values[row, padding:], alone.numeric_values[0], **CLOSE
        )


def test_generation_continues_from_a_cache(model: Any) -> None:
    start = generate(model, [PROMPT], [VALUES], **MODES["standard"])
    whole = start.sequences
    longer = {"max_new_tokens": 6, "return_dict_in_generate": True, **MODES["standard"]}
    cached = model.generate(
        whole,
        numeric_values=start.numeric_values,
        past_key_values=start.past_key_values,
        **longer,
    )
    fresh = model.generate(whole, numeric_values=start.numeric_values, **longer)
    assert cached.sequences.tolist() == fresh.sequences.tolist()
    torch.testing.assert_close(cached.numeric_values, fresh.numeric_values, **CLOSE)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("returned", [1, 3])
def test_beams_have_their_own_values(model: Any, use_cache: bool, returned: int) -> None:
    prompts, values = [PROMPT, [NUM, 8, 20]], [VALUES, [7.0, 0.0, 0.0]]
    result = generate(
        model,
        prompts,
        values,
        num_beams=3,
        num_return_sequences=returned,
        use_cache=use_cache,
        **MODES["compatible"],
    )
    assert (result.sequences == NUM)[:, len(PROMPT) :].sum() > 2 * returned
    for row in range(2 * returned):
        which = row // returned
        padding = len(PROMPT) - len(prompts[which])
        ids, generated = result.sequences[row, padding:], result.numeric_values[row, padding:]
        assert generated[: len(values[which])].tolist() == values[which]
        check_by_replay(model, ids, generated, len(values[which]), **MODES["compatible"])


def test_num_return_sequences_keeps_the_prompts_values(model: Any) -> None:
    result = generate(
        model, [PROMPT, [NUM, 8]], [VALUES, [3.0, 0.0]], num_return_sequences=2, **MODES["causal"]
    )
    assert result.numeric_values[:, 1].tolist() == [42.5, 42.5, 0.0, 0.0]
    assert result.numeric_values[:, 2].tolist() == [0.0, 0.0, 3.0, 3.0]


def test_text_without_numbers_is_unaffected_by_the_number_channel(make_model: Any) -> None:
    """Bit for bit: in forward, and in what is generated, as long as no number is generated."""
    without, with_channel = make_model(), make_model(num_token_id=96)
    ids = torch.tensor([[3, 9, 27, 81], [2, 4, 8, 16]])
    zeros = torch.zeros(ids.shape)
    expected = without(ids)
    for values in (None, zeros):
        output = with_channel(ids, numeric_values=values)
        assert torch.equal(output.logits, expected.logits)
        assert torch.equal(output.scale_S, expected.scale_S)
    generated = without.generate(ids, max_new_tokens=NEW)
    assert not (generated == 96).any()
    assert torch.equal(generated, with_channel.generate(ids, max_new_tokens=NEW))
    assert torch.equal(
        generated, with_channel.generate(ids, numeric_values=zeros, max_new_tokens=NEW)
    )


def test_named_field_sets_the_scale_of_generated_values(make_model: Any) -> None:
    model = make_model(num_token_id=NUM, head_bias=True, value_space="linear")
    with torch.no_grad():
        model.lm_head.bias[NUM] += 50.0  # it generates nothing else
    plain = (
        generate(model, [PROMPT], [VALUES], **MODES["standard"])
        .numeric_values[0, len(PROMPT)]
        .item()
    )
    model.fit_value_field("price", [100.0, 200.0, 300.0, 400.0, 500.0])
    priced = generate(model, [PROMPT], [VALUES], value_field="price", **MODES["standard"])
    assert priced.numeric_values[0, len(PROMPT)] == pytest.approx(300 + 200 * plain, rel=1e-6)


def test_large_values_are_distinguished(model: Any) -> None:
    """float32 ends at 3e38 and bfloat16 cannot part a million from a million and a bit."""
    ids = torch.tensor([PROMPT])
    outputs = [
        model(ids, numeric_values=torch.tensor([[0.0, v, 0.0, 0.0]], dtype=torch.float64)).logits
        for v in (1e38, 1e300, 999_000.0, 1_000_500.0)
    ]
    assert all(output.isfinite().all() for output in outputs)
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[2], outputs[3])


INVALID = {
    "nan": ([[0.0, float("nan"), 0.0, 0.0]], r"numeric_values\[0, 1\] is nan"),
    "infinite": ([[0.0, float("inf"), 0.0, 0.0]], r"numeric_values\[0, 1\] is inf"),
    "at a word": ([[0.0, 1.0, 5.0, 0.0]], r"numeric_values\[0, 2\] is 5"),
    "too few": ([[0.0, 1.0]], r"numeric_values of shape \(1, 2\) .* \(1, 4\)"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_values_raise_with_their_position(model: Any, name: str) -> None:
    values, message = INVALID[name]
    inputs = {"input_ids": torch.tensor([PROMPT]), "numeric_values": torch.tensor(values)}
    with pytest.raises(ValueError, match=message):
        model(**inputs)
    with pytest.raises(ValueError, match=message):
        model.generate(**inputs, max_new_tokens=2)


def test_assisted_decoding_never_drafts_a_number(model: Any) -> None:
    ids = torch.tensor([[3, 8, 20, 3, 8]])
    generated = model.generate(ids, prompt_lookup_num_tokens=2, max_new_tokens=NEW)
    assert not (generated == NUM).any()
