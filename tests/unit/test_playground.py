"""The playground's plain functions: no browser, no Gradio, tiny models."""

from __future__ import annotations

import copy
import math
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.modeling.value_space import ValueSpace
from causal_qwen.playground import inside, limits, oracles, people, pictures, voices, worlds
from causal_qwen.playground.oracles import Forecast, Sweep, of_model
from causal_qwen.playground.server import OFFLINE, check_port, launch
from causal_qwen.playground.studio import Studio
from causal_qwen.playground.wording import (
    change_number,
    change_word,
    dial_of,
    dials_of,
    numbers_of,
    on_dial,
)
from causal_qwen.playground.worker import Door, Worker
from causal_qwen.regression.prediction import NumberPrediction
from causal_qwen.regression.regressor import CausalTextRegressor, OpenModel
from causal_qwen.text.numerals import encode

TOKENS = 6
TEXT = "a king has 7 horses"


@pytest.fixture(scope="module")
def speaker(make_model: Callable[..., Any], byte_tokenizer: Callable[..., Any]) -> tuple[Any, Any]:
    """A processor of bytes and a tiny model."""
    processor = CausalQwenProcessor(byte_tokenizer())
    model = make_model(vocab_size=300, num_token_id=processor.num_token_id)
    return processor, model


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker()
    yield one
    one.close()


# ---------------------------------------------------------------- limits, worker


@pytest.mark.parametrize("text", ["", "  \n ", None])
def test_an_empty_prompt_is_refused(speaker: Any, text: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        limits.check_prompt(text, speaker[0])


def test_a_prompt_is_limited_in_letters_and_in_tokens(speaker: Any) -> None:
    longest = "a" * limits.PROMPT_TOKENS
    assert limits.check_prompt(f" {longest} ", speaker[0]) == longest
    with pytest.raises(ValueError, match="201 tokens; the playground takes 200"):
        limits.check_prompt(longest + "a", speaker[0])
    with pytest.raises(ValueError, match="1,001 characters; the playground takes 1,000"):
        limits.check_prompt("a" * 1001, speaker[0])


def test_prompts_are_one_on_each_line(speaker: Any) -> None:
    assert limits.check_prompts("one\n\n two \n", speaker[0]) == ["one", "two"]
    with pytest.raises(ValueError, match="6 prompts are too many"):
        limits.check_prompts("a\n" * 6, speaker[0])
    with pytest.raises(ValueError, match="no prompt"):
        limits.check_prompts("\n\n", speaker[0])


def test_the_worker_does_everything_in_one_thread_and_visitors_take_turns(worker: Worker) -> None:
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
        for _ in worker.each(count(name)):
            both_begin.wait()  # in step: nobody can run ahead

    visitors = [threading.Thread(target=visitor, args=(name,)) for name in "ab"]
    for one in visitors:
        one.start()
    for one in visitors:
        one.join()
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert [number for _, number in order] == [n for n in range(20) for _ in "ab"]


def test_what_goes_wrong_in_the_worker_is_raised_where_it_was_asked(worker: Worker) -> None:
    with pytest.raises(ZeroDivisionError):
        worker.do(lambda: 1 / 0)
    assert worker.do(int, "7") == 7  # and it works on


# ---------------------------------------------------------------- wording


@given(st.floats(-1e6, 1e6), st.integers(0, 2))
def test_a_changed_number_reads_as_its_value_and_nothing_else_changes(
    value: float, place: int
) -> None:
    text = "From 3 apples, 4.5 pears and 12 plums."
    changed = numbers_of(change_number(text, place, value))
    expected = [3.0, 4.5, 12.0]
    expected[place] = value
    assert [found for _, found in changed] == pytest.approx(expected, rel=1e-14, abs=1e-300)
    assert encode(change_number(text, place, value)).pieces == encode(text).pieces


def test_a_number_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="Number 3 is asked to change, but the text holds 2"):
        change_number("1 and 2", 2, 5.0)


@given(st.decimals("0.1", "5000", places=1), st.floats(0, 1))
def test_a_dial_goes_from_zero_to_twice_the_number_in_its_own_decimals(
    number: Any, share: float
) -> None:
    dial = dial_of(f"It weighs {number} kg.", 0)
    assert (dial.low, dial.high) == (0, 2 * float(number))
    value = on_dial(dial, share)
    assert dial.low <= value <= dial.high + dial.step
    assert value == pytest.approx(dial.low + share * (dial.high - dial.low), abs=dial.step)
    assert round(value, 1) == pytest.approx(value, abs=1e-9)
    assert on_dial(dial, 0) == 0


def test_dials_of_negative_numbers_and_of_zero() -> None:
    assert dial_of("It is -4 degrees.", 0)[:2] == (-8, 0)
    assert dial_of("It is 0 degrees.", 0)[:2] == (-10, 10)


@given(st.floats(5e-324, 1.7e308) | st.floats(-1.7e308, -5e-324))
def test_every_number_has_a_dial_that_can_be_turned(number: float) -> None:
    text = f"It is {number!r} now"
    dial = dial_of(text, 0)
    assert 0 < dial.step <= dial.high - dial.low < math.inf
    for share in (0.0, 0.4, 1.0):
        assert numbers_of(change_number(text, 0, on_dial(dial, share)))
    assert dial_of("It is 2e-5 now", 0).step == pytest.approx(4e-8)


def test_a_word_is_changed_whole_and_once() -> None:
    assert change_word("Kingdoms: the king, the king.", "king", "queen") == (
        "Kingdoms: the queen, the king."
    )
    assert change_word("the king's horse", "king's", "queen's") == "the queen's horse"
    assert change_word("the kings", "king", "queen") is None
    assert change_word("a (b) c", "(b)", r"\1") == r"a \1 c"


def test_a_word_is_found_where_no_blanks_stand_around_it() -> None:
    assert change_word("国王有一个女儿", "女儿", "儿子") == "国王有一个儿子"
    assert change_word("我有iPhone手机", "iPhone", "Nokia") == "我有Nokia手机"
    assert change_word("我有iPhones", "iPhone", "Nokia") is None


# ---------------------------------------------------------------- page


def test_whatever_goes_wrong_is_told_and_the_page_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from causal_qwen.playground import page  # and Gradio

    told: list[str] = []
    monkeypatch.setattr(page.gr, "Warning", told.append)

    @page.polite
    def answer(error: Exception) -> None:
        raise error

    @page.polite
    def stream(error: Exception) -> Iterator[str]:
        yield "a word"
        raise error

    stays = page.gr.skip()
    assert answer(ValueError("The text <b> is empty.")) == stays
    assert list(stream(OSError("It is gone."))) == ["a word", stays]
    assert capsys.readouterr().err == ""
    assert answer(KeyError("x")) == stays
    assert "KeyError" in capsys.readouterr().err
    assert told[:2] == ["The text &lt;b&gt; is empty.", "It is gone."]
    assert told[2].startswith("That went wrong (KeyError)")


# ---------------------------------------------------------------- voices


@pytest.mark.parametrize("place", range(4), ids=["standard", "sampling", "causal", "compatible"])
def test_a_text_grown_token_by_token_is_the_one_that_generate_says(
    speaker: Any, place: int
) -> None:
    processor, model = speaker
    mode = voices.four_modes(2.0, 2.0, 1.0, 0.05, seed=3)[place]
    grown = list(voices.speak(model, processor, [TEXT], TOKENS, mode.seed, **mode.options))
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


def test_softmax_sampling_leaves_torchs_randomness_as_it_was(speaker: Any) -> None:
    processor, model = speaker
    mode = voices.four_modes(1.0, 1.0, 1.0, 0.0, seed=3)[3]
    before = torch.get_rng_state()
    list(voices.speak(model, processor, [TEXT], 3, mode.seed, **mode.options))
    assert torch.equal(torch.get_rng_state(), before)


def test_many_speak_together_as_each_would_alone(speaker: Any) -> None:
    processor, model = speaker
    them = people.meet(model)
    texts = ["a king", "the old keeper of a light", TEXT]
    together = list(voices.speak(model, processor, texts, TOKENS, **voices.one_speaker(them)))[-1]
    alone = [
        list(voices.speak(model, processor, [text], TOKENS, **voices.one_speaker(one)))[-1][0]
        for text, one in zip(texts, them, strict=True)
    ]
    assert together == alone


def test_a_text_ends_at_its_end_while_others_go_on(speaker: Any) -> None:
    processor, model = speaker
    options = voices.one_speaker(people.meet(model)[:2])
    whole = list(voices.speak(model, processor, [TEXT] * 2, TOKENS, **options))
    ids = processor.tokenizer(whole[-1][0])["input_ids"]
    try:
        model.generation_config.eos_token_id = ids[0]
        cut = list(voices.speak(model, processor, [TEXT] * 2, TOKENS, **options))
    finally:
        model.generation_config.eos_token_id = None
    assert cut[-1][0] == ""
    assert cut[-1][1] != ""


def test_speakers_take_turns() -> None:
    streams = [iter([["a"], ["ab"], ["abc"]]), iter([["x"]])]
    assert list(voices.take_turns(streams)) == [
        ["a", ""],
        ["a", "x"],
        ["ab", "x"],
        ["abc", "x"],
    ]


# ---------------------------------------------------------------- door


def test_the_door_lets_in_some_lets_some_wait_and_refuses_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("causal_qwen.playground.worker.MOMENT", 0.01)
    door = Door(inside=2, waiting=2)
    with door.enter() as first, door.enter() as second:
        assert (first(), second()) == (0, 0)
        with door.enter() as third:
            assert third() == 1
            with door.enter() as fourth:
                assert (third(), fourth()) == (1, 2)
                with pytest.raises(ValueError, match="4 requests are being answered already"):
                    door.enter().__enter__()
                assert fourth() == 2  # the refused one is not in line
        assert first() == 0
    with door.enter() as again:
        assert again() == 0


def test_whoever_waits_goes_in_when_somebody_leaves_first_come_first_served() -> None:
    door = Door(inside=1, waiting=3)
    came: list[int] = []
    waiting = [threading.Event() for _ in range(3)]

    def visitor(number: int) -> None:
        with door.enter() as ask:
            waiting[number].set()
            while ask():
                pass
            came.append(number)

    visitors = [threading.Thread(target=visitor, args=(number,)) for number in range(3)]
    with door.enter() as ask:
        assert ask() == 0
        for number, one in enumerate(visitors):
            one.start()
            waiting[number].wait(5)
        assert came == []
    for one in visitors:
        one.join(5)
    assert came == [0, 1, 2]


# ---------------------------------------------------------------- people


def test_people_are_drawn_kept_and_brought_back(speaker: Any, tmp_path: Path) -> None:
    _, model = speaker
    them = people.meet(model)
    more = people.draw(them, model, "  Dora  the 1st ", " 42 ", 3.0, 0.1)
    assert people.names(them) == ["Ada", "Bo", "Chen"]  # nobody's list changed
    dora = people.find(more, "Dora the 1st")
    assert dora == Individual.draw(model, seed=42, temperature=3.0, min_density=0.1)
    path = people.keep(dora, tmp_path)
    assert path.name == "Dora-the-1st.safetensors"
    back = people.bring(them, path, model)
    assert back[-1] == dora
    assert back[-1].name == dora.name
    again = people.bring(people.bring(back, path, model), path, model)
    assert people.names(again)[-3:] == [dora.name, f"{dora.name} 2", f"{dora.name} 3"]


def test_people_have_names_of_their_own(speaker: Any) -> None:
    them = people.meet(speaker[1])
    with pytest.raises(ValueError, match="somebody called Ada already"):
        people.draw(them, speaker[1], "Ada")
    with pytest.raises(ValueError, match="1 to 24 letters"):
        people.draw(them, speaker[1], "A" * 25)
    with pytest.raises(ValueError, match="The seed 'x1' is no whole number"):
        people.draw(them, speaker[1], "Eve", "x1")
    with pytest.raises(ValueError, match=r"The seed '9{18}' is no whole number of up to 18 digits"):
        people.seed_of("9" * 200)
    with pytest.raises(ValueError, match="Nobody is chosen"):
        people.find(them, None)
    for number in range(limits.PEOPLE - len(them)):
        them = people.draw(them, speaker[1], f"No {number}")
    with pytest.raises(ValueError, match="12 people are enough"):
        people.draw(them, speaker[1], "one too many")


def test_strangers_are_turned_away(speaker: Any, tmp_path: Path) -> None:
    other = Individual.draw(speaker[1].config.causal_size + 1, seed=1, name="Other")
    other.save(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other.safetensors has 33 coordinates .* another model"):
        people.bring([], tmp_path / "other.safetensors", speaker[1])
    (tmp_path / "noise.safetensors").write_bytes(b"nothing of this kind")
    with pytest.raises(ValueError, match=r"^noise.safetensors holds no individual\.$"):
        people.bring([], tmp_path / "noise.safetensors", speaker[1])


# ---------------------------------------------------------------- worlds


def test_every_kind_of_edit_makes_its_world(speaker: Any) -> None:
    processor, model = speaker
    ada = people.meet(model)[0]

    def imagine(kind: str, **fields: Any) -> Any:
        return worlds.imagine(model, processor, ada, TEXT, kind, max_new_tokens=TOKENS, **fields)

    changed = imagine("a word", word="king", other_word="cat")
    assert changed.counterfactual.prompt == "a cat has 7 horses"
    assert changed.factual.prompt == TEXT
    assert imagine("a number", number="2.5").counterfactual.prompt == "a king has 2.5 horses"
    assert imagine("the prompt", other_prompt=" hello ").counterfactual.prompt == "hello"
    said = imagine("a word", word=changed.factual.tokens[2], other_word="~")
    assert said.counterfactual.tokens[:3] == [*changed.factual.tokens[:2], "~"]
    assert said.divergence == 2


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("a word", {"word": "", "other_word": "x"}, "needs both"),
        ("a word", {"word": "absent", "other_word": "x"}, "'absent' is neither a word"),
        ("a number", {"number": ""}, "'' is no number; write one such as 12"),
        ("a number", {"number": "1/2"}, "'1/2' is no number"),
        ("a number", {"number": "7 or 8"}, "'7 or 8' is no number"),
        ("a number", {"number": "1", "place": 4}, "Number 5 is asked to change"),
        ("the prompt", {"other_prompt": " "}, "The text is empty"),
        ("a colour", {}, "no edit; choose a word, a number, the prompt"),
    ],
)
def test_an_edit_that_cannot_be_is_named(
    speaker: Any, kind: str, fields: dict[str, Any], message: str
) -> None:
    processor, model = speaker
    with pytest.raises(ValueError, match=message):
        worlds.imagine(
            model, processor, people.meet(model)[0], TEXT, kind, max_new_tokens=2, **fields
        )


# ---------------------------------------------------------------- inside


def test_the_anatomy_of_a_token_is_what_the_model_says(speaker: Any) -> None:
    processor, model = speaker
    usual = inside.get_used_to(model, processor)
    place = 5
    found = inside.look(model, processor, TEXT, place, usual)
    inputs = processor(TEXT, return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs)
    s = Cauchy(output.logits[0, place - 1], output.scale_S[0, place - 1])
    p = model.decision(s).detach()
    assert found.total == pytest.approx(float(p.sum()), rel=1e-4)
    assert found.vocabulary == model.config.vocab_size
    assert (found.before, found.said) == (TEXT[place - 1], TEXT[place])
    said = [one for one in found.candidates if one.is_said]
    k = int(inputs["input_ids"][0, place])
    assert len(said) == 1
    assert said[0].token == TEXT[place]
    assert said[0].probability == pytest.approx(float(p[k]), rel=1e-3)
    assert said[0].threshold == pytest.approx(float(model.decision.threshold.detach()[k]))
    assert found.candidates[0].probability == pytest.approx(float(p.max()), rel=1e-3)
    loc = output.loc_U[0, place - 1]
    for one in found.coordinates:
        assert one.loc == pytest.approx(float(loc[one.place]), rel=1e-3, abs=1e-4)
    distances = [abs(one.distance) for one in found.coordinates]
    assert distances == sorted(distances, reverse=True)
    every = ((loc - usual.median) / usual.spread).abs()
    assert distances[0] == pytest.approx(float(every.max()), rel=1e-3)


def test_the_pushes_of_all_coordinates_make_the_whole_difference(
    speaker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The law is linear: W_k (loc - usual) is the sum of what the coordinates add."""
    processor, model = speaker
    monkeypatch.setattr(inside, "COORDINATES", model.config.causal_size)
    usual = inside.get_used_to(model, processor)
    found = inside.look(model, processor, TEXT, 5, usual)
    best = found.candidates[0]
    loc = torch.empty(model.config.causal_size)
    for one in found.coordinates:
        loc[one.place] = one.loc
    with torch.no_grad():
        scores, ordinary = model.lm_head(loc), model.lm_head(usual.median)
    k = int((scores - best.loc).abs().argmin())  # the best candidate, found by its score
    pushes = sum(one.push for one in found.coordinates)
    assert pushes == pytest.approx(float(scores[k] - ordinary[k]), rel=1e-3, abs=1e-3)


def test_the_next_token_has_an_anatomy_and_the_first_has_none(speaker: Any) -> None:
    processor, model = speaker
    usual = inside.get_used_to(model, processor)
    count = len(inside.tokens_of(model, processor, TEXT))
    assert inside.look(model, processor, TEXT, count, usual).said is None
    with pytest.raises(ValueError, match="Nothing stands before the first token"):
        inside.look(model, processor, TEXT, 0, usual)
    with pytest.raises(ValueError, match="outside a text"):
        inside.look(model, processor, TEXT, count + 1, usual)


# ---------------------------------------------------------------- oracles, pictures


def test_flowers_are_learned_while_one_watches(
    speaker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path))
    processor, model = speaker
    *watched, oracle = oracles.learn_flowers(model, processor)
    assert watched[-1] == (oracles.LEARN + oracles.HOLD_OUT,) * 2
    assert isinstance(oracle, oracles.Oracle)
    assert oracle.example in oracles.flowers()[0]
    found = oracle.forecast(oracle.example)
    (low, high), (lower, higher) = found.intervals[0.5], found.intervals[0.9]
    assert lower < low < found.median < high < higher
    assert found.median == pytest.approx(oracle.density([oracle.example]).median[0])
    dial = dial_of(oracle.example, 2)
    sweep = oracle.sweep(oracle.example, 2, dial)
    number = numbers_of(oracle.example)[2][1]
    assert (sweep.values[0], sweep.values[-1]) == (0, 2 * number)
    assert (sweep.low < sweep.median).all()
    assert (sweep.median < sweep.high).all()


def test_whoever_leaves_while_flowers_are_learned_leaves_them_to_the_next(
    speaker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path))
    studio = Studio("name", *speaker, tmp_path)
    watched = studio.learn_flowers()
    assert next(watched) == (oracles.AT_ONCE, oracles.LEARN + oracles.HOLD_OUT)
    watched.close()
    *_, oracle = studio.learn_flowers()
    assert list(studio.learn_flowers()) == [oracle] == [studio.oracle(oracles.IRISES)]
    studio.close()


def test_a_saved_regressor_is_asked_with_whole_sentences(speaker: Any, tmp_path: Path) -> None:
    frame = pd.DataFrame({"weight": np.arange(12.0), "kind": ["a", "b"] * 6})
    frame["price"] = 3 * frame["weight"] + 1
    regressor = CausalTextRegressor("scratch", size="tiny", epochs=1, verbose=False)
    regressor.fit(frame, "price").save(tmp_path / "priced")
    opened = OpenModel(*speaker)
    oracle = oracles.of_directory(str(tmp_path / "priced"), opened)
    assert oracle.example == "weight is unknown, kind is unknown. The price is"
    text = "weight is 5, kind is b. The price is"
    assert oracle.forecast(text).median == pytest.approx(regressor.predict(frame.iloc[[5]])[0])
    with pytest.raises(FileNotFoundError, match="is it a saved regressor"):
        oracles.of_directory(str(tmp_path), opened)


def test_a_saved_regressor_shares_the_open_model_if_it_was_fitted_on_it(
    speaker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path))
    processor, model = speaker
    for one in (model, processor):
        one.save_pretrained(tmp_path / "model")
    texts = [f"grade {grade}" for grade in "ABCDEFGHIJKL"]
    options = {"folds": 2, "value_space": "linear", "verbose": False}
    regressor = CausalTextRegressor(model=tmp_path / "model", **options)
    regressor.fit(texts, np.arange(12.0)).save(tmp_path / "kept")
    expected = regressor.of_sentences().predict([texts[3]])[0]

    def ask(opened: OpenModel) -> Any:
        return oracles.of_directory(str(tmp_path / "kept"), opened).forecast(texts[3]).median

    assert ask(OpenModel(processor, make_other(model))) == pytest.approx(expected)

    def refuse(path: Any) -> Any:
        raise AssertionError(f"{path} is opened although it is open")

    monkeypatch.setattr("causal_qwen.regression.backbone._open_cached", refuse)
    assert ask(OpenModel(processor, model)) == pytest.approx(expected)


def make_other(model: Any) -> Any:
    other = copy.deepcopy(model)
    other.model.norm.weight.data.mul_(2.0)
    return other


def test_a_regressor_is_opened_once_unless_it_is_asked_for_anew(
    speaker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def open_one(path: str, model: OpenModel) -> str:
        assert model.model is speaker[1]
        opened.append(path)
        return f"regressor {len(opened)}"

    monkeypatch.setattr(oracles, "of_directory", open_one)
    studio = Studio("name", *speaker, tmp_path)
    assert [studio.oracle("a"), studio.oracle("a")] == ["regressor 1"] * 2
    assert studio.open_regressor("a") == studio.oracle("a") == "regressor 2"
    for name in "bcde":
        studio.oracle(name)
    assert list(studio.regressors) == list("bcde")
    with pytest.raises(ValueError, match="still being learned"):
        studio.oracle(oracles.IRISES)
    studio.close()


def test_an_untrained_number_head_is_not_asked(speaker: Any) -> None:
    processor, model = speaker
    with pytest.raises(ValueError, match="not trained on values"):
        of_model(model, processor)


def parsed(page: str) -> ElementTree.Element:
    """A picture is well-formed: every tag closed, every letter of a text escaped."""
    return ElementTree.fromstring(page)


@given(st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=40))
def test_whatever_is_said_stands_in_the_card_as_text(said: str) -> None:
    root = parsed(pictures.cards([("title", "note", "prompt ", said)], is_done=True))
    assert [one.text or "" for one in root.iter("span") if one.get("class") == "new"] == [said]
    buttons = parsed(pictures.token_buttons([said, "b"], pressed=1)).findall(".//button")
    assert [one.get("aria-pressed") for one in buttons] == ["false", "true", "false"]


def test_both_worlds_are_marked_where_they_part(speaker: Any) -> None:
    processor, model = speaker
    ada = people.meet(model)[0]
    result = worlds.imagine(
        model,
        processor,
        ada,
        TEXT,
        "the prompt",
        other_prompt="another beginning",
        max_new_tokens=TOKENS,
    )
    assert result.divergence is not None
    root = parsed(pictures.two_worlds(result))
    marks = ["".join(one.itertext()) for one in root.iter("mark")]
    step = result.divergence
    said = (result.factual.tokens[step], result.counterfactual.tokens[step])
    shown = [token.lstrip() or token.replace(" ", "·").replace("\n", "↵") for token in said]
    assert marks == [pictures.readable(token) for token in shown]
    assert len(root.findall(".//tbody/tr")) == TOKENS
    assert len(root.findall(".//rect")) == TOKENS


@given(st.floats(-50, 50), st.floats(0.01, 10), st.booleans())
def test_a_forecast_is_drawn_where_it_is(loc: float, scale: float, is_infinite: bool) -> None:
    y = Cauchy(torch.tensor(loc).double(), torch.tensor(scale).double())
    one = NumberPrediction(y, ValueSpace("linear"), 1.0, y, torch.ones(1).double())
    wide = (-math.inf, math.inf) if is_infinite else one.interval(0.9)
    found = Forecast(one, one.median, {0.5: one.interval(0.5), 0.9: wide})
    root = parsed(pictures.forecast_picture("a <name>", found))
    assert "nan" not in ElementTree.tostring(root, encoding="unicode")
    places = [
        float(x) for x in re.findall(r"x1?='([-\d.]+)'", pictures.forecast_picture("", found))
    ]
    assert min(places) >= 0
    assert max(places) <= pictures.WIDTH


@pytest.mark.filterwarnings("ignore:a value beyond")
@pytest.mark.parametrize("scale", [50.0, 1e3])  # in symlog space: far out, and beyond all numbers
def test_a_forecast_without_bounds_is_drawn_all_the_same(scale: float) -> None:
    y = Cauchy(torch.tensor(1.0).double(), torch.tensor(scale).double())
    one = NumberPrediction(y, ValueSpace("symlog"), 1.0, y, torch.ones(1).double())
    found = Forecast(one, one.median, {level: one.interval(level) for level in oracles.LEVELS})
    shown = pictures.forecast_picture("", found)
    assert "nan" not in shown
    assert max(len(label) for label in parsed(shown).itertext()) < 60
    low, high = (np.full(3, end) for end in found.intervals[0.9])
    values = np.arange(3.0)
    assert "nan" not in pictures.sweep_picture(Sweep(values, values, low, high), 0, 1.0, 1.0)


def test_one_wide_interval_does_not_dwarf_the_others() -> None:
    values = np.arange(5.0)
    wide = np.array([1, 1, 1e12, 1, 1])
    shown = pictures.sweep_picture(Sweep(values, values, values - wide, values + wide), 0, 1.0, 1.0)
    line = parsed(shown).find(".//polyline")
    assert line is not None
    heights = [float(point.split(",")[1]) for point in str(line.get("points")).split()]
    assert heights[0] - heights[-1] > 5


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.12345, "0.123"), (-999.9, "-1,000"), (123456.7, "123,457"), (1.7e308, "1.7e+308")],
)
def test_a_number_is_written_out_unless_it_is_far(value: float, shown: str) -> None:
    assert pictures._number(value) == shown


@given(
    st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=12),
    st.lists(st.decimals(-1000, 1000, places=2), max_size=4),
)
def test_every_number_of_a_sentence_can_be_dragged(word: str, numbers: list[Any]) -> None:
    text = "a " + " x ".join([word, *map(str, numbers)])
    root = parsed(pictures.sentence(text, dials_of(text), 1))
    read = root.find("p")
    assert read is not None
    assert "".join(read.itertext()) == f"{text} …"
    dragged = [one for one in root.iter("span") if one.get("class") == "drag"]
    found = [(one.text, float(str(one.get("data-value")))) for one in dragged]
    assert found == numbers_of(text)
    for one in dragged:
        low, value, high = (
            float(str(one.get(f"data-{name}"))) for name in ("low", "value", "high")
        )
        assert low <= value <= high


def test_one_sentence_drawn_twice_is_drawn_anew() -> None:
    text = "It has 7 doors"
    drawn = [pictures.sentence(text, dials_of(text), turn) for turn in (1, 2)]
    assert drawn[0] != drawn[1]
    assert "No number stands" in pictures.sentence("no digit", [], 1)


def test_the_dot_of_a_sweep_stands_on_the_value(speaker: Any) -> None:
    values = np.linspace(0, 10, 5)
    sweep = Sweep(values, values * 2, values * 2 - 1, values * 2 + 1)
    root = parsed(pictures.sweep_picture(sweep, 1, 5.0, 10.0))
    assert "number 2, now 5" in "".join(root.itertext())
    dot = root.find(".//circle")
    line = root.find(".//polyline")
    assert dot is not None
    assert line is not None
    middle = str(line.get("points")).split()[2]
    assert (dot.get("cx"), dot.get("cy")) == tuple(middle.split(","))


def test_the_bytes_of_a_character_are_not_shown_apart(speaker: Any) -> None:
    processor, model = speaker
    text = "a 国王 has 🙂"
    tokens = inside.tokens_of(model, processor, text)
    assert len(tokens) == len(processor(text)["input_ids"])
    assert "".join(tokens) == text


def test_an_anatomy_is_drawn_with_every_candidate(speaker: Any) -> None:
    processor, model = speaker
    found = inside.look(model, processor, TEXT, 5, inside.get_used_to(model, processor))
    root = parsed(pictures.anatomy(found))
    assert len(root.findall(".//table")) == 2
    assert len(root.findall(".//circle")) == inside.CANDIDATES
    assert len(root.findall(".//tr[@class='here']")) == 1


# ---------------------------------------------------------------- server


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"^127.0.0.1:{port} cannot be used .*--port\.$"):
            check_port("127.0.0.1", port)
    assert check_port("127.0.0.1", port) == port
    assert check_port("127.0.0.1", 0) > 0


def test_a_missing_gradio_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)  # and back again
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ImportError, match=r"pip install 'causal-qwen\[app\]'$"):
        launch(port=0)
