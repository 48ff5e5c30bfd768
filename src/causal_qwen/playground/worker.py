"""Worker: one thread that runs the model, one step at a time, and the queue in front of it.

A growing text submits every token as a step of its own, so visitors take turns token by token: a
request never waits for a whole text of another, and two never share the processor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.5  # between two reports of the place in the queue


class Worker:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="model")

    def run(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call `function` in the worker's thread; CancelledError if the worker is closed."""
        try:
            future = self._pool.submit(function, *arguments, **options)
        except RuntimeError as error:
            raise CancelledError from error
        return future.result()

    def iterate(self, items: Iterator[T]) -> Iterator[T]:
        """The items of an iterator, each computed in the worker's thread."""
        end = object()
        while (item := self.run(next, items, end)) is not end:
            yield item

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class AdmissionQueue:
    """First come, first served: `parallel` requests run, `waiting` others queue, more are refused.

    Gradio counts its own limit per function; this one counts requests across all tabs.
    """

    def __init__(self, parallel: int, waiting: int) -> None:
        self.parallel, self.waiting = parallel, waiting
        self._requests: list[object] = []  # the running ones, then the waiting ones
        self._changed = threading.Condition()

    @contextmanager
    def enter(self) -> Iterator[Callable[[], int]]:
        """-> a function that waits briefly and returns the requests ahead; 0: run now"""
        request = object()
        with self._changed:
            if (count := len(self._requests)) >= self.parallel + self.waiting:
                raise ValueError(f"The queue is full ({count} requests); try again in a moment.")
            self._requests.append(request)
        try:
            yield lambda: self._wait(request)
        finally:
            with self._changed:
                self._requests.remove(request)
                self._changed.notify_all()

    def _wait(self, request: object) -> int:
        def ahead() -> int:
            return max(self._requests.index(request) + 1 - self.parallel, 0)

        with self._changed:
            self._changed.wait_for(lambda: ahead() == 0, timeout=POLL_SECONDS)
            return ahead()
