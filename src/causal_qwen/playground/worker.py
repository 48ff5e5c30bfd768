"""Worker: one thread that does the model's work, whoever asks, one step at a time.

Steps wait in line. A text that grows asks for every token anew, so visitors take turns token by
token: nobody waits for a whole text of somebody else, and the processor is never shared by two.
How many may take turns, and how many may wait for that, is decided at the door.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

MOMENT = 0.5  # seconds between two looks at the line


class Worker:
    def __init__(self) -> None:
        self._line = ThreadPoolExecutor(1, thread_name_prefix="model")

    def do(self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """What `work` returns (or raises), done in the worker's thread."""
        return self._line.submit(work, *arguments, **options).result()

    def each(self, items: Iterator[T]) -> Iterator[T]:
        """The items of an iterator, each made in the worker's thread when it is asked for."""
        end = object()
        while (item := self.do(next, items, end)) is not end:
            yield item

    def close(self) -> None:
        self._line.shutdown(cancel_futures=True)


class Door:
    """First come, first served: `inside` requests at a time, `waiting` others, and no more."""

    def __init__(self, inside: int, waiting: int) -> None:
        self.inside, self.waiting = inside, waiting
        self._line: list[object] = []  # those inside, then those who wait
        self._moved = threading.Condition()

    @contextmanager
    def enter(self) -> Iterator[Callable[[], int]]:
        """-> what to ask for the number of those before: it waits a moment, and 0 means go in."""
        me = object()
        with self._moved:
            if len(self._line) >= self.inside + self.waiting:
                raise ValueError(
                    f"{len(self._line)} requests are being answered already; try again in a moment."
                )
            self._line.append(me)
        try:
            yield lambda: self._before(me)
        finally:
            with self._moved:
                self._line.remove(me)
                self._moved.notify_all()

    def _before(self, me: object) -> int:
        def count() -> int:
            return max(self._line.index(me) + 1 - self.inside, 0)

        with self._moved:
            self._moved.wait_for(lambda: count() == 0, timeout=MOMENT)
            return count()
