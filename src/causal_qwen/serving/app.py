"""App: the routes of the server, as an ASGI application.

    POST  /v1/chat/completions  /v1/completions  /v1/counterfactuals  /v1/tokens
    POST  /v1/numbers  /v1/shares  /v1/panel
    GET   /v1/models  /health  /metrics  /docs

Errors are answered in OpenAI's form, with one sentence. A client that disconnects stops its texts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import prometheus_client as prometheus
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from causal_qwen._version import __version__
from causal_qwen.engines.engine import Row
from causal_qwen.serving import analyses
from causal_qwen.serving.analyses import Served
from causal_qwen.serving.replies import Reply, error_body
from causal_qwen.serving.requests import (
    ChatRequest,
    CompletionRequest,
    RequestError,
    TextRequest,
    sentence,
)
from causal_qwen.serving.security import guard
from causal_qwen.serving.service import Service

MAX_BODY = 1_000_000  # bytes of a request
BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
COUNTERS = {
    "cancelled_texts": "Texts whose client had gone.",
    "prompt_tokens": "Tokens read in prompts.",
    "generated_tokens": "Tokens generated.",
}
FIRST = "From a request to the first token of its text."


router = APIRouter()


def make_app(
    service: Service, host: str = "127.0.0.1", key: str | None = None, origins: Sequence[str] = ()
) -> ASGIApp:
    """The routes, guarded. Pages of `origins` may call them from a browser."""
    app = FastAPI(title="CausalQwen", version=__version__, redoc_url=None)
    app.state.service, app.state.registry = service, prometheus.CollectorRegistry()
    for routes in (router, analyses.router):
        app.include_router(routes)
    for kind in (RequestValidationError, HTTPException, RequestError, Exception):
        app.add_exception_handler(kind, _on_error)
    return guard(
        counted(app),
        host,
        MAX_BODY,
        key=key,
        origins=origins,
        open_paths=("/health",),
        answer=lambda message, status: JSONResponse(error_body(message, status), status),
    )


def counted(app: FastAPI) -> ASGIApp:
    """Middleware: counts requests by route and status; bodies are JSON, whatever they say."""
    own: Any = {"namespace": "causal_qwen", "registry": app.state.registry}
    words, labels = "Requests by route and status.", ("route", "status")
    requests = prometheus.Counter("requests", words, labels, **own)

    async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                requests.labels(route, message["status"]).inc()
            await send(message)

        if scope["type"] == "http":
            MutableHeaders(scope=scope)["content-type"] = "application/json"
        await app(scope, receive, count)

    batcher = app.state.service.batcher
    report = {name: prometheus.Counter(name, about, **own).inc for name, about in COUNTERS.items()}
    first = prometheus.Histogram("first_token_seconds", FIRST, buckets=BUCKETS, **own)
    batcher.report = lambda name, value: report.get(name, first.observe)(value)
    for place, name in enumerate(("running", "waiting")):
        gauge = prometheus.Gauge(f"{name}_texts", f"Texts that are {name} now.", **own)
        gauge.set_function(lambda place=place: float(batcher.counts()[place]))  # type: ignore[misc]
    return middleware


async def _on_error(_: Request, error: Exception) -> Response:
    body, status, headers = as_answer(error)
    return Response(json.dumps(body), status, headers, "application/json")


def as_answer(error: Exception) -> tuple[dict[str, Any], int, dict[str, str]]:
    """The body, the status and the headers of the answer to a request that fails."""
    if isinstance(error, RequestValidationError):
        error = sentence(error.errors())
    if isinstance(error, RequestError):
        headers = {"Retry-After": str(error.seconds)} if error.seconds else {}
        return error_body(str(error), error.status, error.param), error.status, headers
    if isinstance(error, HTTPException):
        return error_body(str(error.detail), error.status_code), error.status_code, {}
    return error_body(f"The model failed: {error!r}", 500), 500, {}


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
    reply = await service.start(asked)
    watcher = asyncio.create_task(_cancel_when_gone(request, reply))
    events = _events(reply, watcher)
    first = await anext(events)  # an error before it has its own status
    if not asked.stream:
        async for _ in events:
            pass
        return JSONResponse(reply.whole())

    async def stream() -> AsyncIterator[str]:
        async with aclosing(events):
            yield first
            async for event in events:
                yield event

    headers = {"Cache-Control": "no-cache"}
    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


async def _cancel_when_gone(request: Request, reply: Reply) -> None:
    """A client that disconnects stops its texts."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    reply.cancel()


async def _events(reply: Reply, watcher: asyncio.Task[None]) -> AsyncGenerator[str]:
    """Server-sent events of a stream."""
    begun = set[Row]()
    try:
        async for event in reply.events():
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
        yield _event(as_answer(error)[0])  # the status has been sent
    finally:
        watcher.cancel()
        reply.cancel()


def _event(record: Any) -> str:
    return f"data: {json.dumps(record, ensure_ascii=False)}\n\n"


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
        "persistence": backend.resolve(causal_mode="causal").persistence,
        "regressors": list(service.regressors),
        "limits": vars(service.limits),
    }
    return {"object": "list", "data": [card]}


@router.get("/health")
def health() -> Any:
    """200 while requests are answered."""
    return {"status": "ok"}


@router.get("/metrics")
def metrics(request: Request) -> Response:
    """Counters in the text format of Prometheus."""
    figures = prometheus.generate_latest(request.app.state.registry)
    return PlainTextResponse(figures, media_type="text/plain; version=0.0.4")
