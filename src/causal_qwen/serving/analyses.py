"""Analyses: routes that call the model directly. Shares and panels are answered by every engine,
between two steps of the batch; the others by torch alone, beside it.

Figures that are not finite are null: the ends of an interval for which a regressor has too few
calibration rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from causal_qwen.analysis.shares import count_shares
from causal_qwen.individuals import seed_of
from causal_qwen.panel import Panel
from causal_qwen.serving.requests import (
    Body,
    Message,
    Messages,
    Name,
    Number,
    RequestError,
    Seed,
    TextRequest,
    about,
)
from causal_qwen.serving.service import Service
from causal_qwen.session import Session
from causal_qwen.terminal import finite

LEVEL = 0.9  # of an interval where none is named
MAX_INPUTS = 256  # of one request for numbers
MAX_PEOPLE = 10_000  # of a panel


async def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


Served = Annotated[Service, Depends(_service)]
router = APIRouter()


Analysis = Callable[..., dict[str, Any]]


def answered(analysis: Analysis, by_torch: bool = False) -> Callable[..., Any]:
    """A route: between two steps of the batch or, `by_torch` alone, beside it, one after another.
    What a request asks wrongly is its mistake."""

    @wraps(analysis)
    async def route(service: Service, body: Any) -> JSONResponse:
        if by_torch and service.backend.kind != "torch":
            raise RequestError("This server runs without torch; it answers texts only.", None, 501)
        service.check_model(body.model)
        call = partial(analysis, service, body)
        try:
            found = await (service.run(call) if by_torch else service.between(call))
        except RequestError:
            raise
        except (ValueError, KeyError, TypeError, ArithmeticError) as error:
            raise RequestError(str(error)) from None
        return JSONResponse(finite(found))

    return route


in_turn = partial(answered, by_torch=True)


# ---------------------------------------------------------------- shares and panels

People = (
    Annotated[int, Field(ge=1, le=MAX_PEOPLE)]
    | Annotated[list[Seed | Name], Field(min_length=1, max_length=MAX_PEOPLE)]
)


class PeopleRequest(Body):
    model: str | None = about("The id of the served model.")
    individuals: People = about("How many (seeds from 0 on), or seeds and names.", 1000)
    temperature: Number | None = about("Strength of their noise. Default: the model's.")
    min_p: Number | None = about("Who is a candidate. Default: the model's.")

    @property
    def noise(self) -> dict[str, Any]:
        given = {"temperature": self.temperature, "min_p": self.min_p}
        return {name: value for name, value in given.items() if value is not None}


class SharesRequest(PeopleRequest):
    prompt: Name | None = about("The beginning of a text.")
    messages: Messages | None = about("A conversation, instead of a prompt.")


class PanelRequest(PeopleRequest):
    question: Name = about("What is asked.", ...)
    options: Annotated[list[Name], Field(min_length=2, max_length=50)] = about(
        "The answers; spellings of one are separated by |.", ...
    )
    versus: Name | None = about("Another version of the question, asked of the same individuals.")
    answers: bool = about("Add everybody's answer.", False)


@router.post("/v1/shares")
@answered
def shares(service: Served, body: SharesRequest) -> dict[str, Any]:
    """How many individuals choose each token next."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Shares need a prompt or messages.", "prompt")
    prompt: Any = body.prompt if body.messages is None else _plain(body.messages)
    tokens = service.encode(prompt, body.messages is not None)
    people = panel_of(service, body).people
    return {"object": "shares", **count_shares(service.backend, tokens, "", people).to_dict()}


@router.post("/v1/panel")
@answered
def panel(service: Served, body: PanelRequest) -> dict[str, Any]:
    """What many individuals answer, and whether they answer another version alike."""
    asked = panel_of(service, body)
    service.encode(body.question, is_chat=False)  # within the limits
    found = asked.ask(body.question, body.options)
    if body.versus is not None:
        found = found.versus(asked.ask(body.versus, body.options))
    record = {"object": "panel", "model": service.name, **found.to_dict()}
    return record | ({"answers": found.pairs()} if body.answers else {})


def panel_of(service: Service, body: PeopleRequest) -> Panel:
    """The panel of the last request, if it was the same."""
    who = body.individuals if isinstance(body.individuals, int) else tuple(body.individuals)
    key = who, tuple(body.noise.items())
    if service.panel is None or service.panel[0] != key:
        people: Any = who
        if isinstance(who, tuple):  # a name is never the file of an individual here
            people = [seed_of(one) if isinstance(one, str) else one for one in who]
        panel = Panel(Session(service.backend), people, **body.noise)
        panel.people.names = [*range(who)] if isinstance(who, int) else [*who]
        service.panel = key, panel
    found: Panel = service.panel[1]
    return found


# ---------------------------------------------------------------- counterfactuals


class Edit(Body):
    prompt: Name | None = about("Another prompt.")
    messages: Messages | None = about("Another conversation.")
    token: int | None = about("The token of the factual text, from 0, that becomes `by`.")
    by: str | int | None = about("What replaces a token: its text, or its id.")


class CounterfactualRequest(TextRequest):
    prompt: Name | None = about("The beginning of a text.")
    messages: Messages | None = about("A conversation, instead of a prompt.")
    edit: Edit = about("What is changed.", ...)
    semantics: Literal["pearl", "disco"] = about(
        "pearl (all noise is kept) or disco (chance is drawn anew).", "pearl"
    )

    @property
    def prompts(self) -> list[Any]:
        return [self.prompt if self.messages is None else _plain(self.messages)]


def _plain(messages: list[Message]) -> list[dict[str, str]]:
    return [message.plain() for message in messages]


@router.post("/v1/counterfactuals")
@in_turn
def counterfactuals(service: Served, body: CounterfactualRequest) -> dict[str, Any]:
    """The same individual's text, and its text after an edit."""
    from causal_qwen.analysis.counterfactual import ChangedPrompt, ChangedToken
    from causal_qwen.engines.torch import chat_inputs

    backend: Any = service.backend
    is_one = (body.prompt is None) != (body.messages is None)
    if body.n != 1 or body.stream or body.stop or not is_one:
        raise RequestError("A counterfactual is of one prompt, without n, stop and stream.")
    body.check(service.limits)
    body.causal_mode = body.causal_mode or "causal"
    call = body.resolve(backend.resolve, backend.default_mode, service.find)
    if not call.settings.is_noisy:
        raise RequestError(
            f"A counterfactual follows an individual, and mode {call.settings.mode!r} has none; "
            "use 'causal' or 'sampling'.",
            "causal_mode",
        )
    room = [body.max_tokens]  # for new tokens, in both worlds

    def read(prompt: Any) -> Any:
        room.append(backend.context - len(service.encode(prompt, body.is_chat).ids))
        return chat_inputs(backend.processor, prompt) if body.is_chat else prompt

    (prompt,) = body.prompts
    text, edit = read(prompt), body.edit
    other = edit.prompt if edit.messages is None else _plain(edit.messages)
    if edit.token is not None and edit.by is not None and other is None:
        change: Any = ChangedToken(edit.token, edit.by)
    elif type(other) is type(prompt) and edit.token is None:
        change = ChangedPrompt(read(other))
    else:
        raise RequestError("edit needs a prompt or messages, as the factual has, or token and by.")
    options = {name: value for name, value in call.options.items() if value is not None}
    found = Session(backend).counterfactual(
        text,
        change,
        mode=options.pop("causal_mode"),
        semantics=body.semantics,
        max_new_tokens=min(room),
        **options,
    )
    record = {**found.to_dict(), "replay": call.replay(0)}
    for world in ("factual", "counterfactual"):
        record[world]["continuation"] = "".join(record[world]["tokens"])
    individual = record["replay"].get("individual")
    return {"object": "counterfactual", "model": service.name, **record, "individual": individual}


# ---------------------------------------------------------------- numbers

Row = Annotated[dict[str, Any], Field(min_length=1)]
Several = Field(min_length=1, max_length=MAX_INPUTS)
Shares = Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(max_length=20)]


class NumbersRequest(Body):
    model: str | None = about("The id of the served model.")
    regressor: str | None = about("The name of a regressor; the only one if left out.")
    target: str | None = about("The target of a regressor with several.")
    input: Name | Row | Annotated[list[Name], Several] | Annotated[list[Row], Several] = about(
        "A text or a row (an object), or a list of them.", ...
    )
    levels: Shares = about("Levels of the intervals.", [LEVEL])
    quantiles: Shares = about("Probabilities of quantiles, such as [0.1, 0.5].", [])


@router.post("/v1/numbers")
@in_turn
def numbers(service: Served, body: NumbersRequest) -> dict[str, Any]:
    """The numbers that texts or rows ask for, with intervals."""
    backend: Any = service.backend
    inputs: list[Any] = body.input if isinstance(body.input, list) else [body.input]
    name = _regressor_name(service, body.regressor)
    if name is not None:
        found = _of_regressor(open_regressor(service, name), inputs, body)
    elif isinstance(inputs[0], str) and backend.model.config.encode_numbers == "value":
        found = _of_model(backend, inputs, body)
    else:
        raise RequestError(
            "The number head of this model is not trained; start the server with --regressor "
            "DIRECTORY (causal-qwen fit), or serve a model trained on values.",
            "regressor",
        )
    data = [
        {
            "index": index,
            "median": float(median),
            "intervals": [
                {"level": level, "low": float(low), "high": float(high)}
                for level, (low, high) in zip(body.levels, bounds, strict=True)
            ],
            "quantiles": [
                {"p": p, "value": float(value)}
                for p, value in zip(body.quantiles, curve, strict=True)
            ],
        }
        for index, (median, bounds, curve) in enumerate(found)
    ]
    return {"object": "list", "model": service.name, "regressor": name, "data": data}


def _of_model(backend: Any, texts: list[str], body: NumbersRequest) -> Any:
    """(median, intervals, quantiles) of every text."""
    for one in backend.model.predict(texts, backend.processor):
        bounds = [one.interval(level) for level in body.levels]
        yield one.median, bounds, [one.quantile(p) for p in body.quantiles]


def _of_regressor(regressor: Any, inputs: list[Any], body: NumbersRequest) -> Any:
    """(median, intervals, quantiles) of every text or row."""
    from pandas import DataFrame

    names = list(regressor.targets_)
    place = names.index(regressor.target_name(body.target))
    is_text = isinstance(inputs[0], str)
    if is_text and regressor.columns_ is not None:
        raise RequestError("This regressor reads columns, not sentences; send a row.", "input")
    rows: Any = inputs if is_text else DataFrame(inputs)
    found = regressor.predict_numbers(rows, body.levels, body.quantiles)
    if len(names) > 1:  # (N, targets, ...)
        found = tuple(part[:, place] for part in found)
    return zip(*found, strict=True)


def _regressor_name(service: Service, name: str | None) -> str | None:
    """The only one where none is named; None if there is none."""
    if name is None and len(service.regressors) == 1:
        (name,) = service.regressors
    if name is not None and name not in service.regressors:
        known = ", ".join(service.regressors) or "none (start it with --regressor)"
        raise RequestError(f"There is no regressor {name!r}; this server has {known}.", None, 404)
    return name


def open_regressor(service: Service, name: str) -> Any:
    """A fitted regressor, opened at its first use; on the served model if it was fitted on it."""
    from causal_qwen.regression.regressor import CausalTextRegressor, OpenModel

    if name not in service.opened:
        backend: Any = service.backend
        place = service.regressors[name]
        if not isinstance(place, Path):
            regressor = place()
        else:
            try:
                opened = OpenModel(backend.processor, backend.model)
                regressor = CausalTextRegressor.load(place, model=opened)
            except ValueError:  # fitted on another backbone
                regressor = CausalTextRegressor.load(place)
        service.opened[name] = regressor.set_params(verbose=False)
    return service.opened[name]


# ---------------------------------------------------------------- tokens


class TokensRequest(Body):
    model: str | None = about("The id of the served model.")
    input: Name = about("A text.", ...)
    index: int | None = about("The token, from 1, to explain; the next one at the end.")


@router.post("/v1/tokens")
@in_turn
def tokens(service: Served, body: TokensRequest) -> dict[str, Any]:
    """The tokens of a text; with index, how one of them was chosen."""
    from causal_qwen.analysis import token_view

    service.encode(body.input, is_chat=False)  # within the limits
    backend: Any = service.backend
    model, processor = backend.model, backend.processor
    found: dict[str, Any] = {"tokens": token_view.split_tokens(model, processor, body.input)}
    if body.index is not None:
        found["view"] = token_view.explain_token(model, processor, body.input, body.index).to_dict()
    return {"object": "tokens", **found}
