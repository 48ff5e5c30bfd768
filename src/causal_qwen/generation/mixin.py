"""Mixin: the four modes inside Hugging Face's `generate`.

Every override of a private `GenerationMixin` method is in this file; tests/contract/test_hooks.py
names the hook that an upgrade of transformers breaks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationConfig, LogitsProcessorList, MinPLogitsWarper
from transformers.utils import ModelOutput, logging

from causal_qwen.decoding.noise import RANDOM_SEEDS, DecodingNoise, UNoise
from causal_qwen.decoding.settings import DEFAULTS, DecodingSettings, first_given, resolve_settings
from causal_qwen.generation.logits import DecisionProcessor, ValueTracker, to_tensors
from causal_qwen.modeling.value_space import field_space
from causal_qwen.options import NOISY_MODES

logger = logging.get_logger("transformers.causal_qwen")

CUTS = ("top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
WARPERS = ("temperature", *CUTS)
NONE = (None,)
NEUTRAL = {  # values that HF saves without do_sample=True
    "temperature": (None, 1.0),
    "top_k": (None, 50),
    **dict.fromkeys(("top_p", "typical_p"), (None, 1.0)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (None, 0.0)),
}
OWN_KWARGS = ("settings", "tracker", "decision_processor")
DECODING = ("num_beams", "num_return_sequences", "is_assistant", "prompt_lookup_num_tokens")


class CausalGenerationMixin:
    """Overrides of `GenerationMixin` that let a mode decide, and nothing else."""

    config: Any
    generation_config: GenerationConfig

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self._check_values_given(kwargs)
        if kwargs.get("assistant_model") is not None:
            kwargs["compatible_only"] = "assisted decoding"
        elif kwargs.get("cache_implementation") == "paged":
            kwargs["causal_mode"] = self._compatible("continuous batching", kwargs)
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def generate_batch(self, inputs: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        self._check_values_given(kwargs)
        self._compatible("continuous batching", {**kwargs, "generation_config": generation_config})
        kwargs.pop("causal_mode", None)
        generation_config = copy.deepcopy(generation_config or self.generation_config)
        generation_config.causal_mode = "compatible"
        return super().generate_batch(inputs, generation_config=generation_config, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(
        self, generation_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """The manager samples from loc_S alone: a config that names another mode is refused."""
        used = self.generation_config if generation_config is None else generation_config
        self._check_values_given({})
        self._compatible("continuous batching", {"generation_config": used})
        return super().init_continuous_batching(generation_config, *args, **kwargs)  # type: ignore[misc]

    def resolve_settings(
        self,
        generation_config: GenerationConfig | None = None,
        compatible_only: str = "",
        **call: Any,
    ) -> DecodingSettings:
        """The settings that `generate` would decide by, for the same arguments."""
        settings = resolve_settings(
            call,
            vars(self.generation_config),
            config=None if generation_config is None else vars(generation_config),
            default_mode=self.config.inference_mode,
            only_compatible=compatible_only,
        )
        given = {} if generation_config is None else vars(generation_config)
        explicit = first_given(call.get("causal_mode"), given.get("causal_mode"))
        if compatible_only and explicit is None and self._default_mode() != "compatible":
            logger.warning_once(f"{compatible_only} runs in causal_mode='compatible'.")
        return settings

    def decoding_noise(
        self, settings: DecodingSettings, prompts: int = 1, copies: int = 1
    ) -> DecodingNoise:
        """The noise of a call; individuals that it does not name are drawn from torch's state."""
        return DecodingNoise(settings, prompts, copies, self.config.causal_size, _draw_seeds)

    def _default_mode(self) -> str:
        saved = vars(self.generation_config).get("causal_mode")
        return str(first_given(saved, self.config.inference_mode))

    def _compatible(self, what: str, kwargs: dict[str, Any]) -> str:
        call = {"causal_mode": kwargs.get("causal_mode")}
        return self.resolve_settings(kwargs.get("generation_config"), what, **call).mode

    def _check_values_given(self, kwargs: dict[str, Any]) -> None:
        """A model trained on values must not read digits without notice."""
        given = (kwargs.get(name) for name in ("numeric_values", "inputs_embeds"))
        is_given = any(value is not None for value in given)
        if self.config.encode_numbers == "value" and not is_given:
            raise ValueError(
                "This model reads numbers as values, and no numeric_values were given: make the "
                "inputs with CausalQwenProcessor, or use causal_qwen.open(...).generate."
            )

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Resolve the mode, and pass HF a config without our fields, in which nothing is drawn."""
        sources = (
            kwargs,
            {} if generation_config is None else vars(generation_config),
            vars(self.generation_config),
        )
        asked = {
            name: first_given(*(one.get(name) for one in sources)) for name in (*CUTS, *DECODING)
        }
        beams = asked["num_beams"] or 1
        compatible_only = kwargs.pop("compatible_only", "")
        if asked["is_assistant"] or asked["prompt_lookup_num_tokens"]:
            compatible_only = "assisted decoding"
        is_assisted = bool(compatible_only)
        if beams > 1:
            compatible_only = f"num_beams={beams}"
        settings = self.resolve_settings(generation_config, compatible_only, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in DEFAULTS}
        is_ovr = settings.normalization == "ovr"
        if is_ovr and compatible_only:
            raise ValueError("normalization='ovr' runs with one beam and no assistant only.")
        if settings.mode != "compatible":
            generation_config, kwargs = _without_softmax(generation_config, kwargs, settings, asked)
        prepared, model_kwargs = super()._prepare_generation_config(  # type: ignore[misc]
            generation_config, **kwargs
        )
        for name in DEFAULTS:
            if hasattr(prepared, name):
                delattr(prepared, name)
        prepared.causal_mode = settings.mode
        if settings.mode != "compatible":
            # the mode chooses; top-k, top-p and their kin restrict the candidates if asked for
            prepared.do_sample = False
            prepared.temperature = 1.0
            prepared.top_k = asked["top_k"] or 0
        if not is_assisted:  # an assistant would receive them, too
            model_kwargs["settings"] = settings
        self._prepare_values(prepared, model_kwargs, settings, beams, is_assisted)
        return prepared, model_kwargs

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """HF reads the names that it accepts from `prepare_inputs_for_generation`, which PEFT's
        prompt tuning replaces."""
        known = {name: one for name, one in model_kwargs.items() if name not in OWN_KWARGS}
        super()._validate_model_kwargs(known)  # type: ignore[misc]

    def _prepare_values(
        self,
        prepared: GenerationConfig,
        model_kwargs: dict[str, Any],
        settings: DecodingSettings,
        beams: int,
        is_assisted: bool,
    ) -> None:
        num_token_id = self.config.num_token_id
        if is_assisted and model_kwargs.get("numeric_values") is not None:
            raise ValueError(
                "Assisted decoding guesses tokens before their values are known; numeric_values go "
                "with one model and no prompt lookup."
            )
        if num_token_id is None:
            return
        if is_assisted:  # its value would be known only after the guesses that follow it
            prepared.suppress_tokens = [*(prepared.suppress_tokens or []), num_token_id]
        else:
            space = field_space(self.config, settings.value_field)
            model_kwargs["tracker"] = ValueTracker(num_token_id, space, beams)

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """HF repeats the prompts for beams and copies here; the values start from the result."""
        ids, model_kwargs = super()._expand_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        if (tracker := model_kwargs.get("tracker")) is not None:
            tracker.start(ids, model_kwargs.pop("numeric_values", None))
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
        settings: DecodingSettings | None = (model_kwargs or {}).get("settings")
        build = super()._get_logits_processor  # type: ignore[misc]
        is_compatible = settings is None or settings.mode == "compatible"
        if settings is None or (is_compatible and settings.normalization != "ovr"):
            return build(generation_config, **kwargs)

        prompts = 1 if encoder_input_ids is None else encoder_input_ids.shape[0]
        copies = generation_config.num_return_sequences or 1
        noise = self.decoding_noise(settings, prompts, copies)
        restricting = copy.copy(generation_config)
        restricting.do_sample = not is_compatible
        processors = build(restricting, **kwargs)
        min_p, is_ours = None, not is_compatible and generation_config.min_p is not None
        if is_ours and isinstance(processors[-1], MinPLogitsWarper):  # not one that a user passes
            min_p = processors.pop().min_p  # the choice begins with it, and then reads few tokens
        last = DecisionProcessor(self, noise, bool(generation_config.output_scores), min_p)  # type: ignore[arg-type]
        model_kwargs["decision_processor"] = last  # type: ignore[index]
        processors.append(last)
        if is_compatible and generation_config.do_sample:
            processors += self.warpers(
                **{name: getattr(generation_config, name) for name in WARPERS}
            )
        return processors

    def prepare_row(
        self, input_ids: Tensor, **options: Any
    ) -> tuple[LogitsProcessorList, dict[str, Any], bool]:
        """For a decoding loop of one's own: a prompt (1, T) and options of `generate` -> the
        processors of its steps, of which the last is the mode's choice; what `generate` keeps
        (`settings`, `decision_processor`, `tracker`); whether softmax draws."""
        prepared, model_kwargs = self._prepare_generation_config(None, **options)
        self._prepare_special_tokens(prepared, True, device=input_ids.device)  # type: ignore[attr-defined]
        processors = self._get_logits_processor(
            prepared,
            input_ids_seq_length=input_ids.shape[1],
            encoder_input_ids=input_ids,
            device=input_ids.device,
            model_kwargs=model_kwargs,
        )
        return processors, model_kwargs, prepared.do_sample

    def warpers(self, **options: Any) -> LogitsProcessorList:
        """HF's processors for temperature, top-k, top-p and their kin alone."""
        return super()._get_logits_processor(  # type: ignore[misc]
            GenerationConfig(do_sample=True, **options)
        )

    def positions_of(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Positions among the tokens that are not padding, as `generate` counts them. (B, T)"""
        positions: Tensor = self._prepare_position_ids_for_generation(  # type: ignore[attr-defined]
            input_ids, {"attention_mask": attention_mask}
        )
        return positions.expand_as(input_ids)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        inputs_embeds: Tensor | None = None,
        settings: DecodingSettings | None = None,
        decision_processor: DecisionProcessor | None = None,
        tracker: ValueTracker | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        inputs["output_scale_S"] = False
        if tracker is not None and inputs["input_ids"] is not None:
            cache = kwargs.get("past_key_values")
            past = 0 if cache is None else cache.get_seq_length()
            inputs["numeric_values"] = tracker.values_of(input_ids, inputs["input_ids"], past)
        if decision_processor is not None:
            decision_processor.positions = inputs["position_ids"][:, -1].tolist()
            inputs["u_noise"] = noise_at(decision_processor.noise, inputs["position_ids"])
            inputs["output_shift_S"] = not decision_processor.settings.min_p
        return inputs

    def _update_model_kwargs_for_generation(
        self, outputs: ModelOutput, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        if (processor := model_kwargs.get("decision_processor")) is not None:
            processor.observe(outputs)
        if (tracker := model_kwargs.get("tracker")) is not None:
            tracker.append(outputs)
        updated: dict[str, Any] = super()._update_model_kwargs_for_generation(  # type: ignore[misc]
            outputs, model_kwargs, *args, **kwargs
        )
        return updated

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        return _complete(super()._sample(*args, **kwargs), kwargs)  # type: ignore[misc]

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        return _complete(super()._beam_search(*args, **kwargs), kwargs)  # type: ignore[misc]


def _draw_seeds(rows: int) -> list[int]:
    seeds: list[int] = torch.randint(RANDOM_SEEDS, (rows,)).tolist()
    return seeds


def noise_at(noise: DecodingNoise, position_ids: Tensor) -> UNoise | None:
    """The noise of the last position of every row, as tensors. (B, T) -> (B, C)"""
    at = noise.at(position_ids[:, -1].tolist())
    return None if at is None else to_tensors(at, position_ids)


def _without_softmax(
    generation_config: GenerationConfig | None,
    kwargs: dict[str, Any],
    settings: DecodingSettings,
    asked: dict[str, Any],
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """The arguments with which HF's validation accepts several texts per prompt, or cuts."""
    is_one = (asked["num_return_sequences"] or 1) == 1
    is_cut = is_one and any(asked[name] is not None for name in CUTS)
    neutral: dict[str, Any] = {
        "do_sample": True if settings.is_noisy or is_cut else None,
        "temperature": None,
    }
    if settings.is_noisy:
        neutral["min_p"] = settings.min_p  # which `causal_min_p` may have set
    if generation_config is None:
        return None, kwargs | neutral
    generation_config = copy.deepcopy(generation_config)
    vars(generation_config).update(neutral)
    return generation_config, {k: v for k, v in kwargs.items() if k not in neutral}


def _complete(result: Any, model_kwargs: dict[str, Any]) -> Any:
    """Add settings, individuals and values to a result."""
    if not isinstance(result, ModelOutput):
        return result
    result["settings"] = model_kwargs.get("settings")
    if (processor := model_kwargs.get("decision_processor")) is not None:
        result["individual"] = processor.noise.individuals or None
    if (tracker := model_kwargs.get("tracker")) is not None:
        tracker.finish(result)
    return result


@contextlib.contextmanager
def accepted_by_save(model: Any) -> Iterator[None]:
    """A generation config that HF saves: it accepts a temperature beside do_sample=True only.

    In a noisy mode that changes nothing else: `causal` ignores do_sample, and `sampling` means it.
    In the others it would be another mode, so the temperature is left out, with a warning.
    """
    config, mode = model.generation_config, model._default_mode()
    given = {name: getattr(config, name, None) for name in WARPERS}
    refused = {name: value for name, value in given.items() if value not in NEUTRAL.get(name, NONE)}
    if refused and not config.do_sample:
        model.generation_config = saved = copy.deepcopy(config)
        if mode in NOISY_MODES:
            saved.do_sample = True
        else:
            logger.warning(
                f"{', '.join(f'{name}={value}' for name, value in refused.items())} not saved with "
                f"the generation config: mode {mode!r} draws nothing; set its do_sample=True, or "
                "its causal_mode to 'causal' or 'sampling', to keep it."
            )
            vars(saved).update(dict.fromkeys(refused))
    try:
        yield
    finally:
        model.generation_config = config


def adopt_generation_config(config: GenerationConfig) -> GenerationConfig:
    """A copy that keeps fields of our own: one made from a model config drops them on reload."""
    fields = config.to_dict()
    fields.pop("_from_model_config", None)
    return GenerationConfig(**fields)
