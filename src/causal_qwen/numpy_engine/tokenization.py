"""Tokenization: text <-> ids and values. Uses `tokenizers`, not transformers."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from causal_qwen.numpy_engine.weights import read_optional_json
from causal_qwen.options import NUMBER_READINGS, PLACEHOLDER, check_choice
from causal_qwen.text.segmentation import (
    interleave,
    special_affixes,
    split_at_numbers,
    without_placeholder,
)


class TextReader:
    """A model's tokenizer, which reads numbers as digits ("text") or as values ("value")."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_token_id: int | None,
        encode_numbers: str,
        template: str | None = None,
        special: dict[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template  # chat template, Jinja
        self.special = special or {}  # bos_token, eos_token, ...: used by chat templates
        self.num_token_id = num_token_id
        self.encode_numbers = encode_numbers
        self._affixes = special_affixes(tokenizer)

    @cached_property
    def _plain(self) -> Tokenizer:
        """Reads a typed <NUM> as text. Made when one is typed: it costs as much as the first."""
        return without_placeholder(self.tokenizer)

    @classmethod
    def from_directory(cls, directory: Path, fields: dict[str, Any]) -> TextReader | None:
        """The tokenizer of a checkpoint directory, or None; it must match the config."""
        path = directory / "tokenizer.json"
        if not path.exists():
            return None
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ValueError(f"{path} is damaged ({error}); download it again.") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        num_token_id, size = fields.get("num_token_id"), tokenizer.get_vocab_size()
        own = tokenizer.token_to_id(PLACEHOLDER)
        if size > fields["vocab_size"] or (num_token_id is not None and own != num_token_id):
            raise ValueError(
                f"{path} has {size} tokens and <NUM> at {own}; the model has "
                f"{fields['vocab_size']} and <NUM> at {num_token_id}; use its own tokenizer."
            )
        saved = read_optional_json(directory / "processor_config.json")
        encoding = saved.get("encode_numbers") or fields.get("encode_numbers", "text")
        settings = read_optional_json(directory / "tokenizer_config.json")
        file = directory / "chat_template.jinja"
        template = file.read_text(encoding="utf-8") if file.exists() else None
        template = template or settings.get("chat_template")
        special = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in settings.items()
            if name.endswith("_token") and isinstance(token, str | dict)
        }
        return cls(tokenizer, num_token_id, encoding, template, special)

    def as_chat(self, conversation: str | list[dict[str, str]]) -> str:
        """A user's message, or a conversation of several, in the model's chat template, up to where
        the answer begins."""
        if not isinstance(self.template, str):
            raise ValueError("This checkpoint has no chat template; leave out chat=True.")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if isinstance(conversation, str):
            conversation = [{"role": "user", "content": conversation}]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(self.template).render(
            messages=conversation,
            add_generation_prompt=True,
            **self.special,
        )

    def encode(
        self, text: str, encode_numbers: str | None = None, add_special_tokens: bool = True
    ) -> tuple[list[int], list[float]]:
        """A text -> ids, and the value of every <NUM> (0 elsewhere)."""
        encoding = self.encode_numbers if encode_numbers is None else encode_numbers
        check_choice("encode_numbers", encoding, NUMBER_READINGS)
        if encoding == "value" and self.num_token_id is None:
            raise ValueError(
                "encode_numbers='value' needs a <NUM> token, and this model has none; use 'text'."
            )
        before, after = self._affixes if add_special_tokens else ([], [])
        ids, values = list(before), [0.0] * len(before)
        for piece, _, value in split_at_numbers(text, encoding):
            if value is not None:
                ids.append(self.num_token_id or 0)
                values.append(value)
            elif piece:
                reader = self._plain if PLACEHOLDER in piece else self.tokenizer
                new = reader.encode(piece, add_special_tokens=False).ids
                ids += new
                values += [0.0] * len(new)
        return ids + after, values + [0.0] * len(after)

    def decode(self, ids: NDArray[np.int64], values: NDArray[np.float64]) -> str:
        """Ids and values -> text, without special tokens"""
        positions = [i for i, token in enumerate(ids) if token == self.num_token_id]
        edges = [-1, *positions, len(ids)]
        texts = [self.tokenizer.decode(ids[a + 1 : b].tolist()) for a, b in pairwise(edges)]
        return interleave(texts, [_render(float(values[i])) for i in positions])

    def show(self, token: int, value: float = 0.0) -> str:
        """One token as text, special tokens included."""
        if token == self.num_token_id:
            return _render(value)
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        return text or self.tokenizer.id_to_token(token) or f"#{token}"


def _render(value: float) -> str:
    from causal_qwen.text.numerals import render  # compiles the grammar: slow to import

    return render(value)
