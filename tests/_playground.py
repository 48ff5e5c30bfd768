"""The page of the playground as an ASGI application, and a client of its API."""

from __future__ import annotations

import gc
import json
import os
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from starlette.testclient import TestClient

from causal_qwen.app import server
from causal_qwen.app.served import ServedModel

URL = "http://127.0.0.1:7860"
API = "/gradio_api"


@contextmanager
def serve_page(
    model: ServedModel,
    files: Path,
    account: tuple[str, str] | None = None,
) -> Iterator[TestClient]:
    """A client of the page that `launch` would serve."""
    with mock.patch.dict(os.environ), warnings.catch_warnings():
        server.configure_gradio(files)
        warnings.simplefilter("ignore")  # Gradio leaves event loops open
        from causal_qwen.app.page import build  # and Gradio

        app = server.make_app(build(model), account=account)
        gc.collect()
    with TestClient(app, base_url=URL, raise_server_exceptions=False) as client:
        yield client


def endpoints(client: TestClient) -> dict[str, list[dict[str, Any]]]:
    """The named endpoints of the API and their parameters."""
    found = client.get(f"{API}/info").json()["named_endpoints"]
    return {name.removeprefix("/"): one["parameters"] for name, one in found.items()}


def function_index(client: TestClient, name: str) -> int:
    functions = client.get("/config").json()["dependencies"]
    return int(next(one["id"] for one in functions if one["api_name"] == name))


def call(
    client: TestClient, name: str, data: list[Any], session: str | None = None
) -> dict[str, Any]:
    """Call an endpoint as the page does. -> its last message; `log` lists the page's warnings"""
    session = session or uuid.uuid4().hex
    joined = client.post(
        f"{API}/queue/join",
        content=json.dumps(
            {"data": data, "fn_index": function_index(client, name), "session_hash": session}
        ),
        headers={"Content-Type": "application/json"},
    )
    if joined.status_code != 200:
        return {"msg": "refused", "status": joined.status_code, "text": joined.text, "log": []}
    last: dict[str, Any] = {"msg": "ended"}
    log: list[str] = []
    with client.stream("GET", f"{API}/queue/data", params={"session_hash": session}) as stream:
        for line in stream.iter_lines():  # to the end: the server closes the stream
            message = json.loads(line.removeprefix("data:") or "{}")
            if message.get("msg") == "log":
                log.append(message["log"])
            elif message.get("msg") in ("process_completed", "unexpected_error"):
                last = message
    return {**last, "log": log}
