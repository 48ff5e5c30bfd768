"""Adapters, quantised weights and other tasks: what plain Qwen2 can do, our model can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from _tiny import NUM, make_causal
from transformers import AutoModelForSequenceClassification

from causal_qwen import CausalQwenForCausalLM
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.families import BY_BASE

MODES = ("standard", "sampling", "causal", "compatible")
IDS = torch.randint(NUM, (2, 9), generator=torch.Generator().manual_seed(0))


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
    model = make_causal(base)
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


@pytest.mark.ecosystem("prompt tuning, then generate in four modes", "works")
@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # PEFT's, for any model
@pytest.mark.parametrize("number", [None, NUM])
def test_prompt_tuning_trains_and_generates_in_every_mode(number: int | None) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    adapted = peft.get_peft_model(make_causal(num_token_id=number), config)
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
    model = make_causal(base, num_token_id=NUM)
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


@pytest.mark.ecosystem("a generation_config with temperature where nothing is drawn", "works")
@pytest.mark.parametrize("mode", ["standard", "compatible", None])
def test_a_temperature_without_draws_is_left_out_and_named(
    mode: str | None, tmp_path: Path, caplog: Any
) -> None:
    """Hugging Face saves it beside do_sample=True only, which would be another mode here."""
    model = make_causal()
    config = model.generation_config
    config.causal_mode, config.temperature, config.top_p, config.top_k = mode, 0.7, 1.0, 5
    model.save_pretrained(tmp_path)
    said = [one.getMessage() for one in caplog.records if "not saved" in one.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("temperature=0.7, top_k=5 not saved with the generation config:")
    assert (config.temperature, config.top_p, config.top_k, config.do_sample) == (0.7, 1.0, 5, None)
    with quiet():
        again = CausalQwenForCausalLM.from_pretrained(tmp_path)
        again.save_pretrained(tmp_path)
    assert again.resolve_settings().mode == (mode or "standard")
    assert not again.resolve_settings().do_sample
    assert again.generation_config.temperature in (None, 1.0)
    again.generation_config.do_sample, again.generation_config.temperature = True, 0.7
    caplog.clear()
    with quiet():
        again.save_pretrained(tmp_path)
        kept = CausalQwenForCausalLM.from_pretrained(tmp_path)
    assert kept.generation_config.temperature == 0.7
    assert not [one for one in caplog.records if "not saved" in one.getMessage()]


@pytest.mark.ecosystem("bitsandbytes in 8 and 4 bits (where it is installed)", "works")
@pytest.mark.filterwarnings("ignore")  # of bitsandbytes
@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_weights_of_bitsandbytes_choose_and_are_saved(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    plain = make_causal()
    config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    with quiet():
        plain.save_pretrained(tmp_path / "plain")
        model = CausalQwenForCausalLM.from_pretrained(
            tmp_path / "plain", quantization_config=config
        )
    assert type(model.model.layers[0].self_attn.q_proj).__name__.startswith(f"Linear{bits}bit")
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)  # heads stay as they are
    output = model(IDS)
    assert output.logits.isfinite().all()
    read = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 1}
    standard = model.generate(IDS, causal_mode="standard", **read)[:, -1]
    assert torch.equal(standard, model.decision(output.s_dist).argmax(-1)[:, -1])
    for mode in MODES[1:]:
        assert model.generate(IDS, max_new_tokens=3, causal_mode=mode).shape == (2, 12)
    with quiet():
        model.save_pretrained(tmp_path / "saved")
        again = CausalQwenForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(IDS).logits, output.logits)


@pytest.mark.ecosystem("loc_S and U as ONNX, by torch.onnx.export (where it is installed)", "works")
@pytest.mark.filterwarnings("ignore")  # of torch.onnx
@torch.no_grad()
def test_scores_and_individuals_leave_as_onnx(tmp_path: Path) -> None:
    """The lines of docs/ecosystem.md."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")

    class Scores(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            output = self.model(
                input_ids, attention_mask=attention_mask, use_cache=False, output_scale_S=False
            )
            return output.logits, output.loc_U, output.scale_U

    model, axes = make_causal(), {0: "batch", 1: "tokens"}
    names = {"input_names": ["input_ids", "attention_mask"]}
    names |= {"output_names": ["loc_S", "loc_U", "scale_U"]}
    program = torch.onnx.export(
        Scores(model).eval(),
        (IDS, torch.ones_like(IDS)),
        dynamo=True,
        dynamic_shapes=(axes, axes),
        **names,  # type: ignore[arg-type]
    )
    program.save(str(tmp_path / "model.onnx"))
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    for ids in (IDS, IDS[:1, :5]):
        inputs = {"input_ids": ids.numpy(), "attention_mask": torch.ones_like(ids).numpy()}
        output = model(ids)
        expected = (output.logits, output.loc_U, output.scale_U)
        for found, own in zip(session.run(None, inputs), expected, strict=True):
            assert found == pytest.approx(own.numpy(), abs=1e-4)


@pytest.mark.ecosystem("LoRA with PEFT's default target_modules", "works")
@pytest.mark.parametrize("base", ["qwen2", "qwen3", "llama", "mistral"])
def test_lora_has_the_bases_default_targets(base: str) -> None:
    peft = pytest.importorskip("peft")
    table = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert table[f"causal_{base}"] == table[base]
    adapted = peft.get_peft_model(make_causal(base), peft.LoraConfig(r=2))
    assert {*adapted.peft_config["default"].target_modules} == {*table[base]}


@pytest.mark.ecosystem("a generation_config with causal_mode and temperature", "works")
@pytest.mark.parametrize("mode", ["causal", "sampling"])
def test_a_temperature_of_a_noisy_mode_is_saved(mode: str, tmp_path: Path) -> None:
    model = make_causal()
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
