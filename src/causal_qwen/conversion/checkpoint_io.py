"""Checkpoint files: build models from tensors, silence Hugging Face, name damaged files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import logging


def assemble(from_pretrained: Any, config: Any, state: dict[str, Tensor], dtype: Any) -> Any:
    """A model from tensors in memory; missing ones are initialised by the config."""
    with quiet():
        return from_pretrained(None, config=config, state_dict=state, dtype=dtype)


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[Tensor] | None:
    if tokenizer is None:
        return None
    return [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]


@contextlib.contextmanager
def damaged_files_named(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"A weights file of {path} is damaged or truncated ({error}); download it again."
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars and the report of missing keys, which are expected here."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
