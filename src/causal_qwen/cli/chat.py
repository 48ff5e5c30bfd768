"""Chat: several turns with one individual.

    you> What should I cook tonight?
    individual 7> The night before a big celebration, I always have a special recipe in mind ...

The conversation is read anew at every turn. In `causal` mode one e speaks all of its turns, in
`sampling` mode noise is drawn from one seed by position: the individual stays, whatever is said.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from causal_qwen.generation.streaming import Said, context_of, read_chat, say, stopped_by_interrupt
from causal_qwen.individuals.individual import SAVED, Individual, first_given, parse_individual
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.options import MODES, NOISY_MODES, check_choice
from causal_qwen.terminal import print_json

# Likelihood truncation keeps a small model on topic; what is left of the noise can be turned up.
LIVELY: dict[str, dict[str, Any]] = {
    "causal": {"min_density": 0.05, "temperature": 4.0},
    "sampling": {"min_density": 0.05, "temperature": 1.0},
}
HELP = {
    "/individual [SEED|FILE]": "who speaks; or somebody else goes on with the conversation",
    "/mode [MODE]": "standard, sampling, causal or compatible",
    "/save FILE": "keep who speaks; the whole conversation if FILE ends in .json",
    "/load FILE": "bring back what /save has kept",
    "/reset": "forget what was said; the individual stays",
    "/help": "this list",
    "/quit": "end, as Ctrl-D does; Ctrl-C stops an answer",
}


class Conversation:
    """What was said, how it is decided, and who decides."""

    def __init__(
        self,
        processor: Processor,
        model: CausalModel,
        *,
        mode: str = "causal",
        individual: int | Individual | None = None,
        system: str | None = None,
        temperature: float | None = None,
        min_density: float | None = None,
        max_new_tokens: int = 200,
    ) -> None:
        self.processor, self.model = processor, model
        self.temperature, self.min_density = temperature, min_density
        self.max_new_tokens = max_new_tokens
        self.first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = []  # by turns: user, assistant
        self.who: int | Individual = secrets.randbelow(10_000) if individual is None else individual
        self.mode = check_choice("mode", mode, MODES)

    @property
    def individual(self) -> Individual | None:
        """Who speaks; nobody in modes without noise."""
        if self.mode not in NOISY_MODES:
            return None
        if isinstance(self.who, Individual):
            return self.who
        usual = LIVELY[self.mode]
        return Individual.draw(
            self.model,
            seed=self.who,
            fresh=self.mode == "sampling",
            min_density=first_given(self.min_density, usual["min_density"]),
            temperature=first_given(self.temperature, usual["temperature"]),
        )

    @property
    def name(self) -> str:
        """Who answers, as it is shown."""
        one = self.individual
        if one is None:
            return self.mode
        return one.name or f"individual{'' if one.seed is None else f' {one.seed}'}"

    def ask(self, message: str, *, is_live: bool = False) -> Said:
        """One turn; Ctrl-C stops the answer, and what was said of it is kept."""
        turn = [*self.messages, {"role": "user", "content": message}]
        while len(turn) > 1 and self._length(turn) > self._room():
            turn = turn[2:]  # the oldest is forgotten first
        inputs = read_chat(self.processor, [*self.first, *turn])
        if (length := inputs["input_ids"].shape[1]) > self._room():
            raise ValueError(
                f"The message makes {length} tokens and the model reads {self._room()} beside its "
                "answer: shorten it."
            )
        individual = self.individual
        with stopped_by_interrupt() as stop:
            said = say(
                self.processor,
                self.model,
                inputs,
                mode=self.mode,
                who=individual,
                temperature=None if individual is not None else self.temperature,
                max_new_tokens=self.max_new_tokens,
                is_live=is_live,
                stop=stop,
            )
        self.messages = [*turn, {"role": "assistant", "content": said.text.strip()}]
        return said

    def obey(self, line: str) -> str:
        """A line that begins with a slash; returns what to tell the user."""
        command, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        if command == "/help":
            width = max(map(len, HELP))
            return "\n".join(f"{name:<{width}}  {what}" for name, what in HELP.items())
        if command == "/reset":
            self.messages = []
            return f"Forgotten; {self.name} is listening."
        if command == "/mode":
            if argument:
                self.mode = check_choice("/mode", argument, MODES)
            return f"mode {self.mode}, {self.name} speaks"
        if command == "/individual":
            if argument:
                self._meet(parse_individual(argument))
            return f"{self.individual or self.mode!r} speaks"
        if command in ("/save", "/load"):
            if not argument:
                raise ValueError(f"{command} needs the name of a file.")
            return self._save(Path(argument)) if command == "/save" else self._load(Path(argument))
        raise ValueError(f"{command} is unknown; /help lists what there is.")

    def _meet(self, who: int | Individual) -> None:
        if self.mode not in NOISY_MODES:
            raise ValueError(f"Nobody in particular speaks in mode {self.mode}: say /mode causal.")
        if isinstance(who, Individual) and who.size != self.model.config.causal_size:
            raise ValueError(
                f"{who!r} is another model's: here individuals have "
                f"{self.model.config.causal_size} coordinates."
            )
        self.who = who

    def _save(self, path: Path) -> str:
        if path.suffix == ".json":
            one = self.individual
            who = one and {"noise": one.noise.tolist(), **{n: getattr(one, n) for n in SAVED}}
            record = {"mode": self.mode, "individual": who, "messages": self.messages}
            path.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
            return f"The conversation is in {path}."
        if self.individual is None:
            raise ValueError(f"Nobody in particular speaks in mode {self.mode}: say /mode causal.")
        self.individual.save(path)
        return f"{self.name} is in {path}."

    def _load(self, path: Path) -> str:
        if path.suffix != ".json":
            self._meet(Individual.load(path))
            return f"{self.individual!r} speaks"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            mode, messages, who = record["mode"], record["messages"], record["individual"]
            one = None
            if who is not None:
                noise = who.pop("noise") or np.empty((0, self.model.config.causal_size))  # fresh
                one = Individual(np.array(noise), **who)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no conversation ({error}).") from error
        before, self.mode = self.mode, check_choice("mode", mode, MODES)
        try:
            if one is not None:
                self._meet(one)
        except ValueError:
            self.mode = before
            raise
        self.messages = messages
        return f"{len(messages) // 2} turns with {self.name} are remembered."

    def _length(self, turn: list[dict[str, str]]) -> int:
        length: int = read_chat(self.processor, [*self.first, *turn])["input_ids"].shape[1]
        return length

    def _room(self) -> int:
        return context_of(self.model) - self.max_new_tokens


def run(conversation: Conversation, *, as_json: bool = False) -> None:
    """Answer what is typed, or what comes through a pipe: one line is one turn.

    On a terminal an error is told and the conversation goes on; a pipe is ended by it.
    """
    is_typed = sys.stdin.isatty()
    if is_typed:
        tell(f"{conversation.name} is listening. /help lists what can be done; Ctrl-D ends.")
    turn = 0
    for line in typed("you> ") if is_typed else piped():
        if line.strip() == "/quit":
            return
        try:
            if line.startswith("/"):
                tell(conversation.obey(line))
                continue
            turn += 1
            if is_typed and not as_json:
                print(f"{conversation.name}> ", end="", flush=True)
            said = conversation.ask(line, is_live=not as_json)
        except (ValueError, OSError) as error:
            if not is_typed:
                raise
            tell(" ".join(str(error).split()))
            continue
        if as_json:
            print_json({"turn": turn, **said.to_dict(line, conversation.mode)})
        elif said.is_stopped:
            tell("(stopped)")


def tell(what: str) -> None:
    """Beside the conversation, not in it."""
    print(what, file=sys.stderr, flush=True)


def piped() -> Iterator[str]:
    return (line.strip() for line in sys.stdin if line.strip())


def typed(label: str, read: Callable[[str], str] = input) -> Iterator[str]:
    """Lines as they are typed, with history and editing where the system has them."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")
    while True:
        try:
            if sys.stdout.isatty():
                line = read(label)
            else:  # the standard output belongs to the results
                print(label, end="", file=sys.stderr, flush=True)
                line = read("")
        except EOFError:
            tell("")
            return
        if line.strip():
            yield line.strip()
