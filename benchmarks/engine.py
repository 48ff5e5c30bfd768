"""The NumPy engine beside Hugging Face's generate in torch, and beside the memory's own speed.

    python benchmarks/engine.py [--quick] [--shapes 135M,0.5B,1.5B] [--rounds 9]
    python benchmarks/engine.py --write 1.5B DIRECTORY    # a random checkpoint, for `verify`

Decoding reads every weight once per token: the limit is the time to read that many bytes from
memory. Machines are noisy, so peers take turns: each round runs every peer once, and reads once, in
rotating order; ratios are medians of paired rounds with a bootstrap interval. Peak memory is
measured in a process of its own.
"""

from __future__ import annotations

import gc
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _results import (
    Row,
    call_in_new_process,
    log,
    make_parser,
    paired_ratio,
    parse,
    resident_bytes,
    save,
    span,
    table,
    time_peers,
)

from causal_qwen.engine import Engine, KeyValueCache, threads
from causal_qwen.engine.random_checkpoint import QWEN_0_5B, QWEN_1_5B, random_checkpoint

SHAPES = {"0.5B": QWEN_0_5B, "1.5B": QWEN_1_5B}
PROMPT, NEW, PREFILL = 8, 16, 512  # tokens: of a decoding round, and of a prefill
CONTEXTS = (128, 1024, 4096, 8000)
DECODE, SHARE, PREFILL_TIME = (
    " decode, times torch",
    ", share of the limit",
    " prefill, time of torch's",
)
BARS = {
    "135M float32": {DECODE: ("at least", 1.8), PREFILL_TIME: ("at most", 1.2)},
    "0.5B float32": {
        DECODE: ("at least", 2.5),
        SHARE: ("at least", 0.75),
        PREFILL_TIME: ("at most", 1.2),
    },
    "0.5B bfloat16": {DECODE: ("at least", 0.9)},
    "1.5B bfloat16": {", tokens/s": ("at least", 2), ", peak RSS in GB": ("at most", 4.5)},
}
Timer = Callable[[], float]


# ---------------------------------------------------------------- peers


def memory_reader(size: int, times: int = 4) -> Timer:
    """Seconds in which all threads together read `size` bytes from memory, at best."""
    block = np.ones(2**27, np.float32)  # 512 MB, far beyond the caches
    parts = np.array_split(block, threads.COUNT)

    def read() -> float:
        start = time.perf_counter()
        readers = [threading.Thread(target=part.max) for part in parts]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return time.perf_counter() - start

    return lambda: min(read() for _ in range(times)) * size / block.nbytes


class NumPyPeer:
    """The NumPy engine; weights are cast to `dtype` if one is given."""

    def __init__(self, path: Path, dtype: str | None = None) -> None:
        self.engine = Engine.from_pretrained(path, dtype=dtype)
        self.vocabulary = self.engine.model.config.vocab_size

    def generate(self, count: int) -> None:
        ids = random_ids(PROMPT, self.vocabulary)[0].tolist()
        self.engine.generate(ids, mode="compatible", max_new_tokens=count, min_new_tokens=count)

    def prefill(self) -> None:
        model = self.engine.model
        z = model.forward(
            model.embed(random_ids(PREFILL, self.vocabulary)), KeyValueCache(model.config)
        )
        model.logits(z[:, -1])

    def weight_bytes(self) -> int:
        """Bytes of weights that are read for each token."""
        is_tied = self.engine.model.config.tie_word_embeddings
        stored = self.engine.parameters.items()
        return sum(w.nbytes for name, w in stored if is_tied or name != "model.embed_tokens.weight")

    def context_growth(self, contexts: list[int]) -> dict[int, float]:
        """Milliseconds per token after so many tokens."""
        model, rng = self.engine.model, np.random.default_rng(0)
        cache, found = KeyValueCache(model.config, 1, max(contexts) + 16), {}
        for context in contexts:
            missing = rng.integers(*id_range(self.vocabulary), (1, context - cache.length))
            model.forward(model.embed(missing), cache)
            times = []
            for _ in range(8):
                start = time.perf_counter()
                model.logits(model.forward(model.embed(missing[:, :1]), cache)[:, -1])
                times.append(time.perf_counter() - start)
            found[context] = 1e3 * float(np.median(times))
        return found


class TorchPeer:
    """Hugging Face's Qwen2."""

    def __init__(self, path: Path, dtype: str) -> None:
        import torch
        from transformers import Qwen2ForCausalLM

        from causal_qwen.conversion.checkpoint_io import quiet

        self.torch = torch
        with quiet():
            self.model = Qwen2ForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()

    def ids(self, count: int) -> Any:
        return self.torch.from_numpy(random_ids(count, self.model.config.vocab_size))

    def generate(self, count: int) -> None:
        ids = self.ids(PROMPT)
        common = {
            "do_sample": False,
            "pad_token_id": 0,
            "attention_mask": self.torch.ones_like(ids),
        }
        self.model.generate(ids, max_new_tokens=count, min_new_tokens=count, **common)

    def prefill(self) -> None:
        with self.torch.no_grad():
            self.model(self.ids(PREFILL), logits_to_keep=1, use_cache=True)


def id_range(vocabulary: int) -> tuple[int, int]:
    return min(1000, vocabulary // 2), min(20_000, vocabulary)


def random_ids(count: int, vocabulary: int) -> np.ndarray:
    """(1, count)"""
    return np.random.default_rng(0).integers(*id_range(vocabulary), (1, count))


def token_timer(peer: NumPyPeer | TorchPeer) -> Timer:
    """Seconds per token, without the prompt."""

    def seconds(count: int) -> float:
        start = time.perf_counter()
        peer.generate(count)
        return time.perf_counter() - start

    def run() -> float:
        first = seconds(1)
        return (seconds(NEW) - first) / (NEW - 1)

    return run


def run_alone(name: str, path: Path) -> dict[str, float]:
    """One peer: seconds to load and to the first token, peak memory."""
    kind, dtype = name.split()
    start = time.perf_counter()
    peer = NumPyPeer(path) if kind == "NumPy" else TorchPeer(path, dtype)
    loaded = time.perf_counter()
    peer.generate(1)
    found = {"load_s": loaded - start, "first_s": time.perf_counter() - loaded}
    peer.generate(NEW)
    return found | {"peak_rss_gb": resident_bytes(peak=True) / 1e9}


# ---------------------------------------------------------------- measuring


def measure(shape: str, stored: str, rounds: int, path: Path) -> Row:
    """One shape, its weights stored in one dtype."""
    ours, torch_name = f"NumPy {stored}", f"torch {stored}"
    numpy_peer, torch_peer = NumPyPeer(path), TorchPeer(path, stored)
    timers = {ours: token_timer(numpy_peer), torch_name: token_timer(torch_peer)}
    if shape != "1.5B":  # too large for a third copy
        timers["NumPy float32 copy"] = token_timer(NumPyPeer(path, "float32"))
    weights = numpy_peer.weight_bytes()
    times = time_peers(timers | {"limit": memory_reader(weights)}, rounds)
    limit = times.pop("limit")
    result: Row = {
        "shape": shape,
        "stored": stored,
        "bandwidth_gb_s": weights / float(np.median(limit)) / 1e9,
        "weights_gb": weights / 1e9,
        "decode": {
            name: {
                "tokens_per_s": 1 / float(np.median(seconds)),
                "times_torch": paired_ratio(times[torch_name], seconds),
                "share_of_limit": paired_ratio(limit, seconds),
            }
            for name, seconds in times.items()
        },
    }
    del timers
    gc.collect()
    prefills = {ours: numpy_peer.prefill, torch_name: torch_peer.prefill}
    times = time_peers(prefills, rounds // 2 + 1)
    result["prefill"] = {
        name: {
            "tokens_per_s": PREFILL / float(np.median(seconds)),
            "time_of_torch": paired_ratio(seconds, times[torch_name]),
        }
        for name, seconds in times.items()
    }
    longest = numpy_peer.engine.model.config.max_position_embeddings - 16 if rounds > 2 else 128
    result["context_ms"] = numpy_peer.context_growth([c for c in CONTEXTS if c <= longest])
    del numpy_peer, torch_peer, prefills
    gc.collect()
    result["alone"] = {
        name: call_in_new_process(run_alone, name, path) for name in (ours, torch_name)
    }
    log(result)
    return result


def checkpoint(shape: str, stored: str, scratch: Path, model: Path | None) -> Path:
    if shape == "135M":
        from causal_qwen.conversion.convert import default_model

        return model or default_model()
    path = scratch / f"{shape}-{stored}"
    if not path.exists():
        random_checkpoint(path, SHAPES[shape], stored)
    return path


# ---------------------------------------------------------------- the page


def bars(results: list[Row]) -> list[Row]:
    rows = []
    for row in results:
        kind = f"{row['shape']} {row['stored']}"
        ours, prefill = (row[key][f"NumPy {row['stored']}"] for key in ("decode", "prefill"))
        figures = {
            DECODE: ours["times_torch"][0],
            SHARE: ours["share_of_limit"][0],
            ", tokens/s": ours["tokens_per_s"],
            PREFILL_TIME: prefill["time_of_torch"][0],
            ", peak RSS in GB": row["alone"][f"NumPy {row['stored']}"]["peak_rss_gb"],
        }
        for what, (limit, bar) in BARS.get(kind, {}).items():
            is_met = figures[what] >= bar if limit == "at least" else figures[what] <= bar
            rows.append({"bar": kind + what, "figure": figures[what], "asked": f"{limit} {bar:g}"})
            rows[-1]["met"] = "yes" if is_met else "no"
    return rows


def page(results: list[Row]) -> list[str]:
    speeds = sorted(row["bandwidth_gb_s"] for row in results)
    shape = {"shape": "{shape}", "stored": "{stored}"}
    columns = shape | {
        "peer": "{peer}",
        "decode tokens/s": "{decode[tokens_per_s]:.1f}",
        "times torch": span("decode[times_torch]"),
        "share of the memory's limit": span("decode[share_of_limit]", 0, "%"),
        "prefill tokens/s": "{prefill[tokens_per_s]:.0f}",
        "its time / torch's": span("prefill[time_of_torch]"),
        "load s": "{alone[load_s]:.2f}",
        "first token s": "{alone[first_s]:.2f}",
        "peak RSS GB": "{alone[peak_rss_gb]:.2f}",
    }
    peers = [
        {**row, "peer": name, **{k: row[k].get(name) for k in ("decode", "prefill", "alone")}}
        for row in results
        for name in row["decode"]
    ]
    growth = shape | {str(context): f"{{context_ms[{context}]:.0f}}" for context in CONTEXTS}
    bar_columns = {"bar": "{bar}", "figure": "{figure:.2f}", "asked": "{asked}", "met": "{met}"}
    return [
        "# The NumPy engine: speed and memory",
        "",
        f"`python benchmarks/engine.py`: {threads.COUNT} threads, {platform.machine()}, NumPy "
        f"{np.__version__}; read bandwidth {speeds[0]:.1f} to {speeds[-1]:.1f} GB/s, measured in "
        f"every round. Decoding: {PROMPT} prompt tokens, {NEW} new ones; prefill: {PREFILL} "
        "tokens; load, first token, memory: in a process of its own. Ratios are medians of paired "
        "rounds with 95% intervals.",
        "",
        *table(columns, peers),
        "",
        "Milliseconds per token as the context grows:",
        "",
        *table(growth, results),
        "",
        *table(bar_columns, bars(results)),
    ]


def main() -> None:
    parser = make_parser(__doc__, "engine", "the 135M model, two rounds", rounds=9)
    parser.add_argument("--shapes", default="135M,0.5B,1.5B")
    parser.add_argument("--model", type=Path, help="use this converted model as the 135M shape")
    parser.add_argument("--scratch", type=Path, help="keep random checkpoints in this directory")
    parser.add_argument(
        "--write", nargs=2, metavar=("SHAPE", "DIRECTORY"), help="only write a random checkpoint"
    )
    parser.add_argument("--stored", default="bfloat16", help="dtype of --write")
    options = parse(parser, shapes="135M", rounds=2)
    if options.write:
        print(random_checkpoint(Path(options.write[1]), SHAPES[options.write[0]], options.stored))
        return
    shapes = options.shapes.split(",")
    cases = [(shape, "float32") for shape in shapes if shape != "1.5B"]
    cases += [(shape, "bfloat16") for shape in shapes if shape != "135M"]
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for shape, stored in cases:
            path = checkpoint(shape, stored, options.scratch or Path(temporary), options.model)
            results.append(measure(shape, stored, options.rounds, path))
    save(page(results), results, options.output)


if __name__ == "__main__":
    main()
