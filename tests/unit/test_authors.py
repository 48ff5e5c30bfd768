"""Authors: one learned individual per author moves U at every position of the author's texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from authors import likelihoods

from causal_qwen.decoding.noise import NoiseGains, UNoise
from causal_qwen.individuals import Individual
from causal_qwen.training.authors import (
    Authors,
    file_names,
    mark,
    names_of,
    seed_of,
)
from causal_qwen.training.data import NOBODY, Collator, Example

Make = Callable[..., Any]

NAMES = ["Ada", "Ben", "Cy"]


@pytest.fixture(scope="module")
def model(make_model: Make) -> Any:
    made = make_model(causal_size=24, num_token_id=90)
    made.generation_config.noise_gain, made.generation_config.fresh_noise_gain = 12.0, 3.0
    return made


def example(ids: list[int]) -> Example:
    return Example(ids, [0.0] * len(ids), list(ids), [-1] * len(ids))


def test_t_starts_as_truncated_noise_of_the_name_whoever_else_is_there(model: Any) -> None:
    all_three, one = Authors(NAMES, model), Authors(["Ben"], model)
    assert torch.equal(all_three.t[1], one.t[0])
    assert all_three.t.shape == (3, 24)
    bound = (1 / 0.05 - 1) ** 0.5
    expected = Individual.draw(24, seed=seed_of("Ben"), min_density=0.05).cauchy()
    assert one.t[0].tolist() == pytest.approx(expected.tolist())
    assert float(all_three.t.detach().abs().max()) <= bound


def test_a_saved_individual_moves_u_as_in_training(model: Any, tmp_path: Path) -> None:
    """T kappa t of `causal` decoding is g t of the loss, at every position."""
    authors = Authors(NAMES, model)
    assert authors.gain == 3.0
    files = authors.save(model, tmp_path)
    assert [file.name for file in files] == [f"{name}.safetensors" for name in NAMES]
    gains = NoiseGains(shared=model.generation_config.noise_gain)
    for file, push, name in zip(files, authors.gain * authors.t.detach(), NAMES, strict=True):
        saved = Individual.load(file)
        assert saved.name == name
        for position in (0, 5):
            found = gains.noise([saved], [position])[0]
            assert found.tolist() == pytest.approx(push.tolist(), rel=1e-6)
            assert gains.exogenous([saved], None, [position]) is None


def test_noise_of_nobody_is_zero_and_of_others_theirs(model: Any) -> None:
    authors = Authors(NAMES, model)
    noise = authors.noise(torch.tensor([[2, NOBODY, 0]])).values
    assert noise.shape == (1, 3, 24)
    assert torch.equal(noise[0, 0], 3.0 * authors.t[2])
    assert not noise[0, 1].any()
    assert torch.equal(noise[0, 2], 3.0 * authors.t[0])


def test_noise_beside_labels_moves_u_at_every_position(model: Any) -> None:
    ids = torch.tensor([[3, 7, 5, 11], [4, 4, 8, 2]])
    values = torch.linspace(-2, 2, 2 * 4 * 24).view(2, 4, 24).requires_grad_()
    plain = model(ids, labels=ids)
    moved = model(ids, labels=ids, u_noise=UNoise(values))
    expected = plain.loc_U + values * plain.scale_U
    torch.testing.assert_close(moved.loc_U, expected)
    torch.testing.assert_close(moved.scale_U, plain.scale_U)
    torch.testing.assert_close(moved.logits, model.lm_head(expected))
    assert moved.loss != plain.loss
    moved.loss.backward()
    assert values.grad is not None
    assert values.grad[:, :-1].abs().sum(-1).all()  # the last position has no label


def test_likelihoods_are_those_of_the_moved_scores(model: Any) -> None:
    authors = Authors(NAMES, model)
    texts = [[3, 7, 5, 11], [4, 4, 8], [9, 1]]
    pushes = authors.gain * authors.t.detach()
    found = likelihoods(model, pushes, list(map(example, texts)), Collator(0), 2)
    assert found.shape == (3, 4)
    for row, ids in enumerate(texts):
        u = model(torch.tensor([ids])).u_dist
        for column, push in enumerate([*pushes, torch.zeros(24)]):
            scores = model.lm_head(u.loc + push * u.scale)[0, :-1]
            loss = torch.nn.functional.cross_entropy(scores, torch.tensor(ids[1:]))
            assert found[row, column].item() == pytest.approx(loss.item(), rel=1e-4)


def test_every_eighth_text_to_learn_has_no_author() -> None:
    examples = [example([1, 2, 3]) for _ in range(16)]
    mark(examples, ["Ada", "Cy"] * 8, NAMES, learn=True)
    first = [one.authors[0] for one in examples]
    assert first == [0, 2] * 7 + [NOBODY, NOBODY]
    mark(examples, ["Ada", None] * 8, NAMES, learn=False)
    assert [one.authors for one in examples] == [[0] * 3, [NOBODY] * 3] * 8
    batch = Collator(0)(examples[:2])
    assert batch["authors"].tolist() == [[0] * 3, [NOBODY] * 3]


def test_file_names_are_plain_and_distinct() -> None:
    assert file_names(["J. R. Smith", "J R Smith", "j r smith", "../..", "李白"]) == [
        *("J_R_Smith", "J_R_Smith_2", "j_r_smith_3", "author", "李白")
    ]


def test_a_missing_column_is_named() -> None:
    assert names_of([{"text": "a", "by": " "}, {"by": 7}], "by") == [None, "7"]
    with pytest.raises(ValueError, match=r"'author'.*'text'"):
        names_of([{"text": "a"}], "author")
