"""Server: a model -> the page, on this machine only.

Nothing is fetched from elsewhere and nothing is reported: fonts are the system's, scripts come
with Gradio, and its analytics are off.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

from causal_qwen.playground.limits import FILE_BYTES, SESSIONS

OFFLINE = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}


def launch(
    model: str = "", host: str = "127.0.0.1", port: int = 7860, open_browser: bool = True
) -> None:
    """Open a model (the embedded one by default) and show the page until Ctrl-C."""
    port = check_port(host, port)
    os.environ.update(OFFLINE)  # read when gradio is imported
    try:
        import gradio
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise ImportError(
            "The playground needs gradio, which is not installed: pip install 'causal-qwen[app]'"
        ) from None
    from causal_qwen.playground.page import LOOK, build
    from causal_qwen.playground.studio import Studio

    print("Opening the model ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="causal-qwen-") as files:
        studio = Studio.open(model, Path(files))
        page = build(studio)
        try:
            _serve(gradio, page, host, port, open_browser, LOOK)
        finally:
            page.close(verbose=False)
            studio.close()


def check_port(host: str, port: int) -> int:
    """Refuse a port that something else listens on, before a model is loaded for nothing.

    -> the port; for 0, one that is free
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            return int(probe.getsockname()[1])
        except OSError as error:
            raise OSError(
                f"{host}:{port} cannot be used ({error.strerror}); choose another with --port."
            ) from None


def _serve(
    gradio: Any, page: Any, host: str, port: int, open_browser: bool, look: dict[str, Any]
) -> None:
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
        max_file_size=FILE_BYTES,
        state_session_capacity=SESSIONS,
        theme=gradio.themes.Base(
            primary_hue="teal",
            font=["system-ui", "sans-serif"],
            font_mono=["ui-monospace", "monospace"],
        ).set(  # white letters need a darker ground than the theme's
            button_primary_background_fill="*primary_700",
            button_primary_background_fill_hover="*primary_800",
            button_primary_background_fill_dark="*primary_700",
            button_primary_background_fill_hover_dark="*primary_800",
        ),
        **look,
    )
    # A browser opens six connections to one server: with a heartbeat beside every tab, three that
    # speak would leave none for Stop. Gradio keeps the states of the latest sessions without it.
    page.config["connect_heartbeat"] = False
    print(f"The playground is open at http://{host}:{port} (Ctrl-C closes it).", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print("\nClosed.", flush=True)
