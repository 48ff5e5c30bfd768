"""The Cauchy distribution against SciPy, in float64 and in the far float32 tails."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor

from causal_qwen.modeling.cauchy import Cauchy

LOC, SCALE = -1.7, 0.35
# both signs, the centre, and everything between the body and the far tail
MAGNITUDES = np.concatenate([[0.0], np.logspace(-6, 6, 25)])
VALUES = np.concatenate([-MAGNITUDES[:0:-1], MAGNITUDES])
FAR = np.concatenate([[0.0, 0.3, 1.0, 3.0], np.logspace(1, 30, 30)])
FAR = np.concatenate([-FAR[:0:-1], FAR]).astype(np.float32)

locs = st.floats(-1e3, 1e3)
scales = st.floats(1e-3, 1e3)
values = st.floats(-1e6, 1e6)
probabilities = st.floats(1e-6, 1 - 1e-6)


def cauchy(loc: float = LOC, scale: float = SCALE, dtype: torch.dtype = torch.float64) -> Cauchy:
    return Cauchy(torch.tensor(loc, dtype=dtype), torch.tensor(scale, dtype=dtype))


def log_cdf(z: np.ndarray) -> np.ndarray:
    """log P(X <= z) of the standard Cauchy in float64, from whichever tail is the smaller one."""
    lower, upper = stats.cauchy.cdf(z), stats.cauchy.sf(z)
    return np.where(lower < 0.5, np.log(lower), np.log1p(-np.minimum(upper, 0.5)))


def check(actual: Tensor, expected: np.ndarray | float, rtol: float, atol: float = 0.0) -> None:
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=rtol, atol=atol)


# --- float64: SciPy is the reference


def test_cdf_is_scipys() -> None:
    check(cauchy().cdf(torch.from_numpy(VALUES)), stats.cauchy.cdf(VALUES, LOC, SCALE), 1e-12)


def test_sf_is_scipys() -> None:
    check(cauchy().sf(torch.from_numpy(VALUES)), stats.cauchy.sf(VALUES, LOC, SCALE), 1e-12)


def test_log_sf_and_log_cdf_are_the_logarithms_of_both_tails() -> None:
    z = (VALUES - LOC) / SCALE
    check(cauchy().log_sf(torch.from_numpy(VALUES)), log_cdf(-z), 1e-11)
    check(cauchy().log_cdf(torch.from_numpy(VALUES)), log_cdf(z), 1e-11)


def test_log_prob_is_scipys_log_density_and_nll_its_negative() -> None:
    expected = stats.cauchy.logpdf(VALUES, LOC, SCALE)
    check(cauchy().log_prob(torch.from_numpy(VALUES)), expected, 1e-12)
    check(cauchy().nll(torch.from_numpy(VALUES)), -expected, 1e-12)


def test_icdf_is_scipys_ppf_in_both_tails() -> None:
    p = np.concatenate([np.logspace(-300, -1, 40), np.linspace(0.11, 0.89, 40)])
    expected = stats.cauchy.ppf(p, LOC, SCALE)
    tail = p < 1e-8  # SciPy's own ppf cancels there; the tail is -scale / (pi p)
    expected[tail] = LOC - SCALE / (math.pi * p[tail])
    check(cauchy().icdf(torch.from_numpy(p)), expected, 1e-7)
    upper = 1 - np.logspace(-8, -1, 20)
    check(cauchy().icdf(torch.from_numpy(upper)), stats.cauchy.ppf(upper, LOC, SCALE), 1e-7)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95, 0.999])
def test_interval_is_scipys_and_has_probability_level(level: float) -> None:
    low, high = cauchy().interval(level)
    check(torch.stack([low, high]), stats.cauchy.interval(level, LOC, SCALE), 1e-12)
    assert float(cauchy().cdf(high) - cauchy().cdf(low)) == pytest.approx(level, abs=1e-12)


@pytest.mark.parametrize("value", [-40.0, -2.0, LOC, -1.6, 0.0, 3.0, 250.0])
def test_crps_equals_its_defining_integral(value: float) -> None:
    below, _ = integrate.quad(lambda x: stats.cauchy.cdf(x, LOC, SCALE) ** 2, -np.inf, value)
    above, _ = integrate.quad(lambda x: stats.cauchy.sf(x, LOC, SCALE) ** 2, value, np.inf)
    assert float(cauchy().crps(value)) == pytest.approx(below + above, rel=1e-6)


# --- float32: the far tails, against float64


def test_float32_tails_keep_their_relative_accuracy_up_to_1e30_scales() -> None:
    standard = cauchy(0.0, 1.0, torch.float32)
    z, far = torch.from_numpy(FAR), FAR.astype(np.float64)
    check(standard.cdf(z), stats.cauchy.cdf(far), 1e-6)
    check(standard.sf(z), stats.cauchy.sf(far), 1e-6)
    check(standard.log_sf(z), log_cdf(-far), 1e-6)
    check(standard.log_cdf(z), log_cdf(far), 1e-6)
    check(standard.log_prob(z), -np.log(math.pi) - 2 * np.log(np.hypot(1, far)), 1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1e5])
def test_float32_tails_are_accurate_for_every_scale(scale: float) -> None:
    wide = cauchy(0.0, scale, torch.float32)
    ratio = FAR[np.abs(FAR) <= 1e20]
    distance = torch.from_numpy(ratio * np.float32(scale))
    z = distance.double().numpy() / float(np.float32(scale))
    check(wide.sf(distance), stats.cauchy.sf(z), 1e-6)
    check(wide.log_sf(distance), log_cdf(-z), 1e-6)
    check(wide.log_cdf(distance), log_cdf(z), 1e-6)
    expected = -math.log(math.pi * float(np.float32(scale))) - np.log1p(z**2)
    check(wide.log_prob(distance), expected, 1e-6, atol=3e-6)


def test_float32_probabilities_do_not_cancel_where_the_textbook_form_is_zero() -> None:
    textbook = 0.5 + torch.atan(torch.tensor(-1e9)) / math.pi
    assert float(textbook.abs()) < 1e-7
    p = cauchy(0.0, 1.0, torch.float32).sf(1e9)
    assert float(p) == pytest.approx(1e-9 / math.pi, rel=1e-6)


def test_float32_icdf_is_accurate_in_both_tails() -> None:
    standard = cauchy(0.0, 1.0, torch.float32)
    p = np.concatenate([np.logspace(-35, -1, 35), np.linspace(0.2, 0.8, 7)]).astype(np.float32)
    small = p.astype(np.float64)
    expected = np.where(small < 0.25, -1 / np.tan(np.pi * small), np.tan(np.pi * (small - 0.5)))
    check(standard.icdf(torch.from_numpy(p)), expected, 1e-6, atol=1e-7)
    near_one = np.float32(1) - np.float32(2) ** -np.arange(3, 25, dtype=np.float32)
    expected = 1 / np.tan(np.pi * (1 - near_one.astype(np.float64)))
    check(standard.icdf(torch.from_numpy(near_one)), expected, 1e-6)


@pytest.mark.parametrize("level", [0.5, 0.99, 0.9999999, 1 - 1e-9])
def test_float32_interval_is_symmetric_and_finite(level: float) -> None:
    low, high = cauchy(0.0, 1.0, torch.float32).interval(level)
    reach = 1 / math.tan(math.pi * (1 - level) / 2)
    assert float(low) == pytest.approx(-reach, rel=1e-5)
    assert float(high) == pytest.approx(reach, rel=1e-5)


def test_float32_crps_is_accurate_from_the_centre_to_1e30() -> None:
    z = FAR.astype(np.float64)
    expected = (2 * z * np.arctan(z) - 2 * np.log(np.hypot(1, z)) + 2 * math.log(2)) / math.pi
    check(cauchy(0.0, 1.0, torch.float32).crps(torch.from_numpy(FAR)), expected, 1e-6)


def test_variable_at_minus_infinity_has_sf_zero() -> None:
    masked = cauchy(-math.inf, 1.0, torch.float32)
    assert float(masked.sf(5.0)) == 0
    assert float(masked.log_sf(5.0)) == -math.inf
    assert float(masked.log_cdf(5.0)) == 0


# --- gradients


FUNCTIONS = ["cdf", "sf", "log_sf", "log_cdf", "log_prob", "crps"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_match_finite_differences(name: str) -> None:
    loc = torch.tensor([-3.0, 0.0, 0.2, 5.0], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([0.1, 2.0, 1.0, 0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: getattr(Cauchy(a, b), name)(0.4), (loc, scale))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
def test_float32_gradients_are_finite_everywhere(name: str, scale: float) -> None:
    # crps is a metric, not a loss: the gradient of its z = distance / scale may overflow
    ratio = FAR[np.abs(FAR) <= (1e18 if name == "crps" else 1e30)]
    loc = torch.zeros(len(ratio), requires_grad=True)
    scales = torch.full((len(ratio),), scale, requires_grad=True)
    getattr(Cauchy(loc, scales), name)(torch.from_numpy(ratio) * scale).sum().backward()
    assert loc.grad is not None
    assert scales.grad is not None
    assert torch.isfinite(loc.grad).all()
    assert torch.isfinite(scales.grad).all()


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
def test_float32_gradients_of_log_probabilities_stay_accurate_in_the_tails(scale: float) -> None:
    """d log P(X > d) / d scale = (d / (scale^2 + d^2)) / angle: 1 / scale in the far upper tail."""
    ratio = FAR[np.abs(FAR) <= 1e25]
    distance = torch.from_numpy(ratio * np.float32(scale))
    loc = torch.zeros(len(ratio), requires_grad=True)
    scales = torch.full((len(ratio),), scale, requires_grad=True)
    Cauchy(loc, scales).log_sf(distance).sum().backward()
    d, s = distance.double().numpy(), float(np.float32(scale))
    angle = np.arctan2(s, d)
    assert loc.grad is not None
    assert scales.grad is not None
    tiny = 1e-37 / s  # what float32 cannot hold
    check(loc.grad, s / (s**2 + d**2) / angle, 1e-5, atol=tiny)
    check(scales.grad, d / (s**2 + d**2) / angle, 1e-5, atol=tiny)


# --- laws


@given(locs, scales, values, st.floats(0.1, 10), locs)
def test_affine_map_of_one_variable_keeps_probabilities(
    loc: float, scale: float, value: float, slope: float, offset: float
) -> None:
    x = cauchy(loc, scale)
    weight = torch.tensor([[slope], [-slope]], dtype=torch.float64)
    bias = torch.tensor([offset, offset], dtype=torch.float64)
    image = Cauchy(x.loc.reshape(1), x.scale.reshape(1)).affine(weight, bias)
    up, down = (Cauchy(image.loc[i], image.scale[i]) for i in (0, 1))
    assume(abs(value - loc) > 1e-3 * scale)  # else rounding of the shift dominates
    expected = float(x.sf(value))
    assert float(up.sf(slope * value + offset)) == pytest.approx(expected, rel=1e-5)
    assert float(down.cdf(-slope * value + offset)) == pytest.approx(expected, rel=1e-5)


# --- draws


def test_linear_map_of_400k_draws_has_the_predicted_quantiles() -> None:
    """Linear stability, the one law everything rests on: a.U + b ~ Cauchy(a.loc + b, |a|.scale)."""
    draws, size = 400_000, 5
    generator = torch.Generator().manual_seed(7)
    u = Cauchy(
        torch.tensor([0.5, -2.0, 10.0, 0.0, 3.0], dtype=torch.float64),
        torch.tensor([1.0, 0.2, 3.0, 0.01, 0.7], dtype=torch.float64),
    )
    weight = torch.tensor(
        [[1.0, -2.0, 0.5, 3.0, -0.1], [0.0, 0.0, -1.0, 0.0, 2.0], [-4.0, 1.0, 0.3, -9.0, 0.0]],
        dtype=torch.float64,
    )
    bias = torch.tensor([0.0, 5.0, -1.0], dtype=torch.float64)
    image = u.affine(weight, bias)  # (3,)
    sample = Cauchy(u.loc.expand(draws, size), u.scale.expand(draws, size)).sample(generator)
    realised = sample @ weight.T + bias  # (draws, 3)
    for p in (0.01, 0.05, 0.25, 0.5, 0.75, 0.9, 0.99):
        expected = image.icdf(p)
        density = image.log_prob(expected).exp()
        standard_error = math.sqrt(p * (1 - p) / draws) / density
        error = (realised.quantile(p, dim=0) - expected) / standard_error
        assert error.abs().max() < 4, f"quantile {p} is {error.tolist()} standard errors off"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_pass_the_kolmogorov_smirnov_test(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    x = Cauchy(torch.full((50_000,), LOC, dtype=dtype), torch.full((50_000,), SCALE, dtype=dtype))
    sample = x.sample(generator)
    assert sample.dtype == dtype
    assert stats.kstest(sample.numpy(), stats.cauchy(LOC, SCALE).cdf).pvalue > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_draw_of_zero_gives_a_finite_sample(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rand() is 0 once in 2^24 draws (float32): there the quantile of its cell, not 1e37."""
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape, dtype=dtype))
    draw = float(cauchy(0.0, 1.0, dtype).sample())
    cell = torch.finfo(dtype).eps / 2  # the spacing of rand()
    assert -1 / (math.pi * cell * 0.01) < draw < -1 / (math.pi * cell)
