"""Data: rows read from files, labels, batches; ids and values stay aligned."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.text.numerals import encode
from causal_qwen.training.data import (
    Collator,
    Example,
    encode_row,
    encode_rows,
    read_rows,
)

Make = Callable[..., Any]

IGNORE = -100
LONG = 10_000
VOCABULARY = 300
SPECIAL = ["<s>", "</s>", "<pad>"]
SIGNS = {"<s>": "[", "</s>": "]", "<pad>": "_", "<NUM>": "#", "Ġ": " ", "Ċ": "\n"}
CHAT = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETFUL = (  # drops the content of earlier turns, as templates of reasoning models do
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{{ m.content if loop.last or m.role == 'user' else '-' }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def reader(encode_numbers: str = "value", *, is_framed: bool = False, **options: Any) -> Any:
    """One token for every byte, and one for "ab"; <s>, </s> and <pad> are 0, 1 and 2."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [("a", "b")]))
    core.add_special_tokens(SPECIAL)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    if is_framed:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": CHAT}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **{**names, **options})
    return CausalQwenProcessor(tokenizer, encode_numbers=encode_numbers)


PROCESSOR = reader()
NUM = PROCESSOR.num_token_id


def shown(ids: list[int]) -> str:
    """One sign for every token but "ab": [a #] is framed and has a number; . is no label."""
    tokens = PROCESSOR.tokenizer.convert_ids_to_tokens([i for i in ids if i >= 0])
    signs = iter(SIGNS.get(token, token) for token in tokens)
    return "".join("." if i == IGNORE else next(signs) for i in ids)


def encoded(row: dict[str, Any], processor: Any = PROCESSOR, **options: Any) -> Example:
    return encode_row(row, processor, **{"max_length": LONG, **options})


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    turns = enumerate(contents)
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in turns]}


# ---------------------------------------------------------------- files -> rows


def written(directory: Path, name: str, content: str | bytes) -> Path:
    path = directory / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_jsonl_keeps_all_keys_and_skips_blank_lines(tmp_path: Path) -> None:
    rows = [
        {"text": "价格 5\u2028元", "target": 12.5, "field": "price"},
        {"prompt": "", "completion": "b", "id": 7},
        chat("Hi", "Ho"),
    ]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path = written(tmp_path, "rows.JSONL", "\ufeff" + lines)
    assert read_rows(path) == rows
    assert read_rows(str(path)) == rows


CSV = 'carat,cut,price,target\n0.7,"Very ""Good"", {x}",2757,4\n1.5,||| Fair,9000,5\n'


def test_template_makes_a_text_of_every_csv_row(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "\ufeff" + CSV)
    assert read_rows(path, "{carat} ct, {cut}: {price}!") == [
        {"text": '0.7 ct, Very "Good", {x}: 2757!', "target": "4"},
        {"text": "1.5 ct, ||| Fair: 9000!", "target": "5"},
    ]


def test_template_mark_separates_prompt_and_completion(tmp_path: Path) -> None:
    rows = read_rows(written(tmp_path, "a.csv", CSV), "{cut} costs |||{target} {target}")
    assert rows[1] == {
        "prompt": "||| Fair costs ",
        "completion": "5 5",
        "carat": "1.5",
        "price": "9000",
    }


def test_template_replaces_text_keys_of_jsonl_rows(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"messages": 1, "text": 2, "question": "2?", "n": 3}')
    assert read_rows(path, "{question}|||\n{n}") == [{"prompt": "2?", "completion": "\n3"}]


def test_every_line_of_a_txt_file_is_a_row(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "one 1\r\n\n  two\u2028\nthree")
    assert [row["text"] for row in read_rows(path)] == ["one 1", "  two\u2028", "three"]


BAD_FILES = [
    ("a.jsonl", "", None, "a.jsonl is empty"),
    ("a.csv", "a,b\n", "{a}", "a.csv has no rows"),
    ("a.jsonl", '{"text": "x"}\n\n{"text": ', None, "a.jsonl, line 3 is no JSON object"),
    ("a.jsonl", '["text"]', None, "a.jsonl, line 1 is no JSON object"),
    ("a.jsonl", '{"text": "x"}\n{"id": 7}', None, "a.jsonl:2: the row has 'id'"),
    ("a.jsonl", '{"text": " "}', None, "a.jsonl:1: `text` is empty"),
    ("a.jsonl", '{"text": 5}', None, "a.jsonl:1: `text` must be text"),
    ("a.jsonl", '{"prompt": ["x"], "completion": "y"}', None, "1: `prompt` must be text"),
    ("a.jsonl", '{"prompt": "x", "completion": ""}', None, "1: `completion` is empty"),
    ("a.jsonl", '{"messages": [{"role": "user"}]}', None, "1: `messages`"),
    ("a.jsonl", b'{"text": "\xff"}', None, "a.jsonl is not UTF-8"),
    ("a.csv", CSV, None, r"a.csv needs a template"),
    ("a.csv", CSV, "{colour} {x}", "a.csv:2: .*'colour'.* 'carat', 'cut', 'price'"),
    ("a.csv", CSV, "costs $price", r"costs \$price"),
    ("a.csv", CSV, "{cut}|||{carat}|||{price}", r"one \|\|\|"),
    ("a.csv", "a,b\n1,2\n3\n", "{a} {b}", "a.csv, line 3 has 1 cell and the header 2: '3'; quote"),
    ("a.csv", "a,b\n,2\n", "{a}", "a.csv:2: `text` is empty"),
    ("a.json", '[{"text": "x"}, {"id": 7}]', None, "a.json:2: the row has 'id'"),
    ("a.jsonl", '{"conversations": [{"from": "dog", "value": "x"}]}', None, "it needs `text`"),
    ("a.jsonl", '{"prompt": [1], "completion": [2]}', None, "`messages` must be a list of objects"),
    ("a.xml", "[]", None, r"a.xml .*\.jsonl, .*\.csv, .*\.txt"),
]


@pytest.mark.parametrize(("name", "content", "template", "message"), BAD_FILES)
def test_bad_file_is_refused_with_line_and_reason(
    tmp_path: Path, name: str, content: str | bytes, template: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_rows(written(tmp_path, name, content), template)


FIT_FILES = {  # that `fit` reads
    "a.csv": "carat;price\r\n0,7;2757\r\n1,5;9000\r\n".encode("utf-8-sig"),
    "a.tsv": b"carat\tprice\n0,7\t2757\n1,5\t9000\n",
    "a.csv.gz": gzip.compress(b'carat,price\n"0,7",2757\n"1,5",9000\n'),
    "a.ndjson": b'{"carat": "0,7", "price": 2757}\n{"carat": "1,5", "price": 9000}\n',
    "a.json": b'[{"carat": "0,7", "price": 2757}, {"carat": "1,5", "price": 9000}]',
}


@pytest.mark.parametrize("name", [*FIT_FILES, "a.parquet"])
def test_train_reads_what_fit_reads(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        arrow = pytest.importorskip("pyarrow")
        table = arrow.table({"carat": ["0,7", "1,5"], "price": [2757, 9000]})
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        path.write_bytes(FIT_FILES[name])
    rows = read_rows(path, "{carat} costs |||{price}")
    assert [row["prompt"] + row["completion"] for row in rows] == [
        "0,7 costs 2757",
        "1,5 costs 9000",
    ]


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
        read_rows(tmp_path / "gone.jsonl")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A fake `datasets` that records its calls."""
    asked: list[Any] = []

    def load_dataset(*names: Any, split: str) -> list[dict[str, Any]]:
        asked.append((*names, split))
        return [{"text": "one"}, {"text": None if split == "broken" else "two"}]

    def load_from_disk(path: str) -> Any:
        asked.append(path)
        rows = [{"text": "disk"}]
        return {"dev": rows} if (Path(path) / "dataset_dict.json").exists() else rows

    fake = SimpleNamespace(load_dataset=load_dataset, load_from_disk=load_from_disk)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return asked


def test_dataset_is_read_by_name_config_and_split(hub: list[Any]) -> None:
    for source in ("my/set", "my/set:test", "my/set:main:test"):
        assert read_rows(source) == [{"text": "one"}, {"text": "two"}]
    assert hub == [
        ("my/set", "train"),
        ("my/set", "test"),
        ("my/set", "main", "test"),
    ]
    with pytest.raises(ValueError, match="my/set:broken:1"):
        read_rows("my/set:broken")


@pytest.mark.parametrize(("mark", "split"), [("state.json", ""), ("dataset_dict.json", ":dev")])
def test_dataset_saved_to_disk_is_read(
    hub: list[Any], tmp_path: Path, mark: str, split: str
) -> None:
    written(tmp_path, mark, "{}")
    assert read_rows(f"{tmp_path}{split}") == [{"text": "disk"}]
    assert hub == [str(tmp_path)]


# ---------------------------------------------------------------- rows -> examples


def test_text_is_learned_including_end_of_text() -> None:
    one = encoded({"text": "ab 2.5kg"})
    assert shown(one.ids) == "ab #kg]"
    assert one.labels == one.ids
    assert one.values == [0, 0, 2.5, 0, 0, 0]
    assert one.fields == [-1] * 6
    assert not one.is_cut


def test_processor_decides_how_numbers_are_encoded() -> None:
    one = encoded({"text": "a 2.5"}, reader("text"))
    assert shown(one.ids) == "a 2.5]"
    assert one.values == [0] * 6


@pytest.mark.parametrize("text", ["a", "a</s>"])
def test_end_of_text_is_added_once(text: str) -> None:
    assert shown(encoded({"text": text}).ids) == "a]"


def test_tokenizer_without_end_of_text_adds_none() -> None:
    assert shown(encoded({"text": "a"}, reader(eos_token=None)).ids) == "a"


@pytest.mark.parametrize(
    ("row", "ids", "labels"),
    [
        ({"text": "a7"}, "[a7]", "[a7]"),
        ({"text": "7"}, "[#]", "[#]"),
        ({"prompt": "c ", "completion": "7d"}, "[c #d]", "...#d]"),
        ({"prompt": "", "completion": "d"}, "[d]", ".d]"),
        (chat("q", "r"), "[user\nq][assistant\nr]", "." * 19 + "r]"),
    ],
)
def test_special_tokens_are_added_once(row: dict[str, Any], ids: str, labels: str) -> None:
    one = encoded(row, reader(is_framed=True))
    assert (shown(one.ids), shown(one.labels)) == (ids, labels)


@pytest.mark.parametrize(
    ("prompt", "completion", "ids", "labels"),
    [
        ("is ", "2.5 or", "is # or]", "...# or]"),
        ("is", " 2.5", "is #]", ".. #]"),
        ("ca", "bd", "cabd]", ".abd]"),  # "ab" is one token, and holds some of the completion
        ("x 1", "2", "x #]", "..#]"),  # and so is the number 12
        ("价", "格", "ä»·æł¼]", "...æł¼]"),
    ],
)
def test_completion_and_end_of_text_are_learned(
    prompt: str, completion: str, ids: str, labels: str
) -> None:
    row = {"prompt": prompt, "completion": completion, "text": "not this"}
    one = encoded(row)
    assert (shown(one.ids), shown(one.labels)) == (ids, labels)


def test_assistant_turns_of_a_chat_are_learned() -> None:
    row = chat("1?", "2.5", "ok", "b")
    one = encoded(row)
    assert shown(one.ids) == "[user\n#?][assistant\n#][user\nok][assistant\nb]"
    learned = "." * len("[user\n#?][assistant\n") + "#]"
    learned += "." * len("[user\nok][assistant\n") + "b]"
    assert shown(one.labels) == learned
    assert [value for value in one.values if value] == [1.0, 2.5]


def test_only_the_completion_of_a_conversational_prompt_is_learned() -> None:
    turns = chat("1", "2", "3", "b")["messages"]
    one = encoded({"prompt": turns[:3], "completion": turns[3:]}, reader("text"))
    assert one.ids == encoded({"messages": turns}, reader("text")).ids
    assert shown(one.labels) == "." * (len(one.ids) - 2) + "b]"


def test_a_template_wins_over_other_columns(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", json.dumps({"text": "no", "id": 7, "name": "Ada"}))
    (row,) = read_rows(path, "{name}:|||{id}")
    assert (row["prompt"], row["completion"]) == ("Ada:", "7")
    assert shown(encoded(row).ids) == "Ada:#]"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (chat("a", "b", "c", "d"), {"chat_template": FORGETFUL}, r"messages\[1\]"),
        (chat("a", "b"), {"chat_template": None}, "chat template"),
        (chat("a"), {"chat_template": "{{ raise_exception('no') }}"}, r"rows\[0\]: no"),
        ({"messages": chat("a", "b")["messages"][1:]}, {}, r"messages\[0\]"),
        (chat("a"), {}, "Nothing is left to learn"),
        ({"text": "a"}, {"eos_token": None}, "Nothing is left to learn"),
        ({"id": 1}, {}, r"rows\[0\]: the row has \'id\'"),
        ({"text": "a\ud800b"}, {}, r"rows\[0\]: .* surrogates not allowed"),
    ],
)
def test_row_without_labels_is_refused(
    row: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        encode_rows([row], reader(**options), LONG)


def test_template_that_drops_history_can_train_the_last_answer() -> None:
    one = encoded(chat("a", "b"), reader(chat_template=FORGETFUL))
    assert shown(one.labels).strip(".") == "b]"


WORDS = st.sampled_from(
    ["<NUM>", "5", "-2.5e3", "1,234.5", "0", "99.9元", "a", "ab", "b", " ", "\n"]
)
TEXTS = st.one_of(st.text(), st.lists(WORDS).map("".join)).filter(str.strip)
ROWS = st.one_of(
    st.builds(lambda text: {"text": text}, TEXTS),
    st.builds(lambda p, c: {"prompt": p, "completion": c}, TEXTS, TEXTS),
    st.builds(lambda texts: chat(*texts), st.lists(TEXTS, min_size=2, max_size=4)),
    st.builds(lambda text, y: {"text": text, "target": y}, TEXTS, st.floats(-1e9, 1e9)),
)


def whole_text(row: dict[str, Any]) -> str:
    if "messages" in row:
        return str(PROCESSOR.apply_chat_template(row["messages"], tokenize=False))
    if "prompt" in row:
        return str(row["prompt"] + row["completion"])
    return str(row["text"])


@given(ROWS)
@example({"text": "0 <NUM> 5"})
def test_every_number_has_one_number_token(row: dict[str, Any]) -> None:
    one = encoded(row)
    found = [value for token, value in zip(one.ids, one.values, strict=True) if token == NUM]
    wanted = [*encode(whole_text(row)).values, *([row["target"]] if "target" in row else [])]
    assert found == wanted
    assert all(token == NUM for token, value in zip(one.ids, one.values, strict=True) if value)


@given(ROWS, st.integers(2, 12))
def test_all_columns_are_cut_together(row: dict[str, Any], length: int) -> None:
    whole, cut = encoded(row), encoded(row, max_length=length)
    kept = slice(-length, None) if "target" in row else slice(length)
    for name in ("ids", "values", "labels", "fields"):
        assert getattr(cut, name) == getattr(whole, name)[kept]
    assert cut.is_cut == (len(whole.ids) > length)


@given(TEXTS, TEXTS)
@example("ca", "bd")
def test_labels_cover_the_completion_only(prompt: str, completion: str) -> None:
    one = encoded({"prompt": prompt, "completion": completion})
    offsets = PROCESSOR(prompt + completion, return_offsets_mapping=True)["offset_mapping"]
    inside = sum(end <= len(prompt) for _, end in offsets)
    assert one.labels == [IGNORE] * inside + one.ids[inside:]


@given(st.lists(TEXTS, min_size=2, max_size=4))
def test_chat_tokens_are_those_of_prompt_plus_answer(texts: list[str]) -> None:
    """Training sees the same tokens as generation."""
    texts = [f"q {text} q" for text in texts]
    row = chat(*texts)
    one = encoded(row)
    prompt = PROCESSOR.apply_chat_template(
        row["messages"][:1], add_generation_prompt=True, tokenize=False
    )
    before = PROCESSOR(prompt)["input_ids"]
    answer = PROCESSOR(f"{texts[1]}</s>")["input_ids"]
    both = len(before) + len(answer)
    assert one.ids[:both] == before + answer
    assert one.labels[:both] == [IGNORE] * len(before) + answer


# ---------------------------------------------------------------- targets


def test_target_is_the_only_label_of_its_text() -> None:
    row = {"text": "costs", "target": "12.5", "field": "price"}
    one = encoded(row, target_fields=("size", "price", "age"))
    assert shown(one.ids) == "costs #"
    assert one.ids[:-1] == PROCESSOR(PROCESSOR.ask("costs"))["input_ids"]  # as in `predict`
    assert one.labels == [IGNORE] * 6 + [NUM]
    assert one.values == [0.0] * 6 + [12.5]
    assert one.fields == [-1] * 6 + [1]  # age, price, size
    assert encoded({"text": "costs", "target": 0}).fields == [-1] * 7
    assert shown(encoded({"text": "costs", "target": None, "field": None}).ids) == "costs]"


def test_target_survives_truncation() -> None:
    one = encoded({"text": "It costs", "target": 3}, max_length=4)
    assert (shown(one.ids), one.values, one.is_cut) == ("ts #", [0, 0, 0, 3.0], True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"target": float("nan")}, "target=nan"),
        ({"target": 1, "field": "prize"}, "field='prize'.*age, price"),
        ({"target": 1, "prompt": "a", "completion": "b"}, "`target`.*`prompt`"),
    ],
)
def test_bad_target_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoded({"text": "a", **row}, target_fields=("price", "age"))


# ---------------------------------------------------------------- examples


def test_examples_say_whether_their_text_was_cut() -> None:
    examples = encode_rows([{"text": "a"}, {"text": "cccc"}, {"text": "dddd"}], PROCESSOR, 3)
    assert [one.is_cut for one in examples] == [False, True, True]
    assert [shown(one.ids) for one in examples] == ["a]", "ccc", "ddd"]
    assert examples[1] == encode_row({"text": "cccc"}, PROCESSOR, 3)


def test_data_with_all_labels_truncated_is_refused() -> None:
    rows = [{"prompt": "long", "completion": "x"}]
    with pytest.raises(ValueError, match="max_length=4"):
        encode_rows(rows, PROCESSOR, 4)
    assert encode_rows(rows, PROCESSOR, 5)[0].is_cut


# ---------------------------------------------------------------- batches


def test_batch_is_padded_on_the_right() -> None:
    rows = [{"prompt": "c", "completion": "d"}, {"text": "5"}]
    batch = Collator(2)(list(encode_rows(rows, PROCESSOR, LONG)))
    c, d = (PROCESSOR(letter)["input_ids"][0] for letter in "cd")
    assert {name: column.tolist() for name, column in batch.items()} == {
        "input_ids": [[c, d, 1], [NUM, 1, 2]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[IGNORE, d, 1], [NUM, 1, IGNORE]],
        "numeric_values": [[0, 0, 0], [5, 0, 0]],
    }
    dtypes = {name: column.dtype for name, column in batch.items()}
    assert dtypes.pop("numeric_values") == torch.float64
    assert set(dtypes.values()) == {torch.int64}


def test_padding_token_is_learned_as_end_of_text() -> None:
    batch = Collator(1)(list(encode_rows([{"text": "a"}, {"text": "cc"}], PROCESSOR, LONG)))
    assert batch["labels"][0, 1:].tolist() == [1, IGNORE]


def test_fields_are_in_the_batch_only_if_present() -> None:
    plain = Example([3, 4], [0.0, 0.0], [3, 4], [-1, -1])
    other = Example([NUM], [7.0], [NUM], [2])
    assert "numeric_fields" not in Collator(0)([plain])
    batch = Collator(0)([plain, other])
    assert batch["numeric_fields"].tolist() == [[-1, -1], [2, -1]]


def test_missing_padding_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.pad_token"):
        Collator(None)


# ---------------------------------------------------------------- with a model

TRAINING_ROWS: list[dict[str, Any]] = [
    {"prompt": "0.7 carat costs ", "completion": "2,757 euro"},
    {"text": "5 kg", "target": 12.5, "field": "price"},
    {"text": "no numbers"},
    chat("1?", "2"),
    {"text": "and", "target": -3, "field": "age"},
]
ONE = {"num_items_in_batch": 1, "num_numbers_in_batch": 1}  # losses are summed
FIELDS = {"price": [2.0, 3.0], "age": [1.0, 0.5]}


@pytest.fixture(scope="module")
def model(make_model: Make) -> Any:
    return make_model(vocab_size=VOCABULARY, num_token_id=NUM, value_fields=FIELDS, gate_alpha=1.0)


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return encode_rows(TRAINING_ROWS, PROCESSOR, 64, target_fields=FIELDS)


def test_padding_does_not_change_the_loss(model: Any, examples: list[Example]) -> None:
    """Beside a long text, short ones have the sums of losses that they have alone."""
    with torch.no_grad():
        together = model(**Collator(2)(examples), **ONE).loss
        alone = [model(**Collator(2)([one]), **ONE).loss for one in examples]
    torch.testing.assert_close(together, sum(alone), rtol=1e-5, atol=0)


def test_target_field_changes_the_loss(model: Any) -> None:
    def loss(name: str | None) -> float:
        row = {"text": "It costs", "target": 1000.0, "field": name}
        batch = Collator(2)([encoded(row, target_fields=FIELDS)])
        with torch.no_grad():
            return float(model(**batch).loss)

    assert len({round(loss(name), 4) for name in (None, "price", "age")}) == 3


def test_data_loader_batches_fit_the_model(model: Any, examples: list[Example]) -> None:
    loader = DataLoader(examples, batch_size=2, collate_fn=Collator(2))
    shapes = [tuple(batch["input_ids"].shape) for batch in loader]
    assert [rows for rows, _ in shapes] == [2, 2, 1]
    assert all(model(**batch).loss.isfinite() for batch in loader)
