"""Signals: Ctrl-C exits with 130, SIGTERM with 143, after every `finally`, without a traceback."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class ExitOnSignals:
    """A context in which Ctrl-C and SIGTERM run every `finally` on their way out."""

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> ExitOnSignals:
        self._process, self._before = os.getpid(), {}
        if threading.current_thread() is threading.main_thread():  # as Python demands
            self._before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
            for one, handler in self._before.items():
                if handler is not signal.SIG_IGN:
                    signal.signal(one, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    @property
    def code(self) -> int:
        """The exit code of the received signal."""
        return 128 + (self.received or 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked worker has nothing to clean up; C++ code that is being imported aborts on errors.
        if os.getpid() != self._process or _is_importing(frame):
            os._exit(128 + number)
        self.received = self.received or number
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
