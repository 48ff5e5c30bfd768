"""Does it learn? One-vs-rest beside softmax training: same data, seeds, steps and size.

    python benchmarks/learning.py --data gsm8k/train.jsonl [--seeds 3] [--steps 400] [--jobs 2]

A small model from scratch (vocabulary 1,024, hidden size 96, 3 layers). Every objective gets its
best learning rate. Reported on held-out text: top-1 accuracy (of `standard` mode for the causal
objectives), its ratio to softmax training, the median of sum_k P_k, and the negative
log-likelihood of P over its sum beside that of the softmax model.

DATA is text: one JSON object per line (all its strings are used) or plain lines, e.g. GSM8K.
"""

from __future__ import annotations

import argparse
import json
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _results import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.training.run import COMPAT_WEIGHT

VOCABULARY, LENGTH, BATCH, WARMUP = 1024, 128, 16, 40
HELD_OUT = 256  # sequences
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
SOFTMAX = "softmax"
OBJECTIVES: dict[str, dict[str, Any]] = {
    SOFTMAX: {"classification_loss_weight": 0.0, "compat_loss_weight": 1.0},
    "one-vs-rest + softmax": {"compat_loss_weight": COMPAT_WEIGHT},
    "one-vs-rest alone": {},
}
RATES = (3e-3, 6e-3)


def read(path: Path) -> list[str]:
    texts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if path.suffix == ".jsonl":
            strings = [value for value in json.loads(line).values() if isinstance(value, str)]
            texts.append("\n".join(strings))
        else:
            texts.append(line)
    return texts


def prepare(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences to train on, and held-out ones. -> (N, T), (HELD_OUT, T)"""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    ids = [token for one in tokenizer.encode_batch(texts) for token in [*one.ids, 0]]
    rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    return rows[:-HELD_OUT], rows[-HELD_OUT:]


def train(
    fields: dict[str, Any], rows: torch.Tensor, seed: int, rate: float, steps: int
) -> CausalQwenForCausalLM:
    torch.manual_seed(seed)
    model = CausalQwenForCausalLM(CausalQwen2Config(**{**SIZE, **fields})).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / WARMUP, max(0.05, (steps - step) / max(steps - WARMUP, 1))),
    )
    order = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (BATCH,), generator=order)]
        loss = model(batch, labels=batch, output_scale_S=False, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def evaluate(model: CausalQwenForCausalLM, rows: torch.Tensor) -> dict[str, float]:
    output, labels = model(rows), rows[:, 1:]
    p = model.decision(output.s_dist)[:, :-1]
    chosen = model.decision.choose(output.s_dist)[:, :-1]
    log_p = model.decision.log_normalized(output.s_dist)[:, :-1]
    log_soft = output.logits[:, :-1].log_softmax(-1)
    return {
        "accuracy": float((chosen == labels).float().mean()),
        "softmax_accuracy": float((log_soft.argmax(-1) == labels).float().mean()),
        "sum_p": float(p.sum(-1).median()),
        "ovr_nll": float(-log_p.gather(-1, labels.unsqueeze(-1)).mean()),
        "softmax_nll": float(-log_soft.gather(-1, labels.unsqueeze(-1)).mean()),
    }


def run(job: tuple[str, float, int, int, Any]) -> dict[str, Any]:
    """One objective at one rate with one seed."""
    name, rate, seed, steps, (rows, held_out) = job
    torch.set_num_threads(1)
    start = time.perf_counter()
    scores = evaluate(train(OBJECTIVES[name], rows, seed, rate, steps), held_out)
    result = {"objective": name, "rate": rate, "seed": seed, **scores}
    print(json.dumps({**result, "seconds": round(time.perf_counter() - start)}), flush=True)
    return result


def summary(results: list[dict[str, Any]], steps: int, data: str) -> list[str]:
    """A row for every objective, at the rate that is best on average."""
    best: dict[str, list[dict[str, Any]]] = {}
    for name in dict.fromkeys(r["objective"] for r in results):
        key = "softmax_accuracy" if name == SOFTMAX else "accuracy"
        mine = [r for r in results if r["objective"] == name]
        by_rate = {r["rate"]: [x for x in mine if x["rate"] == r["rate"]] for r in mine}
        best[name] = max(by_rate.values(), key=lambda runs: np.mean([x[key] for x in runs]))
    teacher = best[SOFTMAX]
    rates = dict.fromkeys(r["rate"] for r in results)
    lines = [
        "# Does it learn?",
        "",
        f"`python benchmarks/learning.py --data {data}`: {steps} steps of {BATCH} x {LENGTH} "
        f"tokens from scratch, {len(teacher)} seeds, each objective at the best of the "
        f"learning rates {', '.join(map(str, rates))}. Accuracy is top-1 on held-out text, "
        "of `standard` mode except for softmax; the ratio is paired by seed (lowest to highest). "
        "NLL is that of P over its sum, and of softmax(loc_S).",
        "",
        "| objective | rate | accuracy | ratio to softmax | sum P | one-vs-rest NLL | its ratio "
        "| softmax NLL |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in best.items():
        mine = np.array([r["softmax_accuracy" if name == SOFTMAX else "accuracy"] for r in runs])
        ratio = mine / np.array([r["softmax_accuracy"] for r in teacher])
        nll = np.array([r["ovr_nll"] for r in runs])
        floor = np.array([r["softmax_nll"] for r in teacher])
        lines.append(
            f"| {name} | {runs[0]['rate']} | {mine.mean():.3f} | {ratio.mean():.3f} "
            f"({ratio.min():.3f} to {ratio.max():.3f}) | {np.mean([r['sum_p'] for r in runs]):.2f} "
            f"| {nll.mean():.2f} | {(nll / floor).mean():.3f} "
            f"| {np.mean([r['softmax_nll'] for r in runs]):.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--output", type=Path, default=Path("docs/results/learning.md"))
    options = parser.parse_args()
    data = prepare(read(options.data))
    jobs = [
        (name, rate, seed, options.steps, data)
        for seed in range(options.seeds)
        for rate in options.rates
        for name in OBJECTIVES
    ]
    with get_context("spawn").Pool(options.jobs) as pool:
        results = pool.map(run, jobs, chunksize=1)
    lines = summary(results, options.steps, "/".join(options.data.parts[-2:]))
    save(lines, results, options.output)


if __name__ == "__main__":
    main()
