"""Remote chat: several turns with an individual of a server that speaks OpenAI's protocol."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from causal_qwen.cli.turns import common_command, interruption
from causal_qwen.options import MODES, NOISY_MODES
from causal_qwen.serving.client import Client

ROUTE = "/v1/chat/completions"
HELP = {
    "/individual [SEED|NAME]": "show the individual, or continue with another one",
    "/mode [MODE]": f"show the mode, or change it: {', '.join(MODES)}",
    "/reset": "delete the conversation and keep the individual",
    "/help": "show this list",
    "/quit": "quit, like Ctrl-D; Ctrl-C stops an answer",
}


@dataclass(frozen=True)
class RemoteAnswer:
    text: str
    replay: dict[str, Any]
    is_stopped: bool = False

    def to_dict(self, prompt: str) -> dict[str, Any]:
        return {"prompt": prompt, "text": self.text, **self.replay, "is_stopped": self.is_stopped}


@dataclass
class RemoteConversation:
    """The messages, the mode, and the individual that answers, at `url`."""

    url: str
    api_key: str | None = None
    mode: str = "causal"
    individual: str | None = None  # a seed, or the name of an individual saved on the server
    system: str | None = None
    max_tokens: int = 200
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = Client(self.url, self.api_key)
        if self.individual is None:
            self.individual = str(secrets.randbelow(10_000))

    @property
    def name(self) -> str:
        return f"individual {self.individual}" if self.mode in NOISY_MODES else self.mode

    def ask(self, message: str, on_text: Callable[[str], None] | None = None) -> RemoteAnswer:
        """One turn. Ctrl-C stops the answer; its beginning is kept."""
        turns = [*self.messages, {"role": "user", "content": message}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body = {"messages": system + turns, "max_tokens": self.max_tokens, "stream": True}
        body |= {"causal_mode": self.mode, **self.settings}
        if self.mode in NOISY_MODES:
            body["individual"] = self.individual
        text, replay, is_stopped = "", dict[str, Any](), False
        events = self.client.stream(ROUTE, body)
        with interruption() as is_interrupted, closing(events):
            for record in events:
                with self.client.reading(ROUTE):
                    (choice,) = record["choices"]
                    replay |= choice.get("replay", {})
                    added = choice["delta"].get("content") or ""
                text += added
                if on_text is not None:
                    on_text(added)
                if is_interrupted():
                    is_stopped = True
                    break
        self.messages = [*turns, {"role": "assistant", "content": text.strip()}]
        return RemoteAnswer(text, replay, is_stopped)

    def command(self, line: str) -> str:
        """Run a line that begins with a slash. -> the reply"""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        if (reply := common_command(self, name, argument, HELP)) is not None:
            return reply
        if name == "/individual":
            self.individual = argument or self.individual
            return f"answers by {self.name}"
        raise ValueError(f"{name} is unknown; /help lists the commands.")
