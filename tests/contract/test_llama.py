"""GGUF files: their causal layers, llama.cpp as an engine, and the same model in torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM

import causal_qwen
from causal_qwen.analysis.counterfactual import ChangedToken
from causal_qwen.analysis.verify import verify
from causal_qwen.cli import demo
from causal_qwen.conversion.checkpoint_io import load_gguf, load_tokenizer
from causal_qwen.conversion.gguf_file import write_gguf
from causal_qwen.conversion.opening import make_layer, open_model
from causal_qwen.engines.engine import Row
from causal_qwen.layer import CausalLayer, cached_layer, fingerprint
from causal_qwen.numpy_engine.gguf import SPLITS, GgufFile, GgufHead, read_tokenizer

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

V, USED = 320, 260  # rows of W, and those that have a token
TEXTS = ("the cat sat", "The price is 99.9 euro, isn't it?", "价格是99元\n\n  ok", "")
CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}"
REAL = os.environ.get("CAUSAL_QWEN_GGUF")


def make_tokenizer() -> Any:
    """Qwen's way of splitting, with a token for every byte and two merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|endoftext|>", *alphabet, "th", "Ġth"]
    core = Tokenizer(
        models.BPE({name: k for k, name in enumerate(names)}, [("t", "h"), ("Ġ", "th")])
    )
    core.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLITS["qwen2"] or ""), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    core.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAUSAL_QWEN_CACHE", str(path := tmp_path_factory.mktemp("cache")))
        yield path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A tiny Qwen2 in float32, whose last rows are named [PAD...], as Qwen names them."""
    config = Qwen2Config(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        plain = Qwen2ForCausalLM(config).eval()
        plain.model.embed_tokens.weight.data[USED - 1 :] *= 0.1  # not to be chosen
        plain.lm_head.weight.data[USED - 1 :] *= 0.1
    return write_gguf(plain, make_tokenizer(), tmp_path_factory.mktemp("gguf"), "f32")


@pytest.fixture(scope="module")
def llama(file: Path) -> Any:
    return causal_qwen.open(str(file))


@pytest.fixture(scope="module")
def in_torch(file: Path, llama: Any) -> Any:
    """The same file in torch, after llama.cpp has made its layer."""
    return causal_qwen.open(str(file), "torch", dtype="float32")


def test_a_file_is_opened_by_llama_cpp_where_it_is_installed(llama: Any) -> None:
    assert llama.engine.kind == "llama.cpp"


def test_number_takes_the_first_reserved_row_and_nothing_is_resized(
    file: Path, llama: Any, in_torch: Any
) -> None:
    first = len(make_tokenizer())
    assert llama.engine.num_token_id == in_torch.engine.num_token_id == first
    assert in_torch.model.lm_head.weight.shape[0] == V
    assert make_layer(str(file)).fields["num_token_id"] == first


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_split_as_by_the_original_tokenizer(file: Path, text: str) -> None:
    own = read_tokenizer(GgufFile(file))
    assert own.encode(text).ids == make_tokenizer()(text).input_ids
    assert own.decode(own.encode(text).ids) == text


def test_rows_of_w_are_widened_as_by_transformers(file: Path) -> None:
    expected = load_gguf(file, torch.float32).lm_head.weight.detach().numpy()
    head = GgufHead(GgufFile(file))
    np.testing.assert_array_equal(head.rows(np.array([0, 7, V - 1])), expected[[0, 7, V - 1]])
    np.testing.assert_allclose(head.row_norms(), np.abs(expected).sum(1), rtol=1e-5)
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    np.testing.assert_allclose(head(x), expected @ x, atol=1e-4)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("int8", 0.1)])
def test_the_numpy_engine_reads_the_file(
    file: Path, llama: Any, in_torch: Any, dtype: str, bound: float
) -> None:
    session = causal_qwen.open(str(file), "numpy", dtype=dtype, kernel="numpy")
    assert session.engine.num_token_id == llama.engine.num_token_id
    ids = session.encode("the cat sat").ids
    with torch.no_grad():
        expected = in_torch.model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(session.model.logits(ids) - expected).mean() < bound
    if dtype == "float32":
        text = llama.generate("the cat", 7, max_new_tokens=12).text
        assert session.generate("the cat", 7, max_new_tokens=12).text == text


def test_a_tied_head_is_read_in_int8(tmp_path: Path, cache: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 0}
    plain = Qwen2ForCausalLM(Qwen2Config(vocab_size=V, tie_word_embeddings=True, **sizes, **heads))
    tied = write_gguf(plain.eval(), make_tokenizer(), tmp_path, "f32")
    one, two = (causal_qwen.open(str(tied), "numpy", dtype=kind) for kind in ("float32", "int8"))
    assert np.allclose(one.model.logits([5, 6]), two.model.logits([5, 6]), atol=0.01)


def test_the_numpy_engine_makes_a_layer_of_its_own(
    file: Path, llama: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path))
    session = causal_qwen.open(str(file), "numpy", dtype="float32", kernel="numpy")
    gain = llama.engine.layer.generation["noise_gain"]
    assert session.engine.model.saved["noise_gain"] == pytest.approx(gain, rel=0.02)
    assert cached_layer(fingerprint(file)).exists()


def test_standard_mode_is_greedy(llama: Any, in_torch: Any) -> None:
    own = llama.generate("the cat", max_new_tokens=12, mode="standard")
    assert own.text == in_torch.generate("the cat", max_new_tokens=12, mode="standard").text
    greedy = llama.generate("the cat", max_new_tokens=12, mode="compatible", do_sample=False)
    assert own.text == greedy.text


@pytest.mark.parametrize("mode", ["causal", "sampling"])
@pytest.mark.parametrize("who", [1, 7, 42])
def test_individuals_say_what_they_say_in_torch(
    llama: Any, in_torch: Any, who: int, mode: str
) -> None:
    texts = [
        session.generate("The cat sat", who, mode=mode, max_new_tokens=16).text
        for session in (llama, in_torch)
    ]
    assert texts[0] == texts[1]


def test_individuals_differ(llama: Any) -> None:
    texts = {llama.generate("The cat sat", who, max_new_tokens=16).text for who in range(8)}
    assert len(texts) > 4


def test_softmax_draws_are_those_of_the_numpy_engine_and_repeat(llama: Any) -> None:
    texts = [
        llama.generate("the", mode="compatible", do_sample=True, seed=seed, max_new_tokens=9).text
        for seed in (5, 5, 6)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_rows_that_join_and_leave_say_what_they_say_alone(llama: Any) -> None:
    prompts = ["the cat", "价格", "a", "The king's son said"]
    alone = [
        llama.generate(prompt, who, max_new_tokens=10).text for who, prompt in enumerate(prompts)
    ]
    together = llama.batch(prompts, range(4), max_new_tokens=10)
    assert [text.text for text in together] == alone
    batch, engine = llama.engine.new_batch(), llama.engine
    rows = [
        Row(llama.encode(prompt), {"causal_mode": "causal", "individual": who}, None, 10)
        for who, prompt in enumerate(prompts)
    ]
    rows[0].append(batch.join(rows[:1])[0])
    for row, choice in batch.step():
        row.append(choice)
    for row, choice in zip(rows[1:], batch.join(rows[1:]), strict=True):
        row.append(choice)
    batch.leave(rows[1])
    for row, choice in batch.step():
        row.append(choice)
    for row, text in zip((rows[0], *rows[2:]), (alone[0], *alone[2:]), strict=True):
        assert text.startswith(engine.decode(row.new).rstrip("\ufffd"))
    for row in (rows[0], *rows[2:]):
        batch.leave(row)


def test_a_counterfactual_is_what_the_same_individual_says_after_another_prompt(
    llama: Any, in_torch: Any
) -> None:
    both = llama.counterfactual("the king", "the queen", 7, max_new_tokens=10)
    result = in_torch.counterfactual("the king", "the queen", 7, max_new_tokens=10)
    assert "the king" + both.factual.text == result.factual.text
    assert "the queen" + both.counterfactual.text == result.counterfactual.text
    assert both.to_dict()["factual"]["individual"] == 7
    with pytest.raises(ValueError, match="needs the torch engine"):
        llama.counterfactual("the king", ChangedToken(0, "a"), 7)


def test_a_text_beyond_the_memory_goes_on_without_its_older_half(file: Path) -> None:
    from causal_qwen.engines.llama import LlamaEngine
    from causal_qwen.session import Session

    session = Session(LlamaEngine.open(file, n_ctx=48))
    text = session.generate("the cat sat on the mat", 7, max_new_tokens=90, eos_token_id=None)
    assert len(text.text) > 60 or text.finish == "stop"
    with pytest.raises(ValueError, match=r"has \d+ tokens, and 48 are kept; .*n_ctx="):
        session.generate("the cat " * 20, 7)


def test_the_demo_shows_what_a_file_does(file: Path, capsys: Any) -> None:
    demo.run(causal_qwen.open(str(file)))
    shown = capsys.readouterr().out
    for part in ("word for word the same text", "Four modes", "same noise e", "counterfactual"):
        assert part in shown, part


def test_a_layer_is_made_once_and_kept(file: Path, llama: Any, monkeypatch: Any) -> None:
    place = cached_layer(fingerprint(file))
    assert place.exists()
    monkeypatch.setattr("causal_qwen.engines.llama.calibrated_layer", None)  # not called again
    assert causal_qwen.open(str(file)).generate("the", 3).text == llama.generate("the", 3).text
    place.write_bytes(b"damaged")
    monkeypatch.undo()
    assert causal_qwen.open(str(file)).generate("the", 3).text == llama.generate("the", 3).text


def test_layers_of_torch_and_of_llama_cpp_are_alike(file: Path, llama: Any) -> None:
    own, other = llama.engine.layer, make_layer(str(file))
    assert own.fingerprint == other.fingerprint
    assert own.generation["noise_gain"] == pytest.approx(other.generation["noise_gain"], rel=0.3)
    noise = "action.decision_noise"
    np.testing.assert_allclose(own.tensors[noise], other.tensors[noise], rtol=1e-3, atol=1e-3)
    assert {"abduction.loc.weight", "abduction.scale.weight"}.isdisjoint(other.tensors)
    np.testing.assert_array_equal(
        own.tensors["decision.word_edges"][:USED], other.tensors["decision.word_edges"][:USED]
    )


def test_a_layer_is_a_file_that_names_its_base(
    file: Path, llama: Any, in_torch: Any, tmp_path: Path
) -> None:
    llama.engine.layer.save(path := tmp_path / "own.causal")
    expected = llama.generate("the cat", 7, max_new_tokens=12).text
    for engine in ("auto", "torch"):
        session = causal_qwen.open(
            str(path), engine, dtype="float32" if engine == "torch" else "auto"
        )
        assert session.generate("the cat", 7, max_new_tokens=12).text == expected
    again = CausalLayer.load(path)
    assert again.fields == llama.engine.layer.fields
    assert again.generation == llama.engine.layer.generation


def test_a_layer_of_another_base_is_refused(file: Path, llama: Any, tmp_path: Path) -> None:
    layer = llama.engine.layer
    other = CausalLayer(str(file), "0" * 64, layer.fields, layer.generation, layer.tensors)
    other.save(path := tmp_path / "other.causal")
    for engine in ("auto", "torch"):
        with pytest.raises(ValueError, match=r"was made for .*has other weights"):
            causal_qwen.open(str(path), engine)


def test_an_engine_that_cannot_read_a_model_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'llama.cpp' reads GGUF files only"):
        causal_qwen.open(str(tmp_path), "llama.cpp")


@pytest.mark.parametrize("size", [0, 3, 100, 5000])
def test_a_damaged_file_is_named(file: Path, tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"cut\.gguf is (not a GGUF file|damaged|cut off)"):
        GgufFile(path)


def test_a_plain_directory_keeps_its_layer_in_the_cache(
    file: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    load_gguf(file, torch.float32).save_pretrained(tmp_path / "base")
    load_tokenizer(file).save_pretrained(tmp_path / "base")
    first = open_model(tmp_path / "base")[1]
    monkeypatch.setattr("causal_qwen.conversion.opening.convert_model", None)  # not called again
    again = open_model(tmp_path / "base")[1]
    for (name, one), other in zip(
        first.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
    ours, theirs = first.generation_config.to_dict(), again.generation_config.to_dict()
    assert ours == theirs


def test_a_file_is_verified_layer_by_layer_against_torch(file: Path) -> None:
    result = verify(file, "the cat sat on the mat", max_new_tokens=4)
    assert result.is_passed, result.sentence
    assert [row.name for row in result.stages] == [
        "embedding",
        "layer.0",
        "norm",
        "logits",
        "generated",
    ]
    assert max(row.maximum["numpy_float32"] for row in result.stages) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="CAUSAL_QWEN_GGUF names no real Qwen")
def test_the_real_qwen_speaks_two_languages(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path))
    session = causal_qwen.open(REAL or "")
    assert session.engine.num_token_id == 151_665
    assert session.model.vocabulary == 151_936
    english = session.chat("Write two sentences about the sea.", 2, max_new_tokens=40).text
    chinese = session.chat("用三句话讲一个关于猫的故事。", 1, max_new_tokens=40).text
    assert "sea" in english or "ocean" in english
    assert "猫" in chinese
    assert session.chat("用三句话讲一个关于猫的故事。", 1, max_new_tokens=40).text == chinese
