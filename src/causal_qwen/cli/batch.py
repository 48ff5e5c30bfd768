"""Batch: a file of prompts -> a file of texts, in the same order, resumed where it stopped.

A line of the input is a request as the server takes it: {"prompt": ...} or {"messages": ...}, with
any other field, such as an individual of its own. A line of the output repeats the prompt and has
the text, and `replay`, the fields that generate it again; or the error of that line.
"""

from __future__ import annotations

import json
import queue
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from causal_qwen.engines.engine import Engine, Row
from causal_qwen.individuals import Individual, parse_individual
from causal_qwen.serving.batching import Batcher, Event, Job
from causal_qwen.serving.limits import Limits
from causal_qwen.serving.replies import Reply
from causal_qwen.serving.requests import RequestError, TextRequest

ROWS = 8  # texts that are decoded together
PART = b'{"line":'  # begins every line of an output
KEPT = ("id", "prompt", "messages")  # copied from the input to the output


class Line(NamedTuple):
    number: int  # from 0
    record: dict[str, Any]

    @property
    def kept(self) -> dict[str, Any]:
        return {name: self.record[name] for name in KEPT if name in self.record}


def read_lines(path: Path) -> Iterator[Line]:
    """The requests of a file of JSON lines; empty lines count, and are skipped."""
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
                if not isinstance(record, dict):
                    raise ValueError("it is no object")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"Line {number + 1} of {path} is no request ({error}).") from None
            yield Line(number, record)


def resume(output: Path, lines: Iterator[Line]) -> int:
    """Cut an output after its last whole line that belongs to the input. -> lines that are done"""
    if not output.exists():
        return 0
    done = end = 0
    with output.open("rb+") as file:
        for text in file:
            line = next(lines, None)
            if not text.endswith(b"\n") and PART.startswith(text[: len(PART)]):
                break  # a killed run has left a part
            try:
                record = json.loads(text)
            except ValueError:
                record = None
            kept = None if line is None else {"line": line.number, **line.kept}
            found = record if isinstance(record, dict) else {}
            if kept is None or kept != {name: found.get(name) for name in kept}:
                raise ValueError(
                    f"Line {done + 1} of {output} is not of this input; name another output."
                )
            done, end = done + 1, end + len(text)
        file.truncate(end)
    return done


def run(
    engine: Engine,
    source: Path,
    output: Path,
    defaults: Mapping[str, Any],
    limits: Limits,
    report: Callable[[str], None] = lambda _: None,
) -> int:
    """Generate what is missing in `output`. -> how many of its new lines are errors"""
    done = resume(output, read_lines(source))
    lines = read_lines(source)
    for _ in range(done):
        next(lines)
    batcher = Batcher(engine, limits)
    failed, running = 0, deque[_Task]()
    try:
        with output.open("a", encoding="utf-8") as file:
            for line in [*lines, None]:
                if line is not None:
                    running.append(_Task(line, engine, batcher, defaults, limits))
                while running and (line is None or len(running) >= 2 * limits.max_rows):
                    record = running.popleft().finish()
                    failed += "error" in record
                    done += 1
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    file.flush()
                    report(f"{done} texts written")
    finally:
        batcher.close()
    return failed


class _Task:
    """One line that is being generated."""

    def __init__(
        self,
        line: Line,
        engine: Engine,
        batcher: Batcher,
        defaults: Mapping[str, Any],
        limits: Limits,
    ) -> None:
        self.line, self.error = line, ""
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        fields = {name: value for name, value in line.record.items() if name != "id"}
        kind = "chat" if "messages" in fields else "completion"
        try:
            request = TextRequest.parse({**defaults, **fields}, kind, limits)
            if len(request.prompts) * request.n != 1:
                raise RequestError("a line asks for one text; write one line for each")
            call = request.resolve(engine.resolve, engine.default_mode, _find)
            encode = engine.encode_chat if request.is_chat else engine.encode
            prompt = encode(request.prompts[0])
            length = min(request.max_tokens, engine.context - len(prompt.ids))
            if not prompt.ids or length < 1:
                raise RequestError(
                    f"the prompt has {len(prompt.ids)} tokens; use 1 to {engine.context - 1}"
                )
        except ValueError as error:
            self.error = " ".join(str(error).split())
            return
        row = Row(prompt, *call.of_copy(0), length, request.alternatives)
        self.reply = Reply(request, call, [row], engine, "")
        batcher.submit(Job([row], request.stop, self.events.put))

    def finish(self) -> dict[str, Any]:
        """Wait for the text. -> a line of the output"""
        record = {"line": self.line.number, **self.line.kept}
        if not self.error:
            (text,) = self.reply.texts
            while text.finish is None and not self.error:
                event = self.events.get()
                self.error = "" if event.error is None else str(event.error)
                text.take(event)
        if self.error:
            return {**record, "error": self.error}
        (choice,) = self.reply.whole()["choices"]
        said = {"text": text.text, "finish_reason": text.finish, "numbers": choice["numbers"]}
        log_probs = {} if choice["logprobs"] is None else {"logprobs": choice["logprobs"]}
        return {**record, **said, **log_probs, "replay": choice["replay"]}


def _find(name: str) -> Individual:
    """A name is the file of a saved individual."""
    try:
        found = parse_individual(name)
    except (OSError, ValueError) as error:
        raise RequestError(str(error)) from None
    assert isinstance(found, Individual)  # digits are a seed before they come here
    return found
