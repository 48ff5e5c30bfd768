"""Number predictions compared with SciPy and with the model's own outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from causal_qwen.individuals import Individual
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.modeling.value_space import ValueSpace
from causal_qwen.regression.prediction import NumberPrediction

Make = Callable[..., Any]

C, V = 24, 271
TEXTS = ["The price is", "It weighs 12.5 kg and costs", "x = -3e4;", "In 7 of 9 cases, a"]
LINEAR, SYMLOG = ValueSpace("linear", 30.0, 4.0), ValueSpace("symlog", 3.0, 0.5)


def prediction(space: ValueSpace, rows: int | None = None) -> NumberPrediction:
    """A prediction whose individuals and weights are random."""
    rng = np.random.default_rng(0)
    shape = (C,) if rows is None else (rows, C)
    u = Cauchy(
        torch.from_numpy(rng.normal(size=shape)), torch.from_numpy(rng.uniform(0.1, 1, shape))
    )
    weight, bias = torch.from_numpy(rng.normal(size=C) / C), 0.3
    y = Cauchy(u.loc @ weight + bias, u.scale @ weight.abs())
    probability = 0.25 if rows is None else np.linspace(0.1, 0.9, rows)
    return NumberPrediction(y, space, probability)


def scipy_cauchy(one: NumberPrediction) -> Any:
    """In linear space the number is Cauchy itself: center + spread y."""
    center, spread = one.space.center, one.space.spread
    return stats.cauchy(center + spread * one.y.loc.numpy(), spread * one.y.scale.numpy())


def symexp(value: Any) -> Any:
    return np.sign(value) * np.expm1(np.abs(value))


# --- the distribution


@pytest.mark.parametrize("rows", [None, 3])
def test_in_linear_space_all_functions_equal_scipys_cauchy(rows: int | None) -> None:
    one = prediction(LINEAR, rows)
    expected = scipy_cauchy(one)
    values = 31.0 if rows is None else np.array([-50.0, 30.5, 1e4])
    np.testing.assert_allclose(one.median, expected.median(), rtol=1e-12)
    np.testing.assert_allclose(one.quantile(0.07), expected.ppf(0.07), rtol=1e-9)
    np.testing.assert_allclose(one.interval(0.8), expected.interval(0.8), rtol=1e-9)
    np.testing.assert_allclose(one.log_prob(values), expected.logpdf(values), rtol=1e-10)


@pytest.mark.parametrize("rows", [None, 3])
def test_in_symlog_space_quantiles_are_mapped_back(rows: int | None) -> None:
    one = prediction(SYMLOG, rows)
    y = scipy_cauchy(one)
    np.testing.assert_allclose(one.median, symexp(y.median()), rtol=1e-12)
    np.testing.assert_allclose(one.quantile(0.07), symexp(y.ppf(0.07)), rtol=1e-9)
    np.testing.assert_allclose(one.interval(0.8), symexp(y.interval(0.8)), rtol=1e-9)


@pytest.mark.parametrize("space", [LINEAR, SYMLOG])
@pytest.mark.parametrize(("low", "high"), [(0.02, 0.3), (0.3, 0.9)])
def test_the_density_integrates_to_the_mass_of_quantiles(
    space: ValueSpace, low: float, high: float
) -> None:
    one = prediction(space)
    start, end = one.quantile([low, high])
    mass, _ = integrate.quad(lambda v: math.exp(one.log_prob(v)), start, end, limit=200)
    assert mass == pytest.approx(high - low, rel=1e-6)


# --- the model's prediction


@pytest.fixture(scope="module")
def processor(byte_tokenizer: Make) -> CausalQwenProcessor:
    return CausalQwenProcessor(byte_tokenizer(), encode_numbers="value")


@pytest.fixture(scope="module")
def model(make_model: Make, processor: CausalQwenProcessor) -> Any:
    return make_model(
        causal_size=C,
        vocab_size=V,
        num_token_id=processor.num_token_id,
        encode_numbers="value",
        value_fields={"default": (0.5, 2.0), "price": (-1.0, 0.25)},
    )


@torch.no_grad()
def at_the_end(model: Any, processor: Any, text: str) -> tuple[float, float, float]:
    """loc_Y, scale_Y and P_<NUM> after the text and its space, from the model's own output."""
    output = model(**processor(processor.ask(text), return_tensors="pt"))
    p = model.decision(output.s_dist)[0, -1, processor.num_token_id]
    return float(output.loc_Y[0, -1]), float(output.scale_Y[0, -1]), float(p)


@pytest.mark.parametrize("text", TEXTS)
def test_a_prediction_is_the_models_y_at_the_last_token_mapped_back(
    model: Any, processor: Any, text: str
) -> None:
    loc, scale, p = at_the_end(model, processor, text)
    one = model.predict(text, processor)
    assert one.median == pytest.approx(symexp(0.5 + 2 * loc), rel=1e-4)
    assert one.quantile(0.75) == pytest.approx(symexp(0.5 + 2 * (loc + scale)), rel=1e-4)
    assert one.probability == pytest.approx(p, rel=1e-5)
    price = model.predict(text, processor, field="price")
    assert price.median == pytest.approx(symexp(-1 + 0.25 * loc), rel=1e-4)


def test_a_prediction_reads_the_values_of_its_text(model: Any, processor: Any) -> None:
    few, many, digits = (
        model.predict("2 cost", processor).median,
        model.predict("2000 cost", processor).median,
        model.predict("2 cost", processor, encode_numbers="text").median,
    )
    assert len({few, many, digits}) == 3
    loc, _, _ = at_the_end(model, processor, "2000 cost")
    assert many == pytest.approx(symexp(0.5 + 2 * loc), rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_a_batch_predicts_the_same_as_its_texts_alone(
    model: Any, processor: Any, batch_size: int
) -> None:
    many = model.predict(TEXTS, processor, batch_size=batch_size)
    alone = [model.predict(text, processor) for text in TEXTS]
    for name in ("median", "probability"):
        expected = [getattr(one, name) for one in alone]
        np.testing.assert_allclose(getattr(many, name), expected, rtol=1e-4)
    np.testing.assert_allclose(many.y.scale, [one.y.scale for one in alone], rtol=1e-4)
    np.testing.assert_allclose(many.sample([3]), [one.sample([3]) for one in alone], rtol=1e-3)


@pytest.mark.parametrize("options", [{}, {"persistence": 0.3}, {"fresh": True}])
def test_an_individual_gives_the_same_number_in_prediction_and_generation(
    model: Any, processor: Any, options: dict[str, Any]
) -> None:
    saved = {"noise_gain": 3.0, "fresh_noise_gain": 5.0, "min_density": 0.1, "persistence": 0.4}
    with mock.patch.dict(vars(model.generation_config), saved):
        who = [Individual.draw(model, seed=seed, **options) for seed in (3, 4)]
        for text in TEXTS:
            sampled = model.predict(text, processor).sample(who)
            if not options:
                assert np.array_equal(sampled, model.predict(text, processor).sample([3, 4]))
            inputs = processor(processor.ask(text), return_tensors="pt")
            said = model.generate(
                **inputs,
                individual=who,
                num_return_sequences=2,
                max_new_tokens=1,
                suppress_tokens=[k for k in range(V) if k != processor.num_token_id],
                return_dict_in_generate=True,
            )
            np.testing.assert_allclose(sampled, said.numeric_values[:, -1], rtol=1e-3)
