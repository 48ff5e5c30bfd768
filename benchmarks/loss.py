"""The head and its loss: time and memory, beside softmax cross-entropy and the naive one-vs-rest.

    python benchmarks/loss.py [--rounds 5] [--step] [--growth] [--quick] [--check]

Forward and backward through the head only, at the Qwen2.5-0.5B shape (V = 151,936, H = 896; 1,024
tokens). Peers take turns in one process for the times, which are paired ratios; the peak memory of
every peer, above inputs, weights and their gradients, is measured in a process of its own. `--step`
adds a whole training step of a random 0.5B model, `--growth` a quarter of the tokens and
a quarter of the vocabulary. Our peers have the bar of the context, as conversion gives it. On
processors that emulate bfloat16 only float32 is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from _history import MACHINE_COLUMNS, Speeds, conclude, faster, time_beside_memory
from _random_checkpoint import QWEN_0_5B
from _results import (
    Row,
    call_in_new_process,
    log,
    make_parser,
    paired_ratio,
    parse,
    resident_bytes,
    table,
)
from torch.nn import functional as F

from causal_qwen.modeling.action import ActionHead, ActionNetwork
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.modeling.loss import causal_loss
from causal_qwen.modeling.one_vs_rest import has_bfloat16
from causal_qwen.modeling.thresholds import Decision

Shape = tuple[int, int, int]  # V, H, tokens
FULL: Shape = QWEN_0_5B["vocab_size"], QWEN_0_5B["hidden_size"], 1024
QUICK: Shape = 512, 32, 64
BASE, NAIVE = "cross-entropy", "naive one-vs-rest"
PEERS = (BASE, NAIVE, "ours", "ours, fast", "ours + cross-entropy", "ours, no bar")
SHORT = (BASE, "ours", "ours, fast")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PARTS = (*DTYPES, "step", "growth")
EMULATED = " This processor emulates bfloat16: only float32 is measured, and `fast` is exact."


class HeadAndLoss:
    """Random features, a head and labels; `run` does one forward and backward of a peer."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.vocabulary, size, tokens = shape
        self.config = CausalQwen2Config(
            vocab_size=self.vocabulary, hidden_size=size, threshold_context="competition"
        )
        self.head = ActionHead(size, self.vocabulary, bias=False).to(dtype)
        self.action, self.decision = ActionNetwork(self.config), Decision(self.config)
        with torch.no_grad():
            self.head.weight.normal_(0, 0.02)
            self.action.b_noise.fill_(self.config.initial_b_noise)
            self.action.decision_noise.uniform_(0, 2)
            self.action.value.weight.normal_()
            self.action.value.bias.zero_()
        self.loc = torch.randn(tokens, size).to(dtype).requires_grad_()
        self.scale = torch.full((tokens, size), self.config.initial_gamma).requires_grad_()
        self.labels = torch.randint(self.vocabulary, (tokens,))

    def clear_gradients(self) -> None:
        """Allocate gradients beforehand, so that they are not measured."""
        modules = (self.head, self.action, self.decision)
        for tensor in (self.loc, self.scale, *(p for m in modules for p in m.parameters())):
            tensor.grad = torch.zeros_like(tensor)

    def step(self, peer: str) -> None:
        self.clear_gradients()
        self.run(peer)

    def run(self, peer: str) -> None:
        has_bar = peer != NAIVE and "no bar" not in peer
        self.config.threshold_context = "competition" if has_bar else "none"
        with torch.no_grad():  # above all scores, as nearly all are after conversion
            self.decision.threshold.fill_(-2.0 if has_bar else 8.0)
        if peer == BASE:
            F.cross_entropy(self.head(self.loc).float(), self.labels).backward()
            return
        if peer == NAIVE:
            u = self.action.widen(Cauchy(self.loc, self.scale))
            s = Cauchy(self.head(u.loc).float(), self.action.score_scale(u.scale, self.head))
            log_no = s.log_cdf(self.decision.threshold)
            is_label = F.one_hot(self.labels, self.vocabulary).bool()
            terms = torch.where(is_label, s.log_sf(self.decision.threshold), log_no)
            (-terms.sum() / len(self.labels)).backward()
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


def peak_memory(peer: str, shape: Shape, dtype: str) -> float:
    """Megabytes that a peer adds to the resident memory at its peak."""
    subject = HeadAndLoss(shape, DTYPES[dtype])
    subject.clear_gradients()
    before = resident_bytes()
    subject.run(peer)
    return (resident_bytes(peak=True) - before) / 2**20


def training_step(shape: Shape) -> Callable[[str], None]:
    """A whole step of a random 0.5B model: cross-entropy on its logits, or its own loss."""
    from causal_qwen.model import CausalQwenForCausalLM

    torch.manual_seed(0)
    fields = {**QWEN_0_5B, "vocab_size": shape[0], "threshold_context": "competition"}
    if shape == QUICK:
        fields |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        fields |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = CausalQwenForCausalLM(CausalQwen2Config(**fields)).train()
    ids = torch.randint(shape[0], (2, shape[2] // 2))

    def run(peer: str) -> None:
        model.zero_grad(set_to_none=True)
        if peer == BASE:
            logits = model(ids, output_scale_S=False, use_cache=False).logits.float()
            F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            return
        model.config.loss_precision = "fast" if "fast" in peer else "exact"
        model(ids, labels=ids, skip_logits=True, use_cache=False).loss.backward()

    return run


def measure(
    what: str, run: Callable[[str], None], peers: Sequence[str], rounds: int, memory: Row
) -> list[Row]:
    """One row per peer; the naive peer takes a minute, so it runs once."""
    runs = {peer: partial(run, peer) for peer in peers}
    times, machine = time_beside_memory(runs, rounds, once=(NAIVE,))
    rows = []
    for peer, seconds in times.items():
        row: Row = {"what": what, "peer": peer, **machine, "rounds": len(seconds)}
        row["seconds"] = float(np.median(seconds))
        row |= zip(("ratio", "low", "high"), paired_ratio(seconds, times[BASE]), strict=True)
        row["megabytes"] = memory.get(peer)
        row["memory_ratio"] = memory[peer] / memory[BASE] if memory else None
        rows.append(row)
        log(row)
    return rows


def measure_head(
    what: str, shape: Shape, dtype: str, peers: Sequence[str], rounds: int
) -> list[Row]:
    memory = {peer: call_in_new_process(peak_memory, peer, shape, dtype) for peer in peers}
    return measure(what, HeadAndLoss(shape, DTYPES[dtype]).step, peers, rounds, memory)


def growth(shape: Shape) -> list[Shape]:
    """A quarter of the tokens, and a quarter of the vocabulary."""
    vocabulary, size, tokens = shape
    return [(vocabulary, size, tokens // 4), (vocabulary // 4, size, tokens)]


def speeds(row: Row) -> Speeds:
    return {row["peer"]: faster((row["ratio"], row["low"], row["high"]))}


def page(rows: list[Row], shape: Shape) -> list[str]:
    columns = {"what": "{what}", "peer": "{peer}", **MACHINE_COLUMNS, "rounds": "{rounds}"}
    columns["seconds"] = "{seconds:.2f}"
    columns |= {"ratio": "{ratio:.2f}", "95% interval": "{low:.2f} to {high:.2f}"}
    columns |= {"peak MB": "{megabytes:.0f}", "memory ratio": "{memory_ratio:.2f}"}
    return [
        "# The loss: time and memory",
        "",
        f"`python benchmarks/loss.py --step --growth`: V = {shape[0]:,}, H = {shape[1]}, "
        f"{shape[2]:,} tokens, forward and backward, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}. Ratios "
        "to softmax cross-entropy on full logits, median of paired rounds with a 95% "
        "bootstrap interval; memory is the peak above inputs, weights and "
        f"gradients.{'' if has_bfloat16(torch.device('cpu')) else EMULATED}",
        "",
        *table(columns, rows),
    ]


def main() -> None:
    parser = make_parser(__doc__, "loss", "a tiny shape, one round", rounds=5, has_check=True)
    parser.add_argument("--step", action="store_true", help="measure a whole training step, too")
    parser.add_argument("--growth", action="store_true", help="measure other shapes, too")
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", help="renew these rows, keep the others"
    )
    parser.add_argument("--peers", choices=PEERS, nargs="+", default=PEERS, help="of the head")
    options = parse(parser, rounds=1)
    shape = QUICK if options.quick else FULL
    asked = {*DTYPES, *(part for part in PARTS if getattr(options, part, False))}
    if not has_bfloat16(torch.device("cpu")):
        asked -= {"bfloat16"}
    rows: list[Row] = []
    for part in options.only or [part for part in PARTS if part in asked]:
        if part == "step":
            what, step = "0.5B training step, float32", training_step(shape)
            rows += measure(what, step, SHORT, min(options.rounds, 3), {})
        elif part == "growth":
            for other in growth(shape):
                what = f"head, float32, V = {other[0]:,}, {other[2]:,} tokens"
                rows += measure_head(what, other, "float32", SHORT, min(options.rounds, 2))
        else:
            rows += measure_head(f"head, {part}", shape, part, options.peers, options.rounds)
    write = partial(page, shape=shape)
    conclude(rows, options, write, ("what",), speeds, ("peer",))


if __name__ == "__main__":
    main()
