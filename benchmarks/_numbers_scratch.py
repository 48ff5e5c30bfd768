"""Small models from scratch: numbers in and out as values, and two other ways to do it.

ours    numbers are read as values (log), and said as a Cauchy (the regressor's own `scratch`)
xVal    <NUM> times the standardised value (linear), and a mean-squared error
digits  numbers are text, read and written digit by digit (greedy decoding)

All of them have the same size, steps, held-out share and early stopping.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import torch
from _numbers_tables import TABLES, Table, corrupt
from numpy.typing import NDArray
from torch import Tensor, nn

from causal_qwen.modeling.loss import IGNORE
from causal_qwen.regression.features import batches_by_length, encode_texts
from causal_qwen.regression.head import teach
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.regression.sentences import ask_for, to_sentences
from causal_qwen.text.numerals import render
from causal_qwen.training.data import Collator, Example, encode_rows
from causal_qwen.training.from_scratch import new_model
from causal_qwen.training.metrics import MetricAccumulator
from causal_qwen.training.run import COMPAT_WEIGHT

Array = NDArray[np.float64]

SIZE, LENGTH, VOCABULARY = (192, 4), 192, 1024  # 2 million parameters
KNOWN, ASKED, TEXTS = 400, 400, 600  # rows to learn from, rows that are asked, mixed texts
SCRATCH_TABLES = ("diamonds", "concrete")
SHARES, SEEDS, EPOCHS, RATE, BATCH, PATIENCE = (0.0, 0.2), 3, 8, 1e-3, 16, 4
ANSWER = 12  # tokens of a number that is written
SENTENCE = (
    "A diamond of {carat} carat, {cut} cut, color {color} and clarity {clarity} measures {x} by "
    "{y} by {z} mm and costs {price} dollars."
)


def protocol(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    epochs = 2 if options.quick else EPOCHS
    common = {"rate": RATE, "epochs": epochs, "batch_size": BATCH}
    return {**common, "held_out": 0.1, "patience": PATIENCE, "seed": seed}


# ---------------------------------------------------------------- three ways


def ours(
    table: Table, known: Any, told: Array, asked: Any, options: argparse.Namespace, seed: int
) -> Array:
    settings = protocol(options, seed)
    regressor = CausalTextRegressor(
        "scratch",
        units=table.units,
        size=SIZE,
        max_length=LENGTH,
        learning_rate=settings["rate"],
        epochs=settings["epochs"],
        batch_size=settings["batch_size"],
        patience=settings["patience"],
        random_state=seed,
        value_space="symlog",
    )
    columns = list(table.columns)
    return regressor.fit(known[columns], {table.target: told}).predict(asked[columns])[:, 0]


class XVal(nn.Module):
    """<NUM> times the value, and a linear head: xVal's way, on our backbone."""

    def __init__(self, model: Any, spread: float) -> None:
        super().__init__()
        self.model, self.spread = model, spread
        self.head = nn.Linear(model.config.hidden_size, 1)

    def forward(self, encoded: Any) -> Tensor:
        width = max(len(ids) for ids, _ in encoded)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in encoded])
        values = torch.tensor([list(v) + [0.0] * (width - len(v)) for _, v in encoded])
        is_number = ids == self.model.config.num_token_id
        factor = torch.where(is_number, (values / self.spread).float(), 1.0)
        embedded = self.model.model.embed_tokens(ids) * factor.unsqueeze(-1)
        z = self.model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        ends = torch.tensor([len(ids) - 1 for ids, _ in encoded])
        return self.head(z[torch.arange(len(ends)), ends]).squeeze(-1)


def xval(
    table: Table, known: Any, told: Array, asked: Any, options: argparse.Namespace, seed: int
) -> Array:
    texts, asked_texts = sentences(table, known), sentences(table, asked)
    processor, backbone = fresh(texts, seed, encode_numbers="value")
    encoded = encode_texts(texts, processor, LENGTH)
    read = np.array([abs(v) for _, values in encoded for v in values if v])
    model = XVal(backbone, spread=float(np.quantile(read, 0.99)) / 5)  # most values within 5
    center, scale = told.mean(), told.std()
    y = torch.from_numpy((told - center) / scale).float()

    def loss(places: list[int]) -> tuple[Tensor, Tensor]:
        error = model([encoded[place] for place in places]) - y[places]
        return error.square().sum(), torch.tensor(float(len(places)))

    teach(model, loss, len(texts), **protocol(options, seed))
    questions = encode_texts(asked_texts, processor, LENGTH)
    found = np.zeros(len(asked_texts))
    with torch.no_grad():
        for places in batches_by_length(questions):
            found[places] = model([questions[place] for place in places]).numpy()
    return center + scale * found


def digits(
    table: Table, known: Any, told: Array, asked: Any, options: argparse.Namespace, seed: int
) -> Array:
    """NaN where what was written is no number."""
    texts = [
        {"prompt": text, "completion": f" {render(value)}"}
        for text, value in zip(sentences(table, known), told.tolist(), strict=True)
    ]
    fields = {"classification_loss_weight": 0.0, "compat_loss_weight": 1.0}
    words = [row["prompt"] + row["completion"] for row in texts]
    processor, model = fresh(words, seed, encode_numbers="text", **fields)
    examples = list(encode_rows(texts, processor, LENGTH))
    teach(model, language_loss(model, examples, processor), len(texts), **protocol(options, seed))
    processor.tokenizer.padding_side = "left"
    found = []
    prompts = sentences(table, asked)
    for start in range(0, len(prompts), 64):
        batch = processor(prompts[start : start + 64], return_tensors="pt")
        said = model.generate(
            **batch, causal_mode="compatible", do_sample=False, max_new_tokens=ANSWER
        )
        new = said[:, batch["input_ids"].shape[1] :]
        found += [
            number(text) for text in processor.tokenizer.batch_decode(new, skip_special_tokens=True)
        ]
    return np.array(found)


def number(text: str) -> float:
    try:
        value = float(text.strip())
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def language_loss(model: Any, examples: list[Example], processor: Any) -> Any:
    """The model's own loss, by the count of labels."""
    collate = Collator(processor.tokenizer.pad_token_id)

    def loss(places: list[int]) -> tuple[Tensor, Tensor]:
        batch = collate([examples[place] for place in places])
        count = (batch["labels"][:, 1:] != IGNORE).sum()
        return model(**batch, skip_logits=True, use_cache=False).loss * count, count.float()

    return loss


def fresh(texts: list[str], seed: int, encode_numbers: str, **fields: Any) -> tuple[Any, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        processor, model = new_model(
            texts, SIZE, VOCABULARY, LENGTH, encode_numbers=encode_numbers, **fields
        )
    processor.encode_numbers = encode_numbers
    return processor, model


def sentences(table: Table, frame: Any) -> list[str]:
    question = ask_for([table.target])
    return to_sentences(frame, table.columns, units=table.units, question=question)


def constant(
    table: Table, known: Any, told: Array, asked: Any, options: argparse.Namespace, seed: int
) -> Array:
    return np.full(len(asked), np.median(told))


WAYS = {"ours": ours, "xVal": xval, "digits": digits, "training median": constant}


def scratch(options: argparse.Namespace) -> tuple[list[str], list[dict[str, Any]]]:
    """Two tables, two levels of corruption, three seeds."""
    results = []
    for name in SCRATCH_TABLES[: 1 if options.quick else None]:
        table = TABLES[name]
        frame = table.read().iloc[: options.rows]
        train = min(KNOWN, len(frame) // 2)
        for share in SHARES[: 1 if options.quick else None]:
            for seed in range(1 if options.quick else SEEDS):
                order = np.random.default_rng(seed).permutation(len(frame))
                known, asked = frame.iloc[order[:train]], frame.iloc[order[train:][:ASKED]]
                rng = np.random.default_rng((seed, int(100 * share)))
                told = corrupt(known[table.target].to_numpy(float), "symmetric", share, rng)
                truth = asked[table.target].to_numpy(float)
                for way, predict in WAYS.items():
                    said = predict(table, known, told, asked, options, seed)
                    is_said = np.isfinite(said)
                    error = np.abs(np.where(is_said, said, np.median(told)) - truth)
                    results.append(
                        {"table": name, "share": share, "seed": seed, "way": way}
                        | {"mdae": float(np.median(error)), "mae": float(error.mean())}
                        | {"unparseable": float(1 - is_said.mean())}
                    )
                    print(results[-1], flush=True)
    lines = [
        "## From scratch",
        "",
        f"Models of one size (hidden size {SIZE[0]}, {SIZE[1]} layers, 2 million parameters), "
        f"{KNOWN} rows, {EPOCHS} epochs at most; mean over seeds (lowest to "
        "highest). What is no number counts as the training median, which also stands alone: so "
        "few rows and epochs do not teach a model to write digits.",
        "",
        "| table | corrupted | way | MdAE | MAE | unparseable |",
        "|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((r["table"], r["share"], r["way"]) for r in results):
        mine = [r for r in results if (r["table"], r["share"], r["way"]) == key]
        mdae, mae = ([r[metric] for r in mine] for metric in ("mdae", "mae"))
        unparseable = np.mean([r["unparseable"] for r in mine])
        lines.append(
            f"| {key[0]} | {key[1]:.0%} | {key[2]} | {np.mean(mdae):.4g} ({min(mdae):.4g} to "
            f"{max(mdae):.4g}) | {np.mean(mae):.4g} | {unparseable:.1%} |"
        )
    return lines, results


# ---------------------------------------------------------------- text with numbers in it


def mixed(options: argparse.Namespace) -> tuple[list[str], list[dict[str, Any]]]:
    """The same texts with numbers as values and as digits: <NUM> F1, value errors, perplexity."""
    frame = TABLES["diamonds"].read().iloc[: options.rows or TEXTS]
    names = [*TABLES["diamonds"].columns, "price"]
    texts = to_sentences(frame, names, template=SENTENCE)
    held_out = len(texts) // 5
    results = []
    for seed in range(1 if options.quick else SEEDS):
        for way in ("value", "text"):
            fields = {"compat_loss_weight": COMPAT_WEIGHT, "gate_alpha": 0.1}
            processor, model = fresh(texts[held_out:], seed, encode_numbers=way, **fields)
            rows = [{"text": text} for text in texts]
            examples = list(encode_rows(rows, processor, LENGTH))
            learn, rest = examples[held_out:], examples[:held_out]
            teach(
                model, language_loss(model, learn, processor), len(learn), **protocol(options, seed)
            )
            tally, words = MetricAccumulator(model), [0.0, 0]
            collate = Collator(processor.tokenizer.pad_token_id)
            for start in range(0, held_out, BATCH):
                batch = collate(rest[start : start + BATCH])
                with torch.no_grad():
                    output = model(
                        input_ids=batch["input_ids"], numeric_values=batch["numeric_values"]
                    )
                tally.add(output.u_dist, batch)
                losses = nn.functional.cross_entropy(
                    output.logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
                )
                is_word = word_mask(texts[start : min(start + BATCH, held_out)], processor, losses)
                words[0] += float(losses[is_word].sum())
                words[1] += int(is_word.sum())
            metrics = tally.compute()
            kept = ("num_f1", "reg_mae", "reg_mdae")
            results.append(
                {"seed": seed, "way": way, "word_perplexity": math.exp(words[0] / words[1])}
                | {name: metrics[name] for name in kept if way == "value"}
            )
            print(results[-1], flush=True)
    lines = [
        "## Text with numbers in it",
        "",
        "Sentences about diamonds, read and predicted token by token; perplexity of all tokens "
        "that are no part of a number. Value errors are pooled over carats, millimetres and "
        "dollars.",
        "",
        "| numbers as | word perplexity | <NUM> F1 | value MdAE | value MAE |",
        "|---|---|---|---|---|",
    ]
    for way in ("value", "text"):
        mine = [r for r in results if r["way"] == way]
        cells = [
            f"{np.mean([r[key] for r in mine]):.4g}" if key in mine[0] else "-"
            for key in ("word_perplexity", "num_f1", "reg_mdae", "reg_mae")
        ]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return lines, results


def word_mask(texts: list[str], processor: Any, losses: Tensor) -> Tensor:
    """Which predicted tokens lie outside of every number. -> (B, T - 1)"""
    mask = torch.zeros(losses.shape, dtype=torch.bool)
    for row, text in enumerate(texts):
        as_values = processor(text, encode_numbers="value", return_offsets_mapping=True)
        spans = [
            span
            for token, span in zip(as_values["input_ids"], as_values["offset_mapping"], strict=True)
            if token == processor.num_token_id
        ]
        read = processor(text, return_offsets_mapping=True)["offset_mapping"]
        for place, (start, end) in enumerate(read[1:]):
            mask[row, place] = end > start and not any(start < b and a < end for a, b in spans)
    return mask
