"""Turns: the lines of a conversation, typed or piped, and their answers. Needs no torch."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import typer

from causal_qwen.options import MODES, check_choice
from causal_qwen.terminal import print_json

print_note = partial(typer.echo, err=True)  # beside the conversation


class Answer(Protocol):
    @property
    def is_stopped(self) -> bool: ...
    def to_dict(self, prompt: str) -> dict[str, Any]: ...


class Speaker(Protocol):
    """Who answers: a model here, or a server."""

    mode: str
    messages: list[dict[str, str]]

    @property
    def name(self) -> str: ...
    def ask(self, message: str, on_text: Callable[[str], None] | None = None) -> Answer: ...
    def command(self, line: str) -> str: ...


def common_command(
    speaker: Speaker, name: str, argument: str, usages: Mapping[str, str]
) -> str | None:
    """The reply to /help, /reset or /mode; None to another command."""
    if name == "/help":
        width = max(map(len, usages))
        return "\n".join(f"{usage:<{width}}  {effect}" for usage, effect in usages.items())
    if name == "/reset":
        speaker.messages = []
        return f"The conversation is deleted; {speaker.name} stays."
    if name == "/mode":
        speaker.mode = check_choice("mode", argument or speaker.mode, MODES)
        return f"mode {speaker.mode}, answers by {speaker.name}"
    return None


def run(conversation: Speaker, *, as_json: bool = False) -> int:
    """Answer each line of stdin. An error ends its own turn only. -> the number of failed lines"""
    is_typed = sys.stdin.isatty()
    if is_typed:
        print_note(f"{conversation.name} answers. /help lists the commands; Ctrl-D quits.")
    turn = failed = 0
    for line in typed_lines("you> ") if is_typed else piped_lines():
        if line == "/quit":
            break
        is_command = line.startswith("/")
        turn += not is_command
        shown = line.encode("utf-8", "backslashreplace").decode("utf-8")
        asked = {"command": shown} if is_command else {"turn": turn, "prompt": shown}
        try:
            check_unicode(line)
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
            print_json({**asked, **answer.to_dict(line)})
            continue
        print()
        if answer.is_stopped:
            print_note("(stopped)")
    return 0 if is_typed else failed


def check_unicode(line: str) -> None:
    """Refuse a line with bytes that stdin could not decode."""
    try:
        line.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The line {line[:40]!a} is not text in the encoding of stdin "
            f"({sys.stdin.encoding}); convert it, or set PYTHONIOENCODING."
        ) from error


def piped_lines() -> Iterator[str]:
    """The lines of a pipe that are not empty; bytes that are no text become surrogates."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    yield from filter(None, map(str.strip, sys.stdin))


def typed_lines(label: str) -> Iterator[str]:
    """Lines typed in a terminal, with history and editing where Python has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            if sys.stdout.isatty():
                line = input(label)
            else:  # stdout is for the results only
                print(label, end="", file=sys.stderr, flush=True)
                line = input()
        except EOFError:
            print_note("")
            return
        if line.strip():
            yield line.strip()


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
