"""Signals: Ctrl-C exits with 130, SIGTERM with 143, after every `finally`, without a traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

REPEAT_SECONDS = 0.05  # until a lost signal is sent again
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ExitOnSignals:
    """A context in which Ctrl-C and SIGTERM run every `finally` on their way out.

    `received` is the first of them. An exception raised by a handler is lost in some places (a
    destructor, a callback of C code): Python reports it there and goes on, so the signal is sent
    again.
    """

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> ExitOnSignals:
        self._before = {one: signal.getsignal(one) for one in _SIGNALS}
        self._hook = sys.unraisablehook
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():  # as Python demands
            if self._before[signal.SIGINT] is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, self._handle)
            signal.signal(signal.SIGTERM, self._handle)
            sys.unraisablehook = self._send_again
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for one, handler in self._before.items():
                signal.signal(one, handler)
            sys.unraisablehook = self._hook

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

    def _send_again(self, lost: sys.UnraisableHookArgs) -> None:
        if self.received is None or not issubclass(lost.exc_type, KeyboardInterrupt | SystemExit):
            self._hook(lost)
            return
        again = threading.Timer(REPEAT_SECONDS, os.kill, (self._process, self.received))
        again.daemon = True
        again.start()


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
