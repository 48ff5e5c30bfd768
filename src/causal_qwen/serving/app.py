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
import html
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from causal_qwen._version import __version__
from causal_qwen.serving import analyses
from causal_qwen.serving import individuals as saved
from causal_qwen.serving.batching import Closed, QueueFull
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


def make_app(
    service: Service,
    host: str = "127.0.0.1",
    key: str | None = None,
    origins: Sequence[str] = (),
) -> ASGIApp:
    """The routes, guarded. Pages of `origins` may call them from a browser."""
    app = Counted(routes(service), service)
    return guard(
        app,
        host,
        service.limits.max_body,
        key=key,
        origins=origins,
        open_paths=("/health",),
        answer=lambda message, status: JSONResponse(error_body(message, status), status),
    )


def routes(service: Service) -> FastAPI:
    app = FastAPI(title="CausalQwen", version=__version__, docs_url=None, redoc_url=None)
    # A handler of `Exception` answers, and uvicorn logs the error: name what clients cause.
    kinds = RequestValidationError, HTTPException, QueueFull, Closed, ValueError, OSError, Exception
    for kind in kinds:
        app.add_exception_handler(kind, _on_error)
    _add_texts(app, service)
    _add_individuals(app, service)
    _add_analyses(app, service)
    _add_operations(app, service)
    return app


class Counted:
    """Middleware: counts requests by route and status; bodies are JSON, whatever they say."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.requests = app, service.metrics.requests

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
        message, status, seconds = "The server is shutting down; try another one.", 503, 5
    elif isinstance(error, HTTPException):
        message, status = str(error.detail), error.status_code
    else:
        message = f"The model failed: {message or type(error).__name__}"
    headers = {"Retry-After": str(seconds)} if seconds else None
    return JSONResponse(error_body(message, status, param), status, headers)


# ---------------------------------------------------------------- texts


def _add_texts(app: FastAPI, service: Service) -> None:
    async def answer(request: Request, asked: TextRequest) -> Response:
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

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """The next message of a conversation."""
        return await answer(request, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """The continuation of a text."""
        return await answer(request, body)


async def _cancel_when_gone(request: Request, run: Run) -> None:
    """A client that disconnects stops its texts."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    run.cancel()


async def _events(run: Run, watcher: asyncio.Task[None]) -> AsyncGenerator[str]:
    """Server-sent events of a stream."""
    begun: set[int] = set()
    try:
        async for place, event in run.updates():
            has_log_probs = event.choice and run.reply.request.alternatives is not None
            if place not in begun or event.text or event.finish or has_log_probs:
                yield _event(run.reply.chunk(place, event, place not in begun))
                begun.add(place)
        if run.reply.request.stream_options.include_usage:
            yield _event(run.reply.last_chunk())
        yield "data: [DONE]\n\n"
    except Exception as error:
        if not run.reply.request.stream or not begun:
            raise
        yield _event(json.loads(bytes(as_response(error).body)))  # the status has been sent
    finally:
        watcher.cancel()
        run.cancel()


def _event(record: Any) -> str:
    return f"data: {json.dumps(record, ensure_ascii=False)}\n\n"


# ---------------------------------------------------------------- individuals


def _add_individuals(app: FastAPI, service: Service) -> None:
    store = service.individuals

    @app.get("/v1/individuals")
    def list_individuals() -> Any:
        """The names of the saved individuals."""
        data = [{"object": "individual", "name": name} for name in store.names()]
        return {"object": "list", "data": data}

    @app.post("/v1/individuals", status_code=201)
    def draw_individual(body: saved.DrawRequest) -> Any:
        """Draw an individual; with a name, save it."""
        drawn = saved.draw(body, service.backend)
        return saved.describe(drawn if body.name is None else store.save(drawn, body.name))

    @app.get("/v1/individuals/{name:path}")
    def show_individual(name: str) -> Any:
        """A saved individual."""
        return saved.describe(store.find(name))

    @app.delete("/v1/individuals/{name:path}")
    def delete_individual(name: str) -> Any:
        """Delete a saved individual."""
        store.delete(name)
        return {"object": "individual.deleted", "name": name, "deleted": True}


# ---------------------------------------------------------------- analyses


def _add_analyses(app: FastAPI, service: Service) -> None:
    async def answer(analysis: Callable[..., Any], body: Any) -> Response:
        return JSONResponse(await service.run(analyses.analyse, service, analysis, body))

    @app.post("/v1/counterfactuals")
    async def counterfactuals(body: analyses.CounterfactualRequest) -> Response:
        """The same individual's text, and its text after an edit."""
        return await answer(analyses.counterfactual, body)

    @app.post("/v1/numbers")
    async def numbers(body: analyses.NumbersRequest) -> Response:
        """The numbers that texts or rows ask for, with intervals."""
        return await answer(analyses.numbers, body)

    @app.post("/v1/numbers/counterfactual")
    async def number_counterfactual(body: analyses.WhatIfRequest) -> Response:
        """What an observed number would have been after an edit."""
        return await answer(analyses.number_counterfactual, body)

    @app.post("/v1/tokens")
    async def tokens(body: analyses.TokensRequest) -> Response:
        """The tokens of a text; with index, how one of them was chosen."""
        return await answer(analyses.tokens, body)


# ---------------------------------------------------------------- operations


def _add_operations(app: FastAPI, service: Service) -> None:
    backend = service.backend

    @app.get("/v1/models")
    def list_models() -> Any:
        """The served model."""
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

    @app.get("/health")
    def health() -> Any:
        """200 while requests are answered."""
        return {"status": "ok"}

    @app.get("/metrics")
    def metrics() -> Response:
        """Counters in the text format of Prometheus."""
        return PlainTextResponse(service.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/docs", include_in_schema=False)
    def docs() -> Response:
        """The routes and their fields, without a script or a resource of another host."""
        openapi = app.openapi()
        parts = ["<!doctype html><meta charset=utf-8><title>CausalQwen</title><h1>CausalQwen</h1>"]
        for path, methods in openapi["paths"].items():
            for method, about in methods.items():
                words = html.escape(about["description"])
                parts.append(f"<h2><code>{method.upper()} {path}</code></h2><p>{words}</p><table>")
                if "requestBody" in about:
                    body = about["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                    fields = openapi["components"]["schemas"][body.rpartition("/")[2]]["properties"]
                    for name, field in fields.items():
                        words = html.escape(field.get("description", ""))
                        parts.append(f"<tr><td><code>{name}</code><td>{words}")
                parts.append("</table>")
        return HTMLResponse("".join(parts))
