"""Predict a table with Ray Data: parquet in, parquet out, one regressor per worker.

    pip install 'ray[data]'
    python examples/ray_predict.py priced rings.parquet answers

`priced` is a directory that `causal-qwen fit` wrote. Every worker loads it once and predicts blocks
of rows, so that memory is constant and a table may have any length. Without an address Ray starts a
cluster of two workers on this machine; RAY_ADDRESS=auto uses one that runs already, whose machines
must find `priced` under the same path.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray

WORKERS = 2
ROWS = 10_000  # of a block
LEVEL = 0.9


class Predict:
    """A loaded regressor: rows -> the same rows with a median and an interval of every target."""

    def __init__(self, fitted: str) -> None:
        from causal_qwen import CausalTextRegressor

        self.regressor = CausalTextRegressor.load(fitted).set_params(verbose=False)

    def __call__(self, rows: Any) -> Any:
        bounds = self.regressor.predict_interval(rows, LEVEL)
        found = dict(
            zip(("predicted", "low", "high"), (self.regressor.predict(rows), *bounds), strict=True)
        )
        for place, target in enumerate(self.regressor.targets_):
            for suffix, values in found.items():
                rows[f"{target}_{suffix}"] = values.reshape(len(rows), -1)[:, place]
        rows["beyond_training"] = self.regressor.beyond_training(rows)
        return rows


def predict_table(fitted: str, data: str, output: str, rows: int = ROWS) -> None:
    """Read parquet files, predict block by block, write parquet files to the directory `output`."""
    table = ray.data.read_parquet(data)
    answers = table.map_batches(
        Predict,
        fn_constructor_args=[str(Path(fitted).resolve())],
        batch_format="pandas",
        batch_size=rows,
        compute=ray.data.ActorPoolStrategy(size=WORKERS),
    )
    answers.write_parquet(output)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python examples/ray_predict.py FITTED DATA OUTPUT")
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init(num_cpus=WORKERS + 1, include_dashboard=False)  # one more reads and writes
    predict_table(*sys.argv[1:])
