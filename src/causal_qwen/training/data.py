"""Data: files -> rows -> padded batches of ids, values, labels.

    rows = read_rows("diamonds.csv", "A {carat} carat diamond costs |||{price}")
    examples = encode_rows(rows, processor, max_length=512)
    batch = Collator(processor.tokenizer.pad_token_id)([examples[0], examples[1]])

A row has `text`, or `prompt` and `completion` (texts, or lists of messages, as in TRL), or
`messages`. Tokens to learn have a label, all others -100; labels are not shifted, the model does
that. Ids and values are cut and padded together.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from causal_qwen.modeling.loss import IGNORE
from causal_qwen.modeling.protocols import Processor
from causal_qwen.options import ROW_FILES
from causal_qwen.tables.files import OPENERS, read_records, read_text

Row = dict[str, Any]
Spans = list[tuple[int, int]]

MARK = "|||"  # separates prompt and completion in a template
PLACE = re.compile(r"\{([^{}]*)\}")
TEXT_KEYS = ("text", "prompt", "completion", "messages")
KINDS = {"messages": ("messages",), "prompt": ("prompt", "completion"), "text": ("text",)}
TURN = ("role", "content")
LEARNED_FROM = "learned_from"  # the first turn of a completion
DEFAULT_SPLIT = "train"
NO_FIELD = NOBODY = -1  # index of a target without a field, of a text without an author

logger = logging.getLogger("transformers.causal_qwen")


# ---------------------------------------------------------------- files -> rows


def read_rows(source: str | os.PathLike[str], template: str | None = None) -> list[Row]:
    """The rows of a file that `fit` reads, too, of the lines of a .txt file, or of a Hugging Face
    dataset.

    A dataset is `name`, `name:split` or `name:config:split`; it may be a directory. A template such
    as "A {carat} carat diamond costs |||{price}" makes texts of columns: required for CSV files,
    optional for others. The part before "|||" is the prompt. Unused columns are kept.
    """
    rows = []
    for where, row in _numbered_rows(os.fspath(source), has_template=template is not None):
        try:
            rows.append(dict(_as_messages(row)) if template is None else _fill(template, row))
            _kind(rows[-1])
        except ValueError as error:
            raise ValueError(f"{source}:{where}: {error}") from error
    if not rows:
        raise ValueError(f"{source} is empty; add at least one row.")
    return rows


def _numbered_rows(source: str, *, has_template: bool) -> Iterator[tuple[Any, Row]]:
    """Every row, and where it is."""
    path = Path(source)
    suffix = next((s for s in reversed(path.suffixes) if s.lower() not in OPENERS), "").lower()
    if suffix not in ROW_FILES:
        if path.is_file():
            raise ValueError(f"{path} has an unknown type; use {', '.join(ROW_FILES)}.")
        yield from enumerate(map(dict, _dataset(source)))
    elif not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; check the path.")
    elif suffix == ".txt":
        lines = read_text(source).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        yield from ((n, {"text": line}) for n, line in enumerate(lines, 1) if line.strip())
    elif suffix in (".csv", ".tsv") and not has_template:
        raise ValueError(
            f"{path} needs a template that makes texts of its columns, "
            'such as "A {carat} carat diamond costs |||{price}".'
        )
    else:
        yield from read_records(path)


def _dataset(source: str) -> Iterable[Any]:
    """Rows through `datasets`, which is imported only here."""
    datasets = importlib.import_module("datasets")
    name, *rest = source.split(":", 2)
    split = rest.pop() if rest else DEFAULT_SPLIT
    if any((Path(name) / file).exists() for file in ("dataset_dict.json", "state.json")):
        saved = datasets.load_from_disk(name)
        rows: Iterable[Any] = saved[split] if isinstance(saved, dict) else saved
        return rows
    rows = datasets.load_dataset(name, *rest, split=split)
    return rows


def _fill(template: str, row: Row) -> Row:
    names = PLACE.findall(template)
    parts = template.split(MARK)
    if not names or len(parts) > 2:
        raise ValueError(f"template={template!r} needs a column, as {{price}}, and one {MARK}.")
    for name in names:
        if row.get(name) is None:
            raise ValueError(
                f"column {name!r} has no value; the columns are {', '.join(map(repr, row))}."
            )
    kept = {key: value for key, value in row.items() if key not in (*names, *TEXT_KEYS)}
    filled = [PLACE.sub(lambda place: str(row[place[1]]), part) for part in parts]
    keys = ("text",) if len(filled) == 1 else ("prompt", "completion")
    return kept | dict(zip(keys, filled, strict=True))


def _as_messages(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with `messages` for turns of prompt and completion, of which the first LEARNED_FROM are
    the prompt's; any other row unchanged."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return {**row, "messages": [*prompt, *completion], LEARNED_FROM: len(prompt)}
    return row


def _kind(row: Mapping[str, Any]) -> str:
    """`messages`, `prompt` or `text`, in this order; other rows are refused."""
    for kind, keys in KINDS.items():
        if any(row.get(key) is None for key in keys):
            continue
        if kind == "messages":
            if not _is_chat(row["messages"]):
                raise ValueError("`messages` must be a list of objects with `role` and `content`.")
        elif wrong := [key for key in keys if not isinstance(row[key], str)]:
            raise ValueError(f"`{wrong[0]}` must be text.")
        elif not row[keys[-1]].strip():
            raise ValueError(f"`{keys[-1]}` is empty.")
        return kind
    found = ", ".join(repr(key) for key, value in row.items() if value is not None) or "nothing"
    raise ValueError(
        f"the row has {found}; it needs `text`, or `prompt` and `completion`, or `messages`."
    )


def _is_chat(messages: Any) -> bool:
    def is_turn(one: Any) -> bool:
        return isinstance(one, dict) and all(isinstance(one.get(key), str) for key in TURN)

    return isinstance(messages, list) and bool(messages) and all(map(is_turn, messages))


# ---------------------------------------------------------------- rows -> examples


@dataclass(slots=True)
class Example:
    """One row: a list per column, all of the same length."""

    ids: list[int]
    values: list[float]  # 0 beside tokens other than <NUM>
    labels: list[int]  # aligned with ids; -100 where nothing is learned
    fields: list[int]  # of the labels that are <NUM>: see `causal_qwen.modeling.value_space`
    authors: list[int] = field(default_factory=list)  # empty, or an index (NOBODY) per token
    is_cut: bool = False


def encode_rows(
    rows: Iterable[Mapping[str, Any]],
    processor: Processor,
    max_length: int,
    target_fields: Collection[str] = (),
) -> list[Example]:
    """`encode_row` for every row; a warning counts rows that were cut. Refuses data without a
    label."""
    examples = []
    for number, row in enumerate(rows):
        try:
            examples.append(encode_row(row, processor, max_length, target_fields))
        except (ValueError, TemplateError) as error:
            raise ValueError(f"rows[{number}]: {error}") from error
    # the first token of a text is never predicted
    if not any(label != IGNORE for example in examples for label in example.labels[1:]):
        raise ValueError(
            "Nothing is left to learn: every label is masked, or cut at "
            f"max_length={max_length}; rows: {len(examples)}."
        )
    if count := sum(example.is_cut for example in examples):
        logger.warning(
            f"Rows of more than {max_length} tokens were cut: {count} of {len(examples)}."
        )
    return examples


def encode_row(
    row: Mapping[str, Any],
    processor: Processor,
    max_length: int,
    target_fields: Collection[str] = (),
) -> Example:
    """A row -> ids, values and labels, at most `max_length` of each.

    Labels are the ids; -100 in the prompt of a completion and outside the assistant's turns of a
    chat. Prompt and completion are encoded as one text; a token that spans
    both belongs to the completion. Texts and completions end with the end-of-text token.

    A `target` beside `text` is the number that the text asks for: `<NUM>` follows the text and is
    its only label; `field` is one of `target_fields`, the names in `config.value_fields`. Such a
    text is cut at its start, all others at their end.
    """
    row = _as_messages(row)
    kind = _kind(row)
    target = _target(row, kind, target_fields)
    text, has_special = _text(row, kind, processor)
    if target is not None:
        text = processor.ask(text)
    learned = _answers(row, kind, text, processor)
    if kind == "text" and target is None:
        learned = [(-1, len(text))]
    example = _tokens(text, learned, processor, has_special)
    if target is not None:
        _append(example, processor.num_token_id, *target)
    elif kind in ("prompt", "text"):
        end = processor.tokenizer.eos_token_id
        if end is not None and example.ids[-1:] != [end]:
            _append(example, end)
    return _cut(example, max_length, is_end_kept=target is not None)


def _text(row: Mapping[str, Any], kind: str, processor: Processor) -> tuple[str, bool]:
    """The whole text, and whether the tokenizer adds its special tokens to it."""
    if kind in ("prompt", "text"):
        return row["text"] if kind == "text" else row["prompt"] + row["completion"], True
    text = processor.apply_chat_template(row["messages"], tokenize=False)
    start = processor.tokenizer.bos_token
    return text, not start or not text.startswith(start)


def _answers(row: Mapping[str, Any], kind: str, text: str, processor: Processor) -> Spans:
    """Spans to learn: the completion, or the content of the assistant's turns in it or in a chat
    without one."""
    if kind in ("prompt", "text"):
        return [(len(row["prompt"]), len(text))] if kind == "prompt" else []
    messages, spans = row["messages"], []
    first = row.get(LEARNED_FROM, 0)
    for place, message in enumerate(messages):
        if place < first or message["role"] != "assistant":
            continue
        if place == 0:
            raise ValueError("messages[0] is the assistant's; start with the user's.")
        before = processor.apply_chat_template(
            messages[:place], tokenize=False, add_generation_prompt=True
        )
        until = processor.apply_chat_template(messages[: place + 1], tokenize=False)
        if not until.startswith(before) or not text.startswith(until):
            raise ValueError(
                f"the chat template renders the prompt of messages[{place}] differently when the "
                "answer follows, so the two cannot be separated; end the chat there."
            )
        spans.append((len(before), len(until)))
    return spans


def _tokens(text: str, learned: Spans, processor: Processor, has_special: bool) -> Example:
    """A token is learned if it ends within a span (start, end]; -1 starts before the first."""
    text.encode()  # refuses half a surrogate pair, which JSON can express and no tokenizer reads
    inputs = processor(text, return_offsets_mapping=True, add_special_tokens=has_special)
    ids = inputs["input_ids"]
    ends = [end for _, end in inputs["offset_mapping"]]
    for place in reversed(range(len(ends))):  # special tokens behind the text have offset 0
        if ends[place]:
            break
        ends[place] = len(text)
    labels = [
        token if any(start < end <= stop for start, stop in learned) else IGNORE
        for token, end in zip(ids, ends, strict=True)
    ]
    return Example(ids, inputs["numeric_values"], labels, [NO_FIELD] * len(ids))


def _target(row: Mapping[str, Any], kind: str, names: Collection[str]) -> tuple[float, int] | None:
    """The number that a text asks for, and the index of its field."""
    value, name = row.get("target"), row.get("field")
    if value is None:
        return None
    if kind != "text":
        raise ValueError(f"`target` requires `text`, not `{kind}`; remove or rename one.")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"target={value!r} is not a finite number.")
    known = sorted(names)
    if name is not None and name not in known:
        raise ValueError(f"field={name!r} is unknown; known are: {', '.join(known) or 'none'}.")
    return number, NO_FIELD if name is None else known.index(name)


def _append(example: Example, token: int, value: float = 0.0, place: int = NO_FIELD) -> None:
    example.ids.append(token)
    example.values.append(value)
    example.labels.append(token)
    example.fields.append(place)


def _cut(example: Example, length: int, *, is_end_kept: bool) -> Example:
    extra = len(example.ids) - length
    if extra <= 0:
        return example
    kept = slice(extra, None) if is_end_kept else slice(length)
    ids, values = example.ids[kept], example.values[kept]
    return Example(ids, values, example.labels[kept], example.fields[kept], is_cut=True)


# ---------------------------------------------------------------- examples -> batches


@dataclass
class Collator:
    """Examples -> the tensors of one batch, padded on the right."""

    pad_token_id: int | None

    def __post_init__(self) -> None:
        if self.pad_token_id is None:
            raise ValueError("pad_token_id is None; set processor.tokenizer.pad_token first.")

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        width = max(len(example.ids) for example in examples)

        def tensor(
            columns: Iterable[Sequence[Any]], fill: Any, dtype: torch.dtype = torch.long
        ) -> torch.Tensor:
            rows = [[*column, *[fill] * (width - len(column))] for column in columns]
            return torch.tensor(rows, dtype=dtype)

        batch: dict[str, Any] = {
            "input_ids": tensor((e.ids for e in examples), self.pad_token_id),
            "attention_mask": tensor(([1] * len(e.ids) for e in examples), 0),
            "labels": tensor((e.labels for e in examples), IGNORE),
            "numeric_values": tensor((e.values for e in examples), 0.0, torch.float64),
        }
        if any(place != NO_FIELD for e in examples for place in e.fields):
            batch["numeric_fields"] = tensor((e.fields for e in examples), NO_FIELD)
        if any(e.authors for e in examples):
            batch["authors"] = tensor((e.authors for e in examples), NOBODY)
        return batch
