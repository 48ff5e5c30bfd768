"""Requests: the fields of a request, checked, and the call of `generate` that they stand for.

The one vocabulary of all servers. Needs neither torch nor a web server; FastAPI writes
/openapi.json from these models. Beside OpenAI's own fields, whatever `decoding.settings` knows is a
field, whose value `resolve_settings` checks. A field that is null counts as not given.

    individual, or causal_mode        as in `generate`; an individual without a mode means causal
    temperature 0                     standard (in a model of mode compatible: its argmax)
    temperature > 0                   sampling, as do_sample=True
    user                              names the individual when nothing else does
    seed                              of an individual's chance; of sampling; of softmax

An individual is a seed or a name. Several texts (`n`) are those of a seed and its successors, or
of one named individual with other chances.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from causal_qwen.decoding.settings import (
    DEFAULTS,
    SOFTMAX,
    DecodingSettings,
    complete_call,
    first_given,
)
from causal_qwen.individuals import MAX_SEED, Individual, resolve_individuals, seed_of

DEFAULT_TOKENS = 256  # of a request that names no max_tokens, within the server's limit
MAX_STOPS = 4  # stop strings of a request, as in OpenAI's API
MAX_ALTERNATIVES = 20  # of logprobs

OWN = ("individual", "temperature")  # settings with a type of their own
SETTINGS = tuple(name for name in (*DEFAULTS, *SOFTMAX) if name not in OWN)


@dataclass(frozen=True)
class Limits:
    """How much requests may ask for: settings of `causal-qwen serve`."""

    max_rows: int = 16  # texts that are decoded together, and texts of a request
    max_waiting: int = 64  # texts that wait for a place; more are answered with 429
    max_prompt: int = 4096  # tokens of a prompt
    max_tokens: int = 1024  # new tokens of a text

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or value < (name != "max_waiting"):
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")


class RequestError(ValueError):
    """What a client has to change: one sentence, and the status of the answer; `seconds` until it
    may come back."""

    seconds = 0

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


class Call(NamedTuple):
    """What a request asks of `generate`, nothing left to chance."""

    options: dict[str, Any]
    seed: int | None  # of softmax draws
    settings: DecodingSettings
    name: str | None = None  # of the individual

    def of_copy(self, copy: int) -> tuple[dict[str, Any], int | None]:
        """Options and seed of a request's further texts: of a seed's successors, or of the one
        who has a name, by another chance."""
        options, who = dict(self.options), self.options.get("individual")
        is_one = self.name is not None and self.settings.mode == "causal"
        if is_one and copy:
            options["exogenous"] = (options.get("exogenous") or 0) + copy
        elif isinstance(who, int):
            options["individual"] = who + copy
        return options, None if self.seed is None else self.seed + copy

    def replay(self, copy: int) -> dict[str, Any]:
        """The fields that generate the text of a copy again."""
        options, seed = self.of_copy(copy)
        who = options.get("individual")
        record = self.settings.to_dict(who if isinstance(who, Individual) else None)
        record["causal_mode"] = record.pop("mode")
        record["fresh_noise_gain"] = first_given(record["fresh_noise_gain"], record["noise_gain"])
        if self.settings.is_noisy:
            is_named = self.name is not None and not self.name.isdecimal()  # digits are a seed
            is_one = self.settings.mode == "causal" or copy == 0
            record["individual"] = self.name if is_named and is_one else who
        else:
            record["seed"] = seed
        if record["causal_mode"] == "compatible" and not record["do_sample"]:
            record["temperature"] = 0
        record["exogenous"] = options.get("exogenous")
        return {name: value for name, value in record.items() if value is not None}


# ---------------------------------------------------------------- decoding


def about(words: str, default: Any = None, **limits: Any) -> Any:
    return Field(default, description=words, **limits)


def _as_seed(who: Any) -> Any:
    """Digits are a seed, also as a text."""
    return int(who) if isinstance(who, str) and re.fullmatch("[0-9]{1,20}", who) else who


Seed = Annotated[int, Field(ge=0, le=MAX_SEED - 1000)]  # successors have room
Number = int | float
Name = Annotated[str, Field(min_length=1)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    neutral: ClassVar[dict[str, Any]] = {}  # accepted with these values only, which change nothing

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        """What is null counts as not given."""
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if value is not None}
        for name in cls.neutral.keys() & given.keys():
            if given.pop(name) != cls.neutral[name]:
                raise ValueError(f"{name} is not supported; leave it out.")
        return given


Setting = Annotated[str, Field(max_length=100)] | int | float | bool | None
Settings = create_model(
    "Settings",
    __base__=Body,
    **dict.fromkeys(SETTINGS, (Setting, about("As in `generate`."))),  # type: ignore[call-overload]
)


class DecodingRequest(Settings):  # type: ignore[misc, valid-type]
    """What a request may say about decoding, on every server."""

    individual: Annotated[Seed | str | None, BeforeValidator(_as_seed)] = about("A seed or a name.")
    user: Annotated[str, Field(max_length=512)] | None = about("Names the individual otherwise.")
    seed: Seed | None = about("Of the individual's chance, of sampling, or of softmax.")
    temperature: Number | None = about("0 is standard, more is sampling; or the noise's strength.")

    def resolve(
        self,
        resolve: Callable[..., DecodingSettings],
        default_mode: str,
        find: Callable[[str], int | Individual] = seed_of,
    ) -> Call:
        """The call of `generate`. `resolve` is the model's, for settings; `find` tells whose a name
        is."""
        given = {name: getattr(self, name) for name in (*SETTINGS, "temperature")}
        options = {name: value for name, value in given.items() if value is not None}
        given_name = self.individual if isinstance(self.individual, str) else None
        has_user = bool(self.user) and default_mode != "compatible"
        is_someone = self.individual is not None or has_user
        if "causal_mode" not in options:
            self._choose_mode(options, default_mode, is_someone)
        try:
            who: Any = self.individual if given_name is None else find(given_name)
            name = given_name or (self.user if who is None and self.user else None)
            settings = resolve(**{**options, "individual": who})
            seed = None if settings.is_noisy else self.seed
            if settings.is_noisy:
                own = first_given(who, seed_of(name) if name else None)
                draws = settings.mode == "sampling" and self.individual is None
                if self.seed is not None and (own is None or draws):
                    own, name = self.seed, None
                elif self.seed is not None:
                    options.setdefault("exogenous", self.seed)
                options["individual"] = own
            else:
                name = None
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


# ---------------------------------------------------------------- texts


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(Body):
    include_usage: bool = False


class TextRequest(DecodingRequest):
    """A request for texts."""

    neutral: ClassVar[dict[str, Any]] = {  # of OpenAI
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "best_of": 1,
        "echo": False,
        "suffix": "",
        "tools": [],
        "store": False,
    }
    model: str | None = about("The id of the served model; others are answered with 404.")
    max_tokens: int = about(
        "At most so many new tokens; or max_completion_tokens.",
        DEFAULT_TOKENS,
        validation_alias=AliasChoices("max_tokens", "max_completion_tokens"),
    )
    n: int = about("Texts per prompt: of the individual and its successors.", 1)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=200)]],
        Field(max_length=MAX_STOPS),
        BeforeValidator(_listed),
    ] = about(f"A text, or up to {MAX_STOPS}, before which a text ends.", [])
    stream: bool = about("Send tokens as they are chosen, as events.", False)
    stream_options: StreamOptions = about(
        "include_usage: the last event counts tokens.", StreamOptions()
    )

    @property
    def prompts(self) -> list[Any]:
        """Texts, or one conversation."""
        raise NotImplementedError

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompts[0], str)

    @property
    def alternatives(self) -> int | None:
        """The tokens beside the chosen one whose log probabilities are asked for."""
        return None

    def check(self, limits: Limits) -> None:
        """Refuse what is beyond the limits of a server."""
        if "max_tokens" not in self.model_fields_set:
            self.max_tokens = min(DEFAULT_TOKENS, limits.max_tokens)
        for name, value, most in (
            ("max_tokens", self.max_tokens, limits.max_tokens),
            ("n times the prompts", self.n * len(self.prompts), limits.max_rows),
        ):
            if not 1 <= value <= most:
                raise RequestError(f"{name}={value} is outside 1 to {most}.", name)


class Part(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] = ""
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


Messages = Annotated[list[Message], Field(min_length=1, max_length=1000)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)]


class ChatRequest(TextRequest):
    messages: Messages = about("The conversation: objects with role and content.", ...)
    logprobs: bool = about("Add log softmax(loc_S) of every token.", False)
    top_logprobs: Alternatives | None = about("And of so many of the likeliest tokens.")

    @property
    def prompts(self) -> list[Any]:
        return [[message.plain() for message in self.messages]]

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(TextRequest):
    prompt: Annotated[list[Name], Field(min_length=1), BeforeValidator(_listed)] = about(
        "The beginning of a text, or a list of them.", ...
    )
    logprobs: Alternatives | None = about(
        "Add log softmax(loc_S), and that of so many other tokens."
    )

    @property
    def prompts(self) -> list[Any]:
        return self.prompt

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


# ---------------------------------------------------------------- errors


def read(model: type[BaseModel], fields: Any) -> Any:
    """Any JSON value as a request; an error is a RequestError."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise sentence(error.errors(include_url=False)) from None


def sentence(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """The first of pydantic's errors as one sentence."""
    first = errors[0]
    place = [str(part)[:100] for part in first["loc"] if part != "body"]
    words = first["msg"].removeprefix("Value error, ").rstrip(".")
    return RequestError(f"{'.'.join(place) or 'The body'}: {words}.", place[0] if place else None)
