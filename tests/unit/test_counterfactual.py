"""The same individual in another world: replay, edits, noise semantics, stability."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from _stability import stability
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from causal_qwen.analysis.counterfactual import (
    ChangedNumber,
    ChangedPrompt,
    ChangedToken,
    counterfactual,
    parse_edit,
)
from causal_qwen.individuals import Individual, draw_noise

Make = Callable[..., Any]

B, T, C, V = 3, 7, 24, 97
NUM = 96
GAIN, NEW = 0.6, 10
PROMPT = [5, 17, 3, 44, 8, 60, 2]
OTHER = [5, 17, 3, 45, 8, 60, 2]
LONGER = [9, 9, *OTHER]


@pytest.fixture(scope="module")
def model(make_model: Make) -> Any:
    return make_model(causal_size=C)


@pytest.fixture(scope="module")
def reader(make_model: Make) -> Any:
    """A model whose last token is <NUM>."""
    return make_model(causal_size=C, num_token_id=NUM)


@pytest.fixture(scope="module")
def even(make_model: Make) -> Any:
    """A model whose scale_U is the same in every context."""
    model = make_model(causal_size=C)
    with torch.no_grad():
        model.abduction.scale.weight.zero_()
    return model


def prompts(rows: int = B, length: int = T, seed: int = 0) -> Tensor:
    return torch.randint(1, V - 1, (rows, length), generator=torch.Generator().manual_seed(seed))


def speak(model: Any, ids: Tensor, who: Any, mode: str = "causal", **more: Any) -> Any:
    mask = more.pop("attention_mask", torch.ones_like(ids))
    return model.generate(
        ids,
        attention_mask=mask,
        causal_mode=mode,
        individual=who,
        max_new_tokens=NEW,
        noise_gain=GAIN,
        pad_token_id=0,
        return_dict_in_generate=True,
        **more,
    )


def ask(model: Any, edit: Any, who: Any = 5, text: Any = PROMPT, **more: Any) -> Any:
    options = {"max_new_tokens": NEW, "noise_gain": GAIN, "pad_token_id": 0, **more}
    return counterfactual(model, text, who, edit, **options)


# --- generate takes and returns individuals


@pytest.mark.parametrize("mode", ["causal", "sampling"])
@pytest.mark.parametrize("how", ["seed", "seeds", "noise", "nothing", "individuals", "fresh"])
def test_returned_individuals_replay_their_texts(model: Any, mode: str, how: str) -> None:
    given: dict[str, Any] = {
        "seed": 5,
        "seeds": [1, 2, 3],
        "noise": np.stack([draw_noise(seed, C) for seed in (1, 2, 3)]),
        "nothing": None,
        "individuals": [
            Individual.draw(C, seed=1, temperature=2.0),
            Individual.draw(C, seed=2, fresh=True),
            Individual.draw(C, seed=3, min_density=0.3),
        ],
        "fresh": Individual.draw(C, seed=4, fresh=True),
    }
    options = {"temperature": 0.7, "min_density": 0.01} if how in ("seed", "noise") else {}
    first = speak(model, prompts(), given[how], mode, **options)
    assert [type(one) for one in first.individual] == [Individual] * B
    if options:
        assert {(one.temperature, one.min_density) for one in first.individual} == {(0.7, 0.01)}
    again = speak(model, prompts(), first.individual, mode)
    assert again.sequences.tolist() == first.sequences.tolist()
    assert again.individual == first.individual
    alone = [
        speak(model, row[None], one, mode).sequences[0].tolist()
        for row, one in zip(prompts(), first.individual, strict=True)
    ]
    assert alone == first.sequences.tolist()


def test_individual_generates_the_text_of_its_seed(model: Any) -> None:
    by_seed = speak(model, prompts(), 5, temperature=0.7, min_density=0.1)
    one = Individual.draw(model, seed=5, temperature=0.7, min_density=0.1)
    assert speak(model, prompts(), one).sequences.tolist() == by_seed.sequences.tolist()
    fresh = Individual.draw(model, seed=5, fresh=True)
    expected = speak(model, prompts(), 5, persistence=0.0).sequences.tolist()
    assert speak(model, prompts(), fresh).sequences.tolist() == expected
    assert speak(model, prompts(), 5).sequences.tolist() != expected


def test_rows_keep_their_own_gain_truncation_and_freshness(model: Any) -> None:
    people = [
        Individual.draw(C, seed=1, temperature=3.0),
        Individual.draw(C, seed=1, fresh=True),
        Individual.draw(C, seed=1, min_density=0.5),
    ]
    mask = torch.ones(B, T, dtype=torch.long)
    options = {"causal_mode": "causal", "max_new_tokens": NEW}
    gains = {"noise_gain": 0.4, "fresh_noise_gain": 1.7}
    ids = prompts()
    together = model.generate(ids, attention_mask=mask, individual=people, **gains, **options)
    for row, one in enumerate(people):
        single = {"temperature": one.temperature, "min_density": one.min_density}
        alone = model.generate(
            ids[row : row + 1],
            attention_mask=mask[:1],
            individual=1,
            persistence=one.own_share,
            noise_gain=gains["fresh_noise_gain" if one.is_fresh else "noise_gain"],
            **single,
            **options,
        )
        assert together[row].tolist() == alone[0].tolist()


@pytest.mark.parametrize("use_cache", [True, False])
def test_replay_survives_padding_and_the_cache(model: Any, use_cache: bool) -> None:
    one = Individual.draw(C, seed=8)
    alone = speak(model, prompts(1), one).sequences[0, T:].tolist()
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompts(1)], dim=1)
    mask = torch.cat([torch.zeros(1, 4), torch.ones(1, T)], dim=1).long()
    again = speak(model, padded, one, attention_mask=mask, use_cache=use_cache)
    assert again.sequences[0, 4 + T :].tolist() == alone


def test_exogenous_noise_adds_b_eps_to_the_individuals_noise(model: Any) -> None:
    """u = loc_U + T kappa (scale_U t + b eps), eps anew at every position, with its own kappa."""
    fresh_gain, steps = 1.1, 6
    one = Individual.draw(C, seed=3, temperature=0.5, min_density=0.02)
    out = model.generate(
        prompts(1),
        attention_mask=torch.ones(1, T, dtype=torch.long),
        causal_mode="causal",
        individual=one,
        exogenous=11,
        noise_gain=GAIN,
        fresh_noise_gain=fresh_gain,
        max_new_tokens=steps,
    )
    ids = prompts(1)
    weight, b = model.lm_head.weight.double(), model.action.b_noise.double().abs()
    chance = Individual.draw(C, seed=11, fresh=True, min_density=0.02)
    with torch.no_grad():
        for _ in range(steps):
            seen = model(ids)
            own = torch.from_numpy(one.cauchy()) * seen.scale_U[0, -1].double()
            eps = torch.from_numpy(chance.cauchy(ids.shape[1] - 1)) * b
            u = seen.loc_U[0, -1].double() + 0.5 * (GAIN * own + fresh_gain * eps)
            token = (weight @ u - model.decision.threshold.double()).argmax()
            ids = torch.cat([ids, token.reshape(1, 1)], dim=1)
    assert out.tolist() == ids.tolist()


# --- edits


def test_changed_prompt_is_continued_by_the_same_individual(model: Any) -> None:
    result = ask(model, ChangedPrompt(OTHER))
    for world, prompt in ((result.factual, PROMPT), (result.counterfactual, OTHER)):
        expected = speak(model, torch.tensor([prompt]), 5).sequences[0].tolist()
        assert world.sequence.ids.tolist() == expected
        assert world.new_ids == expected[T:]
    said = list(zip(result.factual.new_ids, result.counterfactual.new_ids, strict=True))
    assert result.divergence == next(i for i, (one, other) in enumerate(said) if one != other)


@pytest.mark.parametrize("position", [3, T + 4])
def test_changed_token_is_kept_and_the_rest_is_regenerated(model: Any, position: int) -> None:
    result = ask(model, ChangedToken(position, 50))
    factual, other = (w.sequence.ids.tolist() for w in (result.factual, result.counterfactual))
    assert other[position] == 50
    assert len(other) == len(factual) == T + NEW
    kept = max(T, position + 1)
    assert other[:kept] == [*factual[:position], 50, *factual[position + 1 : kept]]
    begun = torch.tensor([other[:kept]])
    expected = speak(model, begun, 5).sequences[0].tolist()[: T + NEW]
    assert other == expected
    assert result.divergence == (position - T if position >= T else result.divergence)
    assert stability(model, result).steps == NEW - (position >= T)


def test_changed_number_changes_the_value_and_keeps_the_token(reader: Any) -> None:
    text = {"input_ids": [5, NUM, 8, 60], "numeric_values": [0, 3.0, 0, 0]}
    result = ask(reader, ChangedNumber(0, 4e6), text=text)
    assert result.counterfactual.sequence.ids.tolist()[:4] == [5, NUM, 8, 60]
    assert result.counterfactual.sequence.values.tolist()[1] == 4e6
    assert result.shift_U[0] > 0
    assert result.edit == "number 0: 3 -> 4e+06"
    same = ask(reader, ChangedNumber(0, 3.0), text=text)
    assert same.divergence is None
    assert (same.shift_U == 0).all()


def test_generated_number_has_an_interval_and_can_be_changed(reader: Any) -> None:
    model = copy.deepcopy(reader)
    with torch.no_grad():
        model.decision.threshold[NUM] = -100.0  # it says nothing but numbers
    result = ask(model, ChangedNumber(2, 123.0))
    assert result.factual.new_ids == [NUM] * NEW
    assert result.counterfactual.sequence.values[T + 2] == 123.0
    assert result.counterfactual.new_ids == [NUM] * NEW
    assert result.divergence == 2
    low, high = result.factual.number[:, 1], result.factual.number[:, 2]
    assert (low < result.factual.number[:, 0]).all()
    assert (result.factual.number[:, 0] < high).all()
    np.testing.assert_array_equal(
        result.factual.sequence.values[: T + 2], result.counterfactual.sequence.values[: T + 2]
    )


@pytest.mark.parametrize("mode", ["causal", "sampling"])
@pytest.mark.parametrize("fresh", [True, False])
def test_edit_without_change_leaves_the_text_unchanged(model: Any, mode: str, fresh: bool) -> None:
    for seed in range(5):
        one = Individual.draw(C, seed=seed, fresh=fresh)
        result = ask(model, ChangedPrompt(PROMPT), one, mode=mode)
        assert result.divergence is None
        assert stability(model, result, mode=mode) == (NEW, 0, 0, 0)


def test_fresh_noise_follows_steps_not_positions(model: Any) -> None:
    result = ask(model, ChangedPrompt(LONGER), Individual.draw(C, seed=5, fresh=True))
    moved = Individual.draw(C, seed=5, fresh=True).shift(len(LONGER) - T)
    expected = speak(model, torch.tensor([LONGER]), moved).sequences[0].tolist()
    assert result.counterfactual.sequence.ids.tolist() == expected
    still = speak(model, torch.tensor([LONGER]), Individual.draw(C, seed=5, fresh=True))
    assert still.sequences[0].tolist() != expected


# --- what is held fixed


def test_pearl_shares_all_noise_and_disco_redraws_exogenous_noise(model: Any) -> None:
    pearl = [ask(model, ChangedPrompt(PROMPT), seed, exogenous=3).divergence for seed in range(10)]
    disco = [
        ask(model, ChangedPrompt(PROMPT), seed, semantics="disco", exogenous=3)
        for seed in range(10)
    ]
    assert pearl == [None] * 10
    assert sum(result.divergence is not None for result in disco) > 5
    # the factual world of both is the same one
    with_chance = ask(model, ChangedPrompt(PROMPT), 0, exogenous=3)
    assert disco[0].factual.new_ids == with_chance.factual.new_ids
    # ... and without exogenous noise to redraw, disco is pearl
    calm = copy.deepcopy(model)
    with torch.no_grad():
        calm.action.b_noise.zero_()
    assert ask(calm, ChangedPrompt(PROMPT), 0, semantics="disco").divergence is None


# --- stability


@settings(max_examples=settings.default.max_examples // 3)
@given(st.integers(0, 2**32), st.integers(0, 10_000), st.floats(0.1, 5.0))
def test_with_equal_scales_no_alternative_wins_that_became_less_likely(
    even: Any, seed: int, world: int, heat: float
) -> None:
    one = Individual.draw(C, seed=seed, temperature=heat)
    text, other = prompts(2, seed=world)
    result = ask(even, ChangedPrompt(other), one, text=text)
    steps, changed, violations, _ = stability(even, result)
    assert steps == NEW
    assert changed <= steps
    assert violations == 0


def test_stability_is_violated_when_scales_vary_or_candidates_are_cut(
    model: Any, even: Any
) -> None:
    def count(speaker: Any, edit: Callable[[Tensor], Any], **options: Any) -> Any:
        rows = enumerate(prompts(10, seed=1))
        results = (ask(speaker, edit(row), seed, text=row, **options) for seed, row in rows)
        return stability(speaker, *results, **options)

    def another(row: Tensor) -> ChangedPrompt:
        return ChangedPrompt(row.flip(0))

    def nearby(row: Tensor) -> ChangedToken:
        return ChangedToken(1, int(row[1]) + 1)

    equal = count(even, another, temperature=8.0)
    assert equal.violations == 0
    assert equal.changed > 10  # the count has something to count
    assert count(model, another, temperature=8.0).violations > 0
    assert count(even, nearby).violations == 0
    assert count(even, nearby, top_k=2).violations > 0


# --- shown


def test_result_renders_as_text_html_and_json(model: Any) -> None:
    result = ask(model, ChangedPrompt(OTHER))
    assert result.divergence is not None
    page = result.to_html()
    assert page == result._repr_html_()
    assert page.count("<tr>") == 2 + 1 + NEW
    assert "first divergence at step" in page
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    result.show(console)
    printed = console.file.getvalue()
    assert "\x1b[" in printed
    assert "counterfactual" in printed
    assert "\x1b[" not in str(result)
    sent = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert sent["divergence"] == result.divergence
    assert sent["factual"]["ids"] == result.factual.sequence.ids.tolist()
    assert sent["factual"]["softmax"] == pytest.approx(np.exp(sent["factual"]["log_prob"]))
    assert sent["factual"]["P"] == result.factual.probability.tolist()


def test_html_escapes_text(model: Any, byte_tokenizer: Make, make_model: Make) -> None:
    from causal_qwen.modeling.processor import CausalQwenProcessor

    speaker = make_model(causal_size=C, vocab_size=300, num_token_id=257)
    processor = CausalQwenProcessor(byte_tokenizer())
    assert processor.num_token_id == 257
    result = ask(speaker, "<b>&", text="<i>", processor=processor)
    page = result.to_html()
    assert "&lt;b&gt;&amp;" in page
    assert "<b>&" not in page
    assert result.counterfactual.prompt == "<b>&"
    with pytest.raises(ValueError, match="'ab' is 2 tokens; a changed token is one"):
        ask(speaker, ChangedToken(1, "ab"), text="<i>", processor=processor)


# --- on the command line


def test_parse_edit_reads_each_kind_of_edit() -> None:
    assert parse_edit(prompt="x") == ChangedPrompt("x")
    assert parse_edit(token="5= never") == ChangedToken(5, " never")
    assert parse_edit(number="0=-1.5e3") == ChangedNumber(0, -1500.0)


# --- bad input
