"""Score a model on tasks of lm-eval-harness by their names, beside its base model.

    pip install lm-eval
    python examples/lm_eval_tasks.py my-model arc_easy hellaswag --base HuggingFaceTB/SmolLM2-135M

Prints a Markdown table: every metric with its standard error, and the difference to the base.
Before training the two agree. Tasks are downloaded by the harness; `--include DIRECTORY` uses tasks
of your own (YAML files) instead, and `--limit 100` takes the first rows of each.
"""

from __future__ import annotations

import argparse
from typing import Any

import lm_eval
import torch
from lm_eval.tasks import TaskManager

import causal_qwen  # noqa: F401 - registers the model type with transformers

Scores = dict[tuple[str, str], tuple[float, float]]  # (task, metric) -> value, standard error


def score(model: str, tasks: list[str], include: str | None, limit: int | None) -> Scores:
    """What `lm_eval --model hf --model_args pretrained=MODEL --tasks ...` computes."""
    manager = TaskManager(include_path=include, include_defaults=include is None)
    found: Any = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": model},
        tasks=tasks,
        task_manager=manager,
        limit=limit,
        device="cuda" if torch.cuda.is_available() else "cpu",
        batch_size=8,
    )
    scores: Scores = {}
    for task, results in found["results"].items():
        for name, value in results.items():
            metric, _, of = name.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = results.get(f"{metric}_stderr,{of}")
                scores[task, metric] = (value, error if isinstance(error, float) else float("nan"))
    return scores


def table(models: dict[str, Scores]) -> str:
    """Markdown: a row per task and metric, a column per model, the difference to the last one."""
    first, *others = models.values()
    titles = ["task", "metric", *models, *(["difference"] if others else [])]
    lines = [titles, ["---"] * len(titles)]
    for key, (value, _) in first.items():
        cells = [f"{v:.4f} ± {error:.4f}" for v, error in (of[key] for of in models.values())]
        difference = [f"{value - others[-1][key][0]:+.4f}"] if others else []
        lines.append([*key, *cells, *difference])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--base")
    parser.add_argument("--include")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    names = [options.model, *([options.base] if options.base else [])]
    models = {name: score(name, options.tasks, options.include, options.limit) for name in names}
    print(table(models))


if __name__ == "__main__":
    main()
