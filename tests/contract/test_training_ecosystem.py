"""Training and scoring with other tools: TRL, lm-eval-harness, three dashboards.

The dashboards are read back from the files they write, by their own readers where they have one.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen2ForCausalLM, Trainer

from causal_qwen.conversion.convert import convert
from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.processor import CausalQwenProcessor

Make = Callable[..., Any]

EXAMPLES = Path(__file__).parents[2] / "examples"
VOCABULARY = 271
HANG_SECONDS = 1800  # a guard against hanging, not a bound on speed
COMPAT_WEIGHT = 5.0
SENTENCES = [f"{a} and {b} walk to the {c}" for a in "ABCD" for b in "xyz" for c in ("sea", "hut")]


@pytest.fixture(scope="module")
def base(make_pair: Make, byte_tokenizer: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with a byte tokenizer; rows of the head without a token are zero."""
    path = tmp_path_factory.mktemp("base")
    tokenizer = byte_tokenizer(eos_token="<pad>")
    tokenizer.save_pretrained(path)
    model, _ = make_pair(vocab_size=VOCABULARY, initializer_range=0.2)
    with torch.no_grad():
        model.lm_head.weight[len(tokenizer) :] = 0
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def converted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("converted") / "model"
    convert(base, path, compat_loss_weight=COMPAT_WEIGHT)
    return path


# ---------------------------------------------------------------- TRL


@pytest.fixture
def sft(converted: Path, tmp_path: Path) -> Make:
    """`sft(**arguments)`: TRL's SFTTrainer with one line that uses the model's own loss."""
    trl = pytest.importorskip("trl")
    datasets = importlib.import_module("datasets")

    class CausalSFTTrainer(trl.SFTTrainer):
        compute_loss = Trainer.compute_loss  # TRL's computes its own loss

    def make(kind: Any = CausalSFTTrainer, **arguments: Any) -> Any:
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path),
            "max_steps": 8,
            "learning_rate": 3e-3,
            "per_device_train_batch_size": len(SENTENCES),
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            "dataloader_pin_memory": False,
        }
        return kind(
            model=CausalQwenForCausalLM.from_pretrained(converted),
            processing_class=CausalQwenProcessor.from_pretrained(converted).tokenizer,
            args=trl.SFTConfig(**{**settings, **arguments}),
            train_dataset=datasets.Dataset.from_list([{"text": text} for text in SENTENCES]),
        )

    return make


def batch_of(trainer: Any) -> dict[str, torch.Tensor]:
    (batch,) = trainer.get_train_dataloader()
    return {name: x for name, x in batch.items() if isinstance(x, torch.Tensor)}


def train_losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trl_optimises_the_loss_of_the_model(sft: Make) -> None:
    """All sentences are one batch, so the first logged loss is known in advance."""
    trainer = sft()
    batch = batch_of(trainer)
    with torch.no_grad():
        output = trainer.model(**batch)
    shifted = batch["labels"][:, 1:]
    softmax = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), shifted.flatten()).item()
    own = output.loss.item()
    assert own == pytest.approx(output.classification_loss.item() + COMPAT_WEIGHT * softmax)
    losses = train_losses(trainer)
    assert losses[0] == pytest.approx(own, rel=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    moved = trainer.model.decision.threshold
    start = CausalQwenForCausalLM.from_pretrained(trainer.model.name_or_path).decision.threshold
    assert not torch.equal(moved, start)


def test_trl_gradient_accumulation_equals_one_large_batch(sft: Make) -> None:
    rest = {"max_steps": 2, "optim": "sgd", "max_grad_norm": 0.0}
    parts = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6}
    assert train_losses(sft(**rest, **parts)) == pytest.approx(train_losses(sft(**rest)), rel=1e-5)


def test_unmodified_trl_does_not_train_the_causal_heads(sft: Make) -> None:
    """Why the line is needed: SFTTrainer computes logits from the head's weight itself."""
    trl = pytest.importorskip("trl")
    trainer = sft(trl.SFTTrainer, max_steps=1)
    before = trainer.model.decision.threshold.detach().clone()
    with torch.no_grad():
        own = trainer.model(**batch_of(trainer)).loss.item()
    (loss,) = train_losses(trainer)
    assert loss < 0.5 * own
    assert torch.equal(trainer.model.decision.threshold, before)


# ---------------------------------------------------------------- lm-eval-harness

TASKS: dict[str, dict[str, Any]] = {
    "pick": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}} near the",
        "doc_to_choice": [" sea", " hut", " hill, far away"],
        "doc_to_target": "{{place}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "say": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": " again",
        "generation_kwargs": {"max_gen_toks": 12, "until": ["\n\n"], "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "read": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of three tasks, on the sentences above."""
    path = tmp_path_factory.mktemp("tasks")
    rows = [{"text": text, "place": i % 3} for i, text in enumerate(SENTENCES)]
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    source = {"data_files": {"test": str(path / "rows.jsonl")}, "cache_dir": str(path / "cache")}
    for name, task in TASKS.items():
        whole = {"dataset_path": "json", "dataset_kwargs": source, "test_split": "test", **task}
        text = json.dumps({"task": f"sentences_{name}", **whole})  # JSON is YAML
        (path / f"{name}.yaml").write_text(text, encoding="utf-8")
    return path


def score(model: Path, tasks: Path) -> dict[str, Any]:
    """What `lm_eval --model hf --model_args pretrained=DIR --include_path TASKS` computes."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": "float32"},
        tasks=[f"sentences_{name}" for name in TASKS],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
    )
    assert found is not None
    samples = {
        name: [(sample["doc_id"], sample["filtered_resps"]) for sample in part]
        for name, part in found["samples"].items()
    }
    return {"results": found["results"], "samples": samples}


@pytest.mark.slow  # nearly all of it is the harness itself
@pytest.mark.filterwarnings("default")  # the harness's own
def test_evaluation_harness_scores_equal_the_base_models(
    base: Path, converted: Path, tasks: Path
) -> None:
    pytest.importorskip("lm_eval")
    expected, found = score(base, tasks), score(converted, tasks)
    assert found == expected  # every log-probability and every text, exactly
    results = expected["results"]
    model = Qwen2ForCausalLM.from_pretrained(base)
    tokenizer = CausalQwenProcessor.from_pretrained(converted).tokenizer
    bits = 0.0
    for text in SENTENCES:
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]])
        log_p = model(ids).logits[0, :-1].double().log_softmax(-1)
        bits -= log_p.gather(-1, ids[0, 1:, None]).sum().item() / torch.tensor(2.0).log().item()
    size = sum(len(text.encode()) for text in SENTENCES)
    by_hand = pytest.approx(bits / size, rel=1e-5)
    assert results["sentences_read"]["bits_per_byte,none"] == by_hand


@pytest.mark.filterwarnings("default")  # the harness's own
def test_example_scores_tasks_by_name_beside_the_base(
    base: Path,
    converted: Path,
    tasks: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("lm_eval_tasks")
    options = [str(converted), "sentences_pick", "--base", str(base), "--include", str(tasks)]
    monkeypatch.setattr(sys, "argv", ["lm_eval_tasks", *options, "--limit", "3"])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| sentences_pick")]
    assert [row[1] for row in rows] == ["acc", "acc_norm"]
    assert all(row[2] == row[3] and row[4] == "+0.0000 |" for row in rows)


# ---------------------------------------------------------------- dashboards

RUN = """
import json, sys
from causal_qwen.training.data import Collator, encode_rows
from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.training.trainer import CausalTrainer, CausalTrainingArguments

directory, output, boards = sys.argv[1:]
processor = CausalQwenProcessor.from_pretrained(directory, encode_numbers="value")
rows = [{"text": f"{a} and {b} make {a + b}"} for a in range(1, 3) for b in range(1, 5)]
examples = encode_rows(rows, processor, 64)
trainer = CausalTrainer(
    model=CausalQwenForCausalLM.from_pretrained(directory),
    args=CausalTrainingArguments(
        output_dir=output, max_steps=2, per_device_train_batch_size=4, logging_steps=1,
        eval_strategy="steps", eval_steps=2, save_strategy="no", report_to=boards.split(","),
        project="causal", disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
        dataloader_pin_memory=False,
    ),
    train_dataset=examples, eval_dataset=examples, data_collator=Collator(0),
)
trainer.train()
trainer.save_state()
"""
Curves = dict[str, dict[int, float]]  # name -> step -> value


@pytest.fixture(scope="module")
def logged(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that reports to TensorBoard."""
    path = tmp_path_factory.mktemp("logged")
    pytest.importorskip("tensorboard")
    command = [sys.executable, "-c", RUN, str(converted), str(path / "run"), "tensorboard"]
    place = {"TENSORBOARD_LOGGING_DIR": str(path / "tensorboard")}
    environment = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=HANG_SECONDS)
    return path


def tensorboard_curves(path: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


TRAINED = ("total_loss", "cls_loss_mean", "reg_loss_effective", "grad_norm", "learning_rate")
EVALUATED = (
    *("loss", "accuracy", "perplexity", "ovr_nll", "num_precision", "num_recall", "num_f1"),
    *("reg_mae", "reg_mdae", "crps_symlog", *(f"coverage_{level}" for level in (50, 80, 90, 95))),
)
DISTRIBUTIONS = (
    "dist/ovr_prob_sum_median",
    *(f"dist/U_{a}_{b}" for a in ("loc", "scale") for b in ("mean", "median", "std", "iqr")),
)


@pytest.mark.slow  # a process that imports torch and the dashboard
@pytest.mark.filterwarnings("default")  # the reader's own
def test_dashboard_has_every_metric(logged: Path) -> None:
    """Names and values equal those of the trainer's state."""
    curves = tensorboard_curves(logged)
    history = json.loads((logged / "run" / "trainer_state.json").read_text())["log_history"]
    for name in TRAINED:
        expected = {entry["step"]: entry[name] for entry in history if name in entry}
        assert sorted(expected) == [1, 2], name
        assert curves[f"train/{name}"] == pytest.approx(expected, rel=1e-6), name
    logs = {name: value for entry in history for name, value in entry.items()}
    for name in EVALUATED:
        assert curves[f"eval/{name}"][2] == pytest.approx(logs[f"eval_{name}"], rel=1e-6), name
    for name in DISTRIBUTIONS:
        (shown,) = {name, f"eval/{name}"} & curves.keys()
        (known,) = {name, f"eval_{name}"} & logs.keys()
        assert curves[shown][2] == pytest.approx(logs[known], rel=1e-6), name
