"""Devices and precision: a model elsewhere meets no tensor of the CPU; names of devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _devices import DEVICE, moved, pretending
from _tiny import NUM, make_base, make_causal

from causal_qwen import CausalQwenForCausalLM
from causal_qwen.analysis.counterfactual import ChangedToken, counterfactual
from causal_qwen.analysis.posterior import infer_individual
from causal_qwen.cli import main
from causal_qwen.conversion import placement
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.opening import open_model
from causal_qwen.decoding.noise import UNoise
from causal_qwen.engines.torch import TorchEngine
from causal_qwen.regression.features import Pooling, features
from causal_qwen.regression.regressor import CausalTextRegressor
from causal_qwen.session import Session
from causal_qwen.training.metrics import MetricAccumulator
from causal_qwen.training.run import Run, training_arguments

MODES = ("standard", "sampling", "causal", "compatible")
IDS = torch.randint(NUM, (2, 9), generator=torch.Generator().manual_seed(0))
IDS[:, 4] = NUM
VALUES = torch.where(IDS == NUM, 12.5, 0.0).double()


def twins(base: str = "qwen2", **fields: Any) -> tuple[Any, Any]:
    """The same model here and elsewhere."""
    return make_causal(base, num_token_id=NUM, **fields), moved(
        make_causal(base, num_token_id=NUM, **fields)
    )


def test_a_tensor_of_the_cpu_is_found() -> None:
    """The test of the tests."""
    with pretending():
        there = torch.ones(3, device=DEVICE)
        assert (there.device, (there * 2).device) == (DEVICE, DEVICE)
        assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2]
        assert torch.equal((there + 1).cpu(), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError, match="meets tensors of the CPU"):
            there + torch.ones(3)
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()


@pytest.mark.ecosystem(
    "forward, loss and noise on one device: nothing of the CPU meets it", "works"
)
@pytest.mark.parametrize("base", ["qwen2", "granite", "gemma2"])
def test_forward_and_loss_create_no_tensor_on_another_device(base: str) -> None:
    here, there = twins(base)
    t = torch.full((2, 32), 0.5)
    with torch.no_grad():
        expected = here(IDS, numeric_values=VALUES, u_noise=UNoise(t, "scale"))
    loss = here(IDS, labels=IDS, numeric_values=VALUES).loss
    loss.backward()
    with pretending():
        ids, values = IDS.to(DEVICE), VALUES.to(DEVICE)
        with torch.no_grad():
            found = there(ids, numeric_values=values, u_noise=UNoise(t.to(DEVICE), "scale"))
        for name in ("logits", "scale_S", "loc_Y", "scale_Y", "shift_S", "shift_Y"):
            assert getattr(found, name).device == DEVICE, name
            ours, theirs = getattr(found, name).cpu(), getattr(expected, name)
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), name
        again = there(ids, labels=ids, numeric_values=values).loss
        again.backward()
        assert again.item() == pytest.approx(loss.item(), rel=1e-5)
        gradient = there.abduction.scale.bias.grad
        assert gradient.device == DEVICE
        assert torch.allclose(gradient.cpu(), here.abduction.scale.bias.grad, atol=1e-6)


@pytest.mark.ecosystem("four modes of generation on one device: nothing of the CPU", "works")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("base", ["qwen2", "granite", "gemma2"])
def test_generation_creates_no_tensor_on_another_device(base: str, mode: str) -> None:
    here, there = twins(base)
    options = {"max_new_tokens": 5, "causal_mode": mode, "return_dict_in_generate": True}
    if mode in ("sampling", "causal"):
        options |= {"individual": [3, 4], "noise_gain": 0.6, "persistence": 0.5, "min_p": 0.05}
    expected = here.generate(IDS, numeric_values=VALUES, **options)
    with pretending():
        ids, values = IDS.to(DEVICE), VALUES.to(DEVICE)
        found = there.generate(ids, numeric_values=values, **options)
        assert found.sequences.device == DEVICE
        assert torch.equal(found.sequences.cpu(), expected.sequences)
        assert torch.allclose(found.numeric_values.cpu(), expected.numeric_values)


@torch.no_grad()
def test_metrics_follow_the_model() -> None:
    here, there = twins()
    batch = {"labels": IDS, "numeric_values": VALUES}
    expected = MetricAccumulator(here, replicates=20)
    expected.add(here(IDS, numeric_values=VALUES, skip_logits=True).u_dist, batch)
    with pretending():
        batch = {name: one.to(DEVICE) for name, one in batch.items()}
        found = MetricAccumulator(there, replicates=20)
        output = there(IDS.to(DEVICE), numeric_values=batch["numeric_values"], skip_logits=True)
        found.add(output.u_dist, batch)
    assert found.compute() == pytest.approx(expected.compute(), rel=1e-5)
    assert found.intervals()["nll"] == pytest.approx(expected.intervals()["nll"], rel=1e-5)


def test_features_and_texts_follow_the_model(tiny_directory: Path) -> None:
    processor, here = open_model(tiny_directory)
    there = moved(open_model(tiny_directory)[1])
    texts = ["one ring", "a much longer text of 7 rings"]

    def read(model: Any) -> list[Any]:
        return [
            features(texts, model, processor, max_length=40, poolings=some)
            for some in ((), (Pooling(0.5, "last"), Pooling(1.0, "mean")))
        ]

    expected = read(here)

    def write(model: Any) -> str:
        session = Session(TorchEngine(model, processor))
        return session.generate("The king", 7, max_new_tokens=4).text

    text = write(here)
    edit = ChangedToken(2, 70)
    both = counterfactual(here, "The king", 7, edit, processor=processor, max_new_tokens=4)
    with pretending():
        for one, other in zip(read(there), expected, strict=True):
            assert np.allclose(one, other, atol=1e-5)
        assert write(there) == text
        again = counterfactual(there, "The king", 7, edit, processor=processor, max_new_tokens=4)
        assert again.counterfactual.new_ids == both.counterfactual.new_ids
        assert np.allclose(again.shift_U, both.shift_U, atol=1e-4)


# accelerate warns of a parameter that belongs to no inner module
@pytest.mark.filterwarnings("ignore:The following device_map keys:UserWarning")
@pytest.mark.ecosystem("device_map with layers and the head offloaded to disk", "works")
@pytest.mark.parametrize("away", ["model.layers.1", "lm_head"])
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_an_offloaded_model_chooses_the_same_tokens(away: str, mode: str, tmp_path: Path) -> None:
    here = make_causal(num_token_id=NUM)
    with quiet():
        here.save_pretrained(tmp_path / "saved")
        parts = ("embed_tokens", "value_direction", "layers.0", "layers.1", "norm", "rotary_emb")
        places = {f"model.{part}": "cpu" for part in parts}
        places |= dict.fromkeys(("lm_head", "abduction", "action", "decision"), "cpu")
        there = CausalQwenForCausalLM.from_pretrained(
            tmp_path / "saved",
            device_map={**places, away: "disk"},
            offload_folder=str(tmp_path / "offload"),
        )
    assert any(one.is_meta for one in there.get_submodule(away).parameters())
    who = {"individual": 3, "noise_gain": 0.6} if mode in ("sampling", "causal") else {}
    options: dict[str, Any] = {"max_new_tokens": 4, "causal_mode": mode, **who}
    expected = here.generate(IDS, numeric_values=VALUES, **options)
    assert torch.equal(there.generate(IDS, numeric_values=VALUES, **options), expected)


def offloaded(how: str, here: Any, folder: Path, memory: int | str = "60KB") -> Any:
    """The same model, whose tensors are elsewhere until they are used."""
    accelerate = pytest.importorskip("accelerate")
    here.save_pretrained(folder / "saved")
    load = CausalQwenForCausalLM.from_pretrained
    if how == "auto":
        places: dict[str, Any] = {"device_map": "auto", "max_memory": {"cpu": memory}}
    else:
        places = {"device_map": {"": "disk"}}
    if how == "cpu_offload":
        there = load(folder / "saved")
        accelerate.cpu_offload(there, execution_device="cpu")
        return there
    return load(folder / "saved", offload_folder=str(folder / "offload"), **places)


def check_equal(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Up to rounding: on processors with AVX2 torch adds the terms of small products in an order
    that depends on where the weights begin in memory, and offloaded ones begin elsewhere."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=name)


# accelerate warns of a parameter that belongs to no inner module
@pytest.mark.filterwarnings("ignore:The following device_map keys:UserWarning")
@pytest.mark.ecosystem(
    "device_map auto beyond the memory, a whole model on disk, accelerate.cpu_offload",
    "works",
)
@pytest.mark.parametrize("how", ["auto", "disk", "cpu_offload"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True},
        {"head_bias": True},
        {"value_direction_trainable": True},
        {"base": "qwen3"},
        {"base": "granite"},
        {"base": "gemma2"},
    ],
)
@torch.no_grad()
def test_a_model_offloaded_as_a_whole_is_the_same(
    how: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    here = make_causal(num_token_id=NUM, **fields)
    here.decision.word_edges.copy_(torch.arange(here.vocab_size) % 4)
    if here.lm_head.bias is not None:
        here.lm_head.bias.copy_(torch.linspace(-1, 1, here.vocab_size))
    with quiet():
        there = offloaded(how, here, tmp_path)
    away = [name for name, one in there.named_parameters() if one.is_meta]
    assert {"decision.threshold", "action.b_noise", "action.decision_noise"} <= {*away}
    noise = UNoise(torch.full((2, 32), 0.5), "location")
    for call in ({"labels": IDS}, {"u_noise": noise}):
        expected, found = (one(IDS, numeric_values=VALUES, **call) for one in (here, there))
        assert {*found} == {*expected}
        for name, tensor in expected.items():
            if isinstance(tensor, torch.Tensor):
                check_equal(found[name], tensor, name)
    for mode in MODES:
        who = {"individual": 3, "noise_gain": 0.6} if mode in ("sampling", "causal") else {}
        who |= {"whole_words": True, "avoid_repeats": 2, "min_p": 0.05} if mode == "causal" else {}
        options: dict[str, Any] = {"max_new_tokens": 4, "causal_mode": mode, **who}
        options |= {"return_dict_in_generate": True, "numeric_values": VALUES}
        for wanted in (False, True):
            one, other = (
                model.generate(IDS, output_scores=wanted, **options) for model in (here, there)
            )
            assert torch.equal(one.sequences, other.sequences), mode
            check_equal(other.numeric_values, one.numeric_values, mode)
            for ours, theirs in zip(one.scores or (), other.scores or (), strict=True):
                check_equal(theirs, ours, mode)
    assert all(there.get_parameter(name).is_meta for name in away)


@torch.no_grad()
def test_individuals_are_inferred_with_the_heads_on_disk(tmp_path: Path) -> None:
    here = make_causal()
    parts = dict.fromkeys(("lm_head", "abduction", "action", "decision"), "disk")
    with quiet():
        here.save_pretrained(tmp_path / "saved")
        there = CausalQwenForCausalLM.from_pretrained(
            tmp_path / "saved", device_map={"model": "cpu", **parts}, offload_folder=str(tmp_path)
        )
    said = here.generate(IDS[:1, :4], max_new_tokens=4, causal_mode="causal", individual=3)[0]
    one, other = (
        infer_individual(model, said[4:], prompt=said[:4], n=2).individuals
        for model in (here, there)
    )
    for ours, theirs in zip(one, other, strict=True):
        assert np.array_equal(ours.noise, theirs.noise)


@torch.no_grad()
def test_a_model_offloaded_in_another_dtype_has_equal_scales(tmp_path: Path) -> None:
    """The decision noise is computed again from the rounded W, and stays in memory."""
    with quiet():
        CausalQwenForCausalLM.from_qwen(make_base("qwen2")).save_pretrained(tmp_path)
        here = CausalQwenForCausalLM.from_pretrained(tmp_path, dtype="bfloat16")
        there = CausalQwenForCausalLM.from_pretrained(
            tmp_path, dtype="bfloat16", device_map={"": "disk"}, offload_folder=str(tmp_path / "o")
        )
    expected, found = here(IDS), there(IDS)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.scale_S, expected.scale_S)
    assert torch.equal(there.generate(IDS, max_new_tokens=4), here.generate(IDS, max_new_tokens=4))


def test_a_plain_checkpoint_is_not_offloaded_before_its_conversion(tmp_path: Path) -> None:
    with quiet():
        make_base("qwen2").save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"is a plain checkpoint: .*convert it first"):
            CausalQwenForCausalLM.from_pretrained(
                tmp_path, device_map={"": "disk"}, offload_folder=str(tmp_path / "o")
            )


# ---------------------------------------------------------------- names


def test_devices_and_dtypes_are_resolved_or_refused_in_one_sentence(monkeypatch: Any) -> None:
    monkeypatch.setattr(placement, "_has_accelerator", lambda: False)
    assert placement.resolve_device("auto") == torch.device("cpu")
    assert placement.available_devices() == ["cpu"]
    with pytest.raises(ValueError, match=r"'cuda:1' is not available here; available: cpu\.$"):
        placement.resolve_device("cuda:1")
    with pytest.raises(ValueError, match=r"device='gpu' is unknown; use auto, cpu, cuda"):
        placement.resolve_device("gpu")
    monkeypatch.setattr(placement, "_has_accelerator", lambda: True)
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(accelerator, "device_count", lambda: 2)
    assert placement.available_devices() == ["cpu", "cuda:0", "cuda:1"]
    assert placement.resolve_device("auto") == torch.device("cuda")
    assert placement.resolve_device("cuda") == torch.device("cuda")
    assert placement.resolve_device("cuda:1") == torch.device("cuda:1")
    assert placement.resolve_device("cpu") == torch.device("cpu")
    for name in ("cuda:2", "mps"):
        with pytest.raises(ValueError, match="not available here; available: cpu, cuda:0, cuda:1"):
            placement.resolve_device(name)
    assert placement.resolve_dtype("bfloat16") == torch.bfloat16
    assert placement.resolve_dtype() == "auto"
    with pytest.raises(ValueError, match="dtype='half' is unknown"):
        placement.resolve_dtype("half")


@pytest.mark.parametrize(
    "line",
    [
        "generate x",
        "fit {table} -y price -o {new}",
        "evaluate {rows} --model {model}",
        "train -d {rows} -o {new} --model {model}",
    ],
)
def test_a_device_that_is_not_here_is_refused_in_one_sentence(
    line: str, tiny_directory: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    (tmp_path / "table.csv").write_text("text,price\n" + "a ring,3\n" * 9, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"text": "a ring"}\n' * 9, encoding="utf-8")
    places = {"table": tmp_path / "table.csv", "rows": tmp_path / "rows.jsonl"}
    places |= {"new": tmp_path / "new", "model": tiny_directory}
    words = [word.format(**places) for word in line.split()]
    monkeypatch.setattr(sys, "argv", ["causal-qwen", *words, "--device", "cuda:7"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("causal-qwen: device='cuda:7' is not available here; available: cpu")
    assert not (tmp_path / "new").exists()


def test_training_takes_every_accelerator_or_none(monkeypatch: Any) -> None:
    monkeypatch.setattr(placement, "available_devices", lambda: ["cpu", "cuda:0", "cuda:1"])
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES=1, with device='cuda'"):
        training_arguments(Run(None, "data", "output", device="cuda:1"), is_new=True)
    args = training_arguments(Run(None, "data", "output", device="cpu"), is_new=True)
    assert args.use_cpu


def test_a_saved_regressor_has_the_dtype_of_fit_and_no_device(
    tiny_directory: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    texts = [f"a ring of grade {grade}" for grade in "ABCDEFGHABCDEFGH"]
    options: dict[str, Any] = {"sources": ["model"], "folds": 2, "cache": False, "verbose": False}
    fitted = CausalTextRegressor(
        model=str(tiny_directory), device="cpu", dtype="bfloat16", **options
    ).fit(texts, np.arange(16.0))
    fitted.save(tmp_path / "saved")
    again = CausalTextRegressor.load(tmp_path / "saved")
    assert (again.device, again.dtype) == ("auto", "bfloat16")
    assert (again.device, again._open()[1].dtype) == ("auto", torch.bfloat16)
    assert again.predict(texts) == pytest.approx(fitted.predict(texts))
    with pytest.raises(ValueError, match=r"^device='cuda:7' is not available here"):
        CausalTextRegressor.load(tmp_path / "saved", device="cuda:7")
    with pytest.raises(ValueError, match="dtype='half' is unknown"):
        CausalTextRegressor(dtype="half").fit(texts, np.arange(16.0))
