"""Threads: how the engine uses every core.

Two ways, never both at once. A product with float32 weights is left to BLAS, which has threads of
its own. Where several NumPy calls belong together (widen a tile, multiply it), each of our threads
takes a share of the rows, and BLAS works on one thread in each: NumPy releases the interpreter
inside its loops.

There are as many threads as BLAS was given (OPENBLAS_NUM_THREADS, OMP_NUM_THREADS), by default one
per core.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

_BLAS = ThreadpoolController().select(user_api="blas").lib_controllers
_GIVEN: list[int] = [library.num_threads for library in _BLAS]
COUNT: int = max(_GIVEN, default=os.cpu_count() or 1)
_POOL = ThreadPoolExecutor(max(COUNT - 1, 1), thread_name_prefix="causal-qwen-engine")
_LOCAL = threading.local()


def run(tasks: Sequence[Callable[[], None]]) -> None:
    """Do all tasks, the first one here and the others beside it."""
    if len(tasks) == 1 or COUNT == 1:
        for task in tasks:
            task()
        return
    with _blas_alone():
        others = [_POOL.submit(task) for task in tasks[1:]]
        tasks[0]()
        for other in others:
            other.result()


def shares(size: int, parts: int | None = None) -> list[slice]:
    """range(size) in as many nearly equal parts as there are threads."""
    parts = COUNT if parts is None else parts
    edges = [size * part // parts for part in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def scratch(rows: int, columns: int) -> NDArray[np.uint32]:
    """This thread's own (rows, columns) words, the same memory every time: it stays in cache."""
    kept: NDArray[np.uint32] | None = getattr(_LOCAL, "words", None)
    if kept is None or kept.size < rows * columns:
        kept = _LOCAL.words = np.empty(rows * columns, np.uint32)
    return kept[: rows * columns].reshape(rows, columns)


@contextmanager
def _blas_alone() -> Iterator[None]:
    """One BLAS thread inside, as many as before outside."""
    for library in _BLAS:
        library.set_num_threads(1)
    try:
        yield
    finally:
        for library, count in zip(_BLAS, _GIVEN, strict=True):
            library.set_num_threads(count)
