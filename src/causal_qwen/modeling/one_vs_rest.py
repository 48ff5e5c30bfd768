"""One-vs-rest classification from U, the law and labels: the scores are never kept.

For every position with label y, and every token k:

    s = W loc + bias       scale = |W| scale_U' + |a| mean(scale_U')       d = C - s
    P = atan2(scale, d) / pi
    L_cls = -log P_y - sum_{k != y} log(1 - P_k)              CE = logsumexp(s) - s_y

    dL/ds     = scale / (pi r (1 - P))       r = scale^2 + d^2, for k != y;  -scale / (pi r P) at y
    dL/dscale =     d / (pi r (1 - P))                                          -d / (pi r P) at y

The gradients are made together with the loss, chunk by chunk of positions, so that a chunk's
scores exist once: one (chunk, V) buffer, and slices of it small enough for the processor's cache.
Products with |W| add positive terms only, so they may run in bfloat16 (relative error 4e-3).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from causal_qwen.decoding.decision import SCALE_FLOOR
from causal_qwen.modeling.cauchy import Cauchy

BLOCK = 8192  # tokens whose |W| exists at once
TILE = 2**17  # scores that are worked on at once: 512 KB in float32


class HeadParams(NamedTuple):
    """What turns U' into scores and decides about them."""

    weight: Tensor  # W (V, C)
    bias: Tensor | None  # (V,)
    decision_noise: Tensor  # a (V,)
    threshold: Tensor  # C (V,)

    def sf(self, u: Cauchy, k: int) -> Tensor:
        """P_k alone. U' (n, C) -> (n,)"""
        row = self.weight[k].to(u.scale)
        s = u.loc.to(row) @ row + (0.0 if self.bias is None else self.bias[k])
        scale = u.scale @ row.abs() + self.decision_noise[k].abs() * u.scale.mean(-1)
        return Cauchy(s, scale.clamp_min(SCALE_FLOOR)).sf(self.threshold[k])


class LossSettings(NamedTuple):
    """How the work is done, and what for."""

    cls_weight: float
    ce_weight: float
    chunk: int
    is_fast: bool  # products with |W| in bfloat16


def one_vs_rest(
    u: Cauchy, law: HeadParams, labels: Tensor, plan: LossSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """(w_cls L_cls + w_ce CE, L_cls, CE), summed over positions: U' (N, C), valid labels (N,).

    Only the first carries gradients.
    """
    inputs = (u.loc, u.scale, *law, labels, plan)
    results: Any = _OneVsRest.apply(*inputs)  # type: ignore[no-untyped-call]
    return results


class _OneVsRest(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, loc, scale, weight, bias, noise, threshold, labels, plan
    ) -> Any:
        inputs = (loc, scale, weight, bias, noise, threshold)
        ctx.save_for_backward(*inputs, labels)
        ctx.dtype, ctx.plan, ctx.needs = _product_dtype(weight), plan, ctx.needs_input_grad[:6]
        sums, ctx.gradients = _work(inputs, labels, plan, ctx.dtype, ctx.needs)
        cls, ce = sums.to(_wide(scale.dtype)).unbind()
        ctx.mark_non_differentiable(cls, ce)
        return plan.cls_weight * cls + plan.ce_weight * ce, cls, ce

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # a second time: the first has given them away
            *inputs, labels = ctx.saved_tensors
            gradients = _work(tuple(inputs), labels, ctx.plan, ctx.dtype, ctx.needs)[1]
        scaled = [None if g is None else g.mul_(grad.to(g.dtype)) for g in gradients]
        return (*scaled, None, None)


Inputs = tuple[Tensor | None, ...]  # loc, scale, then the law


def _work(
    inputs: Inputs, labels: Tensor, plan: LossSettings, dtype: torch.dtype, needs: tuple[bool, ...]
) -> tuple[Tensor, list[Tensor | None]]:
    """The sums of L_cls and CE (2,), and the gradients of what they are weighted to."""
    u, law = Cauchy(*inputs[:2]), HeadParams(*inputs[2:])  # type: ignore[arg-type]
    gradients = _Gradients(inputs, needs)
    sums = torch.zeros(2, dtype=torch.float64, device=labels.device)
    with torch.autocast(device_type=labels.device.type, enabled=False):
        for start in range(0, len(labels), plan.chunk):
            part = slice(start, start + plan.chunk)
            mine = Cauchy(u.loc[part].to(dtype), u.scale[part])
            sums += _Chunk(mine, law, labels[part], plan).run(gradients, part)
    return sums, gradients.finished(inputs)


class _Gradients:
    """Where the gradients of U' and the law grow, in float32 or wider; None where none is asked."""

    def __init__(self, inputs: Inputs, needs: tuple[bool, ...]) -> None:
        self.are_asked = any(needs)
        self.loc, self.scale, self.weight, self.bias, self.noise, self.threshold = (
            torch.zeros_like(x, dtype=_wide(x.dtype)) if x is not None and need else None
            for x, need in zip(inputs, needs, strict=True)
        )

    def finished(self, inputs: Inputs) -> list[Tensor | None]:
        grown = (self.loc, self.scale, self.weight, self.bias, self.noise, self.threshold)
        pairs = zip(grown, inputs, strict=True)
        return [None if g is None or x is None else g.to(x.dtype) for g, x in pairs]


class _Chunk:
    """Some positions. Their scores are made once, and turned in place into their gradient."""

    def __init__(self, u: Cauchy, law: HeadParams, labels: Tensor, plan: LossSettings) -> None:
        scores = u.loc @ law.weight.to(u.loc.dtype).T
        self.scores = scores.to(_wide(scores.dtype))  # (n, V)
        if law.bias is not None:
            self.scores += law.bias.to(self.scores)
        self.u, self.law, self.plan = u, law, plan
        self.labels = labels.unsqueeze(-1)  # (n, 1)
        self.mean = u.scale.mean(-1).to(self.scores)  # (n,)

    def run(self, gradients: _Gradients, part: slice) -> Tensor:
        """The sums of L_cls and CE. -> (2,)"""
        at_label = self.scores.gather(-1, self.labels)  # (n, 1)
        top = self._logsumexp() if self.plan.ce_weight else at_label
        ce = (top - at_label).double()
        ovr = torch.zeros_like(ce)
        for start in range(0, self.scores.shape[1], BLOCK):
            ovr += self._block(slice(start, start + BLOCK), top, gradients, part)
        if gradients.are_asked:
            self._collect_scores(gradients, part)
        return torch.cat([ovr, ce], dim=-1).sum(0)

    def _block(self, columns: slice, top: Tensor, gradients: _Gradients, part: slice) -> Tensor:
        """One-vs-rest terms of some tokens, summed for every position. -> (n, 1)"""
        scores, threshold = self.scores[:, columns], self.law.threshold[columns].to(self.scores)
        absolute = self.law.weight[columns].abs().to(_spread_dtype(self.u.scale, self.plan))
        noise = self.law.decision_noise[columns].abs().to(self.scores)
        spread = (self.u.scale.to(absolute.dtype) @ absolute.T).to(self.scores)  # (n, block)
        spread.addr_(self.mean, noise).clamp_min_(SCALE_FLOOR)

        place = self.labels - columns.start
        is_here = (place >= 0) & (place < scores.shape[1])
        place = place.clamp(0, scores.shape[1] - 1)
        label = Cauchy(scores.gather(-1, place), spread.gather(-1, place))
        log_yes, log_no = (
            rule(label, threshold[place]) for rule in (Cauchy.log_sf, Cauchy.log_cdf)
        )
        terms = (log_no - log_yes).where(is_here, 0.0).double()
        distance = threshold[place] - label.loc
        lean = -self.plan.cls_weight / math.pi / log_yes.exp()  # at the label, log P counts
        lean = lean / (label.scale.square() + distance.square())
        at_label = torch.cat([lean * label.scale, lean * distance], dim=-1)  # of s, of scale

        of_threshold = torch.zeros_like(threshold)
        for rows in self._tiles(scores.shape[1]):
            tile = Cauchy(scores[rows], spread[rows])
            log_not, push, pull = _one_vs_rest_terms(tile, threshold, gradients.are_asked)
            terms[rows] -= log_not
            if push is None or pull is None:
                continue
            push, pull = push.mul_(self.plan.cls_weight), pull.mul_(self.plan.cls_weight)
            for gradient, mine in zip((push, pull), at_label[rows].split(1, -1), strict=True):
                other = gradient.gather(-1, place[rows])
                gradient.scatter_(-1, place[rows], torch.where(is_here[rows], mine, other))
            of_threshold -= push.sum(0)
            if self.plan.ce_weight:
                push.add_((tile.loc - top[rows]).exp_(), alpha=self.plan.ce_weight)
            tile.loc.copy_(push)
            tile.scale.copy_(pull)
        if gradients.are_asked:
            if self.plan.ce_weight:
                scores.scatter_add_(-1, place, -self.plan.ce_weight * is_here.to(scores))
            self._collect_spread(columns, absolute, noise, spread, gradients, part)
            if gradients.threshold is not None:
                gradients.threshold[columns] += of_threshold
        return terms

    def _collect_spread(
        self,
        columns: slice,
        absolute: Tensor,
        noise: Tensor,
        pull: Tensor,
        gradients: _Gradients,
        part: slice,
    ) -> None:
        """From the scores' scales to scale_U', |W| and |a|: pull is (n, block)."""
        if gradients.noise is not None:
            sign = self.law.decision_noise[columns].sign().to(pull)
            gradients.noise[columns] += sign * (pull.T @ self.mean)
        own = pull @ noise / self.u.scale.shape[-1]  # through the mean of scale_U'
        pull = pull.to(absolute.dtype)
        if gradients.scale is not None:
            gradients.scale[part] += (pull @ absolute).to(own) + own.unsqueeze(-1)
        if gradients.weight is not None:
            of_absolute = (pull.T @ self.u.scale.to(absolute.dtype)).to(gradients.weight)
            gradients.weight[columns].addcmul_(self.law.weight[columns].sign(), of_absolute)

    def _collect_scores(self, gradients: _Gradients, part: slice) -> None:
        """From the scores to loc_U, W and the bias."""
        dtype = self.u.loc.dtype if self.u.loc.dtype != torch.float16 else torch.float32
        push = self.scores.to(dtype)
        if gradients.bias is not None:
            gradients.bias += self.scores.sum(0)
        if gradients.loc is not None:
            gradients.loc[part] = (push @ self.law.weight.to(dtype)).to(gradients.loc)
        if gradients.weight is not None:
            loc = self.u.loc.to(dtype)
            if gradients.weight.dtype == dtype:
                gradients.weight.addmm_(push.T, loc)
            else:
                for start in range(0, len(gradients.weight), BLOCK):
                    columns = slice(start, start + BLOCK)
                    gradients.weight[columns] += push[:, columns].T @ loc

    def _logsumexp(self) -> Tensor:
        """(n, 1), without a copy of the scores."""
        tiles = self._tiles(self.scores.shape[1])
        return torch.cat([self.scores[rows].logsumexp(-1, keepdim=True) for rows in tiles])

    def _tiles(self, width: int) -> list[slice]:
        """Rows that are worked on at once."""
        count = len(self.scores)
        step = max(TILE // width, 1) if self.scores.device.type == "cpu" else count
        return [slice(start, start + step) for start in range(0, count, max(step, 1))]


def _one_vs_rest_terms(
    s: Cauchy, threshold: Tensor, is_learning: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """sum_k log(1 - P_k), and the gradients of its negative by s and scale. (n, block)

    Below 1/2, P itself is accurate; above it, which is rare, the angle's complement is.
    """
    distance = threshold - s.loc
    p = torch.atan2(s.scale, distance).div_(math.pi)
    is_high = p > 0.5
    if bool(is_high.any()):
        rest = torch.atan2(s.scale, -distance).div_(math.pi)
        log_not = torch.where(is_high, rest.log(), p.neg().log1p_()).sum(-1, keepdim=True)
        p = torch.where(is_high, rest, 1 - p)
    else:
        log_not = p.neg_().log1p().sum(-1, keepdim=True)
        p.add_(1)  # 1 - P
    if not is_learning:
        return log_not, None, None
    lean = distance.square().addcmul_(s.scale, s.scale).mul_(p).mul_(math.pi)
    return log_not, s.scale / lean, distance.div_(lean)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _product_dtype(weight: Tensor) -> torch.dtype:
    """In which W is multiplied: as autocast says, else as W is."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _spread_dtype(scale: Tensor, plan: LossSettings) -> torch.dtype:
    return torch.bfloat16 if plan.is_fast else scale.dtype
