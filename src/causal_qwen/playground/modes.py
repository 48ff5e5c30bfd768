"""Modes: the four decoding modes as options of `generate`, and several streams side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

SAMPLING_TEMPERATURE, COMPATIBLE_TEMPERATURE = 20.0, 0.7  # varied and still fluent
NOTES = {
    "standard": "the most probable token, no noise",
    "sampling": "new noise in U at every token",
    "causal": "individual {seed}: the same noise in U at every token",
    "compatible": "softmax sampling, as in plain Qwen2",
}


class Mode(NamedTuple):
    name: str
    note: str
    options: dict[str, Any]  # of `generate`


def four_modes(
    sampling: float, causal: float, compatible: float, min_density: float, seed: int
) -> list[Mode]:
    """Every mode with its own temperature; 0 makes `compatible` greedy."""
    noise = {"individual": seed, "min_density": min_density}
    options: dict[str, dict[str, Any]] = {
        "standard": {},
        "sampling": {"temperature": sampling, **noise},
        "causal": {"temperature": causal, **noise},
        "compatible": {"do_sample": compatible > 0},
    }
    if compatible:
        options["compatible"]["temperature"] = compatible
    return [
        Mode(name, NOTES[name].format(seed=seed), {"causal_mode": name, **chosen})
        for name, chosen in options.items()
    ]


def interleave(streams: Sequence[Iterator[list[str]]]) -> Iterator[list[str]]:
    """One token of every stream in turn -> the texts of all streams after each token"""
    texts = [""] * len(streams)
    running = dict(enumerate(streams))
    while running:
        for index, stream in list(running.items()):
            if (grown := next(stream, None)) is None:
                del running[index]
            else:
                texts[index] = grown[0]
                yield list(texts)
