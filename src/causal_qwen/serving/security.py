"""Security: which requests a server on this machine answers; the playground's, too.

A page of another site runs in the same browser as ours and can send requests to our address. By
DNS rebinding (the name of its own host now resolves to 127.0.0.1) it can even read the answers.
Such a request carries the foreign name in `Host` or in `Origin`.

    request -> Host -> Origin -> password or token -> length and time of the body -> the app
                400     403            401                   413, 408

Without a login a server answers to this machine's names only. With one, any name will do: another
site knows neither the key nor, for its own name, the cookie.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "::1", "localhost")
TOKEN = "token"  # in the query of the first request
COOKIE = "causal-qwen-login"
BODY_SECONDS = 60.0
HEADERS = {  # of every answer
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Login:
    """A user and a password; or a token, for any user."""

    password: str
    user: str | None = None

    @classmethod
    def parse(cls, text: str) -> Login:
        """Of "user:password"."""
        user, _, password = text.partition(":")
        if not (user and password):
            raise ValueError("--auth needs a user and a password, as in --auth ada:secret.")
        return cls(password, user)

    @classmethod
    def for_host(cls, host: str, given: Login | None) -> Login | None:
        """Where other machines can reach a server, there is one: without any, a new token."""
        return given or (None if is_loopback(host) else cls(secrets.token_urlsafe(24)))

    @property
    def is_token(self) -> bool:
        return self.user is None

    def admits(self, request: Request) -> bool:
        """By `Authorization`, or by the cookie of a token. In a time that does not depend on how
        much of the secret is right."""
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        given = f"{scheme.capitalize()} {value.strip()}"
        expected = f"Bearer {self.password}"
        if not self.is_token:
            pair = f"{self.user}:{self.password}".encode()
            expected = f"Basic {base64.b64encode(pair).decode()}"
        cookie = request.cookies.get(COOKIE, "") if self.is_token else ""
        return _is_equal(given, expected) or _is_equal(cookie, self.password)


def is_loopback(host: str) -> bool:
    return host.strip("[]").lower() in LOOPBACK


def guard(
    app: ASGIApp,
    host: str,
    max_bytes: int,
    login: Login | None = None,
    *,
    origins: Collection[str] = (),
    **options: Any,
) -> ASGIApp:
    """An app that is bound to `host`, behind all checks. Pages of `origins` may call it."""
    app = Guard(app, max_bytes, login, origins=origins, **options)
    if login is None:
        names = {*LOOPBACK, host.strip("[]")}
        allowed = [f"[{name}]" if ":" in name else name for name in names]
        app = TrustedHostMiddleware(app, allowed, www_redirect=False)
    if origins:
        app = CORSMiddleware(
            app, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"]
        )
    return Framed(app)


class Guard:
    """Middleware: refuses what another site or a stranger has sent, what is too long, and what
    does not arrive. `open_paths` need no login; `answer` words a refusal."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        login: Login | None = None,
        *,
        origins: Collection[str] = (),
        open_paths: Collection[str] = (),
        answer: Callable[[str, int], Response] = PlainTextResponse,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self.app, self.max_bytes, self.login = app, max_bytes, login
        self.origins, self.open_paths, self.answer = origins, open_paths, answer
        self.body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the servers speak no WebSocket
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        refusal = self._refusal(request)
        if refusal is None:
            body = await self._body(request)
            if isinstance(body, bytes):
                await self.app(scope, _replay(body, receive), send)
                return
            refusal = body
        await refusal(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        if is_foreign(request.headers, self.origins):
            return self.answer("Requests from other sites are refused.", 403)
        login = self.login
        if login is None or request.url.path in self.open_paths or login.admits(request):
            return None
        if login.is_token and _is_equal(request.query_params.get(TOKEN, ""), login.password):
            return _keep_token(request, login)
        refusal = self.answer(
            "The API key is missing or wrong: send it as Authorization: Bearer KEY, or open the "
            "address that the server has printed.",
            401,
        )
        refusal.headers["WWW-Authenticate"] = 'Basic realm="CausalQwen", charset="UTF-8"'
        return refusal

    async def _body(self, request: Request) -> bytes | Response:
        """The whole body; or the refusal of one that is too long, or does not arrive."""
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


def is_foreign(headers: Headers, allowed: Collection[str] = ()) -> bool:
    """Whether a page of another site sends this: its `Origin`, which browsers send with every
    write, is neither this server nor an `allowed` site.

    Other programs send none. A hostile page can also cause requests without it, such as those of
    its images: browsers then say `Sec-Fetch-Site`. Links from other sites are welcome.
    """
    origin = headers.get("origin")
    if origin in allowed:
        return False
    if origin is not None:
        here = headers.get("host", "").lower()
        if origin.lower().partition("://")[2] != here:  # "null" of a file or a sandbox, too
            return True
    site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
    return site in ("cross-site", "same-site") and mode != "navigate"


def _keep_token(request: Request, login: Login) -> Response:
    """Keep the token in a cookie, and remove it from the address."""
    rest = urlencode([pair for pair in request.query_params.multi_items() if pair[0] != TOKEN])
    path = "/" + request.url.path.lstrip("/")  # "//host" would be another site
    response = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
    response.set_cookie(COOKIE, login.password, httponly=True, samesite="strict")
    return response


def _is_equal(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode(), expected.encode())


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


class Framed:
    """Middleware: no answer may be framed by another page."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self.app(scope, receive, add)
