"""App: the routes of the server, as an ASGI application.

    GET   /v1/models                          POST  /v1/chat/completions
    GET   /v1/individuals                     POST  /v1/completions
    POST  /v1/individuals                     POST  /v1/counterfactuals
    GET, DELETE /v1/individuals/{name}        POST  /v1/numbers
    GET   /health  /metrics  /docs  /openapi.json

Errors are answered in OpenAI's form, with one sentence. A client that disconnects stops its texts.
"""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from causal_qwen._version import __version__
from causal_qwen.serving import analyses
from causal_qwen.serving import individuals as saved
from causal_qwen.serving.batching import Closed, QueueFull
from causal_qwen.serving.replies import error_body
from causal_qwen.serving.requests import TextRequest
from causal_qwen.serving.schemas import (
    ChatBody,
    CompletionBody,
    CounterfactualBody,
    DrawBody,
    NumberCounterfactualBody,
    NumbersBody,
    RequestError,
    TextBody,
    TokensBody,
    sentence,
)
from causal_qwen.serving.security import BoundNames, Guard, Login, Refusal
from causal_qwen.serving.service import Run, Service

EVENTS = "text/event-stream"
OPEN_PATHS = ("/health",)
SHUTTING_DOWN = "The server is shutting down; try another one."


def make_app(
    service: Service,
    names: BoundNames,
    login: Login | None = None,
    origins: Sequence[str] = (),
) -> ASGIApp:
    """The routes behind the guard. Pages of `origins` may call them from a browser."""
    app: ASGIApp = Counted(routes(service), service)
    app = Guard(
        app,
        names,
        service.limits.max_body,
        login,
        origins=frozenset(origins),
        open_paths=OPEN_PATHS,
        answer=_refusal,
    )
    if origins:
        app = CORSMiddleware(
            app, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def routes(service: Service) -> FastAPI:
    app = FastAPI(title="CausalQwen", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_error_handlers(app)
    _add_texts(app, service)
    _add_individuals(app, service)
    _add_analyses(app, service)
    _add_operations(app, service)
    return app


class Counted:
    """Middleware: counts requests by route and status; bodies are JSON, whatever they say."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                status = message["status"]
                self.service.metrics.add("requests_total", route=route, status=status)
            await send(message)

        if scope["type"] == "http":
            MutableHeaders(scope=scope)["content-type"] = "application/json"
        await self.app(scope, receive, count)


# ---------------------------------------------------------------- errors


def _refusal(refusal: Refusal) -> Response:
    message = refusal.message
    if refusal.status == 401:
        message = "The API key is missing or wrong; send it as Authorization: Bearer KEY."
    return JSONResponse(error_body(message, refusal.status), refusal.status)


def as_response(error: Exception) -> JSONResponse:
    """The answer to a request that fails."""
    if isinstance(error, RequestValidationError):
        error = sentence(error.errors())
    if isinstance(error, RequestError):
        return JSONResponse(error_body(str(error), error.status, error.param), error.status)
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(error.seconds)}
        return JSONResponse(error_body(str(error), 429), 429, headers)
    if isinstance(error, Closed):
        return JSONResponse(error_body(SHUTTING_DOWN, 503), 503, {"Retry-After": "5"})
    if isinstance(error, HTTPException):
        return JSONResponse(error_body(str(error.detail), error.status_code), error.status_code)
    words = f"The model failed: {' '.join(str(error).split()) or type(error).__name__}"
    return JSONResponse(error_body(words, 500), 500)


def _add_error_handlers(app: FastAPI) -> None:
    async def answer(_: Request, error: Exception) -> JSONResponse:
        return as_response(error)

    for kind in (
        RequestValidationError,
        RequestError,
        QueueFull,
        Closed,
        HTTPException,
        ValueError,
        OSError,
        Exception,
    ):
        app.add_exception_handler(kind, answer)


# ---------------------------------------------------------------- texts


def _add_texts(app: FastAPI, service: Service) -> None:
    async def answer(request: Request, body: TextBody) -> Response:
        asked = TextRequest.of(body, service.limits)
        run = await service.start(asked)
        watcher = asyncio.create_task(_cancel_when_gone(request, run))
        if asked.stream:
            return await _stream(run, watcher)
        try:
            async for _ in run.updates():
                pass
            return JSONResponse(run.reply.whole())
        finally:
            watcher.cancel()
            run.cancel()

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """The next message of a conversation."""
        return await answer(request, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        """The continuation of a text."""
        return await answer(request, body)


async def _cancel_when_gone(request: Request, run: Run) -> None:
    """A client that disconnects stops its texts."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    run.cancel()


async def _stream(run: Run, watcher: asyncio.Task[None]) -> Response:
    """Server-sent events. An error before the first one has its own status."""
    updates = run.updates()
    try:
        first = await anext(updates, None)
    except BaseException:
        watcher.cancel()
        run.cancel()
        raise

    async def events() -> AsyncIterator[str]:
        begun: set[int] = set()
        update = first
        try:
            while update is not None:
                chunk = run.reply.chunk(update.place, update.event, update.place not in begun)
                is_news = update.event.text or update.event.finish or update.place not in begun
                if is_news or (update.event.choice and run.reply.request.alternatives is not None):
                    begun.add(update.place)
                    yield _event(chunk)
                update = await anext(updates, None)
            if run.reply.request.include_usage:
                yield _event(run.reply.last_chunk())
            yield "data: [DONE]\n\n"
        except Exception as error:  # the status has been sent
            yield _event(json.loads(bytes(as_response(error).body)))
        finally:
            watcher.cancel()
            run.cancel()

    return StreamingResponse(events(), media_type=EVENTS, headers={"Cache-Control": "no-cache"})


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
    def draw_individual(body: DrawBody) -> Any:
        """Draw an individual; with a name, save it."""
        drawn = saved.draw(body, service.backend)
        return saved.describe(drawn if body.name is None else store.save(drawn, body.name))

    @app.get("/v1/individuals/{name:path}")
    def show_individual(name: str) -> Any:
        """A saved individual."""
        return saved.describe(store.find(name), name)

    @app.delete("/v1/individuals/{name:path}")
    def delete_individual(name: str) -> Any:
        """Delete a saved individual."""
        store.delete(name)
        return {"object": "individual.deleted", "name": name, "deleted": True}


# ---------------------------------------------------------------- analyses


def _add_analyses(app: FastAPI, service: Service) -> None:
    async def answer(analysis: Any, body: Any) -> Response:
        work = await asyncio.to_thread(analysis, service, body)
        return JSONResponse(await service.run(work))

    @app.post("/v1/counterfactuals")
    async def counterfactuals(body: CounterfactualBody) -> Response:
        """The same individual's text, and its text after an edit."""
        return await answer(analyses.counterfactual, body)

    @app.post("/v1/numbers")
    async def numbers(body: NumbersBody) -> Response:
        """The numbers that texts or rows ask for, with intervals."""
        return await answer(analyses.numbers, body)

    @app.post("/v1/numbers/counterfactual")
    async def number_counterfactual(body: NumberCounterfactualBody) -> Response:
        """What an observed number would have been after an edit."""
        return await answer(analyses.number_counterfactual, body)

    @app.post("/v1/tokens")
    async def tokens(body: TokensBody) -> Response:
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
        text = service.metrics.render(service.gauges())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.get("/docs", include_in_schema=False)
    def docs() -> Response:
        return HTMLResponse(_page(app.openapi()))


def _page(openapi: Mapping[str, Any]) -> str:
    """The routes and their fields, without a script or a resource of another host."""
    parts = ["<!doctype html><meta charset=utf-8><title>CausalQwen</title><h1>CausalQwen</h1>"]
    schemas = openapi["components"]["schemas"]
    for path, methods in openapi["paths"].items():
        for method, about in methods.items():
            title = f"<code>{method.upper()} {path}</code>"
            parts.append(f"<h2>{title}</h2><p>{html.escape(about['description'])}</p>")
            if "requestBody" in about:
                ref = about["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                fields = schemas[ref.rpartition("/")[2]]["properties"]
                rows = (
                    f"<tr><td><code>{name}</code><td>{html.escape(one.get('description', ''))}"
                    for name, one in fields.items()
                )
                parts.append(f"<table>{''.join(rows)}</table>")
    return "".join(parts)
