"""Loss: one-vs-rest classification + gated regression (+ softmax compatibility).

    L_cls,i = - sum_k [ y_k log P_k + (1 - y_k) log(1 - P_k) ]
    L_nll,i = -log Cauchy(y_i; loc_Y, scale_Y)           in the number head's own space
    gate_i  = m_i (alpha + (1 - alpha) P_<NUM>,i)        m_i: the label is <NUM>
    L = w_cls mean_valid(L_cls) + lambda sum(gate L_nll) / sum(m) + w_compat mean_valid(CE(loc_S))

Tokens and numbers are reduced separately: numbers are sparse, and one common mean would drown
them. The loss takes U and the law, never scores: they exist for a chunk of positions at a time
(see `one_vs_rest`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from causal_qwen.modeling.action import ActionNetwork
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.modeling.one_vs_rest import HeadParams, LossSettings, one_vs_rest
from causal_qwen.modeling.thresholds import Decision
from causal_qwen.modeling.value_space import position_space

IGNORE = -100
AUTO_CHUNK_ELEMENTS = 50_000_000  # scores of one chunk: 200 MB in float32


class LossTerms(NamedTuple):
    """Each already reduced. `total` is what training minimises; two others are for the record."""

    total: Tensor
    classification: Tensor  # without gradients
    regression: Tensor
    compatibility: Tensor  # without gradients


def shift_left(values: Tensor, fill: float | int) -> Tensor:
    """Position i gets what stands at i + 1; the last position gets `fill`. (B, T) -> (B, T)"""
    return F.pad(values, (0, 1), value=fill)[..., 1:]


def shift_fields(fields: Tensor | None) -> Tensor | None:
    """Fields of positions (B, T) move with their labels; fields of rows (B,) stay."""
    return fields if fields is None or fields.dim() != 2 else shift_left(fields, -1)


def causal_loss(
    u: Cauchy,
    labels: Tensor,
    *,
    action: ActionNetwork,
    head: nn.Module,
    decision: Decision,
    config: CausalQwen2Config,
    targets: Tensor | None = None,
    fields: Tensor | None = None,
    num_items: Tensor | int | None = None,
    num_numbers: Tensor | int | None = None,
) -> LossTerms:
    """The loss of U (B, T, C) against next-token labels (B, T), already shifted.

    `targets` are the values of the labels that are `<NUM>`, `fields` their fields' places among
    the sorted names of `config.value_fields` ((B,) or (B, T), -1 for none); `num_items` and
    `num_numbers` count the tokens and numbers of the whole accumulated batch where it is larger
    (if only the tokens are counted, this part's mean over numbers counts by its share of tokens).
    """
    target = _targets(labels, targets, fields, config)
    u = action.widen(Cauchy(u.loc.flatten(0, -2), u.scale.flatten(0, -2)))  # (N, C)
    labels = labels.flatten().to(u.loc.device)  # (N,)
    is_valid = labels != IGNORE

    count = is_valid.sum() if num_items is None else torch.as_tensor(num_items)
    count = count.to(u.loc.device).clamp_min(1)
    chain = _Chain(action, head, decision, config)
    work = _fused if _can_fuse(head) else _plain
    total, ovr, cross_entropy, p_number = work(u, labels, chain)
    regression = _regression(action.number(u), labels, p_number, target, num_numbers, config)
    if num_items is not None and num_numbers is None:
        regression = regression * (is_valid.sum() / count)  # a part's mean, by the part's size
    return LossTerms(
        total=total / count + config.regression_loss_weight * regression,
        classification=chain.reduction * ovr.detach() / count,
        regression=regression,
        compatibility=cross_entropy.detach() / count,
    )


class _Chain(NamedTuple):
    """The parts of the model that the loss needs."""

    action: ActionNetwork
    head: nn.Module
    decision: Decision
    config: CausalQwen2Config

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
    """A tensor-parallel head holds a part of W; a compiler wants to fuse for itself."""
    return not hasattr(head, "_is_hooked") and not torch.compiler.is_compiling()


def _fused(u: Cauchy, labels: Tensor, chain: _Chain) -> Sums:
    """With gradients that are made along the way; ignored positions cost nothing."""
    config, k = chain.config, chain.config.num_token_id
    valid = (labels != IGNORE).nonzero().squeeze(-1)
    plan = LossSettings(
        *chain.weights,
        chunk=_chunk_size(config, len(valid)),
        is_fast=config.loss_precision == "fast" or u.loc.dtype == torch.bfloat16,
    )

    def law(weight: Tensor, bias: Tensor | None) -> Sums:
        whole = HeadParams(weight, bias, chain.action.decision_noise, chain.decision.threshold)
        mine = Cauchy(u.loc[valid], u.scale[valid])
        sums = one_vs_rest(mine, whole, labels[valid], plan)
        p_number = torch.zeros_like(u.scale[:, 0])
        if k is not None and (where := (labels == k).nonzero().squeeze(-1)).numel():
            p_number[where] = whole.sf(Cauchy(u.loc[where], u.scale[where]), k)
        return *sums, p_number

    sums: Sums = chain.head(u.loc, law=law)
    return sums


def _plain(u: Cauchy, labels: Tensor, chain: _Chain) -> Sums:
    """By autograd, chunk by chunk, every chunk's scores made again in the backward pass."""
    action, head, decision, config = chain

    def terms(loc: Tensor, scale: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = Cauchy(head(loc).float(), action.score_scale(scale, head))  # (n, V)
        label = labels.clamp_min(0).unsqueeze(-1)
        log_not = s.log_cdf(decision.threshold)
        chosen = Cauchy(s.loc.gather(-1, label), s.scale.gather(-1, label))
        log_yes = chosen.log_sf(decision.threshold[label])
        ovr = log_not.gather(-1, label) - log_yes - log_not.sum(-1, keepdim=True)
        ovr = ovr.squeeze(-1).where(labels != IGNORE, 0.0).sum()
        ce = torch.zeros_like(ovr)
        if config.compat_loss_weight:
            ce = F.cross_entropy(s.loc, labels, ignore_index=IGNORE, reduction="sum")
        k = config.num_token_id or 0
        p_number = Cauchy(s.loc[:, k], s.scale[:, k]).sf(decision.threshold[k])
        return ovr, ce, p_number

    parts = (x.split(_chunk_size(config, len(labels))) for x in (u.loc, u.scale, labels))
    work = partial(checkpoint, terms, use_reentrant=False) if torch.is_grad_enabled() else terms
    results = [work(*part) for part in zip(*parts, strict=True)]
    ovrs, ces, p_number = zip(*results, strict=True)
    ovr, ce = torch.stack(ovrs).sum(), torch.stack(ces).sum()
    of_ovr, of_ce = chain.weights
    return of_ovr * ovr + of_ce * ce, ovr, ce, torch.cat(p_number)


def _chunk_size(config: CausalQwen2Config, positions: int) -> int:
    if isinstance(config.loss_chunk_size, int):
        return config.loss_chunk_size
    most = AUTO_CHUNK_ELEMENTS // config.vocab_size
    return max(min(most - most % 64 or most, positions), 1)


def _targets(
    labels: Tensor, targets: Tensor | None, fields: Tensor | None, config: CausalQwen2Config
) -> Tensor | None:
    """The targets on the number head's scale, flat, 0 where the label is no number."""
    if config.num_token_id is None:
        return None
    is_number = labels == config.num_token_id
    can_look = not torch.compiler.is_compiling()
    if targets is None:
        if can_look and is_number.any():
            row = int(is_number.nonzero()[0, 0])
            raise ValueError(
                f"labels of row {row} hold <NUM> without a value; give numeric_values or "
                "numeric_targets, or set these labels to -100."
            )
        return None
    if targets.shape != labels.shape:
        raise ValueError(
            f"numeric_targets of shape {tuple(targets.shape)} must stand beside labels of shape "
            f"{tuple(labels.shape)}."
        )
    targets = targets.to(labels.device)
    if can_look:
        _check_alignment(targets != 0, is_number, labels != IGNORE)
    wide = targets.where(is_number, 0.0).double()
    target = position_space(config, fields, labels).encode(wide).float()
    if can_look and (is_bad := ~target.isfinite()).any():
        row = int(is_bad.nonzero()[0, 0])
        raise ValueError(
            f"numeric_targets of row {row} hold {wide[is_bad][0].item()}, which cannot be learned; "
            "give finite numbers (of at most 3e38 in value_space='linear')."
        )
    return target.where(is_number, 0.0).flatten()


def _check_alignment(is_given: Tensor, is_number: Tensor, is_valid: Tensor) -> None:
    """A row whose numbers all have target 0, while other labels have targets, is off by some."""
    is_missed = is_number.any(-1) & ~(is_given & is_number).any(-1)
    if (is_off := is_missed & (is_given & is_valid & ~is_number).any(-1)).any():
        raise ValueError(
            f"numeric_targets of row {int(is_off.nonzero()[0])} are 0 at its <NUM> labels and "
            "stand beside other labels; shift, pad and cut targets and labels together."
        )


def _regression(
    y: Cauchy,
    labels: Tensor,
    p_number: Tensor,
    target: Tensor | None,
    num_numbers: Tensor | int | None,
    config: CausalQwen2Config,
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
