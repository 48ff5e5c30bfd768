"""Features: text -> z, the backbone's last hidden state at the last token.

    z = features(texts, model, processor)          # (N, H), float32

A frozen backbone maps the same text to the same z, so z is cached on disk, text by text:
cross-validation, another target or a second calibration cost nothing, and an interrupted run
continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.regression.feature_cache import FeatureCache

BATCH_TOKENS = 2048  # of a batch, padding included
BLOCK = 16384  # texts that are held as tokens at a time
FINGERPRINT_VALUES = 1024  # of every weight

BACKBONE_FIELDS = (  # config fields that change z and no weight's shape
    *("num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps"),
    *("rope_parameters", "sliding_window", "layer_types", "num_token_id", "numeric_encoding"),
)

Encoded = tuple[list[int], list[float]]  # ids and values of one text
Progress = Callable[[int, int], None]  # (done, total)


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


def encode_texts(texts: Sequence[str], processor: Processor, max_length: int) -> list[Encoded]:
    """Ids and values up to the place of the next number; long texts lose their beginning."""
    encoded = []
    for text in texts:
        inputs = processor(processor.ask(text))
        encoded.append((inputs["input_ids"][-max_length:], inputs["numeric_values"][-max_length:]))
    return encoded


def too_long(texts: Sequence[str], processor: Processor, max_length: int) -> list[int]:
    """Indices of the texts that `encode_texts` truncates."""
    some = ((row, text) for row, text in enumerate(texts) if len(text.encode()) + 2 > max_length)
    return [row for row, text in some if len(processor(processor.ask(text)).input_ids) > max_length]


def hidden_at_end(model: CausalModel, encoded: Sequence[Encoded]) -> Tensor:
    """z at every text's last token. Padding is on the right, after all that is used. -> (B, H)"""
    ends = torch.tensor([len(ids) - 1 for ids, _ in encoded], device=model.device)
    width = int(ends.max()) + 1
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in encoded])
    values = [list(values) + [0.0] * (width - len(values)) for _, values in encoded]
    number = model.config.num_token_id
    has_numbers = number is not None and bool((ids == number).any())  # a value may be 0
    output = model.model(
        input_ids=ids.to(model.device),
        numeric_values=torch.tensor(values, dtype=torch.float64, device=model.device)
        if has_numbers
        else None,
        use_cache=False,
    )
    z: Tensor = output.last_hidden_state[torch.arange(len(ends), device=ends.device), ends]
    return z


def batches_by_length(encoded: Sequence[Encoded], tokens: int = BATCH_TOKENS) -> list[list[int]]:
    """Indices of texts of similar length, in batches of at most `tokens` tokens."""
    batches: list[list[int]] = [[]]
    for row in sorted(range(len(encoded)), key=lambda row: len(encoded[row][0])):
        length = len(encoded[row][0])  # the longest of its batch
        if batches[-1] and length * (len(batches[-1]) + 1) > tokens:
            batches.append([])
        batches[-1].append(row)
    return [batch for batch in batches if batch]


@torch.no_grad()
def features(
    texts: Sequence[str],
    model: CausalModel,
    processor: Processor,
    *,
    max_length: int,
    cache: Path | None = None,
    progress: Progress = no_progress,
) -> NDArray[np.float32]:
    """z of every text, (N, H). `cache` is the cache file, None for no cache."""
    distinct = list(dict.fromkeys(texts))
    place = {text: row for row, text in enumerate(distinct)}
    z = np.empty((len(distinct), model.config.hidden_size), np.float32)
    with closing(FeatureCache(cache, fingerprint(model, processor, max_length))) as store:
        is_known = np.zeros(len(distinct), dtype=bool)
        for text, found in store.read(distinct):
            z[place[text]], is_known[place[text]] = found, True
        missing = [distinct[row] for row in np.flatnonzero(~is_known)]
        done = len(distinct) - len(missing)
        progress(done, len(distinct))
        for start in range(0, len(missing), BLOCK):
            block = missing[start : start + BLOCK]
            encoded = encode_texts(block, processor, max_length)
            for batch in batches_by_length(encoded):
                read = hidden_at_end(model, [encoded[row] for row in batch]).float().cpu().numpy()
                of_texts = dict(zip((block[row] for row in batch), read, strict=True))
                store.write(of_texts)
                z[[place[text] for text in of_texts]] = read
                progress(done := done + len(batch), len(distinct))
    return z if len(distinct) == len(texts) else z[[place[text] for text in texts]]


def fingerprint(model: CausalModel, processor: Processor, max_length: int) -> str:
    """A hash of all that z depends on beside the text: weights (a sample of each) and settings."""
    fields = {name: getattr(model.config, name, None) for name in BACKBONE_FIELDS}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
    digest.update(f"{processor.encode_numbers} {max_length} {model.dtype}".encode())
    for name, tensor in sorted(model.model.state_dict().items()):
        flat = tensor.detach().flatten()
        some = flat[:: max(len(flat) // FINGERPRINT_VALUES, 1)]
        digest.update(name.encode() + some.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
