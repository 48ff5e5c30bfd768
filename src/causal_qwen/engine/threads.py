"""Threads: divides the engine's work among cores.

Each thread takes a share of the work (rows of a matrix, heads, coordinates); NumPy releases the GIL
inside its loops. BLAS is limited to one thread: its own idle threads spin for milliseconds on the
cores that these threads need.

The number of threads is that of BLAS (OPENBLAS_NUM_THREADS, OMP_NUM_THREADS), by default one
per core.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

Task = Callable[[], None]

_BLAS = ThreadpoolController().select(user_api="blas").lib_controllers
COUNT: int = max((library.num_threads for library in _BLAS), default=os.cpu_count() or 1)
CACHE_LINE = 16  # floats
_LOCAL = threading.local()


class _Worker(threading.Thread):
    """A thread that waits for its next task at a lock.

    A layer hands over four short tasks; an executor, with its queue and futures, would cost a third
    of the time of a token.
    """

    def __init__(self) -> None:
        super().__init__(name="causal-qwen-engine", daemon=True)
        self._begin, self._end = threading.Lock(), threading.Lock()
        self._begin.acquire()
        self._end.acquire()
        self._task: Task | None = None
        self._error: BaseException | None = None
        self._is_dismissed = False
        self.start()

    def run(self) -> None:
        while self._begin.acquire() and not self._is_dismissed:
            try:
                assert self._task is not None
                self._task()
            except BaseException as error:
                self._error = error
            self._task = None  # release its arrays
            self._end.release()

    def begin(self, task: Task) -> None:
        self._task = task
        self._begin.release()

    def end(self) -> BaseException | None:
        """Wait for the task; return its error, if any."""
        self._end.acquire()
        error, self._error = self._error, None
        return error

    def dismiss(self) -> None:
        """End the thread after its current task. Do not call `end` afterwards."""
        self._is_dismissed = True
        if self._begin.locked():  # else it is about to run
            self._begin.release()


class _Workers:
    """All workers, for one caller at a time."""

    def __init__(self) -> None:
        self.are_busy = threading.Lock()
        self._all: list[_Worker] = []

    def start(self, tasks: Sequence[Task]) -> list[_Worker]:
        """Start every task in a worker of its own."""
        while len(self._all) < len(tasks):
            self._all.append(_Worker())
        for worker, task in zip(self._all, tasks, strict=False):
            worker.begin(task)
        return self._all[: len(tasks)]

    def dismiss(self) -> None:
        for worker in self._all:
            worker.dismiss()


_WORKERS = _Workers()


def _forget_workers() -> None:
    global _WORKERS
    _WORKERS = _Workers()


def run(tasks: Sequence[Task]) -> None:
    """Run all tasks: the first in this thread, the others in workers.

    If another caller has the workers, all tasks run in this thread, without waiting.
    """
    if len(tasks) == 1 or COUNT == 1 or not _run_parallel(tasks):
        for task in tasks:
            task()


def _run_parallel(tasks: Sequence[Task]) -> bool:
    """Run all tasks with the workers, or none (False) if another caller has them."""
    workers, is_ours, is_over = _WORKERS, False, False
    try:
        is_ours = workers.are_busy.acquire(blocking=False)
        if not is_ours:
            is_over = True
            return False
        with blas_alone():
            others = workers.start(tasks[1:])
            try:
                tasks[0]()
            finally:
                errors = [other.end() for other in others]
                workers.are_busy.release()
                is_over = True
    finally:
        if not is_over:  # Ctrl-C or a signal handler's exception, anywhere above: the workers may
            _forget_workers()  # still be running, so they are not reused; their lock stays taken
            if is_ours:
                workers.dismiss()
    for error in filter(None, errors):
        raise error
    return True


def shares(size: int, parts: int | None = None, lead: int = 0) -> list[slice]:
    """Split range(size) into nearly equal parts, one per thread.

    The first part is longer by `lead`: it starts at once, while other threads wake up.
    """
    parts = COUNT if parts is None else parts
    lead = min(lead, size) if parts > 1 else 0
    edges = [lead + (size - lead) * part // parts for part in range(parts + 1)]
    edges[0] = 0
    return [slice(a, b) for a, b in pairwise(edges)]


def scratch(rows: int, columns: int) -> NDArray[np.float32]:
    """A (rows, columns) buffer of this thread; its memory is reused and stays in cache.

    It begins at a cache line; NumPy's own arrays begin 16 bytes after one.
    """
    kept: NDArray[np.float32] | None = getattr(_LOCAL, "scratch", None)
    if kept is None or kept.size < rows * columns:
        room = np.empty(rows * columns + CACHE_LINE, np.float32)
        start = -(room.ctypes.data // room.itemsize) % CACHE_LINE
        kept = _LOCAL.scratch = room[start : start + rows * columns]
    return kept[: rows * columns].reshape(rows, columns)


class _BlasLimit:
    """The callers that limit BLAS to one thread, and its thread counts before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.callers: set[object] = set()
        self.given: list[int] = []  # per library

    def enter(self, caller: object) -> None:
        with self.lock:
            if not self.callers:
                self.given = [library.num_threads for library in _BLAS]
            self.callers.add(caller)
            if len(self.callers) == 1:
                self._set([1] * len(_BLAS))

    def leave(self, caller: object) -> None:
        with self.lock:
            if self.callers == {caller}:
                self._set(self.given)
            self.callers.discard(caller)

    def _set(self, counts: list[int]) -> None:
        for library, count in zip(_BLAS, counts, strict=True):
            # threadpoolctl accepts calls from one thread only; the lock above makes others safe
            set_count = getattr(library, "_real_set_num_threads", library.set_num_threads)
            set_count(count)


_BLAS_LIMIT = _BlasLimit()


@contextmanager
def blas_alone() -> Iterator[None]:
    """Limit BLAS to one thread; the last caller to leave restores the counts."""
    caller = object()
    try:
        _BLAS_LIMIT.enter(caller)
        yield
    finally:
        _BLAS_LIMIT.leave(caller)


def _reset_after_fork() -> None:
    """A forked process has neither the workers nor the callers' threads."""
    global _BLAS_LIMIT
    _forget_workers()
    before, _BLAS_LIMIT = _BLAS_LIMIT, _BlasLimit()
    if before.callers:
        before._set(before.given)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
