"""Security: which requests a server on this machine answers; the playground's, too.

A page of another site runs in the same browser as ours and can send requests to our address. By
DNS rebinding (the name of its own host now resolves to 127.0.0.1) it can even read the answers.
Such a request carries the foreign name in `Host` or in `Origin`.

    request -> Host -> Origin -> key -> length and time of the body -> the app
                400     403      401                   413, 408

A server that other machines reach answers to any name, and asks for a key or a login: another site
does not know it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "::1", "localhost")
BODY_SECONDS = 60.0
HEADERS = {  # of every answer
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    return host.strip("[]").lower() in LOOPBACK


def guard(
    app: ASGIApp, host: str, max_bytes: int, *, origins: Collection[str] = (), **options: Any
) -> ASGIApp:
    """An app that is bound to `host`, behind all checks. Pages of `origins` may call it."""
    app = Guard(app, max_bytes, origins=origins, **options)
    if is_loopback(host):
        app = TrustedHostMiddleware(app, ["127.0.0.1", "[::1]", "localhost"], www_redirect=False)
    if origins:
        app = CORSMiddleware(
            app, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


class Guard:
    """Middleware: refuses what another site or a stranger has sent, what is too long, and what
    does not arrive. `open_paths` need no key; `answer` words a refusal."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        *,
        key: str | None = None,
        origins: Collection[str] = (),
        open_paths: Collection[str] = (),
        answer: Callable[[str, int], Response] = PlainTextResponse,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self.app, self.max_bytes, self.key = app, max_bytes, key and key.strip()
        self.origins, self.open_paths, self.answer = origins, open_paths, answer
        self.body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the servers speak no WebSocket
            await self.app(scope, receive, send)
            return

        async def add_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        found = await self._check(Request(scope, receive))
        if isinstance(found, bytes):
            await self.app(scope, _replay(found, receive), add_headers)
        else:
            await found(scope, receive, add_headers)

    async def _check(self, request: Request) -> bytes | Response:
        """The whole body, or a refusal."""
        if is_foreign(request.headers, self.origins):
            return self.answer("Requests from other sites are refused.", 403)
        if request.url.path not in self.open_paths and not self._has_key(request.headers):
            words = "The API key is missing or wrong; send it as Authorization: Bearer KEY."
            return self.answer(words, 401)
        try:
            async with asyncio.timeout(self.body_seconds):
                body = await _read_body(request, self.max_bytes)
        except (TimeoutError, ClientDisconnect):
            words = f"The request is not whole after {self.body_seconds:g} seconds."
            refusal = self.answer(words, 408)
        else:
            if body is not None:
                return body
            refusal = self.answer(f"The request is longer than {self.max_bytes:,} bytes.", 413)
        refusal.headers["Connection"] = "close"  # the rest is not read
        return refusal

    def _has_key(self, headers: Headers) -> bool:
        """In a time that does not depend on how much of the key is right."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return self.key is None or (
            scheme.lower() == "bearer"
            and secrets.compare_digest(given.strip().encode(), self.key.encode())
        )


def is_foreign(headers: Headers, allowed: Collection[str] = ()) -> bool:
    """Whether a page of another site sends this: its `Origin`, which browsers send with every
    write, is neither this server nor an `allowed` site.

    Other programs send none. A hostile page can also cause requests without it, such as those of
    its images: browsers then say `Sec-Fetch-Site`. Links from other sites are welcome.
    """
    origin, here = headers.get("origin"), headers.get("host", "").lower()
    if origin in allowed:
        return False
    if origin is not None and origin.lower().partition("://")[2] != here:
        return True  # "null" of a file or a sandbox, too
    site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
    return site in ("cross-site", "same-site") and mode != "navigate"


async def _read_body(request: Request, most: int) -> bytes | None:
    """The whole body, or None if it is too long."""
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > len(str(most)) or int(length) > most:
        return None
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            return None
    return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body at once, and then waits for the end of the connection."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return whole.pop() if whole else await receive()

    return again
