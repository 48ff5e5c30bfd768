"""Canaries: one test per Hugging Face hook that we override or call.

A failure after an upgrade of transformers names the hook and the file of ours that relies on it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    GenerationMixin,
    PreTrainedModel,
    ProcessorMixin,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from causal_qwen import (
    CausalQwenForCausalLM,
    CausalQwenModel,
    CausalQwenProcessor,
)
from causal_qwen.training.trainer import CausalTrainer

Make = Callable[..., Any]

MIXIN, MODEL = "generation/mixin.py", "model.py"
TRAINER = "training/trainer.py"


@dataclass(frozen=True)
class Hook:
    owner: type
    name: str
    parameters: tuple[str, ...]  # those that our code names or passes on
    file: str  # of ours, below src/causal_qwen

    def broken(self, how: str) -> str:
        return (
            f"transformers {transformers.__version__}: {self.owner.__name__}.{self.name} {how}; "
            f"src/causal_qwen/{self.file} relies on it."
        )


GENERATION = (
    Hook(GenerationMixin, "_prepare_generation_config", ("generation_config", "kwargs"), MIXIN),
    Hook(GenerationMixin, "_expand_inputs_for_generation", ("input_ids", "model_kwargs"), MIXIN),
    Hook(
        GenerationMixin,
        "_get_logits_processor",
        ("generation_config", "input_ids_seq_length", "encoder_input_ids", "model_kwargs"),
        MIXIN,
    ),
    Hook(
        GenerationMixin, "_update_model_kwargs_for_generation", ("outputs", "model_kwargs"), MIXIN
    ),
    Hook(GenerationMixin, "_validate_model_kwargs", ("model_kwargs",), MIXIN),
    Hook(GenerationMixin, "_sample", ("input_ids", "streamer", "model_kwargs"), MIXIN),
    Hook(GenerationMixin, "_beam_search", ("input_ids", "model_kwargs"), MIXIN),
    Hook(
        GenerationMixin,
        "prepare_inputs_for_generation",
        ("input_ids", "past_key_values", "inputs_embeds", "kwargs"),
        MIXIN,
    ),
    Hook(GenerationMixin, "_prepare_special_tokens", ("generation_config", "device"), MIXIN),
    Hook(GenerationMixin, "generate_batch", ("inputs", "generation_config", "kwargs"), MIXIN),
    Hook(GenerationMixin, "init_continuous_batching", ("generation_config",), MIXIN),
)
BATCHES = ("generate_batch", "init_continuous_batching")
MODELS = (
    Hook(PreTrainedModel, "_init_weights", ("module",), MODEL),
    Hook(PreTrainedModel, "_get_resized_lm_head", ("old_lm_head",), MODEL),
    Hook(Qwen2Model, "post_init", (), MODEL),
)
TRAINING = (
    Hook(Trainer, "_save_checkpoint", ("model", "trial"), TRAINER),
    Hook(Trainer, "_save", ("output_dir", "state_dict"), TRAINER),
    Hook(Trainer, "_prepare_inputs", ("inputs",), TRAINER),
    Hook(Trainer, "get_batch_samples", ("epoch_iterator", "num_batches", "device"), TRAINER),
    Hook(
        Trainer,
        "prediction_step",
        ("model", "inputs", "prediction_loss_only", "ignore_keys"),
        TRAINER,
    ),
    Hook(
        Trainer,
        "compute_loss",
        ("model", "inputs", "return_outputs", "num_items_in_batch"),
        TRAINER,
    ),
    Hook(Trainer, "create_optimizer", (), TRAINER),
    Hook(Trainer, "log", ("logs",), TRAINER),
)
HOOKS = (*GENERATION, *MODELS, *TRAINING)


def by_name(hooks: Iterable[Hook]) -> Any:
    return pytest.mark.parametrize("hook", hooks, ids=lambda hook: hook.name)


@by_name(HOOKS)
def test_hook_exists_with_the_parameters_we_use(hook: Hook) -> None:
    method = getattr(hook.owner, hook.name, None)
    assert callable(method), hook.broken("does not exist")
    missing = set(hook.parameters) - set(inspect.signature(method).parameters)
    assert not missing, hook.broken(f"has no parameter {', '.join(sorted(missing))}")


def test_every_private_override_has_a_canary() -> None:
    """Every method of ours that replaces a private one of transformers is listed above."""
    ours = (
        *(CausalQwenForCausalLM, CausalQwenModel, CausalQwenProcessor),
        CausalTrainer,
    )
    known, found = {hook.name for hook in HOOKS}, set()
    for cls in ours:
        parents = [base for base in cls.__mro__ if base.__module__.startswith("transformers.")]
        for base in cls.__mro__:
            if base.__module__.startswith("causal_qwen."):
                names = (name for name, value in vars(base).items() if inspect.isfunction(value))
                private = (name for name in names if name[0] == "_" and not name.endswith("__"))
                found |= {n for n in private if any(n in vars(parent) for parent in parents)}
    assert found - known == set()
    assert {"_sample", "_init_weights", "_save_checkpoint"} <= found


# ---------------------------------------------------------------- Hugging Face calls the hooks


def record_calls(patch: pytest.MonkeyPatch, cls: type, names: Iterable[str]) -> set[str]:
    """Names of the methods of `cls` that are called from now on."""
    called: set[str] = set()

    def recorder(name: str, method: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return method(*args, **kwargs)

        return record

    for name in names:
        patch.setattr(cls, name, recorder(name, getattr(cls, name)))
    return called


@pytest.fixture(scope="module")
def plain(tiny_fields: dict[str, Any]) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**tiny_fields)).eval()


@by_name([hook for hook in GENERATION if hook.name not in BATCHES])
def test_generate_calls_the_hook(
    plain: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    called = record_calls(monkeypatch, Qwen2ForCausalLM, [hook.name])
    beams = 2 if hook.name == "_beam_search" else 1
    plain.generate(torch.tensor([[1, 2]]), max_new_tokens=1, num_beams=beams, pad_token_id=0)
    assert called, hook.broken("is not called by generate")


def test_streamer_reaches_sample_by_keyword(plain: Qwen2ForCausalLM) -> None:
    """`CausalGenerationMixin._sample` reads kwargs["streamer"]."""
    hook = next(hook for hook in GENERATION if hook.name == "_sample")
    found: dict[str, Any] = {}

    class Spy(Qwen2ForCausalLM):
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            found.update(kwargs)
            return super()._sample(*args, **kwargs)

    class Streamer:
        def put(self, value: Any) -> None: ...
        def end(self) -> None: ...

    streamer = Streamer()
    Spy(plain.config).generate(
        torch.tensor([[1, 2]]), max_new_tokens=1, streamer=streamer, pad_token_id=0
    )
    assert found.get("streamer") is streamer, hook.broken("does not get streamer= by keyword")


@by_name(MODELS)
def test_model_calls_the_hook(
    tiny_fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    cls = Qwen2Model if hook.owner is Qwen2Model else Qwen2ForCausalLM
    called = record_calls(monkeypatch, cls, [hook.name])
    model = cls(Qwen2Config(**{**tiny_fields, "tie_word_embeddings": False}))
    if hook.name == "_get_resized_lm_head":
        model.resize_token_embeddings(100)
    assert called, hook.broken("is not called")


@pytest.fixture(scope="module")
def trainer_calls(
    tiny_fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> set[str]:
    """Hooks that one step with evaluation and a checkpoint calls."""
    rows = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 2
    directory = tmp_path_factory.mktemp("run")
    arguments = TrainingArguments(
        output_dir=str(directory), max_steps=1, save_steps=1, logging_steps=1,
        eval_strategy="steps", eval_steps=1, report_to="none", disable_tqdm=True, use_cpu=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        called = record_calls(patch, Trainer, [hook.name for hook in TRAINING])
        Trainer(
            Qwen2ForCausalLM(Qwen2Config(**tiny_fields)),
            arguments,
            train_dataset=rows,  # type: ignore[arg-type]
            eval_dataset=rows,  # type: ignore[arg-type]
        ).train()
    assert (directory / "checkpoint-1" / "trainer_state.json").is_file()
    return called


@by_name(TRAINING)
def test_trainer_calls_the_hook(trainer_calls: set[str], hook: Hook) -> None:
    assert hook.name in trainer_calls, hook.broken("is not called by train")


# ---------------------------------------------------------------- attributes and module names


def test_tokenizer_backend_can_be_replaced(byte_tokenizer: Make) -> None:
    tokenizer, other = byte_tokenizer(), byte_tokenizer().backend_tokenizer
    tokenizer._tokenizer = other
    assert tokenizer.backend_tokenizer is other, (
        f"transformers {transformers.__version__}: tokenizer._tokenizer is not its backend; "
        "src/causal_qwen/modeling/processor.py relies on it."
    )


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("configuration_auto", "AutoConfig"),
        ("modeling_auto", "AutoModel"),
        ("modeling_auto", "AutoModelForCausalLM"),
        ("processing_auto", "AutoProcessor"),
    ],
)
def test_auto_class_is_in_the_module_whose_import_we_observe(module: str, name: str) -> None:
    path = f"transformers.models.auto.{module}"
    auto = getattr(importlib.import_module(path), name, None)
    assert callable(getattr(auto, "register", None)), (
        f"transformers {transformers.__version__}: {path}.{name}.register does not exist; "
        "src/causal_qwen/_registration.py relies on it."
    )


def test_processor_hooks_take_our_arguments() -> None:
    parameters = inspect.signature(ProcessorMixin.apply_chat_template).parameters
    missing = {"conversation", "add_generation_prompt", "tokenize"} - set(parameters)
    hook = Hook(ProcessorMixin, "apply_chat_template", (), "modeling/processor.py")
    assert not missing, hook.broken(f"has no parameter {', '.join(sorted(missing))}")
