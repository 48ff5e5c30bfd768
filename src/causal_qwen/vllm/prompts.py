"""Prompts: texts with numbers -> embeddings, for a model that reads numbers as values.

    prompts = ValuePrompts("my-model")
    prompt, extra = prompts.offline("The price is 99.9 euro")      # for LLM.generate, extra_args
    fields = prompts.fields("The price is 99.9 euro")              # of a request over HTTP

vLLM knows tokens, and no values: a prompt with values is sent as embeddings, which the client makes
from the embedding of the model's directory. Its token ids go beside them (`prompt_ids`), because
`avoid_repeats`, `whole_words` and the positions of the noise are of tokens. Reads the embedding and
the direction of values alone.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from causal_qwen.modeling.value_space import check_values, embed_values
from causal_qwen.vllm.admission import PROMPT_IDS

EMBEDDING, DIRECTION = "model.embed_tokens.weight", "model.value_direction"
INDEX = "model.safetensors.index.json"


class ValuePrompts:
    """The prompts of one model directory."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        fields = json.loads((self.directory / "config.json").read_text("utf-8"))
        if fields.get("encode_numbers") != "value":
            raise ValueError(f"{directory} reads numbers as digits; send it texts.")
        self.number: int = fields["num_token_id"]
        self.encoding: str = fields["numeric_encoding"]
        self.embedding = self._read(EMBEDDING)  # (V, H)
        self.direction = self._read(DIRECTION)  # (H,)
        self._processor: Any = None

    def embed(self, ids: Sequence[int], values: Sequence[float]) -> Tensor:
        """Token ids, and the value of every <NUM> among them, 0 elsewhere -> (T, H)"""
        tokens = torch.tensor([list(ids)])
        numbers = torch.tensor([list(values)], dtype=torch.float64)
        check_values(tokens, numbers, self.number)
        return embed_values(
            self.embedding[tokens], numbers, tokens == self.number, self.direction, self.encoding
        )[0]

    def read(self, prompt: str | list[dict[str, str]]) -> tuple[list[int], list[float]]:
        """A text, or messages in the model's chat template -> token ids and values."""
        if self._processor is None:
            from causal_qwen.modeling.processor import CausalQwenProcessor

            self._processor = CausalQwenProcessor.from_pretrained(self.directory)
        if isinstance(prompt, str):
            inputs = self._processor(prompt)
            return inputs["input_ids"], inputs["numeric_values"]
        inputs = self._processor.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        return inputs["input_ids"][0].tolist(), inputs["numeric_values"][0].tolist()

    def offline(
        self, prompt: str | list[dict[str, str]]
    ) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        """-> the prompt of `LLM.generate`, and what its `extra_args` must have."""
        ids, values = self.read(prompt)
        return {"prompt_embeds": self.embed(ids, values)}, {PROMPT_IDS: ids}

    def fields(self, prompt: str | list[dict[str, str]]) -> dict[str, Any]:
        """-> the fields of a request to /v1/completions, in the place of `prompt`."""
        ids, values = self.read(prompt)
        file = io.BytesIO()
        torch.save(self.embed(ids, values), file)
        return {"prompt_embeds": base64.b64encode(file.getvalue()).decode(), PROMPT_IDS: ids}

    def _read(self, name: str) -> Tensor:
        file = "model.safetensors"
        if (index := self.directory / INDEX).is_file():
            file = json.loads(index.read_text("utf-8"))["weight_map"][name]
        with safe_open(self.directory / file, framework="pt") as tensors:
            found: Tensor = tensors.get_tensor(name)
        return found
