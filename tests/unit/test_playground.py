"""The playground's plain functions: no browser, no Gradio, tiny models."""

from __future__ import annotations

import copy
import math
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.generation.streaming import TokenStream, stream_text
from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.modeling.value_space import ValueSpace
from causal_qwen.playground import (
    counterfactuals,
    individuals,
    modes,
    predictors,
    rendering,
    text_edits,
    token_view,
)
from causal_qwen.playground import state as app_state
from causal_qwen.playground.predictors import Forecast, Sweep, from_model
from causal_qwen.playground.server import OFFLINE, bind, launch
from causal_qwen.playground.state import AppState
from causal_qwen.playground.text_edits import drag_range
from causal_qwen.playground.worker import AdmissionQueue, Worker
from causal_qwen.regression.prediction import NumberPrediction
from causal_qwen.regression.regressor import CausalTextRegressor, OpenModel
from causal_qwen.text.edits import find_numbers, replace_number, replace_word
from causal_qwen.text.numerals import encode

TOKENS = 6
TEXT = "a king has 7 horses"


@pytest.fixture(scope="module")
def loaded(make_model: Callable[..., Any], byte_tokenizer: Callable[..., Any]) -> tuple[Any, Any]:
    """A processor of bytes and a tiny model."""
    processor = CausalQwenProcessor(byte_tokenizer())
    model = make_model(vocab_size=300, num_token_id=processor.num_token_id)
    return processor, model


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker()
    yield one
    one.close()


# ---------------------------------------------------------------- prompts, worker


@pytest.mark.parametrize("text", ["", "  \n ", None])
def test_empty_prompt_is_refused(loaded: Any, text: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        text_edits.check_prompt(text, loaded[0])


def test_prompt_length_is_limited_in_characters_and_in_tokens(loaded: Any) -> None:
    longest = "a" * text_edits.MAX_TOKENS
    assert text_edits.check_prompt(f" {longest} ", loaded[0]) == longest
    with pytest.raises(ValueError, match="201 tokens"):
        text_edits.check_prompt(longest + "a", loaded[0])
    with pytest.raises(ValueError, match="1,001 characters"):
        text_edits.check_prompt("a" * 1001, loaded[0])


def test_every_line_is_one_prompt(loaded: Any) -> None:
    assert text_edits.check_prompts("one\n\n two \n", loaded[0]) == ["one", "two"]
    with pytest.raises(ValueError, match="6 prompts"):
        text_edits.check_prompts("a\n" * 6, loaded[0])
    with pytest.raises(ValueError, match="0 prompts"):
        text_edits.check_prompts("\n\n", loaded[0])


def test_worker_runs_everything_in_one_thread_and_iterators_take_turns(worker: Worker) -> None:
    order: list[tuple[str, int]] = []
    threads: set[int] = set()
    both_begin = threading.Barrier(2)

    def count(name: str) -> Iterator[int]:
        for number in range(20):
            threads.add(threading.get_ident())
            order.append((name, number))
            yield number

    def visitor(name: str) -> None:
        both_begin.wait()
        for _ in worker.iterate(count(name)):
            both_begin.wait()  # in step: neither thread can run ahead

    visitors = [threading.Thread(target=visitor, args=(name,)) for name in "ab"]
    for one in visitors:
        one.start()
    for one in visitors:
        one.join()
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert [number for _, number in order] == [n for n in range(20) for _ in "ab"]


def test_error_in_the_worker_is_raised_in_the_calling_thread(worker: Worker) -> None:
    with pytest.raises(ZeroDivisionError):
        worker.run(lambda: 1 / 0)
    assert worker.run(int, "7") == 7  # and it works on


def test_closed_worker_cancels_new_and_waiting_calls(worker: Worker) -> None:
    is_running, may_end = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        is_running.set()
        may_end.wait(30)

    def call_second() -> None:
        try:
            worker.run(int)
        except CancelledError as error:
            errors.append(error)

    first = threading.Thread(target=worker.run, args=(wait,))
    first.start()
    assert is_running.wait(30)
    second = threading.Thread(target=call_second)
    second.start()
    while not worker._pool._work_queue.qsize():
        time.sleep(0.001)
    closing = threading.Thread(target=worker.close)
    closing.start()
    second.join(30)
    may_end.set()
    first.join(30)
    closing.join(30)
    assert len(errors) == 1
    with pytest.raises(CancelledError):
        worker.run(int)


# ---------------------------------------------------------------- text edits


@given(st.floats(-1e6, 1e6), st.integers(0, 2))
def test_replaced_number_has_the_new_value_and_nothing_else_changes(
    value: float, index: int
) -> None:
    text = "From 3 apples, 4.5 pears and 12 plums."
    changed = find_numbers(replace_number(text, index, value))
    expected = [3.0, 4.5, 12.0]
    expected[index] = value
    assert [found for _, found in changed] == pytest.approx(expected, rel=1e-14, abs=1e-300)
    assert encode(replace_number(text, index, value)).pieces == encode(text).pieces


def test_replacing_a_missing_number_names_its_index() -> None:
    with pytest.raises(ValueError, match=r"Number 3 .* 2 numbers"):
        replace_number("1 and 2", 2, 5.0)


@given(st.decimals("0.1", "5000", places=1), st.floats(0, 1))
def test_drag_range_is_zero_to_twice_the_number_in_its_own_decimals(
    number: Any, share: float
) -> None:
    drag = drag_range(f"It weighs {number} kg.", 0)
    assert (drag.low, drag.high) == (0, 2 * float(number))
    value = drag.at(share)
    assert drag.low <= value <= drag.high + drag.step
    assert value == pytest.approx(drag.low + share * (drag.high - drag.low), abs=drag.step)
    assert round(value, 1) == pytest.approx(value, abs=1e-9)
    assert drag.at(0) == 0


def test_drag_ranges_of_negative_numbers_and_of_zero() -> None:
    assert drag_range("It is -4 degrees.", 0)[:2] == (-8, 0)
    assert drag_range("It is 0 degrees.", 0)[:2] == (-10, 10)


@given(st.floats(5e-324, 1.7e308) | st.floats(-1.7e308, -5e-324))
def test_every_number_has_a_drag_range_with_at_least_one_step(number: float) -> None:
    text = f"It is {number!r} now"
    drag = drag_range(text, 0)
    assert 0 < drag.step <= drag.high - drag.low < math.inf
    for share in (0.0, 0.4, 1.0):
        assert find_numbers(replace_number(text, 0, drag.at(share)))
    assert drag_range("It is 2e-5 now", 0).step == pytest.approx(4e-8)


def test_first_whole_word_is_replaced() -> None:
    assert replace_word("Kingdoms: the king, the king.", "king", "queen") == (
        "Kingdoms: the queen, the king."
    )
    assert replace_word("the king's horse", "king's", "queen's") == "the queen's horse"
    assert replace_word("the kings", "king", "queen") is None
    assert replace_word("a (b) c", "(b)", r"\1") == r"a \1 c"


def test_chinese_word_is_replaced_without_spaces_around_it() -> None:
    assert replace_word("国王有一个女儿", "女儿", "儿子") == "国王有一个儿子"
    assert replace_word("我有iPhone手机", "iPhone", "Nokia") == "我有Nokia手机"
    assert replace_word("我有iPhones", "iPhone", "Nokia") is None


# ---------------------------------------------------------------- page


def test_error_of_a_handler_becomes_a_message_and_the_page_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from causal_qwen.playground import page  # and Gradio

    messages: list[str] = []
    monkeypatch.setattr(page.gr, "Warning", messages.append)

    @page.report_errors
    def stream(error: Exception) -> Iterator[str]:
        yield "a word"
        raise error

    unchanged = ["a word", page.gr.skip()]
    assert list(stream(ValueError("The text <b> is empty."))) == unchanged
    assert list(stream(OSError("no file"))) == unchanged
    assert capsys.readouterr().err == ""
    assert list(stream(KeyError("x"))) == unchanged
    assert "KeyError" in capsys.readouterr().err
    assert list(stream(CancelledError())) == ["a word"]  # the server is closing
    assert capsys.readouterr().err == ""
    assert messages[:2] == ["The text &lt;b&gt; is empty.", "no file"]
    assert len(messages) == 3
    assert "KeyError" in messages[2]


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize("index", range(4), ids=["standard", "sampling", "causal", "compatible"])
def test_streamed_text_equals_the_text_of_one_generate_call(loaded: Any, index: int) -> None:
    processor, model = loaded
    mode = modes.four_modes(2.0, 2.0, 1.0, 0.05, seed=3)[index]
    grown = list(stream_text(model, processor, [TEXT], TOKENS, 3, **mode.options))
    inputs = processor(TEXT, return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        whole = model.generate(
            **inputs, max_new_tokens=TOKENS, return_dict_in_generate=True, **mode.options
        )
    start = inputs["input_ids"].shape[1]
    expected = [
        processor.decode(
            whole.sequences[0, start : start + count],
            whole.numeric_values[0, start : start + count],
            skip_special_tokens=True,
        )
        for count in range(1, TOKENS + 1)
    ]
    assert [texts[0] for texts in grown] == expected


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 5},
        {"forced_eos_token_id": 7},
        {"begin_suppress_tokens": "the first"},
        {"exponential_decay_length_penalty": (2, 1.9)},
        {"no_repeat_ngram_size": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_count_the_tokens_of_a_call_count_those_of_a_stream(
    loaded: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, model = loaded
    inputs, plain = processor(TEXT, return_tensors="pt"), {"causal_mode": "standard"}
    start = inputs["input_ids"].shape[1]
    first = model.generate(**inputs, max_new_tokens=TOKENS, **plain)[0, start:].tolist()
    monkeypatch.setattr(model.generation_config, "eos_token_id", first[1])  # ends after one token
    if "begin_suppress_tokens" in options:
        options = {"begin_suppress_tokens": first[:1]}
    whole = model.generate(**inputs, max_new_tokens=TOKENS, **plain, **options)[0, start:].tolist()
    assert whole != first[:2]
    stream = TokenStream(model, processor, inputs, TOKENS, {**plain, **options})
    list(stream)
    assert stream.ids[0, start:].tolist() == whole


def test_a_stream_that_is_left_ends_its_call(loaded: Any) -> None:
    processor, model = loaded
    before = threading.active_count()
    stream = stream_text(model, processor, [TEXT], 200, causal_mode="standard")
    assert [next(stream), next(stream)][0] != [""]
    assert threading.active_count() == before + 1
    stream.close()
    assert threading.active_count() == before


def test_an_error_of_the_call_is_that_of_the_stream(loaded: Any) -> None:
    processor, model = loaded
    with pytest.raises(ValueError, match="temperature"):
        next(stream_text(model, processor, [TEXT], 3, temperature=-1.0))


def test_softmax_sampling_restores_the_random_state_of_torch(loaded: Any) -> None:
    processor, model = loaded
    mode = modes.four_modes(1.0, 1.0, 1.0, 0.0, seed=3)[3]
    before = torch.get_rng_state()
    list(stream_text(model, processor, [TEXT], 3, 3, **mode.options))
    assert torch.equal(torch.get_rng_state(), before)


def test_batch_of_individuals_generates_what_each_generates_alone(loaded: Any) -> None:
    processor, model = loaded
    drawn = individuals.draw_first(model)
    texts = ["a king", "the old keeper of a light", TEXT]
    together = list(stream_text(model, processor, texts, TOKENS, **causal(drawn)))[-1]
    alone = [
        list(stream_text(model, processor, [text], TOKENS, **causal(one)))[-1][0]
        for text, one in zip(texts, drawn, strict=True)
    ]
    assert together == alone


def test_row_that_ended_stays_while_other_rows_grow(loaded: Any) -> None:
    processor, model = loaded
    options = causal(individuals.draw_first(model)[:2])
    whole = list(stream_text(model, processor, [TEXT] * 2, TOKENS, **options))
    ids = processor.tokenizer(whole[-1][0])["input_ids"]
    try:
        model.generation_config.eos_token_id = ids[0]
        cut = list(stream_text(model, processor, [TEXT] * 2, TOKENS, **options))
    finally:
        model.generation_config.eos_token_id = None
    assert cut[-1][0] == ""
    assert cut[-1][1] != ""


def test_interleaved_streams_grow_one_token_at_a_time() -> None:
    streams = [iter([["a"], ["ab"], ["abc"]]), iter([["x"]])]
    assert list(modes.interleave(streams)) == [
        ["a", ""],
        ["a", "x"],
        ["ab", "x"],
        ["abc", "x"],
    ]


# ---------------------------------------------------------------- queue


def test_queue_admits_some_requests_lets_some_wait_and_refuses_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("causal_qwen.playground.worker.POLL_SECONDS", 0.01)
    queue = AdmissionQueue(parallel=2, waiting=2)
    with queue.enter() as first, queue.enter() as second:
        assert (first(), second()) == (0, 0)
        with queue.enter() as third:
            assert third() == 1
            with queue.enter() as fourth:
                assert (third(), fourth()) == (1, 2)
                with pytest.raises(ValueError, match="4 requests"):
                    queue.enter().__enter__()
                assert fourth() == 2  # the refused one is not in line
        assert first() == 0
    with queue.enter() as again:
        assert again() == 0


def test_waiting_requests_are_admitted_in_order_of_arrival() -> None:
    queue = AdmissionQueue(parallel=1, waiting=3)
    came: list[int] = []
    waiting = [threading.Event() for _ in range(3)]

    def visitor(number: int) -> None:
        with queue.enter() as ask:
            waiting[number].set()
            while ask():
                pass
            came.append(number)

    visitors = [threading.Thread(target=visitor, args=(number,)) for number in range(3)]
    with queue.enter() as ask:
        assert ask() == 0
        for number, one in enumerate(visitors):
            one.start()
            waiting[number].wait(5)
        assert came == []
    for one in visitors:
        one.join(5)
    assert came == [0, 1, 2]


# ---------------------------------------------------------------- individuals


def test_individuals_are_drawn_saved_and_loaded(loaded: Any, tmp_path: Path) -> None:
    _, model = loaded
    drawn = individuals.draw_first(model)
    more = individuals.draw(drawn, model, "  Dora  the 1st ", " 42 ", 3.0, 0.1)
    assert individuals.names(drawn) == ["Ada", "Bo", "Chen"]  # the first list is unchanged
    dora = individuals.find(more, "Dora the 1st")
    assert dora == Individual.draw(model, seed=42, temperature=3.0, persistence=0.1)
    path = Path(individuals.save(dora, tmp_path))
    assert path.name == "Dora-the-1st.safetensors"
    back = individuals.load(drawn, path, model)
    assert back[-1] == dora
    assert back[-1].name == dora.name
    again = individuals.load(individuals.load(back, path, model), path, model)
    assert individuals.names(again)[-3:] == [dora.name, f"{dora.name} 2", f"{dora.name} 3"]


@pytest.mark.parametrize(("saved", "expected"), [(0.25, 0.25), (None, 1.0)])
def test_first_individuals_have_temperature_one_and_the_saved_persistence(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, saved: float | None, expected: float
) -> None:
    generation_config = loaded[1].generation_config
    monkeypatch.setattr(generation_config, "persistence", saved, raising=False)
    monkeypatch.setattr(generation_config, "temperature", 0.7)  # of softmax sampling
    drawn = individuals.draw_first(loaded[1])
    more = individuals.draw(drawn, loaded[1], "Dora", "4")
    assert {(one.temperature, one.persistence) for one in more} == {(1.0, expected)}


def test_bad_name_seed_selection_or_count_is_refused(loaded: Any) -> None:
    drawn = individuals.draw_first(loaded[1])
    with pytest.raises(ValueError, match="name Ada"):
        individuals.draw(drawn, loaded[1], "Ada")
    with pytest.raises(ValueError, match="25 characters"):
        individuals.draw(drawn, loaded[1], "A" * 25)
    with pytest.raises(ValueError, match="seed 'x1'"):
        individuals.draw(drawn, loaded[1], "Eve", "x1")
    with pytest.raises(ValueError, match=r"seed '9{18}'"):
        individuals.parse_seed("9" * 200)
    with pytest.raises(ValueError, match="No individual"):
        individuals.find(drawn, None)
    for number in range(individuals.MAX_INDIVIDUALS - len(drawn)):
        drawn = individuals.draw(drawn, loaded[1], f"No {number}")
    with pytest.raises(ValueError, match="12 individuals"):
        individuals.draw(drawn, loaded[1], "one too many")


def test_file_of_another_model_or_of_another_kind_is_refused(loaded: Any, tmp_path: Path) -> None:
    other = Individual.draw(loaded[1].config.causal_size + 1, seed=1, name="Other")
    other.save(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other.safetensors has 33 coordinates"):
        individuals.load([], tmp_path / "other.safetensors", loaded[1])
    (tmp_path / "noise.safetensors").write_bytes(b"nothing of this kind")
    with pytest.raises(ValueError, match=r"^noise.safetensors"):
        individuals.load([], tmp_path / "noise.safetensors", loaded[1])


# ---------------------------------------------------------------- counterfactuals


def test_every_kind_of_edit_changes_the_text(loaded: Any) -> None:
    processor, model = loaded
    ada = individuals.draw([], model, "Ada", "1", 4.0, 1.0)[0]  # whose first tokens all differ

    def compare(kind: str, **fields: Any) -> Any:
        return counterfactuals.compare(
            model, processor, ada, TEXT, kind, max_new_tokens=TOKENS, **fields
        )

    changed = compare("a word", word="king", other_word="cat")
    assert changed.counterfactual.prompt == "a cat has 7 horses"
    assert changed.factual.prompt == TEXT
    assert compare("a number", number="2.5").counterfactual.prompt == "a king has 2.5 horses"
    assert compare("the prompt", other_prompt=" hello ").counterfactual.prompt == "hello"
    token = compare("a word", word=changed.factual.tokens[2], other_word="~")
    assert token.counterfactual.tokens[:3] == [*changed.factual.tokens[:2], "~"]
    assert token.divergence == 2


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("a word", {"word": "", "other_word": "x"}, "missing"),
        ("a word", {"word": "absent", "other_word": "x"}, "'absent'"),
        ("a number", {"number": ""}, "'' is not a number"),
        ("a number", {"number": "1/2"}, "'1/2'"),
        ("a number", {"number": "7 or 8"}, "'7 or 8'"),
        ("a number", {"number": "1", "index": 4}, "Number 5"),
        ("the prompt", {"other_prompt": " "}, "empty"),
        ("a colour", {}, "a word, a number, the prompt"),
    ],
)
def test_invalid_edit_is_refused(
    loaded: Any, kind: str, fields: dict[str, Any], message: str
) -> None:
    processor, model = loaded
    with pytest.raises(ValueError, match=message):
        counterfactuals.compare(
            model,
            processor,
            individuals.draw_first(model)[0],
            TEXT,
            kind,
            max_new_tokens=2,
            **fields,
        )


# ---------------------------------------------------------------- token view


def test_token_view_equals_the_output_of_the_model(loaded: Any) -> None:
    processor, model = loaded
    typical = token_view.measure_typical(model, processor)
    index = 5
    found = token_view.explain_token(model, processor, TEXT, index, typical)
    inputs = processor(TEXT, return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs)
    s = Cauchy(output.logits[0, index - 1], output.scale_S[0, index - 1])
    p = model.decision(s).detach()
    assert found.total == pytest.approx(float(p.sum()), rel=1e-4)
    assert found.vocabulary == model.config.vocab_size
    assert (found.before, found.actual) == (TEXT[index - 1], TEXT[index])
    actual = [one for one in found.candidates if one.is_actual]
    k = int(inputs["input_ids"][0, index])
    assert len(actual) == 1
    assert actual[0].token == TEXT[index]
    assert actual[0].probability == pytest.approx(float(p[k]), rel=1e-3)
    assert actual[0].threshold == pytest.approx(float(model.decision.threshold.detach()[k]))
    assert found.candidates[0].probability == pytest.approx(float(p.max()), rel=1e-3)
    loc = output.loc_U[0, index - 1]
    for one in found.coordinates:
        assert one.loc == pytest.approx(float(loc[one.position]), rel=1e-3, abs=1e-4)
    distances = [abs(one.distance) for one in found.coordinates]
    assert distances == sorted(distances, reverse=True)
    every = ((loc - typical.median) / typical.spread).abs()
    assert distances[0] == pytest.approx(float(every.max()), rel=1e-3)


def test_contributions_of_all_coordinates_sum_to_the_score_difference(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The law is linear: W_k (loc - typical) is the sum of what the coordinates add."""
    processor, model = loaded
    monkeypatch.setattr(token_view, "COORDINATES", model.config.causal_size)
    typical = token_view.measure_typical(model, processor)
    found = token_view.explain_token(model, processor, TEXT, 5, typical)
    best = found.candidates[0]
    loc = torch.empty(model.config.causal_size)
    for one in found.coordinates:
        loc[one.position] = one.loc
    with torch.no_grad():
        scores, ordinary = model.lm_head(loc), model.lm_head(typical.median)
    k = int((scores - best.loc).abs().argmin())  # the best candidate, found by its score
    pushes = sum(one.contribution for one in found.coordinates)
    assert pushes == pytest.approx(float(scores[k] - ordinary[k]), rel=1e-3, abs=1e-3)


def test_next_token_has_a_view_and_the_first_token_has_none(loaded: Any) -> None:
    processor, model = loaded
    typical = token_view.measure_typical(model, processor)
    count = len(token_view.split_tokens(model, processor, TEXT))
    assert token_view.explain_token(model, processor, TEXT, count, typical).actual is None
    with pytest.raises(ValueError, match="first token"):
        token_view.explain_token(model, processor, TEXT, 0, typical)
    with pytest.raises(ValueError, match="outside a text"):
        token_view.explain_token(model, processor, TEXT, count + 1, typical)


# ---------------------------------------------------------------- predictors, rendering


def test_iris_predictor_is_fitted_step_by_step(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path))
    processor, model = loaded
    *watched, predictor = predictors.fit_irises(model, processor)
    assert watched[-1] == (predictors.FIT_ROWS + predictors.CALIBRATION_ROWS,) * 2
    assert isinstance(predictor, predictors.Predictor)
    assert predictor.example in predictors.read_irises()[0]
    found = predictor.forecast(predictor.example)
    (low, high), (lower, higher) = found.intervals[0.5], found.intervals[0.9]
    assert lower < low < found.median < high < higher
    assert found.median == predictor.median(predictor.distribution([predictor.example]))[0]
    drag = drag_range(predictor.example, 2)
    sweep = predictor.sweep(predictor.example, 2, drag)
    number = find_numbers(predictor.example)[2][1]
    assert (sweep.values[0], sweep.values[-1]) == (0, 2 * number)
    assert (sweep.low < sweep.median).all()
    assert (sweep.median < sweep.high).all()
    other = predictor.example.replace(find_numbers(predictor.example)[2][0], "2.1")
    answer = predictor.what_if(predictor.example, "4.5", other)
    assert answer.startswith("Observed 4.5 where ")
    assert "would have been" in answer
    for seen, edited, message in (("big", other, "no number"), ("4", predictor.example, "same")):
        with pytest.raises(ValueError, match=message):
            predictor.what_if(predictor.example, seen, edited)


def test_abandoned_iris_fit_is_completed_by_the_next_visitor(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path))
    state = AppState("name", *loaded)
    watched = state.fit_irises()
    assert next(watched) == (
        predictors.ROWS_PER_STEP,
        predictors.FIT_ROWS + predictors.CALIBRATION_ROWS,
    )
    watched.close()
    *_, predictor = state.fit_irises()
    assert list(state.fit_irises()) == [predictor] == [state.predictor(app_state.IRISES)]
    state.worker.close()


def test_saved_regressor_predicts_from_whole_sentences(loaded: Any, tmp_path: Path) -> None:
    frame = pd.DataFrame({"weight": np.arange(12.0), "kind": ["a", "b"] * 6})
    frame["price"] = 3 * frame["weight"] + 1
    regressor = CausalTextRegressor("scratch", size="tiny", epochs=1, verbose=False)
    regressor.fit(frame, "price").save(tmp_path / "priced")
    opened = OpenModel(*loaded)
    predictor = predictors.from_directory(str(tmp_path / "priced"), opened)
    assert predictor.example == "weight is unknown, kind is unknown. The price is"
    text = "weight is 5, kind is b. The price is"
    assert predictor.forecast(text).median == pytest.approx(regressor.predict(frame.iloc[[5]])[0])
    with pytest.raises(FileNotFoundError, match="is it a saved regressor"):
        predictors.from_directory(str(tmp_path), opened)


def test_a_regressor_of_columns_is_asked_with_a_line_for_every_column(
    loaded: Any, priced: Any, rings: Any, tmp_path: Path
) -> None:
    priced.save(tmp_path / "priced")
    predictor = predictors.from_directory(str(tmp_path / "priced"), OpenModel(*loaded))
    columns = [name for name in rings if name != "price"]
    assert [line.partition(" = ")[0] for line in predictor.example.splitlines()] == columns
    row = rings.iloc[[95]]
    text = predictors.write_lines(row, columns)
    assert predictors.read_lines(text, columns) == row[columns].iloc[0].to_dict()
    found = predictor.forecast(text)
    assert found.median == pytest.approx(float(priced.predict(row)[0]))
    assert found.intervals[0.9] == tuple(float(end[0]) for end in priced.predict_interval(row))
    other = text.replace(f"carat = {row['carat'].iloc[0]}", "carat = 1.9")
    expected = priced.counterfactual(row, 3000.0, carat=1.9)
    assert f"would have been {expected.median:.4g}" in predictor.what_if(text, "3000", other)
    with pytest.raises(ValueError, match="'colour = 1' is no column"):
        predictor.forecast("colour = 1")


def test_saved_regressor_shares_the_open_model_if_it_was_fitted_on_it(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path))
    processor, model = loaded
    for one in (model, processor):
        one.save_pretrained(tmp_path / "model")
    texts = [f"grade {grade}" for grade in "ABCDEFGHIJKL"]
    options = {"folds": 2, "value_space": "linear", "verbose": False, "sources": ["model"]}
    regressor = CausalTextRegressor(model=tmp_path / "model", **options)
    regressor.fit(texts, np.arange(12.0)).save(tmp_path / "kept")
    expected = regressor.of_sentences().predict([texts[3]])[0]

    def ask(opened: OpenModel) -> Any:
        return predictors.from_directory(str(tmp_path / "kept"), opened).forecast(texts[3]).median

    assert ask(OpenModel(processor, make_other(model))) == pytest.approx(expected)

    def refuse(path: Any) -> Any:
        raise AssertionError(f"{path} is opened although it is open")

    monkeypatch.setattr("causal_qwen.regression.backbone._open_cached", refuse)
    assert ask(OpenModel(processor, model)) == pytest.approx(expected)


def make_other(model: Any) -> Any:
    other = copy.deepcopy(model)
    other.model.norm.weight.data.mul_(2.0)
    return other


def test_regressor_is_loaded_once_unless_reloaded(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def open_one(path: str, model: OpenModel) -> str:
        assert model.model is loaded[1]
        opened.append(path)
        return f"regressor {len(opened)}"

    monkeypatch.setattr(predictors, "from_directory", open_one)
    state = AppState("name", *loaded)
    assert [state.predictor("a"), state.predictor("a")] == ["regressor 1"] * 2
    assert state.load_regressor("a") == state.predictor("a") == "regressor 2"
    for name in "bcde":
        state.predictor(name)
    assert list(state.regressors) == list("bcde")
    with pytest.raises(ValueError, match="iris regressor"):
        state.predictor(app_state.IRISES)
    state.worker.close()


def test_untrained_number_head_is_refused(loaded: Any) -> None:
    processor, model = loaded
    with pytest.raises(ValueError, match="values"):
        from_model(model, processor)


def causal(individual: Any) -> dict[str, Any]:
    return {"causal_mode": "causal", "individual": individual}


def parsed(page: str) -> ElementTree.Element:
    """A picture is well-formed: every tag closed, every letter of a text escaped."""
    return ElementTree.fromstring(page)


@given(st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=40))
def test_card_holds_the_generated_text_unchanged(text: str) -> None:
    root = parsed(rendering.cards([("title", "note", "prompt ", text)], is_done=True))
    assert [one.text or "" for one in root.iter("span") if one.get("class") == "new"] == [text]
    buttons = parsed(rendering.token_buttons([text, "b"], pressed=1)).findall(".//button")
    assert [one.get("aria-pressed") for one in buttons] == ["false", "true", "false"]


def test_comparison_shows_both_texts_and_every_step(loaded: Any) -> None:
    processor, model = loaded
    ada = individuals.draw_first(model)[0]
    result = counterfactuals.compare(
        model,
        processor,
        ada,
        TEXT,
        "the prompt",
        other_prompt="another beginning",
        max_new_tokens=TOKENS,
    )
    assert result.divergence is not None
    root = parsed(rendering.comparison(result))
    texts, steps = root.findall(".//table")
    for world in (result.factual, result.counterfactual):
        shown = "".join("".join(cell.itertext()) for cell in texts.iter("td"))
        assert rendering.readable(world.prompt + "".join(world.tokens)) in shown
    assert len(steps.findall(".//tbody/tr")) == TOKENS
    bars = root.findall(".//rect")
    assert len(bars) == TOKENS
    assert [bar.get("class") for bar in bars].index("minus") == result.divergence


@given(st.floats(-50, 50), st.floats(0.01, 10), st.booleans())
def test_forecast_is_drawn_inside_the_picture(loc: float, scale: float, is_infinite: bool) -> None:
    y = Cauchy(torch.tensor(loc).double(), torch.tensor(scale).double())
    one = NumberPrediction(y, ValueSpace("linear"), 1.0, y, torch.ones(1).double())
    wide = (-math.inf, math.inf) if is_infinite else one.interval(0.9)
    found = Forecast(one, one.median, {0.5: one.interval(0.5), 0.9: wide})
    root = parsed(rendering.forecast_picture("a <name>", found))
    assert "nan" not in ElementTree.tostring(root, encoding="unicode")
    places = [
        float(x) for x in re.findall(r"x1?='([-\d.]+)'", rendering.forecast_picture("", found))
    ]
    assert min(places) >= 0
    assert max(places) <= rendering.WIDTH


@pytest.mark.filterwarnings("ignore:a value beyond")
@pytest.mark.parametrize("scale", [50.0, 1e3])  # in symlog space: far out, and beyond all numbers
def test_unbounded_forecast_is_drawn_without_nan(scale: float) -> None:
    y = Cauchy(torch.tensor(1.0).double(), torch.tensor(scale).double())
    one = NumberPrediction(y, ValueSpace("symlog"), 1.0, y, torch.ones(1).double())
    found = Forecast(one, one.median, {level: one.interval(level) for level in predictors.LEVELS})
    shown = rendering.forecast_picture("", found)
    assert "nan" not in shown
    assert max(len(label) for label in parsed(shown).itertext()) < 60
    low, high = (np.full(3, end) for end in found.intervals[0.9])
    values = np.arange(3.0)
    assert "nan" not in rendering.sweep_picture(Sweep(values, values, low, high), 0, 1.0, 1.0)


def test_one_wide_interval_does_not_flatten_the_sweep() -> None:
    values = np.arange(5.0)
    wide = np.array([1, 1, 1e12, 1, 1])
    shown = rendering.sweep_picture(
        Sweep(values, values, values - wide, values + wide), 0, 1.0, 1.0
    )
    line = parsed(shown).find(".//polyline")
    assert line is not None
    heights = [float(point.split(",")[1]) for point in str(line.get("points")).split()]
    assert heights[0] - heights[-1] > 5


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.12345, "0.123"), (-999.9, "-1,000"), (123456.7, "123,457"), (1.7e308, "1.7e+308")],
)
def test_number_is_written_out_below_ten_million(value: float, shown: str) -> None:
    assert rendering._number(value) == shown


@given(
    st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=12),
    st.lists(st.decimals(-1000, 1000, places=2), max_size=4),
)
def test_every_number_of_a_text_can_be_dragged(word: str, numbers: list[Any]) -> None:
    text = "a " + " x ".join([word, *map(str, numbers)])
    root = parsed(rendering.draggable_text(text, 1))
    read = root.find("p")
    assert read is not None
    assert "".join(read.itertext()) == f"{text} …"
    dragged = [one for one in root.iter("span") if one.get("class") == "drag"]
    found = [(one.text, float(str(one.get("data-value")))) for one in dragged]
    assert found == find_numbers(text)
    for one in dragged:
        low, value, high = (
            float(str(one.get(f"data-{name}"))) for name in ("low", "value", "high")
        )
        assert low <= value <= high


def test_two_drawings_of_one_text_differ() -> None:
    text = "It has 7 doors"
    drawn = [rendering.draggable_text(text, turn) for turn in (1, 2)]
    assert drawn[0] != drawn[1]
    assert "no number" in rendering.draggable_text("no digit", 1)


def test_dot_of_a_sweep_is_at_the_present_value(loaded: Any) -> None:
    values = np.linspace(0, 10, 5)
    sweep = Sweep(values, values * 2, values * 2 - 1, values * 2 + 1)
    root = parsed(rendering.sweep_picture(sweep, 1, 5.0, 10.0))
    assert "number 2, now 5" in "".join(root.itertext())
    dot = root.find(".//circle")
    line = root.find(".//polyline")
    assert dot is not None
    assert line is not None
    middle = str(line.get("points")).split()[2]
    assert (dot.get("cx"), dot.get("cy")) == tuple(middle.split(","))


def test_bytes_of_a_character_are_shown_together(loaded: Any) -> None:
    processor, model = loaded
    text = "a 国王 has 🙂"
    tokens = token_view.split_tokens(model, processor, text)
    assert len(tokens) == len(processor(text)["input_ids"])
    assert "".join(tokens) == text


def test_token_view_shows_every_candidate(loaded: Any) -> None:
    processor, model = loaded
    found = token_view.explain_token(
        model, processor, TEXT, 5, token_view.measure_typical(model, processor)
    )
    root = parsed(rendering.token_view(found))
    assert len(root.findall(".//table")) == 2
    assert len(root.findall(".//circle")) == token_view.CANDIDATES
    assert len(root.findall(".//tr[@class='chosen']")) == 1


# ---------------------------------------------------------------- server


def test_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"^127.0.0.1:{port} cannot be used .*--port\.$"):
            bind("127.0.0.1", port)
    with bind("127.0.0.1", port) as bound:
        assert bound.getsockname() == ("127.0.0.1", port)
    with bind("127.0.0.1", 0) as bound:
        assert bound.getsockname()[1] > 0


@pytest.mark.parametrize("host", ["no such host", "256.1.1.1", "[::1]x"])
def test_address_that_cannot_be_used_is_named(host: str) -> None:
    with pytest.raises(OSError, match=rf"^{re.escape(host)}:0 cannot be used .*--(host|port)\.$"):
        bind(host, 0)


def test_missing_gradio_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)  # and back again
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ImportError, match=r"'\.\[app\]' in a clone"):
        launch(port=0)


def test_number_of_an_older_text_is_left_to_the_edit() -> None:
    """The browser sends a selection before it has received the choices of the new text."""
    from causal_qwen.playground import page  # and Gradio

    box = page._number_box("from 3 to 7")
    assert box.preprocess(1) == 1
    assert page._number_box("no numbers").preprocess(0) == 0  # Gradio would list its choices
