"""Sockets: the address on which a server listens."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from causal_qwen.serving.security import BoundNames


def bind(host: str, port: int) -> socket.socket:
    """A socket for an address that is free; for port 0, any free port."""
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(
            f"{host}:{port} cannot be used ({error.strerror}); choose another --host."
        ) from None
    try:
        if os.name == "posix":  # elsewhere it would share the port with another server
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(
            f"{host}:{port} cannot be used ({error.strerror}); choose another with --port."
        ) from None
    return bound


def address_of(names: BoundNames, host: str, port: int) -> str:
    """The address to open in a browser on this machine."""
    name = socket.gethostname() if names.address.is_unspecified else host.strip("[]")
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
