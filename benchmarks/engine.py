"""The NumPy engine beside Hugging Face's generate in torch, and beside the memory's own speed.

    python benchmarks/engine.py [--quick] [--shapes 135M,0.5B,1.5B] [--rounds 9]
    python benchmarks/engine.py --write 1.5B DIRECTORY    # a random checkpoint, for `verify`

Decoding reads every weight once per token: the limit is the time in which memory yields so many
bytes. Machines are noisy, so peers take turns: each round runs every peer once, and reads once, in
an order that rotates; ratios are medians of paired rounds with a bootstrap interval. Peak memory
is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _results import paired_ratio, resident_bytes, save

from causal_qwen.engine import Engine, KeyValueCache, threads
from causal_qwen.engine.random_checkpoint import QWEN_0_5B, QWEN_1_5B, random_checkpoint

SHAPES = {"0.5B": QWEN_0_5B, "1.5B": QWEN_1_5B}
PROMPT, NEW = 8, 16  # tokens of a decoding round
PREFILL = 512
CONTEXTS = (128, 1024, 4096, 8000)


def reader(size: int, times: int = 4) -> Callable[[], float]:
    """Seconds in which all threads together read `size` bytes from memory, at best."""
    block = np.ones(2**27, np.float32)  # 512 MB, far beyond the caches
    parts = np.array_split(block, threads.COUNT)

    def read() -> float:
        start = time.perf_counter()
        readers = [threading.Thread(target=part.max) for part in parts]
        for one in readers:
            one.start()
        for one in readers:
            one.join()
        return time.perf_counter() - start

    return lambda: min(read() for _ in range(times)) * size / block.nbytes


def numpy_speaker(path: Path, dtype: str | None) -> tuple[Callable[[int], float], int]:
    """Seconds to say so many tokens, and the bytes of weights that are read for each."""
    engine = Engine.from_pretrained(path, dtype=dtype)
    prompt = np.random.default_rng(0).integers(1000, 20_000, PROMPT).tolist()

    def generate(count: int) -> float:
        start = time.perf_counter()
        engine.generate(prompt, mode="compatible", max_new_tokens=count, min_new_tokens=count)
        return time.perf_counter() - start

    weights = sum(
        stored.nbytes
        for name, stored in engine.parameters.items()
        if name != "model.embed_tokens.weight" or engine.model.config.tie_word_embeddings
    )
    return generate, weights


def torch_speaker(path: Path, dtype: str) -> Callable[[int], float]:
    import torch
    from transformers import Qwen2ForCausalLM

    from causal_qwen.conversion.checkpoint_io import quiet

    with quiet():
        model = Qwen2ForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(1000, 20_000, (1, PROMPT)))
    common = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}

    def generate(count: int) -> float:
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, **common)
        return time.perf_counter() - start

    return generate


def decoder(generate: Callable[[int], float]) -> Callable[[], float]:
    """Seconds per token of one decoding round."""

    def run() -> float:
        first = generate(1)
        return (generate(NEW) - first) / (NEW - 1)

    return run


def numpy_prefill(path: Path, dtype: str | None) -> Callable[[], float]:
    engine = Engine.from_pretrained(path, dtype=dtype)
    ids = np.random.default_rng(0).integers(1000, 20_000, (1, PREFILL))

    def run() -> float:
        start = time.perf_counter()
        z = engine.model.forward(engine.model.embed(ids), KeyValueCache(engine.model.config))
        engine.model.logits(z[:, -1])
        return time.perf_counter() - start

    return run


def torch_prefill(path: Path, dtype: str) -> Callable[[], float]:
    import torch
    from transformers import Qwen2ForCausalLM

    from causal_qwen.conversion.checkpoint_io import quiet

    with quiet():
        model = Qwen2ForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(1000, 20_000, (1, PREFILL)))

    def run() -> float:
        start = time.perf_counter()
        with torch.no_grad():
            model(ids, logits_to_keep=1, use_cache=True)
        return time.perf_counter() - start

    return run


def take_turns(peers: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    names = list(peers)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds = peers[name]()
            if turn:  # the first round warms up
                times[name].append(seconds)
    return times


def alone(path: Path, peer: str) -> dict[str, float]:
    """One peer in a process of its own: seconds to load and to the first token, peak memory."""
    command = [sys.executable, __file__, "--alone", peer, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_alone(peer: str, path: Path) -> None:
    kind, dtype = peer.split()
    begun = time.perf_counter()
    generate = numpy_speaker(path, None)[0] if kind == "NumPy" else torch_speaker(path, dtype)
    found = {"load_s": time.perf_counter() - begun, "first_s": generate(1)}
    generate(NEW)
    print(json.dumps(found | {"peak_rss_gb": resident_bytes(peak=True) / 1e9}))


def context_growth(path: Path, dtype: str | None, contexts: tuple[int, ...]) -> dict[int, float]:
    """Milliseconds per token after so many tokens."""
    engine = Engine.from_pretrained(path, dtype=dtype)
    model, generator = engine.model, np.random.default_rng(0)
    cache, found = KeyValueCache(model.config, 1, max(contexts) + 16), {}
    for context in contexts:
        missing = generator.integers(1000, 20_000, (1, context - cache.length))
        model.forward(model.embed(missing), cache)
        times = []
        for _ in range(8):
            start = time.perf_counter()
            model.logits(model.forward(model.embed(np.array([[1000]])), cache)[:, -1])
            times.append(time.perf_counter() - start)
        found[context] = 1e3 * float(np.median(times))
    return found


def checkpoint(shape: str, stored: str, scratch: Path) -> Path:
    if shape == "135M":
        from causal_qwen.conversion.convert import default_model

        return default_model()
    path = scratch / f"{shape}-{stored}"
    if not path.exists():
        random_checkpoint(path, SHAPES[shape], stored)
    return path


def measure(shape: str, stored: str, rounds: int, scratch: Path) -> dict[str, Any]:
    """One shape, its weights stored in one way."""
    path = checkpoint(shape, stored, scratch)
    result: dict[str, Any] = {"shape": shape, "stored": stored}
    ours, weights = numpy_speaker(path, None)
    peers = {
        f"NumPy {stored}": decoder(ours),
        f"torch {stored}": decoder(torch_speaker(path, stored)),
    }
    if shape != "1.5B":  # which has no room for a third copy
        peers["NumPy float32 copy"] = decoder(numpy_speaker(path, "float32")[0])
    times = take_turns(peers | {"limit": reader(weights)}, rounds)
    limit = times.pop("limit")
    result["bandwidth_gb_s"] = weights / float(np.median(limit)) / 1e9
    decode = {}
    for name, seconds in times.items():
        median = float(np.median(seconds))
        ratio, low, high = paired_ratio(times[f"torch {stored}"], seconds)
        decode[name] = {
            "tokens_per_s": 1 / median,
            "times_torch": [ratio, low, high],
            "share_of_limit": paired_ratio(limit, seconds),
        }
    del peers, ours
    gc.collect()
    peers = {
        f"NumPy {stored}": numpy_prefill(path, None),
        f"torch {stored}": torch_prefill(path, stored),
    }
    times = take_turns(peers, rounds // 2 + 1)
    prefill = {}
    for name, seconds in times.items():
        ratio, low, high = paired_ratio(seconds, times[f"torch {stored}"])
        prefill[name] = {
            "tokens_per_s": PREFILL / float(np.median(seconds)),
            "time_of_torch": [ratio, low, high],
        }
    del peers
    gc.collect()
    result |= {"weights_gb": weights / 1e9, "decode": decode, "prefill": prefill}
    result["alone"] = {
        f"{who} {stored}": alone(path, f"{who} {stored}") for who in ("NumPy", "torch")
    }
    contexts = tuple(c for c in CONTEXTS if rounds > 2 or c <= 128)
    result["context_ms"] = context_growth(path, None, contexts)
    print(json.dumps(result), flush=True)
    return result


def bars(results: list[dict[str, Any]]) -> list[tuple[str, float, str, bool]]:
    """(what, the figure, the bar, whether it is met)"""
    found = []

    def at_least(what: str, value: float, bar: float) -> None:
        found.append((what, value, f"at least {bar:g}", value >= bar))

    for row in results:
        shape, stored = row["shape"], row["stored"]
        ours = row["decode"][f"NumPy {stored}"]
        if stored == "float32":
            bar = {"135M": 1.8, "0.5B": 2.5}.get(shape)
            if bar:
                at_least(f"{shape} float32 decode, times torch", ours["times_torch"][0], bar)
            if shape == "0.5B":
                at_least("0.5B float32, share of the limit", ours["share_of_limit"][0], 0.75)
            slower = row["prefill"]["NumPy float32"]["time_of_torch"][0]
            found.append(
                (f"{shape} float32 prefill, time of torch's", slower, "at most 1.2", slower <= 1.2)
            )
        elif shape == "0.5B":
            at_least("0.5B bfloat16 decode, times torch", ours["times_torch"][0], 0.9)
        elif shape == "1.5B":
            at_least("1.5B bfloat16, tokens/s", ours["tokens_per_s"], 2)
            peak = row["alone"]["NumPy bfloat16"]["peak_rss_gb"]
            found.append(("1.5B bfloat16, peak RSS in GB", peak, "at most 4.5", peak <= 4.5))
    return found


def page(results: list[dict[str, Any]]) -> list[str]:
    speeds = sorted(row["bandwidth_gb_s"] for row in results)
    lines = [
        "# The NumPy engine: speed and memory",
        "",
        f"`python benchmarks/engine.py`: {threads.COUNT} threads, {platform.machine()}, NumPy "
        f"{np.__version__}; read bandwidth {speeds[0]:.1f} to {speeds[-1]:.1f} GB/s, measured in "
        f"every round. Decoding: {PROMPT} prompt tokens, {NEW} new ones; prefill: {PREFILL} "
        "tokens; load, first token, memory: in a process of its own. Ratios are medians of paired "
        "rounds with 95% intervals.",
        "",
        "| shape | stored | peer | decode tokens/s | times torch | share of the memory's limit | "
        "prefill tokens/s | its time / torch's | load s | first token s | peak RSS GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results:
        for name, decode in row["decode"].items():
            ratio, low, high = decode["times_torch"]
            share, least_share, most_share = decode["share_of_limit"]
            prefill, own = row["prefill"].get(name), row["alone"].get(name)
            cells = ["", ""]
            if prefill:
                middle, least, most = prefill["time_of_torch"]
                cells = [
                    f"{prefill['tokens_per_s']:.0f}",
                    f"{middle:.2f} ({least:.2f} to {most:.2f})",
                ]
            names = ("load_s", "first_s", "peak_rss_gb")
            memory = [f"{own[name]:.2f}" for name in names] if own else ["", "", ""]
            lines.append(
                f"| {row['shape']} | {row['stored']} | {name} | {decode['tokens_per_s']:.1f} | "
                f"{ratio:.2f} ({low:.2f} to {high:.2f}) | "
                f"{share:.0%} ({least_share:.0%} to {most_share:.0%}) | "
                + " | ".join(cells + memory)
                + " |"
            )
    lines += ["", "Milliseconds per token as the context grows:", ""]
    lines += ["| shape | stored | " + " | ".join(map(str, CONTEXTS)) + " |"]
    lines += ["|---|---|" + "---|" * len(CONTEXTS)]
    for row in results:
        growth = [row["context_ms"].get(context) for context in CONTEXTS]
        cells = ["" if ms is None else f"{ms:.0f}" for ms in growth]
        lines.append(f"| {row['shape']} | {row['stored']} | " + " | ".join(cells) + " |")
    lines += ["", "| bar | figure | asked | met |", "|---|---|---|---|"]
    for what, value, bar, is_met in bars(results):
        lines.append(f"| {what} | {value:.2f} | {bar} | {'yes' if is_met else 'no'} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the 135M model, two rounds")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", default="135M,0.5B,1.5B")
    parser.add_argument(
        "--scratch", type=Path, help="where random checkpoints are written and kept"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/results/engine.md"))
    parser.add_argument("--alone", nargs=2, metavar=("PEER", "PATH"), help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs=2, metavar=("SHAPE", "DIRECTORY"), help="and do no more")
    parser.add_argument("--stored", default="bfloat16", help="for --write")
    options = parser.parse_args()
    if options.alone:
        run_alone(options.alone[0], Path(options.alone[1]))
        return
    if options.write:
        print(random_checkpoint(Path(options.write[1]), SHAPES[options.write[0]], options.stored))
        return
    shapes = ["135M"] if options.quick else options.shapes.split(",")
    rounds = 2 if options.quick else options.rounds
    cases = [(shape, "float32") for shape in shapes if shape != "1.5B"]
    cases += [(shape, "bfloat16") for shape in shapes if shape != "135M"]
    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.scratch or Path(temporary)
        results = [measure(shape, stored, rounds, scratch) for shape, stored in cases]
    save(page(results), results, options.output)


if __name__ == "__main__":
    main()
