"""Training as a user runs it: a model directory and a file in, a trained directory out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from _simulation import simulate
from authors import likelihoods
from transformers import (
    GenerationConfig,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from causal_qwen.conversion.opening import open_model
from causal_qwen.individuals import Individual
from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.outputs import lock
from causal_qwen.training.authors import Authors
from causal_qwen.training.data import Collator, encode_rows
from causal_qwen.training.evaluation import (
    measure,
    side_by_side,
    table_of,
    write_report,
)
from causal_qwen.training.metrics import COLUMNS, MetricAccumulator
from causal_qwen.training.run import COMPAT_WEIGHT, Run, prepare, train
from causal_qwen.training.trainer import (
    CausalTrainer,
    CausalTrainingArguments,
    Progress,
)

Make = Callable[..., Any]

VOCABULARY, NUM = 271, 257
ROWS = [{"text": f"{a} + {b} makes {a + b}"} for a in range(1, 9) for b in range(1, 6)]
QUICK: dict[str, Any] = {
    "max_steps": 6,
    "learning_rate": 3e-3,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "logging_steps": 1,
    "save_steps": 2,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}
# To measure the noise gains takes three quarters of such a run.
RUN: dict[str, Any] = {**QUICK, "recalibrate": False}


@pytest.fixture(scope="module")
def directory(
    make_model: Make, byte_tokenizer: Make, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny model with a byte tokenizer."""
    path = tmp_path_factory.mktemp("model")
    CausalQwenProcessor(byte_tokenizer()).save_pretrained(path)
    fields = {"vocab_size": VOCABULARY, "num_token_id": NUM, "initializer_range": 0.1}
    make_model(**fields, pad_token_id=0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    return path


def history(output: Path) -> list[dict[str, float]]:
    last = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    log: list[dict[str, float]] = json.loads((last / "trainer_state.json").read_text())[
        "log_history"
    ]
    return log


def losses(output: Path) -> dict[int, float]:
    return {int(e["step"]): e["total_loss"] for e in history(output) if "total_loss" in e}


def evaluate(path: Path | str, data: Path | str, **options: Any) -> dict[str, float]:
    return measure(str(path), [str(data)], replicates=0, **options)[str(data)].compute()


@pytest.fixture(scope="module")
def trained(directory: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "values"
    train(Run(str(directory), str(data), str(output), numbers="value", arguments=RUN))
    return output


def test_loss_falls_and_its_terms_are_logged(trained: Path) -> None:
    found = losses(trained)
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert found[6] < 0.9 * found[1]
    for entry in history(trained):
        if "total_loss" in entry:
            parts = entry["cls_loss_mean"] + entry["reg_loss_effective"]
            total = parts + COMPAT_WEIGHT * entry["compat_loss_mean"]
            assert entry["total_loss"] == pytest.approx(total, rel=1e-6)
            assert entry["loss"] == pytest.approx(total, rel=1e-3)
            assert entry["reg_loss_effective"] != 0


def test_model_trained_on_values_saves_that_setting_and_loads(trained: Path) -> None:
    model = CausalQwenForCausalLM.from_pretrained(trained)
    processor = CausalQwenProcessor.from_pretrained(trained)
    assert model.config.encode_numbers == processor.encode_numbers == "value"
    assert model.config.compat_loss_weight == COMPAT_WEIGHT
    with pytest.raises(ValueError, match="numeric_values"):
        model.generate(torch.tensor([[5]]), max_new_tokens=1)
    assert math.isfinite(model.predict("3 + 4 makes", processor).median)


def test_evaluation_returns_all_specified_metrics(trained: Path, data: Path) -> None:
    metrics = evaluate(str(trained), str(data))
    names = {"accuracy", "perplexity", "ovr_nll", "num_precision", "num_recall", "num_f1"}
    names |= {"reg_mae", "reg_mdae", "crps_symlog", "dist/ovr_prob_sum_median"}
    names |= {f"coverage_{level}" for level in (50, 80, 90, 95)}
    names |= {f"dist/U_{of}_{what}" for of in ("loc", "scale") for what in ("mean", "iqr", "std")}
    assert names <= set(metrics)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["nll"]))
    assert json.loads((trained / "metrics.json").read_text()).keys() >= {"eval_accuracy"}


@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_metrics_do_not_depend_on_batch_size(trained: Path, data: Path, batch_size: int) -> None:
    expected = evaluate(str(trained), str(data))
    found = evaluate(str(trained), str(data), batch_size=batch_size)
    assert found == pytest.approx(expected, rel=2e-3, abs=2e-3)


def test_metrics_equal_values_computed_by_hand(make_model: Make) -> None:
    """Two positions: a word, and a number with a known error."""
    model = make_model(num_token_id=5, value_space="linear", head_bias=True)
    ids, values = torch.tensor([[3, 7, 5]]), torch.tensor([[0.0, 0.0, 12.0]])
    output = model(ids, numeric_values=values)
    accumulator = MetricAccumulator(model)
    accumulator.add(output.u_dist, {"labels": ids, "numeric_values": values})
    metrics = accumulator.compute()
    y = Cauchy(output.loc_Y[0, 1], output.scale_Y[0, 1])
    assert metrics["reg_mae"] == pytest.approx(abs(12 - y.loc.item()), rel=1e-5)
    assert metrics["crps"] == pytest.approx(y.crps(torch.tensor(12.0)).item(), rel=1e-5)
    log_p = output.logits[0, :2].log_softmax(-1)
    assert metrics["nll"] == pytest.approx(-(log_p[0, 7] + log_p[1, 5]).item() / 2, rel=1e-5)
    chosen = model.decision.choose(output.s_dist)[0, :2]
    hits = int(chosen[0] == 7) + int(chosen[1] == 5)
    assert metrics["accuracy"] == hits / 2
    sums = model.decision(output.s_dist)[0, :2].sum(-1)
    assert metrics["dist/ovr_prob_sum_median"] == pytest.approx(sums.min().item(), rel=1e-5)
    for level in (50, 80, 90, 95):
        low, high = y.interval(level / 100)
        assert metrics[f"coverage_{level}"] == float(low <= 12 <= high)


def trainer_of(directory: Path, output: Path, kind: Any = CausalTrainer, **options: Any) -> Any:
    processor = CausalQwenProcessor.from_pretrained(directory, encode_numbers="value")
    arguments = CausalTrainingArguments if kind is CausalTrainer else TrainingArguments
    settings = {**QUICK, "max_steps": 2, "save_strategy": "no", "remove_unused_columns": False}
    return kind(
        model=CausalQwenForCausalLM.from_pretrained(directory),
        args=arguments(output_dir=str(output), **{**settings, **options}),
        train_dataset=encode_rows(ROWS[:16], processor, 64),
        data_collator=Collator(0),
    )


def weights_after(trainer: Any) -> dict[str, torch.Tensor]:
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("kind", [CausalTrainer, Trainer])
def test_gradient_accumulation_equals_one_large_batch(
    directory: Path, tmp_path: Path, kind: Any
) -> None:
    """The plain Trainer does not count numbers, but here every part has the same number of them."""
    options = {"optim": "sgd", "learning_rate": 1e-3, "max_grad_norm": 0.0}
    big = trainer_of(directory, tmp_path, kind, per_device_train_batch_size=8, **options)
    parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    small = trainer_of(directory, tmp_path, kind, **parts, **options)
    tolerance = 1e-6 if kind is CausalTrainer else 1e-3
    for (name, one), two in zip(
        weights_after(big).items(), weights_after(small).values(), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=tolerance, msg=name)


def test_training_heads_leaves_the_backbone_unchanged_and_uses_their_own_rate(
    directory: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(directory, tmp_path, train="heads", head_learning_rate=1e-2)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    after = weights_after(trainer)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.startswith(("abduction", "action", "decision")) for name in moved)
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups if group["params"]} == {
        1e-2
    }


def test_non_finite_loss_stops_the_run(directory: Path, tmp_path: Path) -> None:
    trainer = trainer_of(directory, tmp_path)
    with torch.no_grad():
        trainer.model.decision.threshold.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="loss=nan at step 1; no checkpoint was saved"):
        trainer.train()


class Poison(TrainerCallback):
    """Makes one weight NaN, at the beginning of a step or at its end."""

    def __init__(self, step: int, event: str) -> None:
        self.step = step
        setattr(self, event, self.poison)

    def poison(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == self.step:
            with torch.no_grad():
                model.decision.threshold[0] = math.nan


@pytest.mark.parametrize(
    ("step", "event", "words"),
    [
        (5, "on_step_begin", "loss=nan at step 6"),
        (6, "on_step_end", "decision.threshold has NaN or infinity after step 6"),
    ],
)
def test_a_run_that_became_nan_names_the_last_good_checkpoint(
    directory: Path, tmp_path: Path, step: int, event: str, words: str
) -> None:
    """In the second case the loss was finite, and NaN would have been saved as checkpoint-6."""
    trainer = trainer_of(directory, tmp_path, max_steps=8, save_strategy="steps", save_steps=2)
    trainer.add_callback(Poison(step, event))
    good = re.escape(f"{words}; {tmp_path / 'checkpoint-4'} is the last good one")
    with pytest.raises(FloatingPointError, match=good):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("*")) == ["checkpoint-2", "checkpoint-4"]


SCRIPT = """
import sys, json
from causal_qwen.training.run import Run, train
train(Run(*sys.argv[1:4], numbers="value", resume=sys.argv[4] == "resume",
          arguments=json.loads(sys.argv[5])))
"""


@pytest.mark.slow  # another process; test_a_run_resumes_from_the_newest_whole_checkpoint remains
def test_killed_run_resumes_with_identical_losses_and_weights(
    directory: Path, data: Path, tmp_path: Path
) -> None:
    """SIGKILL after the first checkpoint; losses are equal bit for bit."""
    arguments = {**RUN, "max_steps": 16}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    names = (str(directory), str(data))
    train(Run(*names, str(whole), numbers="value", arguments=arguments))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *names, str(broken), "new", json.dumps(arguments)],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    while not list(broken.glob("checkpoint-*/trainer_state.json")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (broken / "metrics.json").exists()
    train(Run(*names, str(broken), numbers="value", resume=True, arguments=arguments))
    assert losses(broken) == losses(whole)
    one, two = (CausalQwenForCausalLM.from_pretrained(path) for path in (whole, broken))
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q), name


# ---------------------------------------------------------------- damage and resuming


@pytest.fixture
def run_copy(trained: Path, tmp_path: Path) -> Path:
    """A finished run with the checkpoints 2, 4 and 6."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


@contextlib.contextmanager
def reported(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Hugging Face's logger does not pass its records on."""
    logger = logging.getLogger("transformers.causal_qwen")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


def test_a_run_resumes_from_the_newest_whole_checkpoint(
    directory: Path, data: Path, run_copy: Path, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The result is that of the undamaged run, bit for bit."""
    (run_copy / "checkpoint-6" / "trainer_state.json").unlink()
    truncate(run_copy / "checkpoint-4" / "trainer_state.json")
    run = Run(str(directory), str(data), str(run_copy), numbers="value", arguments=RUN)
    with reported(caplog):
        train(dataclasses.replace(run, resume=True))
    assert "checkpoint-6 is passed over" in caplog.text
    assert "checkpoint-4 is passed over" in caplog.text
    assert losses(run_copy) == losses(trained)
    one, two = (CausalQwenForCausalLM.from_pretrained(path) for path in (trained, run_copy))
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize(
    "length",
    [{"max_steps": 5}, {"max_steps": -1, "num_train_epochs": 1.0}],
    ids=["steps", "epochs"],
)
def test_a_run_killed_before_its_last_save_is_finished_as_if_it_had_not_been(
    directory: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    length: dict[str, Any],
) -> None:
    arguments = {**QUICK, "recalibrate": True, "save_steps": 1000, **length}
    whole, broken = (
        Run(str(directory), str(data), str(tmp_path / name), numbers="value", arguments=arguments)
        for name in ("whole", "broken")
    )
    metrics = train(whole)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CausalTrainer, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            train(broken)
    assert not (tmp_path / "broken" / "model.safetensors").exists()
    again = train(dataclasses.replace(broken, resume=True))
    assert again["eval_loss"] == metrics["eval_loss"]
    for name in ("model.safetensors", "generation_config.json", "config.json"):
        one, two = (tmp_path / which / name for which in ("whole", "broken"))
        assert one.read_bytes() == two.read_bytes(), name
    if length["max_steps"] > 0:
        with pytest.raises(ValueError, match="has made 5 of 5 steps; resume it with more"):
            train(dataclasses.replace(broken, resume=True))


def test_two_runs_in_one_directory_are_refused(directory: Path, data: Path, tmp_path: Path) -> None:
    run = Run(str(directory), str(data), str(tmp_path / "run"), arguments=RUN)
    with (
        lock(tmp_path / "run"),
        pytest.raises(BlockingIOError, match="run is being written by another process"),
    ):
        train(run)


def test_early_stopping_restores_the_best_checkpoint(
    directory: Path, data: Path, tmp_path: Path
) -> None:
    """The rate overshoots: training stops after one evaluation without a lower loss."""
    steps = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 60}
    arguments = {**RUN, **steps, "learning_rate": 0.1}
    run = Run(str(directory), str(data), str(tmp_path / "run"), patience=1, arguments=arguments)
    metrics = train(run)
    log = history(tmp_path / "run")
    measured = {int(e["step"]): e["eval_loss"] for e in log if "eval_loss" in e}
    best = min(measured, key=measured.__getitem__)
    assert 0 < best == max(measured) - 2 < 58
    assert metrics["eval_loss"] == pytest.approx(measured[best], rel=1e-4)


def test_progress_shows_the_loss_and_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    state = TrainerState(global_step=0, max_steps=10)
    progress, rest = Progress(), (None, state, None)
    progress.on_train_begin(*rest)
    state.global_step = 5
    progress.on_log(*rest, logs={"total_loss": 12.345, "epoch": 1})
    progress.on_log(*rest, logs={"epoch": 1})  # nothing that is shown
    progress.on_train_end(*rest)
    shown = capsys.readouterr()
    assert "step 5/10  loss 12.35" in shown.err.splitlines()
    assert "epoch" not in shown.err
    assert not shown.out  # which may be JSON


def test_noise_measurement_after_training_is_announced_once(
    directory: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No terminal here: a plain line."""
    arguments = {**QUICK, "max_steps": 1, "disable_tqdm": False}
    train(Run(str(directory), str(data), str(tmp_path / "run"), arguments=arguments))
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("measuring noise gains ...") == 1
    assert any(line.startswith("step 1/1  loss") for line in lines)
    train(
        Run(
            str(directory),
            str(data),
            str(tmp_path / "unchanged"),
            arguments={**arguments, "recalibrate": False},
        )
    )
    assert "measuring" not in capsys.readouterr().err
    given, measured, unchanged = (
        getattr(GenerationConfig.from_pretrained(path), "noise_gain", None)
        for path in (directory, tmp_path / "run", tmp_path / "unchanged")
    )
    assert given is None
    assert unchanged is None
    assert measured > 0


@pytest.mark.parametrize("is_trained", [False, True])
def test_thresholds_of_a_converted_model_are_set_on_the_training_text(
    directory: Path, tmp_path: Path, is_trained: bool
) -> None:
    """C is the 90th percentile of the best score, once: a trained model keeps its own."""
    model = CausalQwenForCausalLM.from_pretrained(directory)
    assert model.abduction.scale.weight.any()  # a model as after training
    if not is_trained:
        model.abduction.scale.weight.data.zero_()
    model.save_pretrained(tmp_path / "start")
    processor = CausalQwenProcessor.from_pretrained(directory)
    processor.save_pretrained(tmp_path / "start")
    texts = ["aaaa bbbb", "the cat sat", "zzzz"]
    data = tmp_path / "rows.txt"
    data.write_text("\n".join(texts), encoding="utf-8")
    arguments = {**QUICK, "max_steps": 1, "learning_rate": 0.0, "recalibrate": False}
    output = tmp_path / "run"
    train(
        Run(
            str(tmp_path / "start"),
            str(data),
            str(output),
            eval_data=str(data),
            arguments=arguments,
        )
    )
    found = CausalQwenForCausalLM.from_pretrained(output).decision.threshold.detach()
    if is_trained:
        assert torch.equal(found, model.decision.threshold)
        return
    end = processor.tokenizer.eos_token_id
    ids = [
        [*processor.tokenizer(text).input_ids, *([] if end is None else [end])] for text in texts
    ]
    best = torch.cat([model(torch.tensor([row])).logits[0].detach().amax(-1) for row in ids])
    assert found.unique().item() == pytest.approx(best.quantile(0.9).item(), rel=1e-4)


def test_rows_with_a_target_of_a_named_field_train(directory: Path, tmp_path: Path) -> None:
    """They have no text to learn; calibration reads their prompts."""
    rows = [{"text": f"{n} rings cost", "target": float(n), "field": "price"} for n in range(8)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    arguments = {**QUICK, "max_steps": 1}
    train(Run(str(directory), str(data), str(tmp_path / "run"), arguments=arguments))
    saved = CausalQwenForCausalLM.from_pretrained(tmp_path / "run")
    assert "price" in saved.config.value_fields
    assert saved.generation_config.noise_gain > 0


@pytest.mark.slow  # two processes that import torch
def test_two_processes_equal_one_with_twice_the_batch(
    directory: Path, data: Path, tmp_path: Path
) -> None:
    """DDP over gloo: tokens and numbers are counted over both processes."""
    one, two = tmp_path / "one", tmp_path / "two"
    single = {**RUN, "max_steps": 4, "per_device_train_batch_size": 8}
    arguments = json.dumps({**single, "per_device_train_batch_size": 4})
    train(Run(str(directory), str(data), str(one), numbers="value", arguments=single))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [*launch, "2", str(script), str(directory), str(data), str(two)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run([*command, "new", arguments], check=True, env=environment)
    assert losses(two) == pytest.approx(losses(one), rel=1e-6)
    found = json.loads((two / "metrics.json").read_text())
    expected = json.loads((one / "metrics.json").read_text())
    assert found["eval_nll"] == pytest.approx(expected["eval_nll"], rel=1e-4)


def test_lora_run_saves_a_merged_model(directory: Path, data: Path, tmp_path: Path) -> None:
    """The causal heads are trained in full, the backbone through LoRA."""
    pytest.importorskip("peft", reason="LoRA needs peft")
    output = tmp_path / "lora"
    metrics = train(Run(str(directory), str(data), str(output), lora=4, arguments=RUN))
    found = losses(output)
    assert found[6] < found[1]
    before, after = (CausalQwenForCausalLM.from_pretrained(path) for path in (directory, output))
    for name in ("model.layers.0.mlp.up_proj.weight", "decision.threshold"):
        assert not torch.equal(before.get_parameter(name), after.get_parameter(name)), name
    embeddings = "model.embed_tokens.weight"
    assert torch.equal(before.get_parameter(embeddings), after.get_parameter(embeddings))
    assert math.isfinite(metrics["eval_nll"])


def test_report_shows_logged_metrics(trained: Path) -> None:
    page = write_report(trained).read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 1
    assert "eval_accuracy" in page
    assert "total_loss" in page
    with pytest.raises(FileNotFoundError, match="checkpoint"):
        write_report(trained.parent)


def test_bad_runs_are_refused(directory: Path, data: Path, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=r"not empty.*--resume"):
        train(Run(str(directory), str(data), str(trained)))
    with pytest.raises(ValueError, match="no whole checkpoint"):
        train(Run(str(directory), str(data), str(tmp_path / "new"), resume=True))
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="train='some'"):
        CausalTrainingArguments(output_dir=str(tmp_path), train="some")


def test_simulation_recovers_the_true_parameters() -> None:
    findings = simulate(steps=500)
    assert [f.name for f in findings if not f.is_found] == []
    assert {f.name for f in simulate(steps=5) if not f.is_found}  # not before training


# ---------------------------------------------------------------- individuals of authors

AUTHORED = [
    {"text": text, "author": author}
    for author, texts in {
        "Ada": ["yes yes yes", "yes yes", "oh yes yes"],
        "Ben B.": ["no no no", "no no", "oh no no"],
    }.items()
    for text in texts * 4
]


@pytest.fixture(scope="module")
def authored(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("authors")
    lines = "\n".join(map(json.dumps, AUTHORED))
    (path / "rows.jsonl").write_text(lines, encoding="utf-8")
    arguments = {**RUN, "individual_learning_rate": 0.5, "max_steps": 4}
    source, output = str(path / "rows.jsonl"), str(path / "run")
    options: dict[str, Any] = {"eval_data": source, "individual_column": "author"}
    train(Run(str(directory), source, output, **options, arguments=arguments))
    return path


def test_authors_are_saved_as_individuals_that_generate_uses(authored: Path) -> None:
    files = sorted((authored / "run" / "individuals").iterdir())
    assert [file.name for file in files] == ["Ada.safetensors", "Ben_B.safetensors"]
    ada, ben = map(Individual.load, files)
    assert (ada.name, ben.name) == ("Ada", "Ben B.")
    model = CausalQwenForCausalLM.from_pretrained(authored / "run")
    start = Authors(["Ada"], model)
    assert np.abs(ada.cauchy() - start.t[0].detach().numpy()).max() > 0.1  # learned
    said = model.generate(
        torch.tensor([[80, 81]]),
        individual=[ada, ben],
        num_return_sequences=2,
        max_new_tokens=3,
        causal_mode="causal",
    )
    assert said.shape == (2, 5)


def test_the_own_individual_makes_texts_likelier(authored: Path) -> None:
    processor, model = open_model(authored / "run")
    files = sorted((authored / "run" / "individuals").iterdir())
    people = [Individual.load(file) for file in files]
    gain = getattr(model.generation_config, "noise_gain", 1.0)
    pushes = [torch.from_numpy(one.temperature * gain * one.cauchy()).float() for one in people]
    examples = encode_rows(AUTHORED, processor, 64)
    nll = likelihoods(model, torch.stack(pushes), examples, Collator(0))  # (rows, Ada, Ben, nobody)
    is_ada = torch.tensor([row["author"] == "Ada" for row in AUTHORED])
    own, other = nll[:, 0].where(is_ada, nll[:, 1]), nll[:, 1].where(is_ada, nll[:, 0])
    assert own.mean() < nll[:, 2].mean()
    assert own.mean() < other.mean()
    assert (own < other).float().mean() > 0.5


def test_a_run_with_authors_resumes_where_it_stopped(authored: Path, directory: Path) -> None:
    """From the checkpoint of step 2: t, its gain and its optimizer's state."""
    half = authored / "half"
    shutil.copytree(authored / "run", half)
    for path in half.glob("checkpoint-4"):
        shutil.rmtree(path)
    shutil.rmtree(half / "individuals")
    arguments = {**RUN, "individual_learning_rate": 0.5, "max_steps": 4}
    source = str(authored / "rows.jsonl")
    options: dict[str, Any] = {"eval_data": source, "individual_column": "author"}
    train(Run(str(directory), source, str(half), **options, resume=True, arguments=arguments))
    for name in ("Ada", "Ben_B"):
        one, two = (
            Individual.load(authored / run / "individuals" / f"{name}.safetensors")
            for run in ("run", "half")
        )
        assert one == two


def test_an_unknown_column_of_individuals_is_refused(directory: Path, data: Path) -> None:
    with pytest.raises(ValueError, match=r"'writer'.*'text'"):
        prepare(Run(str(directory), str(data), "new", individual_column="writer"))


# ---------------------------------------------------------------- rows


def test_held_out_rows_are_not_learned(directory: Path, data: Path, tmp_path: Path) -> None:
    ready = prepare(Run(str(directory), str(data), str(tmp_path), arguments=RUN))
    learned, held_out = ([row["text"] for row in x] for x in (ready.rows, ready.held_out_rows))
    assert sorted(learned + held_out) == sorted(row["text"] for row in ROWS)
    assert (len(ready.learn), len(ready.held_out)) == (len(learned), len(held_out))
    assert held_out


# ---------------------------------------------------------------- evaluation


def test_a_checkpoint_is_evaluated_like_the_model_that_it_is(trained: Path, data: Path) -> None:
    """The last checkpoint has the weights of the trained model."""
    expected = evaluate(str(trained), str(data))
    assert evaluate(str(trained / "checkpoint-6"), str(data)) == expected


def test_a_checkpoint_of_lora_is_merged_for_evaluation(
    directory: Path, data: Path, tmp_path: Path
) -> None:
    """With --train heads and a rate of its own, of which PEFT's names hid the heads."""
    pytest.importorskip("peft", reason="LoRA needs peft")
    output = tmp_path / "lora"
    arguments = {**RUN, "max_steps": 2, "train": "heads", "head_learning_rate": 1e-2}
    train(Run(str(directory), str(data), str(output), lora=4, arguments=arguments))
    before, after = (CausalQwenForCausalLM.from_pretrained(path) for path in (directory, output))
    moved = {n for n, p in before.named_parameters() if not p.equal(after.get_parameter(n))}
    assert {"abduction.loc.weight", "decision.threshold"} <= moved
    assert all(name.startswith(("abduction", "action", "decision")) for name in moved)
    step = (after.decision.threshold - before.decision.threshold).abs().max()
    assert 1e-3 < float(step.detach()) < 3e-2  # two steps of Adam at about 1e-2
    found = evaluate(str(output / "checkpoint-2"), str(data))
    assert found == pytest.approx(evaluate(str(output), str(data)), rel=1e-5)


def test_intervals_cover_the_metric_and_shrink_with_rows(trained: Path, data: Path) -> None:
    files = [str(data)]
    one = measure(str(trained), files)[str(data)]
    spans, metrics = one.intervals(), one.compute()
    for name in ("accuracy", "nll", "perplexity", "ovr_nll", "coverage_80", "num_f1"):
        low, high = spans[name]
        assert low <= metrics[name] <= high, name
    assert spans["nll"][0] < spans["nll"][1]
    again = measure(str(trained), files, batch_size=3)[str(data)]
    for name, (low, high) in again.intervals().items():
        assert (low, high) == pytest.approx(spans[name], rel=2e-3, abs=2e-3)
    assert one.intervals(one)["nll"] == (0.0, 0.0)  # paired: the same rows in every replicate


def test_intervals_are_those_of_a_bootstrap_over_rows() -> None:
    """Against a plain bootstrap of the same ratio, drawn from the rows' own sums."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 40, (200,), generator=generator).double()
    nll = tokens * (2 + torch.rand(200, generator=generator, dtype=torch.float64))
    accumulator = MetricAccumulator(SimpleNamespace(config=None), replicates=4000)  # type: ignore[arg-type]
    table = torch.zeros(200, len(COLUMNS), dtype=torch.float64)
    table[:, COLUMNS.index("tokens")], table[:, COLUMNS.index("nll")] = tokens, nll
    accumulator.add_rows(table[:77])
    accumulator.add_rows(table[77:])
    draws = torch.randint(200, (4000, 200), generator=generator)
    ratios = nll[draws].sum(-1) / tokens[draws].sum(-1)
    expected = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert accumulator.intervals()["nll"] == pytest.approx(expected, rel=4e-3)


def test_several_files_and_models_side_by_side(trained: Path, directory: Path, data: Path) -> None:
    found = {
        name: measure(str(path), [str(data)], numbers="value")
        for name, path in (("this model", trained), ("base", directory))
    }
    record = side_by_side({name: of[str(data)] for name, of in found.items()})
    assert record["rows"] == len(ROWS)
    difference = record["nll"] - record["base"]["nll"]
    assert record["base"]["difference"]["nll"] == pytest.approx(difference)
    low, high = record["base"]["difference_intervals"]["nll"]
    assert low <= difference <= high < 0  # training helped
    columns, rows = table_of(record)
    assert columns == ["", "this model", "base", "difference"]
    assert any(row[0] == "nll" and row[1].startswith(f"{record['nll']:.5g} (") for row in rows)


def test_plain_trainer_trains_the_objective_of_a_converted_model(make_pair: Make) -> None:
    base, _ = make_pair()
    model = CausalQwenForCausalLM.from_qwen(base)
    assert model.config.compat_loss_weight == COMPAT_WEIGHT
    assert (
        CausalQwenForCausalLM.from_qwen(base, compat_loss_weight=3).config.compat_loss_weight == 3
    )
    literal = CausalQwenForCausalLM.from_qwen(base, init="documents")
    assert literal.config.compat_loss_weight == 0
