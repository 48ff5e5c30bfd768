"""Summaries: mean, standard deviation and quantiles of numbers that arrive in batches.

Memory is bounded: up to EXACT numbers are kept and their quantiles are exact; after that they are
counted in 2^20 bins, and a quantile is right to 2^-11 = 0.05% of itself (`Quantiles`). Summaries of
parts merge into that of the whole, in any order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EXACT = 2**20  # numbers that are kept before they are counted
DROPPED_BITS = 12  # of a float32's 32: 2^20 bins remain, 2^11 of them for every power of two
BINS = 2 ** (32 - DROPPED_BITS)
SIGN = 2**31


class Quantiles:
    """Order statistics of a stream of float32 numbers.

    A bin is a number's sign, exponent and 11 bits of its mantissa: read as integers, the bits of
    floating-point numbers are ordered as the numbers are (negative ones backwards).
    """

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.bins: Tensor | None = None  # (BINS,) counts, once there are more than EXACT numbers
        self.count = 0

    def add(self, values: Tensor) -> None:
        """Numbers of any shape; NaN is refused by what computes them."""
        values = values.detach().flatten().float().cpu()
        self.count += len(values)
        if self.bins is None:
            self.kept.append(values)
            if self.count <= EXACT:
                return
            values, self.kept = torch.cat(self.kept), []
            self.bins = torch.zeros(BINS, dtype=torch.int64)
        self.bins += torch.bincount(_bin(values), minlength=BINS)

    def merge(self, other: Quantiles) -> None:
        if other.bins is None:
            for part in other.kept:
                self.add(part)
            return
        self.add(torch.empty(0))
        if self.bins is None:
            values, self.kept = torch.cat([*self.kept, torch.empty(0)]), []
            self.bins = torch.bincount(_bin(values), minlength=BINS)
        self.bins += other.bins
        self.count += other.count

    def at(self, *levels: float) -> list[float]:
        """The smallest number that is not below this share of all; NaN without numbers."""
        if not self.count:
            return [math.nan for _ in levels]
        ranks = [int(level * (self.count - 1)) for level in levels]
        if self.bins is None:
            ordered = torch.cat(self.kept).sort().values
            return [float(ordered[rank]) for rank in ranks]
        places = torch.searchsorted(self.bins.cumsum(0), torch.tensor(ranks), right=True)
        return _middle(places).tolist()


def _bin(values: Tensor) -> Tensor:
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    ordered = torch.where(bits >= SIGN, 2 * SIGN - 1 - bits, bits + SIGN)
    return ordered >> DROPPED_BITS


def _middle(places: Tensor) -> Tensor:
    """The number in the middle of a bin."""
    ordered = (places << DROPPED_BITS) + 2 ** (DROPPED_BITS - 1)
    bits = torch.where(ordered >= SIGN, ordered - SIGN, 2 * SIGN - 1 - ordered)
    return torch.where(bits >= SIGN, bits - 2 * SIGN, bits).to(torch.int32).view(torch.float32)


class Spread:
    """Mean, median, standard deviation and interquartile range of a stream."""

    def __init__(self) -> None:
        self.mean, self.squares = 0.0, 0.0  # squares: sum of (x - mean)^2
        self.quantiles = Quantiles()

    def add(self, values: Tensor) -> None:
        if not values.numel():
            return
        wide = values.detach().double()
        mean = float(wide.mean())
        self._combine(values.numel(), mean, float((wide - mean).square().sum()))
        self.quantiles.add(values)

    def merge(self, other: Spread) -> None:
        self._combine(other.quantiles.count, other.mean, other.squares)
        self.quantiles.merge(other.quantiles)

    def _combine(self, count: int, mean: float, squares: float) -> None:
        """Of two parts; sums of plain squares would cancel."""
        before = self.quantiles.count
        if not (total := before + count):
            return
        away = mean - self.mean
        self.squares += squares + away * away * before * count / total
        self.mean += away * count / total

    def compute(self) -> dict[str, float]:
        count = self.quantiles.count
        low, median, high = self.quantiles.at(0.25, 0.5, 0.75)
        std = math.sqrt(self.squares / (count - 1)) if count > 1 else math.nan
        mean = self.mean if count else math.nan
        return {"mean": mean, "median": median, "std": std, "iqr": high - low}
