"""Server: a model -> the routes on an address of this machine, until Ctrl-C or SIGTERM.

SIGTERM drains: no new connection is accepted, and running requests have time to end.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from causal_qwen.paths import install_hint
from causal_qwen.serving.limits import Limits
from causal_qwen.serving.sockets import address_of, bind
from causal_qwen.session import open as open_session

MAX_CONNECTIONS = 1000
WARNING = (
    "Warning: the server listens on {host}, so other machines can reach it. It asks for the API "
    "key, but the connection is not encrypted: use it in a network that you trust."
)


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
    _check_web()
    with bind(host, port) as bound:  # before a model is loaded
        from causal_qwen.serving.app import make_app
        from causal_qwen.serving.connections import serve_app
        from causal_qwen.serving.security import BoundNames, Login
        from causal_qwen.serving.service import Service

        names = BoundNames(host, bound.getsockname()[0])
        login = None if api_key is None else Login(api_key)
        if login is None and not names.is_loopback:
            login = Login.draw_token()
        service = Service(
            open_session(model, engine, device=device, dtype=dtype).engine,
            name,
            individuals,
            limits,
            regressors,
        )
        try:
            app = make_app(service, names, login, origins)
            if not names.is_loopback:
                print(WARNING.format(host=host), file=sys.stderr, flush=True)
                if api_key is None and login is not None:
                    print(f"API key: {login.password}", flush=True)
            bound.listen()
            address = address_of(names, host, bound.getsockname()[1])
            opened = f"{name} is served at {address}/v1 (Ctrl-C closes it)."
            serve_app(
                app,
                bound,
                max_connections=MAX_CONNECTIONS,
                close_seconds=limits.drain_seconds,
                announce=partial(print, opened, flush=True),
            )
        finally:
            service.close()


def _check_web() -> None:
    for module in ("fastapi", "prometheus_client", "uvicorn"):
        try:
            __import__(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise ImportError(
                f"The server needs {module}, which is not installed: {install_hint('serve')}"
            ) from None
