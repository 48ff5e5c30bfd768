"""Decision: S -> the next token. One-vs-rest: token k is wanted with P_k = P(S_k > C_k).

The choice argmax_k P_k is argmax_k (loc_k - C_k) / scale_k, because P is increasing in it. It is
taken in float64, and scales equal to 1e-5 relative count as equal: rounding must not decide
between tokens that the base model's argmax tells apart, or ties that it breaks by the lowest id.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from causal_qwen.modeling.abduction import Float32Module
from causal_qwen.modeling.action import SCALE_FLOOR
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalQwen2Config

TIE = 1e-5  # relative difference below which two scales count as equal
SLACK = 1e-4  # rounding allowance of every float32 bound: positive sums of <= 1000s of terms
BLOCKS = 96  # column blocks of the second bound
ROWS_AT_ONCE = 4096
FEW = 64  # candidates that are decided exactly without further pruning


class Decision(Float32Module):
    """Thresholds C_k, and the rules that use them."""

    def __init__(self, config: CausalQwen2Config) -> None:
        super().__init__()
        self.threshold = nn.Parameter(
            torch.empty(config.vocab_size, dtype=torch.float32),
            requires_grad=config.threshold_trainable,
        )

    def forward(self, s: Cauchy) -> Tensor:
        """P_k of every token. (..., V) -> (..., V)"""
        return s.sf(self.threshold)

    def log_normalized(self, s: Cauchy) -> Tensor:
        """log(P_k / sum P): one-vs-rest probabilities as one distribution. (..., V)"""
        return s.log_sf(self.threshold).log_softmax(-1)

    def choose(self, s: Cauchy) -> Tensor:
        """argmax_k P_k. (..., V) -> (...)"""
        return choose(s.loc, s.scale, self.threshold)


def choose(loc: Tensor, scale: Tensor, threshold: Tensor) -> Tensor:
    """argmax_k (loc_k - C_k) / scale_k in float64, ties as described above. (..., V) -> (...)"""
    margin = loc.double() - threshold.double()
    scale = scale.double()
    best = (margin / scale).argmax(-1, keepdim=True)
    is_equal = (scale / scale.gather(-1, best) - 1).abs() <= TIE
    return margin.masked_fill(~is_equal, -torch.inf).argmax(-1)


class HeadBounds:
    """What pruning needs to know of |W|: L1 norms of its rows, whole and by column blocks."""

    def __init__(self, weight: Tensor) -> None:
        self.rows = torch.cat([part.sum(-1) for part in _absolute_parts(weight)])  # (V,)
        self._blocks: Tensor | None = None

    def blocks(self, weight: Tensor) -> Tensor:
        """(V, BLOCKS), made when scales first vary enough to need it.

        `weight` is given again, not kept: a table must not keep an old head alive.
        """
        if self._blocks is None:
            edges = torch.tensor(block_edges(weight.shape[1]), device=weight.device)
            columns = torch.arange(weight.shape[1], device=weight.device)
            block = torch.bucketize(columns, edges, right=True)
            membership = torch.nn.functional.one_hot(block).float()  # (C, BLOCKS)
            self._blocks = torch.cat([part @ membership for part in _absolute_parts(weight)])
        return self._blocks


def _absolute_parts(weight: Tensor) -> Iterator[Tensor]:
    return (part.float().abs() for part in weight.detach().split(ROWS_AT_ONCE))


def block_edges(size: int) -> list[int]:
    count = min(BLOCKS, size)
    return [size * i // count for i in range(1, count)]


def choose_pruned(
    loc: Tensor,
    scale: Tensor,
    threshold: Tensor,
    decision_noise: Tensor,
    weight: Tensor,
    bounds: HeadBounds,
) -> int:
    """What `choose` would say of scale_S = |W| scale + |a| mean(scale), without computing it.

    loc (V,) and the individual's scale (C,) -> a token id. The winner beats every other token, so
    tokens whose best case is worse than somebody's worst case need no exact scale. Three bounds,
    each tighter and dearer, then float64 for the few survivors:

        1. min/max of the scale x the row's L1 norm            O(V)
        2. the same by column blocks                           O(candidates x BLOCKS)
        3. the product itself in float32                       O(candidates x C)
    """
    margin = loc.float() - threshold.float()
    noise = decision_noise.float().abs() * scale.mean()
    low, high = scale.min() * bounds.rows + noise, scale.max() * bounds.rows + noise
    keep = _undominated(margin, low, high).nonzero().squeeze(-1)

    if len(keep) > FEW:
        parts = scale.tensor_split(block_edges(len(scale)))
        block_low = torch.stack([part.min() for part in parts])
        block_high = torch.stack([part.max() for part in parts])
        table = bounds.blocks(weight)
        table = table if len(keep) == len(loc) else table[keep]
        low, high = (table @ torch.stack([block_low, block_high]).T + noise[keep, None]).unbind(-1)
        keep = keep[_undominated(margin[keep], low, high)]

    if len(keep) > FEW:
        rows = weight if len(keep) == len(loc) else weight[keep]
        product = rows.float().abs() @ scale.float() + noise[keep]
        keep = keep[_undominated(margin[keep], product, product)]

    if len(keep) == 0:
        raise ValueError("loc_S holds NaN: no token can be chosen; check the model's weights.")
    exact = weight[keep].double().abs() @ scale.double()
    exact = exact + decision_noise[keep].double().abs() * scale.double().mean()
    winner = choose(loc[keep], exact.clamp_min(SCALE_FLOOR), threshold[keep])
    return int(keep[winner])


def _undominated(margin: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Which tokens may still win, given low <= scale <= high up to rounding."""
    low = (low * (1 - SLACK)).clamp_min(SCALE_FLOOR)
    high = (high * (1 + SLACK)).clamp_min(SCALE_FLOOR)
    is_positive = margin >= 0
    worst = margin / torch.where(is_positive, high, low)
    best = margin / torch.where(is_positive, low, high)
    bar = worst.max()
    return best >= torch.where(bar.isfinite(), bar - SLACK * bar.abs(), bar)
