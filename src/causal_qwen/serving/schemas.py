"""Schemas: the fields of every request, as pydantic models; FastAPI writes /openapi.json from them.

OpenAI's own fields, and beside them (`extra_body`) the settings of `generate`: whatever
`decoding.settings` knows is a field, whose value `resolve_settings` checks. A field that is null
counts as not given. A request that does not fit is one sentence (`sentence`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from causal_qwen.decoding.settings import DEFAULTS, SOFTMAX
from causal_qwen.individuals.noise import MAX_SEED

DEFAULT_TOKENS = 256  # of a request that names no max_tokens, within max_tokens
MAX_STOPS = 4  # stop strings of a request, as in OpenAI's API
MAX_ALTERNATIVES = 20  # of logprobs
MAX_INPUTS = 256  # of one request for numbers
SHOWN = 60  # characters of a value in an error
TYPE = re.compile(r"str|int|float|bool|constrained-\w+|(?:list|dict|function-\w+)\[.*\]")

# Fields of OpenAI that are accepted with these values only, which change nothing.
NEUTRAL: dict[str, Any] = {
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
HELP = {
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
OWN = ("individual", "temperature")  # settings with a type of their own
SETTINGS = tuple(name for name in (*DEFAULTS, *SOFTMAX) if name not in OWN)

Seed = Annotated[int, Field(ge=0, le=MAX_SEED - 1000)]  # successors have room
Number = int | float
Share = Annotated[float, Field(gt=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]
Row = Annotated[dict[str, Any], Field(min_length=1)]
Input = Name | Row


def _about(words: str, **limits: Any) -> Any:
    return Field(None, description=words, **limits)


class RequestError(ValueError):
    """What a client has to change: one sentence, and the status of the answer."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, given: Any) -> Any:
        if isinstance(given, dict):
            return {name: value for name, value in given.items() if value is not None}
        return given


Settings = create_model(
    "Settings",
    __base__=Body,
    **{
        name: (str | int | float | bool | None, _about(HELP.get(name, "As in `generate`.")))
        for name in SETTINGS
    },  # type: ignore[call-overload]
)


class DecodingBody(Settings):  # type: ignore[misc, valid-type]
    """What a request may say about decoding, on every server."""

    individual: Seed | str | None = _about("A seed, or the name of an individual on the server.")
    user: Annotated[str, Field(max_length=512)] | None = _about("Names the individual otherwise.")
    temperature: Number | None = _about("0 is standard, more is sampling; or the noise's strength.")
    noise_temperature: Number | None = _about("The same, where a server caps temperature.")

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        """Digits are a seed, also as a text."""
        if not isinstance(given, dict):
            return given
        who = given.get("individual")
        if isinstance(who, str) and who.isascii() and who.isdecimal() and len(who) <= 20:
            given = {**given, "individual": int(who)}
        for name in NEUTRAL.keys() & given.keys() - cls.model_fields.keys():
            if given[name] != NEUTRAL[name]:
                raise ValueError(f"{name} is not supported; leave it out.")
        return {name: value for name, value in given.items() if name not in NEUTRAL}


class StreamOptions(Body):
    include_usage: bool | None = None


class TextBody(DecodingBody):
    model: str | None = _about("The id of the served model; others are answered with 404.")
    max_tokens: int | None = _about(f"At most so many new tokens; {DEFAULT_TOKENS} by default.")
    max_completion_tokens: int | None = _about("Another name of max_tokens.")
    n: int = Field(1, description="Texts per prompt: of the individual and its successors.")
    stop: (
        Annotated[str, Field(min_length=1, max_length=200)]
        | Annotated[
            list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=MAX_STOPS)
        ]
        | None
    ) = _about(f"Up to {MAX_STOPS} texts before which a text ends.")
    stream: bool = Field(False, description="Send tokens as they are chosen, as events.")
    stream_options: StreamOptions | None = _about("include_usage: the last event counts tokens.")
    seed: Seed | None = _about("The individual in modes with noise, else the seed of softmax.")


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
Prompt = Name | Annotated[list[Name], Field(min_length=1)]


class ChatBody(TextBody):
    messages: Messages = Field(description="The conversation: objects with role and content.")
    logprobs: bool = Field(False, description="Add log softmax(loc_S) of every token.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = _about(
        "The likeliest tokens beside it."
    )


class CompletionBody(TextBody):
    prompt: Prompt = Field(description="The beginning of a text, or a list of them.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = _about(
        "Add log softmax(loc_S), and that of so many other tokens."
    )


class Edit(Body):
    prompt: Name | None = _about("Another prompt.")
    messages: Messages | None = _about("Another conversation.")
    word: Name | None = _about("A word of the prompt, or of the last message.")
    number: int | None = _about("The number of the prompt, from 0, that gets the value `by`.")
    token: int | None = _about("The token of the factual text, from 0, that becomes `by`.")
    by: str | Number | None = _about("What replaces a word, a number or a token.")

    @model_validator(mode="after")
    def _check_kinds(self) -> Edit:
        kinds = {name for name, value in self if value is not None} - {"by"}
        if len(kinds) != 1 or (self.by is not None) != (kinds <= {"word", "number", "token"}):
            raise ValueError(
                "edit needs one of prompt and messages, or one of word, number and token beside by."
            )
        if self.number is not None and isinstance(self.by, str):
            raise ValueError("by must be a number where a number is edited.")
        return self


class CounterfactualBody(TextBody):
    prompt: Name | None = _about("The beginning of a text.")
    messages: Messages | None = _about("A conversation, instead of a prompt.")
    edit: Edit = Field(description="What is changed.")
    semantics: Literal["pearl", "disco"] = Field(
        "pearl", description="pearl (all noise is kept) or disco (chance is drawn anew)."
    )


class RegressorBody(Body):
    model: str | None = _about("The id of the served model.")
    regressor: str | None = _about("The name of a regressor; the only one if left out.")
    target: str | None = _about("The target of a regressor with several.")


class NumbersBody(RegressorBody):
    input: (
        Input
        | Annotated[list[Name], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[list[Row], Field(min_length=1, max_length=MAX_INPUTS)]
    ) = Field(description="A text or a row (an object), or a list of them.")
    levels: Annotated[list[Share], Field(max_length=20)] | None = _about(
        "Levels of the intervals; [0.9] by default."
    )
    quantiles: Annotated[list[Share], Field(max_length=20)] | None = _about(
        "Probabilities of quantiles, such as [0.1, 0.5]."
    )


class NumberCounterfactualBody(RegressorBody):
    input: Input = Field(description="A text or a row.")
    observed: Number = Field(description="The number that was seen after it.")
    edited: Input = Field(description="The text or the row after the edit.")


class TokensBody(Body):
    model: str | None = _about("The id of the served model.")
    input: Name = Field(description="A text.")
    index: int | None = _about("The token, from 1, to explain; the next one at the end.")


class DrawBody(Body):
    name: str | None = _about("Save the individual under this name.")
    seed: Seed | None = _about("Its seed; drawn if left out.")
    temperature: Number | None = _about("Strength of its noise. Default: the model's.")
    min_density: Number | None = _about("Likelihood truncation. Default: the model's.")
    persistence: Number | None = _about("Share of noise that is its own. Default: the model's.")


M = TypeVar("M", bound=BaseModel)


def read(model: type[M], fields: Any) -> M:
    """Any JSON value as a request; an error is a RequestError."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise sentence(error.errors(include_url=False)) from None


def sentence(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """The errors of the first field that does not fit, as one sentence."""
    first = errors[0]
    where, kind = _place(first), first["type"]
    param = re.split(r"[.\[]", where)[0][:100] or None
    if kind == "extra_forbidden":
        message = f"{where[:100]!r} is unknown; /docs lists the fields."
    elif kind == "missing":
        message = f"{where or 'The body'} is missing; send it."
    elif kind == "value_error":
        message = str(first["ctx"]["error"])
    elif kind == "json_invalid":
        message = f"The body is not JSON ({first['ctx']['error']})."
    elif param is None:
        message = "The body is not a JSON object; send one such as {...}."
    else:
        same = [one["msg"] for one in errors if _place(one) == where]
        wanted = " or ".join(dict.fromkeys(one[0].lower() + one[1:] for one in same))
        message = f"{where}={_shown(first['input'])} does not fit: {wanted}."
    return RequestError(message, param)


def _place(error: Mapping[str, Any]) -> str:
    """messages[0].role: without the types of a union, which pydantic lists as well."""
    parts = [part for part in error["loc"] if part != "body" and not TYPE.fullmatch(str(part))]
    return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in parts).removeprefix(".")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "a deeply nested value"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
