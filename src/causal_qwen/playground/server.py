"""Server: a model -> the page, served on this machine only.

The page loads nothing from other hosts and reports nothing: fonts are the system's, scripts come
with Gradio, and its analytics are off.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

from causal_qwen.paths import install_hint

MAX_FILE_BYTES = 1_000_000  # of an uploaded individual
MAX_SESSIONS = 1000  # whose individuals are kept, the latest
OFFLINE = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}


def launch(
    model: str = "", host: str = "127.0.0.1", port: int = 7860, open_browser: bool = True
) -> None:
    """Serve the page for a model (the embedded one by default) until Ctrl-C."""
    port = check_port(host, port)
    os.environ.update(OFFLINE)  # read when gradio is imported
    try:
        import gradio
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise ImportError(
            f"The playground needs gradio, which is not installed: {install_hint('app')}"
        ) from None
    from causal_qwen.playground.page import CSS, build
    from causal_qwen.playground.state import AppState

    print("Opening the model ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="causal-qwen-") as files:
        state = AppState.open(model, Path(files))
        page = build(state)
        try:
            _serve(gradio, page, CSS, host, port, open_browser)
        finally:
            page.close(verbose=False)
            state.worker.close()


def check_port(host: str, port: int) -> int:
    """Check that a port is free, before a model is loaded. -> the port; a free one for 0"""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            return int(probe.getsockname()[1])
        except OSError as error:
            raise OSError(
                f"{host}:{port} cannot be used ({error.strerror}); choose another with --port."
            ) from None


def _serve(gradio: Any, page: Any, css: str, host: str, port: int, open_browser: bool) -> None:
    page.launch(
        server_name=host,
        server_port=port,
        inbrowser=open_browser,
        prevent_thread_lock=True,
        quiet=True,
        share=False,
        ssr_mode=False,
        pwa=False,
        run_history=False,
        footer_links=[],
        max_file_size=MAX_FILE_BYTES,
        state_session_capacity=MAX_SESSIONS,
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
        css=css,
    )
    # A browser opens six connections to one server: with a heartbeat beside every tab, three that
    # generate would leave none for Stop. Gradio keeps the latest sessions without it.
    page.config["connect_heartbeat"] = False
    print(f"The playground is open at http://{host}:{port} (Ctrl-C closes it).", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print("\nClosed.", flush=True)
