"""Features: text -> z, what the backbone makes of it.

    features(texts, model, processor, MIDDLE, max_length=512)     # (N, P, H), by one forward pass

Middle layers describe a text better than the last, which is about the next token. `MIDDLE` are
candidates, of which cross-validation chooses; they need two thirds of the layers.

z is cached on disk: a file for every text and pooling, named by a hash of all that z depends on,
with a checksum. A file that does not match it is computed again; the cache stops nothing.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from causal_qwen.modeling.protocols import CausalModel, Processor

BATCH_TOKENS = 1024  # of a batch, padding included; with 2048 a token takes 12% longer
CACHE = "features"  # in the cache directory
CHECKSUM = 16  # bytes at the beginning of a file
FINGERPRINT_VALUES = 1024  # of every weight

BACKBONE_FIELDS = (  # config fields that change z and no weight's shape
    *("num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps"),
    *("rope_parameters", "sliding_window", "layer_types", "num_token_id", "numeric_encoding"),
)

_READING = threading.Lock()  # one thread at a time reads

Encoded = tuple[list[int], list[float]]  # ids and values of one text


class Pooling(NamedTuple):
    """The hidden state after a share of the layers: at the last token, or the mean of all."""

    depth: float
    how: str  # "mean", "last"

    def __str__(self) -> str:
        return f"{self.how} at {self.depth:.2g}"


MIDDLE = tuple(Pooling(depth / 6, how) for how in ("mean", "last") for depth in (2, 3, 4))
Progress = Callable[[int, int], None]  # (done, total)


def encode_texts(texts: Sequence[str], processor: Processor, max_length: int) -> list[Encoded]:
    """Ids and values up to the place of the next number; long texts lose their beginning, with a
    warning."""
    inputs = [processor(processor.ask(text)) for text in texts]
    if count := sum(len(one["input_ids"]) > max_length for one in inputs):
        warnings.warn(
            f"{count} of {len(texts)} texts are longer than {max_length} tokens (max_length, or "
            "the model's context) and lose their beginning.",
            stacklevel=4,
        )
    return [(one["input_ids"][-max_length:], one["numeric_values"][-max_length:]) for one in inputs]


def pooled_hidden(
    model: CausalModel, encoded: Sequence[Encoded], poolings: Sequence[Pooling]
) -> Tensor:
    """Hidden states between the layers, pooled over each text's own tokens. -> (B, P, H)"""
    count = len(model.model.layers)
    after = [max(round(pooling.depth * count), 1) for pooling in poolings]  # layers
    states = dict.fromkeys(after, torch.empty(0))
    lengths = _run(model, _recorded(model.model, states), encoded)
    width = int(lengths.max())
    is_own = torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)  # (B, T)
    rows, found = torch.arange(len(lengths)), []
    for pooling, n in zip(poolings, after, strict=True):
        state = states[n].float()
        mean = (state * is_own.unsqueeze(-1).to(state.dtype)).sum(1) / lengths.unsqueeze(-1)
        found.append(state[rows, lengths - 1] if pooling.how == "last" else mean)
    return torch.stack(found, 1)


class _RecordedLayer:
    """A layer that keeps what it returns in the states of one call, if they name its place."""

    def __init__(self, layer: Any, place: int, states: dict[int, Tensor]) -> None:
        self.layer, self.place, self.states = layer, place, states

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        output = self.layer(*arguments, **options)
        if self.place in self.states:
            self.states[self.place] = output[0] if isinstance(output, tuple) else output
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def _recorded(backbone: Any, states: dict[int, Tensor]) -> Any:
    """The same backbone with the layers that `states` need, recorded; weights are shared.

    Threads share the original, which a hook would change for all of them.
    """
    shorter = copy.copy(backbone)
    layers = enumerate(backbone.layers[: max(states)], 1)
    shorter._modules = {name: part for name, part in backbone._modules.items() if name != "layers"}
    shorter.__dict__["layers"] = [_RecordedLayer(layer, n, states) for n, layer in layers]
    shorter.__dict__.pop("forward", None)  # accelerate's, which runs the original
    return shorter


def _run(model: CausalModel, backbone: Any, encoded: Sequence[Encoded]) -> Tensor:
    """Read texts, padded on the right, where nothing that is used sees it; their lengths (B,)"""
    lengths = torch.tensor([len(ids) for ids, _ in encoded], device=model.device)
    width = int(lengths.max())
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in encoded], device=model.device)
    padded = [list(values) + [0.0] * (width - len(values)) for _, values in encoded]
    values = torch.tensor(padded, dtype=torch.float64, device=model.device)
    number = model.config.num_token_id
    has_numbers = number is not None and bool((ids == number).any())  # a value may be 0
    backbone(input_ids=ids, numeric_values=values if has_numbers else None, use_cache=False)
    return lengths


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
    poolings: Sequence[Pooling],
    *,
    max_length: int,
    cache: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> NDArray[np.float32]:
    """z of every text by every pooling. (N, P, H)"""
    place = {text: row for row, text in enumerate(dict.fromkeys(texts))}  # of distinct texts
    key = fingerprint(model, processor, max_length)
    z = np.full((len(place), len(poolings), model.config.hidden_size), np.nan, np.float32)

    def file(text: str, pooling: Pooling) -> Path:
        assert cache is not None
        digest = hashlib.sha256(f"{key}{pooling}\n{text}".encode()).hexdigest()
        return cache / digest[:2] / digest

    for text in place if cache is not None else ():
        for column, pooling in enumerate(poolings):
            if (found := stored(file(text, pooling))) is not None:
                z[place[text], column] = found
    missing = [text for text, row in place.items() if np.isnan(z[row]).any()]
    done = len(place) - len(missing)
    progress(done, len(place))
    encoded = encode_texts(missing, processor, max_length)
    for batch in batches_by_length(encoded):
        some = [encoded[row] for row in batch]
        with _READING:
            hidden = pooled_hidden(model, some, poolings)
        z[[place[missing[row]] for row in batch]] = hidden.float().cpu().numpy()  # (B, P, H)
        try:
            for row in batch if cache is not None else ():
                for pooling, one in zip(poolings, z[place[missing[row]]], strict=True):
                    store(file(missing[row], pooling), one)
        except OSError as error:
            warnings.warn(f"the feature cache {cache} is not used ({error}).", stacklevel=4)
            cache = None
        progress(done := done + len(batch), len(place))
    return z[[place[text] for text in texts]]


def store(file: Path, z: NDArray[np.float32]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(_checksum(file, z.tobytes()) + z.tobytes())


def stored(file: Path) -> NDArray[np.float32] | None:
    """What `store` wrote; None for no file, and for a damaged one."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    is_whole = content[:CHECKSUM] == _checksum(file, content[CHECKSUM:])
    return np.frombuffer(content[CHECKSUM:], np.float32) if is_whole else None


def _checksum(file: Path, content: bytes) -> bytes:
    return hashlib.blake2b(file.name.encode() + content, digest_size=CHECKSUM).digest()


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
