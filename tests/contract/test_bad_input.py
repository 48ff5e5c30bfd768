"""Bad input raises one sentence that names it, and leaves no partial output."""

from __future__ import annotations

import os
import threading
import time
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
from causal_qwen.conversion import convert as module
from causal_qwen.conversion.checkpoint_io import load_base
from causal_qwen.conversion.convert import convert, convert_model, default_model
from causal_qwen.outputs import check_output_directory
from causal_qwen.paths import embedded_directory

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
        with pytest.raises(ValueError, match=r"base/?.* is damaged or truncated"):
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
    with pytest.raises(FileExistsError, match=r"did not write: precious\.txt"):
        convert(base, output, overwrite=True)
    (output / "precious.txt").unlink()
    convert(base, output)
    before = (output / "config.json").stat().st_ino
    convert(base, output, overwrite=True)
    assert (output / "config.json").stat().st_ino != before


def test_a_base_model_is_never_overwritten_by_its_conversion(base: Path) -> None:
    before = (base / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"base contains .*base, which is read"):
        convert(base, base, overwrite=True)
    assert (base / "model.safetensors").read_bytes() == before


OUTPUTS = {  # the directory `base` is read; `none` does not exist
    "base": "contains .*base, which is read",
    "base/none/..": "contains .*base, which is read",
    "none/../base": "contains .*base, which is read",
    "link": "contains .*base, which is read",
    "base/..": "contains .*base, which is read",
    "base/none/../..": "contains .*base, which is read",
    "base/none/../../full": "full exists and is not empty",
    "base/none/../../file": "file is a file",
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_path_with_dots_is_decided_before_the_work(
    output: str, overwrite: bool, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = base.parent
    (root / "link").symlink_to("base")
    (root / "full").mkdir()
    (root / "full" / "mine.txt").write_text("precious")
    (root / "file").write_text("precious")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    monkeypatch.setattr(module, "load_base", lambda *_: pytest.fail("the base model was loaded"))
    message = OUTPUTS[output] if "full" not in output or not overwrite else "did not write"
    with pytest.raises((ValueError, OSError), match=message):
        convert(base, f"{root}/{output}", overwrite=overwrite)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_an_output_beside_or_inside_the_base_is_written(base: Path) -> None:
    for output in (base / "none" / ".." / ".." / "model", base / "causal"):
        convert(base, output)
        assert (output.resolve() / "model.safetensors").is_file()


@pytest.fixture
def small_embedded(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model takes the embedded one's place; -> its directory in the cache."""
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "load_base", lambda _, dtype=None: load_base(base, dtype))
    monkeypatch.setattr(module, "load_tokenizer", lambda _: None)
    return embedded_directory()


def test_the_embedded_model_is_converted_once_for_two_processes(
    small_embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits for the first and uses its result."""
    calls: list[Path] = []

    def slow(base: str, output: Path, **options: Any) -> None:
        calls.append(output)
        time.sleep(0.2)
        convert(base, output, **options)

    monkeypatch.setattr(module, "convert", slow)
    threads = [threading.Thread(target=default_model) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert calls == [small_embedded]
    assert (small_embedded / "config.json").is_file()


def test_a_converted_model_has_the_modes_of_the_users_umask(base: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        convert(base, tmp_path / "out")
    finally:
        os.umask(before)
    files = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert files == dict.fromkeys(files, 0o640)


def test_working_directory_and_files_are_never_overwritten(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "precious.txt"
    file.write_text("mine")
    monkeypatch.chdir(tmp_path)
    for output in (Path(), tmp_path, tmp_path.parent):
        with pytest.raises(ValueError, match=r"contains .*base, which is read"):
            convert(base, output, overwrite=True)
        with pytest.raises(ValueError, match="contains the working directory"):
            check_output_directory(output, overwrite=True)
    with pytest.raises(NotADirectoryError, match=r"precious\.txt"):
        convert(base, file, overwrite=True)
    assert file.read_text() == "mine"


def test_unwritable_output_is_refused_and_unchanged(base: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(OSError, match="out cannot be written"):
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


def test_llama_without_qwen2_equivalent_stays_a_llama() -> None:
    llama = LlamaForCausalLM(LlamaConfig(**TINY, mlp_bias=True))
    assert CausalQwenForCausalLM.from_qwen(llama).config.model_type == "causal_llama"


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
