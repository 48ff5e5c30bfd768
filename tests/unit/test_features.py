"""Features: the hidden state at the end of a text, whatever its batch, and the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.regression.features import (
    MIDDLE,
    Pooling,
    encode_texts,
    features,
    fingerprint,
)

TEXTS = ["A ring", "A much longer text, of 12 parts", "x", "A ring", "Ten 3"]


@pytest.fixture(scope="module")
def pair(byte_tokenizer: Callable[..., Any], make_model: Callable[..., Any]) -> Any:
    processor = CausalQwenProcessor(byte_tokenizer())
    size, number = len(processor.tokenizer), processor.num_token_id
    return processor, make_model(vocab_size=size, num_token_id=number)


def test_features_do_not_depend_on_the_batch(pair: Any) -> None:
    processor, model = pair
    together = features(TEXTS, model, processor, MIDDLE, max_length=64)
    alone = [features([text], model, processor, MIDDLE, max_length=64)[0] for text in TEXTS]
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-5)


def test_poolings_are_means_and_last_tokens_of_the_layers_between(pair: Any) -> None:
    """Of a model of two layers: after the first, and after both, before the last norm."""
    processor, model = pair
    poolings = [Pooling(0.5, "mean"), Pooling(0.5, "last"), Pooling(1.0, "mean")]
    found = features(TEXTS, model, processor, poolings, max_length=64)
    assert found.shape == (5, 3, 32)
    states: list[Any] = []
    hooks = [
        layer.register_forward_hook(
            lambda *a: states.append(a[2][0] if isinstance(a[2], tuple) else a[2])
        )
        for layer in model.model.layers
    ]
    for text, rows in zip(TEXTS, found, strict=True):
        states.clear()
        model.model(input_ids=processor(text + " ", return_tensors="pt")["input_ids"])
        first, second = (state[0].detach() for state in states)  # (T, H)
        expected = torch.stack([first.mean(0), first[-1], second.mean(0)])
        np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5)
    for hook in hooks:
        hook.remove()
    assert len(model.model.layers) == 2  # the model itself is not shortened


def test_threads_that_share_a_model_read_their_own_hidden_states(pair: Any, tmp_path: Path) -> None:
    processor, model = pair
    texts = [f"{'long ' * (i % 7)}text number {i}" for i in range(60)]
    poolings, cache = (MIDDLE[0], MIDDLE[4]), tmp_path / "features"
    options: dict[str, Any] = {"poolings": poolings, "max_length": 64}
    expected = [features([text], model, processor, **options) for text in texts]
    is_over = threading.Event()

    def decode() -> None:
        prompt = processor("Another request that is decoded meanwhile", return_tensors="pt")
        while not is_over.is_set():
            model.generate(**prompt, max_new_tokens=20)

    def read(text: str) -> Any:
        return features([text], model, processor, cache=cache, **options)

    with ThreadPoolExecutor(3) as pool:
        other = pool.submit(decode)
        try:
            found = list(pool.map(read, texts))
        finally:
            is_over.set()
        other.result()
    for stored in (found, [read(text) for text in texts]):
        np.testing.assert_allclose(stored, expected, rtol=1e-4, atol=1e-5)


def test_a_long_text_loses_its_beginning(pair: Any) -> None:
    processor, model = pair
    with pytest.warns(UserWarning, match="2 of 3 texts are longer than 4 tokens"):
        (ids, values) = encode_texts(["abcdef", "abc", "abcd"], processor, 4)[0]
    assert processor.tokenizer.decode(ids) == "def "
    assert len(values) == 4
    with pytest.warns(UserWarning, match="lose their beginning"):
        cut = features(["abcdef"], model, processor, MIDDLE, max_length=4)
    whole = features(["def"], model, processor, MIDDLE, max_length=4)
    np.testing.assert_allclose(cut, whole, rtol=1e-5)


def test_the_fingerprint_changes_with_all_that_z_depends_on(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, model = pair
    before = fingerprint(model, processor, 64)
    assert fingerprint(model, processor, 65) != before
    monkeypatch.setattr(model.config, "gate_alpha", 0.7)  # no part of the backbone
    monkeypatch.setattr(model.config, "value_space", "linear")
    assert fingerprint(model, processor, 64) == before
    monkeypatch.setattr(model.config, "rms_norm_eps", 1e-3)
    assert fingerprint(model, processor, 64) != before
    monkeypatch.undo()
    monkeypatch.setattr(processor, "encode_numbers", "value")
    assert fingerprint(model, processor, 64) != before
    monkeypatch.undo()
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data *= 1.001
    assert fingerprint(model, processor, 64) != before
    weight.data /= 1.001
