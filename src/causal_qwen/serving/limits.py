"""Limits: how much one request, and all of them together, may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Every figure is a setting of `causal-qwen serve`."""

    max_rows: int = 16  # texts that are decoded together
    max_waiting: int = 64  # texts that wait for a place; more are answered with 429
    max_prompt: int = 4096  # tokens of a prompt
    max_tokens: int = 1024  # new tokens of a text
    max_n: int = 8  # texts of a request
    max_body: int = 1_000_000  # bytes of a request
    drain_seconds: int = 30  # for running requests after SIGTERM

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("max_waiting", "drain_seconds") else 1
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}.")
        if self.max_n > self.max_rows + self.max_waiting:
            raise ValueError(
                f"max_n={self.max_n} texts never find a place among max_rows={self.max_rows} and "
                f"max_waiting={self.max_waiting}; use a smaller max_n."
            )
