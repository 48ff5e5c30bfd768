"""Server: the page of a served model, on this machine only unless `--host` says otherwise.

The page loads nothing from other hosts and reports nothing: fonts are the system's, scripts come
with Gradio, and its analytics are off.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from causal_qwen.paths import install_hint
from causal_qwen.serving.sockets import address_of, bind

if TYPE_CHECKING:
    from causal_qwen.playground.local import LocalServer
    from causal_qwen.serving.security import BoundNames, Guard, Login

MAX_FILE_BYTES = 1_000_000  # of an uploaded individual
MAX_REQUEST_BYTES = MAX_FILE_BYTES + 100_000  # of a request: a file and its form
MAX_CONNECTIONS = 200
MAX_SESSIONS = 1000  # whose individuals are kept, the latest
CLOSE_SECONDS = 2  # for running requests to end
OFFLINE = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
WARNING = (
    "Warning: the playground listens on {host}, so other machines can reach it. It asks for "
    "{secret}, but the connection is not encrypted: use it in a network that you trust."
)


def launch(
    model: str = "",
    host: str = "127.0.0.1",
    port: int = 7860,
    open_browser: bool = True,
    auth: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    url: str | None = None,
    api_key: str | None = None,
) -> None:
    """Serve the page for a model (the embedded one by default) until Ctrl-C.

    `auth` is "user:password". Without it, an address of other machines is protected by a token.
    With `url`, the model is that of `causal-qwen serve` there, and torch is not needed; without, a
    server is started in this process.
    """
    with ExitStack() as opened:
        bound = opened.enter_context(bind(host, port))  # before a model is loaded
        files = Path(tempfile.gettempdir(), f"causal-qwen-{secrets.token_hex(8)}")
        configure_gradio(files)
        _check_gradio()
        from causal_qwen.playground.page import build
        from causal_qwen.playground.served import ServedModel
        from causal_qwen.serving.security import BoundNames, Login

        names = BoundNames(host, bound.getsockname()[0])
        login = None if auth is None else Login.parse(auth)
        if login is None and not names.is_loopback:
            login = Login.draw_token()
        local: LocalServer | None = None
        if url is None:
            from causal_qwen.playground.local import LocalServer

            print("Opening the model ...", flush=True)
            local = opened.enter_context(LocalServer(model, device, dtype, files / "individuals"))
            url, api_key = local.url, local.key
        served = ServedModel.open(url, api_key)
        opened.callback(served.client.close)
        files.mkdir(mode=0o700)  # not before the imports, which a signal ends at once
        opened.callback(shutil.rmtree, files)
        app = make_app(build(served, files, local), names, login)
        _serve(app, bound, host, open_browser, served.client.close)


def configure_gradio(files: Path) -> None:
    """Settings that Gradio reads when it is imported: no reports, and a directory for uploads."""
    os.environ.update(OFFLINE)
    os.environ["GRADIO_TEMP_DIR"] = str(files)


def make_app(page: Any, names: BoundNames, login: Login | None = None) -> Guard:
    """The page as an ASGI application that answers to `names` only."""
    import gradio
    from fastapi import FastAPI

    from causal_qwen.playground.page import CSS
    from causal_qwen.serving.security import Guard

    page.state_session_capacity = MAX_SESSIONS
    app = gradio.mount_gradio_app(
        FastAPI(openapi_url=None),
        page,
        path="/",
        show_error=True,  # of a malformed request; a message, without a traceback
        ssr_mode=False,
        pwa=False,
        run_history=False,
        enable_monitoring=False,
        footer_links=[],
        max_file_size=MAX_FILE_BYTES,
        theme=gradio.themes.Base(
            primary_hue="teal",
            font=["system-ui", "sans-serif"],
            font_mono=["ui-monospace", "monospace"],
        ).set(  # white text needs a darker background than the theme's
            button_primary_background_fill="*primary_700",
            button_primary_background_fill_hover="*primary_800",
            button_primary_background_fill_dark="*primary_700",
            button_primary_background_fill_hover_dark="*primary_800",
        ),
        css=CSS,
    )
    # A browser opens six connections to one server: with a heartbeat beside every tab, three that
    # generate would leave none for Stop. Gradio keeps the latest sessions without it.
    page.config["connect_heartbeat"] = False
    return Guard(NoAddresses(app), names, MAX_REQUEST_BYTES, login)


class NoAddresses:
    """ASGI middleware: a file of a request is an upload, never an address that Gradio fetches."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        from causal_qwen.serving.security import replay

        if scope["type"] == "http" and scope["method"] == "POST":
            body: bytes = (await receive())["body"]  # whole: `Guard` has read it
            if _names_address(body):
                message = "Files are uploaded, not fetched from an address.\n"
                await PlainTextResponse(message, 400)(scope, receive, send)
                return
            receive = replay(body, receive)
        await self.app(scope, receive, send)


def _names_address(body: bytes) -> bool:
    try:
        nodes = [json.loads(body)]
    except (ValueError, RecursionError):  # a form, or what Gradio cannot read either
        return False
    for node in nodes:  # grows as it goes
        if isinstance(node, dict):
            if "://" in str(node.get("path", "")):  # `url` is where the page shows a file
                return True
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
    return False


def _check_gradio() -> None:
    try:
        import gradio  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise ImportError(
            f"The playground needs gradio, which is not installed: {install_hint('app')}"
        ) from None


def _serve(
    app: Guard,
    bound: socket.socket,
    host: str,
    open_browser: bool,
    on_close: Callable[[], None],
) -> None:
    from causal_qwen.serving.connections import serve_app

    bound.listen()  # a browser that comes before the server waits
    _, port = bound.getsockname()[:2]
    token = f"/?token={app.login.password}" if app.login and app.login.is_token else ""
    address = address_of(app.names, host, port) + token
    if not app.names.is_loopback:
        secret = "the token in its address" if app.login and app.login.is_token else "a password"
        print(WARNING.format(host=host, secret=secret), file=sys.stderr, flush=True)

    def announce() -> None:
        print(f"The playground is open at {address} (Ctrl-C closes it).", flush=True)
        if open_browser:
            webbrowser.open(address)

    serve_app(
        app,
        bound,
        max_connections=MAX_CONNECTIONS,
        close_seconds=CLOSE_SECONDS,
        announce=announce,
        on_close=on_close,
    )
