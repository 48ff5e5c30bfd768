"""Logits: the mode as the last logits processor.

`forward(...).logits` is loc_S in every mode, and every other logits processor acts on it. The last
processor receives U of the last position and turns the processed loc_S into the choice, so
streamers, stopping criteria, caches and compiled forwards work unchanged.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import LogitsProcessor
from transformers.utils import ModelOutput

from causal_qwen.decoding.decision import NO_CHOICE, SCALE_FLOOR, SLACK, choose, margin
from causal_qwen.decoding.noise import DecodingNoise, UNoise
from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.decoding.step import Position, Rules, add_noise, candidates, choose_tokens
from causal_qwen.modeling.abduction import whole
from causal_qwen.modeling.action import head_divisor, head_weight, score_shift
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.modeling.thresholds import over_bar
from causal_qwen.modeling.value_space import ValueSpace, check_values, warn_if_clamped

ROWS_AT_ONCE = 4096


class HeadNorms:
    """L1 norms of the rows of W, and how uneven a row is."""

    def __init__(self, weight: Tensor) -> None:
        norms, uneven = [], []
        for part in _absolute_parts(weight):
            norms.append(part.sum(-1))
            uneven.append((part - part.mean(-1, keepdim=True)).norm(dim=-1).max())
        self.rows = torch.cat(norms)  # (V,)
        self.uneven = float(torch.stack(uneven).max())  # max_k of || |W_k| - its mean ||_2


class TorchHead:
    """The law's parameters as `decoding.decision` needs them."""

    has_rows = True

    def __init__(
        self,
        weight: Tensor,
        threshold: Tensor,
        b_noise: Tensor,
        decision_noise: Tensor,
    ) -> None:
        self.weight, self.threshold = weight.detach(), threshold.detach()
        self.b_noise, self.decision_noise = b_noise.detach().abs(), decision_noise.detach().abs()

    @functools.cached_property
    def norms(self) -> HeadNorms:
        """Computed when a bound first needs them: they cost a pass over W."""
        return HeadNorms(self.weight)

    def row_norms(self) -> Tensor:
        return self.norms.rows

    @functools.cached_property
    def unit_range(self) -> tuple[float, float]:
        """The least and the largest scale_S of a U whose scales are all 1."""
        units = self.norms.rows + self.decision_noise
        return float(units.min()), float(units.max())

    def scale_range(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """scale_U (B, C) -> (B, 1) twice. With m the mean of scale_U, and units ||W_k||_1 + |a_k|,
        which conversion makes nearly equal:

            scale_k = |W_k| scale_U + |a_k| m <= max(scale_U) unit_k
                    = m unit_k + (|W_k| - its mean) (scale_U - m)
                    <= m unit_k + uneven ||scale_U - m||
        """
        least, most = self.unit_range
        low, high = scale.aminmax(dim=-1, keepdim=True)
        mean = scale.mean(-1, keepdim=True)
        beside = self.norms.uneven * (scale - mean).norm(dim=-1, keepdim=True)
        by_mean = mean * least * (1 - SLACK) - beside * (1 + SLACK)
        low = torch.maximum(low * least * (1 - SLACK), by_mean)
        high = torch.minimum(high * most, mean * most + beside) * (1 + SLACK)
        return low.clamp_min(SCALE_FLOOR), high.clamp_min(SCALE_FLOOR)

    def absolute(self, scale: Tensor, rows: Tensor | None = None) -> Tensor:
        weight = self.weight if rows is None else self.weight[rows]
        return weight.float().abs() @ scale.float()

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class ModelLaw(TorchHead):
    """The law of a model on the device of its scores, during one call of `generate`.

    An offloaded W stays so: it is too large to be kept here, and the head multiplies by it.
    """

    def __init__(self, model: CausalModel, device: torch.device, dtype: torch.dtype) -> None:
        weight = model.lm_head.weight
        self.model, self.device, self.dtype = model, device, dtype
        own = weight if weight.is_meta else head_weight(model.lm_head)
        super().__init__(
            own if own.is_meta else own.to(device),
            whole(model.decision, "threshold").to(device),
            whole(model.action, "b_noise").to(device),
            whole(model.action, "decision_noise").to(device),
        )
        self.own = own
        self.is_plain = is_plain(own)
        self.has_rows = self.is_plain and not own.is_meta
        self.word_edges = whole(model.decision, "word_edges").to(device)
        self.num_token_id: int | None = model.config.num_token_id
        self.divisor = head_divisor(model.lm_head)

    @functools.cached_property
    def norms(self) -> HeadNorms:
        return norms_of(self.model, self.own, self.weight)

    def rows(self, ids: Tensor) -> Any:
        if not self.is_plain:
            return None
        weight = head_weight(self.model.lm_head) if self.weight.is_meta else self.weight
        return weight.to(self.device)[ids]

    def score_shift(self, shift: Tensor) -> Tensor:
        shift = shift * self.divisor
        return score_shift(shift, self.model.lm_head, self.dtype).to(self.device)

    def score_scales(self, scale: Tensor) -> Tensor:
        return self.model.action.score_scale(scale, self.model.lm_head).to(self.device)


class DecisionProcessor(LogitsProcessor):
    """The last processor: processed loc_S -> scores whose argmax is the mode's choice.

    It also cuts by `min_p`: then K candidates are left to read instead of V tokens.
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
        self._law: ModelLaw | None = None

    @property
    def settings(self) -> DecodingSettings:
        return self.noise.settings

    def observe(self, outputs: ModelOutput) -> None:
        """Take U, what noise adds to it and to the scores, and the bar from the model's outputs."""
        self.u = Cauchy(outputs.loc_U[:, -1], outputs.scale_U[:, -1])
        self.shift_u = None if outputs.shift_U is None else outputs.shift_U[:, -1]
        self.shift = None if outputs.shift_S is None else outputs.shift_S[:, -1]
        needs_bar = self.settings.mode != "causal"  # W u - C: the bar moves all tokens alike
        self.bar = self.model.decision.bar(outputs.logits[:, -1]) if needs_bar else None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.settings.mode == "compatible" or self.want_scores:
            return self._scores(input_ids, scores)
        return one_hot(self.choose(input_ids, scores), scores)

    def choose(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The choice itself, in a mode of ours. (B, V) -> (B,)"""
        law, texts = self.law_on(scores.device), self._texts(input_ids)
        chosen: Tensor = choose_tokens(scores, self.position(law), self.rules(), texts, law)
        return chosen

    def rules(self, each: int = 1) -> Rules:
        """How the rows choose; `each` of them in turn belong to one row of the noise."""
        words = [is_kept for is_kept in self.noise.kept_words() for _ in range(each)]
        lengths = [n for n in self.noise.avoided_repeats() for _ in range(each)]
        return Rules(self.settings.mode, self.min_p, words, lengths)

    def position(self, law: ModelLaw) -> Position:
        """What is known of the last position, on the device of the scores."""
        shift_u = None if self.shift_u is None else (self.shift_u / law.divisor).to(law.device)
        shift, bar = (None if one is None else one.to(law.device) for one in (self.shift, self.bar))
        return Position(self.u.scale.to(law.device), shift_u, shift, bar)

    def law_on(self, device: torch.device) -> ModelLaw:
        if self._law is None:
            self._law = ModelLaw(self.model, device, self.u.loc.dtype)
        return self._law

    def _texts(self, input_ids: Tensor) -> list[Any]:
        """The tokens of every row that are not padding."""
        if not self.settings.whole_words and not self.settings.avoid_repeats:
            return []
        rows = zip(input_ids.cpu().numpy(), self.positions, strict=True)
        return [row[max(len(row) - 1 - at, 0) :] for row, at in rows]

    def _scores(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores of all tokens: W u - C, log P, or in `compatible` log(P_k / sum P). (B, V)"""
        law, mode = self.law_on(scores.device), self.settings.mode
        at, rules = self.position(law), self.rules()
        _, loc = candidates(scores, rules, self._texts(input_ids), law, are_few=False)
        loc = add_noise(loc, at, law)
        if mode == "causal":
            over: Tensor = margin(loc, law.threshold)
            if over.isnan().any():
                raise ValueError(NO_CHOICE)
            return force_argmax(over.float(), over.argmax(-1))
        u = self.u if mode == "sampling" else self.model.action.widen(self.u)
        s = Cauchy(loc, law.score_scales(u.scale))
        if mode == "compatible":
            return self.model.decision.log_normalized(s, at.bar)
        chosen = choose(loc, s.scale, law.threshold, at.bar)
        return force_argmax(over_bar(s, at.bar).log_sf(law.threshold), chosen)


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


def _absolute_parts(weight: Tensor) -> Any:
    return (part.float().abs() for part in weight.detach().split(ROWS_AT_ONCE))


class ValueTracker:
    """The values of the prompt and of the generated tokens, aligned with the ids.

    HF exposes outputs before the token is chosen, so each step appends a tentative value; it is
    zeroed if the token is not `<NUM>`.
    """

    def __init__(self, num_token_id: int, space: ValueSpace, num_beams: int) -> None:
        self.num_token_id = num_token_id
        self.space = space
        self.num_beams = num_beams
        self.values = torch.empty(0)  # (B, T), of the running texts
        self.ids: Tensor | None = None  # (B, T) or one less, of the running texts
        self.prompt = torch.empty(0)  # (B, P)
        self.tentative: list[Tensor] = []  # one (B,) for every step
        self.past: int | None = None  # length of the cache at the start of the call

    def start(self, ids: Tensor, values: Tensor | None) -> None:
        """Take the values of the prompt."""
        check_values(ids, values, self.num_token_id)
        if values is None:
            values = torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
        self.values = self.prompt = values.to(torch.float64)

    def append(self, outputs: ModelOutput) -> None:
        """Append the value of the next token, should it be a number."""
        value = self.next_value(outputs).to(self.values.device)
        self.tentative.append(value)
        self.values = torch.cat([self.values, value.unsqueeze(-1)], dim=-1)

    def next_value(self, outputs: ModelOutput) -> Tensor:
        """(B,)"""
        y = outputs.loc_Y[:, -1]
        if outputs.shift_Y is not None:
            y = y + outputs.shift_Y[:, -1]
        return self.space.clamped(y)

    def values_of(self, ids: Tensor, inputs: Tensor, past: int) -> Tensor | None:
        """The values of `inputs`, the part of the running texts `ids` that the model reads next;
        None if it holds no number."""
        size = inputs.shape[1]
        self.past = past if self.past is None else self.past
        if ids.shape[1] == self.values.shape[1]:
            self._follow(ids)
            values = self.values[:, self.values.shape[1] - size :]
        else:  # a chunk of the prompt
            start = past if self.values.shape[1] >= past + size else past - self.past
            values = self.values[:, start : start + size]
        return values.to(inputs.device) if (inputs == self.num_token_id).any() else None

    def finish(self, result: ModelOutput) -> None:
        """Add `numeric_values` to the result, aligned with its sequences."""
        sequences = result.sequences
        is_number = sequences == self.num_token_id
        prompts, steps = self.prompt.shape[1], sequences.shape[1] - self.prompt.shape[1]
        if (beams := result.get("beam_indices")) is None:
            values = self.values
        else:
            rows = self.prompt[beams[:, 0].clamp_min(0)]
            tentative = torch.stack(self.tentative[:steps], dim=-1)  # (B beams, steps)
            chosen = tentative.gather(0, beams[:, :steps].clamp_min(0).long())
            values = torch.cat([rows, chosen], dim=-1)
        values = values[:, : prompts + steps].to(sequences.device).where(is_number, 0.0)
        warn_if_clamped(values)
        result["numeric_values"] = values

    def _follow(self, ids: Tensor) -> None:
        """Zero the values of tokens that are not numbers; with beams, reorder the rows first.

        A row continues the row of its own prompt that had its tokens; equal texts have equal
        values, so any of them will do.
        """
        if self.num_beams > 1 and self.ids is not None and self.ids.shape[1] < ids.shape[1]:
            groups = self.ids.unflatten(0, (-1, self.num_beams))  # (B, beams, T)
            before = ids[:, : groups.shape[-1]].unflatten(0, (-1, self.num_beams))
            is_parent = (before.unsqueeze(2) == groups.unsqueeze(1)).all(-1)  # (B, beams, beams)
            offset = torch.arange(len(groups), device=ids.device).unsqueeze(-1) * self.num_beams
            self.values = self.values[(is_parent.int().argmax(-1) + offset).flatten()]
        self.values = self.values.where(ids == self.num_token_id, 0.0)
        self.ids = ids
