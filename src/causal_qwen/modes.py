"""Modes: the four ways to speak, by name. Both sides and the command line have them from here."""

from __future__ import annotations

MODES = ("standard", "sampling", "causal", "compatible")
NOISY = ("sampling", "causal")  # those in which an individual's noise has a part


def known_mode(mode: str, asked: str) -> str:
    """A mode's name as it is; another one is refused by what the user `asked`, e.g. "--mode x"."""
    if mode not in MODES:
        raise ValueError(f"{asked} is unknown; choose one of {', '.join(MODES)}.")
    return mode
