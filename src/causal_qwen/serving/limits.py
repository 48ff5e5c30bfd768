"""Limits: how much one request, and all of them together, may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Every figure is a setting of `causal-qwen serve`."""

    max_rows: int = 16  # texts that are decoded together, and texts of a request
    max_waiting: int = 64  # texts that wait for a place; more are answered with 429
    max_prompt: int = 4096  # tokens of a prompt
    max_tokens: int = 1024  # new tokens of a text

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or value < (name != "max_waiting"):
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
