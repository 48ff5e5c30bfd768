"""Connections: an ASGI application on a bound socket, until Ctrl-C or SIGTERM.

A client that opens a connection and does not finish its request would keep it for ever. Headers
have `HEADER_SECONDS`, after which the connection is closed; the body has a limit in `security`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0


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
        """A begun request has a cycle; an upgraded connection is not HTTP's any more."""
        is_waiting = getattr(self.cycle, "response_complete", True)  # no cycle before the first one
        if is_waiting and self in self.connections:
            self.transport.close()


class ClosingServer(uvicorn.Server):
    """Calls `on_close` when running requests have had their time, before it waits for threads."""

    on_close: Callable[[], None] | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.on_close is not None:
            self.on_close()


def serve_app(
    app: Any,
    bound: socket.socket,
    *,
    max_connections: int,
    close_seconds: int | None,
    announce: Callable[[], None] = lambda: None,
    on_close: Callable[[], None] | None = None,
) -> None:
    """Answer requests; those that run when it ends have `close_seconds`, then `on_close` is called
    to end what they wait for. `announce` is called when nothing is left to import: a signal during
    an import ends the process at once."""
    server = ClosingServer(
        uvicorn.Config(
            app,
            http=ImpatientProtocol,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=max_connections,
            timeout_graceful_shutdown=close_seconds,
        )
    )
    server.on_close = on_close
    server.config.load()
    server.config.get_loop_factory()  # imports uvloop
    announce()
    try:
        server.run(sockets=[bound])  # raises the signal that has ended it
    except KeyboardInterrupt:
        print("\nClosed.", flush=True)
