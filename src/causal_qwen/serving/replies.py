"""Replies: texts as they grow -> the objects of OpenAI's API.

Every choice carries `replay`: the fields that, sent with the same prompt, generate it again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from causal_qwen.engines.engine import Choice, Row
from causal_qwen.serving.batching import Batcher, Event, Job
from causal_qwen.serving.requests import Call, TextRequest


@dataclass
class Text:
    """One text of a reply, and the tokens whose log probabilities were asked for."""

    row: Row
    index: int
    replay: dict[str, Any]
    text: str = ""
    finish: str | None = None
    choices: list[Choice] = field(default_factory=list)


class Reply:
    """All texts of a request as they grow, prompt by prompt."""

    def __init__(
        self, request: TextRequest, call: Call, jobs: list[Job], batcher: Batcher, model: str
    ) -> None:
        self.request, self.jobs, self.batcher = request, jobs, batcher
        self.backend = batcher.backend
        kind = "chatcmpl" if request.is_chat else "cmpl"
        self.head = {
            "id": f"{kind}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        rows = [row for job in jobs for row in job.rows]
        self.texts = {row: Text(row, i, call.replay(i % request.n)) for i, row in enumerate(rows)}
        self.news: asyncio.Queue[Event | None] = asyncio.Queue()

    @property
    def is_growing(self) -> bool:
        return any(text.finish is None for text in self.texts.values())

    def cancel(self) -> None:
        """Stop the texts that have not ended; `events` ends."""
        if self.is_growing:
            self.batcher.cancel(*self.jobs)
            self.news.put_nowait(None)

    async def events(self) -> AsyncIterator[Event]:
        """News until all texts have ended, or are cancelled; errors are raised."""
        while self.is_growing and (event := await self.news.get()) is not None:
            if event.error is not None:
                raise event.error
            text = self.texts[event.row]
            text.text += event.text
            text.finish = event.finish
            if event.choice is not None and event.choice.log_prob is not None:
                text.choices.append(event.choice)
            yield event

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices = []
        for text in self.texts.values():
            said: dict[str, Any] = {"text": text.text}
            if self.request.is_chat:
                message = {"role": "assistant", "content": text.text, "refusal": None}
                said = {"message": message}
            more = {"numbers": self._numbers(text.row), "replay": text.replay}
            choices.append(self._choice(text, said, text.choices) | more)
        kind = "chat.completion" if self.request.is_chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": self.usage()}

    def chunk(self, event: Event, is_first: bool) -> dict[str, Any]:
        """One event of a stream; the first of a text carries its `replay`."""
        text = self.texts[event.row]
        said: dict[str, Any] = {"text": event.text}
        if self.request.is_chat:
            said = {"delta": {"role": "assistant"} if is_first else {}}
            said["delta"]["content"] = event.text
        has_log_prob = event.choice is not None and event.choice.log_prob is not None
        choice = self._choice(text, said, text.choices[-1:] if has_log_prob else [])
        if is_first:
            choice["replay"] = text.replay
        if event.finish is not None:
            choice["numbers"] = self._numbers(text.row)
        return {**self.head, "object": self._chunk_kind, "choices": [choice]}

    def last_chunk(self) -> dict[str, Any]:
        """With `include_usage`: no choice, but the count of tokens."""
        return {**self.head, "object": self._chunk_kind, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        rows = list(self.texts)
        prompt = sum(len(row.prompt.ids) for row in rows[:: self.request.n])
        new = sum(len(row.new.ids) for row in rows)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.request.is_chat else "text_completion"

    def _choice(self, text: Text, said: dict[str, Any], choices: list[Choice]) -> dict[str, Any]:
        own = {"logprobs": self._log_probs(choices), "finish_reason": text.finish}
        return {"index": text.index, **said, **own}

    def _numbers(self, row: Row) -> list[float]:
        """Values of the numbers in the new text."""
        number = self.backend.num_token_id
        return [v for i, v in zip(row.new.ids, row.new.values, strict=True) if i == number]

    def _log_probs(self, choices: list[Choice]) -> dict[str, Any] | None:
        if self.request.alternatives is None:
            return None
        shown = [(self.backend.show(choice.id, choice.value), choice) for choice in choices]
        if self.request.is_chat:
            content = [
                {
                    **_token(text, choice.log_prob or 0.0),
                    "top_logprobs": [_token(*pair) for pair in choice.top],
                }
                for text, choice in shown
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [text for text, _ in shown],
            "token_logprobs": [choice.log_prob for _, choice in shown],
            # of two tokens with one text the likelier wins
            "top_logprobs": [dict(reversed(choice.top)) for _, choice in shown],
            "text_offset": [],
        }


def _token(text: str, log_prob: float) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode("utf-8"))}


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = {401: "invalid_api_key", 404: "not_found", 429: "queue_full"}.get(status)
    words = " ".join(message.split())
    return {"error": {"message": words, "type": kind, "param": param, "code": code}}
