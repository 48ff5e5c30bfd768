"""Batch: a file of prompts -> a file of texts, in the same order, resumed where it stopped.

A line of the input is a request as the server takes it: {"prompt": ...} or {"messages": ...}, with
any other field, such as an individual of its own. A line of the output repeats the prompt and has
the text, and `replay`, the fields that generate it again; or the error of that line.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from causal_qwen.engines.engine import Engine
from causal_qwen.individuals import Individual, parse_individual
from causal_qwen.serving.requests import ChatRequest, CompletionRequest, Limits, RequestError, read
from causal_qwen.serving.service import Service

ROWS = 8  # texts that are decoded together
PART = b'{"line":'  # begins every line of an output, also the part that a killed run leaves
KEPT = ("id", "prompt", "messages")  # copied from the input to the output

Line = tuple[int, dict[str, Any]]  # its number, from 0, and the request


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
            except ValueError as error:
                raise ValueError(f"Line {number + 1} of {path} is no request ({error}).") from None
            yield number, record


def resume(output: Path, lines: Iterator[Line]) -> int:
    """Cut an output after its last whole line, and pass over the lines of the input that it
    answers. -> how many"""
    if not output.exists():
        return 0
    *whole, part = output.read_bytes().split(b"\n")
    are_ours = [_is_answer(text, next(lines, None)) for text in whole]
    are_ours.append(PART.startswith(part[: len(PART)]))
    if not all(are_ours):
        where = f"Line {are_ours.index(False) + 1} of {output}"
        raise ValueError(f"{where} is not of this input; name another output.")
    with output.open("rb+") as file:
        file.truncate(sum(len(text) + 1 for text in whole))
    return len(whole)


def _is_answer(text: bytes, line: Line | None) -> bool:
    try:
        record = json.loads(text)
    except ValueError:
        return False
    return line is not None and isinstance(record, dict) and _kept(*line).items() <= record.items()


def run(
    engine: Engine,
    source: Path,
    output: Path,
    defaults: Mapping[str, Any],
    limits: Limits,
    report: Callable[[str], None] = lambda _: None,
) -> int:
    """Generate what is missing in `output`. -> how many of its new lines are errors"""
    lines = read_lines(source)
    done = resume(output, lines)
    failed = 0

    async def write() -> None:
        nonlocal done, failed
        running = deque[asyncio.Task[dict[str, Any]]]()
        for line in [*lines, None]:
            if line is not None:
                running.append(asyncio.create_task(_answer(service, *line, defaults)))
            while running and (line is None or len(running) >= 2 * limits.max_rows):
                record = await running.popleft()
                failed += "error" in record
                done += 1
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
                report(f"{done} texts written")

    with closing(Service(engine, "", limits)) as service:
        service.find = _find
        with output.open("a", encoding="utf-8") as file:
            asyncio.run(write())
    return failed


async def _answer(
    service: Service, number: int, record: dict[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    own = {name: value for name, value in record.items() if name not in ("id", "model")}
    fields = {**defaults, **own}
    try:
        request = read(ChatRequest if "messages" in fields else CompletionRequest, fields)
        if len(request.prompts) * request.n != 1:
            raise RequestError("A line asks for one text; write one line for each.")
        reply = await service.start(request)
        async for _ in reply.events():
            pass
    except RequestError as error:
        return {**_kept(number, record), "error": " ".join(str(error).split())}
    (choice,) = reply.whole()["choices"]
    (text,) = reply.texts.values()
    shown = {name: choice[name] for name in ("finish_reason", "numbers", "logprobs", "replay")}
    return {**_kept(number, record), "text": text.text, **shown}


def _kept(number: int, record: dict[str, Any]) -> dict[str, Any]:
    return {"line": number, **{name: record[name] for name in KEPT if name in record}}


def _find(name: str) -> int | Individual:
    """A name, or the file of a saved individual."""
    try:
        return parse_individual(name)
    except OSError as error:
        raise RequestError(str(error)) from None
