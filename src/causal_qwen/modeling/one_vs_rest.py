"""One-vs-rest classification loss from U, the head and labels, without keeping the scores.

For every position with label y, and every token k:

    s = W loc + bias       scale = |W| scale_U' + |a| mean(scale_U')       d = C - s
    P = atan2(scale, d) / pi
    L_cls = -log P_y - sum_{k != y} log(1 - P_k)              CE = logsumexp(s) - s_y

    dL/ds     = scale / (pi r (1 - P))       r = scale^2 + d^2, for k != y;  -scale / (pi r P) at y
    dL/dscale =     d / (pi r (1 - P))                                          -d / (pi r P) at y

With the bar of the context, h = logsumexp(s), d is C + h - s, and the gradient by a score loses its
share of the gradient by the bar:

    dL/ds_k  <-  dL/ds_k - softmax_k(s) sum_j dL/ds_j

It then sums to 0 over the tokens, as softmax's does: L does not change when all scores move.

Gradients are computed with the loss, chunk by chunk of positions: one (chunk, V) buffer of scores,
with the bar one more for softmax, processed in slices that fit into the CPU cache. Products with
|W| add positive terms only, so they may run in bfloat16 (relative error 4e-3).
"""

from __future__ import annotations

import math
import platform
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from causal_qwen.decoding.decision import SCALE_FLOOR
from causal_qwen.modeling.cauchy import Cauchy

BLOCK = 4096  # tokens whose |W| exists at once
TILE = 2**17  # scores processed at once: 512 KB in float32


class HeadParams(NamedTuple):
    """Parameters that turn U' into scores and probabilities."""

    weight: Tensor  # W (V, C)
    bias: Tensor | None  # (V,)
    decision_noise: Tensor  # a (V,)
    threshold: Tensor  # C (V,)

    def sf(self, u: Cauchy, k: int, bar: Tensor | None = None) -> Tensor:
        """P_k of one token, over a bar (n,). U' (n, C) -> (n,)"""
        row = self.weight[k].to(u.scale)
        s = u.loc.to(row) @ row + (0.0 if self.bias is None else self.bias[k])
        scale = u.scale @ row.abs() + self.decision_noise[k].abs() * u.scale.mean(-1)
        s = s if bar is None else s - bar
        return Cauchy(s, scale.clamp_min(SCALE_FLOOR)).sf(self.threshold[k])

    @torch.no_grad()
    def bar(self, loc: Tensor, chunk: int) -> Tensor:
        """logsumexp of the scores, of `chunk` positions at a time. loc_U (n, C) -> (n,)"""
        parts = (F.linear(part.to(self.weight), self.weight) for part in loc.split(chunk))
        bias = 0.0 if self.bias is None else self.bias
        return torch.cat([(part.to(_wide(part.dtype)) + bias).logsumexp(-1) for part in parts])


class LossSettings(NamedTuple):
    cls_weight: float
    ce_weight: float
    chunk: int  # positions
    is_fast: bool  # products with |W| in bfloat16
    has_bar: bool = False  # thresholds are raised by logsumexp of the scores


def one_vs_rest(
    u: Cauchy, head: HeadParams, labels: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """(w_cls L_cls + w_ce CE, L_cls, CE), summed over positions: U' (N, C), valid labels (N,).

    Only the first carries gradients.
    """
    inputs = (u.loc, u.scale, *head, labels, settings)
    results: Any = _OneVsRest.apply(*inputs)  # type: ignore[no-untyped-call]
    return results


class _OneVsRest(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, loc, scale, weight, bias, noise, threshold, labels, settings
    ) -> Any:
        inputs = (loc, scale, weight, bias, noise, threshold)
        ctx.save_for_backward(*inputs, labels)
        ctx.options = settings, _product_dtype(weight), ctx.needs_input_grad[:6]
        sums, ctx.gradients = _sums_and_gradients(inputs, labels, *ctx.options)
        cls, ce = sums.to(_wide(scale.dtype)).unbind()
        ctx.mark_non_differentiable(cls, ce)
        return settings.cls_weight * cls + settings.ce_weight * ce, cls, ce

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *others: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # a second backward pass: the first returned the buffers themselves
            *inputs, labels = ctx.saved_tensors
            gradients = _sums_and_gradients(tuple(inputs), labels, *ctx.options)[1]
        scaled = [None if g is None else g.mul_(grad.to(g.dtype)) for g in gradients]
        return (*scaled, None, None)


Inputs = tuple[Tensor | None, ...]  # loc, scale, then the fields of HeadParams


def _sums_and_gradients(
    inputs: Inputs,
    labels: Tensor,
    settings: LossSettings,
    dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:
    """The sums of L_cls and CE (2,), and the gradients of their weighted sum."""
    u, head = Cauchy(*inputs[:2]), HeadParams(*inputs[2:])  # type: ignore[arg-type]
    gradients = _Gradients(inputs, needs)
    sums = torch.zeros(2, dtype=torch.float64, device=labels.device)
    shape = min(settings.chunk, len(labels)), len(head.weight)
    scores = head.weight.new_empty(shape, dtype=_wide(dtype))  # the same memory for every chunk
    softmax = None
    if settings.has_bar and gradients.is_needed:
        softmax = scores.new_empty(shape, dtype=_gradient_dtype(dtype))
    with torch.autocast(device_type=labels.device.type, enabled=False):
        for start in range(0, len(labels), settings.chunk):
            n = slice(start, start + settings.chunk)
            chunk_u, y = Cauchy(u.loc[n].to(dtype), u.scale[n]), labels[n]
            buffers = scores[: len(y)], None if softmax is None else softmax[: len(y)]
            sums += _Chunk(chunk_u, head, y, settings, gradients, n, buffers).run()
            del buffers
    del scores, softmax  # before the gradients exist in two dtypes
    pairs = zip(gradients.buffers, inputs, strict=True)
    return sums, [None if g is None or x is None else g.to(x.dtype) for g, x in pairs]


class _Gradients:
    """Accumulators for U' and the head, in float32 or wider; None where no gradient is needed."""

    def __init__(self, inputs: Inputs, needs: tuple[bool, ...]) -> None:
        self.is_needed = any(needs)
        self.buffers = [
            torch.zeros_like(x, dtype=_wide(x.dtype)) if x is not None and need else None
            for x, need in zip(inputs, needs, strict=True)
        ]
        self.loc, self.scale, self.weight, self.bias, self.noise, self.threshold = self.buffers


class _Chunk:
    """Some positions. Their scores are computed once and overwritten by their gradient."""

    def __init__(
        self,
        u: Cauchy,
        head: HeadParams,
        labels: Tensor,
        settings: LossSettings,
        gradients: _Gradients,
        positions: slice,
        buffers: tuple[Tensor, Tensor | None],
    ) -> None:
        """`buffers`: memory for the scores and, for the gradient by the bar, softmax. (n, V)"""
        self.u, self.head, self.settings = u, head, settings
        self.gradients, self.positions = gradients, positions
        self.labels = labels.unsqueeze(-1)  # (n, 1)
        self.scores, self.softmax = buffers
        self._compute_scores()
        self.mean_scale = u.scale.mean(-1).to(self.scores)  # (n,)

    def run(self) -> Tensor:
        """The sums of L_cls and CE. -> (2,)"""
        at_label = self.scores.gather(-1, self.labels)  # (n, 1)
        if self.settings.has_bar:
            log_total = self._subtract_bar()
        else:
            tiles = self._tiles(self.scores.shape[1]) if self.settings.ce_weight else []
            totals = [self.scores[rows].logsumexp(-1, keepdim=True) for rows in tiles]
            log_total = torch.cat(totals) if totals else at_label
        ce = (log_total - at_label).double()
        ovr = torch.zeros_like(ce)
        for tokens in self._blocks():
            ovr += self._block(tokens, log_total)
        if self.softmax is not None:
            self._add_bar_gradients(self.softmax)
        if self.gradients.is_needed:
            self._add_score_gradients()
        return torch.cat([ovr, ce], dim=-1).sum(0)

    def _compute_scores(self) -> None:
        """W loc + bias."""
        loc, weight = self.u.loc, self.head.weight
        if loc.dtype == weight.dtype == self.scores.dtype:
            torch.mm(loc, weight.T, out=self.scores)
        else:  # products and W in another dtype exist for a block at a time
            for tokens in self._blocks():
                self.scores[:, tokens] = loc @ weight[tokens].to(loc.dtype).T
        if self.head.bias is not None:
            self.scores += self.head.bias.to(self.scores)

    def _subtract_bar(self) -> Tensor:
        """From scores to scores over the bar, in place; softmax is kept. -> the bar (n, 1)"""
        bars, lost = [], []
        for rows in self._tiles(self.scores.shape[1]):
            scores = self.scores[rows]
            top = scores.amax(-1, keepdim=True)
            softmax = torch.exp(scores.sub_(top))
            total = softmax.sum(-1, keepdim=True)
            scores.sub_(total.log())
            if self.softmax is not None:
                torch.div(softmax, total, out=self.softmax[rows])
                at_label = softmax.gather(-1, self.labels[rows]) / total
                lost.append(at_label - self.softmax[rows].gather(-1, self.labels[rows]))
            bars.append(top + total.log())
        if lost:  # bfloat16 rounds 0.998 to 1: the label would lose its gradient
            self.lost = torch.cat(lost)
        return torch.cat(bars)

    def _block(self, tokens: slice, log_total: Tensor) -> Tensor:
        """One-vs-rest terms of some tokens, summed for every position. -> (n, 1)"""
        cls_weight, ce_weight = self.settings[:2]
        threshold = self.head.threshold[tokens].to(self.scores)
        is_bfloat16 = self.settings.is_fast and has_bfloat16(self.scores.device)
        dtype = torch.bfloat16 if is_bfloat16 else self.u.scale.dtype
        abs_weight = self.head.weight[tokens].abs().to(dtype)  # (block, C)
        noise = self.head.decision_noise[tokens].abs().to(self.scores)
        scale = torch.mm(self.u.scale.to(dtype), abs_weight.T).to(self.scores)
        scale.addr_(self.mean_scale, noise).clamp_min_(SCALE_FLOOR)
        s = Cauchy(self.scores[:, tokens], scale)

        index = self.labels - tokens.start
        is_here = (index >= 0) & (index < len(threshold))
        index = index.clamp(0, len(threshold) - 1)
        label = Cauchy(s.loc.gather(-1, index), s.scale.gather(-1, index))
        terms, label_gradient = self._label_terms(label, threshold[index])
        terms = terms.where(is_here, 0.0).double()

        by_threshold = torch.zeros_like(threshold)
        for rows in self._tiles(len(threshold)):
            tile = Cauchy(s.loc[rows], s.scale[rows])
            log_not, rest, distance = _rest_terms(tile, threshold)
            terms[rows] -= log_not
            if not self.gradients.is_needed:
                continue
            softmax = None
            if ce_weight and self.softmax is None:
                softmax = torch.sub(tile.loc, log_total[rows]).exp_()
            _overwrite_by_gradients(tile, rest, distance, cls_weight)
            for gradient, at_label in zip(tile, label_gradient, strict=True):
                other = gradient.gather(-1, index[rows])
                new = torch.where(is_here[rows], at_label[rows], other)
                gradient.scatter_(-1, index[rows], new)
            by_threshold -= tile.loc.sum(0)
            if softmax is not None:
                tile.loc.add_(softmax, alpha=ce_weight)
        if self.gradients.is_needed:
            if ce_weight:
                s.loc.scatter_add_(-1, index, -ce_weight * is_here.to(s.loc))
            self._add_scale_gradients(tokens, abs_weight, noise, s.scale)
            if self.gradients.threshold is not None:
                self.gradients.threshold[tokens] += by_threshold
        return terms

    def _label_terms(self, label: Cauchy, threshold: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """log(1 - P_y) - log P_y, and the weighted gradients of -log P_y by s and scale. (n, 1)"""
        log_yes, log_no = label.log_sf(threshold), label.log_cdf(threshold)
        distance = threshold - label.loc
        factor = -self.settings.cls_weight / math.pi / log_yes.exp()
        factor = factor / (label.scale.square() + distance.square())
        return log_no - log_yes, (factor * label.scale, factor * distance)

    def _add_scale_gradients(
        self, tokens: slice, abs_weight: Tensor, noise: Tensor, by_scale: Tensor
    ) -> None:
        """From the scores' scales (n, block) to scale_U', |W| and |a|."""
        gradients = self.gradients
        if gradients.noise is not None:
            sign = self.head.decision_noise[tokens].sign().to(by_scale)
            gradients.noise[tokens] += sign * (by_scale.T @ self.mean_scale)
        by_mean = by_scale @ noise / self.u.scale.shape[-1]  # through the mean of scale_U'
        by_scale = by_scale.to(abs_weight.dtype)
        if gradients.scale is not None:
            gradients.scale[self.positions] += by_scale @ abs_weight
            gradients.scale[self.positions] += by_mean.unsqueeze(-1)
        if gradients.weight is not None:
            by_abs = (by_scale.T @ self.u.scale.to(abs_weight.dtype)).to(gradients.weight)
            gradients.weight[tokens].addcmul_(self.head.weight[tokens].sign(), by_abs)

    def _add_bar_gradients(self, softmax: Tensor) -> None:
        """From scores over the bar to scores; cross-entropy, which is minus the label's score over
        the bar, gets its softmax term by this, too."""
        for rows in self._tiles(self.scores.shape[1]):
            by_score = self.scores[rows]
            total = by_score.sum(-1, keepdim=True)
            by_score.addcmul_(softmax[rows], total, value=-1)
            by_score.scatter_add_(-1, self.labels[rows], -total * self.lost[rows])

    def _add_score_gradients(self) -> None:
        """From the scores to loc_U, W and the bias."""
        gradients, dtype = self.gradients, _gradient_dtype(self.u.loc.dtype)
        loc = self.u.loc.to(dtype)
        if gradients.bias is not None:
            gradients.bias += self.scores.sum(0)
        for tokens in self._blocks():
            by_score = self.scores[:, tokens].to(dtype)
            weight = self.head.weight[tokens].to(dtype)
            if gradients.loc is not None:
                gradients.loc[self.positions] += by_score @ weight
            if gradients.weight is not None:
                gradients.weight[tokens] += by_score.T @ loc

    def _blocks(self) -> list[slice]:
        """Tokens whose |W| exists at once."""
        return [slice(start, start + BLOCK) for start in range(0, len(self.head.weight), BLOCK)]

    def _tiles(self, width: int) -> list[slice]:
        """Rows processed at once."""
        count = len(self.scores)
        step = max(TILE // width, 1) if self.scores.device.type == "cpu" else count
        return [slice(start, start + step) for start in range(0, count, max(step, 1))]


def _rest_terms(s: Cauchy, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """sum_k log(1 - P_k) (n, 1), 1 - P and C - s (n, block).

    Below 1/2, P itself is accurate; above it, where few tokens are, the angle's complement is.
    """
    distance = threshold - s.loc
    p = torch.atan2(s.scale, distance).div_(-math.pi)
    log_not = torch.log1p(p)
    high = (p < -0.5).nonzero(as_tuple=True)
    rest = torch.atan2(s.scale[high], -distance[high]).div_(math.pi)
    log_not[high] = rest.log()
    p.add_(1)[high] = rest  # 1 - P
    return log_not.sum(-1, keepdim=True), p, distance


def _overwrite_by_gradients(s: Cauchy, rest: Tensor, distance: Tensor, weight: float) -> None:
    """From s and scale to the weighted gradients of -log(1 - P) by them; `rest` is 1 - P."""
    denominator = torch.mul(distance, distance).addcmul_(s.scale, s.scale)
    denominator.mul_(rest).mul_(math.pi / weight if weight else math.inf)
    torch.div(s.scale, denominator, out=s.loc)
    torch.div(distance, denominator, out=s.scale)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of products with the gradients by scores, which overflow float16."""
    return torch.float32 if dtype == torch.float16 else dtype


def _product_dtype(weight: Tensor) -> torch.dtype:
    """Dtype of products with W: autocast's, else that of W; float32 instead of bfloat16 where the
    processor has none."""
    kind = weight.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_cast else weight.dtype
    is_missing = dtype == torch.bfloat16 and not has_bfloat16(weight.device)
    return torch.float32 if is_missing else dtype


def has_bfloat16(device: torch.device) -> bool:
    """False on processors that emulate bfloat16: products take 4 to 70 times float32's time."""
    if device.type != "cpu":
        return True
    if platform.machine() in ("x86_64", "AMD64"):  # oneDNN also says yes to AVX-512 without it
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if not torch.backends.mkldnn.is_available():  # macOS: the operator does not exist
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
