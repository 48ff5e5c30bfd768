"""Service: requests -> texts, counterfactuals and numbers of one loaded model.

Knows nothing of HTTP. Texts are decoded in the batch's thread; counterfactuals and numbers, which
call the model themselves, run one after another in a thread of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from causal_qwen.engines.engine import Engine, Row, Tokens
from causal_qwen.individuals import Individual, seed_of
from causal_qwen.serving.batching import Batcher, Event, Job, QueueFull
from causal_qwen.serving.replies import Reply
from causal_qwen.serving.requests import Limits, RequestError, TextRequest


class Service:
    def __init__(
        self,
        backend: Engine,
        name: str,
        limits: Limits | None = None,
        regressors: Mapping[str, Path | Callable[[], Any]] | None = None,
    ) -> None:
        self.backend, self.name = backend, name
        self.batcher = Batcher(backend, limits or Limits())
        self.limits = self.batcher.limits
        self.find: Callable[[str], int | Individual] = seed_of  # an individual by its name
        self.regressors = regressors or {}  # directories, or what fits one
        self.opened: dict[str, Any] = {}  # regressors that have been used
        self.panel: Any = None  # the last one, with what was asked for
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

    async def start(self, request: TextRequest) -> Reply:
        """Encode the prompts and queue their texts."""
        self.check_model(request.model)
        request.check(self.limits)
        return await asyncio.to_thread(self._start, request, asyncio.get_running_loop())

    def _start(self, request: TextRequest, loop: asyncio.AbstractEventLoop) -> Reply:
        backend = self.backend
        call = request.resolve(backend.resolve, backend.default_mode, self.find)

        def notify(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(reply.news.put_nowait, event)

        jobs = []
        for prompt in request.prompts:
            tokens = self.encode(prompt, request.is_chat)
            length = min(request.max_tokens, backend.context - len(tokens.ids))
            copies = [call.of_copy(copy) for copy in range(request.n)]
            rows = [Row(tokens, *copy, length, request.alternatives) for copy in copies]
            jobs.append(Job(rows, request.stop, notify))
        reply = Reply(request, call, jobs, self.batcher, self.name)
        self.batcher.submit(*jobs)
        return reply

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

    async def between(self, function: Callable[[], Any]) -> Any:
        """Call a function that uses the engine, between two steps of the batch."""
        return await asyncio.wrap_future(self.batcher.call(function))

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the thread beside the batch, in turn."""
        if self._side_jobs >= self.limits.max_waiting:
            raise QueueFull(self._side_jobs)
        self._side_jobs += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._side, function, *arguments)
        finally:
            self._side_jobs -= 1
