"""Logits: the mode as the last logits processor.

`forward(...).logits` is loc_S in every mode, and every other logits processor acts on it. The last
processor receives U of the last position and turns the processed loc_S into the choice, so
streamers, stopping criteria, caches and compiled forwards work unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import LogitsProcessor
from transformers.utils import ModelOutput

from causal_qwen.decoding.candidates import (
    cut_by_text,
    few_candidates,
    in_any_row,
    keep_min_p,
    move_candidates,
)
from causal_qwen.decoding.decision import (
    EXACT_CANDIDATES,
    NO_CHOICE,
    SCALE_FLOOR,
    SLACK,
    choose,
    decide,
    decide_among,
    exact_scales,
    margin,
)
from causal_qwen.decoding.noise import DecodingNoise, UNoise
from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.modeling.abduction import whole
from causal_qwen.modeling.action import head_divisor, head_weight, score_shift
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.modeling.thresholds import over_bar

BLOCKS = 96  # column blocks of the second bound
ROWS_AT_ONCE = 4096
MOST_TOGETHER = 512  # candidates whose scales are computed for a whole batch


class HeadNorms:
    """L1 norms of the rows of W, whole and by column blocks, and how uneven a row is."""

    def __init__(self, weight: Tensor) -> None:
        norms, uneven = [], []
        for part in _absolute_parts(weight):
            norms.append(part.sum(-1))
            uneven.append((part - part.mean(-1, keepdim=True)).norm(dim=-1).max())
        self.rows = torch.cat(norms)  # (V,)
        self.uneven = float(torch.stack(uneven).max())  # max_k of || |W_k| - its mean ||_2
        self._blocks: Tensor | None = None

    def blocks(self, weight: Tensor) -> Tensor:
        """(V, BLOCKS), computed when scales first vary enough to need it.

        `weight` is an argument, not an attribute: the norms must not keep an old head alive.
        """
        if self._blocks is None:
            edges = torch.tensor(block_edges(weight.shape[1]), device=weight.device)
            columns = torch.arange(weight.shape[1], device=weight.device)
            block = torch.bucketize(columns, edges, right=True)
            membership = nn.functional.one_hot(block).float()  # (C, BLOCKS)
            self._blocks = torch.cat([part @ membership for part in _absolute_parts(weight)])
        return self._blocks


class TorchHead:
    """The law's parameters as `decoding.decision` needs them."""

    def __init__(
        self,
        weight: Tensor,
        threshold: Tensor,
        b_noise: Tensor,
        decision_noise: Tensor,
        norms_of: Callable[[Tensor], HeadNorms] = HeadNorms,
    ) -> None:
        self.weight, self.threshold = weight.detach(), threshold.detach()
        self.b_noise, self.decision_noise = b_noise.detach().abs(), decision_noise.detach().abs()
        self._norms_of = norms_of

    @functools.cached_property
    def norms(self) -> HeadNorms:
        """Computed when a bound first needs them: they cost a pass over W."""
        return self._norms_of(self.weight)

    def row_norms(self) -> Tensor:
        return self.norms.rows

    @functools.cached_property
    def unit_range(self) -> tuple[float, float]:
        """The least and the largest scale_S of a U whose scales are all 1."""
        units = self.norms.rows + self.decision_noise
        return float(units.min()), float(units.max())

    def bound_by_blocks(self, scale: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        parts = scale.tensor_split(block_edges(len(scale)))
        low_high = torch.stack([torch.stack([part.min(), part.max()]) for part in parts])
        table = self.norms.blocks(self.weight)
        table = table if len(rows) == len(table) else table[rows]
        low, high = (table @ low_high.float()).unbind(-1)
        return low, high

    def absolute(self, scale: Tensor, rows: Tensor | None = None) -> Tensor:
        weight = self.weight if rows is None else self.weight[rows]
        return weight.float().abs() @ scale.float()

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class DecisionProcessor(LogitsProcessor):
    """The last processor: processed loc_S -> scores whose argmax is the mode's choice.

    It also cuts by `min_p`: then K candidates are left to read instead of V tokens, here `tokens`.
    """

    def __init__(
        self,
        model: CausalModel,
        noise: DecodingNoise,
        want_scores: bool,
        min_p: float | None = None,
    ) -> None:
        self.model = model
        self.noise = noise
        self.want_scores = want_scores
        self.min_p = min_p
        self.u: Any = None  # U of the last position, (B, C)
        self.shift_u: Tensor | None = None  # what noise adds to loc_U there, (B, C)
        self.shift: Tensor | None = None  # W shift_u, if it is known, (B, V)
        self.positions: list[int] = []  # of the last token of every row, padding not counted
        self.bar: Tensor | None = None  # h there, (B, 1)
        self._head: TorchHead | None = None

    @property
    def settings(self) -> DecodingSettings:
        return self.noise.settings

    @functools.cached_property
    def weight(self) -> Tensor:
        """W, which does not change during a call of `generate`. An offloaded one stays so: it is
        too large to be kept here, and the head multiplies by it."""
        weight = self.model.lm_head.weight
        return weight if weight.is_meta else head_weight(self.model.lm_head)

    def observe(self, outputs: ModelOutput) -> None:
        """Take U, what noise adds to it and to the scores, and the bar from the model's outputs."""
        self.u = Cauchy(outputs.loc_U[:, -1], outputs.scale_U[:, -1])
        self.shift_u = None if outputs.shift_U is None else outputs.shift_U[:, -1]
        self.shift = None if outputs.shift_S is None else outputs.shift_S[:, -1]
        needs_bar = self.settings.mode != "causal"  # W u - C: the bar moves all tokens alike
        self.bar = self.model.decision.bar(outputs.logits[:, -1]) if needs_bar else None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens, loc = self._prepare(input_ids, scores)
        if tokens is None:
            return self._decide(loc)
        if self.settings.mode == "causal":
            over = self._margin(loc, tokens)
            return over.new_full(scores.shape, -torch.inf).index_copy_(-1, tokens, over)
        return one_hot(self._choose_token(loc, tokens), scores)

    def choose(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The choice itself, in a mode of ours. (B, V) -> (B,)"""
        tokens, loc = self._prepare(input_ids, scores)
        return self._choose_token(loc, tokens)

    def decide(self, loc: Tensor) -> Tensor:
        """loc_S of the candidates -> scores whose argmax is the mode's choice. (B, V)"""
        return self._decide(self._moved(loc))

    def cut(
        self, scores: Tensor, texts: Sequence[Any], each: int = 1, tokens: Tensor | None = None
    ) -> Tensor:
        """The candidates of texts; `each` of them in turn belong to one row of the noise. (B, K)"""
        is_asked = [asked for asked in self.noise.kept_words() for _ in range(each)]
        lengths = [n for n in self.noise.avoided_repeats() for _ in range(each)]
        number = self.model.config.num_token_id
        edges = whole(self.model.decision, "word_edges").to(scores.device)
        return cut_by_text(scores, texts, is_asked, lengths, edges, number, tokens)

    def _prepare(self, input_ids: Tensor, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        """Candidates, and their loc_S with what noise adds to it. (B, V) -> (K,), (B, K), or None
        and (B, V)"""
        tokens, scores = self._candidates(scores)
        settings = self.settings
        if settings.whole_words or settings.avoid_repeats:
            rows = zip(input_ids.cpu().numpy(), self.positions, strict=True)
            texts = [row[max(len(row) - 1 - at, 0) :] for row, at in rows]
            scores = self.cut(scores, texts, tokens=tokens)
        return tokens, self._moved(scores, tokens)

    def _candidates(self, scores: Tensor) -> tuple[Tensor | None, Tensor]:
        """What `min_p` leaves: few tokens, unless all scores are asked for. As `_prepare`."""
        if not self.min_p:
            return None, scores
        if scores.amax(-1).isnan().any():
            raise ValueError(NO_CHOICE)
        if self.want_scores or not self._has_rows:
            return None, keep_min_p(scores, self.min_p)
        return few_candidates(scores, self.min_p)

    @property
    def _has_rows(self) -> bool:
        """Rows of W can be read: it is whole, and here."""
        return is_plain(self.weight) and not self.weight.is_meta

    def _decide(self, loc: Tensor) -> Tensor:
        mode = self.settings.mode
        if mode == "causal":
            over = self._margin(loc)
            if not self.want_scores:
                return over
            return force_argmax(over.float(), over.argmax(-1))
        if mode != "compatible" and not self.want_scores and self._has_rows:
            return one_hot(self._choose_token(loc), loc)
        decision, bar = self.model.decision, self._bar_on(loc.device)
        threshold = whole(decision, "threshold").to(loc.device)
        u = self.u if mode == "sampling" else self.model.action.widen(self.u)
        scale = self.model.action.score_scale(u.scale, self.model.lm_head).to(loc.device)
        s = Cauchy(loc, scale)
        if mode == "compatible":
            return decision.log_normalized(s, bar)
        chosen = choose(loc, scale, threshold, bar)
        return force_argmax(over_bar(s, bar).log_sf(threshold), chosen)

    def _moved(self, loc: Tensor, tokens: Tensor | None = None) -> Tensor:
        """loc_S and what noise adds to it. (B, K)"""
        if self.shift is not None:
            shift = self.shift if tokens is None else self.shift[:, tokens.to(self.shift.device)]
            return loc + shift.to(loc.device)
        return loc if self.shift_u is None else self._add_noise(loc, self.shift_u, tokens)

    def _margin(self, loc: Tensor, tokens: Tensor | None = None) -> Tensor:
        """W u - C of `causal`. (B, K)"""
        threshold = whole(self.model.decision, "threshold").to(loc.device)
        over: Tensor = margin(loc, threshold if tokens is None else threshold[tokens])
        if over.isnan().any():
            raise ValueError(NO_CHOICE)
        return over

    def _choose_token(self, loc: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The choice among all tokens, or some. (B, K) -> (B,)"""
        mode, bar = self.settings.mode, self._bar_on(loc.device)
        if mode == "causal":
            chosen = self._margin(loc, tokens).argmax(-1)
            return chosen if tokens is None else tokens[chosen]
        head, scale = self._head_on(loc.device), self.u.scale.to(loc.device)
        if tokens is not None:
            found: Tensor = decide_among(tokens, mode, loc, scale, head, bar)
            return found
        moved = scale + head.b_noise if mode == "standard" else scale
        together = decide_together(moved, loc, head, bar)
        return decide(mode, loc, scale, head, bar) if together is None else together

    def _bar_on(self, device: torch.device) -> Tensor | None:
        return None if self.bar is None else self.bar.to(device)

    def _add_noise(self, loc: Tensor, shift: Tensor, tokens: Tensor | None) -> Tensor:
        """loc_S + W shift, which is computed for the candidates alone where they are few.
        (B, K), (B, C) -> (B, K)"""
        head: Any = self.model.lm_head
        if is_plain(self.weight):
            divided = (shift / head_divisor(head)).to(loc.device)

            def rows_of(ids: Tensor) -> Tensor:
                return self._loaded().to(loc.device)[ids]

            moved: Tensor | None = move_candidates(loc, divided, rows_of, tokens)
            if moved is not None:
                return moved
        return loc + score_shift(shift, head, self.u.loc.dtype).to(loc.device)

    def _loaded(self) -> Tensor:
        return head_weight(self.model.lm_head) if self.weight.is_meta else self.weight

    def _head_on(self, device: torch.device) -> TorchHead:
        if self._head is None:
            decision, action = self.model.decision, self.model.action
            self._head = TorchHead(
                self.weight.to(device),
                whole(decision, "threshold").to(device),
                whole(action, "b_noise").to(device),
                whole(action, "decision_noise").to(device),
                functools.partial(norms_of, self.model, self.weight),
            )
        return self._head


def norms_of(model: Any, own: Tensor, weight: Tensor) -> HeadNorms:
    """Norms of W on some device, which stay on the model for as long as its `own` W stays as it is.

    Edits through `.data` (a merged LoRA) leave no trace in the version counter, so one
    element of every row is compared, too, once per call of `generate`.
    """
    version = None if own.is_inference() else own._version
    sample = float(own.flatten()[:: max(own.shape[1] - 1, 1)].double().sum())
    key = (own.data_ptr(), version, own.shape, own.dtype, sample)
    cached = getattr(model, "_head_norms", None)
    if cached is None or cached[0] != key:
        cached = model._head_norms = (key, HeadNorms(weight))
    norms: HeadNorms = cached[1]
    return norms


def decide_together(
    scale: Tensor, loc: Tensor, head: TorchHead, bar: Tensor | None
) -> Tensor | None:
    """`choose` for the rows of a batch, if few tokens may win in any; None if many may.

    scale_U (B, C), loc_S (B, V), h (B, 1) -> (B,). One bound for all tokens of a row, so that V is
    read few times: the winner's ratio (loc - C - h) / scale is not less than that of the token with
    the largest margin, whose scale is bounded as all are and, if that leaves many tokens, computed.
    """
    over = loc.float() - head.threshold
    level = 0.0 if bar is None else bar.float()
    top = over.amax(-1, keepdim=True) - level  # (B, 1)
    low, high = scale_range(scale.float(), head)

    def may_win(of_top: Tensor) -> Tensor:  # the scale of the largest margin, or its worst case
        bound = top / of_top * torch.where(top >= 0, low, high)
        found: Tensor = in_any_row(over >= bound - SLACK * (1 + bound.abs()) + level)
        return found

    tokens = may_win(torch.where(top >= 0, high, low))
    if len(tokens) > EXACT_CANDIDATES:
        of_top = exact_scales(scale, over.argmax(-1), head).diagonal()[:, None]  # (B, B) -> (B, 1)
        tokens = may_win(of_top.float())
    if not 0 < len(tokens) <= MOST_TOGETHER:
        return None
    exact = exact_scales(scale, tokens, head)  # (B, tokens)
    chosen: Tensor = choose(loc[:, tokens], exact, head.threshold[tokens], bar)
    return tokens[chosen]


def scale_range(scale: Tensor, head: TorchHead) -> tuple[Tensor, Tensor]:
    """What scale_S of every token lies between, up to rounding. scale_U (B, C) -> (B, 1) twice

    With m the mean of scale_U, and units ||W_k||_1 + |a_k|, which conversion makes nearly equal:

        scale_k = |W_k| scale_U + |a_k| m <= max(scale_U) unit_k
                = m unit_k + (|W_k| - its mean) (scale_U - m) <= m unit_k + uneven ||scale_U - m||
    """
    least, most = head.unit_range
    low, high = scale.aminmax(dim=-1, keepdim=True)
    mean = scale.mean(-1, keepdim=True)
    beside = head.norms.uneven * (scale - mean).norm(dim=-1, keepdim=True)
    by_mean = mean * least * (1 - SLACK) - beside * (1 + SLACK)
    low = torch.maximum(low * least * (1 - SLACK), by_mean)
    high = torch.minimum(high * most, mean * most + beside) * (1 + SLACK)
    return low.clamp_min(SCALE_FLOOR), high.clamp_min(SCALE_FLOOR)


def to_tensors(noise: UNoise, like: Tensor) -> UNoise:
    """Noise in NumPy's arrays -> in float32 on the device of `like`."""
    values, exogenous = (
        None if array is None else torch.from_numpy(array).to(like.device, torch.float32)
        for array in (noise.values, noise.exogenous)
    )
    return UNoise(values, noise.regime, exogenous)


def is_plain(weight: Tensor) -> bool:
    """Neither sharded nor quantised: rows can be read."""
    return type(weight) in (Tensor, nn.Parameter)


def one_hot(chosen: Tensor, like: Tensor) -> Tensor:
    """Scores of the shape of `like`: 0 for the chosen token of every row, -inf for all others."""
    return torch.full_like(like, -torch.inf).scatter_(-1, chosen.unsqueeze(-1), 0.0)


def force_argmax(scores: Tensor, chosen: Tensor) -> Tensor:
    """Make `chosen` the argmax: no other score stays above it, and none before it ties."""
    index = chosen.unsqueeze(-1)
    best = scores.gather(-1, index)
    below = torch.nextafter(best, best.new_tensor(-torch.inf))
    return torch.where(scores >= best, below, scores).scatter(-1, index, best)


def block_edges(size: int) -> list[int]:
    """Where the column blocks of a head of `size` columns end."""
    count = min(BLOCKS, size)
    return [size * i // count for i in range(1, count)]


def _absolute_parts(weight: Tensor) -> Any:
    return (part.float().abs() for part in weight.detach().split(ROWS_AT_ONCE))
