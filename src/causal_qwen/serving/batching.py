"""Batching: one thread that decodes the texts of all requests together, one step at a time.

Between two steps texts leave (they have ended, or nobody waits for them any more) and waiting ones
join. A job is one prompt with its copies; its events are sent as they happen.

    submit -> waiting -> join (prompts are read) -> step, step, ... -> leave
                  more than max_waiting texts: QueueFull
    call   -> a function of the engine, between two steps
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from causal_qwen.engines.engine import Batch, Choice, Engine, Row
from causal_qwen.serving.requests import Limits, RequestError
from causal_qwen.session import GrowingText

READ_TOGETHER = 256  # tokens of waiting prompts that are read at once, padding included

Report = Callable[[str, float], None]  # the name of a figure, and what is added or observed


class QueueFull(RequestError):
    """There is no place for a request."""

    seconds = 5

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} texts are waiting; try again soon.", None, 429)


class Closed(RequestError):
    seconds = 5

    def __init__(self) -> None:
        super().__init__("The server is shutting down; try another one.", None, 503)


class Event(NamedTuple):
    """News of one text."""

    row: Row
    text: str  # addition that later tokens cannot change
    choice: Choice | None = None  # the token of this step, unless it ends the text
    finish: str | None = None  # "stop" or "length" after the last token
    error: Exception | None = None


@dataclass(eq=False)
class Job:
    """The texts of one prompt, and who is told about them (in the thread of the batch)."""

    rows: list[Row]
    stops: Sequence[str]
    notify: Callable[[Event], None]
    is_cancelled: bool = False
    begun: float = field(default_factory=time.monotonic)


class Batcher:
    def __init__(self, backend: Engine, limits: Limits) -> None:
        self.backend = backend
        most = limits.max_rows if backend.rows is None else min(limits.max_rows, backend.rows)
        self.limits = replace(limits, max_rows=most)
        self.report: Report = lambda name, value: None
        self._waiting: deque[Job] = deque()
        self._running: dict[Row, tuple[Job, GrowingText]] = {}
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="batch", daemon=True)
        self._thread.start()

    def submit(self, *jobs: Job) -> None:
        """Queue the jobs of one request, all or none."""
        with self._changed:
            if self._is_closed:
                raise Closed
            waiting = sum(len(job.rows) for job in self._waiting)
            more = sum(len(job.rows) for job in jobs)
            free = self.limits.max_rows - len(self._running)
            if waiting + more > self.limits.max_waiting + max(free, 0):
                raise QueueFull(waiting)
            self._waiting.extend(jobs)
            self._changed.notify()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Call a function that uses the engine, in the thread of the batch."""
        future: Future[Any] = Future()
        with self._changed:
            if self._is_closed:
                raise Closed
            if len(self._calls) >= self.limits.max_waiting:
                raise QueueFull(len(self._calls))
            self._calls.append((function, future))
            self._changed.notify()
        return future

    def cancel(self, *jobs: Job) -> None:
        """Nobody waits for these jobs any more."""
        with self._changed:
            for job in jobs:
                job.is_cancelled = True
            self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
            self._changed.notify()

    def close(self) -> None:
        """Refuse new jobs, end the running ones at the next step, and wait for the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def counts(self) -> tuple[int, int]:
        """Texts that are decoded, and texts that wait."""
        with self._changed:
            return len(self._running), sum(len(job.rows) for job in self._waiting)

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        batch = self.backend.new_batch()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._running or self._waiting or self._calls or self._is_closed
                )
                if self._is_closed:
                    break
            self._answer_call()
            try:
                self._leave_cancelled(batch)
                self._join(batch, self._next_jobs())
                if self._running:
                    for row, choice in batch.step():
                        self._take(batch, row, choice)
            except Exception as error:  # of the whole batch: its rows are lost, the server is not
                self._fail(error)
                batch = self.backend.new_batch()
        self._fail(Closed())
        for _, future in self._calls:
            future.set_exception(Closed())

    def _answer_call(self) -> None:
        """One at a time: texts go on in between."""
        if not self._calls:
            return
        function, future = self._calls.popleft()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    def _leave_cancelled(self, batch: Batch) -> None:
        for row in [row for row, (job, _) in self._running.items() if job.is_cancelled]:
            self._remove(batch, row)
            self.report("cancelled_texts", 1)

    def _next_jobs(self) -> list[Job]:
        """The first waiting jobs that have room, as many as are read at once; running texts wait
        meanwhile."""
        jobs: list[Job] = []
        longest = 0
        with self._changed:
            while self._waiting:
                job = self._waiting[0]
                room = self.limits.max_rows - len(self._running)
                longest = max(longest, len(job.rows[0].prompt.ids))
                is_long = bool(jobs) and longest * (len(jobs) + 1) > READ_TOGETHER
                if is_long or (len(job.rows) > room and self._running):
                    break
                jobs.append(self._waiting.popleft())
                for row in job.rows:
                    self._running[row] = job, GrowingText(row, self.backend, job.stops)
        return jobs

    def _join(self, batch: Batch, jobs: list[Job]) -> None:
        if not jobs:
            return
        rows = [row for job in jobs for row in job.rows]
        try:
            choices = batch.join(rows)
        except (ValueError, TypeError, ArithmeticError) as error:  # of one job
            if len(jobs) > 1:
                for job in jobs:
                    self._join(batch, [job])
                return
            for row in rows:
                self._running.pop(row)
                jobs[0].notify(Event(row, "", error=RequestError(str(error))))
            return
        for job in jobs:
            self.report("prompt_tokens", len(job.rows[0].prompt.ids))
            self.report("first_token_seconds", time.monotonic() - job.begun)
        for row, choice in zip(rows, choices, strict=True):
            self._take(batch, row, choice)

    def _take(self, batch: Batch, row: Row, choice: Choice | Exception) -> None:
        job, text = self._running[row]
        if isinstance(choice, Exception):
            self._remove(batch, row)
            job.notify(Event(row, "", error=RequestError(str(choice))))
            return
        addition = text.take(choice)
        self.report("generated_tokens", 1)
        if text.finish is not None:
            self._remove(batch, row)
        shown = None if choice.id in self.backend.ends else choice
        job.notify(Event(row, addition, shown, text.finish))

    def _remove(self, batch: Batch, row: Row) -> None:
        with self._changed:
            self._running.pop(row)
        batch.leave(row)

    def _fail(self, error: Exception) -> None:
        """Tell everyone who waits."""
        with self._changed:
            jobs = [job for job, _ in self._running.values()]
            self._running.clear()
            if self._is_closed:
                jobs += self._waiting
                self._waiting.clear()
        for job in dict.fromkeys(jobs):
            job.notify(Event(job.rows[0], "", error=error))
