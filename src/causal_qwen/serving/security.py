"""Security: which requests a server on this machine answers; the playground's, too.

A page of another site runs in the same browser as ours and can send requests to our address. By
DNS rebinding (the name of its own host now resolves to 127.0.0.1) it can even read the answers.
Such a request carries the foreign name in `Host` or in `Origin`.

    request -> Host -> Origin -> key -> length of the body -> the app
                400     403      401                   413

A server that other machines reach answers to any name, and asks for a key or a login: another site
does not know it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "::1", "localhost")
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
    """Middleware: refuses what another site or a stranger has sent, and what is too long.
    `open_paths` need no key; `answer` words a refusal."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        *,
        key: str | None = None,
        origins: Collection[str] = (),
        open_paths: Collection[str] = (),
        answer: Callable[[str, int], Response] = PlainTextResponse,
    ) -> None:
        self.app, self.max_bytes, self.key = app, max_bytes, key and key.strip()
        self.origins, self.open_paths, self.answer = origins, open_paths, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the servers speak no WebSocket
            await self.app(scope, receive, send)
            return
        left = self.max_bytes

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, self._too_long)
            return message

        async def add_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal(Headers(scope=scope), scope["path"])
        await (refusal or self.app)(scope, limited, add_headers)

    def _refusal(self, headers: Headers, path: str) -> Response | None:
        if is_foreign(headers, self.origins):
            return self.answer("Requests from other sites are refused.", 403)
        if path not in self.open_paths and not self._has_key(headers):
            words = "The API key is missing or wrong; send it as Authorization: Bearer KEY."
            return self.answer(words, 401)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.max_bytes:
            return self.answer(self._too_long, 413)
        return None

    @property
    def _too_long(self) -> str:
        return f"The request is longer than {self.max_bytes:,} bytes."

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
