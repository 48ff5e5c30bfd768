"""Options whose values are names: the allowed values, for both engines and the command line."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeVar, get_args

T = TypeVar("T")

# The command line reads the types, everything else the tuples.
Mode = Literal["standard", "sampling", "causal", "compatible"]
Semantics = Literal["pearl", "disco"]
NumberReading = Literal["text", "value"]
EngineName = Literal["auto", "torch", "llama.cpp", "numpy"]
Initialization = Literal["calibrated", "documents"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
ExportFormat = Literal["plain", "gguf"]
ExportType = Literal["float32", "bfloat16", "float16", "f32", "f16", "q8_0"]

MODES: tuple[Mode, ...] = get_args(Mode)
NOISY_MODES: tuple[Mode, ...] = ("sampling", "causal")  # modes that use an individual's noise
NORMALIZATIONS = ("softmax", "ovr")  # probabilities that `compatible` samples from
SEMANTICS: tuple[Semantics, ...] = get_args(Semantics)  # of chance: kept, or redrawn
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
NUMBER_READINGS: tuple[NumberReading, ...] = get_args(NumberReading)  # as digits, or as values
INITIALIZATIONS: tuple[Initialization, ...] = get_args(Initialization)  # of the causal parameters
DTYPES: tuple[DType, ...] = get_args(DType)  # of weights in memory; auto: as in the file
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
PLAIN_TYPES, GGUF_TYPES = get_args(ExportType)[:3], get_args(ExportType)[3:]
WORD_EDGES = "decision.word_edges"  # the tensor of the bits below; earlier versions have none
# bits of a token: it begins inside of a word, it ends inside of one, it holds a part of a
# character, it has a letter
CONTINUES, OPEN, PART, LETTER = 1, 2, 4, 8
ROW_FILES = (  # of training
    *(".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".pq", ".xlsx", ".txt"),
)
PLACEHOLDER = "<NUM>"  # the token of a number
SCALE_ACTIVATIONS = ("exp", "softplus", "abs")
NUMERIC_ENCODINGS = ("log", "sigmoid")
VALUE_SPACES = ("symlog", "linear")
THRESHOLD_CONTEXTS = ("none", "competition")  # what moves all thresholds of a position


def check_choice(name: str, value: T, choices: Collection[T]) -> T:
    """Return `value` if it is one of `choices`; otherwise raise a ValueError that lists them."""
    if value not in choices:
        raise ValueError(
            f"{name}={value!r} is unknown; choose one of {', '.join(map(str, choices))}."
        )
    return value
