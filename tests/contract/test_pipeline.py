"""The `text-generation` pipeline that reads and returns numbers as values."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    pipeline,
)

from causal_qwen.generation.pipeline import CausalTextGenerationPipeline
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.text.numerals import render

Make = Callable[..., Any]

PROMPT = "At 12.5 kg it costs "
SCRIPT = "<NUM> or <NUM>."  # the text that the model is forced to generate
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def byte_tokenizer(byte_tokenizer: Make) -> Make:
    """The shared byte tokenizer with a chat template."""
    return partial(byte_tokenizer, chat_template=CHAT)


class Script(LogitsProcessor):
    """Allows only the next token of the script."""

    def __init__(self, ids: list[int], start: int) -> None:
        self.ids, self.start = ids, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, -torch.inf)
        only[:, self.ids[input_ids.shape[1] - self.start]] = 0.0
        return only


@pytest.fixture
def processor(byte_tokenizer: Make) -> CausalQwenProcessor:
    return CausalQwenProcessor(byte_tokenizer(), encode_numbers="value")


@pytest.fixture(scope="module")
def make_value_model(make_model: Make) -> Make:
    """A tiny model that reads values. Its number head is small, so numbers stay moderate."""

    def make(**fields: Any) -> Any:
        fields = {"vocab_size": 271, "num_token_id": 257, "encode_numbers": "value"} | fields
        model = make_model(**fields)
        with torch.no_grad():
            model.action.value.weight.mul_(0.1)
        return model

    return make


@pytest.fixture
def model(make_value_model: Make) -> Any:
    return make_value_model()


@pytest.fixture
def pipe(model: Any, processor: CausalQwenProcessor) -> Any:
    return CausalTextGenerationPipeline(model=model, processor=processor)


def scripted(processor: Any, prompt: str) -> dict[str, Any]:
    """Options that force SCRIPT after `prompt`; a pipeline samples by default."""
    ids = processor.tokenizer(SCRIPT)["input_ids"]
    start = len(processor(prompt)["input_ids"])
    return {
        "logits_processor": LogitsProcessorList([Script(ids, start)]),
        "max_new_tokens": len(ids),
        "do_sample": False,
    }


@torch.no_grad()
def generated_values(model: Any, processor: Any, prompt: str) -> list[float]:
    """The two numbers of SCRIPT after `prompt`: the medians of direct calls of the model."""
    ids = processor(prompt, return_tensors="pt")
    row, values = ids["input_ids"], ids["numeric_values"]
    generated = []
    for token in processor.tokenizer(SCRIPT)["input_ids"]:
        y = model(row, numeric_values=values).loc_Y[0, -1].double()
        value = float(y.sign() * y.abs().expm1()) if token == processor.num_token_id else 0.0
        generated += [value] if value else []
        row = torch.cat([row, torch.tensor([[token]])], -1)
        values = torch.cat([values, torch.tensor([[value]], dtype=torch.float64)], -1)
    return generated


def script_of(numbers: list[float]) -> str:
    first, second = map(render, numbers)
    return f"{first} or {second}."


# --- values in, values out


def test_generated_numbers_are_in_the_text_and_listed(
    pipe: Any, model: Any, processor: Any
) -> None:
    (record,) = pipe(PROMPT, **scripted(processor, PROMPT))
    assert record["numeric_values"] == pytest.approx(
        generated_values(model, processor, PROMPT), rel=1e-4
    )
    assert record["generated_text"] == PROMPT + script_of(record["numeric_values"])


def test_numbers_of_the_prompt_are_read_as_values(pipe: Any, processor: Any) -> None:
    """A typed <NUM> is text; another value is another prompt."""
    prompts = [PROMPT, PROMPT.replace("12.5", "99999"), PROMPT.replace("12.5", "<NUM>")]
    records = [pipe(prompt, **scripted(processor, prompt))[0] for prompt in prompts]
    assert len({record["numeric_values"][0] for record in records}) == 3


def test_return_full_text_false_returns_new_text_only(pipe: Any, processor: Any) -> None:
    (record,) = pipe(PROMPT, return_full_text=False, **scripted(processor, PROMPT))
    assert record["generated_text"] == script_of(record["numeric_values"])


def test_literal_num_token_in_the_prompt_is_kept(pipe: Any, processor: Any) -> None:
    prompt = "What is <NUM>? 3 or "
    (record,) = pipe(prompt, **scripted(processor, prompt))
    assert record["generated_text"] == prompt + script_of(record["numeric_values"])


def test_empty_prompt_starts_with_the_bos_token(make_value_model: Make, processor: Any) -> None:
    model = make_value_model(bos_token_id=7)
    pipe = CausalTextGenerationPipeline(model=model, processor=processor)
    (record,) = pipe("", **scripted(processor, "x"))
    start = torch.tensor([[7]])
    with torch.no_grad():
        y = float(model(start).loc_Y[0, -1])
    first = math.copysign(math.expm1(abs(y)), y)
    assert record["numeric_values"][0] == pytest.approx(first, rel=1e-4)
    assert record["generated_text"].endswith(script_of(record["numeric_values"]))


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_batched_texts_equal_single_texts(pipe: Any, processor: Any, batch_size: int) -> None:
    texts = ["It weighs 3 kg and costs ", "It costs ", "From 1 to "]
    bias = {"sequence_bias": [[[processor.num_token_id], 1e4]], "do_sample": False}
    bias["max_new_tokens"] = 3
    together = pipe(texts, batch_size=batch_size, **bias)
    for text, (record,) in zip(texts, together, strict=True):
        (alone,) = pipe(text, **bias)
        assert record["numeric_values"] == pytest.approx(alone["numeric_values"], rel=1e-4)
        assert len(record["numeric_values"]) == 3
        assert record["generated_text"] == text + " ".join(map(render, record["numeric_values"]))


def test_every_returned_sequence_has_its_own_values(pipe: Any, processor: Any) -> None:
    options = {"causal_mode": "causal", "individual": 3, **scripted(processor, PROMPT)}
    records = pipe(PROMPT, num_return_sequences=2, **options)
    (first,) = pipe(PROMPT, **options)
    (second,) = pipe(PROMPT, **options | {"individual": 4})
    for record, alone in zip(records, (first, second), strict=True):
        assert record["numeric_values"] == pytest.approx(alone["numeric_values"], rel=1e-3)
        assert record["generated_text"] == PROMPT + script_of(record["numeric_values"])
    assert first["numeric_values"] != second["numeric_values"]


# --- chats


def test_chat_answer_contains_numbers(pipe: Any, model: Any, processor: Any) -> None:
    chat = [{"role": "user", "content": "What do 12.5 kg cost?"}]
    prompt = "[user] What do 12.5 kg cost?\n[assistant] "
    (record,) = pipe(chat, **scripted(processor, prompt))
    assert record["numeric_values"] == pytest.approx(
        generated_values(model, processor, prompt), rel=1e-4
    )
    answer = {"role": "assistant", "content": script_of(record["numeric_values"])}
    assert record["generated_text"] == [*chat, answer]


def test_prefilled_answer_is_continued(pipe: Any, processor: Any) -> None:
    chat = [
        {"role": "user", "content": "What do 12.5 kg cost?"},
        {"role": "assistant", "content": "Some"},
    ]
    prompt = "[user] What do 12.5 kg cost?\n[assistant] Some"
    (record,) = pipe(chat, **scripted(processor, prompt))
    assert record["generated_text"][-1] == {
        "role": "assistant",
        "content": "Some" + script_of(record["numeric_values"]),
    }
    assert chat[-1]["content"] == "Some"


# --- compared with the plain pipeline


def test_plain_pipeline_refuses_a_model_that_reads_values(model: Any, processor: Any) -> None:
    plain = pipeline("text-generation", model=model, tokenizer=processor.tokenizer)
    with pytest.raises(ValueError, match="CausalTextGenerationPipeline"):
        plain(PROMPT, max_new_tokens=2)


def test_pipeline_is_created_from_a_saved_directory(
    model: Any, processor: Any, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    pipe = pipeline(
        "text-generation", model=str(tmp_path), pipeline_class=CausalTextGenerationPipeline
    )
    (record,) = pipe(PROMPT, **scripted(processor, PROMPT))
    assert record["numeric_values"] == pytest.approx(
        generated_values(model, processor, PROMPT), rel=1e-4
    )
    assert record["generated_text"] == PROMPT + script_of(record["numeric_values"])
