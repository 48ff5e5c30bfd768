"""Loss: one-vs-rest classification + gated regression (+ softmax compatibility).

    L_cls,i = - sum_k [ y_k log P_k + (1 - y_k) log(1 - P_k) ]
    L_nll,i = -log Cauchy(y_i; loc_Y, scale_Y)           in the number head's own space
    gate_i  = m_i (alpha + (1 - alpha) P_<NUM>,i)        m_i: the label is <NUM>
    L = w_cls mean_valid(L_cls) + lambda sum(gate L_nll) / sum(m) + w_compat mean_valid(CE(loc_S))

Tokens and numbers are reduced separately: numbers are sparse, and one common mean would drown
them. The loss takes U and the head; scores exist for a chunk of positions at a time (see
`one_vs_rest`). With `gate_grad`, the gate's gradient takes the bar of the context as given.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from causal_qwen.modeling.abduction import whole
from causal_qwen.modeling.action import ActionNetwork, apply_head
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalConfig
from causal_qwen.modeling.one_vs_rest import HeadParams, LossSettings, one_vs_rest
from causal_qwen.modeling.thresholds import Decision, over_bar
from causal_qwen.modeling.value_space import position_space

IGNORE = -100
AUTO_CHUNK_ELEMENTS = 50_000_000  # scores of one chunk: 200 MB in float32


class LossTerms(NamedTuple):
    """Reduced terms. Training minimises `total`; the classification terms are only logged."""

    total: Tensor
    classification: Tensor  # without gradients
    regression: Tensor
    compatibility: Tensor  # without gradients


def shift_left(values: Tensor, fill: float | int) -> Tensor:
    """Position i gets the value of i + 1; the last position gets `fill`. (B, T) -> (B, T)"""
    return F.pad(values, (0, 1), value=fill)[..., 1:]


def shift_fields(fields: Tensor | None) -> Tensor | None:
    """Shift fields of positions (B, T) like their labels; fields of rows (B,) stay."""
    return fields if fields is None or fields.dim() != 2 else shift_left(fields, -1)


def causal_loss(
    u: Cauchy,
    labels: Tensor,
    *,
    action: ActionNetwork,
    head: nn.Module,
    decision: Decision,
    config: CausalConfig,
    targets: Tensor | None = None,
    fields: Tensor | None = None,
    num_items: Tensor | int | None = None,
    num_numbers: Tensor | int | None = None,
) -> LossTerms:
    """The loss of U (B, T, C) against next-token labels (B, T), already shifted.

    `targets` are the values of the labels that are `<NUM>`; `fields` are those of `position_space`.
    `num_items` and `num_numbers` count the tokens and numbers of the whole accumulated batch; with
    `num_items` alone, this part's mean over numbers is weighted by its share of tokens.
    """
    target = _encode_targets(labels, targets, fields, config)
    u = action.widen(Cauchy(u.loc.flatten(0, -2), u.scale.flatten(0, -2)))  # (N, C)
    labels = labels.flatten().to(u.loc.device)  # (N,)
    is_valid = labels != IGNORE

    count = is_valid.sum() if num_items is None else torch.as_tensor(num_items)
    count = count.to(u.loc.device).clamp_min(1)
    chain = _Chain(action, head, decision, config)
    classify = _fused_sums if _can_fuse(head) else _autograd_sums
    total, ovr, cross_entropy, p_number = classify(u, labels, chain)
    regression = _regression(action.number(u), labels, p_number, target, num_numbers, config)
    if num_items is not None and num_numbers is None:
        regression = regression * (is_valid.sum() / count)
    return LossTerms(
        total=total / count + config.regression_loss_weight * regression,
        classification=chain.reduction * ovr.detach() / count,
        regression=regression,
        compatibility=cross_entropy.detach() / count,
    )


class _Chain(NamedTuple):
    """The parts of the model that the loss uses."""

    action: ActionNetwork
    head: nn.Module
    decision: Decision
    config: CausalConfig

    @property
    def reduction(self) -> float:
        return 1 / self.config.vocab_size if self.config.ovr_reduction == "mean" else 1.0

    @property
    def weights(self) -> tuple[float, float]:
        """Of L_cls and of the cross-entropy."""
        config = self.config
        return config.classification_loss_weight * self.reduction, config.compat_loss_weight


Sums = tuple[Tensor, Tensor, Tensor, Tensor]  # weighted, L_cls, CE, and P_<NUM> (N,)


def _can_fuse(head: nn.Module) -> bool:
    """Not with a tensor-parallel head, which holds a part of W, nor under torch.compile, nor with
    capped scores, whose gradients the fused loss does not know."""
    is_capped = getattr(getattr(head, "base_layer", head), "softcap", None) is not None
    return not (is_capped or hasattr(head, "_is_hooked") or torch.compiler.is_compiling())


def _fused_sums(u: Cauchy, labels: Tensor, chain: _Chain) -> Sums:
    """Gradients are computed with the loss; ignored positions cost nothing."""
    config, k = chain.config, chain.config.num_token_id
    valid = (labels != IGNORE).nonzero().squeeze(-1)
    settings = LossSettings(
        *chain.weights,
        chunk=chunk_size(config, len(valid)),
        is_fast=config.loss_precision == "fast" or u.loc.dtype == torch.bfloat16,
        has_bar=chain.decision.has_bar,
    )

    def sums(weight: Tensor, bias: Tensor | None) -> Sums:
        threshold = whole(chain.decision, "threshold")
        head = HeadParams(weight, bias, chain.action.scaled_noise(), threshold)
        terms = one_vs_rest(Cauchy(u.loc[valid], u.scale[valid]), head, labels[valid], settings)
        p_number = torch.zeros_like(u.scale[:, 0])
        if k is not None and (where := (labels == k).nonzero().squeeze(-1)).numel():
            numbers = Cauchy(u.loc[where], u.scale[where])
            bar = head.bar(numbers.loc, settings.chunk) if settings.has_bar else None
            p_number[where] = head.sf(numbers, k, bar)
        return *terms, p_number

    result: Sums = apply_head(chain.head, u.loc, function=sums)
    return result


def _autograd_sums(u: Cauchy, labels: Tensor, chain: _Chain) -> Sums:
    """By autograd, chunk by chunk; the backward pass recomputes each chunk's scores."""
    action, head, decision, config = chain

    def sums(loc: Tensor, scale: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = Cauchy(apply_head(head, loc).float(), action.score_scale(scale, head))  # (n, V)
        scores, bar = s.loc, decision.bar(s.loc)
        s = over_bar(s, bar)
        label = labels.clamp_min(0).unsqueeze(-1)
        threshold = whole(decision, "threshold")
        log_not = s.log_cdf(threshold)
        at_label = Cauchy(s.loc.gather(-1, label), s.scale.gather(-1, label))
        log_yes = at_label.log_sf(threshold[label])
        ovr = log_not.gather(-1, label) - log_yes - log_not.sum(-1, keepdim=True)
        ovr = ovr.squeeze(-1).where(labels != IGNORE, 0.0).sum()
        ce = torch.zeros_like(ovr)
        if config.compat_loss_weight:
            ce = F.cross_entropy(scores, labels, ignore_index=IGNORE, reduction="sum")
        k = config.num_token_id or 0
        number = Cauchy(scores[:, k, None], s.scale[:, k, None])
        number = over_bar(number, None if bar is None else bar.detach())
        p_number = number.sf(threshold[k]).squeeze(-1)
        return ovr, ce, p_number

    chunks = (x.split(chunk_size(config, len(labels))) for x in (u.loc, u.scale, labels))
    run = partial(checkpoint, sums, use_reentrant=False) if torch.is_grad_enabled() else sums
    ovrs, ces, p_number = zip(*(run(*chunk) for chunk in zip(*chunks, strict=True)), strict=True)
    ovr, ce = torch.stack(ovrs).sum(), torch.stack(ces).sum()
    cls_weight, ce_weight = chain.weights
    return cls_weight * ovr + ce_weight * ce, ovr, ce, torch.cat(p_number)


def chunk_size(config: CausalConfig, positions: int) -> int:
    """Positions whose scores exist at once: chunks of equal length, of at most 200 MB of scores;
    with the bar, of scores and the softmax beside them."""
    if isinstance(config.loss_chunk_size, int):
        return config.loss_chunk_size
    most = AUTO_CHUNK_ELEMENTS // config.vocab_size
    most = max(most // 2 if config.threshold_context != "none" else most, 1)
    chunks = max(-(-positions // most), 1)
    return max(-(-positions // chunks), 1)


def _encode_targets(
    labels: Tensor, targets: Tensor | None, fields: Tensor | None, config: CausalConfig
) -> Tensor | None:
    """Targets on the number head's scale, flat; 0 where the label is not a number."""
    if config.num_token_id is None:
        return None
    is_number = labels == config.num_token_id
    can_check = not torch.compiler.is_compiling()
    if targets is None:
        if can_check and is_number.any():
            raise ValueError(
                f"labels of row {_first_row(is_number)} contain <NUM> without a value; pass "
                "numeric_values or numeric_targets, or set these labels to -100."
            )
        return None
    targets = targets.to(labels.device)
    wide = targets.where(is_number, 0.0).double()
    target = position_space(config, fields, labels).encode(wide).float()
    if can_check and (is_bad := ~target.isfinite()).any():
        raise ValueError(
            f"numeric_targets of row {_first_row(is_bad)} contain {wide[is_bad][0].item()}; use "
            "finite numbers (of at most 3e38 in value_space='linear')."
        )
    return target.where(is_number, 0.0).flatten()


def _first_row(where: Tensor) -> int:
    return int(where.nonzero()[0, 0])


def _regression(
    y: Cauchy,
    labels: Tensor,
    p_number: Tensor,
    target: Tensor | None,
    num_numbers: Tensor | int | None,
    config: CausalConfig,
) -> Tensor:
    """sum(gate L_nll) / sum(m): exactly 0, with a graph, when there is no number."""
    if target is None:
        is_number, target = torch.zeros_like(labels, dtype=torch.bool), torch.zeros_like(y.loc)
    else:
        is_number, target = labels.eq(config.num_token_id or 0), target.to(y.loc)
    gate = config.gate_alpha + (1 - config.gate_alpha) * p_number
    gate = gate if config.gate_grad else gate.detach()
    count = is_number.sum() if num_numbers is None else torch.as_tensor(num_numbers)
    gated = (gate * y.nll(target)).where(is_number, 0.0)
    return gated.sum() / count.to(gated.device).clamp_min(1)
