"""Continue a file of prompts with Ray Data: JSON lines in, JSON lines out, one model per worker.

    pip install 'ray[data]'
    python examples/ray_generate.py my-model prompts.jsonl texts.jsonl

`my-model` is a directory that `causal-qwen convert` wrote. Every line of `prompts.jsonl` has a
`prompt` and the `individual` who continues it: {"prompt": "Once upon a time", "individual": 7}.
Every worker loads the model once and generates blocks of rows together; the lines of the output
have the order of the input, and each also has the `text`. Without an address Ray starts a cluster
of two workers on this machine; RAY_ADDRESS=auto uses one that runs already, whose machines must
find `my-model` under the same path.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray

WORKERS = 2
ROWS = 8  # generated together
TOKENS = 40  # new ones, at most


class Generate:
    """A loaded model: rows -> the same rows with the text of every individual."""

    def __init__(self, model: str, tokens: int) -> None:
        from causal_qwen import CausalQwenForCausalLM, CausalQwenProcessor

        self.processor = CausalQwenProcessor.from_pretrained(model)
        self.model = CausalQwenForCausalLM.from_pretrained(model).eval()
        self.tokens = tokens

    def __call__(self, rows: Any) -> Any:
        inputs = self.processor(
            rows["prompt"].tolist(), padding=True, padding_side="left", return_tensors="pt"
        )
        found = self.model.generate(
            **inputs,
            individual=rows["individual"].tolist(),
            max_new_tokens=self.tokens,
            return_dict_in_generate=True,
        )
        begin = inputs["input_ids"].shape[1]
        new = zip(found.sequences[:, begin:], found.numeric_values[:, begin:], strict=True)
        rows["text"] = [self.processor.decode(*one, skip_special_tokens=True) for one in new]
        return rows


def generate_texts(
    model: str, prompts: str, output: str, rows: int = ROWS, tokens: int = TOKENS
) -> None:
    """Read JSON lines, generate block by block, write JSON lines in the same order."""
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    texts = ray.data.read_json(prompts, lines=True).map_batches(
        Generate,
        fn_constructor_args=[str(Path(model).resolve()), tokens],
        batch_format="pandas",
        batch_size=rows,
        compute=ray.data.ActorPoolStrategy(size=WORKERS),
    )
    with Path(output).open("w", encoding="utf-8") as file:
        for row in texts.iter_rows():
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python examples/ray_generate.py MODEL PROMPTS OUTPUT")
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init(num_cpus=WORKERS + 1, include_dashboard=False)  # one more reads and writes
    generate_texts(*sys.argv[1:])
