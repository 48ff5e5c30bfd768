"""Decision: argmax P is what it says, ties fall as argmax lets them fall, and pruning is exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from causal_qwen.decoding.decision import (
    EXACT_CANDIDATES,
    SCALE_FLOOR,
    choose,
    choose_pruned,
    decide_together,
)
from causal_qwen.generation.logits import (
    HeadNorms,
    TorchHead,
)
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.thresholds import Decision
from causal_qwen.numpy_engine.fast import Matrix

# --- P and its argmax


def test_p_is_the_probability_to_exceed_the_threshold(make_config: Callable[..., Any]) -> None:
    decision = Decision(make_config(vocab_size=5))
    thresholds = [5.0, 4.0, -1.0, 0.0, 2.0]
    with torch.no_grad():
        decision.threshold.copy_(torch.tensor(thresholds))
    loc, scale = [4.0, 9.0, -3.0, 0.0, 1e4], [0.5, 2.0, 0.1, 7.0, 3.0]
    s = Cauchy(torch.tensor(loc), torch.tensor(scale))
    expected = stats.cauchy.sf(thresholds, loc, scale)
    np.testing.assert_allclose(decision(s).detach(), expected, rtol=1e-6)
    log_share = decision.log_normalized(s).detach()
    np.testing.assert_allclose(log_share, np.log(expected / expected.sum()), rtol=1e-5)


def test_normalised_probabilities_survive_when_every_p_is_tiny(
    make_config: Callable[..., Any],
) -> None:
    decision = Decision(make_config(vocab_size=3))
    with torch.no_grad():
        decision.threshold.fill_(0.0)
    s = Cauchy(torch.tensor([-1e20, -2e20, -4e20]), torch.full((3,), 1e-12))
    share = decision.log_normalized(s).detach().exp()
    np.testing.assert_allclose(share, [4 / 7, 2 / 7, 1 / 7], rtol=1e-5)


@given(st.integers(0, 2**32), st.integers(1, 60), st.floats(-20, 20), st.floats(1e-3, 1e3))
def test_choose_is_a_plain_argmax_of_p_in_float64(
    seed: int, tokens: int, threshold: float, width: float
) -> None:
    rng = np.random.default_rng(seed)
    loc = rng.normal(0, 8, (2, 3, tokens))
    scale = width * np.exp(rng.normal(0, 1, loc.shape))
    thresholds = threshold + rng.normal(0, 1, tokens)
    # sf rounds to 1 above the threshold and sorts badly there: the log of both tails does not
    below, above = stats.cauchy.cdf(thresholds, loc, scale), stats.cauchy.sf(thresholds, loc, scale)
    log_p = np.where(above < 0.5, np.log(above), np.log1p(-below))
    chosen = choose(*(torch.from_numpy(x) for x in (loc, scale, thresholds)))
    assert chosen.shape == (2, 3)
    np.testing.assert_array_equal(chosen, log_p.argmax(-1))


@pytest.mark.parametrize("threshold", [5.0, 50.0], ids=["above C", "below C"])
@pytest.mark.parametrize("noise", [3e-6, -3e-6])
def test_scales_equal_up_to_rounding_leave_the_choice_to_the_scores(
    threshold: float, noise: float
) -> None:
    """In float32 the equalised scales differ by 1e-7; the base model's argmax knows no scales."""
    scale = torch.tensor([2.0, 2.0 * (1 + noise), 2.0, 2.0 * (1 - noise)], dtype=torch.float64)
    thresholds = torch.full((4,), threshold)
    tie = torch.tensor([7.0, 7.0, 3.0, 7.0])
    assert int(choose(tie, scale, thresholds)) == 0
    barely = torch.tensor([7.0, 7.000001, 3.0, 7.0])
    assert int(choose(barely, scale, thresholds)) == 1


@given(st.integers(0, 2**32), st.floats(-40, 40))
def test_no_bar_changes_a_choice_between_tokens_of_one_scale(seed: int, bar: float) -> None:
    """Before training all scales are equal: the bar must not cost the promise a single tie."""
    rng = np.random.default_rng(seed)
    loc = torch.from_numpy(rng.normal(0, 5, (3, 40)).astype(np.float32)).bfloat16().float()
    thresholds = torch.full((40,), 2.0)
    h = torch.full((3, 1), bar)
    assert torch.equal(choose(loc, torch.ones_like(loc), thresholds, h), loc.argmax(-1))


def test_the_bar_is_the_level_of_all_scores(make_config: Callable[..., Any]) -> None:
    decision = Decision(make_config(vocab_size=4, threshold_context="competition"))
    with torch.no_grad():
        decision.threshold.copy_(torch.tensor([-1.0, -2.0, -1.0, 0.0]))
    loc, scale = np.array([3.0, 4.0, -3.0, 1.0]), np.array([0.5, 2.0, 0.1, 0.2])
    level = decision.threshold.detach().numpy() + np.logaddexp.reduce(loc)
    expected = stats.cauchy.sf(level, loc, scale)
    for moved in (0.0, -30.0, 200.0):  # all scores together
        s = Cauchy(torch.from_numpy(loc) + moved, torch.from_numpy(scale))
        np.testing.assert_allclose(decision(s).detach(), expected, rtol=1e-6)
        log_share = decision.log_normalized(s).detach()
        np.testing.assert_allclose(log_share, np.log(expected / expected.sum()), rtol=1e-5)
        assert int(decision.choose(s)) == expected.argmax()


# --- pruning


class Case(NamedTuple):
    loc: Tensor
    scale: Tensor
    threshold: Tensor
    noise: Tensor
    weight: Tensor
    norms: HeadNorms
    bar: Tensor | None = None


def full_choice(case: Case) -> int:
    """The same decision without any short cut, in float64."""
    scale = case.weight.double().abs() @ case.scale.double()
    scale = scale + case.noise.double().abs() * case.scale.double().mean()
    return int(choose(case.loc, scale.clamp_min(SCALE_FLOOR), case.threshold, case.bar))


def torch_head(case: Case) -> TorchHead:
    no_b = torch.zeros(case.weight.shape[1])
    head = TorchHead(case.weight, case.threshold, no_b, case.noise)
    head.norms = case.norms
    return head


class NumpyHead:
    """The NumPy engine's head, around a `Matrix`."""

    def __init__(self, case: Case) -> None:
        self.matrix = Matrix(case.weight.float().numpy())
        self.threshold = case.threshold.float().numpy()
        self.decision_noise = np.abs(case.noise.float().numpy())
        self.row_norms = self.matrix.row_norms
        self.absolute, self.rows = self.matrix.absolute, self.matrix.rows


def pruned_choice(case: Case) -> int:
    """The choice of both engines, which must be the same."""
    chosen = choose_pruned(case.loc, case.scale, torch_head(case), case.bar)
    if case.weight.dtype == torch.float32 and len(case.loc) < 1000:
        arrays = case.loc.numpy(), case.scale.float().numpy()
        bar = None if case.bar is None else case.bar.numpy()
        in_numpy = choose_pruned(*arrays, NumpyHead(case), bar)
        assert in_numpy == chosen
    bar = None if case.bar is None else case.bar[None]
    together = decide_together(case.scale[None], case.loc[None], torch_head(case), bar)
    assert together is None or together.tolist() == [chosen]
    return chosen


SHAPES = ((1, 3), (2, 1), (5, 70), (60, 7), (97, 128), (300, 500), (700, 100), (2000, 128))


def random_cases(count: int) -> Iterator[tuple[str, Case]]:
    """Every combination of what can vary, in turn; a law (weights) serves 50 contexts."""
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    made = 0
    law = 0
    while made < count:
        tokens, size = SHAPES[law % len(SHAPES)]
        dtype = (torch.float32, torch.bfloat16)[law // len(SHAPES) % 2]
        equalised = bool(law // (2 * len(SHAPES)) % 2)
        weight = normal(tokens, size) * 0.2 * normal(tokens, 1).exp()
        if law % 3 == 0:
            weight[rng.integers(tokens, size=tokens // 4)] = weight[0].clone()  # exact ties
        if law % 5 == 0:
            weight[-1] = 0.0  # a padding row
        if law % 7 == 0:
            weight = weight * (torch.rand(tokens, size, generator=generator) < 0.1)
        weight = weight.to(dtype)
        norms = weight.double().abs().sum(-1)
        noise = ((norms.max() - norms) if equalised else torch.zeros(tokens)).float()
        bounds = HeadNorms(weight)
        for context in range(min(50, count - made)):
            spread = (0.0, 0.3, 1.0)[context % 3]  # constant, 30%, a factor e
            scale = 10 ** rng.uniform(-6, 1) * (normal(size) * spread).exp()
            u = normal(size) * 3
            loc = (weight.float() @ u).to(dtype).float()  # bfloat16 scores tie often
            if context % 4 == 1:
                loc[rng.random(tokens) < 0.5] = -math.inf
            top = float(loc.max()) if math.isfinite(loc.max()) else 0.0
            threshold = torch.full((tokens,), top + (30, 1, 0, -3)[context % 4 - 1])
            if context % 5 == 2:
                threshold = threshold + normal(tokens)
            kind = f"V={tokens} C={size} {dtype} equalised={equalised} spread={spread} {context}"
            bar = None
            if context % 2:  # the same level, as a threshold and a bar
                bar = normal(1) * 10
                threshold = threshold - bar
            yield kind, Case(loc, scale, threshold, noise, weight, bounds, bar)
        made += 50
        law += 1


@pytest.mark.parametrize("cases", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_pruned_choice_is_the_full_one_in_random_cases(cases: int) -> None:
    wrong = [
        (kind, pruned, full)
        for kind, case in random_cases(cases)
        if (pruned := pruned_choice(case)) != (full := full_choice(case))
    ]
    assert not wrong, f"{len(wrong)} of {cases}: {wrong[:5]}"


def test_the_pruned_choice_is_the_base_models_argmax_when_scales_are_equalised() -> None:
    """The promise: with equalised decision noise and a constant scale_U, argmax P = argmax loc."""
    cases = [case for kind, case in random_cases(4_000) if "equalised=True spread=0.0" in kind]
    constant = [case for case in cases if len(set(case.threshold.tolist())) == 1]
    assert len(constant) > 300
    for case in constant:
        assert pruned_choice(case) == int(case.loc.argmax())


@pytest.mark.parametrize("tokens", [EXACT_CANDIDATES - 1, EXACT_CANDIDATES + 1, 500])
@pytest.mark.parametrize("gap", [0.0, 1e-7, 1e-6, 2e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("noise", [0.0, 20.0])
def test_near_ties_survive_pruning(tokens: int, gap: float, noise: float) -> None:
    """Tokens whose ratios differ by less than float32 can bound, on both sides of C."""
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.rand(tokens, 40, generator=generator) + 0.1
    bounds = HeadNorms(weight)
    scale = torch.rand(40, generator=generator) + 0.5
    decision_noise = noise * torch.randn(tokens, generator=generator)
    exact = weight.double() @ scale.double()
    exact = exact + decision_noise.double().abs() * scale.double().mean()
    for sign in (1.0, -1.0):
        steps = 1 - sign * gap * torch.arange(tokens, dtype=torch.float64)
        ratio = sign * 3.0 * steps[torch.randperm(tokens, generator=generator)]
        case = Case(
            (ratio * exact).float(),
            scale,
            torch.zeros(tokens),
            decision_noise,
            weight,
            bounds,
        )
        assert pruned_choice(case) == full_choice(case)


def test_pruning_reads_few_rows_of_the_head_when_the_scale_is_constant() -> None:
    """What makes it nearly free: the head's rows are read for the candidates alone."""

    class Watched(TorchHead):
        rows_read = 0

        def rows(self, ids: Tensor) -> Tensor:
            self.rows_read += len(ids)
            return super().rows(ids)

        def absolute(self, scale: Tensor, rows: Tensor | None = None) -> Tensor:
            raise AssertionError("products with |W| are not needed here")

    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(2000, 64, generator=generator)
    loc = weight @ torch.randn(64, generator=generator)
    norms = weight.abs().sum(-1)
    threshold = torch.full((2000,), float(loc.max()))
    watched = Watched(weight, threshold, torch.zeros(64), norms.max() - norms)
    chosen = choose_pruned(loc, torch.full((64,), 0.01), watched)
    assert chosen == int(loc.argmax())
    assert 1 <= watched.rows_read <= EXACT_CANDIDATES


def test_the_range_of_a_batchs_scales_holds_every_scale() -> None:
    by_mean = 0  # cases in which the mean of scale_U bounds better than its extremes
    for kind, case in random_cases(2_000):
        head = torch_head(case)
        low, high = head.scale_range(case.scale[None])
        exact = case.weight.double().abs() @ case.scale.double()
        exact = exact + case.noise.double() * case.scale.double().mean()
        exact = exact.clamp_min(SCALE_FLOOR)
        assert low <= exact.min(), kind
        assert high >= exact.max(), kind
        by_mean += int(high < 0.9 * case.scale.max() * head.unit_range[1])
    assert by_mean > 500


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
def test_a_batch_is_decided_together_however_its_scales_vary(spread: float) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(5000, 256, generator=generator)
    loc = weight @ torch.randn(256, 8, generator=generator) / 2  # a deviation of 8
    norms = weight.abs().sum(-1)
    head = TorchHead(weight, torch.full((5000,), 5.0), torch.zeros(256), norms.max() - norms)
    scale = (spread * torch.randn(8, 256, generator=generator)).exp()
    bar = loc.T.logsumexp(-1, keepdim=True)
    chosen = decide_together(scale, loc.T, head, bar)
    assert chosen is not None
    rows = zip(loc.T, scale, bar, strict=True)
    assert chosen.tolist() == [choose_pruned(row, of_u, head, h) for row, of_u, h in rows]


def test_scores_of_nan_are_refused_with_the_cure() -> None:
    weight = torch.ones(5, 3)
    nan = torch.full((5,), math.nan)
    head = TorchHead(weight, torch.zeros(5), torch.zeros(3), torch.zeros(5))
    with pytest.raises(ValueError, match="loc_S holds NaN"):
        choose_pruned(nan, torch.ones(3), head)


@pytest.mark.parametrize("size", [1, 130])
def test_bounds_hold_the_norms_of_every_row(size: int) -> None:
    weight = torch.randn(7, size, generator=torch.Generator().manual_seed(size))
    bounds = HeadNorms(weight.bfloat16())
    exact = weight.bfloat16().double().abs()
    np.testing.assert_allclose(bounds.rows, exact.sum(-1), rtol=1e-5)
    uneven = np.linalg.norm(exact - exact.mean(-1, keepdim=True), axis=-1).max()
    np.testing.assert_allclose(bounds.uneven, uneven, rtol=1e-5, atol=1e-6)
