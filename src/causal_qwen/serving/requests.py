"""Requests: the fields of a request (`schemas`) -> the call of `generate` that they stand for.

The one vocabulary of all servers. Needs neither torch nor a web server.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from causal_qwen.decoding.draws import SEEDS, complete_call
from causal_qwen.decoding.settings import DecodingSettings, first_given
from causal_qwen.individuals.individual import Individual, resolve_individuals
from causal_qwen.serving.limits import Limits
from causal_qwen.serving.schemas import (
    DEFAULT_TOKENS,
    SETTINGS,
    ChatBody,
    CompletionBody,
    DecodingBody,
    TextBody,
    read,
)
from causal_qwen.serving.schemas import RequestError as RequestError  # of `resolve`, too


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
    def parse(cls, fields: Any, kind: str, limits: Limits) -> TextRequest:
        """Of any JSON value; `kind` is "chat" or "completion"."""
        schema: type[TextBody] = ChatBody if kind == "chat" else CompletionBody
        return cls.of(read(schema, fields), limits)

    @classmethod
    def of(cls, body: TextBody, limits: Limits) -> TextRequest:
        """Within the limits of a server."""
        messages, prompt = getattr(body, "messages", None), getattr(body, "prompt", None)
        prompts = [prompt] if isinstance(prompt, str) else prompt or []
        if messages:
            prompts = [[message.plain() for message in messages]]
        if _within("n", body.n, limits.max_n) * len(prompts) > limits.max_n:
            raise RequestError(
                f"{len(prompts)} prompts with n={body.n} are {body.n * len(prompts)} texts; this "
                f"server writes {limits.max_n} per request.",
                "prompt",
            )
        return cls(
            prompts=prompts,
            is_chat=bool(messages),
            max_tokens=_max_tokens(body, limits),
            n=body.n,
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            stream=body.stream,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            alternatives=_alternatives(body),
            model=body.model,
            seed=body.seed,
            **decoding_fields(body),
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


def decoding_fields(body: DecodingBody) -> dict[str, Any]:
    """Who speaks, and the settings that are given."""
    names = (*SETTINGS, "temperature", "noise_temperature")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    return {"user": body.user or None, "individual": body.individual, "settings": given}


def _max_tokens(body: TextBody, limits: Limits) -> int:
    found = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(found) == 2:
        raise RequestError("max_tokens and max_completion_tokens differ; send one.", "max_tokens")
    most = next(iter(found), None)
    if most is None:
        return min(DEFAULT_TOKENS, limits.max_tokens)
    return _within("max_tokens", most, limits.max_tokens)


def _alternatives(body: TextBody) -> int | None:
    """The tokens beside the chosen one whose log probabilities are asked for."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if isinstance(body, ChatBody) and body.logprobs:
        return body.top_logprobs or 0
    if isinstance(body, ChatBody) and body.top_logprobs is not None:
        raise RequestError("top_logprobs needs logprobs=true.", "top_logprobs")
    return None


def _within(name: str, value: int, most: int) -> int:
    if not 1 <= value <= most:
        raise RequestError(f"{name}={value} is outside 1 to {most}.", name)
    return value
