"""The server of `causal-qwen serve` on a real socket of this process, with a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn

from causal_qwen.serving.app import make_app
from causal_qwen.serving.connections import bind
from causal_qwen.serving.service import Service

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
KEY = "sesame"


def run_async(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """In a thread of its own: Playwright, if a worker has tested the browser before, keeps an event
    loop running in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def rounded(text: str) -> str:
    """Numbers to three digits: the last ones depend on the rows that are decoded beside them."""
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.3g}", text)


@contextlib.contextmanager
def running(service: Service) -> Iterator[str]:
    """The address of the server, in a thread."""
    with serving(make_app(service, key=KEY)) as address:
        yield address


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of any ASGI application."""
    with bind("127.0.0.1", 0) as bound:
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=asyncio.run, args=(server.serve([bound]),))
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
