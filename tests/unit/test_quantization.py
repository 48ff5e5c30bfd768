"""int8 weights: rows and scales, products, directories, and what torch says to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _random_checkpoint import TINY, random_checkpoint
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from causal_qwen.numpy_engine import Engine
from causal_qwen.numpy_engine.fast import Kernel, Matrix, project
from causal_qwen.numpy_engine.quantization import quantize, quantize_rows

PROMPT = [5, 17, 44, 3, 96, 60, 21, 8, 33, 71]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny causal model in bfloat16 with a tied head."""
    place = tmp_path_factory.mktemp("base")
    random_checkpoint(place, TINY, "bfloat16", std=0.1, is_causal=True)
    (place / "generation_config.json").write_text('{"noise_gain": 2.0}', encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def small(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("small") / "int8"
    quantize(base, output)
    return output


def int8_matrix(rows: int = 37, columns: int = 33) -> tuple[Matrix, np.ndarray]:
    """A matrix, and its weights in float64."""
    weight = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    words, scales = quantize_rows(weight)
    return Matrix(words, scales), words.astype(np.float64) * scales


def test_a_row_is_rounded_to_127_steps_of_its_largest_weight() -> None:
    words, scales = quantize_rows(np.array([[2.0, -1.0, 0.009], [0, 0, 0], [1e-3, 0, -2.54e-1]]))
    assert words.tolist() == [[127, -63, 1], [0, 0, 0], [0, 0, -127]]
    assert words.dtype == np.int8
    assert np.allclose(scales[:, 0], [2 / 127, 1, 0.254 / 127], rtol=4e-5)
    exact = words * scales.astype(np.float64)
    assert np.array_equal(exact, (words * scales).astype(np.float64))  # no rounding in float32


@pytest.mark.parametrize("count", [1, 3, 9])
def test_products_of_int8_are_those_of_the_rounded_weights(count: int) -> None:
    matrix, wide = int8_matrix()
    x = np.random.default_rng(1).standard_normal((count, 33)).astype(np.float32)
    bound = 1e-6 * (np.abs(x) @ np.abs(wide).T)
    assert (np.abs(matrix(x) - x @ wide.T) <= bound).all()
    rows = np.array([5, 0, 36])
    assert np.allclose(matrix.rows(rows), wide[rows], rtol=1e-6)
    assert np.allclose(matrix.row_norms(), np.abs(wide).sum(1), rtol=1e-6)
    assert np.allclose(matrix.absolute(x[0] ** 2, rows), np.abs(wide[rows]) @ x[0] ** 2, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 4, 7, 8])
@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("has_threads", [False, True])
def test_the_kernels_loops_compute_what_numpy_computes(
    count: int, rows: int, has_threads: bool
) -> None:
    matrix, wide = int8_matrix(rows)
    x = np.random.default_rng(1).standard_normal((count, 33)).astype(np.float32)
    half = Matrix(wide.astype(bfloat16))
    for one, weights in ((matrix, wide), (half, half.stored.astype(np.float64))):
        one.kernel = Kernel(lambda loop: loop, has_threads)
        assert np.allclose(project(x, one)[0], x @ weights.T, atol=1e-4)


IN_A_FORK = """
import os, sys
from causal_qwen.numpy_engine import Engine, fast

path, ids = sys.argv[1], [int(word) for word in sys.argv[2:]]
engine = Engine.from_pretrained(path, kernel="numba")
print(fast.numba_kernel().has_threads)
for is_child in (False, True):
    if is_child and os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
    for _ in range(3):
        print(*engine.generate(ids, mode="compatible", max_new_tokens=12).ids, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only where processes fork")
def test_compiled_kernels_generate_the_text_of_numpy_also_in_a_fork(small: Path) -> None:
    pytest.importorskip("numba")
    options: dict[str, Any] = {"mode": "compatible", "max_new_tokens": 12}
    text = Engine.from_pretrained(small).generate(PROMPT, **options).ids
    command = [sys.executable, "-c", IN_A_FORK, str(small), *map(str, PROMPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", *[" ".join(map(str, text))] * 6]


def test_int8_in_memory_is_the_quantised_directory(base: Path, small: Path) -> None:
    memory, stored = Engine.from_pretrained(base, dtype="int8"), Engine.from_pretrained(small)
    logits = stored.logits(PROMPT)
    assert np.array_equal(memory.logits(PROMPT), logits)
    assert np.array_equal(Engine.from_pretrained(small, dtype="int8").logits(PROMPT), logits)
    wide = Engine.from_pretrained(small, dtype="float32")
    assert wide.model.head.stored.dtype == np.float32
    assert np.abs(wide.logits(PROMPT) - logits).max() < 2e-5
    exact = Engine.from_pretrained(base)
    assert 1e-3 < np.abs(exact.logits(PROMPT) - logits).max() < 1
    assert np.array_equal(
        exact.model.embed(np.array([PROMPT])), stored.model.embed(np.array([PROMPT]))
    )
    assert stored.saved == {"noise_gain": 2.0}


def test_equal_scales_stay_equal(tmp_path: Path, base: Path) -> None:
    model = random_checkpoint(tmp_path, TINY, std=0.1, is_causal=True)
    tensors = load_file(model / "model.safetensors")
    norms = np.abs(tensors["model.embed_tokens.weight"]).sum(1)
    tensors["action.decision_noise"] = norms.max() - norms
    save_file(tensors, model / "model.safetensors")
    heads = Engine.from_pretrained(model, dtype="int8").heads
    assert heads is not None
    total = heads.row_norms() + heads.decision_noise
    assert np.abs(total / total[0] - 1).max() < 2e-6
    assert np.abs(heads.row_norms() / norms - 1).max() > 1e-5  # the weights did change


def test_torch_refuses_int8_in_one_sentence(small: Path, tmp_path: Path) -> None:
    from transformers import Qwen2ForCausalLM

    from causal_qwen import CausalQwenForCausalLM

    with pytest.raises(ValueError, match=r"int8 weights.*--engine numpy"):
        CausalQwenForCausalLM.from_pretrained(small)
    quantize(random_checkpoint(tmp_path / "plain", TINY), tmp_path / "int8")
    with pytest.raises(ImportError, match="compressed"):
        Qwen2ForCausalLM.from_pretrained(tmp_path / "int8")


def test_quantize_refuses_what_it_cannot_do(base: Path, small: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quantised already"):
        quantize(small, tmp_path / "twice")
    with pytest.raises(FileExistsError, match="not empty"):
        quantize(base, small)
    with pytest.raises(ValueError, match="contains"):
        quantize(base, base)
    assert not (tmp_path / "twice").exists()


def drop_scales(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    del tensors["lm_head.weight_scale"]


def name_other_method(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["quantization_config"]["quant_method"] = "gptq"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop_scales, "lacks .*weight_scale"),
        (name_other_method, "quant_method='gptq'"),
    ],
)
def test_damaged_int8_directories_are_refused(
    damage: Any, words: str, small: Path, tmp_path: Path
) -> None:
    tensors = load_file(small / "model.safetensors")
    config = json.loads((small / "config.json").read_text(encoding="utf-8"))
    damage(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        Engine.from_pretrained(tmp_path)


def test_precision_is_exact_where_rounding_changes_nothing(base: Path, tmp_path: Path) -> None:
    coarse = random_checkpoint(tmp_path, TINY, std=0.1)
    tensors = load_file(coarse / "model.safetensors")
    for name, weight in tensors.items():
        if weight.ndim == 2:
            words, _ = quantize_rows(weight)
            words[:, 0] = 127
            tensors[name] = words.astype(np.float32) / 1024
    save_file(tensors, coarse / "model.safetensors")
    ids = list(range(60))

    def gap(path: Path) -> float:
        exact, rounded = (Engine.from_pretrained(path, kind).logits(ids) for kind in (None, "int8"))
        return float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact))

    assert gap(coarse) < 1e-6
    assert 1e-4 < gap(base) < 0.05


def test_verify_passes_with_int8(base: Path, small: Path) -> None:
    from causal_qwen.analysis.verify import verify

    result = verify(base, PROMPT, max_new_tokens=3, dtype="int8")
    assert result.is_passed, result.checks
    assert verify(small, PROMPT, max_new_tokens=3).is_passed
