"""Settings of a call of `generate`, resolved once for both engines: call > saved > default.

    call    what the call itself names; None counts as not named
    saved   generation_config.json, or a model's `generation_config`
    config  `inference_mode` of config.json

A saved `do_sample: true` turns the default mode `standard` into `sampling`. A call that names an
individual and neither a mode nor `do_sample=True` means `causal`.
"""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from causal_qwen.individuals import OWN_FIELDS, SEEDS, Individual
from causal_qwen.options import MODES, NOISY_MODES, NORMALIZATIONS, check_choice

# Our own fields of a generation config, and their defaults.
DEFAULTS: dict[str, Any] = {
    "causal_mode": None,
    "noise_gain": 1.0,
    "fresh_noise_gain": None,
    "min_density": 0.0,
    "persistence": 1.0,
    "causal_min_p": 0.0,
    "whole_words": False,
    "avoid_repeats": 0,
    "individual": None,
    "exogenous": None,
    "normalization": "softmax",
    "value_field": None,
}
# Hugging Face's fields that the modes share; temperature acts on noise outside `compatible`.
SOFTMAX = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
NUMBERS: dict[str, tuple[Any, ...]] = {  # least, most, kind
    **dict.fromkeys(("temperature", "repetition_penalty", "noise_gain", "fresh_noise_gain"), (0,)),
    **dict.fromkeys(("top_p", "min_p", "min_density", "persistence"), (0, 1)),
    **dict.fromkeys(("top_k", "avoid_repeats"), (0, math.inf, int)),
}
CHOICES = {"whole_words": (True, False), "normalization": NORMALIZATIONS}
HF_TOP_K = 50  # Hugging Face's top_k of softmax sampling when none is named
# T kappa, and T of softmax. |t| is at most 3e15: in float32, 1e7 is left for scale_U times |W|.
MOST_NOISE = 1e16
SOFTMAX_CALL = ("temperature", "top_k", "top_p", "min_p")  # each asks for softmax draws


@dataclass(frozen=True)
class DecodingSettings:
    """How a call decides, everything resolved."""

    mode: str = "standard"
    do_sample: bool = False  # softmax draws, in `compatible` only
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    whole_words: bool = False  # a word once begun ends as the likeliest token ends it
    avoid_repeats: int = 0  # n: no n tokens of the text are said again; 0 is off
    noise_gain: float = 1.0  # kappa of shared noise
    fresh_noise_gain: float | None = None  # the same of fresh noise; None is noise_gain
    min_density: float = 0.0
    persistence: float = 1.0  # share of positions with the individual's own noise
    normalization: str = "softmax"
    value_field: str | None = None
    individual: Any = None  # seeds, noise e, or Individuals, as given
    exogenous: Any = None  # the same, of the exogenous noise of `causal`
    named: Mapping[str, Any] = field(default_factory=dict, repr=False)  # by the call itself

    @property
    def is_noisy(self) -> bool:
        return self.mode in NOISY_MODES

    @property
    def is_fresh(self) -> bool:
        """Noise of its own at every position."""
        return self.persistence == 0

    def to_dict(self, individual: Individual | None = None) -> dict[str, Any]:
        """For JSON: what replays a text of `individual`, who has temperature, truncation and
        persistence of its own."""
        record = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in ("named", "individual", "exogenous")
        }
        if individual is not None:
            record |= {name: getattr(individual, name) for name in OWN_FIELDS}
            record |= {"individual": individual.seed, "persistence": individual.own_share}
        return record


def resolve_settings(
    call: Mapping[str, Any],
    saved: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    default_mode: str = "standard",
    has_heads: bool = True,
    only_compatible: str = "",
) -> DecodingSettings:
    """Settings of a call.

    `config` is a generation config given to the call: it ranks before `saved`, but unlike `call` it
    does not contradict an `Individual`. Without heads (plain Qwen2) only `compatible` runs;
    `only_compatible` names a way of decoding that allows no other mode, such as beams.
    """
    config = config or {}
    explicit = {
        name: first_given(call.get(name), config.get(name)) for name in (*DEFAULTS, *SOFTMAX)
    }
    named_mode = explicit["causal_mode"]
    is_plain_call = named_mode is None and not explicit["do_sample"] and not only_compatible
    if explicit["individual"] is not None and is_plain_call and has_heads:
        named_mode = "causal"
    mode = resolve_mode(
        named_mode,
        first_given(saved.get("causal_mode"), default_mode),
        do_sample=explicit["do_sample"],
        saved_do_sample=saved.get("do_sample"),
        has_heads=has_heads,
        only_compatible=only_compatible,
    )
    found = {
        name: first_given(value, saved.get(name), DEFAULTS.get(name))
        for name, value in explicit.items()
    }
    if mode == "sampling":
        found["persistence"] = first_given(explicit["persistence"], 0.0)
    if explicit["noise_gain"] is not None and explicit["fresh_noise_gain"] is None:
        found["fresh_noise_gain"] = explicit["noise_gain"]
    default = _number("causal_min_p", found["causal_min_p"], 0, 1)
    if mode in NOISY_MODES:
        named = first_given(explicit["min_p"], explicit["causal_min_p"])
        found["min_p"] = first_given(named, found["min_p"], default)
    if mode != "causal":  # elsewhere a call must ask for it: `sampling` is softmax with min-p
        asked = explicit if mode == "sampling" else call
        found["avoid_repeats"] = first_given(asked.get("avoid_repeats"), 0)
        found["whole_words"] = first_given(asked.get("whole_words"), False)
    do_sample = mode == "compatible" and bool(found["do_sample"])
    if do_sample and found["top_k"] is None:
        found["top_k"] = HF_TOP_K
    for name, limits in NUMBERS.items():
        found[name] = _number(name, found[name], *limits)
    for name, choices in CHOICES.items():
        check_choice(name, found[name], choices)
    own = {one.name for one in fields(DecodingSettings)}
    given = {n: value for n, value in found.items() if n in own and value is not None}
    named = {name: call[name] for name in OWN_FIELDS if call.get(name) is not None}
    settings = DecodingSettings(**{**given, "mode": mode, "do_sample": do_sample, "named": named})
    if do_sample:
        check_amplitude(settings.temperature)
    _check_part(mode, explicit)
    for name in ("whole_words", "avoid_repeats"):
        if getattr(settings, name) and mode not in NOISY_MODES:
            raise ValueError(f"{name}= has no effect in mode {mode!r}; use 'causal' or 'sampling'.")
    return settings


def resolve_mode(
    explicit: str | None,
    default: str,
    *,
    do_sample: bool | None = None,
    saved_do_sample: bool | None = None,
    has_heads: bool = True,
    only_compatible: str = "",
) -> str:
    """The mode of a call, from what it names and what is configured."""
    mode = check_choice("causal_mode", first_given(explicit, default), MODES)
    if not has_heads or only_compatible:
        if explicit not in (None, "compatible"):
            raise ValueError(
                f"mode {explicit!r} follows one individual and cannot run with "
                f"{only_compatible or 'a plain Qwen2 checkpoint, which has no heads'}; use "
                "causal_mode='compatible'."
            )
        return "compatible"
    if mode == "standard":
        if explicit is None and first_given(do_sample, saved_do_sample):
            return "sampling"
        if explicit is not None and do_sample:
            raise ValueError(
                "mode 'standard' is deterministic and contradicts do_sample=True; use 'sampling', "
                "or do_sample=False."
            )
    return mode


def _check_part(mode: str, explicit: Mapping[str, Any]) -> None:
    """Refuse options that have no effect in the mode."""
    if explicit["individual"] is not None and mode not in NOISY_MODES:
        raise ValueError(f"individual= has no effect in mode {mode!r}; use 'causal' or 'sampling'.")
    if explicit["exogenous"] is not None and mode != "causal":
        raise ValueError(f"exogenous= has no effect in mode {mode!r}; use 'causal'.")
    if explicit["normalization"] == "ovr" and mode != "compatible":
        raise ValueError(f"normalization='ovr' has no effect in mode {mode!r}; use 'compatible'.")


def check_amplitude(temperature: float, gain: float = 1.0) -> float:
    """T kappa, unless it is so large that scores would overflow."""
    amplitude = float(temperature) * float(gain)
    if amplitude > MOST_NOISE:
        by = f" with a noise gain of {gain:g}" if gain != 1 else ""
        raise ValueError(
            f"temperature={temperature:g} is too large{by}: scores would overflow; use at most "
            f"1e{math.floor(math.log10(MOST_NOISE / gain))}."
        )
    return amplitude


def _number(name: str, value: Any, least: float, most: float = math.inf, kind: Any = float) -> Any:
    """A finite number in [least, most]; None stays None."""
    if value is None:
        return None
    try:
        is_good = isinstance(value, numbers.Real) and least <= kind(value) <= most
        is_good = is_good and kind(value) == value and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        is_good = False
    if not is_good or (kind is int and isinstance(value, bool)):
        wanted = f"in [{least}, {most}]" if most < math.inf else f"of at least {least}"
        what = "whole number" if kind is int else "number"
        raise ValueError(f"{name}={value!r:.100} must be a {what} {wanted}.")
    return kind(value)


def first_given(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def draw_seed() -> int:
    return secrets.randbelow(SEEDS)


def complete_call(
    resolve: Callable[..., DecodingSettings], options: Mapping[str, Any], seed: int | None
) -> tuple[dict[str, Any], int | None]:
    """-> options of `generate` and the seed of softmax draws, nothing left to chance.

    In `compatible`, a temperature, top-k, top-p, min-p or seed asks for softmax sampling, as in
    Qwen; a temperature of 0 for the argmax.
    """
    options = dict(options)
    settings = resolve(**options)
    if settings.is_noisy and settings.individual is None:
        options["individual"] = draw_seed()
    if settings.mode != "compatible":
        return options, seed
    if options.get("temperature") == 0:
        options |= {"temperature": None, "do_sample": False}
    elif options.get("do_sample") is None and (
        seed is not None or any(options.get(name) is not None for name in SOFTMAX_CALL)
    ):
        options["do_sample"] = True
    if seed is None and resolve(**options).do_sample:
        seed = draw_seed()
    return options, seed


def context_length(max_position_embeddings: int, rope: Mapping[str, Any] | None) -> int:
    """Positions of a model, including those that RoPE scaling adds to the trained ones."""
    rope = rope or {}
    if rope.get("rope_type") not in ("linear", "dynamic", "yarn"):
        return max_position_embeddings
    trained = rope.get("original_max_position_embeddings", max_position_embeddings)
    return max(max_position_embeddings, int(trained * rope["factor"]))


def end_ids(model: Any) -> set[int]:
    """The tokens that end a text."""
    eos = first_given(model.generation_config.eos_token_id, ())
    return {eos} if isinstance(eos, int) else set(eos)


def context_of(model: Any) -> int:
    """How many tokens a model reads and generates together."""
    config = model.config
    return context_length(config.max_position_embeddings, config.rope_parameters)
