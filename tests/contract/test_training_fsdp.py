"""FSDP2 with two CPU processes trains the same model as one process, and saves it in one piece.

transformers shards a model when it is loaded (`distributed_config`), accelerate when training
starts (`fsdp=True`); both are tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.training.trainer import CausalTrainer

Make = Callable[..., Any]

pytestmark = pytest.mark.slow  # two processes that load, shard, train and save three models

# An even V: FSDP2 computes wrong gradients for tied heads that do not divide, plain Qwen2 too.
VOCABULARY, NUM = 272, 257
BATCH, STEPS = 8, 4
HEADS = {"untied": False, "tied": True}
# All in one launch: starting the processes takes most of the time.
SHARDED = ("loaded-untied", "loaded-tied", "accelerate-tied")
SCRIPT = """
import json, os, sys, torch
from pathlib import Path
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from causal_qwen.training.data import Collator, encode_rows
from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.training.trainer import CausalTrainer, CausalTrainingArguments

begin = AcceleratorState.__init__

def begin_on_cpu(self, *args, fsdp_plugin=None, **kwargs):
    # accelerate silently replaces FSDP by DDP on CPUs; everything else is unchanged
    begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP

AcceleratorState.__init__ = begin_on_cpu
LOADED = {"distributed_config": DistributedConfig(fsdp_size=int(os.environ.get("WORLD_SIZE", 1)))}
LAYERS = {"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}
ACCELERATE = {"fsdp": True, "fsdp_config": LAYERS, "save_steps": 2}

directory, output, names, batch, steps = sys.argv[1:]
processor = CausalQwenProcessor.from_pretrained(directory, encode_numbers="value")
rows = [{"text": f"{a} + {b} makes {a + b}"} for a in range(1, 9) for b in range(1, 6)]
for name in names.split(","):
    way, _, head = name.rpartition("-")
    options = LOADED if way == "loaded" else {}
    trainer = CausalTrainer(
        model=CausalQwenForCausalLM.from_pretrained(f"{directory}/{head}", **options),
        args=CausalTrainingArguments(
            output_dir=f"{output}/{name}", max_steps=int(steps), learning_rate=3e-3,
            per_device_train_batch_size=int(batch), logging_steps=1, use_cpu=True,
            report_to="none", disable_tqdm=True, remove_unused_columns=False,
            dataloader_pin_memory=False,
            **(ACCELERATE if way == "accelerate" else {"save_strategy": "no"}),
        ),
        train_dataset=encode_rows(rows, processor, 64), data_collator=Collator(0),
    )
    trainer.train()
    assert all(isinstance(p, DTensor) == bool(way) for p in trainer.model.parameters())
    trainer.save_model()
    if trainer.is_world_process_zero():
        Path(output, name, "log.json").write_text(json.dumps(trainer.state.log_history))
if torch.distributed.is_initialized():  # otherwise the first to exit may end the other's threads
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def runs(make_model: Make, byte_tokenizer: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training in one process, and in two that share the batch."""
    models, output = (tmp_path_factory.mktemp(name) for name in ("models", "runs"))
    CausalQwenProcessor(byte_tokenizer()).save_pretrained(models)
    fields = {"vocab_size": VOCABULARY, "num_token_id": NUM, "pad_token_id": 0}
    for name, is_tied in HEADS.items():
        model = make_model(
            **fields, initializer_range=0.1, tie_word_embeddings=is_tied, compat_loss_weight=5.0
        )
        model.save_pretrained(models / name)
    script = models / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for start, names, batch in (([], HEADS, BATCH), (launch, SHARDED, BATCH // 2)):
        rest = [str(models), str(output), ",".join(names), str(batch), str(STEPS)]
        command = [sys.executable, *start, str(script), *rest]
        subprocess.run(command, check=True, env=environment, timeout=1800)  # only against hanging
    return output


@pytest.fixture(params=SHARDED)
def pair(runs: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """The run in one process, and in two."""
    return runs / request.param.rpartition("-")[2], runs / request.param


def curve(run: Path, metric: str) -> list[float]:
    log = json.loads((run / "log.json").read_text())
    return [entry[metric] for entry in log if metric in entry]


@pytest.mark.parametrize("metric", ["total_loss", "reg_loss_effective", "grad_norm"])
def test_sharded_training_equals_one_process_with_the_whole_batch(
    pair: tuple[Path, Path], metric: str
) -> None:
    one, two = (curve(run, metric) for run in pair)
    assert len(one) == STEPS
    assert two == pytest.approx(one, rel=1e-5)
    assert metric == "grad_norm" or one[-1] < 0.9 * one[0]


def test_model_saved_by_shards_loads_in_one_process(pair: tuple[Path, Path]) -> None:
    ids = torch.arange(1, 40).view(3, 13)
    whole, *others = (
        CausalQwenForCausalLM.from_pretrained(path).eval()
        for path in (*pair, *pair[1].glob(f"checkpoint-{STEPS}"))
    )
    assert len(others) == (2 if "accelerate" in pair[1].name else 1)
    with torch.no_grad():
        expected = whole(ids)
        for other in others:
            assert other.state_dict().keys() == whole.state_dict().keys()
            found = other(ids)
            for name in ("logits", "scale_S", "loc_U", "scale_U", "loc_Y", "scale_Y"):
                torch.testing.assert_close(
                    found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name
                )


def test_tied_vocabulary_that_does_not_divide_is_refused(make_model: Make) -> None:
    """Its gradients would be wrong without an error; see `_check_shards`."""
    trainer = SimpleNamespace(
        causal_model=make_model(vocab_size=271, tie_word_embeddings=True),
        args=SimpleNamespace(world_size=2),
        is_fsdp_enabled=True,
        authors=None,
    )
    with pytest.raises(ValueError, match=r"271.*resize_token_embeddings\(272\)"):
        CausalTrainer._check_shards(trainer)
    trainer.is_fsdp_enabled = False
    CausalTrainer._check_shards(trainer)
