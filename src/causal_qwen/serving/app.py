"""App: the routes of the server, as an ASGI application.

    GET   /v1/models                          POST  /v1/chat/completions
    GET   /v1/individuals                     POST  /v1/completions
    POST  /v1/individuals                     POST  /v1/counterfactuals
    GET, DELETE /v1/individuals/{name}        POST  /v1/numbers, /v1/numbers/counterfactual
    GET   /health  /metrics  /docs            POST  /v1/tokens

Errors are answered in OpenAI's form, with one sentence. A client that disconnects stops its texts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from causal_qwen._version import __version__
from causal_qwen.engines.engine import Row
from causal_qwen.serving import analyses
from causal_qwen.serving.batching import Closed, QueueFull
from causal_qwen.serving.individuals import DrawRequest, describe, draw
from causal_qwen.serving.replies import error_body
from causal_qwen.serving.requests import (
    ChatRequest,
    CompletionRequest,
    RequestError,
    TextRequest,
    sentence,
)
from causal_qwen.serving.security import guard
from causal_qwen.serving.service import Run, Service

# A handler of `Exception` answers, and uvicorn logs the error: others are what clients cause.
ERRORS = RequestValidationError, HTTPException, QueueFull, Closed, ValueError, OSError, Exception


async def _service(request: Request) -> Service:
    return request.app.state.service


Served = Annotated[Service, Depends(_service)]
router = APIRouter()


def make_app(
    service: Service, host: str = "127.0.0.1", key: str | None = None, origins: Sequence[str] = ()
) -> ASGIApp:
    """The routes, guarded. Pages of `origins` may call them from a browser."""
    app = FastAPI(title="CausalQwen", version=__version__, redoc_url=None)
    app.state.service = service
    app.include_router(router)
    for kind in ERRORS:
        app.add_exception_handler(kind, _on_error)
    return guard(
        Counted(app),
        host,
        service.limits.max_body,
        key=key,
        origins=origins,
        open_paths=("/health",),
        answer=lambda message, status: JSONResponse(error_body(message, status), status),
    )


class Counted:
    """Middleware: counts requests by route and status; bodies are JSON, whatever they say."""

    def __init__(self, app: FastAPI) -> None:
        self.app, self.requests = app, app.state.service.metrics.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self.requests.labels(route, message["status"]).inc()
            await send(message)

        if scope["type"] == "http":
            MutableHeaders(scope=scope)["content-type"] = "application/json"
        await self.app(scope, receive, count)


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    return as_response(error)


def as_response(error: Exception) -> JSONResponse:
    """The answer to a request that fails."""
    if isinstance(error, RequestValidationError):
        error = sentence(error.errors())
    message, status, param, seconds = str(error), 500, None, 0
    if isinstance(error, RequestError):
        status, param = error.status, error.param
    elif isinstance(error, QueueFull):
        status, seconds = 429, error.seconds
    elif isinstance(error, Closed):
        status, seconds = 503, 5
    elif isinstance(error, HTTPException):
        message, status = str(error.detail), error.status_code
    else:
        message = f"The model failed: {message or type(error).__name__}"
    headers = {"Retry-After": str(seconds)} if seconds else None
    return JSONResponse(error_body(message, status, param), status, headers)


# ---------------------------------------------------------------- texts


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, service: Served, body: ChatRequest) -> Response:
    """The next message of a conversation."""
    return await _answer(request, service, body)


@router.post("/v1/completions")
async def completions(request: Request, service: Served, body: CompletionRequest) -> Response:
    """The continuation of a text."""
    return await _answer(request, service, body)


async def _answer(request: Request, service: Service, asked: TextRequest) -> Response:
    run = await service.start(asked.within(service.limits))
    watcher = asyncio.create_task(_cancel_when_gone(request, run))
    events = _events(run, watcher)
    first = await anext(events)  # an error before it has its own status
    if not asked.stream:
        async for _ in events:
            pass
        return JSONResponse(run.reply.whole())

    async def stream() -> AsyncIterator[str]:
        async with aclosing(events):
            yield first
            async for event in events:
                yield event

    headers = {"Cache-Control": "no-cache"}
    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


async def _cancel_when_gone(request: Request, run: Run) -> None:
    """A client that disconnects stops its texts."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    run.cancel()


async def _events(run: Run, watcher: asyncio.Task[None]) -> AsyncGenerator[str]:
    """Server-sent events of a stream."""
    reply, begun = run.reply, set[Row]()
    try:
        async for event in run.events():
            is_first = event.row not in begun
            has_log_probs = event.choice and reply.request.alternatives is not None
            if is_first or event.text or event.finish or has_log_probs:
                yield _event(reply.chunk(event, is_first))
                begun.add(event.row)
        if reply.request.stream_options.include_usage:
            yield _event(reply.last_chunk())
        yield "data: [DONE]\n\n"
    except Exception as error:
        if not (reply.request.stream and begun):
            raise
        yield _event(json.loads(bytes(as_response(error).body)))  # the status has been sent
    finally:
        watcher.cancel()
        run.cancel()


def _event(record: Any) -> str:
    return f"data: {json.dumps(record, ensure_ascii=False)}\n\n"


# ---------------------------------------------------------------- individuals


@router.get("/v1/individuals")
def list_individuals(service: Served) -> Any:
    """The names of the saved individuals."""
    data = [{"object": "individual", "name": name} for name in service.individuals.names()]
    return {"object": "list", "data": data}


@router.post("/v1/individuals", status_code=201)
def draw_individual(service: Served, body: DrawRequest) -> Any:
    """Draw an individual; with a name, save it."""
    drawn = draw(body, service.backend)
    return describe(drawn if body.name is None else service.individuals.save(drawn, body.name))


@router.get("/v1/individuals/{name:path}")
def show_individual(service: Served, name: str) -> Any:
    """A saved individual."""
    return describe(service.individuals.find(name))


@router.delete("/v1/individuals/{name:path}")
def delete_individual(service: Served, name: str) -> Any:
    """Delete a saved individual."""
    service.individuals.delete(name)
    return {"object": "individual.deleted", "name": name, "deleted": True}


# ---------------------------------------------------------------- analyses


@router.post("/v1/counterfactuals")
async def counterfactuals(service: Served, body: analyses.CounterfactualRequest) -> Response:
    """The same individual's text, and its text after an edit."""
    return await _analyse(service, analyses.counterfactual, body)


@router.post("/v1/numbers")
async def numbers(service: Served, body: analyses.NumbersRequest) -> Response:
    """The numbers that texts or rows ask for, with intervals."""
    return await _analyse(service, analyses.numbers, body)


@router.post("/v1/numbers/counterfactual")
async def number_counterfactual(service: Served, body: analyses.WhatIfRequest) -> Response:
    """What an observed number would have been after an edit."""
    return await _analyse(service, analyses.number_counterfactual, body)


@router.post("/v1/tokens")
async def tokens(service: Served, body: analyses.TokensRequest) -> Response:
    """The tokens of a text; with index, how one of them was chosen."""
    return await _analyse(service, analyses.tokens, body)


async def _analyse(service: Service, analysis: Callable[..., Any], body: Any) -> Response:
    return JSONResponse(await service.run(analyses.analyse, service, analysis, body))


# ---------------------------------------------------------------- operations


@router.get("/v1/models")
def list_models(service: Served) -> Any:
    """The served model."""
    backend = service.backend
    card = {
        "id": service.name,
        "object": "model",
        "created": 0,
        "owned_by": "causal-qwen",
        "engine": backend.kind,
        "context": backend.context,
        "individual_size": backend.size,
        "default_mode": backend.default_mode,
        "has_chat": backend.has_chat,
        "regressors": list(service.regressors),
        "limits": vars(service.limits),
    }
    return {"object": "list", "data": [card]}


@router.get("/health")
def health() -> Any:
    """200 while requests are answered."""
    return {"status": "ok"}


@router.get("/metrics")
def metrics(service: Served) -> Response:
    """Counters in the text format of Prometheus."""
    return PlainTextResponse(service.metrics.render(), media_type="text/plain; version=0.0.4")
