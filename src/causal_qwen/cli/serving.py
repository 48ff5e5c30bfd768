"""Serving: serve."""

from __future__ import annotations

import secrets
from contextlib import closing
from pathlib import Path
from typing import Annotated

from typer import Option

from causal_qwen.cli import options as opt
from causal_qwen.conversion.location import unless_embedded
from causal_qwen.paths import EMBEDDED

DRAIN_SECONDS = 30  # for running requests after SIGTERM


def serve(
    model: opt.ModelName = "",
    engine: opt.Engine = "auto",
    device: opt.Device = "auto",
    host: Annotated[
        str, Option(help="The address to listen on; other machines need the API key.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="The port to listen on.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        Option(
            help="Answer only requests with this key.",
            envvar="CAUSAL_QWEN_API_KEY",
            callback=opt.given,
        ),
    ] = None,
    name: Annotated[
        str | None, Option(help="The model's id in requests. Default: its directory's name.")
    ] = None,
    regressor: Annotated[
        list[str] | None,
        Option(help="A fitted regressor for /v1/numbers, as DIRECTORY or NAME=DIRECTORY."),
    ] = None,
    cors: Annotated[
        list[str] | None, Option(help="Let pages of this origin call the server from a browser.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        opt.set_option(
            "max_rows (16) decoded together, max_waiting (64) for a place, max_prompt (4096) "
            "and max_tokens (1024) of a text, or dtype"
        ),
    ] = None,
) -> None:
    """Serve a model over OpenAI's protocol; each user meets their own individual. Ctrl-C closes it.

    Example: causal-qwen serve --port 8001
    """
    from causal_qwen.serving import connections
    from causal_qwen.serving.app import make_app
    from causal_qwen.serving.requests import Limits
    from causal_qwen.serving.security import is_loopback
    from causal_qwen.serving.service import Service
    from causal_qwen.session import open as open_session

    given = opt.parse_settings(settings, (*Limits.__dataclass_fields__, "dtype"))
    dtype = given.pop("dtype", "auto")
    limits = Limits(**given)
    fitted = dict(_named_directory(one) for one in regressor or ())
    named = unless_embedded(model)
    shown = name or (EMBEDDED if named is None else Path(named).name)
    key = api_key or (None if is_loopback(host) else secrets.token_urlsafe())
    with connections.bind(host, port) as bound:  # before a model is loaded
        loaded = open_session(model, engine, device=device, dtype=dtype).engine
        with closing(Service(loaded, shown, limits, fitted)) as service:
            app = make_app(service, host, key, cors or ())
            server = connections.make_server(app, DRAIN_SECONDS)
            if not is_loopback(host):
                connections.warn("server", host, "the API key")
                if key != api_key:
                    print(f"API key: {key}", flush=True)
            address = connections.address_of(host, bound)
            print(f"{shown} is served at {address}/v1 (Ctrl-C closes it).", flush=True)
            connections.run(server, bound)


def _named_directory(text: str) -> tuple[str, Path]:
    """NAME=DIRECTORY, or a directory that is its own name."""
    name, equals, path = text.partition("=")
    directory = Path(path if equals else name)
    if not (directory / "regressor.skops").is_file():
        raise FileNotFoundError(
            f"{directory} is not a regressor's directory; write one with causal-qwen fit."
        )
    return name if equals else directory.name, directory
