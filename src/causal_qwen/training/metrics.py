"""Metrics on held-out text, in `standard` mode, at valid positions only.

eval      accuracy, perplexity (of softmax(loc_S)), ovr_nll (P over its sum)
numbers   precision, recall and F1 of <NUM>; absolute errors, interval coverage and CRPS
dist      mean, median, std and iqr of U's parameters, the median of sum_k P_k
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.loss import IGNORE, shift_fields, shift_left
from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.modeling.value_space import position_space

LEVELS = (0.5, 0.8, 0.9, 0.95)
ELEMENTS = 2**24  # most scores in memory at once


class MetricAccumulator:
    """Accumulates batches; `compute` returns the metrics over all of them."""

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.columns: dict[str, list[Tensor]] = {}
        self.spread: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def add(self, u: Cauchy, batch: dict[str, Tensor]) -> None:
        """U (B, T, C) of a batch with `labels`, and its values."""
        labels = shift_left(batch["labels"], IGNORE)
        targets = batch.get("numeric_targets", batch.get("numeric_values"))
        is_valid = labels != IGNORE
        u = Cauchy(u.loc[is_valid], u.scale[is_valid])  # (N, C)
        self._keep(self.spread, U_loc=u.loc.float(), U_scale=u.scale.float())
        k, kind = self.model.config.num_token_id, torch.float64
        nan = torch.full(labels.shape, math.nan, dtype=kind, device=labels.device)
        error = rank = crps = nan
        if k is not None and targets is not None:
            values = shift_left(targets, 0.0).double()
            fields = shift_fields(batch.get("numeric_fields"))
            space = position_space(self.model.config, fields, labels)
            valid = self.model.action.number(self.model.action.widen(u))
            y = Cauchy(nan.clone(), nan + 1)  # (B, T)
            y.loc[is_valid], y.scale[is_valid] = valid.loc.to(kind), valid.scale.to(kind)
            is_number = labels == k
            encoded = space.encode(values)
            error = (space.decode(y.loc.nan_to_num()) - values).abs().where(is_number, math.nan)
            rank = y.cdf(encoded).where(is_number, math.nan)
            crps = (y.crps(encoded) * space.spread).where(is_number, math.nan)
        self._keep(self.columns, error=error[is_valid], rank=rank[is_valid], crps=crps[is_valid])
        self._add_scores(u, labels[is_valid])

    def _add_scores(self, u: Cauchy, labels: Tensor) -> None:
        model, size = self.model, max(ELEMENTS // self.model.config.vocab_size, 1)
        for loc, scale, label in zip(
            u.loc.split(size), u.scale.split(size), labels.split(size), strict=True
        ):
            s, _ = model.act(Cauchy(loc, scale))
            s = Cauchy(s.loc.float(), s.scale)
            at = label.unsqueeze(-1)
            self._keep(
                self.columns,
                label=label,
                chosen=model.decision.choose(s),
                softmax_hit=s.loc.argmax(-1) == label,
                nll=-s.loc.log_softmax(-1).gather(-1, at).squeeze(-1),
                ovr_nll=-model.decision.log_normalized(s).gather(-1, at).squeeze(-1),
                sum_p=model.decision(s).sum(-1),
            )

    @staticmethod
    def _keep(where: dict[str, list[Tensor]], **columns: Tensor) -> None:
        for name, column in columns.items():
            where.setdefault(name, []).append(column.detach().cpu())

    def gather(self) -> None:
        """Share the batches of all processes. (Rows that a sampler repeats to fill the last batch
        count twice.)"""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            parts: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(parts, (self.columns, self.spread))
            self.columns, self.spread = (
                {name: [x for one in kind for x in one[name]] for name in kind[0]}
                for kind in zip(*parts, strict=True)
            )

    def compute(self) -> dict[str, float]:
        """All metrics; those of numbers only if the batches contain numbers."""
        if not self.columns:
            return {}
        column = {name: torch.cat(parts) for name, parts in self.columns.items()}
        label, chosen = column["label"], column["chosen"]
        nll = float(column["nll"].double().mean())
        metrics = {
            "accuracy": _share(chosen == label),
            "accuracy_compatible": _share(column["softmax_hit"]),
            "nll": nll,
            "perplexity": math.exp(min(nll, 700.0)),
            "ovr_nll": float(column["ovr_nll"].double().mean()),
            "dist/ovr_prob_sum_median": float(column["sum_p"].median()),
        }
        for name, parts in self.spread.items():
            metrics |= _spread(f"dist/{name}", torch.cat([part.flatten() for part in parts]))
        k = self.model.config.num_token_id
        if k is not None and bool((label == k).any()):
            metrics |= _recognition(label == k, chosen == k)
        error, rank, crps = (column[name] for name in ("error", "rank", "crps"))
        if (is_known := ~error.isnan()).any():
            error, rank, crps = error[is_known], rank[is_known], crps[is_known]
            is_linear = self.model.config.value_space == "linear"
            metrics |= {
                "reg_mae": float(error.mean()),
                "reg_mdae": float(error.median()),
                "crps" if is_linear else "crps_symlog": float(crps.mean()),
            }
            for level in LEVELS:
                inside = (rank - 0.5).abs() <= level / 2
                metrics[f"coverage_{level:.0%}".rstrip("%")] = _share(inside)
        return metrics


def _share(hits: Tensor) -> float:
    return float(hits.double().mean()) if hits.numel() else math.nan


def _spread(name: str, values: Tensor) -> dict[str, float]:
    sample = values[:: max(len(values) // 10**6, 1)]  # torch's quantile takes 16 million at most
    low, middle, high = sample.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_median": middle,
        f"{name}_std": float(values.std()),
        f"{name}_iqr": high - low,
    }


def _recognition(is_number: Tensor, is_chosen: Tensor) -> dict[str, float]:
    """Precision, recall and F1 of choosing `<NUM>`."""
    hits = float((is_number & is_chosen).sum())
    precision = hits / max(float(is_chosen.sum()), 1.0)
    recall = hits / max(float(is_number.sum()), 1.0)
    f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
    return {"num_precision": precision, "num_recall": recall, "num_f1": f1}
