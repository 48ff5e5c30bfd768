"""Security: which requests a server on this machine answers. An ASGI middleware for any app.

A page of another site runs in the same browser as ours and can send requests to our address. By
DNS rebinding (the name of its own host now resolves to 127.0.0.1) it can even read the answers.
Such a request carries the foreign name in `Host` or in `Origin`; `Guard` answers 403 to it.

    request -> Host -> Origin -> password or token -> length and time of the body -> the app
                403     403            401                   413, 408
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
import secrets
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?", re.IGNORECASE)
ORIGIN = re.compile(r"(https?)://(.+)", re.IGNORECASE)
DEFAULT_PORTS = {"http": 80, "https": 443}
TOKEN = "token"  # in the query of the first request
TOKEN_BYTES = 24
BODY_SECONDS = 60.0
COOKIE = "causal-qwen-login"
HEADERS = {  # of every answer
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Authority(NamedTuple):
    """The name and the port of a `Host` header."""

    name: str  # lower case, without brackets and a final dot
    port: int | None


def parse_authority(text: str) -> Authority | None:
    """ "LOCALHOST.:80" -> ("localhost", 80); None if malformed."""
    if (found := AUTHORITY.fullmatch(text)) is None:
        return None
    bracketed, plain, port = found.groups()
    if bracketed is not None and not isinstance(as_address(bracketed), ipaddress.IPv6Address):
        return None
    name = (bracketed or plain).lower().removesuffix(".")
    return Authority(name, None if port is None else int(port))


def as_address(name: str) -> Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


class BoundNames:
    """The names under which a server is reached: what it is bound to, and this machine's own.

    A server on all addresses answers to every address: DNS rebinding needs a name.
    """

    def __init__(self, host: str, address: str) -> None:
        """`host` as the user wrote it, `address` as it was bound."""
        self.address = ipaddress.ip_address(address)
        self.names = {host.strip("[]").lower().removesuffix(".")}
        if self.address.is_unspecified:
            machine = socket.gethostname().lower()
            self.names |= {machine, f"{machine}.local"}
        if self.is_loopback or self.address.is_unspecified:
            self.names |= {"localhost"}

    @property
    def is_loopback(self) -> bool:
        return self.address.is_loopback

    def __contains__(self, name: str) -> bool:
        if (address := as_address(name)) is None:
            return name in self.names
        if self.address.is_unspecified:
            return True
        return address == self.address or (self.is_loopback and address.is_loopback)

    def __str__(self) -> str:
        shown = self.names | {str(self.address)}
        if self.is_loopback:
            shown |= {"127.0.0.1", "::1"}
        return ", ".join(sorted(f"[{one}]" if ":" in one else one for one in shown))


@dataclass(frozen=True)
class Login:
    """A user and a password; or a token, which is a password for any user."""

    password: str
    user: str | None = None

    @classmethod
    def parse(cls, text: str) -> Login:
        """Of "user:password"."""
        user, colon, password = text.partition(":")
        if not (user and colon and password):
            raise ValueError("--auth needs a user and a password, as in --auth ada:secret.")
        return cls(password, user)

    @classmethod
    def draw_token(cls) -> Login:
        return cls(secrets.token_urlsafe(TOKEN_BYTES))

    @property
    def is_token(self) -> bool:
        return self.user is None

    def admits(self, user: str, password: str) -> bool:
        is_user = self.user is None or _equal(user, self.user)
        return _equal(password, self.password) and is_user

    def admits_header(self, authorization: str) -> bool:
        """`Basic base64(user:password)`, or `Bearer token`."""
        scheme, _, value = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return self.is_token and _equal(value.strip(), self.password)
        if scheme.lower() != "basic":
            return False
        try:
            text = base64.b64decode(value.strip(), validate=True).decode("utf-8")
        except ValueError:  # no base64, or no text in it
            return False
        user, _, password = text.partition(":")
        return self.admits(user, password)


class Refusal(NamedTuple):
    status: int
    message: str


def plain_answer(refusal: Refusal) -> Response:
    return PlainTextResponse(refusal.message, refusal.status)


class Guard:
    """The middleware: refuses what another site or a stranger has sent, what is too long, and
    what does not arrive.

    Pages of `origins` may send requests; `open_paths` need no login; `answer` words a refusal.
    """

    def __init__(
        self,
        app: ASGIApp,
        names: BoundNames,
        max_bytes: int,
        login: Login | None = None,
        *,
        origins: Collection[str] = (),
        open_paths: Collection[str] = (),
        answer: Callable[[Refusal], Response] = plain_answer,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self.app, self.names, self.max_bytes, self.login = app, names, max_bytes, login
        self.origins, self.open_paths, self.answer = origins, open_paths, answer
        self.body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        headers = connection.headers
        refusal = self.check_host(headers) or check_origin(headers, self.origins)
        is_open = self.login is None or scope["path"] in self.open_paths
        if refusal is None and not is_open and not self._is_known(connection):
            if self._brings_token(connection) and scope["type"] == "http":
                await self._accept_token(connection, receive, send)
                return
            refusal = Refusal(401, "Log in: open the address that the server has printed.\n")
        if refusal is not None:
            await self._refuse(refusal, scope, receive, send)
            return
        if scope["type"] == "http":
            body = await self._body(headers, receive)
            if isinstance(body, Refusal):
                await self._refuse(body, scope, receive, send)
                return
            receive, send = replay(body, receive), _with_headers(send)
        await self.app(scope, receive, send)

    async def _body(self, headers: Headers, receive: Receive) -> bytes | Refusal:
        try:
            async with asyncio.timeout(self.body_seconds):
                body = await _read_body(headers, receive, self.max_bytes)
        except TimeoutError:
            return Refusal(408, f"The request is not whole after {self.body_seconds:g} seconds.\n")
        if body is None:
            return Refusal(413, f"The request is longer than {self.max_bytes:,} bytes.\n")
        return body

    def check_host(self, headers: Headers) -> Refusal | None:
        """One `Host`, with a name under which this server was started."""
        hosts = headers.getlist("host")
        authority = parse_authority(hosts[0]) if len(hosts) == 1 else None
        if authority is not None and authority.name in self.names:
            return None
        return Refusal(403, f"This server answers to {self.names} only, by the Host header.\n")

    async def _refuse(self, refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # closed before it is accepted: the server answers 403
            await send({"type": "websocket.close", "code": 1008})
            return
        response = self.answer(refusal)
        if refusal.status == 401:
            response.headers["WWW-Authenticate"] = 'Basic realm="CausalQwen", charset="UTF-8"'
        if refusal.status in (408, 413):
            response.headers["Connection"] = "close"  # the rest is not read
        await response(scope, receive, _with_headers(send))

    def _is_known(self, connection: HTTPConnection) -> bool:
        assert self.login is not None
        if self.login.is_token and _equal(connection.cookies.get(COOKIE, ""), self.login.password):
            return True
        return self.login.admits_header(connection.headers.get("authorization", ""))

    def _brings_token(self, connection: HTTPConnection) -> bool:
        assert self.login is not None
        given = connection.query_params.get(TOKEN, "")
        return self.login.is_token and _equal(given, self.login.password)

    async def _accept_token(self, connection: HTTPConnection, receive: Receive, send: Send) -> None:
        """Keep the token in a cookie, and remove it from the address."""
        assert self.login is not None
        others = [pair for pair in parse_qsl(connection.url.query) if pair[0] != TOKEN]
        path = "/" + connection.url.path.lstrip("/")  # "//host" would be another site
        response = RedirectResponse(path + (f"?{urlencode(others)}" if others else ""), 303)
        response.set_cookie(COOKIE, self.login.password, httponly=True, samesite="strict")
        await response(connection.scope, receive, _with_headers(send))


def check_origin(headers: Headers, allowed: Collection[str] = ()) -> Refusal | None:
    """`Origin`, which browsers send with every write, must be this server, or an `allowed` site.

    Other programs send none. A hostile page can also cause requests without it, such as those of
    its images: browsers then say `Sec-Fetch-Site`. Links from other sites are welcome.
    """
    origins = headers.getlist("origin")
    if allowed and origins and all(origin in allowed for origin in origins):
        return None
    site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
    is_foreign = site in ("cross-site", "same-site") and mode != "navigate"
    for origin in origins:
        is_foreign = is_foreign or not _is_same(origin, headers["host"])
    return Refusal(403, "Requests from other sites are refused.\n") if is_foreign else None


def _is_same(origin: str, host: str) -> bool:
    if (found := ORIGIN.fullmatch(origin)) is None:  # "null" of a file or a sandbox, too
        return False
    default = DEFAULT_PORTS[found[1].lower()]
    here, there = parse_authority(host), parse_authority(found[2])
    if here is None or there is None:
        return False
    return (here.name, here.port or default) == (there.name, there.port or default)


def _equal(given: str, expected: str) -> bool:
    """In a time that does not depend on the difference."""
    return secrets.compare_digest(given.encode("utf-8"), expected.encode("utf-8"))


async def _read_body(headers: Headers, receive: Receive, most: int) -> bytes | None:
    """The whole body, or None if it is too long."""
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > len(str(most)) or int(length) > most:
        return None
    body = bytearray()
    if length == "0" and "transfer-encoding" not in headers:
        return b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > most:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body at once, and then waits for the end of the connection."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _with_headers(send: Send) -> Send:
    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return add
