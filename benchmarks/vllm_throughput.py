"""Throughput of the vLLM plugin: beside stock vLLM with the plain Qwen2, and beside `generate`.

    make vllm
    python benchmarks/vllm_throughput.py [--quick] [--rounds 9] [--shape 0.5b]

Three engines decode the same prompts, of one length, to the same number of tokens: vLLM with the
plain model (greedy), vLLM with the plugin and Hugging Face's `generate` (both in each mode, one
batch). Each round runs all peers in rotating order; reported are medians of paired ratios of
*processor seconds*, with one thread each, which other work on the machine changes little. The texts
of the plugin are compared with those of `generate`, those of `standard` with stock vLLM's.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _history import MACHINE_COLUMNS, Speeds, conclude, faster, time_beside_memory
from _results import Row, log, make_parser, paired_ratio, parse, span, table
from decode import random_model, real_model

from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import default_model

MODES = ("standard", "causal", "sampling")
STOCK = "stock"
SHAPES = {"135m": "SmolLM2-135M", "0.5b": "random Qwen2.5-0.5B shape"}
PEER = Path(__file__).with_name("_vllm_peer.py")


class Engine:
    """vLLM in a process of its own, with one thread."""

    def __init__(self, python: Path, model: Path, log_file: Path) -> None:
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        settings = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its time is that of this process
            "VLLM_USE_V2_MODEL_RUNNER": "0",
        }
        self.log = log_file
        with log_file.open("w") as out:
            self.process = subprocess.Popen(
                [str(python), str(PEER), str(model)],
                env={**own, **settings},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        self._answer()

    def ask(self, prompts: list[list[int]], tokens: int, extra: list[Any], **sampling: Any) -> Any:
        assert self.process.stdin is not None
        job = {"prompts": prompts, "tokens": tokens, "extra": extra, "sampling": sampling}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"vLLM ended:\n{self.log.read_text()[-2000:]}")
        return json.loads(line)


def call_of(mode: str, row: int) -> dict[str, Any]:
    """The options of one row: every row has its own individual."""
    return {"causal_mode": mode} if mode == "standard" else {"causal_mode": mode, "individual": row}


def measure(
    model: Any, engines: dict[str, Engine], batch: int, prompt: int, tokens: int, rounds: int
) -> list[Row]:
    """A row for every mode: processor seconds per token, and their ratios."""
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(100, 40_000, (batch, prompt), generator=generator)
    prompts, texts = ids.tolist(), {}

    def stock() -> float:
        found = engines[STOCK].ask(prompts, tokens, [None] * batch, temperature=0.0)
        texts[STOCK] = found["texts"]
        return float(found["cpu"])

    def plugin(mode: str) -> float:
        extra = [call_of(mode, row) for row in range(batch)]
        found = engines["ours"].ask(prompts, tokens, extra)
        texts[mode] = found["texts"]
        return float(found["cpu"])

    def alone(mode: str) -> float:
        who = {} if mode == "standard" else {"individual": list(range(batch))}
        begun = time.process_time()
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            causal_mode=mode,
            pad_token_id=0,
            **who,
        )
        cpu = time.process_time() - begun
        texts[f"generate {mode}"] = found[:, prompt:].tolist()
        return cpu

    peers: dict[str, Any] = {STOCK: stock}
    for mode in MODES:
        peers[mode] = lambda mode=mode: plugin(mode)
        peers[f"generate {mode}"] = lambda mode=mode: alone(mode)
    cpu, machine = time_beside_memory(peers, rounds)
    unit = 1000 / (batch * tokens)
    return [
        {
            "batch": batch,
            **machine,
            "mode": mode,
            "rounds": rounds,
            "tokens": tokens,
            "ms": {
                name: float(np.median(cpu[peer])) * unit
                for name, peer in (("stock", STOCK), ("ours", mode), ("hf", f"generate {mode}"))
            },
            "to_stock": paired_ratio(cpu[mode], cpu[STOCK]),
            "to_generate": paired_ratio(cpu[f"generate {mode}"], cpu[mode]),
            "equal": sum(
                a == b for a, b in zip(texts[mode], texts[f"generate {mode}"], strict=True)
            ),
            "greedy": sum(a == b for a, b in zip(texts[mode], texts[STOCK], strict=True))
            if mode == "standard"
            else None,
        }
        for mode in MODES
    ]


COLUMNS = {
    "model": "{model}",
    "texts at once": "{batch}",
    **MACHINE_COLUMNS,
    "new tokens, rounds": "{tokens}, {rounds}",
    "mode": "`{mode}`",
    "ms of processor per token, stock vLLM": "{ms[stock]:.1f}",
    "plugin": "{ms[ours]:.1f}",
    "`generate`": "{ms[hf]:.1f}",
    "time of the plugin, stock vLLM = 1": span("to_stock"),
    "throughput of the plugin, `generate` = 1": span("to_generate"),
    "texts equal to `generate`'s": "{equal} of {batch}",
    "to stock vLLM's": "{greedy:d} of {batch}",
}


def main() -> None:
    parser = make_parser(__doc__, "vllm", "one short round", rounds=9, has_check=True)
    parser.add_argument("--python", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument(
        "--shape", choices=SHAPES, default="135m", help="the model that is measured"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=16, help="tokens of every prompt")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of every text")
    options = parse(parser, rounds=1, tokens=4, batches=[2])
    if not options.python.is_file():
        parser.error(f"{options.python} is missing; run `make vllm`, or name a Python with vLLM.")
    torch.set_num_threads(1)
    if options.shape == "135m":
        base, model = real_model(default_model(), torch.float32)
    else:
        base, model = random_model(torch.float32)
    model.generation_config.eos_token_id = None  # every text has its full length
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        directory, engines = Path(name), {}
        with quiet():
            base.save_pretrained(directory / STOCK)
            model.save_pretrained(directory / "ours")
        del base
        for peer in (STOCK, "ours"):
            engines[peer] = Engine(options.python, directory / peer, directory / f"{peer}.log")
        for batch in options.batches:
            rows += measure(model, engines, batch, options.prompt, options.tokens, options.rounds)
            log(*rows[-len(MODES) :])
        for engine in engines.values():
            engine.close()
    named = [{"model": SHAPES[options.shape], **row} for row in rows]
    write = partial(page, prompt=options.prompt)
    conclude(named, options, write, ("model", "batch"), speeds, ("mode",))


def speeds(row: Row) -> Speeds:
    mode = row["mode"]
    return {mode: faster(row["to_stock"]), f"{mode} beside generate": row["to_generate"]}


def page(rows: list[Row], prompt: int) -> list[str]:
    return [
        "# vLLM",
        "",
        "`python benchmarks/vllm_throughput.py` (`--shape 0.5b`): the plugin in vLLM 0.32 beside "
        "stock vLLM with the plain Qwen2, which decodes greedily, and beside Hugging Face's "
        f"`generate` with the same rows in one batch. float32, prompts of {prompt} tokens, "
        "one thread for each engine, vLLM's first model runner without compilation, torch "
        f"{torch.__version__}, {platform.machine()}. Every row of a batch has its own individual.",
        "",
        "The machine was shared with other work: seconds would say little. These are processor "
        "seconds of the decoding process, and ratios of peers that ran in the same round: medians "
        "over rounds, 95% bootstrap intervals.",
        "",
        *table(COLUMNS, rows),
    ]


if __name__ == "__main__":
    main()
