"""Individuals: the same on every machine, strictly inside (0, 1), and truly Cauchy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from causal_qwen.individual import check_noise, draw_noise, row_seeds, to_cauchy

SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**31)

# What every engine, in whatever language, has to reproduce: (seed, position) -> the first numbers.
PINNED = {
    (0, 0): [0.011546754286331562, 0.24154919656271823, 0.11142585551493822, 0.5644146216071338],
    (42, 0): [0.8201981478608876, 0.18924562408645496, 0.8676608148821462, 0.3945814702827203],
    (42, 7): [0.649420079613736, 0.8848813535936771, 0.5537339411764371, 0.9529724189339114],
    (2**64 - 1, 3): [0.4174006598630321, 0.4376835332408563],
}


# --- draw_noise


@pytest.mark.parametrize(("seed", "position"), PINNED)
def test_an_individual_is_pinned_for_all_time(seed: int, position: int) -> None:
    expected = PINNED[seed, position]
    assert draw_noise(seed, len(expected), position).tolist() == expected


def test_an_individual_is_philox_keyed_by_seed_and_position() -> None:
    """The written rule: key = seed + 2^64 position; the top 52 bits, centred in their cell."""
    words = np.random.Philox(key=(7 << 64) | 42).random_raw(5)
    expected = [((int(word) >> 12) + 0.5) / 2**52 for word in words]
    assert draw_noise(42, 5, 7).tolist() == expected


@given(SEEDS, POSITIONS)
def test_an_individual_is_the_same_whenever_it_is_drawn(seed: int, position: int) -> None:
    first = draw_noise(seed, 6, position)
    assert first.dtype == np.float64
    np.testing.assert_array_equal(first, draw_noise(seed, 6, position))
    # a larger individual begins with the smaller one: C does not change who it is
    np.testing.assert_array_equal(first, draw_noise(seed, 11, position)[:6])


@given(SEEDS, POSITIONS)
def test_seeds_and_positions_tell_individuals_apart(seed: int, position: int) -> None:
    here = draw_noise(seed, 6, position)
    assert not np.array_equal(here, draw_noise(seed ^ 1, 6, position))
    assert not np.array_equal(here, draw_noise(seed, 6, position + 1))


def test_drawing_leaves_the_global_generators_alone() -> None:
    np.random.seed(5)  # noqa: NPY002 - the global state is what this test is about
    before = np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    draw_noise(1, 100)
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


@pytest.mark.parametrize("word", [0, 2**12 - 1, 2**64 - 1, 2**63])
def test_noise_is_strictly_between_0_and_1_for_the_most_extreme_words(
    word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Extreme:
        def __init__(self, key: object) -> None:
            pass

        def random_raw(self, size: int) -> np.ndarray:
            return np.full(size, word, dtype=np.uint64)

    monkeypatch.setattr(np.random, "Philox", Extreme)
    (e,) = draw_noise(0, 1)
    assert 0 < e < 1
    assert e == (word // 2**12 + 0.5) / 2**52
    assert math.isfinite(to_cauchy(e))


def test_a_million_numbers_are_uniform_and_inside() -> None:
    e = draw_noise(2024, 1_000_000)
    assert e.min() > 0
    assert e.max() < 1
    assert stats.kstest(e, "uniform").pvalue > 0.01


@pytest.mark.parametrize("seed", [-1, 2**64, -(2**70)])
def test_a_seed_outside_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"seed must lie in \[0, 2\*\*64\), not {seed}"):
        draw_noise(seed, 3)


# --- to_cauchy


@given(st.floats(1e-12, 1 - 1e-12))
def test_untruncated_noise_is_the_inverse_cdf(e: float) -> None:
    assert stats.cauchy.cdf(to_cauchy(e)) == pytest.approx(e, rel=1e-4)


@given(st.floats(1e-15, 1 - 1e-15), st.floats(1e-9, 1))
def test_truncation_keeps_the_density_above_its_share_of_the_maximum(
    e: float, min_density: float
) -> None:
    t = float(to_cauchy(e, min_density))
    assert abs(t) <= math.sqrt(1 / min_density - 1) * (1 + 1e-9)
    assert 1 / (1 + t**2) >= min_density * (1 - 1e-6)


@given(st.floats(0, 1), st.floats(1e-6, 0.5))
def test_truncation_is_symmetric_and_keeps_the_median(min_density: float, e: float) -> None:
    assert to_cauchy(0.5, min_density) == 0
    up, down = to_cauchy(1 - e, min_density), to_cauchy(e, min_density)
    assert float(up) == pytest.approx(-float(down), rel=1e-6, abs=1e-9)


def test_the_bound_is_reached_at_the_ends() -> None:
    edge = 2.0**-53
    assert float(to_cauchy(edge, 0.1)) == pytest.approx(-3.0, rel=1e-12)
    assert float(to_cauchy(1 - edge, 0.1)) == pytest.approx(3.0, rel=1e-12)
    assert float(to_cauchy(0.123, 1.0)) == 0
    assert float(to_cauchy(0.75, 0.5)) == pytest.approx(math.tan(math.pi / 8), rel=1e-12)


def test_untruncated_noise_passes_the_goodness_of_fit_test() -> None:
    t = to_cauchy(draw_noise(17, 200_000))
    assert stats.kstest(t, "cauchy").pvalue > 0.01


@pytest.mark.parametrize("min_density", [1e-4, 0.05, 0.5])
def test_truncated_noise_is_the_cauchy_given_that_it_is_inside(min_density: float) -> None:
    bound = math.sqrt(1 / min_density - 1)
    outside = 2 * stats.cauchy.sf(bound)

    def cdf(t: np.ndarray) -> np.ndarray:
        return (stats.cauchy.cdf(t) - outside / 2) / (1 - outside)

    t = to_cauchy(draw_noise(18, 200_000), min_density)
    assert stats.kstest(t, cdf).pvalue > 0.01
    if min_density >= 0.05:  # and the test has power: the untruncated law is told apart
        assert stats.kstest(t, "cauchy").pvalue < 1e-6


@pytest.mark.parametrize("min_density", [-0.1, 1.1, math.nan])
def test_a_min_density_outside_its_range_is_refused(min_density: float) -> None:
    with pytest.raises(ValueError, match=rf"min_density={min_density} is outside \[0, 1\]"):
        to_cauchy(0.5, min_density)


# --- individuals given by hand


def test_noise_given_by_hand_is_taken_as_it_is() -> None:
    one = check_noise([0.1, 0.5, 0.9], 3)
    assert one.dtype == np.float64
    assert one.tolist() == [0.1, 0.5, 0.9]
    assert check_noise([[0.1, 0.5], [0.2, 0.7], [0.3, 0.4]], 2).shape == (3, 2)


@pytest.mark.parametrize("noise", [[0.5, 0.5], [[0.5] * 4], 0.5, [[[0.5] * 3]]])
def test_noise_of_the_wrong_size_is_refused_with_both_shapes(noise: object) -> None:
    with pytest.raises(ValueError, match=r"is \(3,\) numbers.*got shape \("):
        check_noise(noise, 3)


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.2, 1.3, math.nan])
def test_noise_outside_the_open_interval_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        check_noise([0.5, bad, 0.5], 3)


# --- row_seeds


def test_one_seed_is_one_individual_and_its_copies_are_its_successors() -> None:
    assert row_seeds(5, prompts=2, copies=1) == [5, 5]
    assert row_seeds(5, prompts=2, copies=3) == [5, 6, 7, 5, 6, 7]


def test_a_list_names_every_prompt_or_every_row() -> None:
    assert row_seeds([3, 9], prompts=2, copies=1) == [3, 9]
    assert row_seeds([3, 9], prompts=2, copies=2) == [3, 4, 9, 10]
    assert row_seeds([1, 2, 3, 4], prompts=2, copies=2) == [1, 2, 3, 4]
    assert row_seeds(np.array([8, 6]), prompts=2, copies=1) == [8, 6]  # type: ignore[arg-type]


def test_a_list_of_one_seed_is_that_seed() -> None:
    assert row_seeds([3], prompts=2, copies=2) == row_seeds(3, prompts=2, copies=2)


@pytest.mark.parametrize("seeds", [[], [1, 2, 3], [1] * 5])
def test_a_list_of_another_length_is_refused_with_the_choices(seeds: list[int]) -> None:
    with pytest.raises(
        ValueError,
        match=rf"{len(seeds)} individuals .* 2 prompts with 2 texts each; give 1, 2 or 4",
    ):
        row_seeds(seeds, prompts=2, copies=2)
