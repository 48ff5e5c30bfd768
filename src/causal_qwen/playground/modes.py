"""Modes: the four decoding modes as options of `generate`, and several streams side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

COMPATIBLE_TEMPERATURE = 0.7  # varied and still fluent
NOTES = {
    "standard": "the most probable token, no noise",
    "sampling": "new noise in U at every token",
    "causal": "individual {seed}: noise in U of its own, the same in every text",
    "compatible": "softmax sampling, as in plain Qwen2",
}


class Mode(NamedTuple):
    name: str
    note: str
    options: dict[str, Any]  # of `generate`


def four_modes(
    sampling: float, causal: float, compatible: float, persistence: float, seed: int
) -> list[Mode]:
    """Every mode with its own temperature; 0 makes `compatible` greedy."""
    options: dict[str, dict[str, Any]] = {
        "standard": {},
        "sampling": {"temperature": sampling, "individual": seed},
        "causal": {"temperature": causal, "individual": seed, "persistence": persistence},
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
