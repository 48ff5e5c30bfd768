"""Connections: an ASGI application on an address of this machine, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import socket
import sys
from typing import Any

import uvicorn

MAX_CONNECTIONS = 1000


def bind(host: str, port: int) -> socket.socket:
    """A listening socket for an address that is free; for port 0, any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family)
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
    """Of a server that other machines can reach."""
    print(
        f"Warning: the {what} listens on {host}, so other machines can reach it. It asks for "
        f"{secret}, but the connection is not encrypted: use it in a network that you trust.",
        file=sys.stderr,
        flush=True,
    )


def make_server(app: Any, close_seconds: int) -> uvicorn.Server:
    """Requests that run when it ends have `close_seconds`."""
    config = uvicorn.Config(
        app,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
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
