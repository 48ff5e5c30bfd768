"""Admission: a request to vLLM -> its settings and its individual, before it is queued.

vLLM validates a request once and may send it to a worker several times, so nothing is left to
chance:

    extra_args["resolved"]   the options of `generate`
    seed                     the individual of a mode with noise: named, a user's, or drawn here
    temperature              0 in our modes: one token is finite, and vLLM need not draw;
                             1 for several copies, which vLLM refuses at 0
    repetition_penalty       1 in our modes: `rows` applies it, and vLLM's second model runner
                             would, too

Copies of a request have the seeds after its own: the individual's successors. The caller may use
the parameters again: `resolved` has the caller's values. Hazard: a seed and a temperature make vLLM
keep a random generator, which fails on CPUs where a prompt is read in parts (0.32).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from causal_qwen.decoding.settings import DecodingSettings, first_given, resolve_settings
from causal_qwen.serving.requests import DecodingRequest, RequestError, read

RESOLVED = "resolved"
CHANGED = ("seed", "temperature", "repetition_penalty")
NAMED = "named"  # the sampling fields that a request names; vLLM fills in all others
# Fields of vLLM's parameters that are settings of ours -> values that vLLM fills in.
FILLED: dict[str, tuple[Any, ...]] = {
    "temperature": (),  # 1.0, which asks for sampling, as it does in vLLM
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
}
OWN = ("individual", "user")
FLAGS = ("do_sample", "whole_words")  # vLLM turns true and false into 1 and 0
# What vLLM itself reads from extra_args.
OF_VLLM = ("session_id", "kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode")


@dataclass(frozen=True)
class Served:
    """What of a model's files decides about a request."""

    saved: Mapping[str, Any]  # generation_config.json
    mode: str  # inference_mode of config.json

    @classmethod
    def of(cls, vllm_config: Any) -> Served:
        model = vllm_config.model_config
        return cls(model.try_get_generation_config(), model.hf_config.inference_mode)

    @property
    def default_mode(self) -> str:
        return str(first_given(self.saved.get("causal_mode"), self.mode))

    def resolve(self, **options: Any) -> DecodingSettings:
        return resolve_settings(options, self.saved, default_mode=self.mode)


def admit(params: Any, served: Served) -> None:
    """Check the parameters of a request, and write into them what they leave open."""
    extra = dict(params.extra_args or {})
    earlier = extra.pop(RESOLVED, {})
    if not isinstance(earlier, dict):
        raise RequestError(f"{RESOLVED!r} is a field of the plugin itself; leave it out.")
    for name in CHANGED:
        setattr(params, name, earlier.get(name, getattr(params, name)))
    given = {name: getattr(params, name) for name in CHANGED}
    call = _request(params, dict(extra)).resolve(served.resolve, served.default_mode)
    _check_penalties(params, call.settings)
    who = call.options.get("individual")
    options = {name: value for name, value in call.options.items() if value is not None}
    params.extra_args = {**extra, RESOLVED: {"options": options, **given}}
    if call.settings.is_noisy:
        params.seed = who
    if call.settings.mode != "compatible":  # vLLM refuses several copies at temperature 0
        params.temperature = 0.0 if params.n == 1 else 1.0
        params.repetition_penalty = 1.0
    elif not call.settings.do_sample:  # vLLM fills in 1, which nobody has asked for
        params.temperature = 0.0
    vars(params).pop("sampling_type", None)  # what vLLM has concluded from them


def admitted_settings(params: Any, served: Served) -> DecodingSettings:
    """The settings of a request that was admitted."""
    options = dict(params.extra_args[RESOLVED]["options"])
    if "individual" in options:
        options["individual"] = params.seed  # of this copy
    return served.resolve(**options)


def _request(params: Any, extra: dict[str, Any]) -> DecodingRequest:
    named = extra.pop(NAMED, None)
    if not isinstance(named, list | None):
        raise RequestError(f"{NAMED!r} must be a list of names, not {named!r:.60}.")
    for name in OF_VLLM:
        extra.pop(name, None)
    for name in FLAGS:
        if extra.get(name) in (0, 1):
            extra[name] = bool(extra[name])
    filled_in = {
        name: getattr(params, name)
        for name, filled in FILLED.items()
        if (name in named if named is not None else getattr(params, name) not in filled)
    }
    return read(DecodingRequest, {**filled_in, "seed": params.seed, **extra})


def _check_penalties(params: Any, settings: DecodingSettings) -> None:
    """vLLM applies penalties after the choice: only ours, before it, acts."""
    if settings.mode != "compatible" and (params.presence_penalty or params.frequency_penalty):
        raise RequestError(
            "presence_penalty and frequency_penalty act in mode 'compatible' only; leave them out, "
            "or use repetition_penalty or avoid_repeats."
        )
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1)
    if settings.normalization == "ovr" and any(penalties):
        raise RequestError("normalization='ovr' goes without penalties in vLLM; leave them out.")
