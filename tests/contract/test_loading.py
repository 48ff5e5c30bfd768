"""Loading: the weights of the file, all of them and no others, or an error that names them."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, Qwen2ForCausalLM
from transformers.utils import logging

from causal_qwen import CausalQwenForCausalLM
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import convert
from causal_qwen.conversion.opening import open_model
from causal_qwen.numpy_engine import Engine

CAUSAL: dict[str, Callable[[Path], Any]] = {
    "from_pretrained": CausalQwenForCausalLM.from_pretrained,
    "AutoModelForCausalLM": AutoModelForCausalLM.from_pretrained,
    "open_model": open_model,
    "Engine": Engine.from_pretrained,
}
PLAIN: dict[str, Callable[[Path], Any]] = {
    "from_pretrained": CausalQwenForCausalLM.from_pretrained,
    "convert": lambda path: convert(path, path.parent / "out"),
    "from_qwen": lambda path: CausalQwenForCausalLM.from_qwen(path),
    "Engine": Engine.from_pretrained,
}
LOADERS = [("causal", name) for name in CAUSAL] + [("plain", name) for name in PLAIN]
every_loader = pytest.mark.parametrize(("kind", "name"), LOADERS)


@pytest.fixture
def places(tiny_directory: Path, tmp_path: Path) -> dict[str, Path]:
    """Copies of a converted model and of its plain base."""
    return {
        "causal": copy_of(tiny_directory, tmp_path / "causal"),
        "plain": copy_of(tiny_directory.parent / "base", tmp_path / "plain"),
    }


def copy_of(directory: Path, place: Path) -> Path:
    return Path(shutil.copytree(directory, place))


def refused(kind: str, name: str, directory: Path, message: str) -> None:
    loader = (CAUSAL if kind == "causal" else PLAIN)[name]
    with pytest.raises(ValueError, match=message) as caught:
        loader(directory)
    assert str(directory) in str(caught.value)
    assert not (directory.parent / "out").exists()


def rewrite(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def configure(directory: Path, file: str = "config.json", **fields: Any) -> None:
    path = directory / file
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**saved, **fields}), encoding="utf-8")


# ---------------------------------------------------------------- which tensors


@every_loader
def test_missing_tensor_is_refused_by_name(kind: str, name: str, places: dict[str, Path]) -> None:
    rewrite(places[kind], lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(kind, name, places[kind], r"lacks model\.layers\.1\.mlp\.up_proj\.weight;")


@every_loader
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(
    kind: str, name: str, value: float, places: dict[str, Path]
) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.o_proj.weight"][3, 4] = value
        tensors["model.norm.weight"][5] = value

    rewrite(places[kind], spoil)
    names = r"model\.(norm|layers\.0\.self_attn\.o_proj)\.weight"
    refused(kind, name, places[kind], rf"NaN or infinity in {names}, {names}")


def test_converted_model_without_its_causal_parameters_is_refused(places: dict[str, Path]) -> None:
    def drop(tensors: dict[str, Any]) -> None:
        for key in [key for key in tensors if key.startswith(("abduction", "action", "decision"))]:
            del tensors[key]

    rewrite(places["causal"], drop)
    for name in CAUSAL:
        refused("causal", name, places["causal"], r"lacks abduction\.loc\.")


def test_head_that_differs_from_the_embeddings_it_is_tied_to_is_read(
    places: dict[str, Path],
) -> None:
    """As transformers reads it, on both engines."""

    def untie(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).clone()

    rewrite(places["plain"], untie)
    ids = [5, 6, 7]
    with torch.no_grad(), quiet():
        theirs = Qwen2ForCausalLM.from_pretrained(places["plain"])(torch.tensor([ids])).logits
        ours = CausalQwenForCausalLM.from_pretrained(places["plain"])(torch.tensor([ids])).logits
    assert torch.equal(ours[..., : theirs.shape[-1]], theirs)
    numpy = Engine.from_pretrained(places["plain"]).logits(ids)
    assert np.allclose(numpy, theirs[0].numpy(), atol=1e-4)


def test_backbone_alone_is_loaded(places: dict[str, Path]) -> None:
    whole = CausalQwenForCausalLM.from_pretrained(places["causal"]).model.state_dict()
    backbone = AutoModel.from_pretrained(places["causal"])
    assert all(torch.equal(tensor, whole[name]) for name, tensor in backbone.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_tensor_has_its_type_however_the_model_was_converted(
    places: dict[str, Path], dtype: torch.dtype
) -> None:
    loaded = CausalQwenForCausalLM.from_pretrained(places["causal"], dtype=dtype)
    moved = CausalQwenForCausalLM.from_pretrained(places["causal"]).to(dtype)
    types = {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    assert types == {name: tensor.dtype for name, tensor in moved.state_dict().items()}
    assert types["lm_head.weight"] == types["abduction.loc.weight"] == dtype
    assert types["decision.threshold"] == types["action.b_noise"] == torch.float32
    assert types["decision.word_edges"] == torch.uint8  # a mask, in every precision


# ---------------------------------------------------------------- what keeps working


def test_stored_copy_of_a_tied_head_and_old_rotary_buffers_are_accepted(
    places: dict[str, Path],
) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    rewrite(places["plain"], add)
    for load in PLAIN.values():
        load(places["plain"])


def test_tensors_in_memory_load_if_complete(places: dict[str, Path]) -> None:
    model = CausalQwenForCausalLM.from_pretrained(places["causal"])
    state = dict(model.state_dict())
    again = CausalQwenForCausalLM.from_pretrained(None, config=model.config, state_dict=state)
    assert all(torch.equal(again.state_dict()[name], state[name]) for name in state)
    del state["decision.threshold"]
    with pytest.raises(ValueError, match=r"state_dict lacks decision\.threshold"):
        CausalQwenForCausalLM.from_pretrained(None, config=model.config, state_dict=state)


def test_transformers_own_class_reads_a_converted_model(places: dict[str, Path]) -> None:
    with quiet():
        plain = Qwen2ForCausalLM.from_pretrained(places["causal"])
    ours = CausalQwenForCausalLM.from_pretrained(places["causal"])
    assert torch.equal(plain.model.norm.weight, ours.model.norm.weight)


def test_model_in_the_hub_cache_is_checked_too(places: dict[str, Path], tmp_path: Path) -> None:
    commit, repository = "a" * 40, tmp_path / "cache" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = copy_of(places["causal"], repository / "snapshots" / commit)
    options = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    CausalQwenForCausalLM.from_pretrained("org/tiny", **options)
    configure(snapshot, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.2\."):
        CausalQwenForCausalLM.from_pretrained("org/tiny", **options)
    with pytest.raises(FileNotFoundError, match="org/other is neither"):
        CausalQwenForCausalLM.from_pretrained("org/other", **options)


# ---------------------------------------------------------------- settings


def test_fields_given_to_a_plain_checkpoint_replace_those_of_conversion(
    places: dict[str, Path],
) -> None:
    given = {"threshold_context": "none", "compat_loss_weight": 3.0}
    model = CausalQwenForCausalLM.from_pretrained(places["plain"], **given)
    assert {name: getattr(model.config, name) for name in given} == given


def test_code_of_other_directories_is_neither_run_nor_asked_for(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any) -> str:
        raise AssertionError("the user was asked whether to run code")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr("signal.alarm", asked)
    trap = places["plain"].parent / "ran"
    code = f"import pathlib; pathlib.Path({str(trap)!r}).touch()\n"
    for directory in places.values():
        (directory / "own.py").write_text(code, encoding="utf-8")
        configure(directory, auto_map={"AutoConfig": "own.A", "AutoModelForCausalLM": "own.B"})
        names = {"auto_map": {"AutoTokenizer": ["own.C", "own.C"]}, "tokenizer_class": "Own"}
        configure(directory, "tokenizer_config.json", **names)
    for kind, directory in places.items():
        for load in (CAUSAL if kind == "causal" else PLAIN).values():
            with contextlib.suppress(ValueError):
                load(directory)
    assert not trap.exists()


# ---------------------------------------------------------------- GGUF


@pytest.fixture
def gguf(tmp_path: Path) -> Callable[..., Path]:
    """`gguf(layers=1, **metadata)`: a file of a tiny Llama, without a tokenizer."""
    writer = pytest.importorskip("gguf")

    def make(
        change: Callable[[dict[str, Any]], Any] = lambda tensors: None, **metadata: Any
    ) -> Path:
        numbers = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e4}
        numbers = {name: metadata.pop(name, number) for name, number in numbers.items()}
        nested = metadata.pop("nested", None)
        sizes = {"block_count": 1, "embedding_length": 32, "feed_forward_length": 48} | metadata
        file = writer.GGUFWriter(tmp_path / "tiny.gguf", "llama")
        for name, size in sizes.items():
            file.add_uint32(f"llama.{name}", size)
        file.add_uint32("llama.context_length", 64)
        file.add_uint32("llama.vocab_size", 97)
        file.add_uint32("llama.attention.head_count", 4)
        file.add_uint32("llama.attention.head_count_kv", 2)
        for name, number in numbers.items():
            file.add_float32(f"llama.{name}", number)
        if nested is not None:
            file.add_array("llama.nested", nested)
        generator = np.random.default_rng(0)
        shapes = {"token_embd": (97, 32), "output_norm": (32,)}
        parts = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32)}
        parts |= {"attn_output": (32, 32), "attn_norm": (32,), "ffn_norm": (32,)}
        parts |= {"ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48)}
        shapes |= {f"blk.0.{name}": shape for name, shape in parts.items()}
        tensors = {
            f"{name}.weight": generator.standard_normal(shape, np.float32)
            for name, shape in shapes.items()
        }
        change(tensors)
        for name, tensor in tensors.items():
            file.add_tensor(name, tensor)
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()
        return tmp_path / "tiny.gguf"

    return make


def test_whole_gguf_file_is_converted(gguf: Callable[..., Path], tmp_path: Path) -> None:
    report = convert(gguf(), tmp_path / "out")
    assert report.standard_agreement == 1
    model = CausalQwenForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.num_hidden_layers == 1


# ---------------------------------------------------------------- silence and LoRA


def test_silence_lasts_until_the_last_thread_leaves_it() -> None:
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with quiet():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with quiet():
        thread.start()
        inside.wait(10)
    assert logging.get_verbosity() == logging.ERROR  # the other thread is still inside
    assert not logging.is_progress_bar_enabled()
    leave.set()
    thread.join()
    assert logging.get_verbosity() == verbosity
    assert logging.is_progress_bar_enabled() == has_bars
