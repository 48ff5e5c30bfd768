"""Whole words: which tokens continue a word, and how an individual ends one that is begun."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _stability import stability
from _tiny import make_base
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from causal_qwen import CausalQwenForCausalLM
from causal_qwen.analysis.counterfactual import ChangedPrompt, counterfactual
from causal_qwen.analysis.posterior import infer_individual
from causal_qwen.backbones import classes_of
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import convert_model
from causal_qwen.conversion.export import plain_model
from causal_qwen.decoding.settings import resolve_settings
from causal_qwen.decoding.step import Cuts, candidates_along, keep_whole_words
from causal_qwen.families import FAMILIES
from causal_qwen.individuals import Individual
from causal_qwen.numpy_engine import Engine
from causal_qwen.numpy_engine.quantization import quantize
from causal_qwen.options import CONTINUES, LETTER, OPEN, PART
from causal_qwen.text.segmentation import edges_of, word_edges

EDGES = "decision.word_edges"
INNER = CONTINUES | OPEN  # "ing"
NEVER = -np.inf
# tokens:                0 "ing"  1 " go"  2 "."  3 "s "     4 "!"  5 "ed"
VOCABULARY = np.uint8([INNER, OPEN, 0, CONTINUES, 0, INNER])
PROMPT = torch.tensor([[5, 17, 3, 44]])
NEW = 40
CALL = {"causal_mode": "causal", "individual": 7, "noise_gain": 30.0, "min_p": 0.02}


# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor])
def test_inside_of_a_word_only_the_likeliest_token_continues_it(convert: Any) -> None:
    scores = convert([[2.0, 1.0, 3.0, 4.0, 0.0, 5.0]] * 6)
    texts = [[1], [2, 0], [0, 2], [0, 3], [], [1]]
    kept = keep_whole_words(scores, texts, [True] * 5 + [False], convert(VOCABULARY))
    inside, whole = [NEVER, 1, 3, NEVER, 0, 5], [2, 1, 3, 4, 0, 5]
    assert kept.tolist() == [inside, inside, whole, whole, whole, whole]


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor])
def test_a_likeliest_token_that_ends_the_word_leaves_no_way_to_continue_it(convert: Any) -> None:
    scores = convert([[2.0, 1.0, 9.0, NEVER, 0.0, 5.0], [4.0, NEVER, NEVER, NEVER, NEVER, 4.0]])
    kept = keep_whole_words(scores, [[0], [0]], [True, True], convert(VOCABULARY))
    assert kept[0].tolist() == [NEVER, 1, 9, NEVER, 0, NEVER]
    assert kept[1].tolist() == scores[1].tolist()  # equally likely


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor])
def test_a_begun_character_is_continued_by_the_likeliest_token_alone(convert: Any) -> None:
    edges = convert(np.uint8([PART, PART, INNER, 0]))
    likely = convert([[2.0, 1.0, 1.5, 0.5], [1.0, 1.5, 2.0, 0.5], [2.0, 1.0, 1.5, 0.5]])
    kept = keep_whole_words(likely, [[1], [1], [3]], [True] * 3, edges)
    assert kept[0].tolist() == [2, NEVER, NEVER, NEVER]
    assert kept[1:].tolist() == likely[1:].tolist()  # the character is whole, or none is begun


SCORES = st.lists(st.sampled_from([NEVER, -1.0, 0.0, 0.5, 2.0]), min_size=5, max_size=5)
ROWS = st.lists(
    st.tuples(SCORES, st.lists(st.integers(0, 4), max_size=3), st.booleans()),
    min_size=1,
    max_size=4,
)


@given(ROWS, st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_what_is_cut_continues_an_open_word_and_is_not_the_likeliest(
    rows: list[tuple[list[float], list[int], bool]], bits: list[int]
) -> None:
    scores, edges = np.float32([row for row, _, _ in rows]), np.uint8(bits)
    texts, is_asked = [text for _, text, _ in rows], [asked for _, _, asked in rows]
    found = keep_whole_words(scores, texts, is_asked, edges)
    tensors = torch.from_numpy(scores), texts, is_asked, torch.from_numpy(edges)
    np.testing.assert_array_equal(found, keep_whole_words(*tensors).numpy())
    for row, text, asked, kept in zip(scores, texts, is_asked, found, strict=True):
        is_inside = asked and len(text) > 0 and bits[text[-1]] & OPEN
        cut = [is_inside and bits[k] & CONTINUES and row[k] < row.max() for k in range(5)]
        np.testing.assert_array_equal(kept, np.where(cut, NEVER, row))
        assert kept.max() == row.max()  # so no row loses all candidates
    np.testing.assert_array_equal(keep_whole_words(found, texts, is_asked, edges), found)
    nothing = keep_whole_words(scores, texts, is_asked, np.zeros(5, np.uint8))
    np.testing.assert_array_equal(nothing, scores)


def test_words_are_kept_whole_after_min_p_and_before_repetitions_are_avoided() -> None:
    scores = np.log(np.float32([[0.3, 0.05, 0.02, 0.001, 0.029, 0.6]]))
    text = [0, 5, 2, 0, 1]  # the last token is chosen here; "ed" would say "ing" "ed" again
    for cuts, expected in (
        (Cuts(0.04), [0, 1, 4, 5]),
        (Cuts(0.04, VOCABULARY), [1, 4, 5]),
        (Cuts(0.04, VOCABULARY, 2), [1, 4]),
        (Cuts(0.2, VOCABULARY, 2), [5]),  # nothing else is left, and "ing" is no way out
    ):
        found = candidates_along(scores, text, cuts)
        assert np.flatnonzero(found[0] > NEVER).tolist() == expected


# ---------------------------------------------------------------- words and tokens


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("itable", INNER),
        (" inh", OPEN),
        ("s ", CONTINUES),
        (" '", OPEN),
        ("'s", OPEN),
        ("’", OPEN),
        (" I'", OPEN),
        (".", 0),
        ("3", 0),
        ("\n", 0),
        ("", 0),
        ("_name", OPEN),
        ("é", INNER),
        ("e\u0301", INNER),  # a mark on a letter
        ("ость", INNER),
        ("हिन्दी", INNER),
        ("한국", INNER),
        ("العربية", INNER),
        ("中文", 0),
        ("日本語の", 0),
        ("カー", 0),
        ("々", 0),
        ("ｶﾀ", 0),
        ("ภาษาไทย", 0),
        ("ລາວ", 0),
        ("ខ្មែរ", 0),
        ("မြန်မာ", 0),
        ("བོད", 0),
        ("A中", CONTINUES),
        ("中a", OPEN),
        ("❤\ufe0f", 0),
        ("a\ufffd", 0),
        ("\ufffd", 0),
    ],
)
def test_letters_are_those_of_scripts_with_spaces(piece: str, expected: int) -> None:
    assert edges_of(piece) & INNER == expected
    assert edges_of(piece) & PART == PART * ("\ufffd" in piece)
    has_letter = any(map(str.isalpha, piece)) and "\ufffd" not in piece
    assert edges_of(piece) & LETTER == LETTER * has_letter


@given(st.text(alphabet=st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF), min_size=1))
def test_chinese_is_never_inside_of_a_word(piece: str) -> None:
    assert edges_of(piece) == LETTER


def test_the_embedded_tokenizer_knows_its_words(short_directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(short_directory / "tokenizer.json"))
    size = json.loads((short_directory / "config.json").read_text("utf-8"))["vocab_size"]
    edges = word_edges(tokenizer, size)
    saved = load_file(short_directory / "model.safetensors")[EDGES]
    assert saved.dtype == torch.uint8
    np.testing.assert_array_equal(edges, saved.numpy())

    def bits(*pieces: str) -> list[int]:
        ids = [tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces]
        assert all(len(found) == 1 for found in ids), ids
        return [int(edges[found[0]]) & INNER for found in ids]

    assert bits(" inh", "osp", "itable", "ile") == [OPEN, INNER, INNER, INNER]
    assert bits(" I", "'s", "'", " '", ".", "7", "\n") == [OPEN, OPEN, OPEN, OPEN, 0, 0, 0]
    special = [k for k, one in tokenizer.get_added_tokens_decoder().items() if one.special]
    assert special
    assert not edges[special].any()
    pieces = tokenizer.encode("漢", add_special_tokens=False).ids
    assert len(pieces) > 1  # parts of a character
    assert (edges[pieces] == PART).all()
    more = word_edges(tokenizer, size + 3)
    assert more[:size].tolist() == edges.tolist()
    assert not more[size:].any()  # ids without a token


# ---------------------------------------------------------------- models


@pytest.fixture
def model(make_model: Callable[..., Any]) -> Any:
    """A tiny model most of whose tokens are pieces of words; some begin one, some are none."""
    model = make_model()
    ids = torch.arange(model.config.vocab_size)
    edges = torch.where(ids % 5 == 0, 0, torch.where(ids % 3 == 0, OPEN, INNER))
    model.decision.word_edges.copy_(edges)
    model.generation_config.whole_words = True
    return model


def said(model: Any, prompt: torch.Tensor = PROMPT, **options: Any) -> list[int]:
    return model.generate(prompt, **{**CALL, "max_new_tokens": NEW, **options})[0].tolist()


@torch.no_grad()
def test_an_individual_ends_its_words_as_the_likeliest_token_does(model: Any) -> None:
    edges = model.decision.word_edges
    counts = {}
    for whole_words in (False, True):
        ids = said(model, whole_words=whole_words)
        best = model(torch.tensor([ids])).logits[0].argmax(-1)
        places = [
            end
            for end in range(PROMPT.shape[1], len(ids))
            if edges[ids[end - 1]] & OPEN and edges[ids[end]] & CONTINUES
        ]
        counts[whole_words] = sum(int(best[end - 1]) != ids[end] for end in places)
    assert counts[False] > 0
    assert counts[True] == 0


def test_both_engines_and_padded_rows_keep_the_same_words_whole(model: Any, tmp_path: Path) -> None:
    model.generation_config.avoid_repeats = 2
    model.save_pretrained(tmp_path)
    rows = [[5, 17, 3, 44], [9], [44, 6, 9, 44, 12]]
    alone = [said(model, torch.tensor([row]))[len(row) :] for row in rows]
    free = [said(model, torch.tensor([row]), whole_words=False)[len(row) :] for row in rows]
    assert all(one != other for one, other in zip(alone, free, strict=True))
    width = max(map(len, rows))
    ids = torch.tensor([[44] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    batch = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **CALL)
    assert batch[:, width:].tolist() == alone
    options = {name: value for name, value in CALL.items() if name != "causal_mode"}
    for dtype in (None, "float32"):
        engine = Engine.from_pretrained(tmp_path, dtype=dtype)
        for row, expected in zip(rows, alone, strict=True):
            found = engine.generate(row, mode="causal", max_new_tokens=NEW, **options)
            assert found.ids[found.new].tolist() == expected


def test_an_observed_text_has_the_candidates_of_its_own_words(model: Any) -> None:
    settings = {"n": 2, "burn_in": 5, "noise_gain": 30.0, "min_p": 0.02}
    ids = torch.tensor(said(model, max_new_tokens=12))
    found = infer_individual(model, ids[4:], prompt=PROMPT[0], **settings)
    assert found.success_rate == 1.0
    free = torch.tensor(said(model, whole_words=False))
    assert free.tolist()[: len(ids)] != ids.tolist()
    found = infer_individual(model, free[4:], prompt=PROMPT[0], **settings)
    assert not found
    assert "min_p=0.02 and whole_words=True; pass min_p=0, whole_words=False" in found.reason
    few = free[4:16]
    found = infer_individual(model, few, prompt=PROMPT[0], whole_words=False, **settings)
    assert found.success_rate == 1.0


@pytest.mark.parametrize("named", [{}, {"whole_words": True}], ids=["saved", "named"])
def test_each_world_of_a_counterfactual_has_its_own_words(
    model: Any, named: dict[str, bool]
) -> None:
    """Where scales are equal, a choice changes against the odds only if a candidate is lost."""
    model.abduction.scale.weight.data.zero_()
    model.generation_config.whole_words = not named
    options = {"max_new_tokens": NEW, "noise_gain": 30.0, **named}
    violations, changed = 0, 0
    for seed in range(4):
        who = Individual.draw(model, seed=seed)
        same = counterfactual(model, PROMPT, who, ChangedPrompt(PROMPT), **options)
        assert same.divergence is None
        edited = ChangedPrompt(torch.tensor([[5, 17, 3, 45]]))
        found = counterfactual(model, PROMPT, who, edited, **options)
        counted = stability(model, found, **options)
        assert counted.violations == counted.by_candidates
        violations += counted.violations
        free = counterfactual(model, PROMPT, who, edited, **options | {"whole_words": False})
        changed += free.factual.new_ids != found.factual.new_ids
    assert violations > 0
    assert changed > 0


def test_the_saved_rule_is_of_causal_alone_and_others_ask_for_it() -> None:
    saved = {"whole_words": True}
    assert resolve_settings({"causal_mode": "causal"}, saved).whole_words is True
    assert resolve_settings({"causal_mode": "causal"}, {}).whole_words is False
    assert resolve_settings({"causal_mode": "causal"}, {}, config=saved).whole_words is True
    named = {"causal_mode": "causal", "whole_words": False}
    assert resolve_settings(named, saved).whole_words is False
    for mode in ("standard", "sampling", "compatible"):
        assert resolve_settings({"causal_mode": mode}, saved).whole_words is False
        asked = resolve_settings({"causal_mode": mode}, {}, config=saved).whole_words
        assert asked is (mode == "sampling")
        assert resolve_settings({**named, "causal_mode": mode}, saved).whole_words is False
    assert resolve_settings({"causal_mode": "sampling", **saved}, {}).whole_words is True
    for mode in ("standard", "compatible"):
        with pytest.raises(ValueError, match="whole_words= has no effect in mode"):
            resolve_settings({"causal_mode": mode, **saved}, {})
    for wrong in (2, "true"):
        with pytest.raises(ValueError, match=r"whole_words=.* choose one of True, False"):
            resolve_settings({"causal_mode": "causal", "whole_words": wrong}, {})
    assert resolve_settings({"causal_mode": "causal"}, saved).to_dict()["whole_words"] is True


# ---------------------------------------------------------------- files


def test_word_edges_survive_saving_casting_and_sixteen_bits(model: Any, tmp_path: Path) -> None:
    expected = model.decision.word_edges.clone()
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded = CausalQwenForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for moved in (loaded, loaded.half(), loaded.to(torch.bfloat16), loaded.double()):
            assert moved.decision.word_edges.dtype == torch.uint8
            assert torch.equal(moved.decision.word_edges, expected)
    tensors = load_file(tmp_path / "model.safetensors")
    cast = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(cast, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = CausalQwenForCausalLM.from_pretrained(tmp_path).decision.word_edges
    assert found.dtype == torch.uint8
    assert torch.equal(found, expected)
    np.testing.assert_array_equal(Engine.from_pretrained(tmp_path).heads.word_edges, expected)


def test_resizing_keeps_the_edges_of_the_tokens_that_stay(model: Any, tmp_path: Path) -> None:
    before, size = model.decision.word_edges.clone(), model.config.vocab_size
    with quiet():
        model.resize_token_embeddings(size + 14)
    assert model.decision.word_edges.tolist() == [*before.tolist(), *[0] * 14]
    model.save_pretrained(tmp_path)
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.decision.word_edges, model.decision.word_edges)
    assert said(loaded) == said(model)
    model.resize_token_embeddings(size - 20)
    assert torch.equal(model.decision.word_edges, before[:-20])


def test_int8_keeps_the_edges_and_a_plain_model_has_none(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "wide")
    quantize(tmp_path / "wide", tmp_path / "int8")
    for place, dtype in (("int8", None), ("int8", "float32"), ("wide", "int8")):
        engine = Engine.from_pretrained(tmp_path / place, dtype=dtype)
        assert engine.heads.word_edges.dtype == np.uint8
        np.testing.assert_array_equal(engine.heads.word_edges, model.decision.word_edges)
    plain = plain_model(model, [torch.arange(40)])
    assert not any("word_edges" in name for name in plain.state_dict())
    assert not hasattr(plain.generation_config, "whole_words")


@pytest.mark.parametrize("family", FAMILIES, ids=[family.base for family in FAMILIES])
def test_every_family_is_converted_with_the_words_of_its_tokenizer(
    family: Any, byte_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    tokenizer, base = byte_tokenizer(), make_base(family.base)
    with quiet():
        base.resize_token_embeddings(300)
        model = convert_model(base, model_class=classes_of(family)[2], tokenizer=tokenizer)
        model.save_pretrained(tmp_path)
        loaded = CausalQwenForCausalLM.from_pretrained(tmp_path)
    expected = word_edges(tokenizer.backend_tokenizer, 300)
    letters = tokenizer("aZ'", add_special_tokens=False).input_ids
    assert (expected[letters] & INNER).tolist() == [INNER, INNER, OPEN]
    assert ((expected & INNER) > 0).sum() == 53  # of 256 bytes: ASCII letters and the apostrophe
    for one in (model, loaded):
        np.testing.assert_array_equal(one.decision.word_edges, expected)
        assert one.generation_config.whole_words is True
    assert said(loaded, max_new_tokens=5) == said(model, max_new_tokens=5)
