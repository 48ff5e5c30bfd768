"""Module paths of version 0.3.0: importing one still works, and warns where it moved."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # `importlib.abc` takes a fifth of the time of `import causal_qwen`

PACKAGE = "causal_qwen"

_KEPT = {  # new room -> modules that kept their name
    "analysis": "counterfactual gumbel posterior verify",
    "cli": "chat demo doctor",
    "generation": "pipeline",
    "modeling": "abduction action cauchy loss one_vs_rest processor",
    "regression": "conformal features prediction regressor",
    "text": "numerals",
    "training": "checkpoints data metrics progress report trainer",
}
MOVED = {  # below the package: old path -> new path
    **{name: f"{room}.{name}" for room, names in _KEPT.items() for name in names.split()},
    "calibrate": "conversion.calibration",
    "choices": "options",
    "cli.house": "cli.setup",
    "cli.numbers": "cli.regression",
    "cli.speaking": "cli.generation",
    "config": "modeling.configuration",
    "convert": "conversion.convert",
    "decision": "modeling.thresholds",
    "documents": "generation.documented_calls",
    "embedding": "modeling.value_embedding",
    "engine.causal": "engine.heads",
    "engine.random": "engine.random_checkpoint",
    "engine.text": "engine.tokenization",
    "fit": "regression.head",
    "home": "paths",
    "individual": "individuals.individual",
    "mock": "training.simulation",
    "passage": "analysis.token_sequence",
    "pieces": "text.segmentation",
    "scratch": "training.from_scratch",
    "shown": "terminal",
    "speech": "generation.streaming",
    "tabular": "regression.csv_io",
    "train": "training.run",
    "value": "modeling.value_space",
    "watch": "engine.watch",
}


def _names(path: str, table: str) -> dict[str, str]:
    """ "old=new name" -> {"old": "path:new", "name": "path:name"}."""
    pairs = (entry.partition("=") for entry in table.split())
    return {old: f"{path}:{new or old}" for old, _, new in pairs}


RENAMED: dict[str, dict[str, str]] = {  # old path -> old name -> "new.path:new_name"
    "calibrate": _names("generation.streaming", "end_ids"),
    "chat": _names("cli.turns", "check_unicode interruption piped_lines run typed_lines"),
    "choices": _names("options", "known=check_choice WAYS=NUMBER_READINGS NOISY=NOISY_MODES"),
    "convert": _names("conversion.base_models", "as_qwen2 load_base load_gguf load_tokenizer")
    | _names("conversion.checkpoint_io", "assemble damaged_files_named encode=encode_texts quiet")
    | _names("outputs", "new_directory"),
    "decision": _names("decoding.decision", "choose choose_pruned")
    | _names("generation.logits", "HeadBounds=HeadNorms block_edges"),
    "engine.causal": _names("decoding.decision", "choose"),
    "engine.generation": _names("decoding.noise", "Speaker=DecodingNoise")
    | _names("decoding.settings", "Options=DecodingSettings")
    | _names("engine.generation", "Moment=DecodeStep"),
    "fit": _names(
        "regression.head",
        "COOLING=ANNEALING_STEPS Lesson=ValueLoss MEMORY=BETA2 MOMENTUM=BETA1 RATE=LEARNING_RATE "
        "cooled=annealed number_of=y_at_end start_from_chain=init_from_chain "
        "start_from_nothing=init_number_head teach=train_model",
    ),
    "generation": _names("decoding.settings", "DEFAULTS resolve_mode")
    | _names("decoding.noise", "Speaker=DecodingNoise")
    | _names("generation.logits", "ModeProcessor=DecisionProcessor")
    | _names("generation.values", "Ledger=ValueTracker")
    | _names("generation.mixin", "CausalGenerationMixin adopt_generation_config logger"),
    "home": _names("paths", "cache_home=cache_directory")
    | _names("outputs", "check_new=check_output_directory"),
    "individual": _names("individuals.individual", "called=parse_individual")
    | _names("individuals.individual", "gather=resolve_individuals")
    | _names("individuals.noise", "check_noise draw_noise from_cauchy noise_bound to_cauchy")
    | _names("decoding.noise", "Gains=NoiseGains")
    | _names("decoding.settings", "first_given"),
    "metrics": _names("training.metrics", "Tally=MetricAccumulator"),
    "mock": _names("training.simulation", "Mind=CausalChain World=GroundTruth"),
    "one_vs_rest": _names("modeling.one_vs_rest", "Law=HeadParams Plan=LossSettings"),
    "passage": _names(
        "analysis.token_sequence",
        "Passage=TokenSequence own_processor=load_processor read=read_tokens show=decode_sequence "
        "spell=decode_tokens",
    ),
    "tables": _names(
        "regression.sentences",
        "UNKNOWN UNIT SENTENCE_END ask_for empty_columns join_sentences read_texts to_sentences "
        "used_columns",
    )
    | _names("tables.targets", "UNNAMED read_targets")
    | _names("tables.rows", "ROWS_NAMED=ROWS_LISTED is_table name_rows require_columns"),
    "speech": _names(
        "generation.streaming",
        "Said=GeneratedText read_chat=chat_inputs room_after=remaining_context say=generate_text",
    ),
}


class _MovedFinder:
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

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes the module."""

    def exec_module(self, module: ModuleType) -> None:
        new = f"{PACKAGE}.{MOVED[self.old]}"
        warnings.warn(
            f"{module.__name__} is now {new}; import it from there.",
            DeprecationWarning,
            stacklevel=2,
        )
        target = importlib.import_module(new)
        module.__doc__ = target.__doc__
        module.__dict__["__getattr__"] = forward(self.old, target)
        module.__dict__["__dir__"] = lambda: dir(target)


def forward(old: str, target: ModuleType | None = None) -> Any:
    """A module's `__getattr__`: the old names of `old`, and with a target also those it kept."""

    def lookup(name: str) -> Any:
        path, _, new = RENAMED.get(old, {}).get(name, "").rpartition(":")
        if path:
            return getattr(importlib.import_module(f"{PACKAGE}.{path}"), new)
        if target is None:
            raise AttributeError(f"module '{PACKAGE}.{old}' has no attribute {name!r}")
        return getattr(target, name)

    return lookup


def install() -> None:
    """Let Python's import find the old paths. Installing twice changes nothing."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())
