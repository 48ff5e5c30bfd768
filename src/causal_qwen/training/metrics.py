"""Metrics on held-out text, in `standard` mode, at valid positions only.

eval      accuracy, perplexity (of softmax(loc_S)), ovr_nll (P over its sum)
numbers   precision, recall and F1 of <NUM>; absolute errors, interval coverage and CRPS
dist      mean, median, std and iqr of U's parameters, the median of sum_k P_k

Every metric is a ratio of sums over rows, or an order statistic: memory does not grow with the
text. Intervals are a bootstrap over rows, as they arrive: every row counts Poisson(1) times in each
replicate. Two models that read the same rows in the same order have the same replicates, so that
their differences have intervals, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object  # type: ignore[import-untyped]
from torch import Tensor

from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.loss import IGNORE, shift_fields, shift_left
from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.modeling.value_space import position_space

LEVELS = (0.5, 0.8, 0.9, 0.95)
ELEMENTS = 2**24  # most scores in memory at once
REPLICATES = 1000  # of a bootstrap
LIMITS = (0.025, 0.975)  # of an interval
MOST = 2**20  # numbers of which quantiles are taken
COVERED = tuple(f"coverage_{level:.0%}".rstrip("%") for level in LEVELS)
# What is summed over the positions of a row: counts, hits, and what means are taken of.
COLUMNS = (
    *("tokens", "hits", "softmax_hits", "nll", "ovr_nll"),
    *("numbers", "chosen_numbers", "found_numbers", "valued", "error", "crps", *COVERED),
)
Sums = Mapping[str, Tensor]  # column -> (), or (R,) for replicates


class Sample:
    """MOST numbers of a stream at random: those with the smallest of random keys."""

    def __init__(self) -> None:
        self.kept, self.keys = torch.empty(0), torch.empty(0)
        self.rng = np.random.default_rng(0)

    def add(self, values: Tensor) -> None:
        """Numbers of any shape."""
        new = values.detach().flatten().float().cpu()
        self.join(new, torch.from_numpy(self.rng.random(len(new), np.float32)))

    def join(self, kept: Tensor, keys: Tensor) -> None:
        self.kept, self.keys = torch.cat([self.kept, kept]), torch.cat([self.keys, keys])
        if len(self.keys) > MOST:
            self.keys, chosen = self.keys.topk(MOST, largest=False, sorted=False)
            self.kept = self.kept[chosen]

    def quantile(self, level: float) -> float:
        """The smallest number that is not below this share of all."""
        return float(self.kept.sort().values[int(level * (len(self.kept) - 1))])

    def spread(self) -> dict[str, float]:
        mean, std = float(self.kept.double().mean()), float(self.kept.double().std())
        low, median, high = (self.quantile(level) for level in (0.25, 0.5, 0.75))
        return {"mean": mean, "median": median, "std": std, "iqr": high - low}


class MetricAccumulator:
    """Accumulates batches; `compute` returns the metrics over all of them, `intervals` theirs."""

    def __init__(self, model: CausalModel, replicates: int = 0) -> None:
        self.model = model
        self.rows = 0
        self.sums = torch.zeros(len(COLUMNS), dtype=torch.float64)
        self.resampled = torch.zeros(replicates, len(COLUMNS), dtype=torch.float64)
        self.generator = torch.Generator().manual_seed(0)  # the same for every model: pairs
        names = ("U_loc", "U_scale", "sum_p", "error")
        self.samples = {name: Sample() for name in names}

    @torch.no_grad()
    def add(self, u: Cauchy, batch: Mapping[str, Tensor]) -> None:
        """U (B, T, C) of a batch with `labels`, and its values."""
        labels = shift_left(batch["labels"], IGNORE)
        is_valid = labels != IGNORE
        u = Cauchy(u.loc[is_valid], u.scale[is_valid])  # (N, C)
        self.samples["U_loc"].add(u.loc)
        self.samples["U_scale"].add(u.scale)
        columns = self._scores(u, labels[is_valid]) | self._numbers(u, labels, is_valid, batch)
        row = is_valid.nonzero()[:, 0]  # of every valid position
        table = torch.stack([columns[name].double() for name in COLUMNS], -1)  # (N, columns)
        self.add_rows(table.new_zeros(len(labels), len(COLUMNS)).index_add(0, row, table).cpu())

    def add_rows(self, sums: Tensor) -> None:
        """Sums over the positions of every row. (B, columns)"""
        self.rows += len(sums)
        self.sums += sums.sum(0)
        if len(self.resampled):
            rate = torch.ones(len(sums), len(self.resampled), dtype=torch.float64)
            self.resampled += torch.poisson(rate, self.generator).T @ sums

    def _scores(self, u: Cauchy, labels: Tensor) -> dict[str, Tensor]:
        """Columns of the tokens' probabilities, at every valid position. -> (N,) each"""
        model, size = self.model, max(ELEMENTS // self.model.config.vocab_size, 1)
        parts: list[tuple[Tensor, ...]] = []
        for loc, scale, label in zip(
            u.loc.split(size), u.scale.split(size), labels.split(size), strict=True
        ):
            s, _ = model.act(Cauchy(loc, scale))
            s = Cauchy(s.loc.float(), s.scale)
            at = label.unsqueeze(-1)
            self.samples["sum_p"].add(model.decision(s).sum(-1))
            nll = -s.loc.log_softmax(-1).gather(-1, at).squeeze(-1)
            ovr_nll = -model.decision.log_normalized(s).gather(-1, at).squeeze(-1)
            parts.append((model.decision.choose(s), s.loc.argmax(-1) == label, nll, ovr_nll))
        chosen, softmax_hits, nll, ovr_nll = (torch.cat(part) for part in zip(*parts, strict=True))
        k = self.model.config.num_token_id
        is_number = labels == (-1 if k is None else k)
        is_chosen = chosen == (-1 if k is None else k)
        return {
            "tokens": torch.ones_like(nll),
            "hits": chosen == labels,
            "softmax_hits": softmax_hits,
            "nll": nll,
            "ovr_nll": ovr_nll,
            "numbers": is_number,
            "chosen_numbers": is_chosen,
            "found_numbers": is_number & is_chosen,
        }

    def _numbers(
        self, u: Cauchy, labels: Tensor, is_valid: Tensor, batch: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Columns of the values, 0 at labels that are none. -> (N,) each"""
        config = self.model.config
        targets = batch.get("numeric_targets", batch.get("numeric_values"))
        names = ("valued", "error", "crps", *COVERED)
        if config.num_token_id is None or targets is None:
            return dict.fromkeys(names, torch.zeros(len(u.loc), device=u.loc.device))
        space = position_space(config, shift_fields(batch.get("numeric_fields")), labels)
        values = shift_left(targets, 0.0).double()
        valid = self.model.action.number(self.model.action.widen(u))
        y = Cauchy(torch.zeros_like(values), torch.ones_like(values))  # (B, T)
        y.loc[is_valid], y.scale[is_valid] = valid.loc.to(values), valid.scale.to(values)
        encoded = space.encode(values)
        error = (space.decode(y.loc) - values).abs()
        crps = y.crps(encoded) * space.spread
        from_middle = (y.cdf(encoded) - 0.5).abs()
        is_number = labels == config.num_token_id
        self.samples["error"].add(error[is_number])
        columns = [is_number, error, crps, *(from_middle <= level / 2 for level in LEVELS)]
        return {
            name: column.double().where(is_number, 0.0)[is_valid]
            for name, column in zip(names, columns, strict=True)
        }

    def gather(self) -> None:
        """Share the batches of all processes. (Rows that a sampler repeats to fill the last batch
        count twice.)"""
        total = MetricAccumulator(self.model)
        for part in gather_object([self]):
            total.merge(part)
        vars(self).update(vars(total))

    def __getstate__(self) -> dict[str, Any]:
        """Sent to other processes without the model."""
        return {k: v for k, v in vars(self).items() if k not in ("model", "generator")}

    def merge(self, other: MetricAccumulator) -> None:
        """Add the rows of another process; its replicates have none."""
        self.rows += other.rows
        self.sums += other.sums
        for name, sample in other.samples.items():
            self.samples[name].join(sample.kept, sample.keys)

    def compute(self) -> dict[str, float]:
        """All metrics; those of numbers only if the batches contain numbers."""
        samples = self.samples
        if not len(samples["sum_p"].kept):
            return {}
        metrics = {name: float(value) for name, value in self._ratios(self.sums).items()}
        metrics["dist/ovr_prob_sum_median"] = samples["sum_p"].quantile(0.5)
        for name in ("U_loc", "U_scale"):
            metrics |= {f"dist/{name}_{of}": x for of, x in samples[name].spread().items()}
        if len(samples["error"].kept):
            metrics["reg_mdae"] = samples["error"].quantile(0.5)
        return metrics

    def intervals(self, base: MetricAccumulator | None = None) -> dict[str, tuple[float, float]]:
        """95% intervals of all metrics but order statistics and U's parameters; with `base`, of
        the differences to it."""
        found = self._ratios(self.resampled)
        theirs = {} if base is None else base._ratios(base.resampled)
        limits = torch.tensor(LIMITS, dtype=torch.float64)
        spans = {}
        for name, values in found.items():
            if base is None or name in theirs:
                values = values - theirs[name] if theirs else values
                low, high = values[values.isfinite()].quantile(limits).tolist()
                spans[name] = (low, high)
        return spans

    def _ratios(self, sums: Tensor) -> dict[str, Tensor]:
        """The metrics that are ratios of sums. (..., columns) -> (...) each"""
        of = dict(zip(COLUMNS, sums.unbind(-1), strict=True))
        total = dict(zip(COLUMNS, self.sums.tolist(), strict=True))
        nll = of["nll"] / of["tokens"]
        metrics = {
            "accuracy": of["hits"] / of["tokens"],
            "accuracy_compatible": of["softmax_hits"] / of["tokens"],
            "nll": nll,
            "perplexity": nll.clamp_max(700.0).exp(),
            "ovr_nll": of["ovr_nll"] / of["tokens"],
        }
        if total["numbers"]:
            found = of["found_numbers"]
            precision = found / of["chosen_numbers"].clamp_min(1.0)
            recall = found / of["numbers"].clamp_min(1.0)
            f1 = 2 * found / (of["chosen_numbers"] + of["numbers"]).clamp_min(1.0)
            metrics |= {"num_precision": precision, "num_recall": recall, "num_f1": f1}
        if total["valued"]:
            is_linear = self.model.config.value_space == "linear"
            metrics["reg_mae"] = of["error"] / of["valued"]
            metrics["crps" if is_linear else "crps_symlog"] = of["crps"] / of["valued"]
            metrics |= {name: of[name] / of["valued"] for name in COVERED}
        return metrics
