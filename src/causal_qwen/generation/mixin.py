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

from causal_qwen.individuals.individual import (
    Individual,
    NoiseGains,
    first_given,
    resolve_individuals,
)
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.decision import HeadBounds, choose_pruned
from causal_qwen.modeling.value_embedding import check_values
from causal_qwen.modeling.value_space import ValueSpace, field_space, warn_if_clamped
from causal_qwen.options import MODES, NOISY_MODES, NORMALIZATIONS, check_choice

logger = logging.get_logger("transformers.causal_qwen")

DEFAULTS: dict[str, Any] = {
    "causal_mode": None,
    "noise_gain": 1.0,
    "fresh_noise_gain": None,
    "min_density": 0.0,
    "individual": None,
    "fresh_noise": None,
    "exogenous": None,
    "normalization": "softmax",
    "value_field": None,
}
INDIVIDUAL_FIELDS = ("temperature", "min_density", "fresh_noise")  # what an Individual brings
DECODING = (
    *("do_sample", "num_beams", "num_return_sequences"),
    *("is_assistant", "prompt_lookup_num_tokens"),
)
CUTS = ("top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
WARPERS = ("temperature", *CUTS)


@dataclass
class Speaker:
    """One call's decision rule: the mode, its noise, and who speaks on every row.

    Temperature, truncation and freshness are those of speakers given as seeds or as e; an
    `Individual` brings its own, and naming another in the same call is an error.
    """

    mode: str
    temperature: float = 1.0
    noise_gain: Any = 1.0  # a number, or one per row; of shared noise
    fresh_noise_gain: Any = None  # the same, of fresh noise; None is noise_gain
    min_density: float = 0.0
    fresh_noise: bool = False
    normalization: str = "softmax"
    individual: Any = None  # as the caller gave it
    exogenous: Any = None  # who draws T kappa b eps beside the individual's own noise, in "causal"
    asked: dict[str, Any] = field(default_factory=dict)  # what the call itself named
    people: list[Individual] = field(default_factory=list)  # one per row
    chance: list[Individual] | None = None  # one per row, of the exogenous noise
    shared: Tensor | None = field(default=None, repr=False)  # (B, C) noise of every position

    @property
    def has_noise(self) -> bool:
        return self.mode in NOISY_MODES and any(person.temperature > 0 for person in self.people)

    def meet(self, prompts: int, copies: int, size: int) -> None:
        """Decide who speaks on each of the prompts x copies rows."""
        if self.mode not in NOISY_MODES:
            return
        who, rows = self.individual, prompts * copies
        for gain in (self.noise_gain, self.fresh_noise_gain):
            if np.size(gain) not in (1, rows):
                raise ValueError(f"noise_gain={gain!r} must be 1 number for {rows} texts.")
        if who is None:
            who = torch.randint(2**62, (rows,)).tolist()
        self.people = resolve_individuals(
            who,
            prompts,
            copies,
            size,
            fresh=self.fresh_noise,
            min_density=self.min_density,
            temperature=self.temperature,
            explicit=self.asked,
        )
        self.fresh_noise = any(person.is_fresh for person in self.people)
        if self.exogenous is not None:
            self.chance = resolve_individuals(self.exogenous, prompts, copies, size, fresh=True)

    @property
    def gains(self) -> NoiseGains:
        return NoiseGains(self.noise_gain, self.fresh_noise_gain)

    def noise(self, position_ids: Tensor) -> Tensor:
        """T kappa t for the last position of every row. (B, T) -> (B, C)"""
        if self.shared is not None:
            return self.shared
        noise = self.gains.noise(self.people, position_ids[:, -1].tolist())
        sent = torch.from_numpy(noise).to(device=position_ids.device, dtype=torch.float32)
        if not self.fresh_noise:
            self.shared = sent
        return sent

    def exogenous_noise(self, position_ids: Tensor) -> Tensor | None:
        """T kappa eps for the last position of every row. (B, T) -> (B, C)"""
        if self.chance is None:
            return None
        noise = self.gains.exogenous(self.people, self.chance, position_ids[:, -1].tolist())
        return torch.from_numpy(noise).to(position_ids.device, torch.float32)


class Ledger:
    """The values beside the tokens of one call: what was given, and what was said.

    HF asks for the next token after it has told us the model's output, and for the next input
    after it has chosen. So a value is entered with every step, in case the token will be `<NUM>`,
    and struck out when the token is known not to be.
    """

    def __init__(self, num_token_id: int, space: ValueSpace, num_beams: int) -> None:
        self.num_token_id = num_token_id
        self.space = space
        self.num_beams = num_beams
        self.values = torch.empty(0)  # (B, T), of the running texts
        self.ids: Tensor | None = None  # (B, T) or one less, of the running texts
        self.prompt = torch.empty(0)  # (B, P)
        self.said: list[Tensor] = []  # one (B,) for every step
        self.past: int | None = None  # length of the cache that the call began with

    def open(self, ids: Tensor, values: Tensor | None) -> None:
        """Enter the prompt."""
        check_values(ids, values, self.num_token_id)
        if values is None:
            values = torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
        self.values = self.prompt = values.to(torch.float64)

    def enter(self, outputs: ModelOutput) -> None:
        """The value of the next token, should it be a number."""
        y = outputs.loc_Y[:, -1]
        if outputs.shift_Y is not None:
            y = y + outputs.shift_Y[:, -1]
        value = self.space.clamped(y).to(self.values.device)
        self.said.append(value)
        self.values = torch.cat([self.values, value.unsqueeze(-1)], dim=-1)

    def read(self, ids: Tensor, inputs: Tensor, past: int) -> Tensor | None:
        """The values of `inputs`, the part of the running texts `ids` that the model reads now."""
        size = inputs.shape[1]
        self.past = past if self.past is None else self.past
        if ids.shape[1] == self.values.shape[1]:
            self._follow(ids)
            values = self.values[:, self.values.shape[1] - size :]
        else:  # a chunk of the prompt
            start = past if self.values.shape[1] >= past + size else past - self.past
            values = self.values[:, start : start + size]
        return values.to(inputs.device) if (inputs == self.num_token_id).any() else None

    def close(self, result: ModelOutput) -> None:
        """Give the result its values, aligned with its sequences."""
        sequences = result.sequences
        is_number = sequences == self.num_token_id
        prompts, steps = self.prompt.shape[1], sequences.shape[1] - self.prompt.shape[1]
        if (beams := result.get("beam_indices")) is None:
            values = self.values
        else:
            rows = self.prompt[beams[:, 0].clamp_min(0)]
            said = torch.stack(self.said[:steps], dim=-1)  # (B beams, steps)
            chosen = said.gather(0, beams[:, :steps].clamp_min(0).long())
            values = torch.cat([rows, chosen], dim=-1)
        values = values[:, : prompts + steps].to(sequences.device).where(is_number, 0.0)
        warn_if_clamped(values)
        result["numeric_values"] = values

    def _follow(self, ids: Tensor) -> None:
        """Strike out what was no number; with beams, first see whose text each row continues.

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


class ModeProcessor(LogitsProcessor):
    """The last processor: processed loc_S -> scores whose argmax is the speaker's choice."""

    def __init__(self, speaker: Speaker, model: Any, want_scores: bool) -> None:
        self.speaker = speaker
        self.model = model
        self.want_scores = want_scores
        self.u: Any = None  # U of the last position, (B, C)
        self.shift: Tensor | None = None  # what noise adds to loc_S there, (B, V)
        self.bounds: HeadBounds | None = None

    def observe(self, outputs: ModelOutput) -> None:
        self.u = Cauchy(outputs.loc_U[:, -1], outputs.scale_U[:, -1])
        self.shift = None if outputs.shift_S is None else outputs.shift_S[:, -1]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        loc = scores if self.shift is None else scores + self.shift.to(scores.device)
        action, decision = self.model.action, self.model.decision
        threshold = decision.threshold.to(loc.device)
        if self.speaker.mode == "causal":
            margin = loc.double() - threshold.double()  # float32 would round scores together
            return _crown(margin.float(), margin.argmax(-1)) if self.want_scores else margin
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
        return _crown(s.log_sf(threshold), decision.choose(s))

    def _bounds(self, weight: Tensor) -> HeadBounds:
        """Norms of W, kept on the model for as long as W stays as it is.

        Edits through `.data` (a merged LoRA) leave no trace in the version counter, so one
        element of every row is looked at too, once per call of `generate`.
        """
        if self.bounds is None:
            version = None if weight.is_inference() else weight._version
            sample = float(weight.flatten()[:: max(weight.shape[1] - 1, 1)].double().sum())
            key = (weight.data_ptr(), version, weight.shape, weight.dtype, sample)
            cached = getattr(self.model, "_head_bounds", None)
            if cached is None or cached[0] != key:
                cached = self.model._head_bounds = (key, HeadBounds(weight))
            self.bounds = cached[1]
        return self.bounds


class CausalGenerationMixin:
    """Overrides of `GenerationMixin` that let a mode in, and nothing else."""

    config: Any
    generation_config: GenerationConfig

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self._check_reading(kwargs)
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if isinstance(ids, Tensor) and not len(ids):
            values = torch.zeros(ids.shape, dtype=torch.float64)
            is_dict = kwargs.get("return_dict_in_generate")
            return ModelOutput(sequences=ids, numeric_values=values) if is_dict else ids
        is_assisted = kwargs.get("assistant_model") is not None
        is_paged = kwargs.get("cache_implementation") == "paged"
        if is_assisted or is_paged:
            what = "assisted decoding" if is_assisted else "continuous batching"
            kwargs["causal_mode"] = _compatible_only(what, _explicit_mode(kwargs))
            if is_assisted:
                kwargs["has_assistant"] = True
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def generate_batch(self, inputs: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        self._check_reading(kwargs)
        explicit = _explicit_mode({**kwargs, "generation_config": generation_config})
        _compatible_only("continuous batching", explicit)
        kwargs.pop("causal_mode", None)
        return super().generate_batch(inputs, generation_config=generation_config, **kwargs)  # type: ignore[misc]

    def _check_reading(self, kwargs: dict[str, Any]) -> None:
        """A model that was taught values must not be handed digits without a word."""
        given = (kwargs.get(name) for name in ("numeric_values", "inputs_embeds"))
        is_given = any(value is not None for value in given)
        if self.config.encode_numbers == "value" and not is_given:
            raise ValueError(
                "This model reads numbers as values, and no numeric_values were given: make the "
                "inputs with CausalQwenProcessor, or use "
                "pipeline('text-generation', ..., pipeline_class=CausalTextGenerationPipeline)."
            )

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Resolve the mode, take our fields out of HF's sight, and send the speaker along."""
        has_assistant = kwargs.pop("has_assistant", False)
        in_person = {
            name: kwargs.get(name) for name in INDIVIDUAL_FIELDS
        }  # a config's are only defaults
        explicit = {
            name: first_given(kwargs.pop(name, None), getattr(generation_config, name, None))
            for name in DEFAULTS
        }
        saved = {name: getattr(self.generation_config, name, None) for name in DEFAULTS}
        asked = {
            name: first_given(
                kwargs.get(name),
                getattr(generation_config, name, None),
                getattr(self.generation_config, name, None),
            )
            for name in (*WARPERS, *DECODING)
        }
        named = {name: value for name, value in in_person.items() if value is not None}
        in_call = first_given(
            kwargs.get("do_sample"), getattr(generation_config, "do_sample", None)
        )
        is_assisted = asked["is_assistant"] or asked["prompt_lookup_num_tokens"] or has_assistant
        mode = resolve_mode(
            explicit["causal_mode"],
            first_given(saved["causal_mode"], self.config.inference_mode),
            do_sample=bool(asked["do_sample"] if explicit["causal_mode"] is None else in_call),
            num_beams=asked["num_beams"] or 1,
            is_assisted=bool(is_assisted),
        )
        options = {
            name: first_given(explicit[name], saved[name], DEFAULTS[name]) for name in DEFAULTS
        }
        if explicit["noise_gain"] is not None and explicit["fresh_noise_gain"] is None:
            options["fresh_noise_gain"] = explicit["noise_gain"]
        speaker = _speaker(mode, options, explicit, asked, named)

        if speaker.normalization == "ovr" and ((asked["num_beams"] or 1) > 1 or is_assisted):
            raise ValueError("normalization='ovr' runs with one beam and no assistant only.")
        if mode != "compatible":
            # what HF's validation expects of a call that may return several texts, or cuts
            # candidates: they are cut here in `standard`, too
            is_one = (asked["num_return_sequences"] or 1) == 1
            is_cut = is_one and any(asked[name] is not None for name in CUTS)
            do_sample = True if mode in NOISY_MODES or is_cut else None
            settings = {"do_sample": do_sample, "temperature": None}
            if generation_config is None:
                kwargs |= settings
            else:
                generation_config = copy.deepcopy(generation_config)
                vars(generation_config).update(settings)
                kwargs = {k: v for k, v in kwargs.items() if k not in settings}
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
        if is_assisted and model_kwargs.get("numeric_values") is not None:
            raise ValueError(
                "Assisted decoding guesses tokens before their values are known; numeric_values go "
                "with one model and no prompt lookup."
            )
        if is_assisted and self.config.num_token_id is not None:
            # its value would be known only after the guesses that follow it
            prepared.suppress_tokens = [*(prepared.suppress_tokens or []), self.config.num_token_id]
        if not is_assisted and self.config.num_token_id is not None:
            space = field_space(self.config, options["value_field"])
            beams = asked["num_beams"] or 1
            model_kwargs["ledger"] = Ledger(self.config.num_token_id, space, beams)
        return prepared, model_kwargs

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Here HF repeats the prompts for beams and copies; the ledger begins with the result."""
        ids, model_kwargs = super()._expand_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        if (ledger := model_kwargs.get("ledger")) is not None:
            ledger.open(ids, model_kwargs.pop("numeric_values", None))
        return ids, model_kwargs

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
        ledger: Ledger | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        inputs["output_scale_S"] = False
        if ledger is not None and inputs["input_ids"] is not None:
            cache = kwargs.get("past_key_values")
            past = 0 if cache is None else cache.get_seq_length()
            inputs["numeric_values"] = ledger.read(input_ids, inputs["input_ids"], past)
        if speaker is not None and speaker.speaker.has_noise:
            is_sampling = speaker.speaker.mode == "sampling"
            inputs["u_noise"] = speaker.speaker.noise(inputs["position_ids"])
            inputs["u_noise_regime"] = "location" if is_sampling else "individual"
            inputs["exogenous_noise"] = speaker.speaker.exogenous_noise(inputs["position_ids"])
        return inputs

    def _update_model_kwargs_for_generation(
        self, outputs: ModelOutput, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        if (speaker := model_kwargs.get("speaker")) is not None:
            speaker.observe(outputs)
        if (ledger := model_kwargs.get("ledger")) is not None:
            ledger.enter(outputs)
        updated: dict[str, Any] = super()._update_model_kwargs_for_generation(  # type: ignore[misc]
            outputs, model_kwargs, *args, **kwargs
        )
        return updated

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        if (follow := getattr(kwargs.get("streamer"), "follow", None)) is not None:
            follow(kwargs.get("ledger"))  # a streamer of ours tells numbers by their values
        result = super()._sample(*args, **kwargs)  # type: ignore[misc]
        mode: ModeProcessor | None = kwargs.get("speaker")
        if mode is not None and isinstance(result, ModelOutput):
            result["individual"] = mode.speaker.people or None
        return _with_values(result, kwargs.get("ledger"))

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._beam_search(*args, **kwargs)  # type: ignore[misc]
        return _with_values(result, kwargs.get("ledger"))


def _with_values(result: Any, ledger: Ledger | None) -> Any:
    if ledger is not None and isinstance(result, ModelOutput):
        ledger.close(result)
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
    check_choice("causal_mode", mode, MODES)
    if num_beams > 1 or is_assisted:
        what = f"num_beams={num_beams}" if num_beams > 1 else "assisted decoding"
        return _compatible_only(what, explicit, mode)
    if mode == "standard" and do_sample:
        if explicit == "standard":
            raise ValueError(
                "causal_mode='standard' is deterministic and contradicts do_sample=True; use "
                "causal_mode='sampling', or do_sample=False."
            )
        return "sampling"
    return mode


def _compatible_only(what: str, explicit: str | None, default: str = "standard") -> str:
    """Ways of decoding that compare logits, not individuals; said when nobody asked for it."""
    if explicit not in (None, "compatible"):
        raise ValueError(
            f"causal_mode={explicit!r} follows one individual and cannot run with {what}; use "
            "causal_mode='compatible'."
        )
    if explicit is None and default != "compatible":
        logger.warning_once(f"{what} runs in causal_mode='compatible'.")
    return "compatible"


def _speaker(
    mode: str,
    options: dict[str, Any],
    explicit: dict[str, Any],
    asked: dict[str, Any],
    named: dict[str, Any],
) -> Speaker:
    temperature = first_given(asked["temperature"], 1.0)
    if not isinstance(temperature, numbers.Real) or not 0 <= float(temperature) < math.inf:
        raise ValueError(f"temperature={temperature!r} must be a number of at least 0.")
    density = options["min_density"]
    if not isinstance(density, numbers.Real) or not 0 <= float(density) <= 1:
        raise ValueError(f"min_density={density!r} must be a number in [0, 1].")
    check_choice("normalization", options["normalization"], NORMALIZATIONS)
    if explicit["individual"] is not None and mode not in NOISY_MODES:
        raise ValueError(
            f"individual= has no part in causal_mode={mode!r}; use 'causal' or 'sampling'."
        )
    if explicit["normalization"] == "ovr" and mode != "compatible":
        raise ValueError(f"normalization='ovr' belongs to 'compatible', not to {mode!r}.")
    fresh = first_given(options["fresh_noise"], mode == "sampling")
    if not isinstance(fresh, bool):
        raise ValueError(f"fresh_noise={fresh!r} must be True or False.")
    for gain in (options["noise_gain"], first_given(options["fresh_noise_gain"], 0.0)):
        gains = np.asarray(gain)
        if gains.dtype.kind not in "iuf" or not (np.isfinite(gains) & (gains >= 0)).all():
            raise ValueError(f"noise_gain={gain!r} must be a number of at least 0.")
    if explicit["exogenous"] is not None and mode != "causal":
        raise ValueError(f"exogenous= belongs to causal_mode='causal', not to {mode!r}.")
    return Speaker(
        mode=mode,
        temperature=float(temperature),
        noise_gain=options["noise_gain"],
        fresh_noise_gain=options["fresh_noise_gain"],
        min_density=float(options["min_density"]),
        fresh_noise=bool(fresh),
        normalization=options["normalization"],
        individual=options["individual"],
        exogenous=options["exogenous"],
        asked=named,
    )


def _explicit_mode(kwargs: dict[str, Any]) -> str | None:
    mode: str | None = first_given(
        kwargs.get("causal_mode"), getattr(kwargs.get("generation_config"), "causal_mode", None)
    )
    return mode


def _is_plain(weight: Tensor) -> bool:
    """Neither sharded nor offloaded: rows can be read here and now."""
    return type(weight) in (Tensor, torch.nn.Parameter) and weight.device.type != "meta"


def _crown(scores: Tensor, chosen: Tensor) -> Tensor:
    """Let `chosen` be the argmax: no other score stays above it, and none before it ties."""
    index = chosen.unsqueeze(-1)
    best = scores.gather(-1, index)
    below = torch.nextafter(best, best.new_tensor(-torch.inf))
    return torch.where(scores >= best, below, scores).scatter(-1, index, best)


def adopt_generation_config(config: GenerationConfig) -> GenerationConfig:
    """A copy that keeps fields of our own: one made from a model config drops them on reload."""
    fields = config.to_dict()
    fields.pop("_from_model_config", None)
    return GenerationConfig(**fields)
