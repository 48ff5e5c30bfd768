"""Counterfactuals of a number: the law of an individual whose residual was seen."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from causal_qwen.modeling.value_space import ValueSpace  # noqa: E402
from causal_qwen.regression.conformal import Limits, Target  # noqa: E402
from causal_qwen.regression.regressor import CausalTextRegressor  # noqa: E402
from causal_qwen.regression.whatif import PosteriorLaw, World, answer  # noqa: E402

LAWS = [
    PosteriorLaw(r=2.0, a=0.8, b=0.2, k=1.0, fresh=0.2),
    PosteriorLaw(r=-7.0, a=0.3, b=0.7, k=1.6, fresh=0.5),
    PosteriorLaw(r=0.0, a=0.5, b=0.5, k=1.0, fresh=0.5),  # both poles are one
    PosteriorLaw(r=1e-7, a=0.5, b=0.5 + 1e-8, k=0.7, fresh=0.1),
    PosteriorLaw(r=40.0, a=0.9, b=0.1, k=1.0, fresh=0.1),
]


def density(scale: float, x: float) -> float:
    return scale / math.pi / (x * x + scale * scale)


def by_quadrature(law: PosteriorLaw, t: float) -> float:
    """P(k X + N' <= t), integrated over x."""
    evidence = density(law.a + law.b, law.r)

    def inner(x: float) -> float:
        fresh = 0.5 + math.atan((t - law.k * x) / law.fresh) / math.pi
        return density(law.a, x) * density(law.b, law.r - x) * fresh / evidence

    middle = sorted([0.0, law.r, t / law.k])
    cuts = [-np.inf, middle[0] - 50, *middle, middle[2] + 50, np.inf]
    return sum(integrate.quad(inner, low, high, limit=200)[0] for low, high in pairwise(cuts))


@pytest.mark.parametrize("law", LAWS)
def test_the_closed_form_is_the_integral_over_the_posterior(law: PosteriorLaw) -> None:
    for t in (-30.0, -1.0, 0.3, law.r, 9.0):
        assert law.cdf(t) == pytest.approx(by_quadrature(law, t), abs=1e-5)


@pytest.mark.parametrize("law", LAWS)
def test_quantiles_invert_the_distribution(law: PosteriorLaw) -> None:
    for p in (0.001, 0.05, 0.5, 0.95, 0.999):
        assert law.cdf(law.icdf(p)) == pytest.approx(p, abs=1e-9)


def test_a_residual_that_is_chance_is_not_repeated() -> None:
    own = PosteriorLaw(r=5.0, a=0.999, b=0.001, k=1.0, fresh=0.001).icdf(0.5)
    chance = PosteriorLaw(r=5.0, a=0.001, b=0.999, k=1.0, fresh=0.999).icdf(0.5)
    assert own == pytest.approx(5.0, abs=0.01)
    assert chance == pytest.approx(0.0, abs=0.01)


def test_pearl_keeps_all_noise_in_predicted_scales() -> None:
    space = ValueSpace("symlog", 8.0, 1.5)
    here, there = World(0.2, 0.05, 0.01, 0.0), World(0.9, 0.1, 0.02, 0.0)
    target = Target(space, None, Limits())  # type: ignore[arg-type]
    found = answer(5000.0, here, there, target, 0.9, "pearl")
    residual = (math.log1p(5000.0) - 8.0) / 1.5 - 0.2
    expected = space.decode(torch.tensor(0.9 + 2 * residual)).item()
    assert found["noise"] == pytest.approx(residual / 0.06)
    assert found["median"] == found["low"] == found["high"] == pytest.approx(expected)


def test_a_ring_of_more_carat_would_have_cost_more(priced: Any, rings: Any) -> None:
    row = rings.iloc[95]
    found = priced.counterfactual(row, row["price"], {"carat": row["carat"] * 1.5})
    assert found.factual == pytest.approx(priced.predict(rings[95:96])[0])
    assert found.low < found.median < found.high
    assert found.median > row["price"] * 1.2
    assert found.changes == {"carat": (row["carat"], row["carat"] * 1.5)}
    assert repr(found).startswith(f"observed {row['price']:g}; had carat been ")
    assert "it would have been" in repr(found)


def test_a_text_is_edited_as_a_whole() -> None:
    words = ["tin", "iron", "silver", "gold"]
    texts = [f"a {words[row % 4]} ring no {row}" for row in range(60)]
    values = np.array([10.0 * (row % 4 + 1) for row in range(60)]) + np.arange(60) % 3
    regressor = CausalTextRegressor(sources=["words"], verbose=False).fit(texts, values)
    found = regressor.counterfactual("a tin ring no 4", 11, {"text": "a gold ring no 4"})
    assert found.factual < 20
    assert 30 < found.median < 60


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "no column is changed"),
        ({"weight": 3}, "there is no column 'weight'"),
        ({"carat": "heavy"}, "carat='heavy' is no finite number"),
        ({"carat": math.inf}, "carat=inf is no finite number"),
        ({"cut": "Superb"}, "cut='Superb' does not occur in the training rows"),
    ],
)
def test_an_edit_that_cannot_be_made_is_refused(
    changes: dict[str, Any], message: str, priced: Any, rings: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        priced.counterfactual(rings.iloc[95], 3000, changes)
