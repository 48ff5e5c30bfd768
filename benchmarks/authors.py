"""Do individuals learn authors? Held-out texts under the own, another's and no individual.

    python benchmarks/authors.py --data DIRECTORY [--from-scratch tiny] [--steps 300]

DIRECTORY has a folder per author with a text file per work (at least two), e.g. speeches. The last
fifth of an author's works, by name, is held out. Three runs on the same rows in the same order:
with an individual per author (`causal-qwen train --individual-column author`), with one individual
that all authors share, which tells what a constant vector is worth, and without any. Reported on
pieces of the held-out works: the negative log-likelihood per token of softmax(loc_S), its
difference to the author's own individual with a 95% bootstrap interval over works, and how often
the own individual is the likeliest of all.
"""

from __future__ import annotations

import json
import random
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _results import Row, log, make_parser, parse, save, span, table
from torch import Tensor, nn

from causal_qwen.conversion.checkpoint_io import load_tokenizer
from causal_qwen.conversion.convert import default_model
from causal_qwen.conversion.opening import open_model
from causal_qwen.decoding.noise import UNoise
from causal_qwen.individuals import Individual
from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.modeling.loss import IGNORE, shift_left
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.modeling.protocols import CausalModel
from causal_qwen.paths import EMBEDDED
from causal_qwen.training.authors import saved_files
from causal_qwen.training.data import Collator, Example, encode_rows
from causal_qwen.training.run import Run, train

WORDS = 96  # of a piece: some 128 tokens
SIZES = {"tiny": (96, 3), "small": (256, 6)}  # of a new model: hidden size, layers
VOCABULARY, HEAD_SIZE = 4096, 32
EVERYONE = "everyone"  # the one individual that all authors share, and its column
HELD_OUT = 5  # one work in so many, at least one
REPLICATES = 2000
ELEMENTS = 2**24  # most scores in memory at once


def read_pieces(directory: Path, most: int, held_out: int) -> tuple[list[Row], list[Row]]:
    """Pieces to learn, shuffled, and held-out pieces: as many of every author, up to so many."""
    learn, test = [], []
    for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
        works = sorted(folder.glob("*.txt"))
        if len(works) < 2:
            raise ValueError(f"{folder} has {len(works)} works; at least two are needed.")
        kept = max(len(works) // HELD_OUT, 1)
        for some, rows, count in ((works[:-kept], learn, most), (works[-kept:], test, held_out)):
            pieces = [
                {
                    "text": piece,
                    "author": folder.name,
                    EVERYONE: EVERYONE,
                    "work": f"{folder.name}/{work.stem}",
                }
                for work in some
                for piece in cut(work.read_text(encoding="utf-8", errors="replace"))
            ]
            random.Random(0).shuffle(pieces)
            rows += pieces[:count]
    random.Random(0).shuffle(learn)
    return learn, test


def cut(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[at : at + WORDS]) for at in range(0, len(words) - WORDS + 1, WORDS)]


def run(options: Namespace, learn: list[Row], test: list[Row], place: Path, column: str) -> Path:
    """Train with individuals of a column, or without ("")."""
    for name, rows in (("learn", learn), ("test", test[:: max(len(test) // 16, 1)])):
        lines = "\n".join(json.dumps(row) for row in rows)
        (place / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    model = options.model or str(default_model(log))
    if options.from_scratch:
        model = str(new_model([row["text"] for row in learn], options, place / "new"))
    output = place / (column or "nobody")
    arguments = {
        "max_steps": options.steps,
        "learning_rate": options.rate,
        "per_device_train_batch_size": options.batch,
        "per_device_eval_batch_size": 4,
        "eval_strategy": "no",
        "eval_on_start": False,
        "save_strategy": "no",
        "logging_steps": max(options.steps // 10, 1),
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "report_to": "none",
        "individual_learning_rate": options.individual_rate,
        "train": options.train,
        "seed": 0,
    }
    train(
        Run(
            model,
            str(place / "learn.jsonl"),
            str(output),
            eval_data=str(place / "test.jsonl"),
            max_length=options.length,
            lora=options.lora,
            individual_column=column or None,
            arguments=arguments,
        )
    )
    return output


def new_model(texts: list[str], options: Namespace, directory: Path) -> Path:
    """A small, untrained model with a tokenizer of its own."""
    tokenizer = load_tokenizer(EMBEDDED).train_new_from_iterator(texts, VOCABULARY)
    processor = CausalQwenProcessor(tokenizer)
    hidden, layers = SIZES[options.from_scratch]
    config = CausalQwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE,
        max_position_embeddings=options.length,
        tie_word_embeddings=True,
        num_token_id=processor.num_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    CausalQwenForCausalLM(config).save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def measure(directory: Path, test: list[Row], names: list[str], length: int) -> np.ndarray:
    """NLL of every held-out piece under every saved individual, and last under nobody."""
    processor, model = open_model(directory)
    files = [directory / file for file in saved_files(names)]
    size = model.config.latent_size
    kappa = model.generation_config.noise_gain
    people = [Individual.load(file) for file in files if file.is_file()]
    pushes = [torch.tensor(one.temperature * kappa * one.cauchy()) for one in people]
    stacked = torch.stack(pushes).float() if pushes else torch.zeros(0, size)
    examples = encode_rows(test, processor, length)
    collate = Collator(processor.tokenizer.pad_token_id)
    return likelihoods(model, stacked, examples, collate).double().numpy()


@torch.no_grad()
def likelihoods(
    model: CausalModel,
    pushes: Tensor,
    examples: Sequence[Example],
    collate: Callable[[Sequence[Example]], dict[str, Any]],
    batch_size: int = 8,
) -> Tensor:
    """Mean NLL of softmax(loc_S) of every text, by every individual and, last, by nobody.

    pushes (N, C) are T kappa t. -> (D, N + 1), NaN for a text without labels. The backbone runs
    once for all of them.
    """
    found = []
    everyone = torch.cat([pushes, pushes.new_zeros(1, pushes.shape[-1])]).to(model.device)
    for start in range(0, len(examples), batch_size):
        batch = collate(examples[start : start + batch_size])
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "numeric_values")}
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        u = model(**inputs, skip_logits=True).u_dist
        labels = shift_left(batch["labels"], IGNORE).to(model.device)
        columns = [_nll(model, u, UNoise(push), labels) for push in everyone]
        found.append(torch.stack(columns, -1).cpu())
    return torch.cat(found)


def _nll(model: CausalModel, u: Cauchy, noise: UNoise, labels: Tensor) -> Tensor:
    """The mean over every row's valid positions. (B, T, C) -> (B,)"""
    is_valid = labels != IGNORE
    loc = (u.loc + model.action.displacement(u, noise).to(u.loc))[is_valid]
    size = max(ELEMENTS // model.config.vocab_size, 1)
    parts = [
        nn.functional.cross_entropy(model.lm_head(part).float(), label, reduction="none")
        for part, label in zip(loc.split(size), labels[is_valid].split(size), strict=True)
    ]
    nll = torch.zeros(labels.shape, device=loc.device)
    nll[is_valid] = torch.cat(parts) if parts else loc.new_zeros(0).float()
    return nll.sum(-1) / is_valid.sum(-1)


def compare(
    nll: np.ndarray, other_runs: dict[str, np.ndarray], test: list[Row], names: list[str]
) -> Row:
    """Means over pieces, with intervals over works. nll (D, N + 1), of the other runs (D,)"""
    place = np.array([names.index(row["author"]) for row in test])
    own = nll[np.arange(len(nll)), place]
    others = (nll[:, :-1].sum(-1) - own) / (len(names) - 1)
    hits = (nll[:, :-1].argmin(-1) == place).astype(float)
    of_work: dict[str, list[int]] = {}
    for piece, row in enumerate(test):
        of_work.setdefault(row["work"], []).append(piece)
    works = [np.array(pieces) for pieces in of_work.values()]

    def interval(values: np.ndarray) -> list[float]:
        sums, sizes = (np.array([f(values[w]) for w in works]) for f in (np.sum, len))
        draws = np.random.default_rng(0).integers(len(works), size=(REPLICATES, len(works)))
        means = sums[draws].sum(-1) / sizes[draws].sum(-1)
        return [float(values.mean()), *np.quantile(means, (0.025, 0.975)).tolist()]

    found = {"own": own, "another's": others, "nobody": nll[:, -1], **other_runs}
    return {
        "nll": {who: interval(values) for who, values in found.items()},
        "worse": {who: interval(values - own) for who, values in found.items() if who != "own"},
        "recognized": interval(hits),
        "chance": 1 / len(names),
        "by_author": {
            name: {
                "own": float(own[place == k].mean()),
                "nobody": float(nll[place == k, -1].mean()),
                "recognized": float(hits[place == k].mean()),
            }
            for k, name in enumerate(names)
        },
    }


def page(results: Row, options: Namespace, names: list[str]) -> list[str]:
    worse = {"own": None, **results["worse"]}
    rows = [{"who": who, "nll": nll, "worse": worse[who]} for who, nll in results["nll"].items()]
    authors = [{"name": name, **row} for name, row in results["by_author"].items()]
    what = f"--from-scratch {options.from_scratch}" if options.from_scratch else "a converted model"
    return [
        "# Authors as individuals",
        "",
        f"`python benchmarks/authors.py --data DIRECTORY`: {len(names)} authors, "
        f"{results['pieces']} pieces to learn, {results['held_out']} "
        f"held-out pieces of {results['works']} other works. {options.steps} steps of "
        f"{options.batch} x {options.length} tokens, {what}, lora={options.lora}, "
        f"train={options.train}. Intervals: 95%, bootstrap over works.",
        "",
        *table(
            {"individual": "{who}", "NLL": span("nll", 3), "worse than own": span("worse", 4)},
            rows,
            missing="-",
        ),
        "",
        f"The own individual is the likeliest of {len(names)} for "
        + span("r", 2).format(r=results["recognized"])
        + f" of the pieces; chance is {results['chance']:.2f}.",
        "",
        *table(
            {
                "author": "{name}",
                "own": "{own:.3f}",
                "nobody": "{nobody:.3f}",
                "recognized": "{recognized:.2f}",
            },
            authors,
        ),
    ]


def main() -> None:
    parser = make_parser(__doc__, "authors", "two steps: does it run")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="")
    parser.add_argument("--from-scratch", choices=[*SIZES])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--individual-rate", type=float, default=0.03)
    parser.add_argument("--lora", type=int, default=0)
    parser.add_argument("--train", choices=["all", "heads"], default="all")
    parser.add_argument("--pieces", type=int, default=400, help="to learn, of every author")
    parser.add_argument("--held-out", type=int, default=40, help="pieces of every author")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory")
    options = parse(parser, steps=2, pieces=8, held_out=4)
    learn, test = read_pieces(options.data, options.pieces, options.held_out)
    names = sorted({row["author"] for row in learn})
    results: dict[str, Any]
    with tempfile.TemporaryDirectory() as temporary:
        place = options.keep or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)

        def train_and_measure(column: str, individuals: list[str]) -> np.ndarray:
            directory = run(options, learn, test, place, column)
            return measure(directory, test, individuals, options.length)

        other_runs = {
            "trained without": train_and_measure("", [])[:, -1],
            "trained with one for all": train_and_measure(EVERYONE, [EVERYONE])[:, 0],
        }
        log({name: float(values.mean()) for name, values in other_runs.items()})
        nll = train_and_measure("author", names)
    results = compare(nll, other_runs, test, names)
    results |= {"pieces": len(learn), "held_out": len(test)}
    results["works"] = len({row["work"] for row in test})
    save(page(results, options, names), results, options.output)


if __name__ == "__main__":
    main()
