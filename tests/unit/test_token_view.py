"""Token view: one token and the scores, thresholds and coordinates of U that chose it."""

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


def test_bytes_of_a_character_are_shown_together(loaded: Any) -> None:
    processor, model = loaded
    text = "a 国王 has 🙂"
    tokens = token_view.split_tokens(model, processor, text)
    assert len(tokens) == len(processor(text)["input_ids"])
    assert "".join(tokens) == text
