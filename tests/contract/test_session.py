"""Session: the same calls on every engine, and the texts of Hugging Face's `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import causal_qwen
from causal_qwen import Individual, Session
from causal_qwen.analysis.counterfactual import ChangedToken

PROMPTS = ["The train was late, so", "a king", "It costs 12 or"]


@pytest.fixture(scope="module")
def sessions(tiny_directory: Path) -> dict[str, Session]:
    return {name: causal_qwen.open(str(tiny_directory), name) for name in ("torch", "numpy")}


@pytest.fixture(params=["torch", "numpy"])
def session(request: pytest.FixtureRequest, sessions: dict[str, Session]) -> Session:
    return sessions[request.param]


def generated(session: Session, prompt: str, **options: Any) -> str:
    """By Hugging Face's `generate`."""
    model, processor = session.model, session.processor
    inputs = processor(prompt, return_tensors="pt")
    out = model.generate(**inputs, **options, return_dict_in_generate=True)
    start = inputs["input_ids"].shape[1]
    new, values = out.sequences[0, start:], out.numeric_values[0, start:]
    text: str = processor.decode(new, values, skip_special_tokens=True)
    return text


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"causal_mode": "causal", "individual": 7},
        {"causal_mode": "sampling", "individual": 7, "temperature": 3.0},
        {"causal_mode": "compatible", "repetition_penalty": 1.3},
        {"causal_mode": "causal", "individual": 5, "min_new_tokens": 12},
    ],
)
def test_a_text_is_the_one_of_generate(sessions: dict[str, Session], call: dict[str, Any]) -> None:
    session, named = sessions["torch"], dict(call)
    mode, who = named.pop("causal_mode", None), named.pop("individual", None)
    text = session.generate(PROMPTS[0], who, mode=mode, max_new_tokens=16, **named)
    assert text.text == generated(session, PROMPTS[0], max_new_tokens=16, **call)
    assert text.text


def test_engines_write_the_same_text(sessions: dict[str, Session]) -> None:
    for prompt in PROMPTS:
        for who in (None, 3, 7):
            torch, numpy = (one.generate(prompt, who).text for one in sessions.values())
            assert torch == numpy


def test_texts_of_a_batch_are_those_of_single_calls(session: Session) -> None:
    many = [PROMPTS[i % 3] for i in range(10)]  # more than are decoded at once
    texts = session.batch(many, list(range(10)), max_new_tokens=6)
    alone = [session.generate(one, i, max_new_tokens=6) for i, one in enumerate(many)]
    assert [text.text for text in texts] == [text.text for text in alone]
    assert [text.individual for text in texts] == [text.individual for text in alone]


def test_the_additions_of_a_stream_are_the_text(session: Session) -> None:
    stream = session.stream(PROMPTS[0], 7, max_new_tokens=12)
    assert (
        "".join(stream)
        == stream.result.text
        == session.generate(PROMPTS[0], 7, max_new_tokens=12).text
    )


def test_a_stopped_stream_keeps_its_beginning(session: Session) -> None:
    stream = session.stream(PROMPTS[0], 7, max_new_tokens=12)
    for tokens, _ in enumerate(stream, 1):
        if tokens == 3:
            stream.stop()
    assert stream.result.is_stopped
    assert stream.result.finish is None
    assert len(stream.growing.row.new.ids) == 3
    assert session.generate(PROMPTS[0], 7, max_new_tokens=12).text.startswith(stream.result.text)


def test_a_text_ends_before_a_stop_string(session: Session) -> None:
    whole = session.generate(PROMPTS[0], 7, max_new_tokens=12).text
    stop = whole[4:7]
    text = session.generate(PROMPTS[0], 7, max_new_tokens=12, stop=[stop])
    assert text.text == whole[: whole.index(stop)]
    assert text.finish == "stop"


def test_what_a_call_leaves_to_chance_replays_it(session: Session) -> None:
    drawn = session.generate(PROMPTS[0], mode="causal", max_new_tokens=8)
    assert drawn.individual is not None
    assert session.generate(PROMPTS[0], drawn.individual, max_new_tokens=8).text == drawn.text
    draws = {"mode": "compatible", "temperature": 3.0, "max_new_tokens": 8}
    sampled = session.generate(PROMPTS[0], **draws)
    assert session.generate(PROMPTS[0], seed=sampled.seed, **draws).text == sampled.text


def test_a_message_is_answered_in_the_chat_template(session: Session, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    said = session.chat("hello", 7, max_new_tokens=6)
    assert said.text == session.generate(messages, 7, max_new_tokens=6).text
    assert said.text != session.generate("hello", 7, max_new_tokens=6).text
    assert said.individual is not None
    said.individual.save(tmp_path / "ada.safetensors")
    again = session.chat("hello", str(tmp_path / "ada.safetensors"), max_new_tokens=6)
    assert again.text == said.text


def test_a_counterfactual_begins_with_the_text_of_its_individual(
    sessions: dict[str, Session],
) -> None:
    session = sessions["torch"]
    found = session.counterfactual("a king", "a queen", 7, max_new_tokens=5)
    text = session.generate("a king", 7, max_new_tokens=5).text
    assert found.to_dict()["factual"]["text"] == f"a king{text}"
    with pytest.raises(ValueError, match="engine='torch'"):
        sessions["numpy"].counterfactual("a king", ChangedToken(0, "b"))
    both = sessions["numpy"].counterfactual("a king", "a queen", 7, max_new_tokens=5)
    assert both.factual.text == text
    assert str(both).startswith(f"factual         a king‖{text}")


def test_wrong_calls_name_the_cure(session: Session) -> None:
    with pytest.raises(ValueError, match="tokens; this model reads 1 to"):
        session.generate("x" * (session.engine.context + 1))
    with pytest.raises(FileNotFoundError, match="not a file"):
        session.generate("a", "nobody.safetensors")
    with pytest.raises(ValueError, match=r"engine='loud'.*numpy"):
        causal_qwen.open("", "loud")
    other = Individual.draw(session.engine.size + 1, seed=1)
    with pytest.raises(ValueError, match="size"):
        session.generate("a", other)
