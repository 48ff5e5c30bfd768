"""The scale of numbers: a map with an exact inverse, fitted fields, and their use in the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.value_space import (
    LARGEST,
    ValueSpace,
    field_space,
    fit_field,
    position_space,
    symexp,
    symlog,
)

Make = Callable[..., Any]

NUM = 61
PRICE, WEIGHT = (3.0, 0.5), (-1.0, 4.0)
SPACES = [ValueSpace(kind, *pair) for kind in ("linear", "symlog") for pair in (PRICE, WEIGHT)]

numbers = st.floats(-1e300, 1e300)


def wide(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- the map


def test_symlog_has_known_values() -> None:
    v = wide(-(math.e - 1), -0.0, 0.0, math.e - 1, 999, 1e300)
    expected = [-1, 0, 0, 1, math.log(1000), 300 * math.log(10)]
    np.testing.assert_allclose(symlog(v), expected, rtol=1e-15)


@given(numbers)
def test_symexp_inverts_symlog(value: float) -> None:
    # an error of one ulp in ln(1e300) = 691 is an error of 691 ulps in the value
    assert symexp(symlog(wide(value))).item() == pytest.approx(value, rel=1e-12, abs=0)


@given(st.floats(-700, 700))
def test_symlog_inverts_symexp(y: float) -> None:
    assert symlog(symexp(wide(y))).item() == pytest.approx(y, rel=1e-14, abs=0)


def test_encode_applies_symlog_then_standardises() -> None:
    v = wide(-20.0, 0.0, 0.3, 1e6)
    assert ValueSpace("linear", *PRICE).encode(v).tolist() == ((v - 3) / 0.5).tolist()
    expected = (v.sign() * (1 + v.abs()).log() + 1) / 4
    np.testing.assert_allclose(ValueSpace("symlog", *WEIGHT).encode(v), expected, rtol=1e-14)


@pytest.mark.parametrize("space", SPACES)
@given(value=st.floats(-1e12, 1e12))
def test_decode_inverts_encode(space: ValueSpace, value: float) -> None:
    back = space.decode(space.encode(wide(value))).item()
    assert back == pytest.approx(value, rel=1e-12, abs=1e-14)


def test_decode_computes_in_float64() -> None:
    y = torch.tensor([100.0])
    assert ValueSpace("symlog").decode(y).tolist() == [pytest.approx(math.expm1(100), rel=1e-12)]


@pytest.mark.parametrize(("space", "y"), [(ValueSpace("symlog"), 800), (SPACES[1], 1e308)])
def test_overflow_is_clamped_with_a_warning(space: ValueSpace, y: float) -> None:
    with pytest.warns(RuntimeWarning, match=r"beyond 1\.8e\+308 .* clamped"):
        value = space.decode(wide(-y, 0, y))
    assert value[[0, 2]].tolist() == [-LARGEST, LARGEST]
    assert value[1] == space.decode(wide(0))  # its neighbours stay


@pytest.mark.parametrize("space", SPACES)
def test_log_slope_is_the_logarithm_of_the_derivative(space: ValueSpace) -> None:
    v = wide(-5e4, -2.0, -0.1, 0.1, 0.7, 30.0, 1e6)
    step = 1e-5 * v.abs()
    slope = (space.encode(v + step) - space.encode(v - step)) / (2 * step)
    np.testing.assert_allclose(space.log_slope(v), slope.log(), atol=1e-6)


# --- fields


@pytest.mark.parametrize("kind", ["linear", "symlog"])
def test_field_is_fitted_by_median_and_interquartile_range(kind: str) -> None:
    values = np.random.default_rng(0).lognormal(5, 2, size=57)
    values[::9] *= -1
    y = values if kind == "linear" else np.sign(values) * np.log1p(np.abs(values))
    center, spread = fit_field(values, kind)
    assert center == pytest.approx(np.median(y), rel=1e-12)
    assert spread == pytest.approx(stats.iqr(y), rel=1e-12)
    assert fit_field(values.reshape(3, 19), kind) == (center, spread)
    assert fit_field(torch.from_numpy(values), kind) == (center, spread)


@pytest.mark.parametrize("values", [[7.0], [7.0, 7, 7, 7, 900]])
def test_equal_values_get_a_spread_of_1(values: list[float]) -> None:
    assert fit_field(values, "linear") == (7, 1)


def test_field_is_found_by_name_and_defaults_to_default(make_config: Make) -> None:
    config = make_config(value_space="linear", value_fields={"price": PRICE, "weight": WEIGHT})
    assert field_space(config, "weight") == ValueSpace("linear", *WEIGHT)
    assert field_space(config) == ValueSpace("linear", 0, 1)
    config = make_config(value_fields={"price": PRICE, "default": WEIGHT})
    assert field_space(config) == ValueSpace("symlog", *WEIGHT)
    assert field_space(make_config()) == ValueSpace("symlog", 0, 1)


@pytest.mark.parametrize("default", [None, (7.0, 9.0)])
def test_every_position_has_the_space_of_its_field(make_config: Make, default: Any) -> None:
    """Fields are numbered by name: a loaded config has them sorted."""
    fields = {"weight": WEIGHT, "price": PRICE} | ({"default": default} if default else {})
    config = make_config(value_fields=fields)
    pairs = [fields[name] for name in sorted(fields)] + [default or (0.0, 1.0)]
    like, last = torch.zeros(2, 3), len(fields) - 1
    places = torch.tensor([[0, last, -1], [-1, last, 0]])
    space = position_space(config, places, like)
    expected = torch.tensor(pairs, dtype=torch.float64)[places]
    assert torch.equal(torch.stack([space.center, space.spread], -1), expected)
    rows = position_space(config, torch.tensor([last, -1]), like)
    assert rows.center.tolist() == [[-1] * 3, [pairs[-1][0]] * 3]
    assert rows.spread.tolist() == [[4] * 3, [pairs[-1][1]] * 3]
    assert position_space(config, None, like) == field_space(config)


def test_center_far_larger_than_its_spread_loses_no_precision(make_config: Make) -> None:
    """2e9 + 1 is no float32: read so, every target would be off by its whole spread."""
    config = make_config(value_space="linear", value_fields={"time": (2e9 + 1, 1.0)})
    space = position_space(config, torch.tensor([0]), torch.zeros(1, 2))
    assert space.encode(wide(2e9, 2e9 + 4)).tolist() == [[-1, 3]]


# --- in the model


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(60, (2, 6), generator=torch.Generator().manual_seed(0))
    ids[0, 2] = ids[0, 5] = ids[1, 3] = NUM
    values = torch.zeros(2, 6, dtype=torch.float64)
    values[ids == NUM] = wide(30.0, -2.5, 4e4)
    return {"input_ids": ids, "numeric_values": values, "labels": ids}


def losses(model: Any, *fields: Any) -> list[float]:
    with torch.no_grad():
        return [
            float(model(**batch(), numeric_fields=None if f is None else torch.tensor(f)).loss)
            for f in fields
        ]


def test_the_loss_standardises_the_targets_of_every_field(make_model: Make) -> None:
    """A model that standardises by itself, and one that is handed y."""
    fields = {"price": PRICE, "default": WEIGHT}
    model = make_model(num_token_id=NUM, value_fields=fields)
    by_hand = make_model(num_token_id=NUM, value_space="linear")
    values = batch()["numeric_values"]
    y = values.sign() * values.abs().log1p()
    price, weight = (y - 3) / 0.5, (y + 1) / 4
    rows = torch.stack([price[0], weight[1]])
    mixed = torch.stack([torch.cat([price[0, :5], weight[0, 5:]]), weight[1]])
    with torch.no_grad():
        expected = [
            float(by_hand(**batch(), numeric_targets=y).loss) for y in (weight, rows, mixed)
        ]
    cell = [[1, 1, 1, 1, 1, 0], [0, 0, 0, -1, 0, 0]]  # price, and the default twice
    assert losses(model, None, [1, -1], cell) == pytest.approx(expected, rel=1e-6)
    assert len(set(expected)) == 3


def test_fitted_fields_are_saved_and_restored(make_model: Make, tmp_path: Path) -> None:
    model = make_model(num_token_id=NUM, value_space="linear")
    model.fit_value_field("price", [1.0, 2, 4, 7, 100])
    model.fit_value_field("default", [5.0, 6, 8])
    assert model.config.value_fields == {"price": [4, 5], "default": [6, 1.5]}
    model.save_pretrained(tmp_path)
    restored = CausalQwenForCausalLM.from_pretrained(tmp_path).eval()
    assert field_space(restored.config, "price") == ValueSpace("linear", 4, 5)
    assert field_space(restored.config) == ValueSpace("linear", 6, 1.5)
    places = ([0, 0], [1, 1], [0, 1])
    assert losses(restored, *places) == losses(model, *places)
    assert len(set(losses(model, *places))) == 3
