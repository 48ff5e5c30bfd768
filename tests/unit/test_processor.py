"""The processor: text -> ids and values, and back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoProcessor, PreTrainedTokenizerFast
from transformers.utils import TensorType

from causal_qwen.conversion.checkpoint_io import load_tokenizer
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.text.numerals import encode, render

CHAT = (
    "{% for m in messages %}<s>{{ m.role }}:"
    "{% if m.role == 'bot' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
)
SIGNS = {"<s>": "[", "</s>": "]", "<pad>": "_", "<NUM>": "#", "Ġ": " "}


def byte_tokenizer(*idle: str, is_framed: bool = False, **options: Any) -> Any:
    """One token for every byte; <s>, </s> and <pad> are 0, 1 and 2, then come the idle ones."""
    special = ["<s>", "</s>", "<pad>", *idle]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    core.add_special_tokens(special)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if is_framed:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **{**names, **options})


def tiny(*idle: str, **options: Any) -> Any:
    return CausalQwenProcessor(byte_tokenizer(*idle, **options), encode_numbers="value")


TINY = tiny()


def shown(processor: Any, ids: Any) -> str:
    """Ids of a byte tokenizer, one sign each: [a #]__ is framed, has a number and is padded."""
    tokens = processor.tokenizer.convert_ids_to_tokens(list(map(int, ids)))
    return "".join(SIGNS.get(token, token) for token in tokens)


def beside(base: Any, directory: Path, **config: Any) -> Any:
    """The tokenizer, loaded from a directory where a config.json lies beside it."""
    base.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", **config}))
    return PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.fixture(scope="module")
def base() -> Any:
    """The embedded model's tokenizer as it comes, without <NUM>."""
    # transformers reads the whole file, ten seconds long, to learn that it is a Llama
    kind = {"config": {"model_type": "llama"}}
    with pytest.MonkeyPatch.context() as patch:
        name = "transformers.modeling_gguf_pytorch_utils.load_gguf_checkpoint"
        patch.setattr(name, lambda *_, **__: kind)
        return load_tokenizer("smollm2-135m")


@pytest.fixture(scope="module")
def processor(base: Any) -> Any:
    return CausalQwenProcessor(copy.deepcopy(base), encode_numbers="value")


# ---------------------------------------------------------------- text -> ids and values


def test_number_becomes_one_token_with_its_value(processor: Any) -> None:
    inputs = processor("The price is 99.9 euro", return_offsets_mapping=True)
    tokens = processor.tokenizer.convert_ids_to_tokens(inputs.input_ids)
    assert tokens == ["The", "Ġprice", "Ġis", "Ġ", "<NUM>", "Ġeuro"]
    assert inputs.numeric_values == [0.0, 0.0, 0.0, 0.0, 99.9, 0.0]
    assert inputs.attention_mask == [1] * 6
    assert inputs.offset_mapping[3:5] == [(12, 13), (13, 17)]


def test_text_encoding_keeps_digits(processor: Any, base: Any) -> None:
    inputs = processor("It is 99.9", encode_numbers="text")
    tokens = processor.tokenizer.convert_ids_to_tokens(inputs.input_ids)
    assert tokens == ["It", "Ġis", "Ġ", "9", "9", ".", "9"]
    assert inputs.numeric_values == [0.0] * 7
    assert CausalQwenProcessor(copy.deepcopy(base))("It is 99.9") == inputs  # text is the default


@pytest.mark.parametrize(
    ("text", "tokens", "values"),
    [
        ("", "[]", [0, 0]),
        ("7", "[#]", [0, 7, 0]),
        ("a -2.5kg", "[a #kg]", [0, 0, 0, -2.5, 0, 0, 0]),
        ("1,2", "[1,2]", [0] * 5),
        ("3-5", "[#-#]", [0, 3, 0, 5, 0]),
        ("<s>7</s>", "[[#]]", [0, 0, 7, 0, 0]),
        ("<NUM>", "[<NUM>]", [0] * 7),
    ],
)
def test_special_tokens_are_added_once_per_text(
    text: str, tokens: str, values: list[float]
) -> None:
    processor = tiny(is_framed=True)
    inputs = processor(text)
    assert shown(processor, inputs.input_ids) == tokens
    assert inputs.numeric_values == values
    bare = processor(text, add_special_tokens=False)
    assert shown(processor, bare.input_ids) == tokens[1:-1]
    assert bare.numeric_values == values[1:-1]


WORDS = st.sampled_from(
    ["<NUM>", "<|im_end|>", "5", "-2.5e3", "1,234.5", "99.9元", "价格", "é", "kg", ",", " ", "\n"]
)
ANY_TEXT = st.one_of(st.text(), st.lists(WORDS).map("".join))
ASCII_TEXT = st.one_of(st.text(st.characters(max_codepoint=127)), st.lists(WORDS).map("".join))


@given(ANY_TEXT)
@example("literal <NUM> 7 <NUM>")
@example("<gh_stars>7<gh_stars>")
def test_there_are_as_many_number_tokens_as_values(processor: Any, text: str) -> None:
    for reader in (processor, TINY):
        inputs = reader(text, return_offsets_mapping=True)
        columns = list(
            zip(inputs.input_ids, inputs.numeric_values, inputs.offset_mapping, strict=True)
        )
        numbers = [column for column in columns if column[0] == reader.num_token_id]
        expected = encode(text)
        assert tuple(value for _, value, _ in numbers) == expected.values
        assert tuple(text[a:b] for _, _, (a, b) in numbers) == expected.surfaces
        assert all(value == 0 for i, value, _ in columns if i != reader.num_token_id)


@given(ASCII_TEXT.filter(str.isascii))
@example("a 5 b 6")
def test_offsets_cover_the_source_text(text: str) -> None:
    offsets = TINY(text, return_offsets_mapping=True).offset_mapping
    assert "".join(text[start:end] for start, end in offsets) == text


def test_typed_placeholder_is_encoded_as_text(processor: Any) -> None:
    inputs = processor("<NUM> <gh_stars> <|im_end|>")
    tokens = processor.tokenizer.convert_ids_to_tokens(inputs.input_ids)
    assert tokens == ["<", "NUM", ">", "Ġ<", "gh", "_", "stars", ">", "Ġ", "<|im_end|>"]


# ---------------------------------------------------------------- cut and padded together

CUTS: list[tuple[dict[str, Any], str, list[float]]] = [
    ({"truncation": True, "max_length": 4}, "ab #", [0, 0, 0, 12]),
    ({"truncation": True, "max_length": 3}, "ab ", [0, 0, 0]),
    ({"truncation": True, "max_length": 0}, "", []),
    ({"truncation": True, "max_length": 99}, "ab # cd", [0, 0, 0, 12, 0, 0, 0]),
    ({"truncation": True}, "ab # cd", [0, 0, 0, 12, 0, 0, 0]),
    ({"truncation": False, "max_length": 4}, "ab # cd", [0, 0, 0, 12, 0, 0, 0]),
    ({"max_length": 4}, "ab #", [0, 0, 0, 12]),
    ({"truncation": True, "max_length": 4, "side": "left"}, "# cd", [12, 0, 0, 0]),
    ({"truncation": True, "max_length": 3, "side": "left"}, " cd", [0, 0, 0]),
    ({"truncation": True, "max_length": 0, "side": "left"}, "", []),
    ({"truncation": True, "max_length": 99, "side": "left"}, "ab # cd", [0, 0, 0, 12, 0, 0, 0]),
    ({"truncation": True, "max_length": 6, "is_framed": True}, "[ab #]", [0, 0, 0, 0, 12, 0]),
    (
        {"truncation": True, "max_length": 6, "is_framed": True, "side": "left"},
        "[# cd]",
        [0, 12, 0, 0, 0, 0],
    ),
    ({"truncation": True, "max_length": 1, "is_framed": True}, "[", [0]),
]


@pytest.mark.parametrize(("options", "tokens", "values"), CUTS)
def test_truncation_cuts_ids_and_values_together(
    options: dict[str, Any], tokens: str, values: list[float]
) -> None:
    options = dict(options)
    side, is_framed = options.pop("side", "right"), options.pop("is_framed", False)
    processor = tiny(truncation_side=side, is_framed=is_framed)
    inputs = processor("ab 12 cd", **options)
    assert shown(processor, inputs.input_ids) == tokens
    assert inputs.numeric_values == values
    assert inputs.attention_mask == [1] * len(values)


@pytest.mark.parametrize(
    ("options", "rows", "values", "masks"),
    [
        ({}, ["a #", "xy"], [[0, 0, 5], [0, 0]], [[1, 1, 1], [1, 1]]),
        ({"padding": True}, ["a #", "xy_"], [[0, 0, 5], [0, 0, 0]], [[1, 1, 1], [1, 1, 0]]),
        (
            {"padding": True, "padding_side": "left"},
            ["a #", "_xy"],
            [[0, 0, 5], [0, 0, 0]],
            [[1, 1, 1], [0, 1, 1]],
        ),
        (
            {"padding": "max_length", "max_length": 4},
            ["a #_", "xy__"],
            [[0, 0, 5, 0], [0, 0, 0, 0]],
            [[1, 1, 1, 0], [1, 1, 0, 0]],
        ),
        (
            {"padding": "max_length", "truncation": True, "max_length": 2},
            ["a ", "xy"],
            [[0, 0], [0, 0]],
            [[1, 1], [1, 1]],
        ),
    ],
)
def test_padding_fills_ids_values_and_mask_together(
    options: dict[str, Any], rows: list[str], values: Any, masks: Any
) -> None:
    inputs = TINY(["a 5", "xy"], **options)
    assert [shown(TINY, ids) for ids in inputs.input_ids] == rows
    assert inputs.numeric_values == values
    assert inputs.attention_mask == masks


@pytest.mark.parametrize("truncation_side", ["left", "right"])
@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("is_framed", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": True},
        {"padding": "max_length", "max_length": 9},
        {"truncation": True, "max_length": 4},
        {"max_length": 4},
        {"truncation": True, "max_length": 2, "padding": True},
        {"truncation": "longest_first", "max_length": 4, "padding": "max_length"},
        {"add_special_tokens": False, "truncation": True, "max_length": 2},
    ],
)
def test_text_encoding_treats_every_option_as_the_tokenizer_does(
    options: dict[str, Any], is_framed: bool, padding_side: str, truncation_side: str
) -> None:
    plain = byte_tokenizer(
        is_framed=is_framed, padding_side=padding_side, truncation_side=truncation_side
    )
    processor = CausalQwenProcessor(copy.deepcopy(plain))
    texts = ["a 5 bc", "", "<NUM>", "é 7"]
    expected = plain(texts, return_offsets_mapping=True, **options)
    inputs = processor(texts, return_offsets_mapping=True, **options)
    for name in ("input_ids", "attention_mask", "offset_mapping"):
        assert inputs[name] == expected[name]


# ---------------------------------------------------------------- kinds of results


@pytest.mark.parametrize("kind", ["pt", TensorType.PYTORCH])
def test_tensors_are_padded_by_default(kind: Any) -> None:
    inputs = TINY(["a 99.9", "b"], return_tensors=kind)
    assert [shown(TINY, ids) for ids in inputs.input_ids] == ["a #", "b__"]
    assert inputs.input_ids.dtype == inputs.attention_mask.dtype == torch.int64
    assert inputs.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert inputs.numeric_values.dtype == torch.float64
    assert inputs.numeric_values.tolist() == [[0, 0, 99.9], [0, 0, 0]]


# ---------------------------------------------------------------- the id of <NUM>


def test_smollm2_uses_an_unused_token_for_numbers(processor: Any, base: Any) -> None:
    assert base.convert_ids_to_tokens(7) == "<gh_stars>"
    assert processor.num_token_id == 7
    assert processor.tokenizer.convert_ids_to_tokens(7) == "<NUM>"
    assert len(processor.tokenizer) == len(base) == 49152
    assert processor.tokenizer.get_vocab().keys() - base.get_vocab().keys() == {"<NUM>"}
    assert 7 not in processor.tokenizer.all_special_ids


def test_reserved_id_is_preferred_to_an_unused_token(tmp_path: Path) -> None:
    tokenizer = beside(byte_tokenizer("<reserved_0>"), tmp_path, vocab_size=300)
    assert len(tokenizer) == 260
    assert CausalQwenProcessor(tokenizer).num_token_id == 260


def test_unused_token_is_taken_without_reserved_ids(tmp_path: Path) -> None:
    tokenizer = beside(byte_tokenizer("<reserved_0>"), tmp_path, vocab_size=260)
    processor = CausalQwenProcessor(tokenizer, "value")
    assert processor.num_token_id == 3
    assert len(tokenizer) == 260
    assert shown(processor, processor("<reserved_0>5").input_ids) == "<reserved_0>#"


def test_new_id_is_added_without_reserved_ids_and_unused_tokens(tmp_path: Path) -> None:
    assert TINY.num_token_id == 259
    assert len(TINY.tokenizer) == 260
    full = beside(byte_tokenizer(), tmp_path, vocab_size=259)
    assert CausalQwenProcessor(full).num_token_id == 259


def test_token_of_settings_or_chat_template_is_not_unused() -> None:
    assert tiny("<unused0>", "<unused1>", pad_token="<unused0>").num_token_id == 4
    assert tiny("<unused0>", "<unused1>", chat_template="<unused0>").num_token_id == 4
    assert tiny("<start_of_turn>").num_token_id == 260


def test_skipping_special_tokens_does_not_skip_numbers(processor: Any) -> None:
    for reader in (processor, TINY):
        ids = [reader.tokenizer.eos_token_id, reader.num_token_id]
        assert reader.tokenizer.decode(ids, skip_special_tokens=True) == "<NUM>"


def test_replaced_token_is_absent_after_saving_and_loading(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("<unused0>", "<box>", extra_special_tokens=["<unused0>", "<box>"])
    CausalQwenProcessor(tokenizer).save_pretrained(tmp_path)
    again = CausalQwenProcessor.from_pretrained(tmp_path)
    assert again.num_token_id == 3
    assert "<unused0>" not in again.tokenizer.get_vocab()
    assert again.tokenizer.extra_special_tokens == ["<box>"]


# ---------------------------------------------------------------- saved and loaded


@pytest.fixture(scope="module")
def saved(
    processor: Any, make_config: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A directory with the embedded model's processor and a config."""
    directory = tmp_path_factory.mktemp("saved")
    processor.save_pretrained(directory)
    make_config(vocab_size=49152, num_token_id=7).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("loader", [CausalQwenProcessor, AutoProcessor])
def test_saved_processor_encodes_and_decodes_the_same(
    loader: Any, saved: Path, processor: Any
) -> None:
    again = loader.from_pretrained(saved)
    assert isinstance(again, CausalQwenProcessor)
    assert (again.encode_numbers, again.num_token_id) == ("value", 7)
    assert again.chat_template == processor.chat_template
    for text in ("<gh_stars> <NUM> 99.9", "价格是99.9元"):
        inputs = again(text)
        assert inputs == processor(text)
        assert again.decode(inputs.input_ids, inputs.numeric_values) == text


# ---------------------------------------------------------------- chats


def test_chat_template_encodes_values(processor: Any, base: Any) -> None:
    chat = [{"role": "user", "content": "Is 5 more than 3.5?"}]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(chat, add_generation_prompt=True, **options)
    is_number = inputs.input_ids == 7
    assert inputs.numeric_values[is_number].tolist() == [5, 3.5]
    assert not inputs.numeric_values[~is_number].any()
    prompt = base.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert processor.decode(inputs.input_ids, inputs.numeric_values) == [prompt]


def test_chat_template_returns_the_assistant_mask() -> None:
    processor = tiny(chat_template=CHAT)
    chat = [{"role": "me", "content": "12"}, {"role": "bot", "content": "34 x"}]
    inputs = processor.apply_chat_template(
        chat,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
    )
    written = inputs.input_ids[torch.as_tensor(inputs["assistant_masks"]) == 1]
    assert shown(processor, written) == "# x"


# ---------------------------------------------------------------- ids and values -> text

NUMBERS = st.builds(
    lambda digits, exponent: float(f"{digits}e{exponent}"),
    st.integers(-999_999, 999_999),
    st.integers(-12, 12),
)


@given(st.lists(NUMBERS, min_size=1), st.sampled_from([" and ", " kg, ", "元是", "\n", " <NUM> "]))
def test_decoding_restores_numbers_of_six_digits(
    processor: Any, numbers: list[float], between: str
) -> None:
    text = between + between.join(map(render, numbers)) + " kg"
    for reader in (processor, TINY):
        inputs = reader(text)
        written = reader.decode(inputs.input_ids, inputs.numeric_values)
        assert written == text
        assert encode(written).values == tuple(numbers)


@given(ANY_TEXT)
def test_decoding_restores_every_text_encoded_as_text(text: str) -> None:
    inputs = TINY(text, encode_numbers="text")
    assert TINY.decode(inputs.input_ids) == text


@pytest.mark.parametrize("kind", [torch.tensor, np.asarray, list, tuple])
def test_ids_and_values_decode_from_lists_arrays_and_tensors(kind: Any) -> None:
    inputs = TINY("a 5 b 0.25")
    ids, values = kind(inputs.input_ids), kind(inputs.numeric_values)
    assert TINY.decode(ids, values) == "a 5 b 0.25"
    assert TINY.batch_decode([ids, ids[:3]], [values, values[:3]]) == ["a 5 b 0.25", "a 5"]
    assert TINY.decode([ids, ids[:3]], [values, values[:3]]) == ["a 5 b 0.25", "a 5"]


def test_digits_set_the_precision_of_written_numbers() -> None:
    inputs = TINY("x = 3.14159265")
    both = (inputs.input_ids, inputs.numeric_values)
    assert TINY.decode(*both) == "x = 3.14159"
    assert TINY.decode(*both, digits=3) == "x = 3.14"
    assert TINY.decode(*both, digits=17) == "x = 3.1415926500000002"
    assert TINY.batch_decode([both[0]], [both[1]], digits=2) == ["x = 3.1"]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("The price is", "The price is "),
        ("Its mass (in %):", "Its mass (in %): "),
        ("The price is ", "The price is "),
        ("It costs $", "It costs $"),
        ("f(", "f("),
        ("价格是", "价格是"),
        ("", ""),
    ],
)
def test_ask_adds_the_space_before_the_next_number(text: str, asked: str) -> None:
    assert TINY.ask(text) == asked


# ---------------------------------------------------------------- bad input


def test_decoding_a_number_without_a_value_raises() -> None:
    ids = TINY("a 5").input_ids
    with pytest.raises(ValueError, match=r"token_ids\[2\] is <NUM>"):
        TINY.decode(ids)


def test_processor_of_another_model_raises(make_config: Callable[..., Any]) -> None:
    TINY.check(make_config(vocab_size=260, num_token_id=259))
    TINY.check(make_config(vocab_size=300, num_token_id=259))
    for fields in (
        {"vocab_size": 300, "num_token_id": 7},
        {"vocab_size": 300, "num_token_id": None},
    ):
        with pytest.raises(ValueError, match="<NUM> at 259"):
            TINY.check(make_config(**fields))
    with pytest.raises(ValueError, match=r"261 tokens .* 97"):
        tiny("<unused0>", "<unused1>").check(make_config(vocab_size=97, num_token_id=3))


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("It is 2", "", "It is 2 5"),
        ("costs 3.", "", "costs 3. 5"),
        ("It is ", "0 kg", "It is 5 0 kg"),
        ("x", ".5", "x5 .5"),
        ("x ", "e5", "x 5 e5"),
        ("a ", ", b.", "a 5, b."),
    ],
)
def test_generated_number_is_separated_from_digits(
    processor: CausalQwenProcessor, before: str, after: str, text: str
) -> None:
    parts = [processor.tokenizer(part).input_ids for part in (before, after)]
    ids = [*parts[0], processor.num_token_id, *parts[1]]
    values = [5.0 if token == processor.num_token_id else 0.0 for token in ids]
    assert processor.decode(ids, values) == text


def test_adjacent_generated_numbers_are_separated(processor: CausalQwenProcessor) -> None:
    number = processor.num_token_id
    assert processor.decode([number, number], [5.0, 7.0]) == "5 7"
    ids = processor("1,2,3", encode_numbers="value")["input_ids"]
    assert processor.decode(ids, [1.0, 0.0, 2.0, 0.0, 3.0]) == "1,2,3"
