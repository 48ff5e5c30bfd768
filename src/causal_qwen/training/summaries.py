"""Summaries: mean, standard deviation and quantiles of numbers that arrive in batches.

Memory is bounded: quantiles are of a random sample once there are more than MOST numbers.
Summaries of parts merge into that of the whole, in any order.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

MOST = 2**20  # numbers that are kept


class Sample:
    """A random sample of a stream; all of it while it is short."""

    def __init__(self) -> None:
        self.kept, self.share = torch.empty(0), 1.0  # of all numbers
        self.count = 0
        self.rng = np.random.default_rng(0)

    def add(self, values: Tensor) -> None:
        """Numbers of any shape."""
        values = values.detach().flatten().float().cpu()
        self.count += len(values)
        self._keep(self._thinned(values, self.share))

    def merge(self, other: Sample) -> None:
        share = min(self.share, other.share)
        self.kept = self._thinned(self.kept, share / self.share)
        self._keep(self._thinned(other.kept, share / other.share), share)
        self.count += other.count

    def _keep(self, values: Tensor, share: float | None = None) -> None:
        self.kept, self.share = torch.cat([self.kept, values]), share or self.share
        while len(self.kept) > MOST:
            self.kept, self.share = self._thinned(self.kept, 0.5), self.share / 2

    def _thinned(self, values: Tensor, share: float) -> Tensor:
        if share == 1:
            return values
        return values[torch.from_numpy(self.rng.random(len(values)) < share)]

    def at(self, *levels: float) -> list[float]:
        """The smallest number that is not below this share of all; NaN without numbers."""
        if not len(self.kept):
            return [math.nan for _ in levels]
        ordered = self.kept.sort().values
        return [float(ordered[int(level * (len(ordered) - 1))]) for level in levels]


class Spread:
    """Mean, median, standard deviation and interquartile range of a stream."""

    def __init__(self) -> None:
        self.mean, self.squares = 0.0, 0.0  # squares: sum of (x - mean)^2
        self.sample = Sample()

    def add(self, values: Tensor) -> None:
        if values.numel():
            wide = values.detach().double()
            mean = float(wide.mean())
            self._combine(values.numel(), mean, float((wide - mean).square().sum()))
            self.sample.add(values)

    def merge(self, other: Spread) -> None:
        self._combine(other.sample.count, other.mean, other.squares)
        self.sample.merge(other.sample)

    def _combine(self, count: int, mean: float, squares: float) -> None:
        """Of two parts; sums of plain squares would cancel."""
        before = self.sample.count
        if not (total := before + count):
            return
        away = mean - self.mean
        self.squares += squares + away * away * before * count / total
        self.mean += away * count / total

    def compute(self) -> dict[str, float]:
        count = self.sample.count
        low, median, high = self.sample.at(0.25, 0.5, 0.75)
        std = math.sqrt(self.squares / (count - 1)) if count > 1 else math.nan
        mean = self.mean if count else math.nan
        return {"mean": mean, "median": median, "std": std, "iqr": high - low}
