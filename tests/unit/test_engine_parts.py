"""The NumPy engine's parts, each against torch or against its definition in float64."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from transformers import Qwen2Config as TorchConfig
from transformers.generation import (
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.qwen2 import modeling_qwen2 as hf

from causal_qwen.decoding.decision import choose
from causal_qwen.numpy_engine import fast
from causal_qwen.numpy_engine.fast import ROWS_PER_SUM, Matrix, project
from causal_qwen.numpy_engine.qwen2 import (
    Qwen2Config,
    RotaryEmbedding,
    apply_rotary_pos_emb,
    attend,
    attention_forward,
    causal_mask,
    repeat_kv,
    rms_norm,
    swiglu,
)
from causal_qwen.numpy_engine.sampling import (
    draw,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    softmax,
)
from causal_qwen.numpy_engine.weights import read_safetensors, widen
from causal_qwen.text.numerals import render
from causal_qwen.text.segmentation import interleave, stable_prefix

GUARD = 1800  # seconds: ends a test that hangs; no test measures time
FIELDS = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---------------------------------------------------------------- weights


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_bfloat16_is_widened_and_narrowed_as_in_torch(numbers: list[float]) -> None:
    values = np.asarray(numbers, np.float32)
    expected = torch.from_numpy(values).bfloat16()
    stored = values.astype(bfloat16)
    assert stored.view(np.uint16).tolist() == expected.view(torch.uint16).tolist()
    assert np.array_equal(widen(stored), expected.float().numpy())


def test_a_file_with_every_type_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    values = torch.from_numpy(random(5, 6))
    types = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    save_file({name: values.to(dtype) for name, dtype in types.items()}, tmp_path / "x.safetensors")
    ours = read_safetensors(tmp_path / "x.safetensors")
    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        assert np.array_equal(widen(ours[name]), tensor.float().numpy()), name
    assert not ours["f32"].flags.writeable  # a map of the file, not a copy of it


@pytest.mark.parametrize(
    "header",
    [b"[]", b"7", b'{"a": {}}', b'{"a": 3}', b'{"a": {"dtype": "F32", "data_offsets": [0]}}']
    + [
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [%d, %d]}}' % edges
        for edges in ((-16, -8), (8, 0), (0, 16), (0, 4))
    ],
)
def test_damaged_header_raises_and_names_the_file(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        read_safetensors(path)


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("kind", [np.float32, np.float16, bfloat16])
@pytest.mark.parametrize("columns", [32, 33, 1900])  # an odd number; a sum taken in parts
@pytest.mark.parametrize("count", [1, 3, 9])
def test_products_of_stored_weights_are_right(kind: Any, columns: int, count: int) -> None:
    weight, x = random(ROWS_PER_SUM + 37, columns), random(count, columns, seed=1)
    stored = weight.astype(kind)
    matrix = Matrix(stored)
    wide = stored.astype(np.float64)
    expected = x.astype(np.float64) @ wide.T
    bound = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(wide).T)
    assert matrix(x).shape == (count, ROWS_PER_SUM + 37)
    assert (np.abs(matrix(x) - expected) <= bound).all()
    assert np.allclose(matrix.row_norms(), np.abs(wide).sum(1), rtol=1e-6)
    rows = np.array([5, 0, ROWS_PER_SUM + 1])
    assert np.allclose(matrix.absolute(x[0] ** 2, rows), np.abs(wide[rows]) @ x[0] ** 2, rtol=1e-5)
    assert np.array_equal(matrix.rows(rows), wide[rows])


@pytest.mark.parametrize("kind", [np.float32, np.float16, bfloat16])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_products_do_not_depend_on_the_number_of_threads(
    workers: int, count: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [random(size, 16, seed=size) for size in (1, 7, ROWS_PER_SUM + 5)]
    matrices = [Matrix(w.astype(kind)) for w in weights]
    x = random(count, 16)
    expected = project(x, *matrices)
    monkeypatch.setattr(fast, "THREADS", workers)
    monkeypatch.setattr(fast, "MIN_PARALLEL", 0)  # use threads for small products too
    for ours, theirs in zip(project(x, *matrices), expected, strict=True):
        assert np.allclose(ours, theirs, atol=1e-6)


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "THREADS", 2)

    def fail() -> None:
        raise ValueError("here")

    for tasks in ([lambda: None, fail], [fail, lambda: None]):
        with pytest.raises(ValueError, match="here"):
            fast.run(tasks)
    done: list[int] = []
    fast.run([lambda: done.append(0), lambda: done.append(1)])  # the workers are free again
    assert sorted(done) == [0, 1]


def test_ctrl_c_leaves_a_pool_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "THREADS", 2)

    def interrupt() -> None:
        raise KeyboardInterrupt

    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        fast.run([interrupt, lambda: done.append(0)])
    assert done == [0]  # nobody writes into arrays that the caller has left
    fast.run([lambda: done.append(1), lambda: done.append(2)])
    assert sorted(done) == [0, 1, 2]


def test_callers_at_once_all_have_their_tasks_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "THREADS", 2)
    done: list[str] = []

    def caller() -> None:
        fast.run([lambda: done.append("a"), lambda: done.append("b")])

    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(caller) for _ in range(40)]:
            one.result(timeout=GUARD)
    assert sorted(done) == 40 * ["a"] + 40 * ["b"]


@pytest.fixture
def two_blas_threads() -> Iterator[Any]:
    """The BLAS that NumPy has, told to use two threads since the engine was imported."""
    (library,) = (one for one in fast._BLAS if "numpy" in str(one.filepath))
    before = library.num_threads
    library.set_num_threads(2)
    yield library
    library.set_num_threads(before)


def test_blas_is_limited_to_one_thread_from_any_thread(two_blas_threads: Any) -> None:
    """threadpoolctl obeys the first thread that sets anything, and no other while it lives."""

    def seen_inside() -> int:
        with fast.blas_alone():
            return int(two_blas_threads.num_threads)

    assert seen_inside() == 1
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(seen_inside).result(timeout=GUARD) == 1
    assert two_blas_threads.num_threads == 2


def is_true_in_a_fork(claim: Callable[[], bool]) -> bool:
    if (child := os.fork()) == 0:
        is_true = False
        try:
            is_true = claim()
        finally:
            os._exit(0 if is_true else 1)
    deadline = time.monotonic() + GUARD
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    return ended == (child, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only where processes fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_workers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "THREADS", 2)
    fast.run([lambda: None, lambda: None])  # a worker is there

    def all_is_done() -> bool:
        done: list[int] = []
        fast.run([lambda: done.append(0), lambda: done.append(1)])
        return len(done) == 2

    assert is_true_in_a_fork(all_is_done)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only where processes fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_amid_a_product_has_its_blas_threads(two_blas_threads: Any) -> None:
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with fast.blas_alone():
            is_inside.set()
            may_leave.wait(30)

    other = threading.Thread(target=stay)
    other.start()
    try:
        assert is_inside.wait(30)

        def has_two() -> bool:
            with fast.blas_alone():
                pass
            return two_blas_threads.num_threads == 2

        assert is_true_in_a_fork(has_two)
    finally:
        may_leave.set()
        other.join()


# ---------------------------------------------------------------- Qwen2


@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 5, 64)])
def test_rms_norm_equals_qwen2s(shape: tuple[int, ...]) -> None:
    x, weight = 3 * random(*shape), random(64, seed=1)
    theirs = hf.Qwen2RMSNorm(64, eps=1e-5)
    theirs.weight.data = torch.from_numpy(weight)
    expected = theirs(torch.from_numpy(x)).detach().numpy()
    assert np.allclose(rms_norm(x, weight, 1e-5), expected, rtol=2e-6, atol=1e-6)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e6},
    "yarn": {
        "rope_theta": 1e6,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn with options": {
        "rope_theta": 1e4,
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
        "attention_factor": 1.1,
    },
    "llama3": {
        "rope_theta": 5e5,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("name", list(ROPES))
def test_rotations_are_qwen2s_for_every_scaling(name: str) -> None:
    fields = {**FIELDS, "rope_parameters": dict(ROPES[name])}
    config = Qwen2Config.from_dict(json.loads(json.dumps(fields)))
    ours, theirs = RotaryEmbedding(config), hf.Qwen2RotaryEmbedding(TorchConfig(**fields))
    positions = np.arange(200)[None]
    expected = theirs(torch.zeros(1), torch.from_numpy(positions))
    for mine, other in zip(ours(positions), expected, strict=True):
        assert np.abs(mine[:, 0] - other.numpy()).max() < 3e-5


def test_the_documented_names_compute_what_transformers_computes() -> None:
    q, k, v = random(2, 4, 5, 16), random(2, 2, 5, 16, seed=1), random(2, 2, 5, 16, seed=2)
    angle = random(2, 5, 16, seed=3)
    cos, sin = np.cos(angle), np.sin(angle)
    torch_q, torch_k, torch_v, torch_cos, torch_sin = map(torch.from_numpy, (q, k, v, cos, sin))
    expected = hf.apply_rotary_pos_emb(torch_q, torch_k, torch_cos, torch_sin)
    ours = apply_rotary_pos_emb(q, k, cos[:, None], sin[:, None])
    for mine, theirs in zip(ours, expected, strict=True):
        assert np.allclose(mine, theirs.numpy(), atol=1e-6)
    assert np.array_equal(repeat_kv(k, 2), hf.repeat_kv(torch_k, 2).numpy())

    class Module:
        num_key_value_groups = 2
        training = False

    mask = causal_mask(5, 5)
    output, weights = hf.eager_attention_forward(
        Module(), torch_q, torch_k, torch_v, torch.from_numpy(mask), 0.25
    )
    ours = attention_forward(q, k, v, mask, 0.25, 2)
    assert np.allclose(ours[0], output.numpy(), atol=1e-6)
    assert np.allclose(ours[1], weights.numpy(), atol=1e-6)


@pytest.mark.parametrize("workers", [1, 2, 3])
@given(
    new=st.integers(1, 4) | st.integers(1, 40),
    past=st.integers(0, 40),
    groups=st.integers(1, 3),
)
def test_attention_in_blocks_is_attention_as_defined(
    workers: int, new: int, past: int, groups: int
) -> None:
    seen = new + past
    query, key, value = (
        random(2, 2 * groups, new, 8),
        random(2, 2, seen, 8, seed=1),
        random(2, 2, seen, 8, seed=2),
    )
    mask = causal_mask(new, seen)
    expected, _ = attention_forward(query, key, value, mask, 8**-0.5, groups)
    with patch.object(fast, "THREADS", workers):
        ours = attend(query, key, value).reshape(expected.shape)
    assert np.allclose(ours, expected, atol=1e-5)


def test_swiglu_is_torchs_and_survives_extreme_gates() -> None:
    gate, up = 30 * random(3, 70_000), random(3, 70_000, seed=1)
    gate[0, :3] = (-1e4, 1e4, -90)
    expected = torch.nn.functional.silu(torch.from_numpy(gate)) * torch.from_numpy(up)
    assert np.allclose(swiglu(gate.copy(), up), expected.numpy(), rtol=1e-5, atol=1e-6)
    turned = swiglu(np.asfortranarray(gate), up)
    assert np.allclose(turned, expected.numpy(), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- choices


@given(st.integers(0, 10_000))
def test_ties_are_broken_alike_in_numpy_and_torch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loc = rng.integers(0, 4, 30).astype(np.float32)
    scale = (1 + rng.choice([0, 2e-6, 1e-3], 30)).astype(np.float32)
    threshold = np.full(30, 5, np.float32)
    expected = choose(*map(torch.from_numpy, (loc, scale, threshold)))
    assert choose(loc, scale, threshold) == int(expected)


@given(st.integers(0, 10_000), st.integers(1, 40), st.floats(0.01, 0.99))
def test_candidates_are_those_of_transformers(seed: int, k: int, p: float) -> None:
    rng = np.random.default_rng(seed)
    scores = np.round(2 * rng.standard_normal((2, 30)), 1).astype(np.float32)
    ids = rng.integers(0, 30, (2, 4))
    tensor, tokens = torch.from_numpy(scores), torch.from_numpy(ids)
    assert np.array_equal(keep_top_k(scores, k), TopKLogitsWarper(k)(None, tensor).numpy())
    penalty = RepetitionPenaltyLogitsProcessor(1.3)(tokens, tensor).numpy()
    assert np.allclose(penalize_repetition(scores, ids, 1.3), penalty)
    fine = rng.standard_normal((2, 30)).astype(np.float32)  # no ties: their order is not promised
    expected = TopPLogitsWarper(p)(None, torch.from_numpy(fine)).numpy()
    assert np.array_equal(keep_top_p(fine, p), expected)


def test_draws_follow_softmax_and_repeat_by_seed() -> None:
    scores = np.array([0.0, 1.0, -np.inf, 2.0], np.float32)
    drawn = np.array([draw(scores, 5, i) for i in range(4000)])
    assert np.array_equal(drawn[:50], [draw(scores, 5, i) for i in range(50)])
    assert np.abs(np.bincount(drawn, minlength=4) / 4000 - softmax(scores)).max() < 0.02
    assert not (drawn == 2).any()


# ---------------------------------------------------------------- a text that grows


@given(st.lists(st.sampled_from([2.0, -0.5, 1e25, *"05., eE+-a", " 7", "\ufffd"]), max_size=8))
@example([2.0, ".", "5"])
@example([2.0, "e", "+", "0"])
def test_stable_prefix_never_changes_as_text_grows(said: list[Any]) -> None:
    def shown(tokens: list[Any]) -> str:
        texts, numbers = [""], []
        for token in tokens:
            if isinstance(token, float):
                numbers.append(render(token))
                texts.append("")
            else:
                texts[-1] += token
        return interleave(texts, numbers)

    for end in range(len(said)):
        assert shown(said).startswith(stable_prefix(shown(said[:end])))
