"""Chat: several turns with one individual.

    you> What should I cook tonight?
    individual 7> The night before a big celebration, I always have a special recipe in mind ...

Each turn encodes the whole conversation again. In `causal` mode one individual gives every answer;
in `sampling` mode one seed draws the noise of every position.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from causal_qwen.cli.turns import common_command, interruption
from causal_qwen.individuals import OWN_FIELDS, Individual, parse_individual
from causal_qwen.options import MODES, NOISY_MODES, check_choice
from causal_qwen.session import Session, Text

HELP = {
    "/individual [SEED|FILE]": "show the individual, or continue with another one",
    "/mode [MODE]": f"show the mode, or change it: {', '.join(MODES)}",
    "/save FILE": "save the individual",
    "/reset": "delete the conversation and keep the individual",
    "/help": "show this list",
    "/quit": "quit, like Ctrl-D; Ctrl-C stops an answer",
}
OF_INDIVIDUALS = ("min_density", "persistence", "whole_words", "avoid_repeats")


class Conversation:
    """The messages, the mode, and the individual that answers."""

    def __init__(
        self,
        session: Session,
        mode: str = "causal",
        individual: int | Individual | None = None,
        system: str | None = None,
        max_new_tokens: int = 200,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.session, self.max_new_tokens, self.options = session, max_new_tokens, options or {}
        self.system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = []  # user and assistant in turn
        self.source = secrets.randbelow(10_000) if individual is None else individual
        self.mode = check_choice("mode", mode, MODES)

    @property
    def individual(self) -> Individual | None:
        """The individual that answers; None in modes without noise."""
        if self.mode not in NOISY_MODES:
            return None
        if isinstance(self.source, Individual):
            return self.source
        own = {name: self.options[name] for name in OWN_FIELDS if name in self.options}
        resolve = self.session.engine.resolve
        return self.session.individual_of(
            resolve(causal_mode=self.mode, individual=self.source, **own)
        )

    @property
    def size(self) -> int:
        return self.session.engine.size

    @property
    def name(self) -> str:
        """The label of the answers."""
        if (individual := self.individual) is None:
            return self.mode
        seed = "" if individual.seed is None else f" {individual.seed}"
        return individual.name or f"individual{seed}"

    def ask(self, message: str, on_text: Callable[[str], None] | None = None) -> Text:
        """One turn. Ctrl-C stops the answer; its beginning is kept."""
        engine = self.session.engine
        space = engine.context - self.max_new_tokens
        turns = [*self.messages, {"role": "user", "content": message}]
        while (length := len(engine.encode_chat([*self.system, *turns]).ids)) > space:
            if len(turns) == 1:
                raise ValueError(
                    f"The message has {length} tokens and the model reads {space} beside its "
                    "answer; shorten it."
                )
            turns = turns[2:]  # drop the oldest turn
        individual, options = self.individual, dict(self.options)
        if individual is not None:  # which has its own temperature, truncation and persistence
            options = {name: one for name, one in options.items() if name not in OWN_FIELDS}
        else:
            options = {name: one for name, one in options.items() if name not in OF_INDIVIDUALS}
        stream = self.session.stream(
            [*self.system, *turns],
            individual,
            mode=self.mode,
            max_new_tokens=self.max_new_tokens,
            **options,
        )
        with interruption() as is_interrupted:
            for text in stream:
                if on_text is not None:
                    on_text(text)
                if is_interrupted():
                    stream.stop()
        answer = stream.result
        self.messages = [*turns, {"role": "assistant", "content": answer.text.strip()}]
        return answer

    def command(self, line: str) -> str:
        """Run a line that begins with a slash. -> the reply"""
        name, _, argument = line.strip().partition(" ")
        argument = argument.strip()
        if (reply := common_command(self, name, argument, HELP)) is not None:
            return reply
        if name == "/individual":
            if argument:
                self._use(parse_individual(argument))
            return self._introduction(is_new=bool(argument))
        if name == "/save":
            if (one := self.individual) is None or not argument:
                raise ValueError("/save needs the name of a file, and an individual to save.")
            one.save(argument)
            return f"{self.name} is saved in {argument}."
        raise ValueError(f"{name} is unknown; /help lists the commands.")

    def _introduction(self, is_new: bool) -> str:
        answers = f"answers by {self.individual or self.mode!r}"
        if not (is_new and self.messages):
            return answers
        return (
            f"{answers}; the {len(self.messages) // 2} earlier turns, in another individual's "
            "words, stay in the context (/reset deletes them)"
        )

    def _use(self, individual: int | Individual) -> None:
        if self.mode not in NOISY_MODES:
            raise ValueError(f"Mode {self.mode} has no individual; use /mode causal.")
        if isinstance(individual, Individual) and individual.size != self.size:
            raise ValueError(
                f"{individual!r} belongs to another model; this one has size={self.size}."
            )
        before, self.source = self.source, individual
        try:
            _ = self.individual
        except Exception:
            self.source = before
            raise
