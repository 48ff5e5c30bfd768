"""Requests: the fields of a request -> checked values, and the call of `generate` they stand for.

The one vocabulary of all servers. OpenAI's own fields, and beside them (`extra_body`) the settings
of `generate`: whatever `decoding.settings` knows is a field. Needs neither torch nor a web server.

    individual, or causal_mode        as in `generate`; an individual without a mode means causal
    temperature 0                     standard (in a model of mode compatible: its argmax)
    temperature > 0                   sampling, as do_sample=True
    user                              names the individual when nothing else does
    seed                              names it, too, in modes with noise; else it is softmax's seed
    noise_temperature                 temperature, where a server caps that

Individuals of a request: `individual` > `seed` > `user` > one that is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from causal_qwen.decoding.draws import SEEDS, complete_call
from causal_qwen.decoding.settings import DEFAULTS, SOFTMAX, DecodingSettings, first_given
from causal_qwen.individuals.individual import Individual, resolve_individuals
from causal_qwen.individuals.noise import MAX_SEED
from causal_qwen.serving.limits import (
    DEFAULT_TOKENS,
    MAX_ALTERNATIVES,
    MAX_MESSAGES,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_USER,
    Limits,
)

ROLES = ("system", "developer", "user", "assistant")
KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}
JSON_TYPES = dict(
    zip(KINDS, ["boolean", "integer", "number", "string", "array", "object"], strict=True)
)


class RequestError(ValueError):
    """What a client has to change: one sentence, and the status of the answer."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


class Field(NamedTuple):
    types: tuple[type, ...]
    help: str

    @property
    def schema(self) -> dict[str, Any]:
        """For OpenAPI."""
        return {"type": [JSON_TYPES[kind] for kind in self.types], "description": self.help}


TEXT_FIELDS = {
    "model": Field((str,), "The id of the served model; others are answered with 404."),
    "max_tokens": Field((int,), f"At most so many new tokens; {DEFAULT_TOKENS} by default."),
    "max_completion_tokens": Field((int,), "Another name of max_tokens."),
    "n": Field((int,), "Texts per prompt: of the individual and its successors."),
    "stop": Field((str, list), f"Up to {MAX_STOPS} texts before which a text ends."),
    "stream": Field((bool,), "Send tokens as they are chosen, as server-sent events."),
    "stream_options": Field((dict,), 'With {"include_usage": true}, the last event counts tokens.'),
    "user": Field((str,), "Names the individual when nothing else does."),
    "seed": Field((int,), "The individual in modes with noise, else the seed of softmax draws."),
    "individual": Field((int, str), "A seed, or the name of an individual saved on the server."),
    "temperature": Field(
        (int, float), "0 is standard, more is sampling; with an individual, its noise's strength."
    ),
    "noise_temperature": Field((int, float), "Temperature of noise, where temperature is capped."),
}
CHAT_FIELDS = {
    "messages": Field((list,), "The conversation: objects with role and content."),
    "logprobs": Field((bool,), "Add log softmax(loc_S) of every token."),
    "top_logprobs": Field((int,), f"The likeliest tokens beside it, up to {MAX_ALTERNATIVES}."),
}
COMPLETION_FIELDS = {
    "prompt": Field((str, list), "The beginning of a text, or a list of them."),
    "logprobs": Field((int,), "Add log softmax(loc_S), and that of so many other tokens."),
}
# Fields of OpenAI that are accepted with these values only, which change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "store": (False,),
}
SETTING_HELP = {
    "causal_mode": "standard, sampling, causal or compatible.",
    "top_k": "Choose among the k likeliest tokens.",
    "top_p": "Choose among the likeliest tokens of this probability.",
    "min_p": "Choose among tokens with this share of the largest probability.",
    "whole_words": "End a word that is begun as the likeliest token ends it.",
    "avoid_repeats": "Do not say so many of the last tokens again, if there is a choice; 0 is off.",
    "min_density": "Likelihood truncation of the noise.",
    "persistence": "Share of the noise that is the same for every token; the rest is chance.",
    "exogenous": "Seed of the exogenous noise in causal mode.",
}


def settings_fields() -> dict[str, Field]:
    """The settings of `generate` as fields; `resolve_settings` checks their values."""
    scalars = (str, int, float, bool)
    names = (name for name in (*DEFAULTS, *SOFTMAX) if name not in TEXT_FIELDS)
    return {
        name: Field(scalars, SETTING_HELP.get(name, "As in `generate`; see docs/inference.md."))
        for name in names
    }


def fields_of(kind: str) -> dict[str, Field]:
    """All fields of a chat or a completion."""
    own = CHAT_FIELDS if kind == "chat" else COMPLETION_FIELDS
    return {**own, **TEXT_FIELDS, **settings_fields()}


def check_fields(
    body: Any, fields: Mapping[str, Field], neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> dict[str, Any]:
    """The fields that are given, each of its type; null counts as not given."""
    if not isinstance(body, dict):
        raise RequestError("The body is not a JSON object; send one such as {...}.")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in neutral and name not in fields:
            if value not in neutral[name]:
                raise RequestError(f"{name} is not supported; leave it out.", name)
        elif name not in fields:
            raise RequestError(f"{name[:100]!r} is unknown; /docs lists the fields.", name[:100])
        elif not _is_a(value, fields[name].types):
            kinds = " or ".join(KINDS[kind] for kind in fields[name].types)
            raise RequestError(f"{name} must be {kinds}, not {_shown(value)}.", name)
    return {name: value for name, value in given.items() if name in fields}


def _is_a(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "a deeply nested value"
    return text if len(text) <= 60 else text[:60] + "..."


class Call(NamedTuple):
    """What a request asks of `generate`, nothing left to chance."""

    options: dict[str, Any]
    seed: int | None  # of softmax draws
    settings: DecodingSettings
    name: str | None = None  # of a saved individual

    def of_copy(self, copy: int) -> tuple[dict[str, Any], int | None]:
        """Options and seed of a request's further texts: of the individual's successors."""
        who, seed = self.options.get("individual"), self.seed
        options = (
            {**self.options, "individual": who + copy} if isinstance(who, int) else self.options
        )
        return options, None if seed is None else seed + copy

    def replay(self, copy: int) -> dict[str, Any]:
        """The fields that generate the text of a copy again."""
        options, seed = self.of_copy(copy)
        who = options.get("individual")
        record = self.settings.to_dict(who if isinstance(who, Individual) else None)
        record["causal_mode"] = record.pop("mode")
        record["fresh_noise_gain"] = first_given(record["fresh_noise_gain"], record["noise_gain"])
        if self.settings.is_noisy:
            record["individual"] = self.name or who
            record["noise_temperature"] = record.pop("temperature")
        else:
            record["seed"] = seed
        if record["causal_mode"] == "compatible" and not record["do_sample"]:
            record["temperature"] = 0
        record["exogenous"] = options.get("exogenous")
        return {name: value for name, value in record.items() if value is not None}


@dataclass(frozen=True)
class TextRequest:
    """A checked request for texts."""

    prompts: list[Any]  # texts, or one conversation (a list of messages)
    is_chat: bool
    max_tokens: int
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    alternatives: int | None = None  # of logprobs
    model: str | None = None
    user: str | None = None
    seed: int | None = None
    individual: int | str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, body: Any, kind: str, limits: Limits) -> TextRequest:
        """Of a body; `kind` is "chat" or "completion"."""
        given = check_fields(body, fields_of(kind))
        is_chat = kind == "chat"
        prompts = [_messages(given)] if is_chat else _prompts(given)
        n = _within("n", given.get("n", 1), 1, limits.max_n)
        if n * len(prompts) > limits.max_n:
            raise RequestError(
                f"{len(prompts)} prompts with n={n} are {n * len(prompts)} texts; this server "
                f"writes {limits.max_n} per request.",
                "prompt",
            )
        known = settings_fields()
        settings = {name: value for name, value in given.items() if name in known}
        for name in ("temperature", "noise_temperature"):
            if name in given:
                settings[name] = given[name]
        return cls(
            prompts=prompts,
            is_chat=is_chat,
            max_tokens=_max_tokens(given, limits),
            n=n,
            stop=_stops(given.get("stop", [])),
            stream=given.get("stream", False),
            include_usage=bool(given.get("stream_options", {}).get("include_usage")),
            alternatives=_alternatives(given, is_chat),
            model=given.get("model"),
            user=read_user(given.get("user")),
            seed=read_seed("seed", given.get("seed")),
            individual=read_individual(given.get("individual")),
            settings=settings,
        )

    def resolve(
        self,
        resolve: Callable[..., DecodingSettings],
        default_mode: str,
        find: Callable[[str], Individual],
    ) -> Call:
        """The call of `generate`. `resolve` is the model's, for settings; `find` returns the saved
        individual of a name."""
        options = dict(self.settings)
        heat = options.pop("noise_temperature", None)
        name = self.individual if isinstance(self.individual, str) else None
        who: Any = self.individual if name is None else find(name)
        has_user = self.user is not None and self.seed is None and default_mode != "compatible"
        if options.get("causal_mode") is None:
            self._choose_mode(options, default_mode, is_someone=who is not None or has_user)
        try:
            settings = resolve(**{**options, "individual": who})
            if settings.is_noisy:
                options["temperature"] = options.get("temperature") if heat is None else heat
                options["individual"] = self._who(who)
            elif heat is not None:
                raise ValueError(
                    f"noise_temperature={heat} has no effect in mode {settings.mode!r}; use "
                    "'causal' or 'sampling'."
                )
            seed = None if settings.is_noisy else self.seed
            options, seed = complete_call(resolve, options, seed)
            settings = resolve(**options)
            if isinstance(who, Individual):  # whose own settings the request must not contradict
                resolve_individuals(who, 1, 1, who.size, explicit=settings.named)
            return Call(options, seed, settings, name)
        except (ValueError, TypeError) as error:
            raise RequestError(str(error)) from None

    def _choose_mode(self, options: dict[str, Any], default_mode: str, is_someone: bool) -> None:
        """The mode that temperature, individual and user stand for."""
        temperature = options.get("temperature")
        if temperature == 0:
            if self.individual is not None:
                raise RequestError(
                    "temperature 0 means standard, where an individual has no effect; leave one of "
                    "them out, or name causal_mode.",
                    "temperature",
                )
            options["causal_mode"] = "compatible" if default_mode == "compatible" else "standard"
        elif is_someone:
            if not options.get("do_sample"):
                options["causal_mode"] = "causal"
        elif temperature is not None:
            options.setdefault("do_sample", True)

    def _who(self, given: int | Individual | None) -> int | Individual | None:
        if given is not None:
            if self.seed is not None:
                raise ValueError(
                    "individual and seed both name the individual in this mode; leave out one."
                )
            return given
        if self.seed is not None:
            return self.seed
        return None if self.user is None else user_seed(self.user)


def user_seed(user: str) -> int:
    """The individual of a user's name: the same on every machine."""
    return int.from_bytes(hashlib.blake2b(user.encode(), digest_size=8).digest()) % SEEDS


# ---------------------------------------------------------------- single fields


def _messages(given: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = given.get("messages", [])
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise RequestError(
            f"messages has {len(messages)} entries; send 1 to {MAX_MESSAGES}.", "messages"
        )
    return [_message(message, place) for place, message in enumerate(messages)]


def _message(message: Any, place: int) -> dict[str, str]:
    where = f"messages[{place}]"
    if not isinstance(message, dict):
        raise RequestError(f"{where} is not an object with role and content.", "messages")
    given = {name: value for name, value in message.items() if value is not None}
    if unknown := set(given) - {"role", "content", "name"}:
        raise RequestError(f"{where} has {min(unknown)!r}; send role and content.", "messages")
    if given.get("role") not in ROLES:
        raise RequestError(
            f"{where} has role {_shown(given.get('role'))}; use one of {', '.join(ROLES)}.",
            "messages",
        )
    content = given.get("content", "")
    if isinstance(content, list):  # parts
        is_text = all(isinstance(part, dict) and part.get("type") == "text" for part in content)
        texts: list[Any] = [part.get("text") for part in content] if is_text else [None]
        content = "".join(texts) if all(map(_is_text, texts)) else None
    if not _is_text(content):
        raise RequestError(f"{where} has content that is not a text.", "messages")
    role = "system" if given["role"] == "developer" else given["role"]
    return {"role": role, "content": content}


def _prompts(given: Mapping[str, Any]) -> list[str]:
    prompt = given.get("prompt", "")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not prompts or not all(_is_text(one) and one for one in prompts):
        raise RequestError("prompt must be a text that is not empty, or a list of them.", "prompt")
    return prompts


def _is_text(value: Any) -> bool:
    """Without half characters, which UTF-8 cannot write."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _max_tokens(given: Mapping[str, Any], limits: Limits) -> int:
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in given]
    if len(names) == 2 and given[names[0]] != given[names[1]]:
        raise RequestError("max_tokens and max_completion_tokens differ; send one.", names[1])
    if not names:
        return min(DEFAULT_TOKENS, limits.max_tokens)
    return _within(names[0], given[names[0]], 1, limits.max_tokens)


def _within(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise RequestError(f"{name}={value} is outside {least} to {most}.", name)
    return value


def _stops(value: str | list[Any]) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    is_valid = len(stops) <= MAX_STOPS and all(
        isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops
    )
    if not is_valid:
        raise RequestError(
            f"stop must be up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters.", "stop"
        )
    return tuple(stops)


def _alternatives(given: Mapping[str, Any], is_chat: bool) -> int | None:
    if not is_chat:
        count = given.get("logprobs")
        return None if count is None else _within("logprobs", count, 0, MAX_ALTERNATIVES)
    if not given.get("logprobs"):
        if "top_logprobs" in given:
            raise RequestError("top_logprobs needs logprobs=true.", "top_logprobs")
        return None
    return _within("top_logprobs", given.get("top_logprobs", 0), 0, MAX_ALTERNATIVES)


def read_user(user: str | None) -> str | None:
    if user is not None and (len(user) > MAX_USER or not _is_text(user)):
        raise RequestError(f"user must be a text of up to {MAX_USER} characters.", "user")
    return user or None


def read_individual(value: int | str | None) -> int | str | None:
    """Digits are a seed, also as a text."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 20:
        value = int(value)
    return value if isinstance(value, str) else read_seed("individual", value)


def read_seed(name: str, value: int | None) -> int | None:
    if value is not None and not 0 <= value <= MAX_SEED - 1000:  # successors have room
        raise RequestError(f"{name}={value} is no seed; use 0 to {MAX_SEED - 1000}.", name)
    return value
