"""Does it learn? One-vs-rest beside softmax training: same data, seeds, steps and size.

    python benchmarks/learning.py --data gsm8k/train.jsonl [--seeds 3] [--steps 400] [--jobs 2]

A small model from scratch (vocabulary 1,024, hidden size 96, 3 layers). Every objective gets its
best learning rate. Reported on held-out text: top-1 accuracy (of `standard` mode for the causal
objectives), its ratio to softmax training, the median of sum_k P_k, and the negative
log-likelihood of P over its sum beside that of the softmax model. Finished runs are kept beside the
page until all are there: the same command continues after an interruption. `--only` runs some
objectives, and adds them to the page of the last run.

DATA is text: one JSON object per line (all its strings are used) or plain lines, e.g. GSM8K.
"""

from __future__ import annotations

import hashlib
import json
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _results import Row, log, make_parser, parse, renew, save, span, table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.training.run import COMPAT_WEIGHT

VOCABULARY, LENGTH, BATCH, WARMUP = 1024, 128, 16, 40
HELD_OUT = 256  # sequences, at most half of all
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
BAR = {"threshold_context": "competition"}  # thresholds over the level of the scores
OBJECTIVES: dict[str, dict[str, Any]] = {
    SOFTMAX: {"classification_loss_weight": 0.0, "compat_loss_weight": 1.0},
    "one-vs-rest + softmax": {"compat_loss_weight": COMPAT_WEIGHT},
    "one-vs-rest alone": {},
    "one-vs-rest + softmax, bar": {"compat_loss_weight": COMPAT_WEIGHT, **BAR},
    "one-vs-rest alone, bar": BAR,
}


def read_texts(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix != ".jsonl":
        return lines
    rows = (json.loads(line).values() for line in lines)
    return ["\n".join(value for value in row if isinstance(value, str)) for row in rows]


def tokenize(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences to train on, and held-out ones. -> (N, T), (HELD_OUT, T)"""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    ids = [token for text in tokenizer.encode_batch(texts) for token in [*text.ids, 0]]
    rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    held_out = min(HELD_OUT, len(rows) // 2)
    return rows[:-held_out], rows[-held_out:]


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


Job = tuple[str, float, int, int]  # objective, rate, seed, steps


def run(job: Job, rows: torch.Tensor, held_out: torch.Tensor) -> Row:
    """One objective at one rate with one seed."""
    name, rate, seed, steps = job
    torch.set_num_threads(1)
    start = time.perf_counter()
    scores = evaluate(train(OBJECTIVES[name], rows, seed, rate, steps), held_out)
    result = {"objective": name, "rate": rate, "seed": seed, "steps": steps, **scores}
    log({**result, "seconds": round(time.perf_counter() - start)})
    return result


def run_all(
    jobs: list[Job], data: tuple[torch.Tensor, torch.Tensor], processes: int, kept: Path
) -> list[Row]:
    """The results of all jobs in their order; those in `kept` are not run again."""
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.is_file() else []
    rows = {_job(row): row for row in map(json.loads, lines)}
    missing = [job for job in jobs if job not in rows]
    kept.parent.mkdir(parents=True, exist_ok=True)
    run_one = partial(run, rows=data[0], held_out=data[1])
    with get_context("spawn").Pool(processes) as pool, kept.open("a", encoding="utf-8") as file:
        for row in pool.imap_unordered(run_one, missing):
            rows[_job(row)] = row
            print(json.dumps(row), file=file, flush=True)
    return [rows[job] for job in jobs]


def _job(row: Row) -> Job:
    return row["objective"], row["rate"], row["seed"], row["steps"]


def at_best_rate(results: list[Row], objective: str) -> dict[str, np.ndarray]:
    """Every figure by seed, at the rate whose mean accuracy is best; `top_1` is that accuracy."""
    key = "softmax_accuracy" if objective == SOFTMAX else "accuracy"
    by_rate: dict[float, list[Row]] = {}
    for row in results:
        if row["objective"] == objective:
            by_rate.setdefault(row["rate"], []).append({**row, "top_1": row[key]})
    runs = max(by_rate.values(), key=lambda rows: np.mean([row["top_1"] for row in rows]))
    return {name: np.array([row[name] for row in runs]) for name in runs[0]}


def page(results: list[Row], steps: int, data: str) -> list[str]:
    """A row for every objective, at the rate that is best on average."""
    softmax = at_best_rate(results, SOFTMAX)
    rows = {}
    for name in dict.fromkeys(row["objective"] for row in results):
        mine = at_best_rate(results, name)
        is_paired = np.isin(softmax["seed"], mine["seed"])
        ratio = mine["top_1"] / softmax["top_1"][is_paired]
        rows[name] = {key: values.mean() for key, values in mine.items() if key != "objective"} | {
            "rate": mine["rate"][0],
            "ratio": [ratio.mean(), ratio.min(), ratio.max()],
            "nll_ratio": (mine["ovr_nll"] / softmax["softmax_nll"][is_paired]).mean(),
            "seeds": len(mine["seed"]),
        }
    columns = {"objective": "{name}", "rate": "{rate}", "seeds": "{seeds}"}
    columns |= {"accuracy": "{top_1:.3f}"}
    columns |= {"ratio to softmax": span("ratio", 3), "sum P": "{sum_p:.2f}"}
    columns |= {"one-vs-rest NLL": "{ovr_nll:.2f}", "its ratio": "{nll_ratio:.3f}"}
    rates = ", ".join(dict.fromkeys(str(row["rate"]) for row in results))
    return [
        "# Does it learn?",
        "",
        f"`python benchmarks/learning.py --data {data}`: {steps} steps of {BATCH} x {LENGTH} "
        f"tokens from scratch, each objective at the best of its learning rates ({rates}). "
        "Accuracy is top-1 on held-out text, "
        "of `standard` mode except for softmax; the ratio is paired by seed (lowest to highest). "
        "NLL is that of P over its sum, and of softmax(loc_S).",
        "",
        *table({**columns, "softmax NLL": "{softmax_nll:.2f}"}, rows),
    ]


def main() -> None:
    parser = make_parser(__doc__, "learning", "one seed, one rate, two steps: does it run")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 6e-3])
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--only", nargs="+", choices=OBJECTIVES, help="these objectives")
    options = parse(parser, seeds=1, steps=2, rates=[3e-3])
    data = tokenize(read_texts(options.data))
    jobs = [
        (name, rate, seed, options.steps)
        for seed in range(options.seeds)
        for rate in options.rates
        for name in options.only or OBJECTIVES
    ]
    digest = hashlib.sha256(options.data.read_bytes()).hexdigest()[
        :8
    ]  # runs on other data are not taken for these
    unfinished = options.output.with_suffix(f".{digest}.unfinished.jsonl")
    results = run_all(jobs, data, options.jobs, unfinished)
    if options.only:
        results = renew(results, options.output, "objective", "rate", "seed", "steps")
    lines = page(results, options.steps, "/".join(options.data.parts[-2:]))
    save(lines, results, options.output)
    unfinished.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
