"""Individuals: the same on every machine, strictly inside (0, 1), and truly Cauchy."""

from __future__ import annotations

import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from causal_qwen.individuals import (
    Individual,
    draw_noise,
    from_cauchy,
    resolve_individuals,
    row_seeds,
    to_cauchy,
)

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
def test_noise_of_known_seeds_is_unchanged(seed: int, position: int) -> None:
    expected = PINNED[seed, position]
    assert draw_noise(seed, len(expected), position).tolist() == expected


def test_noise_is_philox_keyed_by_seed_and_position() -> None:
    """The written rule: key = seed + 2^64 position; the top 52 bits, centred in their cell."""
    words = np.random.Philox(key=(7 << 64) | 42).random_raw(5)
    expected = [((int(word) >> 12) + 0.5) / 2**52 for word in words]
    assert draw_noise(42, 5, 7).tolist() == expected


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


def test_a_million_numbers_are_uniform_within_0_and_1() -> None:
    e = draw_noise(2024, 1_000_000)
    assert e.min() > 0
    assert e.max() < 1
    assert stats.kstest(e, "uniform").pvalue > 0.01


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


def test_untruncated_noise_passes_the_goodness_of_fit_test() -> None:
    t = to_cauchy(draw_noise(17, 200_000))
    assert stats.kstest(t, "cauchy").pvalue > 0.01


@pytest.mark.parametrize("min_density", [1e-4, 0.05, 0.5])
def test_truncated_noise_is_cauchy_conditioned_on_the_bound(min_density: float) -> None:
    bound = math.sqrt(1 / min_density - 1)
    outside = 2 * stats.cauchy.sf(bound)

    def cdf(t: np.ndarray) -> np.ndarray:
        return (stats.cauchy.cdf(t) - outside / 2) / (1 - outside)

    t = to_cauchy(draw_noise(18, 200_000), min_density)
    assert stats.kstest(t, cdf).pvalue > 0.01
    if min_density >= 0.05:  # and the test has power: the untruncated law is told apart
        assert stats.kstest(t, "cauchy").pvalue < 1e-6


# --- noise given as numbers


# --- row_seeds


def test_one_seed_serves_all_prompts_and_copies_use_its_successors() -> None:
    assert row_seeds(5, prompts=2, copies=1) == [5, 5]
    assert row_seeds(5, prompts=2, copies=3) == [5, 6, 7, 5, 6, 7]


def test_seed_list_has_one_seed_per_prompt_or_per_row() -> None:
    assert row_seeds([3, 9], prompts=2, copies=1) == [3, 9]
    assert row_seeds([3, 9], prompts=2, copies=2) == [3, 4, 9, 10]
    assert row_seeds([1, 2, 3, 4], prompts=2, copies=2) == [1, 2, 3, 4]
    assert row_seeds(np.array([8, 6]), prompts=2, copies=1) == [8, 6]  # type: ignore[arg-type]


# --- Individual


C = 24


@given(SEEDS, st.booleans(), st.floats(0, 1), st.floats(0, 5))
def test_saved_individual_loads_equal(
    seed: int, is_fresh: bool, density: float, temperature: float
) -> None:
    one = Individual.draw(
        C, seed=seed, fresh=is_fresh, min_density=density, temperature=temperature, name="Ada"
    ).shift(3)
    with tempfile.TemporaryDirectory() as folder:
        one.save(Path(folder) / "ada.safetensors")
        back = Individual.load(Path(folder) / "ada.safetensors")
        assert [path.name for path in Path(folder).iterdir()] == ["ada.safetensors"]
    assert back == one
    assert hash(back) == hash(one)
    assert back.name == "Ada"
    np.testing.assert_array_equal(back.at(7), one.at(7))


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one"
    Individual.draw(C, seed=1).save(path)

    def fail(*args: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr("safetensors.numpy.save", fail)
    with pytest.raises(OSError, match="no room"):
        Individual.draw(C, seed=2).save(path, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["one"]
    assert Individual.load(path) == Individual.draw(C, seed=1)


def test_a_saved_individual_replaces_a_file_only_if_asked(tmp_path: Path) -> None:
    file, link = tmp_path / "precious", tmp_path / "link"
    file.write_text("precious")
    link.symlink_to(file)
    for path in (file, link):
        with pytest.raises(FileExistsError, match=rf"{path.name} exists; .*overwrite=True"):
            Individual.draw(C, seed=1).save(path)
        assert file.read_text() == "precious"
    Individual.draw(C, seed=1).save(link, overwrite=True)
    assert Individual.load(file) == Individual.draw(C, seed=1)


def test_loading_a_missing_or_foreign_file_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        Individual.load(tmp_path / "missing")
    (tmp_path / "text").write_text("Ada")
    with pytest.raises(ValueError, match="text holds no individual"):
        Individual.load(tmp_path / "text")


def test_shared_individual_has_the_same_noise_at_every_position() -> None:
    one = Individual.draw(C, seed=42)
    np.testing.assert_array_equal(one.at(0), draw_noise(42, C))
    np.testing.assert_array_equal(one.at(17), draw_noise(42, C))
    assert one.shift(5) == one


def test_fresh_individual_has_other_noise_at_every_position_and_can_be_shifted() -> None:
    one = Individual.draw(C, seed=42, fresh=True)
    np.testing.assert_array_equal(one.at(7), draw_noise(42, C, 7))
    np.testing.assert_array_equal(one.shift(3).at(7), draw_noise(42, C, 4))
    with pytest.raises(ValueError, match="position 3, not at 2"):
        one.shift(3).at(2)
    with pytest.raises(ValueError, match=r"Individual\.draw\(fresh=True\)"):
        Individual(np.full((2, C), 0.5))


def test_equality_compares_everything_that_affects_decoding() -> None:
    one = Individual.draw(C, seed=1)
    assert one == Individual(draw_noise(1, C), name="Ada")  # neither name nor seed count
    assert one != Individual.draw(C, seed=2)
    assert one != one.truncate(0.1)
    assert one != replace(one, temperature=2.0)
    assert one != Individual.draw(C, seed=1, fresh=True)
    assert Individual.draw(C, seed=1, fresh=True) != Individual.draw(C, seed=2, fresh=True)
    assert len({one, Individual(draw_noise(1, C)), one.truncate(0.1)}) == 2
    assert one != "Ada"


@given(st.floats(-1e14, 1e14), st.floats(0, 0.99))
@example(9e13, 7.8e-115)  # far inside the bound, far in the tail
def test_to_cauchy_and_from_cauchy_are_inverse(t: float, density: float) -> None:
    bound = math.sqrt(1 / density - 1) if density > 0 else math.inf
    t = min(max(t, -bound), bound)
    assert float(to_cauchy(from_cauchy(t, density), density)) == pytest.approx(t, rel=0.1, abs=1e-9)
    if abs(t) < 1e3:
        back = float(to_cauchy(from_cauchy(t, density), density))
        assert back == pytest.approx(t, rel=1e-9, abs=1e-9)


@given(SEEDS, SEEDS, st.floats(0, 1), st.floats(0, 0.9))
def test_mix_interpolates_its_parents_in_cauchy_space(
    first: int, second: int, t: float, density: float
) -> None:
    one = Individual.draw(C, seed=first, min_density=density)
    other = Individual.draw(C, seed=second, min_density=density)
    x = one.mix(other, t).cauchy()
    expected = (1 - t) * one.cauchy() + t * other.cauchy()
    np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-9)
    assert one.mix(other, 0.0).min_density == density


@pytest.mark.parametrize("t", [0.1, 0.5])
def test_mix_of_independent_individuals_is_standard_cauchy(t: float) -> None:
    one, other = (Individual.draw(200_000, seed=seed) for seed in (1, 2))
    x = one.mix(other, t).cauchy()
    assert stats.kstest(x, "cauchy").pvalue > 0.01
    wrong = np.sqrt(1 - t) * one.cauchy() + np.sqrt(t) * other.cauchy()  # as Gaussians would mix
    assert stats.kstest(wrong, "cauchy").pvalue < 1e-6


def test_truncate_keeps_the_noise_and_invalid_fields_raise() -> None:
    one = Individual.draw(C, seed=1)
    np.testing.assert_array_equal(one.truncate(0.2).noise, one.noise)
    assert np.abs(one.truncate(0.2).cauchy()).max() <= 2.0
    with pytest.raises(ValueError, match=r"min_density=1\.5"):
        one.truncate(1.5)
    with pytest.raises(ValueError, match="temperature=-1"):
        replace(one, temperature=-1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        Individual(np.array([0.5, 1.0]))


# --- resolve_individuals


def test_individuals_are_repeated_for_all_rows_or_given_per_prompt_or_row() -> None:
    six = [Individual.draw(C, seed=seed) for seed in range(6)]
    assert resolve_individuals(six[0], 2, 3, C) == [six[0]] * 6
    assert resolve_individuals(six[:2], 2, 3, C) == [six[0]] * 3 + [six[1]] * 3
    assert resolve_individuals(six, 2, 3, C) == six
    with pytest.raises(ValueError, match=r"4 individuals .* 1, 2 or 6"):
        resolve_individuals(six[:4], 2, 3, C)


def test_seeds_and_noise_become_individuals_with_the_calls_settings() -> None:
    drawn = resolve_individuals([3, 9], 2, 1, C, min_density=0.1, temperature=2.0)
    assert drawn == [
        Individual.draw(C, seed=seed, min_density=0.1, temperature=2.0) for seed in (3, 9)
    ]
    assert resolve_individuals(draw_noise(3, C), 1, 1, C) == [Individual.draw(C, seed=3)]
    (fresh,) = resolve_individuals(3, 1, 1, C, fresh=True)
    assert fresh == Individual.draw(C, seed=3, fresh=True)
    with pytest.raises(ValueError, match="persistence=0"):
        resolve_individuals(draw_noise(3, C), 1, 1, C, explicit={"persistence": 0.0})


SAVER = """
import sys
from causal_qwen import Individual
print("saving", flush=True)
for seed in range(10_000_000):
    Individual.draw(8, seed=seed % 100).save(sys.argv[1], overwrite=True)
"""


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_a_whole_individual(tmp_path: Path) -> None:
    file, moments = tmp_path / "ada.safetensors", random.Random(0)
    for _ in range(30):
        command = [sys.executable, "-c", SAVER, str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "saving\n"
            time.sleep(moments.uniform(0.005, 0.1))
            process.send_signal(signal.SIGKILL)
        if file.exists():
            found = Individual.load(file)
            assert found.seed is not None
            np.testing.assert_array_equal(found.noise, Individual.draw(8, seed=found.seed).noise)
    assert file.exists()
