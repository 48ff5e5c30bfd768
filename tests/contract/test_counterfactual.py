"""Individuals of the embedded model: replayed anywhere, counterfactual, found behind a text."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _stability import stability
from torch.nn.utils.rnn import pad_sequence

from causal_qwen import Individual, infer_individual
from causal_qwen.analysis.counterfactual import ChangedToken, counterfactual
from causal_qwen.conversion.opening import open_model
from causal_qwen.generation.logits import DecisionProcessor

TEXT = "The king's daughter"
NEW = 6
SURE = 1e-4  # a margin between the two best tokens that no rounding closes


@pytest.fixture(scope="module")
def embedded(short_directory: Path) -> tuple[Any, Any]:
    return open_model(short_directory)


@pytest.fixture(scope="module")
def ada(embedded: Any) -> Individual:
    return Individual.draw(embedded[1], seed=7, temperature=0.5, name="Ada")


def said(model: Any, prompts: list[torch.Tensor], who: Any, **options: Any) -> list[list[int]]:
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    masks = [torch.ones_like(ids) for ids in prompts]
    batch = {"input_ids": pad(prompts), "attention_mask": pad(masks)}
    start = batch["input_ids"].shape[1]
    options = {"causal_mode": "causal", "individual": who, "max_new_tokens": NEW, **options}
    return model.generate(**batch, **options)[:, start:].tolist()


def test_saved_individual_reproduces_its_text_in_another_process_and_engine(
    embedded: Any, ada: Individual, short_directory: Path, tmp_path: Path
) -> None:
    processor, model = embedded
    ids = processor(TEXT, return_tensors="pt")["input_ids"]
    here = processor.decode(said(model, [ids[0]], ada)[0], [0.0] * NEW)
    ada.save(tmp_path / "ada.safetensors")
    who = ("-m", str(short_directory), "-i", str(tmp_path / "ada.safetensors"))
    numpy = ("--engine", "numpy", "--json")
    done = subprocess.run(  # in NumPy, whose program starts at once
        [sys.executable, "-m", "causal_qwen", "generate", TEXT, *who, "-n", str(NEW), *numpy],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["text"] == here


def test_replay_is_exact_alone_in_a_batch_and_without_cache(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the first choice that rounding may decide, which hardly ever comes."""
    processor, model = embedded
    texts = [TEXT, "Without electricity, a modern hospital", "Why"]
    prompts = [processor(text, return_tensors="pt")["input_ids"][0] for text in texts]
    people = [
        Individual.draw(model, seed=3, temperature=0.5),
        Individual.draw(model, seed=4, temperature=0.5, fresh=True),
        Individual.draw(model, seed=5, temperature=4.0, min_density=0.05),
    ]
    margins: list[torch.Tensor] = []
    choose = DecisionProcessor.__call__

    def watch(self: Any, input_ids: Any, scores: Any) -> Any:
        result = choose(self, input_ids, scores)
        best = result.topk(2, dim=-1).values
        margins.append(best[:, 0] - best[:, 1])
        return result

    with monkeypatch.context() as patch:
        patch.setattr(DecisionProcessor, "__call__", watch)
        together = said(model, prompts, people)
    is_sure = (torch.stack(margins, dim=-1) > SURE).cumprod(-1).sum(-1).tolist()
    assert sum(is_sure) >= 0.9 * 3 * NEW
    alone = [said(model, [p], one)[0] for p, one in zip(prompts, people, strict=True)]
    uncached = said(model, prompts, people, use_cache=False)
    for row, sure in enumerate(is_sure):
        assert alone[row][:sure] == together[row][:sure] == uncached[row][:sure]


def test_an_edit_of_the_embedded_model(embedded: Any, ada: Individual) -> None:
    processor, model = embedded
    options = {"max_new_tokens": NEW, "processor": processor}
    result = counterfactual(model, TEXT, ada, "The king's son", max_new_tokens=NEW)
    assert result.factual.text.startswith(TEXT)
    assert result.counterfactual.text.startswith("The king's son")
    assert result.divergence is not None
    assert stability(model, result).violations == 0  # a fresh conversion has equal scales
    assert (abs(result.scale_ratio - 1) < 1e-6).all()
    noop = counterfactual(model, TEXT, ada, TEXT, **options)
    assert noop.divergence is None
    position = result.factual.start + 3
    token = ChangedToken(position, " never")
    changed = counterfactual(model, TEXT, ada, token, **options)
    assert changed.divergence == 3
    assert changed.counterfactual.tokens[3] == " never"
    assert changed.counterfactual.tokens[:3] == changed.factual.tokens[:3]


def test_infer_individual_finds_individuals_for_an_observed_text(embedded: Any) -> None:
    processor, model = embedded
    ids = processor("The old man", return_tensors="pt")["input_ids"]
    text = torch.tensor(said(model, [ids[0]], 3)[0][:3])
    options = {"n": 3, "burn_in": 1, "sweeps": 1, "processor": processor}
    found = infer_individual(model, text, prompt=ids[0], **options)
    assert found.success_rate == 1.0
    options = {"max_new_tokens": 3, "processor": processor}
    result = counterfactual(model, "The old man", found.individuals[0], "The old woman", **options)
    assert result.factual.new_ids == text.tolist()
