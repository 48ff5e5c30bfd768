"""Middleware: HTTP requests to vLLM in the fields of `causal-qwen serve`.

    vllm ... --middleware causal_qwen.vllm.middleware.CausalFields

`{"individual": 7}` at the top of a request becomes `{"vllm_xargs": {"individual": 7}}`, where vLLM
reads fields of plugins. It also says which of OpenAI's fields the request names: vLLM fills in the
others, and a temperature of 1 that nobody asked for would mean sampling.
"""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from causal_qwen.serving.requests import SETTINGS
from causal_qwen.vllm.admission import FILLED, NAMED, OWN

PATHS = ("/v1/completions", "/v1/chat/completions")
FIELDS = {*SETTINGS, *OWN} - set(FILLED)  # that vLLM does not know itself


def moved(body: bytes) -> bytes:
    """The body of a request with our fields in `vllm_xargs`; what is no request is left alone."""
    try:
        request = json.loads(body)
    except ValueError:
        return body
    if not isinstance(request, dict):
        return body
    given = {name: value for name, value in request.items() if value is not None}
    extra = {name: value for name, value in given.items() if name in FIELDS}
    extra[NAMED] = [name for name in FILLED if name in given]
    rest = {name: value for name, value in given.items() if name not in FIELDS or name == "user"}
    written = rest.get("vllm_xargs", {})
    if isinstance(written, dict):  # else vLLM says what is wrong with it
        rest["vllm_xargs"] = {**extra, **written}
    return json.dumps(rest).encode()


class CausalFields:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_text = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PATHS
        if not is_text:
            return await self.app(scope, receive, send)
        body = moved(await Request(scope, receive).body())
        headers = [(key, value) for key, value in scope["headers"] if key != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        return await self.app({**scope, "headers": headers}, replay, send)
