"""Bad input gets one sentence that names the thing, and leaves nothing half-written."""

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


def test_another_architecture_is_named_when_loading(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match="architecture 'gpt2'"):
        CausalQwenForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="architecture 'gpt2'; only Qwen2 and Llama"):
        convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_truncated_weights_file_is_named(base: Path, tmp_path: Path) -> None:
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for attempt in (
        lambda: CausalQwenForCausalLM.from_pretrained(base),
        lambda: convert(base, tmp_path / "out"),
    ):
        with pytest.raises(ValueError, match=r"base is damaged or truncated .* fetch it again"):
            attempt()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_weights_of_nan_are_refused_by_name() -> None:
    qwen = Qwen2ForCausalLM(Qwen2Config(**TINY))
    qwen.model.layers[0].mlp.up_proj.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj\.weight holds NaN"):
        CausalQwenForCausalLM.from_qwen(qwen)


def test_pickled_weights_are_never_read(base: Path) -> None:
    (base / "model.safetensors").unlink()
    torch.save(Qwen2ForCausalLM(Qwen2Config(**TINY)).state_dict(), base / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        CausalQwenForCausalLM.from_pretrained(base)


def test_an_existing_directory_is_not_overwritten_unasked(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "precious.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="out exists and is not empty"):
        convert(base, output)
    assert (output / "precious.txt").read_text() == "mine"
    convert(base, output, overwrite=True)
    assert (output / "config.json").is_file()
    assert not (output / "precious.txt").exists()


def test_nothing_is_written_over_the_directory_one_works_in_nor_over_a_file(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "precious.txt"
    file.write_text("mine")
    monkeypatch.chdir(tmp_path)
    for output in (Path(), tmp_path, tmp_path.parent):
        with pytest.raises(ValueError, match="holds the directory you are in"):
            convert(base, output, overwrite=True)
    with pytest.raises(NotADirectoryError, match=r"precious\.txt is a file"):
        convert(base, file, overwrite=True)
    assert file.read_text() == "mine"


def test_an_unwritable_place_is_said_and_left_alone(base: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(PermissionError, match="cannot be written"):
        convert(base, blocked / "out")
    assert blocked.read_text() == "not a directory"


def test_a_failure_while_saving_leaves_nothing_behind(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(self: Any, directory: Path, **_: Any) -> None:
        (Path(directory) / "half.safetensors").write_bytes(b"half")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(CausalQwenForCausalLM, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space left"):
        convert(base, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_a_llama_that_has_no_qwen2_equivalent_is_refused() -> None:
    llama = LlamaForCausalLM(LlamaConfig(**TINY, mlp_bias=True))
    with pytest.raises(ValueError, match="mlp_bias=True has no Qwen2 equivalent"):
        CausalQwenForCausalLM.from_qwen(llama)


def test_a_converted_model_is_not_converted_again(base: Path, tmp_path: Path) -> None:
    convert(base, tmp_path / "once")
    with pytest.raises(ValueError, match="is a CausalQwen model already"):
        convert(tmp_path / "once", tmp_path / "twice")


def test_an_unknown_initialisation_is_named() -> None:
    with pytest.raises(ValueError, match="init='random' is unknown"):
        convert_model(
            Qwen2ForCausalLM(Qwen2Config(**TINY)), model_class=CausalQwenForCausalLM, init="random"
        )


def test_a_missing_gguf_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no GGUF file .*nowhere\.gguf"):
        convert(tmp_path / "nowhere.gguf", tmp_path / "out")
