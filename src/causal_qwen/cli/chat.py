"""Chat: several turns with one individual, of a model here or of a server.

    you> What should I cook tonight?
    individual 7> The night before a big celebration, I always have a special recipe in mind ...

Each turn encodes the whole conversation again. In `causal` mode one individual gives every answer;
in `sampling` mode one seed draws the noise of every position. Imports no torch.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import typer

from causal_qwen.individuals import OWN_FIELDS, Individual, parse_individual
from causal_qwen.options import MODES, NOISY_MODES, check_choice
from causal_qwen.terminal import print_json

ROUTE = "/v1/chat/completions"
HELP = f"""\
/individual [WHO]  show the individual, or continue with another one: a seed, a file, a name
/mode [MODE]       show the mode, or change it: {", ".join(MODES)}
/reset             delete the conversation and keep the individual
/help              show this list
/quit              quit, like Ctrl-D; Ctrl-C stops an answer"""
OF_INDIVIDUALS = (*OWN_FIELDS, "whole_words", "avoid_repeats")

print_note = partial(typer.echo, err=True)  # beside the conversation


class Answer(NamedTuple):
    text: str
    settings: dict[str, Any]  # that generate it again
    is_stopped: bool = False


@dataclass
class Conversation:
    """The messages, the mode, and who answers."""

    source: Any  # a session
    mode: str = "causal"
    individual: int | str | Individual | None = None
    system: str | None = None
    max_new_tokens: int = 200
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)  # user and assistant in turn

    def __post_init__(self) -> None:
        who = secrets.randbelow(10_000) if self.individual is None else self.individual
        self.individual = self._find(who) if isinstance(who, str) else who

    @property
    def name(self) -> str:
        """The label of the answers."""
        who = self.individual
        if self.mode not in NOISY_MODES:
            return self.mode
        return who.name or "individual" if isinstance(who, Individual) else f"individual {who}"

    def ask(self, message: str, on_text: Callable[[str], None] | None = None) -> Answer:
        """One turn. Ctrl-C stops the answer; its beginning is kept."""
        turns = [*self.messages, {"role": "user", "content": message}]
        additions, settings = self._begin(turns)
        text, is_stopped = "", False
        with interruption() as is_interrupted, contextlib.closing(additions):
            for addition in additions:
                text += addition
                if on_text is not None:
                    on_text(addition)
                if is_stopped := is_interrupted():
                    break
        self.messages = [*turns, {"role": "assistant", "content": text.strip()}]
        return Answer(text, settings, is_stopped)

    def command(self, line: str) -> str:
        """Run a line that begins with a slash. -> the reply"""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        if name == "/help":
            return HELP
        if name == "/reset":
            self.messages = []
            return f"The conversation is deleted; {self.name} stays."
        if name == "/mode":
            self.mode = check_choice("mode", argument or self.mode, MODES)
        elif name == "/individual":
            self.individual = self._find(argument) if argument else self.individual
        else:
            raise ValueError(f"{name} is unknown; /help lists the commands.")
        return f"mode {self.mode}, answers by {self.name}"

    def _find(self, who: str) -> int | str | Individual:
        """A name stays as it is written."""
        found = parse_individual(who)
        return found if isinstance(found, Individual) or who.isdecimal() else who

    def _with_system(self, turns: list[dict[str, str]]) -> list[dict[str, str]]:
        return (
            turns if self.system is None else [{"role": "system", "content": self.system}, *turns]
        )

    def _begin(self, turns: list[dict[str, str]]) -> tuple[Generator[str], dict[str, Any]]:
        """-> the additions to an answer, and its settings; the oldest turns may be left out"""
        engine = self.source.engine
        space = engine.context - self.max_new_tokens
        while (length := len(engine.encode_chat(self._with_system(turns)).ids)) > space:
            if len(turns) == 1:
                raise ValueError(
                    f"The message has {length} tokens and the model reads {space} beside its "
                    "answer; shorten it."
                )
            turns = turns[2:]
        who, options = self.individual, self.options
        if self.mode not in NOISY_MODES:
            who, options = None, {k: v for k, v in options.items() if k not in OF_INDIVIDUALS}
        options = {"mode": self.mode, "max_new_tokens": self.max_new_tokens, **options}
        stream = self.source.stream(self._with_system(turns), who, **options)
        settings = stream.settings.to_dict(stream.individual)
        return iter(stream), {"individual": None, **settings, "seed": stream.growing.row.seed}


class RemoteConversation(Conversation):
    """With a server, whose `Client` is the source. It knows individuals by seed or name."""

    def _find(self, who: str) -> int | str | Individual:
        return who

    def _begin(self, turns: list[dict[str, str]]) -> tuple[Generator[str], dict[str, Any]]:
        messages: Any = self._with_system(turns)
        body = {"messages": messages, "max_tokens": self.max_new_tokens, "causal_mode": self.mode}
        if self.mode in NOISY_MODES:
            body["individual"] = self.individual
        settings: dict[str, Any] = {}

        def additions() -> Generator[str]:
            with contextlib.closing(self.source.stream(ROUTE, {**body, **self.options})) as events:
                for event in events:
                    (choice,) = event["choices"]
                    settings.update(choice.get("replay", {}))
                    yield choice["delta"]["content"]

        return additions(), settings


def run(conversation: Conversation, *, as_json: bool = False) -> int:
    """Answer each line of stdin. An error ends its own turn only. -> the number of failed lines"""
    is_typed = sys.stdin.isatty()
    if is_typed:
        print_note(f"{conversation.name} answers. /help lists the commands; Ctrl-D quits.")
    turn = failed = 0
    for line in typed_lines("you> ") if is_typed else filter(None, map(str.strip, sys.stdin)):
        if line == "/quit":
            break
        is_command = line.startswith("/")
        turn += not is_command
        asked = {"command": line} if is_command else {"turn": turn, "prompt": line}
        try:
            if is_command:
                print_note(conversation.command(line))
                continue
            if is_typed and not as_json:
                print(f"{conversation.name}> ", end="", flush=True)
            answer = conversation.ask(line, None if as_json else partial(print, end="", flush=True))
        except (ArithmeticError, OSError, ValueError) as error:
            failed += 1
            sentence = " ".join(str(error).split())
            if as_json and not is_typed:
                print_json({**asked, "error": sentence})
            else:
                print_note(sentence)
            continue
        if as_json:
            said = {"text": answer.text, **answer.settings, "is_stopped": answer.is_stopped}
            print_json({**asked, **said})
            continue
        print()
        if answer.is_stopped:
            print_note("(stopped)")
    return 0 if is_typed else failed


def typed_lines(label: str) -> Iterator[str]:
    """Lines typed in a terminal, with history and editing where Python has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    with contextlib.suppress(EOFError):
        while True:
            if not sys.stdout.isatty():  # stdout is for the results only
                print(label, end="", file=sys.stderr, flush=True)
            if line := input(label if sys.stdout.isatty() else "").strip():
                yield line
    print_note("")


@contextlib.contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """A function that is true after the first Ctrl-C; a second one ends the program."""
    is_interrupted = False

    def interrupt(*_: Any) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: is_interrupted
    finally:
        signal.signal(signal.SIGINT, before)
