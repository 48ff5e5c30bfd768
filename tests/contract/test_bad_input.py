"""Bad input raises one sentence that names it, and leaves no partial output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from causal_qwen import CausalQwenForCausalLM
from causal_qwen.conversion.convert import convert, convert_model

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    Qwen2ForCausalLM(Qwen2Config(**TINY)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match="gpt2"):
        CausalQwenForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gpt2"):
        convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_truncated_weights_file_is_refused(base: Path, tmp_path: Path) -> None:
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for attempt in (
        lambda: CausalQwenForCausalLM.from_pretrained(base),
        lambda: convert(base, tmp_path / "out"),
    ):
        with pytest.raises(ValueError, match=r"base/model\.safetensors is damaged or truncated"):
            attempt()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_nan_weight_is_refused_by_name() -> None:
    qwen = Qwen2ForCausalLM(Qwen2Config(**TINY))
    qwen.model.layers[0].mlp.up_proj.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"NaN.* in model\.layers\.0\.mlp\.up_proj\.weight"):
        CausalQwenForCausalLM.from_qwen(qwen)


def test_pickled_weights_are_refused(base: Path) -> None:
    (base / "model.safetensors").unlink()
    torch.save(Qwen2ForCausalLM(Qwen2Config(**TINY)).state_dict(), base / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        CausalQwenForCausalLM.from_pretrained(base)


def test_existing_directory_is_overwritten_only_on_request(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "precious.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        convert(base, output)
    assert (output / "precious.txt").read_text() == "mine"
    convert(base, output, overwrite=True)
    assert (output / "config.json").is_file()
    assert not (output / "precious.txt").exists()


def test_working_directory_and_files_are_never_overwritten(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "precious.txt"
    file.write_text("mine")
    monkeypatch.chdir(tmp_path)
    for output in (Path(), tmp_path, tmp_path.parent):
        with pytest.raises(ValueError, match="working directory"):
            convert(base, output, overwrite=True)
    with pytest.raises(NotADirectoryError, match=r"precious\.txt"):
        convert(base, file, overwrite=True)
    assert file.read_text() == "mine"


def test_unwritable_output_is_refused_and_unchanged(base: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(PermissionError, match="out cannot be written"):
        convert(base, blocked / "out")
    assert blocked.read_text() == "not a directory"


def test_failed_save_leaves_no_files(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(self: Any, directory: Path, **_: Any) -> None:
        (Path(directory) / "half.safetensors").write_bytes(b"half")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(CausalQwenForCausalLM, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space left"):
        convert(base, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_llama_without_qwen2_equivalent_is_refused() -> None:
    llama = LlamaForCausalLM(LlamaConfig(**TINY, mlp_bias=True))
    with pytest.raises(ValueError, match="mlp_bias=True"):
        CausalQwenForCausalLM.from_qwen(llama)


def test_converted_model_is_not_converted_again(base: Path, tmp_path: Path) -> None:
    convert(base, tmp_path / "once")
    with pytest.raises(ValueError, match="once is a CausalQwen model"):
        convert(tmp_path / "once", tmp_path / "twice")


def test_unknown_init_is_refused() -> None:
    with pytest.raises(ValueError, match="init='random'"):
        convert_model(
            Qwen2ForCausalLM(Qwen2Config(**TINY)), model_class=CausalQwenForCausalLM, init="random"
        )


def test_missing_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.gguf"):
        convert(tmp_path / "nowhere.gguf", tmp_path / "out")
