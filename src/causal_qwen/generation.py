"""Generation: how the four modes enter Hugging Face's `generate`.

    standard    argmax_k P_k, scale noise                what does this distribution of people do?
    sampling    location noise, then argmax_k P_k        the same after the person was moved
    causal      u = loc_U + T kappa scale_U t; argmax (W u - C)     what does this one person do?
    compatible  loc_S are the logits of plain `generate` what would Qwen do?

`forward(...).logits` is loc_S in every mode, and every other logits processor acts on it. The
mode is the *last* processor: it is given U of the last position and turns the processed loc_S
into the choice. Streamers, stopping criteria, caches and compiled forwards know nothing of it.
"""

from __future__ import annotations

import copy
import math
import numbers
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.utils import ModelOutput, logging

from causal_qwen.cauchy import Cauchy
from causal_qwen.config import INFERENCE_MODES
from causal_qwen.decision import HeadBounds, choose_pruned
from causal_qwen.individual import check_noise, draw_noise, row_seeds, to_cauchy

logger = logging.get_logger("transformers.causal_qwen")

DEFAULTS: dict[str, Any] = {
    "causal_mode": None,
    "noise_gain": 1.0,
    "fresh_noise_gain": None,
    "min_density": 0.0,
    "individual": None,
    "fresh_noise": None,
    "normalization": "softmax",
}
NOISY = ("sampling", "causal")
WARPERS = (
    *("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff"),
)


@dataclass
class Speaker:
    """One call's decision rule: the mode, its noise, and who speaks on every row."""

    mode: str
    temperature: float = 1.0
    noise_gain: Any = 1.0  # a number, or one per row
    min_density: float = 0.0
    fresh_noise: bool = False
    normalization: str = "softmax"
    individual: Any = None  # as the caller gave it
    seeds: list[int] | None = None  # one per row, unless the caller gave the noise itself
    given: Tensor | None = None  # (B, C) noise given by the caller
    shared: Tensor | None = field(default=None, repr=False)  # (B, C) noise of every position

    @property
    def has_noise(self) -> bool:
        return self.mode in NOISY and self.temperature > 0

    def meet(self, prompts: int, copies: int, size: int) -> None:
        """Decide who speaks on each of the prompts x copies rows."""
        if self.mode not in NOISY:
            return
        who, rows = self.individual, prompts * copies
        if who is None:
            who = torch.randint(2**62, (rows,)).tolist()
        if isinstance(who, numbers.Integral):
            who = int(who)
        if isinstance(who, int) or all(isinstance(seed, numbers.Integral) for seed in who):
            self.seeds = row_seeds(who, prompts, copies)
            return
        noise = to_cauchy(check_noise(who, size), self.min_density)
        noise = np.atleast_2d(noise)
        if len(noise) not in (1, prompts, rows):
            raise ValueError(
                f"{len(noise)} individuals were given for {rows} texts; "
                f"give 1, {prompts} or {rows}."
            )
        self.given = torch.from_numpy(noise.repeat(rows // len(noise), axis=0))

    def noise(self, position_ids: Tensor, size: int) -> Tensor:
        """T kappa t for the last position of every row. (B, T) -> (B, C)"""
        device = position_ids.device
        if self.shared is not None:
            return self.shared
        if self.given is not None:
            noise = self.given
        else:
            seeds = self.seeds or []
            places = position_ids[:, -1].tolist() if self.fresh_noise else [0] * len(seeds)
            e = [draw_noise(s, size, p) for s, p in zip(seeds, places, strict=True)]
            noise = torch.from_numpy(to_cauchy(np.stack(e), self.min_density))
        gain = torch.as_tensor(self.noise_gain, dtype=torch.float64).reshape(-1, 1)
        noise = (noise * (self.temperature * gain)).to(device=device, dtype=torch.float32)
        if not self.fresh_noise:
            self.shared = noise
        return noise


class ModeProcessor(LogitsProcessor):
    """The last processor: processed loc_S -> scores whose argmax is the speaker's choice."""

    def __init__(self, speaker: Speaker, model: Any, want_scores: bool) -> None:
        self.speaker = speaker
        self.model = model
        self.want_scores = want_scores
        self.u: Any = None  # U of the last position, (B, C)
        self.shift: Tensor | None = None  # what noise adds to loc_S there, (B, V)

    def observe(self, outputs: ModelOutput) -> None:
        self.u = Cauchy(outputs.loc_U[:, -1], outputs.scale_U[:, -1])
        self.shift = None if outputs.shift_S is None else outputs.shift_S[:, -1]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        loc = scores if self.shift is None else scores + self.shift.to(scores.device)
        action, decision = self.model.action, self.model.decision
        threshold = decision.threshold.to(loc.device)
        if self.speaker.mode == "causal":
            return loc - threshold
        u = self.u if self.speaker.mode == "sampling" else action.widen(self.u)
        scale = u.scale.to(loc.device)
        if self.speaker.mode == "compatible":
            s = Cauchy(loc, action.score_scale(u.scale, self.model.lm_head).to(loc.device))
            return decision.log_normalized(s)
        weight = self.model.lm_head.weight
        if not self.want_scores and _is_plain(weight):
            bounds = self._bounds(weight)
            chosen = torch.tensor(
                [
                    choose_pruned(row, row_scale, threshold, action.decision_noise, weight, bounds)
                    for row, row_scale in zip(loc, scale, strict=True)
                ],
                device=loc.device,
            )
            return torch.full_like(loc, -torch.inf).scatter_(-1, chosen.unsqueeze(-1), 0.0)
        s = Cauchy(loc, action.score_scale(u.scale, self.model.lm_head).to(loc.device))
        return _crown(s.log_exceedance(threshold), decision.choose(s))

    def _bounds(self, weight: Tensor) -> HeadBounds:
        """Norms of W, computed once for as long as W stays as it is."""
        key = (weight.data_ptr(), weight._version, weight.shape, weight.dtype)
        cached = getattr(self.model, "_head_bounds", None)
        if cached is None or cached[0] != key:
            cached = self.model._head_bounds = (key, HeadBounds.of(weight))
        bounds: HeadBounds = cached[1]
        return bounds


class CausalGenerationMixin:
    """Overrides of `GenerationMixin` that let a mode in, and nothing else."""

    config: Any
    generation_config: GenerationConfig

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        is_assisted = kwargs.get("assistant_model") is not None
        is_paged = kwargs.get("cache_implementation") == "paged"
        if (is_assisted or is_paged) and _explicit_mode(kwargs) is None:
            logger.warning_once(
                "Assisted and continuously batched decoding run in causal_mode='compatible'."
            )
            kwargs["causal_mode"] = "compatible"
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def generate_batch(self, inputs: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        explicit = _explicit_mode({**kwargs, "generation_config": generation_config})
        if explicit not in (None, "compatible"):
            raise ValueError(
                f"Continuous batching chooses by logits alone and cannot run "
                f"causal_mode={explicit!r}; use 'compatible', or generate()."
            )
        kwargs.pop("causal_mode", None)
        return super().generate_batch(inputs, generation_config=generation_config, **kwargs)  # type: ignore[misc]

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Resolve the mode, take our fields out of HF's sight, and send the speaker along."""
        explicit = {
            name: _first(kwargs.pop(name, None), getattr(generation_config, name, None))
            for name in DEFAULTS
        }
        saved = {name: getattr(self.generation_config, name, None) for name in DEFAULTS}
        asked = {
            name: _first(
                kwargs.get(name),
                getattr(generation_config, name, None),
                getattr(self.generation_config, name, None),
            )
            for name in (*WARPERS, "do_sample", "num_beams", "is_assistant")
        }
        is_assisted = asked["is_assistant"] or _first(
            kwargs.get("prompt_lookup_num_tokens"),
            getattr(generation_config, "prompt_lookup_num_tokens", None),
        )
        mode = resolve_mode(
            explicit["causal_mode"],
            _first(saved["causal_mode"], self.config.inference_mode),
            do_sample=bool(asked["do_sample"]),
            num_beams=asked["num_beams"] or 1,
            is_assisted=bool(is_assisted),
        )
        options = {name: _first(explicit[name], saved[name], DEFAULTS[name]) for name in DEFAULTS}
        if explicit["noise_gain"] is not None and explicit["fresh_noise_gain"] is None:
            options["fresh_noise_gain"] = explicit["noise_gain"]
        speaker = _speaker(mode, options, explicit, asked)

        if mode != "compatible":
            kwargs["do_sample"] = True if mode in NOISY else None  # what HF's validation expects
            kwargs.pop("temperature", None)
        prepared, model_kwargs = super()._prepare_generation_config(  # type: ignore[misc]
            generation_config, **kwargs
        )
        for name in DEFAULTS:
            if hasattr(prepared, name):
                delattr(prepared, name)
        prepared.causal_mode = mode
        if mode != "compatible":
            # The speaker chooses; top-k, top-p and their kin cut the candidates when asked for.
            prepared.do_sample = False
            prepared.temperature = 1.0
            prepared.top_k = asked["top_k"] or 0
            model_kwargs["speaker"] = speaker
        elif speaker.normalization == "ovr":
            model_kwargs["speaker"] = speaker
        return prepared, model_kwargs

    def _get_logits_processor(
        self,
        generation_config: GenerationConfig,
        input_ids_seq_length: int | None = None,
        encoder_input_ids: Tensor | None = None,
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> LogitsProcessorList:
        kwargs |= {
            "input_ids_seq_length": input_ids_seq_length,
            "encoder_input_ids": encoder_input_ids,
            "model_kwargs": model_kwargs,
        }
        speaker: Speaker | None = (model_kwargs or {}).get("speaker")
        build = super()._get_logits_processor  # type: ignore[misc]
        if speaker is None:
            return build(generation_config, **kwargs)

        prompts = 1 if encoder_input_ids is None else encoder_input_ids.shape[0]
        speaker.meet(prompts, generation_config.num_return_sequences or 1, self.config.causal_size)
        settings = copy.copy(generation_config)
        settings.do_sample = speaker.mode != "compatible"
        processors = build(settings, **kwargs)
        mode = ModeProcessor(speaker, self, bool(generation_config.output_scores))
        model_kwargs["speaker"] = mode  # type: ignore[index]
        processors.append(mode)
        if speaker.mode == "compatible" and generation_config.do_sample:
            warpers = {name: getattr(generation_config, name) for name in WARPERS}
            processors += build(GenerationConfig(do_sample=True, **warpers))
        return processors

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        inputs_embeds: Tensor | None = None,
        speaker: ModeProcessor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        inputs["output_scale_S"] = False
        if speaker is not None and speaker.speaker.has_noise:
            is_sampling = speaker.speaker.mode == "sampling"
            inputs["u_noise"] = speaker.speaker.noise(
                inputs["position_ids"], self.config.causal_size
            )
            inputs["u_noise_regime"] = "location" if is_sampling else "individual"
        return inputs

    def _update_model_kwargs_for_generation(
        self, outputs: ModelOutput, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        if (speaker := model_kwargs.get("speaker")) is not None:
            speaker.observe(outputs)
        updated: dict[str, Any] = super()._update_model_kwargs_for_generation(  # type: ignore[misc]
            outputs, model_kwargs, *args, **kwargs
        )
        return updated

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._sample(*args, **kwargs)  # type: ignore[misc]
        mode: ModeProcessor | None = kwargs.get("speaker")
        if mode is not None and isinstance(result, ModelOutput):
            result["individual"] = mode.speaker.seeds
        return result


def resolve_mode(
    explicit: str | None,
    default: str,
    *,
    do_sample: bool = False,
    num_beams: int = 1,
    is_assisted: bool = False,
) -> str:
    """Which mode a call runs in, given what was asked and what is configured."""
    mode = default if explicit is None else explicit
    if mode not in INFERENCE_MODES:
        raise ValueError(
            f"causal_mode={mode!r} is unknown; choose one of {', '.join(INFERENCE_MODES)}."
        )
    if num_beams > 1 or is_assisted:
        what = f"num_beams={num_beams}" if num_beams > 1 else "assisted decoding"
        if explicit not in (None, "compatible"):
            raise ValueError(
                f"causal_mode={mode!r} follows one individual and cannot run with {what}; use "
                "causal_mode='compatible', or one beam."
            )
        if mode != "compatible":
            logger.warning_once(f"{what} runs in causal_mode='compatible'.")
        return "compatible"
    if mode == "standard" and do_sample:
        if explicit == "standard":
            raise ValueError(
                "causal_mode='standard' is deterministic and contradicts do_sample=True; use "
                "causal_mode='sampling', or do_sample=False."
            )
        return "sampling"
    return mode


def _speaker(
    mode: str, options: dict[str, Any], explicit: dict[str, Any], asked: dict[str, Any]
) -> Speaker:
    temperature = _first(asked["temperature"], 1.0)
    if not isinstance(temperature, (int, float)) or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature!r} must be a number of at least 0.")
    if not 0 <= options["min_density"] <= 1:
        raise ValueError(f"min_density={options['min_density']} is outside [0, 1].")
    if options["normalization"] not in ("softmax", "ovr"):
        raise ValueError(
            f"normalization={options['normalization']!r} is unknown; choose softmax or ovr."
        )
    if explicit["individual"] is not None and mode not in NOISY:
        raise ValueError(
            f"individual= has no part in causal_mode={mode!r}; use 'causal' or 'sampling'."
        )
    if explicit["normalization"] == "ovr" and mode != "compatible":
        raise ValueError(f"normalization='ovr' belongs to 'compatible', not to {mode!r}.")
    fresh = _first(options["fresh_noise"], mode == "sampling")
    gain = _first(options["fresh_noise_gain"] if fresh else None, options["noise_gain"])
    if not np.all(np.isfinite(gain)) or np.any(np.asarray(gain) < 0):
        raise ValueError(f"noise_gain={gain!r} must be a number of at least 0.")
    return Speaker(
        mode=mode,
        temperature=float(temperature),
        noise_gain=gain,
        min_density=float(options["min_density"]),
        fresh_noise=bool(fresh),
        normalization=options["normalization"],
        individual=options["individual"],
    )


def _explicit_mode(kwargs: dict[str, Any]) -> str | None:
    mode: str | None = _first(
        kwargs.get("causal_mode"), getattr(kwargs.get("generation_config"), "causal_mode", None)
    )
    return mode


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def _is_plain(weight: Tensor) -> bool:
    """Neither sharded nor offloaded: rows can be read here and now."""
    return type(weight) in (Tensor, torch.nn.Parameter) and weight.device.type != "meta"


def _crown(scores: Tensor, chosen: Tensor) -> Tensor:
    """Let `chosen` be the argmax: no other score stays above it, and none before it ties."""
    index = chosen.unsqueeze(-1)
    best = scores.gather(-1, index)
    below = torch.nextafter(best, best.new_tensor(-torch.inf))
    return torch.where(scores >= best, below, scores).scatter(-1, index, best)
