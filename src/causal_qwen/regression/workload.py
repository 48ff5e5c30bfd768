"""Workload: the time and memory that a large table needs, said before the work.

Time is measured on a few texts. Memory is that of rows in memory at once; it is proportional to
the rows, and tokens are held in blocks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.filesize import decimal

from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.regression.features import encode_texts, hidden_at_end

LARGE = 20_000  # rows; fewer are not announced
SAMPLE = 32  # texts whose tokens are counted and timed
ROW_BYTES = 6_000  # of cells, text and the parallel heads of cross-validation, measured
FEATURE_BYTES = 16  # of every feature of a row: float32 as it is read and in the basis, and copies
TOKEN_BYTES = 120  # of an encoded token and its value
MANY_COLUMNS, MOST_COLUMNS = 1000, 20_000  # announced; refused
COLUMN_SECONDS, CELL_SECONDS = 0.011, 8e-5  # of a fit without texts, measured on one thread
SPACE = 0.9  # share of the memory that may be used


class Workload(NamedTuple):
    """What the rows of a table need, about."""

    rows: int
    tokens: float  # of a row
    seconds: float
    memory: int  # bytes

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows of about {self.tokens:.0f} tokens need up to "
            f"{format_time(self.seconds)} and about {decimal(self.memory)} of memory"
        )


@torch.no_grad()
def estimate(
    texts: Sequence[str],
    model: CausalModel,
    processor: Processor,
    max_length: int,
    *,
    passes: int = 1,
    is_kept: bool = False,
) -> Workload:
    """Of reading texts `passes` times; `is_kept`: their tokens stay in memory, not their z."""
    some = texts[:: max(len(texts) // SAMPLE, 1)][:SAMPLE]
    encoded = encode_texts(some, processor, max_length)
    hidden_at_end(model, encoded[:1])  # the first call is slower
    start = time.perf_counter()
    hidden_at_end(model, encoded)
    seconds = (time.perf_counter() - start) / len(some)
    tokens = sum(len(ids) for ids, _ in encoded) / len(some)
    own = tokens * TOKEN_BYTES if is_kept else model.config.hidden_size * FEATURE_BYTES
    rows = len(texts)
    return Workload(rows, tokens, rows * seconds * passes, int(rows * (ROW_BYTES + own)))


def check_memory(need: Workload) -> None:
    """Refuse more than the machine has."""
    memory = physical_memory()
    if memory is not None and need.memory > SPACE * memory:
        rows = int(need.rows * SPACE * memory / need.memory)
        raise ValueError(
            f"{need}, and the machine has {decimal(memory)}; give at most about {rows:,} rows."
        )


def check_columns(rows: int, columns: int, verbose: bool) -> None:
    """Print what a wide table needs; refuse one that would take hours."""
    if columns > MOST_COLUMNS:
        raise ValueError(
            f"the table has {columns:,} columns, and {MOST_COLUMNS:,} are the most; name those to "
            "learn from (columns=, --column)."
        )
    if verbose and columns >= MANY_COLUMNS:
        seconds = columns * (COLUMN_SECONDS + rows * CELL_SECONDS)
        print(
            f"{columns:,} columns need about {format_time(seconds)}.", file=sys.stderr, flush=True
        )


def cache_size(rows: int, features: int) -> str:
    """Of float32 features, each row with its key, its checksum and SQLite's own bytes."""
    return decimal(rows * (4 * features + 150))


def physical_memory() -> int | None:
    """Bytes; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def format_time(seconds: float) -> str:
    """ "40 seconds", "12 minutes", "5.5 hours" """
    if seconds < 90:
        return f"{max(seconds, 1):.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
