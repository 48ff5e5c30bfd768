"""Throughput of the server: many clients at once beside one, and beside `generate` in a row.

    python benchmarks/serving.py [--quick] [--rounds 3] [--clients 8] [--tokens 32]

Every client has its own prompt, its own individual or mode, and its own connection over a real
socket. Each round runs all peers in rotating order; reported are medians of paired ratios, of
seconds and of processor seconds (which other work on the machine changes little). The texts of the
clients are compared with those of `generate` alone, token for token.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import platform
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from _history import MACHINE_COLUMNS, Speeds, conclude, time_beside_memory
from _results import Row, log, make_parser, paired_ratio, parse, span, table
from _texts import PROMPTS

from causal_qwen.conversion.convert import default_model
from causal_qwen.engines.torch import TorchEngine
from causal_qwen.serving.app import make_app
from causal_qwen.serving.connections import bind
from causal_qwen.serving.requests import Limits
from causal_qwen.serving.service import Service

MODES: tuple[dict[str, Any], ...] = (  # of the clients, in turn
    {"causal_mode": "causal"},
    {"causal_mode": "causal"},
    {"causal_mode": "sampling"},
    {"causal_mode": "standard"},
)


def call_of(client: int) -> dict[str, Any]:
    """The options of one client."""
    options = dict(MODES[client % len(MODES)])
    if options["causal_mode"] != "standard":
        options["individual"] = client
    return options


def prompt_of(client: int) -> str:
    """Prompts of different lengths."""
    return " ".join(PROMPTS[(client + i) % len(PROMPTS)] for i in range(1 + client % 3))


@contextlib.contextmanager
def running(backend: TorchEngine, tokens: int) -> Iterator[int]:
    """A server on a free port of this machine. -> the port"""
    with bind("127.0.0.1", 0) as bound:
        service = Service(backend, "served", Limits(max_tokens=tokens))
        bound.listen()
        app = make_app(service)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        thread = threading.Thread(target=asyncio.run, args=(server.serve([bound]),))
        thread.start()
        try:
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
            service.close()


def ask(port: int, client: int, tokens: int) -> tuple[float, str]:
    """One streamed request. -> seconds to the first event, the text"""
    body = {"prompt": prompt_of(client), "max_tokens": tokens, "stream": True, **call_of(client)}
    begun, first, text = time.perf_counter(), 0.0, ""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    for line in connection.getresponse():
        first = first or time.perf_counter() - begun
        if line.startswith(b"data: {"):
            text += json.loads(line[6:])["choices"][0]["text"]
    connection.close()
    return first, text


def alone(backend: TorchEngine, client: int, tokens: int) -> str:
    """The text of `generate`."""
    prompt = backend.encode(prompt_of(client))
    ids = torch.tensor([prompt.ids])
    result = backend.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        numeric_values=torch.tensor([prompt.values]),
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        **call_of(client),
    )
    new = result.sequences[0, ids.shape[1] :], result.numeric_values[0, ids.shape[1] :]
    return backend.processor.decode(*new, skip_special_tokens=True)


def measure(backend: TorchEngine, clients: int, tokens: int, rounds: int) -> Row:
    """Seconds of every peer in every round, times to the first token, and equal texts."""
    waits: dict[str, list[float]] = {"one": [], "many": []}
    texts: dict[str, list[str]] = {}
    cpu: dict[str, list[float]] = {"generate": [], "one": [], "many": []}

    def counted(name: str, peer: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            begun = time.process_time()
            peer()
            cpu[name].append(time.process_time() - begun)

        return call

    with running(backend, tokens) as port, ThreadPoolExecutor(clients) as pool:

        def one() -> None:
            answers = [ask(port, client, tokens) for client in range(clients)]
            waits["one"] += [wait for wait, _ in answers]

        def many() -> None:
            answers = list(pool.map(lambda client: ask(port, client, tokens), range(clients)))
            waits["many"] += [wait for wait, _ in answers]
            texts["many"] = [text for _, text in answers]

        def row() -> None:
            texts["row"] = [alone(backend, client, tokens) for client in range(clients)]

        peers = {"generate": row, "one": one, "many": many}
        peers = {name: counted(name, peer) for name, peer in peers.items()}
        times, machine = time_beside_memory(peers, rounds)
    equal = sum(a == b for a, b in zip(texts["many"], texts["row"], strict=True))
    return {
        "clients": clients,
        "tokens": tokens,
        **machine,
        "rounds": rounds,
        "tokens_per_second": {
            name: clients * tokens / float(np.median(seconds)) for name, seconds in times.items()
        },
        "many_to_one": paired_ratio(times["one"], times["many"]),
        "many_to_generate": paired_ratio(times["generate"], times["many"]),
        "cpu_to_one": paired_ratio(cpu["one"][1:], cpu["many"][1:]),
        "cpu_to_generate": paired_ratio(cpu["generate"][1:], cpu["many"][1:]),
        "first_one": float(np.median(waits["one"][clients:])),
        "first_many": float(np.median(waits["many"][clients:])),
        "last_many": float(np.max(waits["many"][clients:])),
        "equal": equal,
    }


def speeds(row: Row) -> Speeds:
    named = {"one client": "to_one", "generate": "to_generate"}
    return {
        f"all clients beside {peer}{unit}": row[key + name]
        for peer, name in named.items()
        for unit, key in {"": "many_", ", processor time": "cpu_"}.items()
    }


COLUMNS = {
    "clients, new tokens": "{clients}, {tokens}",
    **MACHINE_COLUMNS,
    "tokens/s, `generate` in a row": "{tokens_per_second[generate]:.1f}",
    "one client": "{tokens_per_second[one]:.1f}",
    "all clients": "{tokens_per_second[many]:.1f}",
    "all against one client": span("many_to_one"),
    "all against `generate`": span("many_to_generate"),
    "by processor time": "{cpu_to_one[0]:.2f}, {cpu_to_generate[0]:.2f}",
    "first token alone, s": "{first_one:.2f}",
    "under load, median and longest": "{first_many:.2f}, {last_many:.2f}",
    "texts equal to `generate`'s": "{equal} of {clients}",
}


def main() -> None:
    parser = make_parser(__doc__, "serving", "two short texts", rounds=3, has_check=True)
    parser.add_argument("--model", type=Path, help="measure this converted model, not the embedded")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of every text")
    options = parse(parser, rounds=1, clients=2, tokens=4)
    backend = TorchEngine.open(options.model or default_model())
    backend.model.generation_config.eos_token_id = None  # every text has its full length
    backend = TorchEngine(backend.model, backend.processor)
    row = measure(backend, options.clients, options.tokens, options.rounds)
    log(row)
    conclude([row], options, page, ("clients", "tokens"), speeds)


def page(rows: list[Row]) -> list[str]:
    return [
        "# Serving",
        "",
        f"`python benchmarks/serving.py --rounds {rows[-1]['rounds']}`: SmolLM2-135M in float32, "
        "prompts of different lengths, half "
        "of them `causal`, a quarter `sampling`, a quarter `standard`; streamed over real sockets, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, {platform.machine()}. "
        "Ratios of throughput: median over rounds, 95% bootstrap interval. "
        "`generate` in a row: the same texts by one call after another, without a server.",
        "",
        *table(COLUMNS, rows),
    ]


if __name__ == "__main__":
    main()
