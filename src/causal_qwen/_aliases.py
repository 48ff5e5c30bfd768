"""Module paths of version 0.3.0: importing one still works, and warns where it moved."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "causal_qwen"

MOVED = {  # below the package: old path -> new path
    "abduction": "modeling.abduction",
    "action": "modeling.action",
    "calibrate": "conversion.calibration",
    "cauchy": "modeling.cauchy",
    "chat": "cli.chat",
    "checkpoints": "training.checkpoints",
    "choices": "options",
    "cli.house": "cli.setup",
    "cli.numbers": "cli.regression",
    "cli.speaking": "cli.generation",
    "config": "modeling.configuration",
    "conformal": "regression.conformal",
    "convert": "conversion.convert",
    "counterfactual": "analysis.counterfactual",
    "data": "training.data",
    "decision": "modeling.decision",
    "demo": "cli.demo",
    "doctor": "cli.doctor",
    "documents": "generation.documented_calls",
    "embedding": "modeling.value_embedding",
    "engine.causal": "engine.heads",
    "engine.random": "engine.random_checkpoint",
    "engine.text": "engine.tokenization",
    "features": "regression.features",
    "fit": "regression.head",
    "gumbel": "analysis.gumbel",
    "home": "paths",
    "individual": "individuals.individual",
    "loss": "modeling.loss",
    "metrics": "training.metrics",
    "mock": "training.simulation",
    "numerals": "text.numerals",
    "one_vs_rest": "modeling.one_vs_rest",
    "passage": "analysis.token_sequence",
    "pieces": "text.segmentation",
    "pipeline": "generation.pipeline",
    "posterior": "analysis.posterior",
    "prediction": "regression.prediction",
    "processor": "modeling.processor",
    "progress": "training.progress",
    "regressor": "regression.regressor",
    "report": "training.report",
    "scratch": "training.from_scratch",
    "shown": "terminal",
    "speech": "generation.streaming",
    "tables": "regression.sentences",
    "tabular": "regression.csv_io",
    "train": "training.run",
    "trainer": "training.trainer",
    "value": "modeling.value_space",
    "verify": "analysis.verify",
    "watch": "engine.live_view",
}
RENAMED: dict[str, dict[str, str]] = {  # old path -> old name -> new name, or "new.path:name"
    "calibrate": {"end_ids": "generation.streaming:end_ids"},
    "convert": {
        "as_qwen2": "conversion.base_models:as_qwen2",
        "assemble": "conversion.checkpoint_io:assemble",
        "damaged_files_named": "conversion.checkpoint_io:damaged_files_named",
        "encode": "conversion.checkpoint_io:encode_texts",
        "load_base": "conversion.base_models:load_base",
        "load_gguf": "conversion.base_models:load_gguf",
        "load_tokenizer": "conversion.base_models:load_tokenizer",
        "new_directory": "paths:new_directory",
        "quiet": "conversion.checkpoint_io:quiet",
    },
    "individual": {
        "Gains": "decoding.noise:NoiseGains",
        "called": "parse_individual",
        "check_noise": "individuals.noise:check_noise",
        "draw_noise": "individuals.noise:draw_noise",
        "from_cauchy": "individuals.noise:from_cauchy",
        "gather": "resolve_individuals",
        "noise_bound": "individuals.noise:noise_bound",
        "to_cauchy": "individuals.noise:to_cauchy",
    },
    "home": {"cache_home": "cache_directory", "check_new": "check_output_directory"},
    "mock": {"Mind": "CausalChain", "World": "GroundTruth"},
    "metrics": {"Tally": "MetricAccumulator"},
    "one_vs_rest": {"Law": "HeadParams", "Plan": "LossSettings"},
    "fit": {
        "COOLING": "ANNEALING_STEPS",
        "Lesson": "ValueLoss",
        "MEMORY": "BETA2",
        "MOMENTUM": "BETA1",
        "RATE": "LEARNING_RATE",
        "cooled": "annealed",
        "number_of": "y_at_end",
        "start_from_chain": "init_from_chain",
        "start_from_nothing": "init_number_head",
        "teach": "train_model",
    },
}


class _MovedFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, old = fullname.partition(".")
        if package != PACKAGE or old not in MOVED:
            return None
        return ModuleSpec(fullname, _MovedLoader(old))


class _MovedLoader(Loader):
    def __init__(self, old: str) -> None:
        self.old = old

    def exec_module(self, module: ModuleType) -> None:
        new = f"{PACKAGE}.{MOVED[self.old]}"
        warnings.warn(
            f"{module.__name__} is now {new}; import it from there.",
            DeprecationWarning,
            stacklevel=2,
        )
        target = importlib.import_module(new)
        module.__doc__ = target.__doc__
        module.__dict__["__getattr__"] = forward(target, RENAMED.get(self.old, {}))
        module.__dict__["__dir__"] = lambda: dir(target)


def forward(target: ModuleType, renamed: Mapping[str, str]) -> Any:
    """A module's `__getattr__` that looks names up in `target`, or where they were moved to."""

    def lookup(name: str) -> Any:
        path, _, new = renamed.get(name, name).rpartition(":")
        module = importlib.import_module(f"{PACKAGE}.{path}") if path else target
        return getattr(module, new)

    return lookup


def install() -> None:
    """Let Python's import find the old paths. Installing twice changes nothing."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())
