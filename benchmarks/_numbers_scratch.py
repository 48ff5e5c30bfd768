"""Small models from scratch: numbers in and out as values, and two alternatives.

ours    numbers are read as values (log) and predicted as a Cauchy (the regressor's own `scratch`)
xVal    <NUM> times the standardised value (linear), and a mean-squared error
digits  numbers are text, read and written digit by digit (greedy decoding)

All of them have the same size, steps, held-out share and early stopping.
"""

from __future__ import annotations

import argparse
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from _numbers_tables import TABLES, Table, corrupt
from numpy.typing import NDArray
from torch import Tensor, nn

from causal_qwen.modeling.loss import IGNORE
from causal_qwen.regression.features import batches_by_length, encode_texts
from causal_qwen.regression.head import BatchLoss, train_model
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.regression.sentences import to_sentences
from causal_qwen.text.numerals import render
from causal_qwen.training.data import Collator, Example, encode_rows
from causal_qwen.training.from_scratch import new_model
from causal_qwen.training.metrics import MetricAccumulator
from causal_qwen.training.run import COMPAT_WEIGHT

Array = NDArray[np.float64]

SIZE, LENGTH, VOCABULARY = (192, 4), 192, 1024  # 2 million parameters
TRAINING_ROWS, TEST_ROWS, TEXTS = 400, 400, 600
SCRATCH_TABLES = ("diamonds", "concrete")
SHARES, SEEDS, EPOCHS, BATCH = (0.0, 0.2), 3, 8, 16
NUMBER_TOKENS = 12  # of a number that is written
SENTENCE = (
    "A diamond of {carat} carat, {cut} cut, color {color} and clarity {clarity} measures {x} by "
    "{y} by {z} mm and costs {price} dollars."
)


def training_options(options: argparse.Namespace) -> dict[str, Any]:
    epochs = 2 if options.quick else EPOCHS
    common = {"learning_rate": 1e-3, "batch_size": BATCH, "held_out": 0.1, "patience": 4}
    return {**common, "epochs": epochs}


class Task(NamedTuple):
    """Training rows with their (corrupted) values, and the rows to predict."""

    table: Table
    training: Any  # a DataFrame
    values: Array
    test: Any
    options: dict[str, Any]  # of training
    seed: int


# ---------------------------------------------------------------- methods


def ours(task: Task) -> Array:
    regressor = CausalTextRegressor(
        "scratch",
        units=task.table.units,
        size=SIZE,
        max_length=LENGTH,
        random_state=task.seed,
        value_space="symlog",
        **task.options,
    )
    regressor.fit(task.training, {task.table.target: task.values})
    return regressor.predict(task.test)[:, 0]


class XVal(nn.Module):
    """<NUM> times the value, and a linear head: xVal's method, on our backbone."""

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


def xval(task: Task) -> Array:
    texts = task.table.sentences(task.training)
    processor, backbone = new_pair(texts, task.seed, encode_numbers="value")
    encoded = encode_texts(texts, processor, LENGTH)
    read = np.array([abs(v) for _, values in encoded for v in values if v])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        model = XVal(backbone, spread=float(np.quantile(read, 0.99)) / 5)  # most values within 5
    center, scale = task.values.mean(), task.values.std()
    y = torch.from_numpy((task.values - center) / scale).float()

    def loss(rows: list[int]) -> tuple[Tensor, Tensor]:
        error = model([encoded[row] for row in rows]) - y[rows]
        return error.square().sum(), torch.tensor(float(len(rows)))

    train_model(model, loss, len(texts), seed=task.seed, **task.options)
    tests = encode_texts(task.table.sentences(task.test), processor, LENGTH)
    found = np.zeros(len(tests))
    with torch.no_grad():
        for rows in batches_by_length(tests):
            found[rows] = model([tests[row] for row in rows]).numpy()
    return center + scale * found


def digits(task: Task) -> Array:
    """NaN where the generated text is not a number."""
    rows = [
        {"prompt": text, "completion": f" {render(value)}"}
        for text, value in zip(
            task.table.sentences(task.training), task.values.tolist(), strict=True
        )
    ]
    fields = {"classification_loss_weight": 0.0, "compat_loss_weight": 1.0}
    texts = [row["prompt"] + row["completion"] for row in rows]
    processor, model = new_pair(texts, task.seed, encode_numbers="text", **fields)
    loss = language_loss(model, list(encode_rows(rows, processor, LENGTH)), processor)
    train_model(model, loss, len(rows), seed=task.seed, **task.options)
    processor.tokenizer.padding_side = "left"
    found: list[float] = []
    prompts = task.table.sentences(task.test)
    for start in range(0, len(prompts), 64):
        batch = processor(prompts[start : start + 64], return_tensors="pt")
        ids = model.generate(
            **batch, causal_mode="compatible", do_sample=False, max_new_tokens=NUMBER_TOKENS
        )
        new = ids[:, batch["input_ids"].shape[1] :]
        found += map(parse, processor.tokenizer.batch_decode(new, skip_special_tokens=True))
    return np.array(found)


def parse(text: str) -> float:
    try:
        value = float(text.strip())
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def language_loss(model: Any, examples: list[Example], processor: Any) -> BatchLoss:
    """The model's own loss, weighted by the number of labels."""
    collate = Collator(processor.tokenizer.pad_token_id)

    def loss(rows: list[int]) -> tuple[Tensor, Tensor]:
        batch = collate([examples[row] for row in rows])
        count = (batch["labels"][:, 1:] != IGNORE).sum()
        return model(**batch, skip_logits=True, use_cache=False).loss * count, count.float()

    return loss


def new_pair(texts: list[str], seed: int, encode_numbers: str, **fields: Any) -> tuple[Any, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        processor, model = new_model(
            texts, SIZE, VOCABULARY, LENGTH, encode_numbers=encode_numbers, **fields
        )
    processor.encode_numbers = encode_numbers
    return processor, model


METHODS = {
    "ours": ours,
    "xVal": xval,
    "digits": digits,
    "training median": lambda task: np.full(len(task.test), np.median(task.values)),
}


def scratch(options: argparse.Namespace) -> tuple[list[str], list[dict[str, Any]]]:
    """Two tables, two levels of corruption, three seeds."""
    results = []
    first = 1 if options.quick else None
    for name in SCRATCH_TABLES[:first]:
        table = TABLES[name]
        frame, values = table.read(options.rows)
        rows = min(TRAINING_ROWS, len(frame) // 2)
        for share in SHARES[:first]:
            for seed in range(SEEDS)[:first]:
                order = np.random.default_rng(seed).permutation(len(frame))
                training, test = order[:rows], order[rows:][:TEST_ROWS]
                rng = np.random.default_rng((seed, int(100 * share)))
                y = corrupt(values[training], "symmetric", share, rng)
                task = Task(
                    *(table, frame.iloc[training], y, frame.iloc[test]),
                    *(training_options(options), seed),
                )
                for method, predict in METHODS.items():
                    predicted = predict(task)
                    is_number = np.isfinite(predicted)
                    error = np.abs(np.where(is_number, predicted, np.median(y)) - values[test])
                    results.append(
                        {"table": name, "share": share, "seed": seed, "way": method}
                        | {"mdae": float(np.median(error)), "mae": float(error.mean())}
                        | {"unparseable": float(1 - is_number.mean())}
                    )
                    print(results[-1], flush=True)
    return scratch_page(results), results


def scratch_page(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## From scratch",
        "",
        f"Models of one size (hidden size {SIZE[0]}, {SIZE[1]} layers, 2 million parameters), "
        f"{TRAINING_ROWS} rows, {EPOCHS} epochs at most; mean over seeds (lowest to highest). An "
        "answer that is not a number counts as the training median, which is also listed: so few "
        "rows and epochs are not enough to learn to write digits.",
        "",
        "| table | corrupted | method | MdAE | MAE | unparseable |",
        "|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((r["table"], r["share"], r["way"]) for r in results):
        mine = [r for r in results if (r["table"], r["share"], r["way"]) == key]
        mdae, mae, unparseable = ([r[m] for r in mine] for m in ("mdae", "mae", "unparseable"))
        lines.append(
            f"| {key[0]} | {key[1]:.0%} | {key[2]} | {np.mean(mdae):.4g} ({min(mdae):.4g} to "
            f"{max(mdae):.4g}) | {np.mean(mae):.4g} | {np.mean(unparseable):.1%} |"
        )
    return lines


# ---------------------------------------------------------------- text with numbers in it


def mixed(options: argparse.Namespace) -> tuple[list[str], list[dict[str, Any]]]:
    """The same texts with numbers as values and as digits: <NUM> F1, value errors, perplexity."""
    frame, price = TABLES["diamonds"].read(options.rows or TEXTS)
    frame = frame.assign(price=price)
    texts = to_sentences(frame, list(frame.columns), template=SENTENCE)
    held_out = len(texts) // 5
    results = []
    for seed in range(1 if options.quick else SEEDS):
        for encoding in ("value", "text"):
            fields = {"compat_loss_weight": COMPAT_WEIGHT, "gate_alpha": 0.1}
            processor, model = new_pair(texts[held_out:], seed, encode_numbers=encoding, **fields)
            examples = list(encode_rows([{"text": text} for text in texts], processor, LENGTH))
            loss = language_loss(model, examples[held_out:], processor)
            rows = len(texts) - held_out
            train_model(model, loss, rows, seed=seed, **training_options(options))
            found = evaluate(model, processor, texts[:held_out], examples[:held_out])
            kept = ("word_perplexity", "num_f1", "reg_mae", "reg_mdae")
            kept = kept if encoding == "value" else kept[:1]
            results.append({"seed": seed, "way": encoding} | {name: found[name] for name in kept})
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
    for encoding in ("value", "text"):
        mine = [r for r in results if r["way"] == encoding]
        cells = [
            f"{np.mean([r[key] for r in mine]):.4g}" if key in mine[0] else "-"
            for key in ("word_perplexity", "num_f1", "reg_mdae", "reg_mae")
        ]
        lines.append(f"| {encoding} | {' | '.join(cells)} |")
    return lines, results


@torch.no_grad()
def evaluate(
    model: Any, processor: Any, texts: list[str], examples: list[Example]
) -> dict[str, float]:
    metrics, total, count = MetricAccumulator(model), 0.0, 0
    collate = Collator(processor.tokenizer.pad_token_id)
    for start in range(0, len(texts), BATCH):
        batch = collate(examples[start : start + BATCH])
        output = model(input_ids=batch["input_ids"], numeric_values=batch["numeric_values"])
        metrics.add(output.u_dist, batch)
        logits, labels = output.logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:]
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        is_word = word_mask(texts[start : start + BATCH], processor, losses)
        total, count = total + float(losses[is_word].sum()), count + int(is_word.sum())
    return {**metrics.compute(), "word_perplexity": math.exp(total / count)}


def word_mask(texts: list[str], processor: Any, losses: Tensor) -> Tensor:
    """Which predicted tokens are no part of a number. -> (B, T - 1)"""
    mask = torch.zeros(losses.shape, dtype=torch.bool)
    for row, text in enumerate(texts):
        as_values = processor(text, encode_numbers="value", return_offsets_mapping=True)
        pairs = zip(as_values["input_ids"], as_values["offset_mapping"], strict=True)
        spans = [span for token, span in pairs if token == processor.num_token_id]
        offsets = processor(text, return_offsets_mapping=True)["offset_mapping"]
        for place, (start, end) in enumerate(offsets[1:]):
            mask[row, place] = end > start and not any(start < b and a < end for a, b in spans)
    return mask
