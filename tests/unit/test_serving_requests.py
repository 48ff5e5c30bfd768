"""Requests: fields of a request -> the call of `generate`. Runs without torch."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.decoding.settings import DEFAULTS, SOFTMAX, resolve_settings
from causal_qwen.individuals import Individual, seed_of
from causal_qwen.serving.requests import (
    Call,
    ChatRequest,
    CompletionRequest,
    Limits,
    RequestError,
    TextRequest,
    read,
)

SIZE = 7
SAVED = {"noise_gain": 3.0, "min_density": 0.05, "causal_min_p": 0.1, "persistence": 0.5}
ADA = Individual.draw(SIZE, seed=3, temperature=0.5, persistence=0.25)


def find(name: str) -> int | Individual:
    return ADA if name == "Ada" else seed_of(name)


def settings(default_mode: str = "standard", **options: Any) -> Any:
    return resolve_settings(options, SAVED, default_mode=default_mode)


def parse(kind: str = "completion", **body: Any) -> TextRequest:
    said = {"messages": [{"role": "user", "content": "Hi"}]} if kind == "chat" else {"prompt": "Hi"}
    return checked(ChatRequest if kind == "chat" else CompletionRequest, {**said, **body})


def checked(model: type[TextRequest], fields: Any) -> TextRequest:
    request = read(model, fields)
    request.check(Limits())
    return request


def resolve(default_mode: str = "standard", **body: Any) -> Call:
    def of_model(**options: Any) -> Any:
        return settings(default_mode, **options)

    return parse(**body).resolve(of_model, of_model().mode, find)


CALLS: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "standard", None),
    ({"temperature": 0}, "standard", None),
    ({"temperature": 0, "user": "ada"}, "standard", None),
    ({"temperature": 0.7, "seed": 5}, "sampling", 5),
    ({"temperature": 0.7, "user": "ada"}, "causal", seed_of("ada")),
    ({"user": "ada"}, "causal", seed_of("ada")),
    ({"user": "ada", "individual": 8}, "causal", 8),
    ({"user": "ada", "causal_mode": "causal", "seed": 9}, "causal", seed_of("ada")),
    ({"user": "ada", "seed": 9}, "causal", seed_of("ada")),
    ({"individual": 8, "seed": 9}, "causal", 8),
    ({"individual": 8}, "causal", 8),
    ({"individual": "8"}, "causal", 8),
    ({"individual": "Ada"}, "causal", ADA),
    ({"individual": 8, "do_sample": True}, "sampling", 8),
    ({"causal_mode": "causal", "temperature": 0, "individual": 8}, "causal", 8),
    ({"causal_mode": "compatible", "user": "ada"}, "compatible", None),
    ({"seed": 5}, "standard", None),
]


def test_fields_stand_for_a_mode_and_an_individual() -> None:
    for body, mode, individual in CALLS:
        call = resolve(**body)
        assert call.settings.mode == mode, body
        assert call.options.get("individual") == individual, body


def test_a_model_without_heads_ignores_the_user_and_draws_by_softmax() -> None:
    call = resolve("compatible", user="ada", temperature=0.7, seed=4)
    assert (call.settings.mode, call.settings.do_sample, call.seed) == ("compatible", True, 4)
    assert call.settings.temperature == 0.7
    greedy = resolve("compatible", user="ada", temperature=0)
    assert (greedy.settings.mode, greedy.settings.do_sample) == ("compatible", False)


def test_users_have_seeds_of_their_own_that_json_keeps() -> None:
    seeds = {seed_of(f"user {number}") for number in range(1000)}
    assert len(seeds) == 1000
    assert max(seeds) < 2**53
    assert seed_of("ada") == 4743581480125735  # the same on every machine, in every version


def test_what_is_left_to_chance_is_drawn_and_reported() -> None:
    first, second = resolve(temperature=0.7), resolve(temperature=0.7)
    assert first.options["individual"] != second.options["individual"]
    assert first.replay(0)["individual"] == first.options["individual"] < 2**53
    drawn = resolve(causal_mode="compatible", temperature=0.7)
    assert drawn.replay(0)["seed"] == drawn.seed


def test_further_texts_are_the_successors_individuals() -> None:
    call = resolve(individual=8)
    assert [call.of_copy(copy)[0]["individual"] for copy in range(3)] == [8, 9, 10]
    assert call.of_copy(1)[1] is None
    assert resolve(causal_mode="compatible", seed=5).of_copy(2)[1] == 7
    assert resolve(individual="Ada").of_copy(2)[0]["individual"] is ADA


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "causal_mode": st.sampled_from(["standard", "sampling", "causal", "compatible"]),
        "temperature": st.sampled_from([0, 0.3, 1, 2.5]),
        "top_p": st.sampled_from([0.5, 1]),
        "top_k": st.integers(1, 9),
        "min_p": st.sampled_from([0, 0.2]),
        "whole_words": st.booleans(),
        "persistence": st.sampled_from([0, 1]),
        "seed": st.integers(0, 2**53),
        "user": st.text(max_size=5),
        "individual": st.one_of(st.integers(0, 2**53), st.just("Ada")),
    },
)


@given(body=SETTINGS, copy=st.integers(0, 2), mode=st.sampled_from(["standard", "compatible"]))
def test_a_replay_resolves_to_the_same_call(body: dict[str, Any], copy: int, mode: str) -> None:
    try:
        call = resolve(mode, **body)
    except RequestError:
        return
    fields = json.loads(json.dumps(call.replay(copy), allow_nan=False))
    again = resolve(mode, **fields)
    options, seed = call.of_copy(copy)
    assert again.options.get("individual") == options.get("individual")
    if call.settings.do_sample:
        assert again.seed == seed
    assert again.replay(0) == call.replay(copy)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, r"temprature: Extra inputs are not permitted"),
    ({"prompt": ""}, r"prompt.*: String should have at least 1 character"),
    ({"prompt": "\ud800"}, r"prompt.*: Input should be a valid string"),
    ({"n": 0}, r"n times the prompts=0 is outside 1 to 16"),
    ({"n": True}, r"n: Input should be a valid integer"),
    ({"n": 9, "prompt": ["a", "b"]}, r"n times the prompts=18 is outside 1 to 16"),
    ({"max_tokens": 5000}, r"max_tokens=5000 is outside 1 to 1024"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, r"max_completion_tokens: Extra"),
    ({"stop": ["a"] * 5}, r"stop.* at most 4 items"),
    ({"presence_penalty": 0.5}, r"presence_penalty is not supported"),
    ({"seed": -1}, r"seed.*: .* greater than or equal to 0"),
    ({"individual": 2**64}, r"individual.*: Input should be"),
    ({"individual": 8, "temperature": 0}, r"temperature 0 means standard"),
    ({"individual": 8, "causal_mode": "standard"}, r"no effect in mode 'standard'"),
    ({"individual": " "}, r"name is empty"),
    ({"individual": "Ada", "persistence": 0.5}, r"persistence=0.5 contradicts"),
    ({"causal_mode": "wild"}, r"causal_mode='wild' is unknown"),
    ({"top_p": 3}, r"top_p=3 must be a number in \[0, 1\]"),
    ({"user": "a" * 600}, r"at most 512 characters"),
]


def test_unknown_and_contradictory_fields_are_one_sentence() -> None:
    for body, words in REFUSED:
        with pytest.raises(RequestError) as caught:
            resolve(**body)
        assert re.search(words, str(caught.value)), (body, str(caught.value))
        assert "\n" not in str(caught.value)
        assert caught.value.status in (400, 404)


def test_messages_are_checked() -> None:
    tool = {"role": "tool", "content": "x"}
    image = {"role": "user", "content": [{"type": "image_url"}]}
    for messages, place in (
        ([], "messages"),
        (["Hi"], "messages.0"),
        ([tool], "messages.0.role"),
        ([image], "messages.0.content"),
    ):
        with pytest.raises(RequestError, match=f"^{place}.*: "):
            parse("chat", messages=messages)


def test_messages_of_parts_and_developers_are_understood() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    said = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    (found,) = parse("chat", messages=said).prompts
    assert found == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]


def test_every_setting_of_generate_is_a_field() -> None:
    for schema in (ChatRequest, CompletionRequest):
        assert {*DEFAULTS, *SOFTMAX} <= set(schema.model_fields)


@given(
    body=st.dictionaries(
        st.sampled_from(["prompt", "n", "stop", "seed", "individual", "user", "top_p", "logprobs"])
        | st.text(max_size=4),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.text(max_size=2), inner, max_size=2)
            ),
            max_leaves=4,
        ),
        max_size=4,
    )
)
def test_any_json_is_answered_or_refused(body: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):
        checked(CompletionRequest, body).resolve(settings, "standard", find)


def test_null_beside_the_other_name_of_a_field_counts_as_not_given() -> None:
    assert parse(max_tokens=None, max_completion_tokens=5).max_tokens == 5


def test_log_probabilities_of_a_chat_are_asked_for_by_logprobs() -> None:
    assert parse("chat", logprobs=False, top_logprobs=3).alternatives is None
    assert parse("chat", logprobs=True, top_logprobs=3).alternatives == 3
    assert parse("chat", logprobs=True).alternatives == 0
