"""The fused one-vs-rest loss: its value and its gradients, three ways.

The truth is autograd in float64 on the formula; plain float32 autograd shows what rounding alone
does; ours has to be as good, with its blocks and tiles small enough to be crossed many times.
"""

from __future__ import annotations

from typing import Any

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
PLAN = LossSettings(cls_weight=1.0, ce_weight=0.0, chunk=5, is_fast=False)


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 20)
    monkeypatch.setattr(module, "TILE", 60)


def parts(dtype: torch.dtype = torch.float64, reach: float = 1.0) -> dict[str, Tensor]:
    """U' and a law; `reach` moves scores towards and beyond the thresholds."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = {
        "loc": reach * normal(N, C),
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


def formula(x: dict[str, Tensor], plan: LossSettings) -> Tensor:
    """The definition, with every score at once."""
    s = x["loc"] @ x["weight"].T + x["bias"]
    scale = x["scale"] @ x["weight"].abs().T
    scale = scale + x["noise"].abs() * x["scale"].mean(-1, keepdim=True)
    scores = Cauchy(s, scale.clamp_min(SCALE_FLOOR))
    yes, no = scores.log_sf(x["threshold"]), scores.log_cdf(x["threshold"])
    ovr = -torch.where(F.one_hot(labels(), V).bool(), yes, no).sum()
    return plan.cls_weight * ovr + plan.ce_weight * F.cross_entropy(s, labels(), reduction="sum")


def ours(x: dict[str, Tensor], plan: LossSettings) -> Tensor:
    law = HeadParams(x["weight"], x["bias"], x["noise"], x["threshold"])
    return one_vs_rest(Cauchy(x["loc"], x["scale"]), law, labels(), plan)[0]


def gradients(loss: Tensor, x: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(x, torch.autograd.grad(loss, list(x.values())), strict=True))


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


PLANS = {
    "one-vs-rest": PLAN,
    "with cross-entropy": PLAN._replace(ce_weight=2.5),
    "cross-entropy alone": PLAN._replace(cls_weight=0.0, ce_weight=1.0),
    "half weight": PLAN._replace(cls_weight=0.5),
    "one chunk": PLAN._replace(chunk=100),
    "single positions": PLAN._replace(chunk=1, ce_weight=1.0),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("reach", [0.1, 1.0, 4.0])
def test_value_and_gradients_in_float64(name: str, reach: float) -> None:
    x, plan = parts(reach=reach), PLANS[name]
    truth, found = formula(x, plan), ours(x, plan)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    expected, computed = gradients(truth, x), gradients(found, x)
    for key in NAMES:
        torch.testing.assert_close(computed[key], expected[key], rtol=1e-9, atol=1e-11, msg=key)


@pytest.mark.parametrize("reach", [0.1, 1.0, 4.0, 20.0])
def test_float32_is_no_worse_than_plain_autograd(reach: float) -> None:
    plan = PLAN._replace(ce_weight=1.0)
    wide = parts(reach=reach)
    truth = gradients(formula(wide, plan), wide)
    narrow = parts(torch.float32, reach)
    plain, mine = gradients(formula(narrow, plan), narrow), gradients(ours(narrow, plan), narrow)
    for key in NAMES:
        assert error(mine[key], truth[key]) <= 2 * error(plain[key], truth[key]) + 1e-6, key


def test_gradcheck() -> None:
    x = parts()
    plan = PLAN._replace(ce_weight=0.7)

    def loss(*tensors: Tensor) -> Tensor:
        return ours(dict(zip(NAMES, tensors, strict=True)), plan)

    assert torch.autograd.gradcheck(loss, tuple(x.values()), fast_mode=True)


def test_a_score_beyond_its_threshold_keeps_its_gradient() -> None:
    """P rounds to 1 there in float32, and log(1 - P) to -inf."""
    x = parts(torch.float32, reach=1e4)
    with torch.no_grad():
        x["scale"].mul_(1e-4)
    loss = ours(x, PLAN)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in gradients(loss, x).values())


def test_fast_products_keep_within_their_tolerance() -> None:
    x = parts(torch.float32)
    exact, fast = ours(x, PLAN), ours(x, PLAN._replace(is_fast=True))
    assert 0 < abs((fast / exact).item() - 1) < 4e-3
    slow, quick = gradients(exact, x), gradients(fast, x)
    for key in NAMES:
        assert error(quick[key], slow[key].double()) < 1e-2, key


def test_bfloat16_weights_give_bfloat16_gradients_of_float32_maths() -> None:
    x = parts(torch.float32)
    half = {
        key: (v.detach().bfloat16() if key in ("loc", "weight") else v.detach()).requires_grad_()
        for key, v in x.items()
    }
    rounded = {key: v.detach().double().requires_grad_() for key, v in half.items()}
    truth = gradients(formula(rounded, PLAN), rounded)
    found = gradients(ours(half, PLAN), half)
    for key in NAMES:
        assert found[key].dtype == half[key].dtype
        assert error(found[key], truth[key]) < 2e-2, key


def test_autocast_multiplies_as_it_says() -> None:
    x = parts(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ours(x, PLAN)
    assert loss.dtype == torch.float32
    assert 0 < abs((loss / ours(x, PLAN)).item() - 1) < 1e-2
    assert gradients(loss, x)["weight"].dtype == torch.float32


@pytest.mark.parametrize("learning", [("loc",), ("threshold",), ("weight",), ("scale", "noise")])
def test_only_what_is_asked_for_is_differentiated(learning: Any) -> None:
    x = parts()
    truth = gradients(formula(x, PLAN), x)
    frozen = {key: v.detach().requires_grad_(key in learning) for key, v in x.items()}
    found = torch.autograd.grad(ours(frozen, PLAN), [frozen[key] for key in learning])
    for key, gradient in zip(learning, found, strict=True):
        torch.testing.assert_close(gradient, truth[key], rtol=1e-9, atol=1e-11)


def test_a_second_backward_pass_gives_the_same() -> None:
    x = parts()
    loss = 3 * ours(x, PLAN)
    first = torch.autograd.grad(loss, list(x.values()), retain_graph=True)
    first = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss, list(x.values()))
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(one, two)


def test_without_labels_the_loss_is_zero_and_so_are_its_gradients() -> None:
    x = {k: v[:0] if k in ("loc", "scale") else v for k, v in parts().items()}
    law = HeadParams(x["weight"], x["bias"], x["noise"], x["threshold"])
    nobody = torch.empty(0, dtype=torch.long)
    total, cls, ce = one_vs_rest(Cauchy(x["loc"], x["scale"]), law, nobody, PLAN)
    assert total == cls == ce == 0
    assert not torch.autograd.grad(total, x["weight"])[0].any()
