"""Documents: the calls and attribute names that the source documents use, on our model.

    model.inference(ids, mode="standard" | "causal" | "compatible")   ids, ids, probabilities
    model.generate_step_by_step(ids, max_length, mode)                the same, token by token
    model.debug_forward_pass(ids)                                     a look at every stage
    model.abduction_network, model.action_network, model.ovr_classifier

Nothing is computed twice: every decision is the one that `generate` would take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from causal_qwen.decoding.noise import DecodingNoise, UNoise
from causal_qwen.decoding.step import choose_tokens
from causal_qwen.generation.logits import DecisionProcessor
from causal_qwen.generation.mixin import noise_at
from causal_qwen.modeling.abduction import AbductionNetwork
from causal_qwen.modeling.action import ActionNetwork, apply_head
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.thresholds import Decision

WHOLE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # the softmax without cuts
OPTIONS = (
    *WHOLE,
    *("individual", "noise_gain", "min_density", "persistence", "normalization"),
    *("min_p", "whole_words", "avoid_repeats"),
)


class ActionView(nn.Module):
    """(loc_U, scale_U) -> (loc_S, scale_S), in either regime of the noise."""

    def __init__(self, law: ActionNetwork, lm_head: nn.Module) -> None:
        super().__init__()
        self.law = law
        self.lm_head = lm_head

    @property
    def b_noise(self) -> nn.Parameter:
        return self.law.b_noise

    def forward(
        self,
        loc_U: Tensor,
        scale_U: Tensor,
        do_sample: bool = False,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Cauchy:
        """(..., C), (..., C) -> (..., V), (..., V)

            do_sample=False   U' = Cauchy(loc_U, scale_U + |b|)          the centre stays
            do_sample=True    U' = Cauchy(loc_U + T |b| eps, scale_U)    the individual moves

        The documents' noise: its temperature is not counted in units of `noise_gain`.
        """
        if not temperature >= 0:
            raise ValueError(f"temperature={temperature!r} must be a number of at least 0.")
        u = Cauchy(loc_U, scale_U)
        if do_sample:
            standard = torch.zeros_like(loc_U, dtype=torch.float32)
            eps = Cauchy(standard, torch.ones_like(standard)).sample(generator)
            moved = loc_U + self.law.displacement(u, UNoise(temperature * eps, "location"))
            u = Cauchy(moved.to(loc_U.dtype), scale_U)
        else:
            u = self.law.widen(u)
        return Cauchy(apply_head(self.lm_head, u.loc), self.law.score_scale(u.scale, self.lm_head))


class ClassifierView(nn.Module):
    """(loc_S, scale_S) -> P_k, one probability per token, which need not sum to 1."""

    def __init__(self, decision: Decision) -> None:
        super().__init__()
        self.decision = decision

    @property
    def thresholds(self) -> nn.Parameter:
        return self.decision.threshold

    def forward(self, loc_S: Tensor, scale_S: Tensor) -> Tensor:
        p: Tensor = self.decision(Cauchy(loc_S, scale_S))
        return p


class DocumentedCalls:
    """The calls of the documents. Options besides `mode` are those of `generate`."""

    @property
    def abduction_network(self: Any) -> AbductionNetwork:
        network: AbductionNetwork = self.abduction
        return network

    @property
    def action_network(self: Any) -> ActionView:
        return ActionView(self.action, self.lm_head)

    @property
    def ovr_classifier(self: Any) -> ClassifierView:
        return ClassifierView(self.decision)

    @torch.no_grad()
    def inference(
        self: Any,
        input_ids: Tensor,
        mode: str = "standard",
        *,
        attention_mask: Tensor | None = None,
        numeric_values: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The next token, or its probabilities, at every position. (B, T) -> (B, T) or (B, T, V)

        `standard`, `sampling` and `causal` give token ids, decided as `generate` decides;
        `compatible` gives probabilities, the softmax of loc_S (P_k / sum P with
        `normalization="ovr"`), cut or sharpened by `temperature`, `top_k`, `top_p` and `min_p`
        if given here. The individual is `individual=`, or drawn from torch's state.
        """
        check_call(input_ids, options)
        is_compatible = mode == "compatible"
        settings = self.resolve_settings(causal_mode=mode, do_sample=is_compatible, **options)
        positions = self.positions_of(input_ids, attention_mask)
        output = self(
            input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            numeric_values=numeric_values,
            use_cache=False,
            output_scale_S=False,
        )
        u = Cauchy(output.loc_U.flatten(0, 1), output.scale_U.flatten(0, 1))  # (BT, C)
        scores = output.loc_S.flatten(0, 1).float()  # (BT, V)
        noise = self.decoding_noise(settings, len(input_ids))
        last = DecisionProcessor(self, noise, False, settings.min_p)
        last.u, last.bar = u, self.decision.bar(scores)

        if is_compatible:
            if settings.normalization == "ovr":
                scores = last(input_ids.flatten()[:, None], scores)
            asked = {name: options[name] for name in (*WHOLE, "min_p") if name in options}
            return self.warpers(**asked)(None, scores).softmax(-1).unflatten(0, input_ids.shape)

        cuts = {"top_k": settings.top_k or 0, "top_p": settings.top_p}
        scores = self.warpers(**cuts)(None, scores)
        if (moving := noise_everywhere(noise, positions)) is not None:
            alone = Cauchy(u.loc.unsqueeze(1), u.scale.unsqueeze(1))  # each its row's last position
            last.shift_u = self.displace(alone, moving)[0].squeeze(1)
        law, texts = last.law_on(scores.device), texts_so_far(input_ids, positions)
        rules = last.rules(input_ids.shape[1])
        chosen: Tensor = choose_tokens(scores, last.position(law), rules, texts, law)
        return chosen.unflatten(0, input_ids.shape)

    def generate_step_by_step(
        self: Any,
        input_ids: Tensor,
        max_length: int = 50,
        mode: str = "standard",
        *,
        attention_mask: Tensor | None = None,
        numeric_values: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The prompt and up to `max_length` *new* tokens of every row. (B, T) -> (B, T + new)

        Each is what `inference` returns for the text so far; `compatible` draws it from the
        probabilities. A row ends at its own end-of-text token, not at the first row's.
        """
        check_call(input_ids, options)
        if max_length == 0:
            return input_ids
        if mode == "compatible":
            options = WHOLE | options
        if numeric_values is not None:
            options["numeric_values"] = numeric_values
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        ids: Tensor = self.generate(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_length,
            causal_mode=mode,
            do_sample=mode == "compatible",
            return_dict_in_generate=False,
            **options,
        )
        return ids

    @torch.no_grad()
    def debug_forward_pass(self: Any, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Print what every stage yields; return (loc_S, scale_S), each (B, T, V).

        The medians and ranges are those of the *parameters*: a Cauchy itself has no mean.
        """
        check_call(input_ids, {})
        hidden = self.model(input_ids=input_ids).last_hidden_state
        print(f"hidden states  {tuple(hidden.shape)}  {spread(hidden)}")
        loc_U, scale_U = self.abduction_network(hidden)
        print(f"U  {tuple(loc_U.shape)}  loc {spread(loc_U)}  scale {spread(scale_U)}")
        loc_S, scale_S = self.action_network(loc_U, scale_U)
        print(f"S  {tuple(loc_S.shape)}  loc {spread(loc_S)}  scale {spread(scale_S)}")
        p = self.ovr_classifier(loc_S, scale_S)
        print(f"P  {tuple(p.shape)}  largest {spread(p.amax(-1))}  sum {spread(p.sum(-1))}")
        return loc_S, scale_S

    def training_step(self: Any, batch: Mapping[str, Any]) -> Tensor:
        """The loss of a batch: `input_ids`, `labels` and whatever else `forward` takes."""
        if batch.get("labels") is None:
            raise ValueError("A training batch needs labels: token ids, -100 where ignored.")
        loss: Tensor = self(**batch).loss
        return loss


def check_call(input_ids: Tensor, options: dict[str, Any]) -> None:
    if input_ids.ndim != 2:
        raise ValueError(
            f"input_ids of shape {tuple(input_ids.shape)} must be (rows, tokens); a single text is "
            "one row: input_ids[None]."
        )
    if unknown := [name for name in options if name not in OPTIONS]:
        raise TypeError(f"Unknown option {', '.join(unknown)}; there are {', '.join(OPTIONS)}.")


def noise_everywhere(noise: DecodingNoise, positions: Tensor) -> UNoise | None:
    """The noise of every position, each as if it were the last. (B, T) -> (BT, C)"""
    steps = [noise_at(noise, positions[:, : i + 1]) for i in range(positions.shape[1])]
    found = [step for step in steps if step is not None]
    if not found:
        return None

    def join(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts, dim=1).flatten(0, 1)

    has_chance = found[0].exogenous is not None
    exogenous = join([step.exogenous for step in found]) if has_chance else None
    return UNoise(join([step.values for step in found]), found[0].regime, exogenous)


def texts_so_far(input_ids: Tensor, positions: Tensor) -> list[NDArray[np.int64]]:
    """The tokens up to every position that are not padding. (B, T) -> BT times (n,)"""
    rows = zip(input_ids.cpu().numpy(), positions.tolist(), strict=True)
    return [
        row[max(end - at, 0) : end + 1] for row, places in rows for end, at in enumerate(places)
    ]


def spread(values: Tensor) -> str:
    """Median and range, in four digits."""
    values = values.float()
    return f"{values.median():.4g} [{values.min():.4g}, {values.max():.4g}]"
