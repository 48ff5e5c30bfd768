"""The fused one-vs-rest loss: its value and its gradients, three ways.

The reference is autograd in float64 on the formula; plain float32 autograd shows the effect of
rounding alone; the fused loss must be as accurate. Blocks and tiles are small, to cross many edges.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.decoding.decision import SCALE_FLOOR
from causal_qwen.modeling import one_vs_rest as module
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.one_vs_rest import HeadParams, LossSettings, one_vs_rest

N, C, V = 13, 24, 97
NAMES = ("loc", "scale", "weight", "bias", "noise", "threshold")
SETTINGS = LossSettings(cls_weight=1.0, ce_weight=0.0, chunk=5, is_fast=False)


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 20)
    monkeypatch.setattr(module, "TILE", 60)


@pytest.fixture(params=[True, False], ids=["bfloat16", "emulated"])
def is_bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Processors with bfloat16 products, and those that emulate them."""
    monkeypatch.setattr(module, "has_bfloat16", lambda device: request.param)
    return bool(request.param)


def make_inputs(dtype: torch.dtype = torch.float64, loc_size: float = 1.0) -> dict[str, Tensor]:
    """U' and a head; a large `loc_size` moves scores beyond the thresholds."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = {
        "loc": loc_size * normal(N, C),
        "scale": 0.02 * normal(N, C).exp(),
        "weight": normal(V, C),
        "bias": normal(V),
        "noise": normal(V),
        "threshold": 4 + normal(V),
    }
    return {name: x.to(dtype).requires_grad_() for name, x in made.items()}


def labels() -> Tensor:
    ids = torch.randint(V, (N,), generator=torch.Generator().manual_seed(4))
    ids[:3] = torch.tensor([0, 19, V - 1])  # on the edges of the blocks
    return ids


def formula(x: dict[str, Tensor], settings: LossSettings) -> Tensor:
    """The definition, with every score at once."""
    s = x["loc"] @ x["weight"].T + x["bias"]
    scale = x["scale"] @ x["weight"].abs().T
    scale = scale + x["noise"].abs() * x["scale"].mean(-1, keepdim=True)
    bar = s.logsumexp(-1, keepdim=True) if settings.has_bar else 0.0
    scores = Cauchy(s - bar, scale.clamp_min(SCALE_FLOOR))
    yes, no = scores.log_sf(x["threshold"]), scores.log_cdf(x["threshold"])
    ovr = -torch.where(F.one_hot(labels(), V).bool(), yes, no).sum()
    ce = F.cross_entropy(s, labels(), reduction="sum")
    return settings.cls_weight * ovr + settings.ce_weight * ce


def fused(x: dict[str, Tensor], settings: LossSettings) -> Tensor:
    head = HeadParams(x["weight"], x["bias"], x["noise"], x["threshold"])
    return one_vs_rest(Cauchy(x["loc"], x["scale"]), head, labels(), settings)[0]


def gradients(loss: Tensor, x: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(x, torch.autograd.grad(loss, list(x.values())), strict=True))


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


SETTINGS_BY_NAME = {
    "one-vs-rest": SETTINGS,
    "with cross-entropy": SETTINGS._replace(ce_weight=2.5),
    "cross-entropy alone": SETTINGS._replace(cls_weight=0.0, ce_weight=1.0),
    "half weight": SETTINGS._replace(cls_weight=0.5),
    "one chunk": SETTINGS._replace(chunk=100),
    "single positions": SETTINGS._replace(chunk=1, ce_weight=1.0),
    "bar": SETTINGS._replace(has_bar=True),
    "bar with cross-entropy": SETTINGS._replace(has_bar=True, ce_weight=2.5, cls_weight=0.5),
}


@pytest.mark.parametrize("name", SETTINGS_BY_NAME)
@pytest.mark.parametrize("loc_size", [0.1, 1.0, 4.0])
def test_value_and_gradients_match_the_formula_in_float64(name: str, loc_size: float) -> None:
    x, settings = make_inputs(loc_size=loc_size), SETTINGS_BY_NAME[name]
    truth, found = formula(x, settings), fused(x, settings)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    expected, computed = gradients(truth, x), gradients(found, x)
    for key in NAMES:
        torch.testing.assert_close(computed[key], expected[key], rtol=1e-9, atol=1e-11, msg=key)


@pytest.mark.parametrize("has_bar", [False, True])
@pytest.mark.parametrize("loc_size", [0.1, 1.0, 4.0, 20.0])
def test_float32_is_no_worse_than_plain_autograd(loc_size: float, has_bar: bool) -> None:
    settings = SETTINGS._replace(ce_weight=1.0, has_bar=has_bar)
    wide = make_inputs(loc_size=loc_size)
    truth = gradients(formula(wide, settings), wide)
    narrow = make_inputs(torch.float32, loc_size)
    plain = gradients(formula(narrow, settings), narrow)
    ours = gradients(fused(narrow, settings), narrow)
    for key in NAMES:
        assert error(ours[key], truth[key]) <= 2 * error(plain[key], truth[key]) + 1e-6, key


@pytest.mark.parametrize("has_bar", [False, True])
def test_gradients_pass_gradcheck(has_bar: bool) -> None:
    x = make_inputs()
    settings = SETTINGS._replace(ce_weight=0.7, has_bar=has_bar)

    def loss(*tensors: Tensor) -> Tensor:
        return fused(dict(zip(NAMES, tensors, strict=True)), settings)

    assert torch.autograd.gradcheck(loss, tuple(x.values()), fast_mode=True)


def test_gradients_stay_finite_where_p_rounds_to_one() -> None:
    """P rounds to 1 there in float32, and log(1 - P) to -inf."""
    x = make_inputs(torch.float32, loc_size=1e4)
    with torch.no_grad():
        x["scale"].mul_(1e-4)
    loss = fused(x, SETTINGS)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in gradients(loss, x).values())


def test_fast_products_stay_within_tolerance(is_bfloat16: bool) -> None:
    x = make_inputs(torch.float32)
    exact, fast = fused(x, SETTINGS), fused(x, SETTINGS._replace(is_fast=True))
    assert (fast != exact) == is_bfloat16
    assert abs((fast / exact).item() - 1) < 4e-3
    slow, quick = gradients(exact, x), gradients(fast, x)
    for key in NAMES:
        assert error(quick[key], slow[key].double()) < 1e-2, key


@pytest.mark.parametrize("has_bar", [False, True])
def test_bfloat16_weights_give_bfloat16_gradients_of_float32_maths(
    is_bfloat16: bool, has_bar: bool
) -> None:
    x, settings = make_inputs(torch.float32), SETTINGS._replace(has_bar=has_bar)
    half = {
        key: (v.detach().bfloat16() if key in ("loc", "weight") else v.detach()).requires_grad_()
        for key, v in x.items()
    }
    rounded = {key: v.detach().double().requires_grad_() for key, v in half.items()}
    truth = gradients(formula(rounded, settings), rounded)
    found = gradients(fused(half, settings), half)
    for key in NAMES:
        assert found[key].dtype == half[key].dtype
        assert error(found[key], truth[key]) < (2e-2 if is_bfloat16 else 2e-3), key


def test_loss_and_gradients_are_zero_without_labels() -> None:
    x = {k: v[:0] if k in ("loc", "scale") else v for k, v in make_inputs().items()}
    head = HeadParams(x["weight"], x["bias"], x["noise"], x["threshold"])
    no_labels = torch.empty(0, dtype=torch.long)
    total, cls, ce = one_vs_rest(Cauchy(x["loc"], x["scale"]), head, no_labels, SETTINGS)
    assert total == cls == ce == 0
    assert not torch.autograd.grad(total, x["weight"])[0].any()


def test_a_likely_label_keeps_its_gradient_in_bfloat16(is_bfloat16: bool) -> None:
    """bfloat16 rounds a probability of 0.999 to 1, at which cross-entropy has no gradient."""
    settings = SETTINGS._replace(has_bar=True, cls_weight=0.0, ce_weight=1.0)
    x = {name: value.detach() for name, value in make_inputs(torch.float32).items()}
    x["loc"] = 0.75 * x["weight"][labels()]
    x |= {name: x[name].bfloat16() for name in ("loc", "weight")}
    half = {name: value.requires_grad_() for name, value in x.items()}
    exact = {name: value.detach().double().requires_grad_() for name, value in x.items()}
    truth = torch.autograd.grad(formula(exact, settings), exact["loc"])[0]
    p = (-F.cross_entropy(exact["loc"] @ exact["weight"].T + exact["bias"], labels())).exp()
    assert 0.99 < p < 0.9999
    found = torch.autograd.grad(fused(half, settings), half["loc"])[0]
    assert error(found, truth) < 0.1
