"""The causal layer: what makes a base model causal, in a file of its own.

    base (hub name, directory or GGUF file) + layer (some MB) = a causal model

A layer holds the fields of the configuration, the defaults of individuals, and the tensors that
are not what they are in every untrained model: W_loc = 1, W_scale = 0. It names its base, and a
base with another fingerprint is refused. Does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tokenizers import Tokenizer

from causal_qwen._version import __version__
from causal_qwen.numpy_engine import calibration
from causal_qwen.numpy_engine.gguf import GgufHead
from causal_qwen.numpy_engine.weights import Float32
from causal_qwen.options import WORD_EDGES
from causal_qwen.outputs import whole_file
from causal_qwen.paths import EMBEDDED, cache_directory, embedded_gguf, model_directory
from causal_qwen.text.segmentation import word_edges

FORMAT = "causal layer 1"
SUFFIX = ".causal"
STEP = 2  # every second position of the texts is enough
WEIGHTS = ("*.safetensors", "*.gguf")
NORMS = "lm_head.row_norms"  # ||W_k||_1, which takes a second to compute again
SAMPLES, SAMPLE = 64, 2**16  # parts of a weights file that its fingerprint reads, and their bytes

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class CausalLayer:
    """`tensors` have the names of a merged checkpoint."""

    base: str
    fingerprint: str
    fields: Mapping[str, Any]  # of config.json
    generation: Mapping[str, Any]  # of generation_config.json
    tensors: Tensors

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write one safetensors file, whose metadata are the rest."""
        parts = {"config": dict(self.fields), "generation": dict(self.generation)}
        metadata = {name: json.dumps(part) for name, part in parts.items()}
        metadata |= {"format": FORMAT, "base": self.base, "fingerprint": self.fingerprint}
        data = save(dict(self.tensors), metadata)
        with whole_file(path, overwrite) as part:
            part.write_bytes(data)

    def keep(self) -> None:
        """Save it in the cache, where the base is found without it."""
        place = cached_layer(self.fingerprint)
        place.parent.mkdir(parents=True, exist_ok=True)
        self.save(place, overwrite=True)

    @classmethod
    def load(cls, path: str | Path) -> CausalLayer:
        try:
            with safe_open(path, "numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); make the layer again.") from error
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} is no causal layer; name the file that `convert` wrote.")
        config, generation = (json.loads(metadata[name]) for name in ("config", "generation"))
        return cls(metadata["base"], metadata["fingerprint"], config, generation, tensors)

    def check_base(self, base: str | Path) -> None:
        """Refuse a base model that is not the one this layer was made for."""
        if fingerprint(base) != self.fingerprint:
            raise ValueError(
                f"The causal layer was made for {self.base}, and {base} has other weights; open "
                "that model, or convert this one."
            )


def calibrated_layer(
    base: str,
    mark: str,
    head: GgufHead,
    tokenizer: Tokenizer,
    score_text: Callable[[list[int]], Float32],
    number: int | None,
    progress: Callable[[str], None],
) -> CausalLayer:
    """The layer of a base without one: its scores on a few texts say how it must be scaled.

    `score_text` gives loc_S at every position. (T,) -> (T, V)
    """
    progress("reading texts to calibrate on")
    encode = partial(tokenizer.encode, add_special_tokens=True)
    loc = np.concatenate([score_text(encode(text).ids)[::STEP] for text in calibration.TEXTS])
    progress("measuring thresholds, scales and noise gains")
    norms = head.row_norms()
    per_token = np.full_like(norms, norms.max())  # with the decision noise
    scales = calibration.find_scales(loc, per_token, has_bar=True)
    gain = calibration.find_gain(loc, np.float32(scales.gamma), head.rows)
    vocabulary, hidden = head.shape
    constant = {
        "abduction.scale.bias": (hidden, math.log(scales.gamma)),
        "action.b_noise": (hidden, scales.b_noise),
        "decision.threshold": (vocabulary, scales.threshold),
    }
    tensors = {name: np.full(size, value, np.float32) for name, (size, value) in constant.items()}
    tensors |= {"action.decision_noise": norms.max() - norms, NORMS: norms}
    tensors[WORD_EDGES] = word_edges(tokenizer, vocabulary)
    fields = {**calibration.FIELDS, "num_token_id": number}
    fields |= {"vocab_size": vocabulary, "hidden_size": hidden}
    generation = {**calibration.DEFAULTS, "noise_gain": gain}
    return CausalLayer(base, mark, fields, generation, tensors)


def is_layer(path: str | Path) -> bool:
    return Path(path).suffix == SUFFIX


def base_of(model: str) -> str:
    """The base that a layer names; another model is its own."""
    return CausalLayer.load(model).base if is_layer(model) else model


def is_gguf(path: str | Path) -> bool:
    return Path(path).suffix == ".gguf"


def cached_layer(fingerprint: str) -> Path:
    """Where the layer of a base without one is kept."""
    return cache_directory() / "layers" / f"{fingerprint[:16]}-{__version__}{SUFFIX}"


def kept_layer(fingerprint: str) -> CausalLayer | None:
    """The layer in the cache; one that cannot be read is made again."""
    with suppress(FileNotFoundError, ValueError):
        return CausalLayer.load(cached_layer(fingerprint))
    return None


def files_of(base: str) -> Path:
    """The GGUF file or the directory of a base model; a hub model's is in the hub's cache."""
    if base == EMBEDDED and (file := embedded_gguf()) is not None:
        return file
    return model_directory(base)


def fingerprint(base: str | Path) -> str:
    """SHA-256 of the sizes of a model's weights files and of samples of their bytes."""
    path = Path(base)
    files = [path] if path.is_file() else sorted(f for w in WEIGHTS for f in path.glob(w))
    if not files:
        raise FileNotFoundError(f"{base} has no weights; name a GGUF file or a model's directory.")
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            for start in np.linspace(0, max(size - SAMPLE, 0), SAMPLES, dtype=np.int64):
                opened.seek(int(start))
                digest.update(opened.read(SAMPLE))
    return digest.hexdigest()
