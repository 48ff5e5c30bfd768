"""Draws: what a call leaves to chance is drawn before it runs, so that it can be replayed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from causal_qwen.decoding.settings import DecodingSettings

SEEDS = 2**53  # drawn seeds lie below it: every JSON reader keeps them exactly
SOFTMAX_CALL = ("temperature", "top_k", "top_p", "min_p")  # each asks for softmax draws


def draw_seed() -> int:
    return secrets.randbelow(SEEDS)


def complete_call(
    resolve: Callable[..., DecodingSettings], options: Mapping[str, Any], seed: int | None
) -> tuple[dict[str, Any], int | None]:
    """-> options of `generate` and the seed of softmax draws, nothing left to chance.

    In `compatible`, a temperature, top-k, top-p, min-p or seed asks for softmax sampling, as in
    Qwen; a temperature of 0 for the argmax.
    """
    options = dict(options)
    settings = resolve(**options)
    if settings.is_noisy and settings.individual is None:
        options["individual"] = draw_seed()
    if settings.mode != "compatible":
        return options, seed
    if options.get("temperature") == 0:
        options |= {"temperature": None, "do_sample": False}
    elif options.get("do_sample") is None and (
        seed is not None or any(options.get(name) is not None for name in SOFTMAX_CALL)
    ):
        options["do_sample"] = True
    if seed is None and resolve(**options).do_sample:
        seed = draw_seed()
    return options, seed
