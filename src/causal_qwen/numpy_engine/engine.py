"""Engine: load a checkpoint directory and generate text.

engine = Engine.from_pretrained("my-model")
print(engine.generate("The train was late, so").text)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.decoding.settings import (
    DEFAULTS,
    SOFTMAX,
    DecodingSettings,
    resolve_settings,
)
from causal_qwen.families import is_causal
from causal_qwen.individuals import Individual
from causal_qwen.numpy_engine.checkpoint import check_tensors
from causal_qwen.numpy_engine.fast import find_kernel
from causal_qwen.numpy_engine.generation import Generator, Limits
from causal_qwen.numpy_engine.heads import CausalHeads
from causal_qwen.numpy_engine.quantization import dequantized, is_quantized, quantized
from causal_qwen.numpy_engine.qwen2 import (
    Ints,
    KeyValueCache,
    Observer,
    Qwen2,
    Qwen2Config,
    check_architecture,
)
from causal_qwen.numpy_engine.tokenization import TextReader
from causal_qwen.numpy_engine.weights import (
    Float32,
    Stored,
    read_json,
    read_optional_json,
    read_tensors,
)
from causal_qwen.options import check_choice

DTYPES = (None, "float32", "int8")
OPTIONS = tuple(name for name in (*DEFAULTS, *SOFTMAX) if name != "causal_mode")
TORCH_ONLY = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Generation:
    """The result of `generate`."""

    ids: Ints  # (prompt + new,)
    numeric_values: NDArray[np.float64]  # (prompt + new,), 0 where the token is not <NUM>
    new: slice  # the new tokens
    text: str  # of the new tokens; empty without a tokenizer
    individual: Individual | None  # in the modes with noise
    settings: DecodingSettings

    @property
    def mode(self) -> str:
        return self.settings.mode


class Engine:
    """A Qwen2 or CausalQwen checkpoint that runs on NumPy."""

    def __init__(
        self,
        fields: dict[str, Any],
        parameters: dict[str, Stored],
        reader: TextReader | None = None,
        generation: dict[str, Any] | None = None,
        where: str = "The checkpoint",
    ) -> None:
        self.fields, self.reader, self.saved = fields, reader, generation or {}
        self.parameters = parameters
        check_tensors(fields, parameters, where)
        self.model = Qwen2(Qwen2Config.from_dict(fields), parameters)
        has_heads = is_causal(fields.get("model_type"))
        self.heads = CausalHeads(fields, parameters, self.model.head) if has_heads else None

    @property
    def own_mode(self) -> str:
        """The mode of a call without mode=."""
        return self.resolve().mode

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], dtype: str | None = None, kernel: str = "numpy"
    ) -> Engine:
        """Load a directory with config.json and safetensors.

        Weights are memory-mapped in their stored type. `dtype` keeps a copy in memory instead:
        "float32" is exact, "int8" has half the bytes of bfloat16 and rounds (`quantization`).
        `kernel="numba"` multiplies int8 and bfloat16 weights by compiled loops (extra `fast`).
        """
        check_choice("dtype", dtype, DTYPES)
        compiled, directory = find_kernel(kernel), Path(path)
        fields = read_json(directory / "config.json")
        check_architecture(fields)  # before the weights of another are read
        parameters = read_tensors(directory)
        if dtype == "int8" and not is_quantized(parameters):
            fields, parameters = quantized(fields, parameters)
        elif dtype == "float32":
            fields, parameters = dequantized(fields, parameters)
        saved = read_optional_json(directory / "generation_config.json")
        reader = TextReader.from_directory(directory, fields)
        engine = cls(fields, parameters, reader, saved, str(directory))
        engine.model.use(compiled)
        return engine

    # ------------------------------------------------------------ generation

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Continue a prompt, given as text or as token ids.

        Options: those of `stream`; mode, max_new_tokens, min_new_tokens, eos_token_id, seed (of
        softmax sampling), and those of `DecodingSettings`. Defaults are in generation_config.json.
        """
        call = self.stream(prompt, **options)
        start = len(call.ids)
        for _ in call:
            pass
        ids, values = np.array(call.ids, np.int64), np.array(call.values)
        text = "" if self.reader is None else self.reader.decode(ids[start:], values[start:])
        individual = call.noise.individuals[0] if call.noise.individuals else None
        return Generation(ids, values, slice(start, len(ids)), text, individual, call.settings)

    def stream(
        self,
        prompt: Prompt,
        *,
        numeric_values: Sequence[float] | None = None,
        encode_numbers: str | None = None,
        chat: bool = False,
        **options: Any,
    ) -> Generator:
        """Continue a prompt, token by token: steps have the `token`, its `value`, and the
        `probabilities` of all tokens.

        `chat` puts a text into the model's chat template, as a user's message.
        """
        ids, values = self._encode(prompt, numeric_values, encode_numbers, chat)
        stops = options.pop("eos_token_id", None)
        if stops is None:
            stops = self.saved.get("eos_token_id", self.fields.get("eos_token_id"))
        names = ("max_new_tokens", "min_new_tokens")
        lengths = {name: options.pop(name) for name in names if options.get(name) is not None}
        stops = () if stops is None else tuple(np.atleast_1d(stops).tolist())
        limits, seed = Limits(**lengths, stops=stops), options.pop("seed", None)
        return Generator(
            self.model, self.heads, self.fields, self.resolve(**options), limits, ids, values, seed
        )

    def resolve(self, mode: str | None = None, **options: Any) -> DecodingSettings:
        """The settings of a call with these options."""
        unknown = [name for name in options if name not in (*DEFAULTS, *SOFTMAX)]
        if unknown:
            raise TypeError(
                f"Unknown option {', '.join(unknown)}; there are mode, {', '.join(OPTIONS)}."
            )
        if unsupported := [name for name in TORCH_ONLY if self.saved.get(name) is not None]:
            raise ValueError(
                f"generation_config.json has {unsupported[0]}={self.saved[unsupported[0]]}, which "
                "the NumPy engine does not support; remove it, or use torch."
            )
        return resolve_settings(
            {"causal_mode": mode, **options},
            self.saved,
            default_mode=self.fields.get("inference_mode", "standard"),
            has_heads=self.heads is not None,
        )

    def _encode(
        self,
        prompt: Prompt,
        values: Sequence[float] | None,
        encode_numbers: str | None,
        chat: bool,
    ) -> tuple[list[int], list[float]]:
        if isinstance(prompt, str):
            if self.reader is None:
                raise ValueError("This checkpoint has no tokenizer.json; pass token ids.")
            text = self.reader.as_chat(prompt) if chat else prompt
            return self.reader.encode(text, encode_numbers, add_special_tokens=not chat)
        ids = [int(token) for token in prompt]
        if values is None and self.heads is not None and self.heads.num_token_id in ids:
            raise ValueError("The prompt has <NUM> without a value; pass numeric_values=.")
        return ids, [0.0] * len(ids) if values is None else [float(value) for value in values]

    # ------------------------------------------------------------ logits

    def logits(self, ids: Sequence[int] | Ints, observe: Observer | None = None) -> Float32:
        """loc_S at every position of texts of equal length. (T,) or (B, T) -> (T, V) or (B, T, V)

        Equal to the base model's logits until training changes W_loc. `observe` is called with
        every layer's output and attention weights.
        """
        rows = np.atleast_2d(np.asarray(ids, np.int64))
        cache = KeyValueCache(self.model.config, len(rows), rows.shape[1])
        z = self.model.forward(self.model.embed(rows), cache, observe)
        if self.heads is None:
            scores = self.model.logits(z)
        else:
            scores = self.heads.score(self.heads.abduct(z).loc)
        return scores[0] if np.ndim(ids) == 1 else scores
