"""Candidates: min-p, and no n tokens of the text are said again where another token is left."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _stability import stability
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import LogitsProcessorList, MinPLogitsWarper

from causal_qwen.analysis.counterfactual import ChangedPrompt, counterfactual
from causal_qwen.analysis.posterior import infer_individual
from causal_qwen.decoding.settings import resolve_settings
from causal_qwen.decoding.step import (
    REACH,
    avoid_repeats,
    cut_by_text,
    end_loops,
    few_candidates,
    keep_min_p,
)
from causal_qwen.generation.logits import DecisionProcessor
from causal_qwen.individuals import Individual
from causal_qwen.numpy_engine import Engine
from causal_qwen.options import CONTINUES, LETTER, OPEN, PART

PROMPT = torch.tensor([[5, 17, 3, 44]])
NEW = 40
LOOPING = {"individual": 7, "noise_gain": 30.0, "min_p": 0.02}  # persistence 1: it says it again
IDS = st.lists(st.integers(0, 4), max_size=12)


def sequences(tokens: list[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


@given(st.lists(IDS, min_size=1, max_size=3), st.integers(0, 4), st.sets(st.integers(0, 4)))
def test_what_is_avoided_is_what_would_repeat_n_tokens(
    texts: list[list[int]], n: int, cut: set[int]
) -> None:
    scores = np.arange(5 * len(texts), dtype=np.float32).reshape(len(texts), 5)
    scores[:, sorted(cut - {2})] = -np.inf
    found = avoid_repeats(scores, texts, [n] * len(texts))
    same = avoid_repeats(torch.from_numpy(scores), texts, [n] * len(texts))
    np.testing.assert_array_equal(found, same.numpy())
    for row, text in enumerate(texts):
        kept = [k for k in range(5) if scores[row, k] > -np.inf]
        new = [k for k in kept if not n or (*text, k)[-n:] not in sequences(text, n)]
        if n and text:  # twice in a row only where it is the likeliest
            new = [k for k in new if k != text[-1] or k == scores[row].argmax()]
        expected = new or kept
        assert [k for k in range(5) if found[row, k] == scores[row, k] > -np.inf] == expected


@given(st.lists(IDS, min_size=1, max_size=3))
def test_a_phrase_is_said_twice_in_a_row_and_not_three_times(texts: list[list[int]]) -> None:
    scores = np.arange(5 * len(texts), dtype=np.float32).reshape(len(texts), 5)
    edges = np.uint8([LETTER, LETTER, 0, 0, PART])
    found = end_loops(scores, texts, [2] * len(texts), edges)
    same = end_loops(torch.from_numpy(scores), texts, [2] * len(texts), torch.from_numpy(edges))
    np.testing.assert_array_equal(found, same.numpy())
    for row, text in enumerate(texts):
        for k in range(5):
            is_third = any(
                text[-m:] == text[-2 * m : -m] and text[-m] == k and {0, 1, 4} & {*text[-m:]}
                for m in range(2, len(text) // 2 + 1)
            )
            assert (found[row, k] == -np.inf) == is_third
    np.testing.assert_array_equal(end_loops(scores, texts, [0] * len(texts), edges), scores)


def test_loops_end_and_names_tables_and_long_phrases_may_be_repeated() -> None:
    scores, edges = np.zeros((1, 5), np.float32), np.uint8([LETTER, LETTER, 0, 0, PART])

    def banned(*text: int) -> list[int]:
        found = end_loops(scores, [[*text]], [2], edges)
        return np.flatnonzero(found[0] == -np.inf).tolist()

    assert banned(0, 2, 0, 2) == [0]  # "son of son of" does not go on
    assert banned(3, 0, 1, 2, 0, 1, 2) == [0]
    assert banned(0, 1, 3, 0, 1) == []  # a name again, after something else
    assert banned(2, 3, 2, 3, 2, 3) == []  # "| --- | --- |"
    assert banned(4, 4, 4, 4) == [4]  # an emoji of two tokens, twice
    assert banned(0, 0) == []


def test_what_was_said_long_ago_may_be_said_again() -> None:
    scores = np.float32([[0, 1, 0, 0, 0]])
    for distance, expected in ((REACH - 1, -np.inf), (REACH, 0.0)):
        text = [1, 2, *[3] * (distance - 2), 1]
        assert avoid_repeats(scores, [text], [2])[0].tolist() == [0, 1, expected, 0, 0]


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor])
def test_a_token_is_said_twice_in_a_row_only_where_it_is_the_likeliest(convert: Any) -> None:
    scores, texts = convert([[1.0, 2.0, 3.0]] * 5), [[2], [1], [1, 1, 0, 1], [1], [1]]
    kept = avoid_repeats(scores, texts, [2, 2, 2, 0, 2]).tolist()
    assert kept == [[1, 2, 3], [1, -np.inf, 3], [-np.inf, -np.inf, 3], [1, 2, 3], [1, -np.inf, 3]]
    assert avoid_repeats(scores, texts, [2] * 5, number=1)[1].tolist() == [1, 2, 3]
    alone = convert([[-np.inf, 2.0, -np.inf]])
    for n in (1, 2):  # nothing else is left
        assert avoid_repeats(alone, [[1]], [n])[0].tolist() == [-np.inf, 2, -np.inf]


def test_two_numbers_are_never_the_same_token() -> None:
    scores, text = np.float32([[0, 1, 0, 0, 0]]), [[1, 4, 2, 1, 4, 2, 1]]
    assert avoid_repeats(scores, text, [2])[0].tolist() == [0, 1, 0, 0, -np.inf]
    assert avoid_repeats(scores, text, [2], number=4)[0].tolist() == scores[0].tolist()
    text = [[*text[0], 4]]
    assert avoid_repeats(scores, text, [2])[0].tolist() == [0, 1, -np.inf, 0, -np.inf]
    assert avoid_repeats(scores, text, [2], number=4)[0].tolist() == scores[0].tolist()


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor])
def test_min_p_keeps_a_share_of_the_largest_probability(convert: Any) -> None:
    scores = convert([[0.0, math.log(0.2), math.log(0.099)], [3.0, 0.0, 2.9]])
    kept = np.asarray(keep_min_p(scores, 0.1)) > -np.inf
    assert kept.tolist() == [[True, True, False], [True, False, True]]


@pytest.mark.parametrize(
    "convert", [np.asarray, lambda rows: torch.tensor(rows, dtype=torch.float64)]
)
def test_a_token_at_exactly_min_p_is_kept(convert: Any) -> None:
    least = math.log(0.1)
    scores = convert([[0.0, least, math.nextafter(least, -9.0)]])
    assert keep_min_p(scores, 0.1).tolist() == [[0.0, least, -math.inf]]
    tokens, few = few_candidates(scores, 0.1)
    assert (tokens.tolist(), few.tolist()) == ([0, 1], [[0.0, least]])


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor])
def test_few_candidates_are_those_of_any_row(convert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.full((2, 50), -9.0, np.float32)
    scores[0, [3, 20]], scores[1, 7] = [1.0, 0.5], 2.0
    tokens, few = few_candidates(convert(scores), 0.5)
    assert tokens.tolist() == [3, 7, 20]
    assert few.tolist() == [[1.0, -math.inf, 0.5], [-math.inf, 2.0, -math.inf]]
    monkeypatch.setattr("causal_qwen.decoding.step.FEW", 2)
    tokens, all_of_them = few_candidates(convert(scores), 0.5)
    assert tokens is None
    np.testing.assert_array_equal(all_of_them, keep_min_p(scores, 0.5))


LEAST = math.log(0.3)


@given(
    st.lists(st.tuples(IDS, st.integers(0, 3)), min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.sampled_from([None, 1]),
)
def test_what_is_cut_among_few_candidates_is_what_is_cut_among_all_tokens(
    rows: list[tuple[list[int], int]], seed: int, number: int | None
) -> None:
    texts, lengths = zip(*rows, strict=True)
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=(len(rows), 5)).astype(np.float32)
    edges = generator.integers(0, 4, 5, dtype=np.uint8)
    rest = (texts, generator.random(len(rows)) < 0.7, lengths)
    whole = cut_by_text(keep_min_p(scores, 0.3), *rest, edges, number)
    tokens, few = few_candidates(scores, 0.3)
    assert tokens is not None
    assert set(tokens) == {k for row in scores for k in range(5) if row[k] >= row.max() + LEAST}
    np.testing.assert_array_equal(cut_by_text(few, *rest, edges, number, tokens), whole[:, tokens])
    parts = torch.from_numpy(few), *rest, torch.from_numpy(edges), number, torch.from_numpy(tokens)
    np.testing.assert_array_equal(cut_by_text(*parts).numpy(), whole[:, tokens])


@pytest.mark.parametrize(
    "call",
    [
        {"causal_mode": "causal", "individual": [1, 2, 3], "avoid_repeats": 2},
        {"causal_mode": "causal", "individual": [4, 5, 6], "whole_words": True},
        {"causal_mode": "causal", "individual": [7, 8, 9], "output_scores": True},
        {"causal_mode": "sampling", "individual": [1, 2, 3]},
        {"causal_mode": "sampling", "individual": [1, 2, 3], "top_k": 5, "avoid_repeats": 3},
        {"causal_mode": "standard"},
    ],
)
def test_a_choice_among_few_candidates_is_the_choice_among_all_tokens(
    make_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: dict[str, Any],
) -> None:
    """In both engines; and the mode does choose among few."""
    model = make_model()
    model.decision.word_edges[::3] = CONTINUES | OPEN
    model.save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path)
    rows = [[5, 17, 3, 44], [9, 9, 2, 44], [44, 44, 9, 44]]
    noise = {"noise_gain": 30.0} if "individual" in call else {}
    options = {"min_p": 0.02, "max_new_tokens": 12, **noise, **call}
    seen: dict[str, list[int]] = {"torch": [], "numpy": []}

    def counted(*inputs: Any) -> Any:
        tokens, scores = few_candidates(*inputs)
        if tokens is not None:
            engine = "numpy" if isinstance(scores, np.ndarray) else "torch"
            seen[engine].append(len(tokens))
        return tokens, scores

    def texts() -> list[list[list[int]]]:
        named = dict(options)
        by_torch = model.generate(torch.tensor(rows), **named, return_dict_in_generate=True)
        named["mode"] = named.pop("causal_mode")
        named.pop("output_scores", None)
        by_numpy = []
        for place, row in enumerate(rows):
            who = {name: seeds[place] for name, seeds in named.items() if name == "individual"}
            by_numpy.append(engine.generate(row, **named | who).ids[4:].tolist())
        return [by_torch.sequences[:, 4:].tolist(), by_numpy]

    monkeypatch.setattr("causal_qwen.decoding.step.few_candidates", counted)
    found = texts()
    assert found[0] == found[1]
    by_torch, by_numpy = seen.values()
    steps = 12 if "output_scores" not in call else 0  # there all scores are asked for
    assert (len(by_torch), len(by_numpy)) == (steps, 12 * len(rows))
    assert max(by_torch + by_numpy) < model.config.vocab_size
    monkeypatch.setattr("causal_qwen.decoding.step.FEW", 0)
    assert texts() == found
    assert (len(by_torch), len(by_numpy)) == (steps, 12 * len(rows))


class Counted(MinPLogitsWarper):
    calls = 0

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        return super().__call__(*inputs)


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        ({"causal_mode": "standard"}, 1),
        ({"causal_mode": "causal", "min_p": 0.5, "individual": 3}, 1),
        ({"causal_mode": "compatible", "normalization": "ovr", "do_sample": True}, 4),
    ],
)
def test_a_processor_of_the_call_runs_as_it_is(
    make_model: Callable[..., Any], call: dict[str, Any], texts: int
) -> None:
    """A cut by min-p that a user passes is not taken for Hugging Face's own."""
    model, mine = make_model(), Counted(1e-4)
    found = set()
    for seed in range(4):
        torch.manual_seed(seed)
        options = {"max_new_tokens": 8, "logits_processor": LogitsProcessorList([mine]), **call}
        found.add(tuple(model.generate(PROMPT, **options)[0].tolist()))
    assert mine.calls == 4 * 8
    assert len(found) == texts


@pytest.mark.parametrize("mode", ["standard", "sampling", "causal"])
def test_nothing_of_a_call_is_kept_after_it(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Not even in a cycle: it may own a copy of W, and a device's memory calls no collector."""
    made: list[Any] = []
    begin = DecisionProcessor.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(DecisionProcessor, "__init__", watched)
    model = make_model()
    gc.collect()
    gc.disable()
    try:
        model.generate(PROMPT, causal_mode=mode, max_new_tokens=3)
        assert [one() for one in made] == [None]
    finally:
        gc.enable()


def test_a_score_that_is_no_number_is_named(make_model: Callable[..., Any]) -> None:
    model = make_model()
    model.lm_head.weight.data[50, 0] = math.nan
    with pytest.raises(ValueError, match="loc_S holds NaN"):
        said(model)


def said(model: Any, prompt: torch.Tensor = PROMPT, **options: Any) -> list[int]:
    call = {"causal_mode": "causal", "max_new_tokens": NEW, **LOOPING, **options}
    return model.generate(prompt, **call)[0].tolist()


def test_a_repetition_happens_only_where_nothing_else_is_left(
    make_model: Callable[..., Any],
) -> None:
    model = make_model()
    free, ids = said(model), said(model, avoid_repeats=3)
    assert len(set(sequences(free, 3))) < len(free) - 2  # it loops without the rule
    p = model(torch.tensor([ids])).logits[0].softmax(-1)
    for end in range(PROMPT.shape[1], len(ids)):
        before = sequences(ids[:end], 3)
        if tuple(ids[end - 2 : end + 1]) in before:
            kept = (p[end - 1] >= 0.02 * p[end - 1].max()).nonzero().flatten().tolist()
            assert all((*ids[end - 2 : end], k) in before for k in kept)
    assert said(model, avoid_repeats=0) == free
    assert said(model, avoid_repeats=4) != ids


def test_both_engines_and_padded_rows_avoid_the_same_tokens(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_model()
    model.generation_config.avoid_repeats = 3
    model.save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path)
    rows = [[5, 17, 3, 44], [9], [44, 44, 9, 44, 44]]
    alone = [said(model, torch.tensor([row]))[len(row) :] for row in rows]
    assert alone != [said(model, torch.tensor([row]), avoid_repeats=0)[len(row) :] for row in rows]
    width = max(map(len, rows))
    ids = torch.tensor([[44] * (width - len(row)) + row for row in rows])  # padding is a word
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    batch = model.generate(
        ids, attention_mask=mask, causal_mode="causal", max_new_tokens=NEW, **LOOPING
    )
    assert batch[:, width:].tolist() == alone
    options = {"mode": "causal", "max_new_tokens": NEW, **LOOPING}
    found = [engine.generate(row, **options) for row in rows]
    assert [one.ids[one.new].tolist() for one in found] == alone


def test_padding_is_not_a_part_of_the_text(make_model: Callable[..., Any]) -> None:
    model = make_model()
    alone = said(model, torch.tensor([[9]]), avoid_repeats=1)[1:]
    ids = torch.tensor([[*alone[:1] * 4, 9]])
    mask = torch.tensor([[0, 0, 0, 0, 1]])
    assert said(model, ids, attention_mask=mask, avoid_repeats=1)[5:] == alone


def test_the_next_token_of_every_position_is_the_one_that_generate_chooses(
    make_model: Callable[..., Any],
) -> None:
    model = make_model()
    ids = torch.tensor([said(model, avoid_repeats=3)])
    found = model.inference(ids[:, :-1], mode="causal", avoid_repeats=3, **LOOPING)
    assert found[0, PROMPT.shape[1] - 1 :].tolist() == ids[0, PROMPT.shape[1] :].tolist()


@pytest.mark.parametrize("still", [{"temperature": 0.0}, {"noise_gain": 0.0}])
def test_without_noise_the_base_model_decides(
    make_model: Callable[..., Any], still: dict[str, float]
) -> None:
    model = make_model()
    model.decision.threshold.data.zero_()
    greedy = said(model, causal_mode="compatible", **dict.fromkeys(LOOPING))
    assert len(set(greedy)) < len(greedy)  # with noise, no token would be said again
    assert said(model, avoid_repeats=1, min_p=0.0, **still) == greedy


def test_the_saved_rule_is_of_causal_alone_and_others_ask_for_it() -> None:
    saved = {"avoid_repeats": 3}
    assert resolve_settings({"causal_mode": "causal"}, saved).avoid_repeats == 3
    assert resolve_settings({"causal_mode": "causal"}, {}).avoid_repeats == 0
    for mode in ("standard", "sampling", "compatible"):
        assert resolve_settings({"causal_mode": mode}, saved).avoid_repeats == 0
        asked = resolve_settings({"causal_mode": mode}, {}, config=saved).avoid_repeats
        assert asked == (3 if mode == "sampling" else 0)
    assert resolve_settings({"causal_mode": "sampling", **saved}, {}).avoid_repeats == 3
    for mode in ("standard", "compatible"):
        with pytest.raises(ValueError, match="avoid_repeats= has no effect in mode"):
            resolve_settings({"causal_mode": mode, **saved}, {})
    for wrong in (-1, 2.5, True, "3"):
        with pytest.raises(ValueError, match="whole number of at least 0"):
            resolve_settings({"causal_mode": "causal", "avoid_repeats": wrong}, {})


def test_an_observed_text_has_the_candidates_of_its_own_past(
    make_model: Callable[..., Any],
) -> None:
    model = make_model()
    ids = torch.tensor(said(model, avoid_repeats=3, max_new_tokens=12))
    settings = {"n": 2, "burn_in": 5, "noise_gain": 30.0, "min_p": 0.02}
    found = infer_individual(model, ids[4:], prompt=PROMPT[0], avoid_repeats=3, **settings)
    assert found.success_rate == 1.0
    loop = torch.tensor(said(model, max_new_tokens=NEW))
    found = infer_individual(model, loop[4:], prompt=PROMPT[0], avoid_repeats=3, **settings)
    assert not found
    assert "avoid_repeats=3" in found.reason


def test_each_world_has_the_candidates_of_its_own_past(make_model: Callable[..., Any]) -> None:
    """Where scales are equal, a choice changes against the odds only if a candidate is lost."""
    model = make_model()
    model.abduction.scale.weight.data.zero_()
    options = {"max_new_tokens": NEW, "noise_gain": 30.0, "avoid_repeats": 2}
    violations = 0
    for seed in range(4):
        who = Individual.draw(model, seed=seed)
        same = counterfactual(model, PROMPT, who, ChangedPrompt(PROMPT), **options)
        assert same.divergence is None
        edited = ChangedPrompt(torch.tensor([[5, 17, 3, 45]]))
        result = counterfactual(model, PROMPT, who, edited, **options)
        found = stability(model, result, **options)
        assert found.violations == found.by_candidates
        violations += found.violations
    assert violations > 0
