"""The head and its loss: time and memory, beside softmax cross-entropy and the naive one-vs-rest.

    python benchmarks/loss.py [--rounds 5] [--step] [--output docs/results/loss.md]

Forward and backward through the head only, at the Qwen2.5-0.5B shape (V = 151,936, H = 896; 1,024
tokens). Peers take turns in one process for the times, which are paired ratios; every peer's peak
memory, above inputs, weights and their gradients, is measured in a process of its own. `--step`
adds a whole training step of a random 0.5B model.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _results import paired_ratio, resident_bytes, save
from torch.nn import functional as F

from causal_qwen.engine.random_checkpoint import QWEN_0_5B
from causal_qwen.modeling.action import ActionHead, ActionNetwork
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.modeling.loss import causal_loss
from causal_qwen.modeling.thresholds import Decision

V, H, TOKENS = QWEN_0_5B["vocab_size"], QWEN_0_5B["hidden_size"], 1024
PEERS = ("cross-entropy", "naive one-vs-rest", "ours", "ours, fast", "ours + cross-entropy")
NAIVE = "naive one-vs-rest"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Subject:
    """Random features, a head, labels; `run` does one forward and backward of a peer."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.config = CausalQwen2Config(vocab_size=V, hidden_size=H, ovr_threshold_init=8.0)
        self.head = ActionHead(H, V, bias=False).to(dtype)
        self.action, self.decision = ActionNetwork(self.config), Decision(self.config)
        with torch.no_grad():
            self.head.weight.normal_(0, 0.02)
            self.action.b_noise.fill_(self.config.initial_b_noise)
            self.action.decision_noise.uniform_(0, 2)
            self.action.value.weight.normal_()
            self.action.value.bias.zero_()
            self.decision.threshold.fill_(8.0)
        self.loc = torch.randn(TOKENS, H).to(dtype).requires_grad_()
        self.scale = torch.full((TOKENS, H), self.config.initial_gamma).requires_grad_()
        self.labels = torch.randint(V, (TOKENS,))

    def clear(self) -> None:
        """Gradients exist beforehand: they are not what is measured."""
        parts = (self.head, self.action, self.decision)
        for tensor in (self.loc, self.scale, *(p for m in parts for p in m.parameters())):
            tensor.grad = torch.zeros_like(tensor)

    def run(self, peer: str) -> None:
        if peer == "cross-entropy":
            F.cross_entropy(self.head(self.loc).float(), self.labels).backward()
            return
        if peer == NAIVE:
            u = self.action.widen(Cauchy(self.loc, self.scale))
            s = Cauchy(self.head(u.loc).float(), self.action.score_scale(u.scale, self.head))
            log_no = s.log_cdf(self.decision.threshold)
            is_label = F.one_hot(self.labels, V).bool()
            terms = torch.where(is_label, s.log_sf(self.decision.threshold), log_no)
            (-terms.sum() / TOKENS).backward()
            return
        self.config.loss_precision = "fast" if "fast" in peer else "exact"
        self.config.compat_loss_weight = 1.0 if "+" in peer else 0.0
        causal_loss(
            Cauchy(self.loc.unsqueeze(0), self.scale.unsqueeze(0)),
            self.labels.unsqueeze(0),
            action=self.action,
            head=self.head,
            decision=self.decision,
            config=self.config,
        ).total.backward()


def peak_memory(peer: str, dtype: str, queue: Any) -> None:
    """Resident bytes that a peer adds to what was there before it, at its worst."""
    subject = Subject(DTYPES[dtype])
    subject.clear()
    before = resident_bytes()
    subject.run(peer)
    queue.put((resident_bytes(peak=True) - before) / 2**20)


def measure_memory(peer: str, dtype: str) -> float:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=peak_memory, args=(peer, dtype, queue))
    process.start()
    megabytes: float = queue.get()
    process.join()
    return megabytes


def measure_times(
    run: Callable[[str], None], peers: tuple[str, ...], rounds: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {peer: [] for peer in peers}
    for peer in peers:
        if peer != NAIVE:
            run(peer)  # warm
    for turn in range(rounds):
        for peer in peers[turn % len(peers) :] + peers[: turn % len(peers)]:
            if peer == NAIVE and turn:
                continue  # a minute each
            gc.collect()
            start = time.perf_counter()
            run(peer)
            times[peer].append(time.perf_counter() - start)
    return times


def ratios(times: dict[str, list[float]], peer: str) -> tuple[float, float, float]:
    """Median paired ratio to cross-entropy, with its 95% bootstrap interval."""
    return paired_ratio(times[peer], times["cross-entropy"][: len(times[peer])])


def training_step() -> Callable[[str], None]:
    """A whole step of a random 0.5B model: cross-entropy on its logits, or its own loss."""
    from causal_qwen.model import CausalQwenForCausalLM

    torch.manual_seed(0)
    model = CausalQwenForCausalLM(CausalQwen2Config(**QWEN_0_5B)).train()
    ids = torch.randint(V, (2, TOKENS // 2))

    def run(peer: str) -> None:
        model.zero_grad(set_to_none=True)
        if peer == "cross-entropy":
            logits = model(ids, output_scale_S=False, use_cache=False).logits.float()
            F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            return
        model.config.loss_precision = "fast" if "fast" in peer else "exact"
        model(ids, labels=ids, skip_logits=True, use_cache=False).loss.backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step", action="store_true", help="a whole training step, too")
    parser.add_argument(
        "--only", choices=[*DTYPES, "step"], nargs="+", help="renew these rows, keep the others"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/results/loss.md"))
    options = parser.parse_args()
    results: list[dict[str, Any]] = []

    def record(what: str, times: dict[str, list[float]], memory: dict[str, float]) -> None:
        for peer in times:
            ratio, low, high = ratios(times, peer)
            results.append(
                {
                    "what": what,
                    "peer": peer,
                    "seconds": float(np.median(times[peer])),
                    "ratio": ratio,
                    "low": low,
                    "high": high,
                    "megabytes": memory.get(peer),
                    "memory_ratio": memory[peer] / memory["cross-entropy"] if memory else None,
                }
            )
            print(json.dumps(results[-1]), flush=True)

    wanted = options.only or [*DTYPES, *(["step"] if options.step else [])]
    for name, dtype in DTYPES.items():
        if name not in wanted:
            continue
        memory = {peer: measure_memory(peer, name) for peer in PEERS}
        subject = Subject(dtype)

        def run(peer: str, subject: Subject = subject) -> None:
            subject.clear()
            subject.run(peer)

        record(f"head, {name}", measure_times(run, PEERS, options.rounds), memory)
        del subject, run
    if "step" in wanted:
        peers = ("cross-entropy", "ours", "ours, fast")
        record("0.5B training step, float32", measure_times(training_step(), peers, 3), {})
    if options.only:
        old = json.loads(options.output.with_suffix(".json").read_text(encoding="utf-8"))
        renewed = {row["what"] for row in results}
        results = [*(row for row in old if row["what"] not in renewed), *results]
    write(results, options)


def write(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    lines = [
        "# The loss: time and memory",
        "",
        f"`python benchmarks/loss.py --step`: V = {V:,}, H = {H}, {TOKENS:,} tokens, forward and "
        f"backward, {options.rounds} rounds, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}. Ratios to softmax cross-entropy on full logits, median of paired "
        "rounds with a 95% bootstrap interval; memory is the peak above inputs, weights and "
        "gradients.",
        "",
        "| what | peer | seconds | ratio | 95% interval | peak MB | memory ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['what']} | {r['peer']} | {r['seconds']:.2f} | {r['ratio']:.2f} "
        f"| {r['low']:.2f} to {r['high']:.2f} "
        + (
            f"| {r['megabytes']:.0f} | {r['memory_ratio']:.2f} |"
            if r["megabytes"] is not None
            else "| | |"
        )
        for r in results
    ]
    save(lines, results, options.output)


if __name__ == "__main__":
    main()
