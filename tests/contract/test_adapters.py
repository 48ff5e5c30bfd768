"""Adapters, quantised weights and other tasks: what plain Qwen2 can do, our model can."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from causal_qwen import CausalQwen2Config, CausalQwenForCausalLM
from causal_qwen.backbones import classes_of
from causal_qwen.conversion import placement
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.decoding.noise import UNoise
from causal_qwen.families import BY_BASE
from causal_qwen.modeling.action import dense

V, NUM = 97, 96
MODES = ("standard", "sampling", "causal", "compatible")
SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
IDS = torch.randint(NUM, (2, 9), generator=torch.Generator().manual_seed(0))


def make(base: str = "qwen2", **fields: Any) -> Any:
    config, _, kind = classes_of(BY_BASE[base])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return kind(config(**SHAPE | fields)).eval()


def shaken(adapted: Any) -> Any:
    """Adapters that change something."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return adapted


@pytest.mark.ecosystem("LoRA on lm_head and on the number head", "works")
@pytest.mark.parametrize("base", ["qwen2", "granite", "gemma2"])
def test_lora_on_the_head_is_the_merged_head(base: str) -> None:
    """Scores, scales, P, the number and the loss: |W + B A| x, not |W| x + B A x."""
    peft = pytest.importorskip("peft")
    model = make(base, head_dim=8) if base != "qwen2" else make()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head", "action.value"])
    adapted = shaken(peft.get_peft_model(model, config)).eval()
    found = adapted(IDS, labels=IDS)
    found.loss.backward()
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            assert parameter.grad is not None, name
            assert bool(parameter.grad.any()) is ("value" not in name), name  # no number here
    calls = {
        mode: adapted.generate(input_ids=IDS, max_new_tokens=4, causal_mode=mode)
        for mode in ("standard", "compatible")
    }
    spoken = adapted.generate(input_ids=IDS, max_new_tokens=4, causal_mode="causal", individual=3)
    merged = adapted.merge_and_unload()
    with torch.no_grad():
        expected = merged(IDS, labels=IDS)
    for name in ("logits", "scale_S", "loc_Y", "scale_Y", "loss"):
        ours, theirs = getattr(found, name).detach(), getattr(expected, name)
        assert ours == pytest.approx(theirs.numpy(), rel=1e-4, abs=1e-4), name
    for mode, ids in calls.items():
        again = merged.generate(IDS, max_new_tokens=4, causal_mode=mode)
        assert torch.equal(ids, again), mode
    assert torch.equal(
        spoken, merged.generate(IDS, max_new_tokens=4, causal_mode="causal", individual=3)
    )


@pytest.mark.ecosystem("LoRA with PEFT's default target_modules", "works")
@pytest.mark.parametrize("base", ["qwen2", "qwen3", "llama", "mistral"])
def test_lora_has_the_bases_default_targets(base: str) -> None:
    peft = pytest.importorskip("peft")
    table = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert table[f"causal_{base}"] == table[base]
    adapted = peft.get_peft_model(make(base, head_dim=8), peft.LoraConfig(r=2))
    assert {*adapted.peft_config["default"].target_modules} == {*table[base]}


@pytest.mark.ecosystem("prompt tuning, then generate in four modes", "works")
@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # PEFT's, for any model
@pytest.mark.parametrize("number", [None, NUM])
def test_prompt_tuning_trains_and_generates_in_every_mode(number: int | None) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    adapted = peft.get_peft_model(make(num_token_id=number), config)
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    assert adapted.prompt_encoder.default.embedding.weight.grad.any()
    for mode in ("standard", "sampling", "causal", "compatible"):
        found = adapted.generate(
            input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, causal_mode=mode
        )
        assert found.shape == (2, 12), mode


@pytest.mark.ecosystem("AutoModelForSequenceClassification", "works")
@pytest.mark.parametrize("base", ["qwen2", "qwen3", "granite"])
def test_sequence_classification_reads_the_backbone(base: str, tmp_path: Path) -> None:
    model = make(base, num_token_id=NUM)
    with quiet():
        model.save_pretrained(tmp_path)
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(classifier).__name__ == BY_BASE[base].classifier
    assert torch.equal(classifier.model.embed_tokens.weight, model.model.embed_tokens.weight)
    ids = IDS.clone()
    ids[:, 2] = NUM
    values = torch.where(ids == NUM, 7.0, 0.0)
    out = classifier(ids, numeric_values=values, labels=torch.tensor([0, 2]))
    out.loss.backward()
    assert out.logits.shape == (2, 3)
    assert not torch.equal(out.logits, classifier(ids, numeric_values=values * 9).logits)


@pytest.mark.ecosystem("a generation_config with causal_mode and temperature", "works")
@pytest.mark.parametrize("mode", ["causal", "sampling"])
def test_a_temperature_of_a_noisy_mode_is_saved(mode: str, tmp_path: Path) -> None:
    model = make()
    model.generation_config.causal_mode = mode
    model.generation_config.temperature = 0.7
    with quiet():
        model.save_pretrained(tmp_path)
        again = CausalQwenForCausalLM.from_pretrained(tmp_path)
    assert model.generation_config.do_sample is not True
    saved = json.loads((tmp_path / "generation_config.json").read_text("utf-8"))
    assert (saved["causal_mode"], saved["temperature"]) == (mode, 0.7)
    settings = again.resolve_settings()
    assert (settings.mode, settings.temperature) == (mode, 0.7)


class Quantised(torch.Tensor):
    """A weight as torchao's: it multiplies, and every other operation is missing."""

    __module__ = "torchao.stub"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.dequantize() if isinstance(a, cls) else a for a in args]
        if func is torch.nn.functional.linear:
            return func(*plain, **(kwargs or {}))
        if func in (torch.Tensor.abs, torch.abs, torch.mm, torch.Tensor.T.__get__):
            raise NotImplementedError(f"{func} of a quantised weight")
        return super().__torch_function__(func, types, args, kwargs)

    def dequantize(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.ecosystem(
    "a head without an absolute value, as torchao's int8 (a stand-in, or torchao)",
    "works",
)
@torch.no_grad()
def test_a_weight_without_absolute_values_chooses_and_scores() -> None:
    model = make()
    expected = model(IDS)
    spoken = [model.generate(IDS, max_new_tokens=3, causal_mode=mode) for mode in MODES[:1]]
    weight = model.lm_head.weight.data.as_subclass(Quantised)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert type(model.lm_head.weight) is Quantised
    found = model(IDS)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.scale_S, expected.scale_S)
    again = [model.generate(IDS, max_new_tokens=3, causal_mode=mode) for mode in MODES]
    assert torch.equal(again[0], spoken[0])


@torch.no_grad()
def test_int8_weights_of_torchao_choose_and_score() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = CausalQwenForCausalLM(CausalQwen2Config(**SHAPE)).eval()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    output = model(IDS)
    weight = dense(model.lm_head.weight)
    assert type(weight) is torch.Tensor
    scale = model.action.widen(output.u_dist).scale @ weight.abs().T
    assert output.scale_S == pytest.approx(scale.numpy(), rel=1e-3, abs=1e-6)
    for mode in ("standard", "sampling", "causal", "compatible"):
        assert model.generate(IDS, max_new_tokens=3, causal_mode=mode).shape == (2, 12)
    standard = model.generate(IDS, max_new_tokens=1, causal_mode="standard")[:, -1]
    assert torch.equal(standard, model.decision(output.s_dist).argmax(-1)[:, -1])


# ---------------------------------------------------------------- devices


@pytest.mark.ecosystem(
    "forward, loss and noise on one device: nothing of the CPU meets it", "works"
)
@pytest.mark.parametrize("base", ["qwen2", "granite", "gemma2"])
def test_forward_and_loss_create_no_tensor_on_another_device(base: str, monkeypatch: Any) -> None:
    """On the meta device, which refuses tensors of the CPU; checks of values are left out there."""
    model = make(base, num_token_id=NUM, head_dim=8) if base != "qwen2" else make(num_token_id=NUM)
    model.to("meta")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch, "autocast", lambda **_: contextlib.nullcontext())  # not for meta
    ids = IDS.to("meta")
    values = torch.zeros(ids.shape, device="meta")
    noise = UNoise(torch.zeros(2, 32, device="meta"), "scale")
    outputs = model(ids, numeric_values=values, u_noise=noise), model(ids, labels=ids)
    outputs[1].loss.backward()
    both = [pair for output in outputs for pair in output.items()]
    found = {name: one for name, one in both if isinstance(one, torch.Tensor)}
    assert {"loss", "logits", "scale_S", "loc_Y", "shift_S", "shift_Y"} <= {*found}
    assert {one.device.type for one in found.values()} == {"meta"}


def test_devices_and_dtypes_are_resolved_or_refused_in_one_sentence(monkeypatch: Any) -> None:
    monkeypatch.setattr(placement, "_has_accelerator", lambda: False)
    assert placement.resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"device='cuda:1': torch sees no accelerator here; use"):
        placement.resolve_device("cuda:1")
    with pytest.raises(ValueError, match=r"device='gpu' is unknown; use auto, cpu, cuda"):
        placement.resolve_device("gpu")
    monkeypatch.setattr(placement, "_has_accelerator", lambda: True)
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(accelerator, "device_count", lambda: 2)
    assert placement.resolve_device("auto") == torch.device("cuda")
    assert placement.resolve_device("cuda:1") == torch.device("cuda:1")
    assert placement.resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="there are 2 of them, counted from 0"):
        placement.resolve_device("cuda:2")
    with pytest.raises(ValueError, match="'mps': torch sees cuda only"):
        placement.resolve_device("mps")
    assert placement.resolve_dtype("bfloat16") == torch.bfloat16
    assert placement.resolve_dtype() == "auto"
    with pytest.raises(ValueError, match="dtype='half' is unknown"):
        placement.resolve_dtype("half")
