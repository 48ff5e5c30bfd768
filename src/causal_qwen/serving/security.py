"""Security: which requests a server on this machine answers; the playground's, too.

A page of another site can send requests to our address and, by DNS rebinding (its own name now
resolves to 127.0.0.1), read the answers. Such a request has the foreign name in `Host` or `Origin`.

    request -> Host -> Origin -> key -> length of the body -> the app
                400     403      401                   413

A server that other machines reach answers to any name, and asks for a key or a login.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection

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
    app: ASGIApp,
    host: str,
    max_bytes: int,
    *,
    key: str | None = None,
    origins: Collection[str] = (),
    open_paths: Collection[str] = (),
    answer: Callable[[str, int], Response] = PlainTextResponse,
) -> ASGIApp:
    """An app that is bound to `host`, behind all checks.

    Pages of `origins` may call it; `open_paths` need no key; `answer` words a refusal.
    """
    too_long = f"The request is longer than {max_bytes:,} bytes."

    def refusal(headers: Headers, path: str) -> Response | None:
        if is_foreign(headers, origins):
            return answer("Requests from other sites are refused.", 403)
        if key is not None and path not in open_paths and not has_key(headers, key):
            words = "The API key is missing or wrong; send it as Authorization: Bearer KEY."
            return answer(words, 401)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > max_bytes:
            return answer(too_long, 413)
        return None

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the servers speak no WebSocket
            return await app(scope, receive, send)
        left = max_bytes

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, too_long)
            return message

        async def add_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = refusal(Headers(scope=scope), scope["path"])
        if refused is not None:
            refused.headers["Connection"] = "close"  # the body is not read
        await (refused or app)(scope, limited, add_headers)

    found: ASGIApp = guarded
    if is_loopback(host):
        names = ["127.0.0.1", "[::1]", "localhost"]
        found = TrustedHostMiddleware(found, names, www_redirect=False)
    if origins:
        found = CORSMiddleware(
            found, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"]
        )
    return found


def has_key(headers: Headers, key: str) -> bool:
    """In a time that does not depend on how much of the key is right."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(
        given.strip().encode(), key.strip().encode()
    )


def is_foreign(headers: Headers, allowed: Collection[str] = ()) -> bool:
    """Whether a page of another site sends this: its `Origin`, which browsers send with every
    write, is neither this server nor `allowed`; of images, browsers say `Sec-Fetch-Site`. Links
    from other sites are welcome."""
    origin, here = headers.get("origin"), headers.get("host", "").lower()
    if origin in allowed:
        return False
    if origin is not None and origin.lower().partition("://")[2] != here:
        return True  # "null" of a file or a sandbox, too
    site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
    return site in ("cross-site", "same-site") and mode != "navigate"
