"""Connections: an ASGI application on an address of this machine, until Ctrl-C or SIGTERM.

A client that opens a connection and does not finish its request would keep it for ever. Headers
have `HEADER_SECONDS`, after which the connection is closed; the body has a limit in `security`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0
WARNING = (
    "Warning: the {what} listens on {host}, so other machines can reach it. It asks for {secret}, "
    "but the connection is not encrypted: use it in a network that you trust."
)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket for an address that is free; for port 0, any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    place = host.strip("[]"), port
    try:
        return socket.create_server(place, family=family, dualstack_ipv6=is_dual)
    except OSError as error:
        raise OSError(
            f"{host}:{port} cannot be used ({error.strerror}); choose another --host or --port."
        ) from None


def address_of(host: str, bound: socket.socket) -> str:
    """The address to open in a browser on this machine."""
    name, port = host.strip("[]"), bound.getsockname()[1]
    if name in ("0.0.0.0", "::"):
        name = socket.gethostname()
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def warn(what: str, host: str, secret: str) -> None:
    print(WARNING.format(what=what, host=host, secret=secret), file=sys.stderr, flush=True)


class ImpatientProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose next request does not begin in time."""

    header_seconds = HEADER_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.header_seconds, self._close_unless_begun)

    def _close_unless_begun(self) -> None:
        if getattr(self.cycle, "response_complete", True):  # no cycle before the first request
            self.transport.close()


def make_server(app: Any, max_connections: int, close_seconds: int) -> uvicorn.Server:
    """Requests that run when it ends have `close_seconds`."""
    config = uvicorn.Config(
        app,
        http=ImpatientProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=max_connections,
        timeout_graceful_shutdown=close_seconds,
    )
    config.load()
    config.get_loop_factory()  # imports uvloop: a signal during an import ends a process at once
    return uvicorn.Server(config)


def run(server: uvicorn.Server, bound: socket.socket) -> None:
    """Until a signal, which is raised again."""
    try:
        server.run(sockets=[bound])
    except KeyboardInterrupt:
        print("\nClosed.", flush=True)
