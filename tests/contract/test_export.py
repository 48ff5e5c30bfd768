"""Ways out: a plain checkpoint, a GGUF file, and no silent loss of W_loc."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from typer.testing import CliRunner

from causal_qwen import CausalQwenForCausalLM, CausalQwenProcessor
from causal_qwen.backbones import base_class, classes_of
from causal_qwen.cli.program import app
from causal_qwen.conversion.checkpoint_io import load_tokenizer, quiet
from causal_qwen.conversion.export import export, plain_model
from causal_qwen.families import BY_BASE, MARK, TRAINED
from causal_qwen.numpy_engine import Engine

V = 320
SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
OWN = {"qwen3": {"head_dim": 128}, "granite": {"logits_scaling": 3.0}, "llama": {"head_dim": 32}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["<end>", *alphabet, "th", "Ġth"])}
    core = Tokenizer(models.BPE(vocabulary, merges=[("t", "h"), ("Ġ", "th")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any, tokenizer: Any) -> Callable[..., Path]:
    """`saved(base, is_trained)`: a directory with a causal model and its tokenizer."""
    made: dict[tuple[str, bool], Path] = {}

    def make(base: str = "qwen2", is_trained: bool = False) -> Path:
        if (base, is_trained) not in made:
            made[base, is_trained] = path = tmp_path_factory.mktemp(base)
            save(base, is_trained, path)
        return made[base, is_trained]

    def save(base: str, is_trained: bool, path: Path) -> None:
        kind = base_class(BY_BASE[base])
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(5)
            plain = kind(kind.config_class(**SHAPE, **OWN.get(base, {}))).eval()
            model = classes_of(BY_BASE[base])[2].from_qwen(plain, tokenizer=tokenizer)
            if is_trained:
                with torch.no_grad():
                    model.abduction.loc.weight += 0.05 * torch.randn(64, 64)
            model.save_pretrained(path)
            CausalQwenProcessor(tokenizer).save_pretrained(path)

    return make


def ids() -> torch.Tensor:
    return torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.ecosystem(
    "export to a plain checkpoint, trained or not; AutoModelForCausalLM without our code", "works"
)
@pytest.mark.parametrize("base", ["qwen2", "qwen3", "granite"])
@pytest.mark.parametrize("is_trained", [False, True])
@torch.no_grad()
def test_plain_export_has_our_scores_as_logits(
    saved: Any, tmp_path: Path, base: str, is_trained: bool
) -> None:
    path = saved(base, is_trained)
    report = export(path, tmp_path / "out")
    with quiet():
        ours = CausalQwenForCausalLM.from_pretrained(path)(ids()).logits
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(plain) is base_class(BY_BASE[base])
    assert report.is_folded is is_trained
    assert plain.config.tie_word_embeddings is not is_trained
    if is_trained:
        assert plain(ids()).logits == pytest.approx(ours.numpy(), abs=2e-5)
    else:
        assert torch.equal(plain(ids()).logits, ours)
    assert report.max_logit_difference < 2e-5
    assert report.same_choices == 1
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {*report.files}
    fields = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert "auto_map" not in fields
    assert "causal_size" not in fields
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text("utf-8"))
    assert "noise_gain" not in settings


@torch.no_grad()
def test_a_constant_of_the_scores_is_folded_as_well_as_possible(saved: Any) -> None:
    with quiet():
        model = CausalQwenForCausalLM.from_pretrained(saved("qwen2", True)).eval()
        model.abduction.loc.bias += 0.1 * torch.randn(
            64, generator=torch.Generator().manual_seed(1)
        )
        texts = [ids()[0]]
        plain = plain_model(model, texts)
    ours, theirs = model(texts[0][None]).logits, plain(texts[0][None]).logits
    beta = model.lm_head.weight @ model.abduction.loc.bias
    assert (ours - theirs).abs().mean() < 0.2 * beta.abs().mean()


@pytest.mark.ecosystem("a trained directory opened by the base's own class", "works")
@pytest.mark.parametrize("base", ["qwen2", "qwen3", "granite"])
def test_config_of_a_trained_checkpoint_is_plain_and_says_what_is_trained(
    saved: Any, base: str, tmp_path: Path
) -> None:
    """The base's own class leaves W_loc out, and says so."""
    path = saved(base, True)
    fields = json.loads((path / "config.json").read_text("utf-8"))
    assert fields["hidden_act"] == "silu"
    assert fields[MARK] == TRAINED
    with quiet():
        _, info = base_class(BY_BASE[base]).from_pretrained(path, output_loading_info=True)
        model = CausalQwenForCausalLM.from_pretrained(path)
        auto = AutoModelForCausalLM.from_pretrained(path)
    assert "abduction.loc.weight" in info["unexpected_keys"]
    assert model.config.hidden_act == auto.config.hidden_act == "silu"
    assert not model.is_plain()
    model.abduction.loc.weight.data.copy_(torch.eye(*model.abduction.loc.weight.shape))
    model.abduction.loc.bias.data.zero_()
    model.save_pretrained(tmp_path)
    assert MARK not in (tmp_path / "config.json").read_text("utf-8")


@torch.no_grad()
def test_numpy_engine_reads_a_trained_checkpoint(saved: Any) -> None:
    path = saved("qwen2", True)
    assert TRAINED in (path / "config.json").read_text("utf-8")
    with quiet():
        expected = CausalQwenForCausalLM.from_pretrained(path)(ids()).logits[0]
    found = Engine.from_pretrained(path).logits(ids()[0].tolist())
    assert found == pytest.approx(expected.numpy(), abs=1e-4)


@pytest.mark.ecosystem("GGUF of Qwen2, Qwen3 and Llama, read back by transformers", "works")
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("base", ["qwen2", "qwen3", "llama"])
@torch.no_grad()
def test_gguf_file_is_read_back(saved: Any, tmp_path: Path, base: str, is_trained: bool) -> None:
    path = saved(base, is_trained)
    export(path, tmp_path / "out", to="gguf", dtype="f32")
    with quiet():
        ours = CausalQwenForCausalLM.from_pretrained(path)(ids()).logits
        back = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out",
            gguf_file="model-f32.gguf",
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        ).eval()
    assert back(ids()).logits == pytest.approx(ours.numpy(), abs=2e-5)
    assert (tmp_path / "out" / "Modelfile").read_text() == "FROM ./model-f32.gguf\n"


@pytest.mark.parametrize("has_bos", [True, False])
def test_the_first_token_of_a_text_is_kept_in_a_gguf_file(
    has_bos: bool, saved: Any, tokenizer: Any, tmp_path: Path
) -> None:
    from tokenizers.processors import TemplateProcessing

    own = copy.deepcopy(tokenizer)
    own.bos_token = "<end>"
    if has_bos:
        begin = [("<end>", own.bos_token_id)]
        own.backend_tokenizer.post_processor = TemplateProcessing(
            single="<end> $A", pair="<end> $A <end> $B", special_tokens=begin
        )
    shutil.copytree(saved(), path := tmp_path / "model")
    CausalQwenProcessor(own).save_pretrained(path)
    export(path, tmp_path / "out", to="gguf", dtype="f32")
    found = load_tokenizer(tmp_path / "out" / "model-f32.gguf")
    assert found(" the").input_ids == own(" the").input_ids
    found.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert (again(" the").input_ids[0] == own.bos_token_id) == has_bos


@pytest.mark.ecosystem("GGUF as f16 and q8_0", "works")
@pytest.mark.parametrize(("dtype", "bound"), [("f16", 0.1), ("q8_0", 1.0)])
@torch.no_grad()
def test_gguf_types_round_as_they_say(saved: Any, tmp_path: Path, dtype: str, bound: float) -> None:
    export(saved(), tmp_path / "out", to="gguf", dtype=dtype)
    with quiet():
        back = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out",
            gguf_file=f"model-{dtype}.gguf",
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        ).eval()
        ours = CausalQwenForCausalLM.from_pretrained(saved())(ids()).logits
    assert 0 < (back(ids()).logits - ours).abs().max() < bound


@pytest.mark.ecosystem(
    "GGUF of other families",
    "refused: export --to plain, and use llama.cpp's convert_hf_to_gguf.py",
)
def test_gguf_of_another_family_is_refused_with_the_cure(saved: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'granite'.*qwen2, qwen3.*export --to plain"):
        export(saved("granite"), tmp_path / "out", to="gguf")
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_is_lost(saved: Any, tmp_path: Path) -> None:
    arguments = ["export", str(saved("qwen2", True)), str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    record = json.loads(done.output[done.output.index("{") :])
    assert record["is_folded"] is True
    assert any("number head" in line for line in record["lost"])
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("th").input_ids


@pytest.mark.ecosystem("save_pretrained(push_to_hub=True), upload replaced", "works")
def test_pushing_saves_all_our_files(saved: Any, monkeypatch: Any, tmp_path: Path) -> None:
    pushed: dict[str, Any] = {}

    def push(self: Any, repo_id: str, **options: Any) -> None:
        pushed.update(repo_id=repo_id, **options)

    monkeypatch.setattr(CausalQwenForCausalLM, "push_to_hub", push)
    with quiet():
        model = CausalQwenForCausalLM.from_pretrained(saved())
        model.save_pretrained(tmp_path / "mine", push_to_hub=True, private=True)
    assert pushed == {"repo_id": "mine", "private": True}


@pytest.fixture
def hub(monkeypatch: Any, tmp_path: Path) -> Any:
    """A hub without a network: `files` are what is committed, `card` is what it has already."""
    state = SimpleNamespace(files={}, card=None, repositories=[], options={})

    def create_repo(self: Any, repo_id: str, **options: Any) -> Any:
        state.repositories.append((repo_id, options.get("private")))
        return SimpleNamespace(repo_id=f"someone/{repo_id}")

    def create_commit(self: Any, repo_id: str, operations: Any, **options: Any) -> None:
        state.options = {"repo_id": repo_id, **options}
        for one in operations:
            state.files[one.path_in_repo] = Path(one.path_or_fileobj).read_bytes()

    def download(*args: Any, **kwargs: Any) -> str:
        if state.card is None:
            raise EntryNotFoundError("README.md")
        (tmp_path / "remote.md").write_text(state.card, encoding="utf-8")
        return str(tmp_path / "remote.md")

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr("huggingface_hub.repocard.hf_hub_download", download)
    return state


@pytest.mark.ecosystem("push_to_hub: our files, uploads intercepted", "works")
def test_all_our_files_are_uploaded(saved: Any, hub: Any, tmp_path: Path) -> None:
    with quiet():
        model = CausalQwenForCausalLM.from_pretrained(saved())
        model.save_pretrained(tmp_path / "mine")
        model.push_to_hub("mine", commit_message="first", private=True)
    own = {path.name for path in (tmp_path / "mine").iterdir()}
    assert {*hub.files} == {*own, "README.md"}  # Hugging Face writes a card of its own
    for name in own:
        assert hub.files[name] == (tmp_path / "mine" / name).read_bytes(), name
    assert hub.repositories == [("mine", True)]
    assert (hub.options["repo_id"], hub.options["commit_message"]) == ("someone/mine", "first")


@pytest.mark.parametrize("size", [40, 80])
@torch.no_grad()
def test_a_head_of_another_size_is_folded(saved: Any, size: int) -> None:
    with quiet():
        base = transformers.Qwen2ForCausalLM.from_pretrained(saved())
        model = CausalQwenForCausalLM.from_qwen(base, causal_size=size)
        plain = plain_model(model, [])
    assert plain.lm_head.weight.shape == (V, 64)
    assert plain(ids()).logits == pytest.approx(model(ids()).logits.numpy(), abs=2e-5)


@pytest.mark.ecosystem("an untrained directory opened by the base's own class", "works")
def test_a_converted_checkpoint_is_still_plain(saved: Any) -> None:
    with quiet():
        plain = transformers.Qwen2ForCausalLM.from_pretrained(saved())
        model = CausalQwenForCausalLM.from_pretrained(saved())
    assert model.is_plain()
    assert torch.equal(plain(ids()).logits, model(ids()).logits)


@pytest.mark.ecosystem(
    "trust_remote_code, then save_pretrained: no file of ours is copied", "works"
)
def test_nothing_of_ours_is_copied_beside_the_weights(saved: Any, tmp_path: Path) -> None:
    with quiet():
        model = CausalQwenForCausalLM.from_pretrained(saved())
    type(model).register_for_auto_class("AutoModelForCausalLM")
    type(model.config).register_for_auto_class()
    with quiet():
        model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.py")] == ["causal_qwen_auto.py"]
