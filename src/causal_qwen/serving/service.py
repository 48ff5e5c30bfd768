"""Service: requests -> texts, individuals, counterfactuals and numbers of one loaded model.

Knows nothing of HTTP. Texts are decoded in the batch's thread; counterfactuals and numbers, which
call the model themselves, run one after another in a thread of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from causal_qwen.engines.engine import Engine, Row, Tokens
from causal_qwen.serving.batching import Batcher, Event, Job, QueueFull
from causal_qwen.serving.individuals import IndividualStore
from causal_qwen.serving.limits import Limits
from causal_qwen.serving.metrics import Metrics
from causal_qwen.serving.replies import Reply
from causal_qwen.serving.requests import RequestError, TextRequest

RETRY_SECONDS = 5  # when the thread of counterfactuals and numbers is busy


class Service:
    def __init__(
        self,
        backend: Engine,
        name: str,
        individuals: Path,
        limits: Limits | None = None,
        regressors: dict[str, Path] | None = None,
    ) -> None:
        self.backend, self.name, self.limits = backend, name, limits or Limits()
        self.metrics = Metrics()
        self.batcher = Batcher(backend, self.limits, self.metrics)
        self.individuals = IndividualStore(individuals, backend.size)
        self.regressors = regressors or {}
        self.opened: dict[str, Any] = {}  # regressors that have been used
        self._side = ThreadPoolExecutor(1, thread_name_prefix="analysis")
        self._side_jobs = 0

    def close(self) -> None:
        self.batcher.close()
        self._side.shutdown(cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise RequestError(
                f"There is no model {name[:100]!r}; this server has {self.name!r}.", "model", 404
            )

    async def start(self, request: TextRequest) -> Run:
        """Encode the prompts and queue their texts."""
        self.check_model(request.model)
        return await asyncio.to_thread(self._start, request, asyncio.get_running_loop())

    def _start(self, request: TextRequest, loop: asyncio.AbstractEventLoop) -> Run:
        backend = self.backend
        call = request.resolve(backend.resolve, backend.default_mode, self.individuals.find)
        queue: asyncio.Queue[Update | None] = asyncio.Queue()

        def send(update: Update | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(queue.put_nowait, update)

        jobs = []
        for place, prompt in enumerate(request.prompts):
            tokens = self.encode(prompt, request.is_chat)
            length = min(request.max_tokens, backend.context - len(tokens.ids))
            rows = [
                Row(tokens, *call.of_copy(copy), length, request.alternatives)
                for copy in range(request.n)
            ]
            first = place * request.n
            notify = _notifier(send, first)
            jobs.append(Job(rows, request.stop, notify))
        self.batcher.submit(*jobs)
        rows = [row for job in jobs for row in job.rows]
        reply = Reply(request, call, rows, backend, self.name)
        return Run(reply, jobs, queue, lambda: self.batcher.cancel(*jobs))

    def encode(self, prompt: Any, is_chat: bool) -> Tokens:
        """A text or a conversation as tokens, within the limits."""
        what = "messages" if is_chat else "prompt"
        try:
            tokens = (self.backend.encode_chat if is_chat else self.backend.encode)(prompt)
        except Exception as error:  # of a chat template, which may refuse a conversation
            raise RequestError(f"{what} cannot be encoded: {error}", what) from None
        most = min(self.limits.max_prompt, self.backend.context - 1)
        if not 0 < len(tokens.ids) <= most:
            raise RequestError(
                f"{what} has {len(tokens.ids)} tokens; this server reads 1 to {most}.", what
            )
        return tokens

    async def run(self, function: Callable[[], Any]) -> Any:
        """Call a function in the thread beside the batch, in turn."""
        if self._side_jobs >= self.limits.max_waiting:
            raise QueueFull(self._side_jobs, RETRY_SECONDS)
        self._side_jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._side, function)
        finally:
            self._side_jobs -= 1

    def gauges(self) -> dict[str, float]:
        running, waiting = self.batcher.counts()
        return {"running_texts": running, "waiting_texts": waiting}


class Update(NamedTuple):
    """An event of one text of a reply."""

    place: int
    event: Event


def _notifier(send: Callable[[Update], None], first: int) -> Callable[[Event], None]:
    return lambda event: send(Update(first + event.copy, event))


class Run:
    """A running request."""

    def __init__(
        self,
        reply: Reply,
        jobs: list[Job],
        queue: asyncio.Queue[Update | None],
        cancel: Callable[[], None],
    ) -> None:
        self.reply, self.jobs, self._queue, self._cancel = reply, jobs, queue, cancel

    def cancel(self) -> None:
        """Stop the texts that have not ended; `updates` ends."""
        if any(text.finish is None for text in self.reply.texts):
            self._cancel()
            self._queue.put_nowait(None)

    async def updates(self) -> AsyncIterator[Update]:
        """Events until all texts have ended, or the run is cancelled; errors are raised."""
        while any(text.finish is None for text in self.reply.texts):
            update = await self._queue.get()
            if update is None:
                return
            if update.event.error is not None:
                self._cancel()
                raise update.event.error
            self.reply.texts[update.place].take(update.event)
            yield update
