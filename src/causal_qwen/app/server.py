"""Server: the page of a served model, on this machine only unless `--host` says otherwise.

The page loads nothing from other hosts and reports nothing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import webbrowser
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import ASGIApp

MAX_REQUEST_BYTES = 100_000
MAX_SESSIONS = 1000  # whose individuals are kept, the latest
CLOSE_SECONDS = 2  # for running requests to end


def launch(
    model: str = "",
    host: str = "127.0.0.1",
    port: int = 7860,
    open_browser: bool = True,
    auth: str | None = None,
    device: str = "auto",
    url: str | None = None,
    api_key: str | None = None,
) -> None:
    """Serve the page for a model (the embedded one by default) until Ctrl-C.

    `auth` is "user:password". Without it, an address of other machines asks for one that is drawn.
    With `url`, the model is that of `causal-qwen serve` there, and torch is not needed; without, a
    server is started in this process.
    """
    with ExitStack() as opened:
        files = Path(tempfile.gettempdir(), f"causal-qwen-{secrets.token_hex(8)}")
        configure_gradio(files)
        from causal_qwen.app.page import build
        from causal_qwen.app.served import ServedModel
        from causal_qwen.serving import connections
        from causal_qwen.serving.security import is_loopback

        bound = opened.enter_context(connections.bind(host, port))  # before a model is loaded
        account: Any = None if auth is None else tuple(auth.split(":", 1))
        if account is not None and not (len(account) == 2 and all(account)):
            raise ValueError("--auth needs a user and a password, as in --auth ada:secret.")
        if not is_loopback(host):
            connections.warn("playground", host, "a user and a password")
            if account is None:
                account = "causal-qwen", secrets.token_urlsafe()
                print("User: {}  Password: {}".format(*account), flush=True)
        if is_local := url is None:
            from causal_qwen.app.local import LocalServer

            print("Opening the model ...", flush=True)
            local = opened.enter_context(LocalServer(model, device))
            url, api_key = local.url, local.key
        served = ServedModel.open(url, api_key)
        files.mkdir(mode=0o700)  # not before the imports, which a signal ends at once
        opened.callback(shutil.rmtree, files)
        app = make_app(build(served, is_local), host, account)
        server = connections.make_server(app, CLOSE_SECONDS)
        address = connections.address_of(host, bound)
        print(f"The playground is open at {address} (Ctrl-C closes it).", flush=True)
        if open_browser:
            webbrowser.open(address)
        connections.run(server, bound)


def configure_gradio(files: Path) -> None:
    """Settings that Gradio reads when it is imported: no reports, and a directory for uploads."""
    os.environ |= {
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "GRADIO_TEMP_DIR": str(files),
    }


def make_app(
    page: Any,
    host: str = "127.0.0.1",
    account: tuple[str, str] | None = None,
) -> ASGIApp:
    """The page as an ASGI application, guarded."""
    import gradio
    from fastapi import FastAPI

    from causal_qwen.app.page import CSS
    from causal_qwen.serving.security import guard

    page.state_session_capacity = MAX_SESSIONS
    app = gradio.mount_gradio_app(
        FastAPI(openapi_url=None),
        page,
        path="/",
        auth=account,
        show_error=True,  # of a malformed request; a message, without a traceback
        ssr_mode=False,
        pwa=False,
        run_history=False,
        enable_monitoring=False,
        footer_links=[],
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
    return guard(app, host, MAX_REQUEST_BYTES)
