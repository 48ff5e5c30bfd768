"""Worker: one thread that does the model's work, whoever asks, one step at a time.

Steps wait in line. A text that grows asks for every token anew, so visitors take turns token by
token: nobody waits for a whole text of somebody else, and the processor is never shared by two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


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
