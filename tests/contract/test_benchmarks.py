"""Every benchmark runs with --quick and writes its page and JSON; a bad --output is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DECODE_KEYS = {"model", "dtype", "scale_U", "mode", "rounds", "ms", "ratio", "low", "high"}
ENGINE_KEYS = {"shape", "stored", "bandwidth_gb_s", "weights_gb", "decode", "prefill", "alone"}
LEARNING_KEYS = {"objective", "rate", "seed", "accuracy", "softmax_accuracy", "sum_p", "ovr_nll"}
LOSS_KEYS = {"what", "peer", "seconds", "ratio", "low", "high", "megabytes", "memory_ratio"}
INDIVIDUALS_KEYS = {
    "grid": {"speakers", "prompts", "tokens", "kinds", "sizes"},
    "speakers": {"speakers", "prompts", "tokens", "kinds", "sizes"},
    "trained": {"speakers", "prompts", "tokens", "steps", "kinds", "sizes"},
    "stability": {"edits", "speakers", "tokens", "kinds", "sizes"},
    "truth": {"trials", "draws", "individuals", "gumbel", "sizes"},
    "analytic": {"draws", "positions", "tokens", "within", "quantiles_within", "ratio"}
    | {"plain_within", "individuals", "differs", "sizes"},
    "replay": {"texts", "choices", "unsure", "ways", "sizes"},
    "reading": {"tokens", "texts", "sizes"},
}

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def call(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments],
            cwd=tmp_path,
            env={**os.environ, "CAUSAL_QWEN_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )

    return call


@pytest.fixture
def results(run: Run, tmp_path: Path) -> Callable[..., tuple[str, Any]]:
    """`results(name, *arguments)`: the page and the JSON of a quick run."""

    def call(name: str, *arguments: str) -> tuple[str, Any]:
        output = tmp_path / "pages" / f"{name}.md"
        done = run(name, *arguments, "--quick", "--output", str(output))
        assert done.returncode == 0, done.stderr[-2000:]
        page = output.read_text(encoding="utf-8")
        assert page.startswith("# ")
        assert "|---|" in page
        return page, json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))

    return call


def test_an_existing_directory_as_output_is_refused_at_the_start(run: Run, tmp_path: Path) -> None:
    done = run("engine", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"{tmp_path} is a directory; name a file" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["decode", "individuals all", "learning --data none.txt", "loss"],
)
def test_every_benchmark_refuses_a_directory_as_output(
    command: str, run: Run, tmp_path: Path
) -> None:
    done = run(*command.split(), "--output", str(tmp_path))
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_reproduce_refuses_a_file_as_output_directory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("", encoding="utf-8")
    done = run("reproduce", "--output", "page.md")
    assert done.returncode == 2
    assert "page.md is a file" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_decode_compares_every_mode_with_the_base_model(
    results: Callable[..., tuple[str, Any]], tiny_directory: Path
) -> None:
    _, rows = results("decode", "--model", str(tiny_directory), "--rounds", "1")
    assert all(row.keys() == DECODE_KEYS for row in rows)
    modes = {"Qwen2 greedy", "standard", "sampling", "causal", "compatible"}
    assert {row["mode"] for row in rows} == modes | {"Qwen2 load", "CausalQwen load"}
    assert {row["ratio"] for row in rows if row["mode"].startswith("Qwen2")} == {1.0}


@pytest.mark.slow
def test_engine_measures_speed_memory_and_context(
    results: Callable[..., tuple[str, Any]], tiny_directory: Path
) -> None:
    page, rows = results("engine", "--model", str(tiny_directory))
    assert rows[0].keys() == ENGINE_KEYS | {"context_ms"}
    assert rows[0]["alone"].keys() == {"NumPy float32", "torch float32"}
    assert rows[0]["alone"]["NumPy float32"].keys() == {"load_s", "first_s", "peak_rss_gb"}
    assert "| bar | figure | asked | met |" in page


def test_a_loop_is_a_phrase_that_is_said_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from _texts import has_loop

    assert has_loop([9, *[1, 2] * 4])
    assert has_loop([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7])
    assert not has_loop([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 8])
    assert not has_loop([1, 2, 3, 4, 5, 6, 9, 9, 1, 2, 3, 4, 5, 6])  # again, but later
    assert not has_loop([1, 1, 1, 1, 1, 1])
    assert has_loop([1, 1, 1, 1, 1, 1, 1])
    assert not has_loop([])


@pytest.mark.slow
def test_individuals_writes_all_sections(
    results: Callable[..., tuple[str, Any]], tiny_directory: Path, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    line = json.dumps({"question": "How many are 2 and 3?", "answer": "2+3=<<2+3=5>>5\n#### 5"})
    data.write_text(f"{line}\n" * 30, encoding="utf-8")
    page, parts = results("individuals", "all", "--model", str(tiny_directory), "--data", str(data))
    assert {name: set(part) for name, part in parts.items()} == INDIVIDUALS_KEYS
    assert page.count("\n## ") == len(INDIVIDUALS_KEYS)


@pytest.mark.slow
def test_learning_trains_every_objective(
    results: Callable[..., tuple[str, Any]], tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    line = json.dumps({"question": "How many pencils are in four boxes?", "answer": "12 * 4 = 48"})
    data.write_text(f"{line}\n" * 200, encoding="utf-8")
    _, rows = results("learning", "--data", str(data), "--jobs", "1")
    assert all(row.keys() == LEARNING_KEYS | {"softmax_nll"} for row in rows)
    assert len({row["objective"] for row in rows}) == 3


@pytest.mark.slow
def test_loss_measures_time_and_memory_of_every_peer(
    results: Callable[..., tuple[str, Any]],
) -> None:
    _, rows = results("loss", "--step")
    assert all(row.keys() == LOSS_KEYS for row in rows)
    assert len(rows) == 5 + 5 + 3
    assert all(row["megabytes"] is not None for row in rows[:10])
