"""The path of the data: which functions of ours a task calls, in the order of their first calls.

    python scripts/walks.py [--places] [--model DIRECTORY]

Counts the figures of "now" in docs/architecture.md: rooms and changes of room, files and
functions. `--places` also prints the rooms in order, as `scripts/pictures.py` draws them.
A function counts once, where it is first called; imports and helpers inside comprehensions do not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import causal_qwen
from causal_qwen.conversion.convert import default_model
from causal_qwen.conversion.opening import open_model

SOURCE = Path(causal_qwen.__file__).parent


def trace(task: Callable[[], Any]) -> list[tuple[str, str]]:
    """(file, function) of every function of the package, in the order of first calls."""
    seen: dict[tuple[str, str], None] = {}

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)) and "<" not in code.co_name:
            seen.setdefault((code.co_filename, code.co_qualname))

    sys.setprofile(on_event)
    try:
        task()
    finally:
        sys.setprofile(None)
    return list(seen)


def rooms(calls: list[tuple[str, str]]) -> list[str]:
    """The rooms in the order of the walk; neighbours differ."""
    places = (Path(file).relative_to(SOURCE).parts[0].removesuffix(".py") for file, _ in calls)
    return [place for place, _ in groupby(places)]


def walks(path: Path) -> dict[str, Callable[[], Any]]:
    from causal_qwen import CausalTextRegressor
    from causal_qwen.analysis.counterfactual import counterfactual
    from causal_qwen.numpy_engine import Engine
    from causal_qwen.tables.iris import iris_table

    processor, model = open_model(path)
    engine = Engine.from_pretrained(path)
    text = "The ring weighs 0.7 carat and"
    table = iris_table()

    def generate() -> None:
        batch = processor([text], encode_numbers="value", return_tensors="pt")
        options = {"individual": 7, "max_new_tokens": 4, "return_dict_in_generate": True}
        made = model.generate(**batch, **options)
        processor.batch_decode(made.sequences, made.numeric_values)

    def fit() -> None:
        regressor = CausalTextRegressor(verbose=False).fit(table, "petal length")
        regressor.predict_interval(table[:3])

    def train() -> None:
        batch = processor([text], encode_numbers="value", return_tensors="pt")
        model.train()(**batch, labels=batch["input_ids"]).loss.backward()
        model.zero_grad()
        model.eval()

    def imagine() -> None:
        edited = "The king's daughter"
        counterfactual(model, "The king's son", 7, edited, processor=processor, max_new_tokens=4)

    return {
        "a text with a number through `causal` generation": generate,
        "a table through fit and predict": fit,
        "a training batch, forward and backward": train,
        "a counterfactual": imagine,
        "NumPy generation": lambda: engine.generate(text, individual=7, max_new_tokens=4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--places", action="store_true", help="Print the rooms in order, too.")
    parser.add_argument("--model", type=Path, help="A converted model; the embedded one if absent.")
    options = parser.parse_args()
    print("| walk | rooms, changes of room | files, functions |\n|---|---|---|")
    for name, task in walks(options.model or default_model()).items():
        calls = trace(task)
        places, files = rooms(calls), {file for file, _ in calls}
        print(f"| {name} | {len(set(places))}, {len(places) - 1} | {len(files)}, {len(calls)} |")
        if options.places:
            print("  " + " ".join(places))


if __name__ == "__main__":
    main()
