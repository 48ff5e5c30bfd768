"""Server: a model -> the routes on an address of this machine, until Ctrl-C or SIGTERM.

SIGTERM drains: no new connection is accepted, and running requests have time to end.
"""

from __future__ import annotations

import secrets
from contextlib import closing
from pathlib import Path

from causal_qwen.serving import connections
from causal_qwen.serving.app import make_app
from causal_qwen.serving.limits import Limits
from causal_qwen.serving.security import is_loopback
from causal_qwen.serving.service import Service
from causal_qwen.session import open as open_session

MAX_CONNECTIONS = 1000


def launch(
    model: str,
    *,
    name: str,
    individuals: Path,
    engine: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    origins: tuple[str, ...] = (),
    regressors: dict[str, Path] | None = None,
    limits: Limits | None = None,
) -> None:
    """Serve a model. Without a key, an address of other machines gets one."""
    limits = limits or Limits()
    key = api_key or (None if is_loopback(host) else secrets.token_urlsafe())
    with connections.bind(host, port) as bound:  # before a model is loaded
        loaded = open_session(model, engine, device=device, dtype=dtype).engine
        with closing(Service(loaded, name, individuals, limits, regressors)) as service:
            app = make_app(service, host, key, origins)
            server = connections.make_server(app, MAX_CONNECTIONS, limits.drain_seconds)
            if not is_loopback(host):
                connections.warn("server", host, "the API key")
                if key != api_key:
                    print(f"API key: {key}", flush=True)
            address = connections.address_of(host, bound)
            print(f"{name} is served at {address}/v1 (Ctrl-C closes it).", flush=True)
            connections.run(server, bound)
