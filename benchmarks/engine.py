"""The NumPy engine beside Hugging Face's generate in torch, and beside the memory's own speed.

    python benchmarks/engine.py [--quick] [--shapes 135M,0.5B,1.5B] [--rounds 9]
    python benchmarks/engine.py --shapes 0.5B --types bfloat16     # renews these rows of the page
    python benchmarks/engine.py --check --shapes 135M              # ratios beside those of the page
    python benchmarks/engine.py --write 1.5B DIRECTORY    # a random checkpoint, for `verify`

Decoding reads every weight once per token: the limit is the time to read that many bytes from
memory. Machines are noisy, so peers take turns: each round runs every peer once, and reads once, in
rotating order; ratios are medians of paired rounds with a bootstrap interval. Peak memory is
measured in a process of its own. 16-bit checkpoints are also run in int8, and both by numba, where
it is installed.
"""

from __future__ import annotations

import gc
import importlib.util
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from _history import (
    BLOCK,
    MACHINE,
    MACHINE_COLUMNS,
    Speeds,
    conclude,
    cpu,
    faster,
    machine,
    memory_reader,
)
from _random_checkpoint import QWEN_0_5B, QWEN_1_5B, random_checkpoint
from _results import (
    Row,
    call_in_new_process,
    load,
    log,
    make_parser,
    paired_ratio,
    parse,
    resident_bytes,
    span,
    table,
    time_peers,
)

from causal_qwen.numpy_engine import Engine, KeyValueCache
from causal_qwen.numpy_engine.fast import THREADS, run
from causal_qwen.numpy_engine.quantization import quantize

SHAPES = {"0.5B": QWEN_0_5B, "1.5B": QWEN_1_5B}
PROMPT, NEW, PREFILL = 8, 16, 512  # tokens: of a decoding round, and of a prefill
PASSAGE = (
    "The lighthouse at Cape Wren was built in 1871, after a winter in which eleven fishing boats "
    "were lost on the reef. Its keeper, Thomas Hale, kept a diary for thirty years. Every evening "
    "he wrote down the weather, the ships that passed, and the number of birds that struck the "
    "glass. When the lamp was changed from oil to electricity in 1912, the number of birds doubled "
    "within a year. Hale wrote to the Board of Trade and asked for a red filter, which he had read "
    "about in a Danish newspaper. The filter arrived two years later, and the number fell to a "
    "tenth. His diary is now in the county museum, and ornithologists still use its figures."
)
CASE = ("shape", "stored")
PARTS = ("decode", "prefill", "context", "alone")
CONTEXTS = (128, 1024, 4096, 8000)
DECODE, SHARE, PREFILL_TIME = (
    " decode, times torch",
    ", share of the limit",
    " prefill, time of torch's",
)
MEMORY = ", peak RSS of bfloat16's"
GROWTH = f", time of a token after {CONTEXTS[-1]:,} over {CONTEXTS[0]}"
BARS = {
    "135M float32": {
        DECODE: ("at least", 1.8),
        PREFILL_TIME: ("at most", 1.2),
        GROWTH: ("at most", 1.6),
    },
    "0.5B float32": {
        DECODE: ("at least", 2.5),
        SHARE: ("at least", 0.75),
        PREFILL_TIME: ("at most", 1.2),
    },
    "0.5B bfloat16": {
        DECODE: ("at least", 0.9),
        PREFILL_TIME: ("at most", 1.2),
    },
    "0.5B bfloat16 numba": {DECODE: ("at least", 0.9)},
    "0.5B int8": {DECODE: ("at least", 1.6), MEMORY: ("at most", 0.55)},
    "0.5B int8 numba": {DECODE: ("at least", 1.6)},
    "1.5B bfloat16": {
        ", tokens/s": ("at least", 2),
        ", peak RSS in GB": ("at most", 4.5),
        PREFILL_TIME: ("at most", 1.2),
    },
    "1.5B int8": {DECODE: ("at least", 1.7), MEMORY: ("at most", 0.55)},
    "1.5B int8 numba": {DECODE: ("at least", 1.7)},
}
Timer = Callable[[], float]


# ---------------------------------------------------------------- peers


class NumPyPeer:
    """The NumPy engine; weights are cast to `dtype` if one is given."""

    def __init__(self, path: Path, dtype: str | None = None, kernel: str = "numpy") -> None:
        self.engine = Engine.from_pretrained(path, dtype=dtype, kernel=kernel)
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

    def readers(self, contexts: list[int]) -> dict[str, Timer]:
        """Seconds of one more token after so many."""
        model, rng = self.engine.model, np.random.default_rng(0)
        cache = KeyValueCache(model.config, 1, max(contexts) + 1)
        ids = rng.integers(*id_range(self.vocabulary), (1, max(contexts)))
        model.forward(model.embed(ids), cache)

        def read(context: int) -> float:
            times = []
            for _ in range(4):
                cache.length = context  # what follows is overwritten
                start = time.perf_counter()
                model.logits(model.forward(model.embed(ids[:, :1]), cache)[:, -1])
                times.append(time.perf_counter() - start)
            return float(np.median(times))

        return {f"at {context}": partial(read, context) for context in contexts}


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
    kind, dtype, *kernel = name.split()
    start = time.perf_counter()
    peer = NumPyPeer(path, None, *kernel) if kind == "NumPy" else TorchPeer(path, dtype)
    loaded = time.perf_counter()
    peer.generate(1)
    found = {"load_s": loaded - start, "first_s": time.perf_counter() - loaded}
    peer.generate(NEW)
    return found | {"peak_rss_gb": resident_bytes(peak=True) / 1e9}


# ---------------------------------------------------------------- measuring


class Peers:
    """All peers of one shape, its weights stored in one dtype."""

    def __init__(self, shape: str, stored: str, path: Path) -> None:
        self.ours, self.torch_name = f"NumPy {stored}", f"torch {stored}"
        self.numpy, self.torch = NumPyPeer(path), TorchPeer(path, stored)
        small = small_peers(path, stored)
        self.engines = {self.ours: self.numpy} | {name: peer for name, (_, peer) in small.items()}
        self.places = {self.ours: path, self.torch_name: path}
        self.places |= {name: place for name, (place, _) in small.items()}

    def decode(self, rounds: int) -> Row:
        """Time per token, beside torch and beside the memory's own speed."""
        timers = {name: token_timer(peer) for name, peer in self.engines.items()}
        timers[self.torch_name] = token_timer(self.torch)
        sizes = {name: peer.weight_bytes() for name, peer in self.engines.items()}
        weights = sizes[self.ours]
        times = time_peers(timers | {"memory": memory_reader()}, rounds)
        limit = np.array(times.pop("memory")) * weights / BLOCK
        found = machine(weights / float(np.median(limit)) / 1e9)
        found |= {"weights_gb": weights / 1e9, "decode": {}}
        for name, seconds in times.items():
            own = limit * sizes.get(name, weights) / weights
            found["decode"][name] = {
                "tokens_per_s": 1 / float(np.median(seconds)),
                "times_torch": paired_ratio(times[self.torch_name], seconds),
                "share_of_limit": paired_ratio(own, seconds),
            }
        return found

    def prefill(self, rounds: int) -> Row:
        """Time of a prompt, beside torch and beside bare products of float32 matrices."""
        prefills = {
            name: peer.prefill for name, peer in self.engines.items() if "numba" not in name
        }
        prefills |= {self.torch_name: self.torch.prefill}
        layers = [p for p in self.numpy.engine.parameters.items() if ".layers." in p[0]]
        size = PREFILL * sum(weight.size for _, weight in layers)
        times = time_peers(prefills | {"limit": product_timer(size)}, rounds)
        limit = times.pop("limit")
        return {
            name: {
                "tokens_per_s": PREFILL / float(np.median(seconds)),
                "time_of_torch": paired_ratio(seconds, times[self.torch_name]),
                "share_of_products": paired_ratio(limit, seconds),
            }
            for name, seconds in times.items()
        }

    def contexts(self, contexts: list[int], rounds: int) -> Row:
        """Milliseconds of one more token after so many, and beside the fewest."""
        times = time_peers(self.numpy.readers(contexts), rounds)
        fewest = times[f"at {contexts[0]}"]
        return {
            "context_ms": {at: 1e3 * float(np.median(seconds)) for at, seconds in times.items()},
            "growth": {at: paired_ratio(seconds, fewest) for at, seconds in times.items()},
        }


def product_timer(multiplications: int) -> Timer:
    """Seconds in which all threads together do so many multiplications, as products of float32
    matrices that stay in cache."""
    x, weight = np.ones((PREFILL, 1024), np.float32), np.ones((1024, 1024), np.float32)
    outs = [np.empty((PREFILL, 1024), np.float32) for _ in range(THREADS)]

    def multiply() -> float:
        start = time.perf_counter()
        for _ in range(8):
            run([partial(np.matmul, x, weight.T, out=out) for out in outs])
        return (time.perf_counter() - start) / (8 * len(outs) * x.size * 1024)

    return lambda: min(multiply() for _ in range(3)) * multiplications


def measure(shape: str, stored: str, rounds: int, path: Path, parts: Sequence[str]) -> Row:
    """The parts of one shape, its weights stored in one dtype."""
    peers = Peers(shape, stored, path)
    result: Row = {"shape": shape, "stored": stored, "cpu": cpu()}
    if "decode" in parts:
        result |= peers.decode(rounds)
    if "prefill" in parts:
        result["prefill"] = peers.prefill(max(rounds // 2, 1))
    if "context" in parts:
        longest = peers.numpy.engine.model.config.max_position_embeddings - 16
        longest = longest if rounds > 2 else 128
        result |= peers.contexts([c for c in CONTEXTS if c <= longest], rounds)
    places = peers.places
    del peers
    gc.collect()
    if "alone" in parts:
        result["alone"] = {
            name: call_in_new_process(run_alone, name, place) for name, place in places.items()
        }
    log(result)
    return result


def small_peers(path: Path, stored: str) -> dict[str, tuple[Path, NumPyPeer]]:
    """A 16-bit checkpoint in int8 and by compiled loops: name -> its directory, its peer."""
    if stored == "float32":
        return {}
    place = path.with_name(f"{path.name}-int8")
    if not place.exists():
        quantize(path, place)
    peers = {"NumPy int8": (place, NumPyPeer(place))}
    if importlib.util.find_spec("numba"):
        peers["NumPy int8 numba"] = (place, NumPyPeer(place, kernel="numba"))
        peers[f"NumPy {stored} numba"] = (path, NumPyPeer(path, kernel="numba"))
    return peers


def checkpoint(shape: str, stored: str, scratch: Path, model: Path | None) -> Path:
    if shape == "135M":
        from causal_qwen.conversion.convert import default_model

        return model or default_model()
    path = scratch / f"{shape}-{stored}"
    if not path.exists():
        random_checkpoint(path, SHAPES[shape], stored)
    return path


# ---------------------------------------------------------------- the page


case_of = itemgetter(*CASE, "cpu")


def bars(results: list[Row]) -> list[Row]:
    rows = []
    for row in results:
        plain = row["stored"]
        for peer in [name for name in row["decode"] if name.startswith("NumPy")]:
            kind = f"{row['shape']} {peer.removeprefix('NumPy ')}"
            figures = figures_of(row, peer, f"NumPy {plain}")
            for what, (limit, bar) in BARS.get(kind, {}).items():
                if what not in figures:
                    continue
                is_met = figures[what] >= bar if limit == "at least" else figures[what] <= bar
                rows.append({"bar": kind + what, "cpu": row["cpu"], "figure": figures[what]})
                rows[-1] |= {"asked": f"{limit} {bar:g}", "met": "yes" if is_met else "no"}
    return rows


def figures_of(row: Row, peer: str, plain: str) -> dict[str, float]:
    """What a bar may be about, for one peer; `plain` has the weights as stored."""
    decode, alone = row["decode"][peer], row.get("alone", {}).get(peer)
    figures = {
        DECODE: decode["times_torch"][0],
        SHARE: decode["share_of_limit"][0],
        ", tokens/s": decode["tokens_per_s"],
    }
    if peer in row.get("prefill", {}):
        figures[PREFILL_TIME] = row["prefill"][peer]["time_of_torch"][0]
    if peer == plain and (longest := f"at {CONTEXTS[-1]}") in row.get("growth", {}):
        figures[GROWTH] = row["growth"][longest][0]
    if alone is not None:
        figures[", peak RSS in GB"] = alone["peak_rss_gb"]
        figures[MEMORY] = alone["peak_rss_gb"] / row["alone"][plain]["peak_rss_gb"]
    return figures


def page(results: list[Row]) -> list[str]:
    memory = sorted(row["bandwidth_gb_s"] for row in results)
    shape = {"shape": "{shape}", "stored": "{stored}"} | MACHINE_COLUMNS
    columns = shape | {
        "peer": "{peer}",
        "decode tokens/s": "{decode[tokens_per_s]:.1f}",
        "times torch": span("decode[times_torch]"),
        "share of the memory's limit": span("decode[share_of_limit]", 0, "%"),
        "prefill tokens/s": "{prefill[tokens_per_s]:.0f}",
        "its time / torch's": span("prefill[time_of_torch]"),
        "share of the products' limit": span("prefill[share_of_products]", 0, "%"),
        "load s": "{alone[load_s]:.2f}",
        "first token s": "{alone[first_s]:.2f}",
        "peak RSS GB": "{alone[peak_rss_gb]:.2f}",
    }
    peers = [
        {
            **{key: row[key] for key in (*CASE, *MACHINE) if key in row},
            "peer": name,
            **{key: row.get(key, {}).get(name) for key in ("decode", "prefill", "alone")},
        }
        for row in results
        for name in row["decode"]
    ]
    growth = shape | {str(context): f"{{context_ms[at {context}]:.0f}}" for context in CONTEXTS}
    growth[f"{CONTEXTS[-1]} / {CONTEXTS[0]}"] = span(f"growth[at {CONTEXTS[-1]}]")
    bar_columns = {"bar": "{bar}", "processor": "{cpu}", "figure": "{figure:.2f}"}
    bar_columns |= {"asked": "{asked}", "met": "{met}"}
    return [
        "# The NumPy engine: speed and memory",
        "",
        f"`python benchmarks/engine.py`: {THREADS} threads, {platform.machine()}, NumPy "
        f"{np.__version__}; read bandwidth {memory[0]:.1f} to {memory[-1]:.1f} GB/s, measured in "
        f"every round. Decoding: {PROMPT} prompt tokens, {NEW} new ones; prefill: {PREFILL} "
        "tokens; load, first token, memory: in a process of its own. Ratios are medians of paired "
        "rounds with 95% intervals; the limit of a prompt is the time of its layers' products as "
        "bare float32 products of matrices in cache. Processors are told apart by the instructions "
        "that torch uses on them; every figure is of the code of its day.",
        "",
        *table(columns, peers),
        "",
        "Milliseconds per token as the context grows:",
        "",
        *table(growth, results),
        "",
        *table(bar_columns, bars(results)),
    ]


def speeds(row: Row) -> Speeds:
    """Every ratio to torch, and the cost of a long context."""
    decoded = row.get("decode", {}).items()
    found = {f"{name}, decode": peer["times_torch"] for name, peer in decoded}
    for name, peer in row.get("prefill", {}).items():
        found[f"{name}, prefill"] = faster(peer["time_of_torch"])
    found |= {f"context {at}": faster(ratio) for at, ratio in row.get("growth", {}).items()}
    return {name: ratio for name, ratio in found.items() if not name.startswith("torch")}


def main() -> None:
    parser = make_parser(__doc__, "engine", "the 135M model, two rounds", rounds=9, has_check=True)
    parser.add_argument("--shapes", default="135M,0.5B,1.5B")
    parser.add_argument("--types", default="float32,bfloat16", help="stored types to run")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure; decode first")
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
    shapes, types = options.shapes.split(","), options.types.split(",")
    cases = [(shape, "float32") for shape in shapes if shape != "1.5B"]
    cases += [(shape, "bfloat16") for shape in shapes if shape != "135M"]
    cases = [case for case in cases if case[1] in types]
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for shape, stored in cases:
            path = checkpoint(shape, stored, options.scratch or Path(temporary), options.model)
            results.append(measure(shape, stored, options.rounds, path, options.parts.split(",")))
    if not options.check:  # other parts are added to the last decoding
        before = {case_of(row): row for row in load(options.output, [])}
        results = [
            row if "decode" in row else before.get(case_of(row), {}) | row for row in results
        ]
    conclude(results, options, page, CASE, speeds)


if __name__ == "__main__":
    main()
