"""Token view: one token and the scores and thresholds that chose it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from causal_qwen.analysis import token_view
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.processor import CausalQwenProcessor

TEXT = "a king has 7 horses"


@pytest.fixture(scope="module")
def loaded(make_model: Callable[..., Any], byte_tokenizer: Callable[..., Any]) -> tuple[Any, Any]:
    """A processor of bytes and a tiny model."""
    processor = CausalQwenProcessor(byte_tokenizer())
    model = make_model(vocab_size=300, num_token_id=processor.num_token_id)
    return processor, model


def test_token_view_equals_the_output_of_the_model(loaded: Any) -> None:
    processor, model = loaded
    index = 5
    found = token_view.explain_token(model, processor, TEXT, index)
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


def test_next_token_has_a_view_and_the_first_token_has_none(loaded: Any) -> None:
    processor, model = loaded
    count = len(token_view.split_tokens(model, processor, TEXT))
    assert token_view.explain_token(model, processor, TEXT, count).actual is None
    with pytest.raises(ValueError, match="first token"):
        token_view.explain_token(model, processor, TEXT, 0)
    with pytest.raises(ValueError, match="outside a text"):
        token_view.explain_token(model, processor, TEXT, count + 1)


def test_bytes_of_a_character_are_shown_together(loaded: Any) -> None:
    processor, model = loaded
    text = "a 国王 has 🙂"
    tokens = token_view.split_tokens(model, processor, text)
    assert len(tokens) == len(processor(text)["input_ids"])
    assert "".join(tokens) == text
