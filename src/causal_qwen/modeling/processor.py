"""Processor: text -> ids + values, and back.

    "The price is 99.9 euro"  ->  The price is ␣ <NUM> ␣euro,   values 0 0 0 0 99.9 0

With `encode_numbers="value"` every number of a text (see `text/numerals.py`) becomes one `<NUM>`
token with a value; with `"text"` numbers stay digits, as in the base model. A `<NUM>` typed by a
user is text: a copy of the tokenizer without that token reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer
from transformers import AutoProcessor, BatchEncoding, PreTrainedConfig
from transformers.processing_utils import ProcessorMixin

from causal_qwen.modeling.configuration import AUTO_PROCESSOR, CausalQwen2Config
from causal_qwen.options import NUMBER_READINGS, check_choice
from causal_qwen.text.numerals import PLACEHOLDER, render
from causal_qwen.text.segmentation import (
    interleave,
    special_affixes,
    split_at_numbers,
    without_placeholder,
)

COLUMNS = ("input_ids", "attention_mask", "numeric_values", "offset_mapping")
Token = tuple[int, int, float, tuple[int, int]]  # one entry of every column
SIDES, TENSORS = ("left", "right"), ("pt", "np")
UNUSED_TOKEN = re.compile(
    r"<gh_stars>|<?\|?(reserved|unused|extra_id|special)[\w ]*\d+\|?>?|\[unused\d+\]"
)
RESERVED = re.compile(r"\[PAD(\d+)\]")  # how tokenizers of GGUF files name a row without a token
NEEDS_SPACE = re.compile(r"[A-Za-zÀ-ɏͰ-ԯ0-9:;,.!?)\]%\"'”’]$")


class CausalQwenProcessor(ProcessorMixin):
    """A tokenizer that encodes numbers as values.

    `processor(texts, return_tensors="pt")` gives `input_ids`, `attention_mask` and
    `numeric_values`; `processor.decode(ids, values)` gives the text back.
    """

    tokenizer_class = "AutoTokenizer"

    def __init__(
        self,
        tokenizer: Any = None,
        encode_numbers: str = "text",
        chat_template: str | None = None,
    ) -> None:
        if tokenizer is None:
            raise ValueError("tokenizer is missing; use CausalQwenProcessor(tokenizer).")
        self.encode_numbers = check_choice("encode_numbers", encode_numbers, NUMBER_READINGS)
        install_number_token(tokenizer, _saved_vocab_size(tokenizer))
        template = getattr(tokenizer, "chat_template", None)
        super().__init__(tokenizer, chat_template=chat_template or template)
        self.num_token_id: int = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
        self._plain = without_placeholder(tokenizer.backend_tokenizer)
        self._affixes = special_affixes(self._plain)

    @property
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "numeric_values"]

    def to_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """processor_config.json, by which `trust_remote_code=True` finds the installed package."""
        return {**super().to_dict(*args, **kwargs), "auto_map": AUTO_PROCESSOR}

    def __call__(
        self,
        text: str | Sequence[str] | None = None,
        *,
        encode_numbers: str | None = None,
        return_tensors: str | None = None,
        padding: bool | str | None = None,
        padding_side: str | None = None,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        **other: Any,
    ) -> BatchEncoding:
        """Texts -> ids and values, cut and padded together.

        `encode_numbers` overrides the processor's setting; `return_offsets_mapping` adds (start,
        end) of every token in the source text. Tensors are padded by default. As in the tokenizer,
        `max_length` alone truncates, and the special tokens around a text are kept.
        """
        other.pop("return_text_replacement_offsets", None)  # passed by chat templates
        if unknown := [n for n, value in other.items() if value is not None and value is not False]:
            raise TypeError(f"CausalQwenProcessor has no option {unknown[0]!r}; it encodes text.")
        texts = [text] if isinstance(text, str) else list(text if text is not None else [])
        encode_numbers = self.encode_numbers if encode_numbers is None else encode_numbers
        check_choice("encode_numbers", encode_numbers, NUMBER_READINGS)
        longest = max_length
        if max_length is None and self.tokenizer.model_max_length < 10**9:  # else it has no limit
            longest = self.tokenizer.model_max_length
        is_cut = truncation not in (None, False, "do_not_truncate")
        if truncation is None and padding in (None, False):
            is_cut = max_length is not None
        limit = longest if is_cut else None
        rows = [self._encode(item, encode_numbers, add_special_tokens, limit) for item in texts]
        if padding is None:
            padding = return_tensors is not None
        columns = self._pad(rows, padding, padding_side, longest)
        if not return_offsets_mapping:
            del columns["offset_mapping"]
        if return_tensors is not None:
            return BatchEncoding(_tensors(columns, return_tensors))
        if isinstance(text, str):
            return BatchEncoding({name: column[0] for name, column in columns.items()})
        return BatchEncoding(columns)

    def decode(
        self,
        token_ids: Any,
        values: Any = None,
        *,
        digits: int = 6,
        skip_special_tokens: bool = False,
        **options: Any,
    ) -> Any:
        """Ids and values -> text; numbers with `digits` significant digits, shortest form.

        A batch of ids gives a list of texts.
        """
        options["skip_special_tokens"] = skip_special_tokens
        if len(token_ids) and np.ndim(token_ids[0]) > 0:
            return self.batch_decode(token_ids, values, digits=digits, **options)
        ids = np.asarray(_to_array(token_ids)).reshape(-1).astype(np.int64)
        places: list[int] = np.flatnonzero(ids == self.num_token_id).tolist()
        if places and values is None:
            raise ValueError(
                f"token_ids[{places[0]}] is <NUM> without a value; "
                "use processor.decode(ids, values)."
            )
        numbers = np.zeros(len(ids)) if values is None else np.asarray(_to_array(values), float)
        if numbers.shape != ids.shape:
            raise ValueError(f"values of shape {numbers.shape} must have that of ids, {ids.shape}.")
        texts = [
            self.tokenizer.decode(ids[before + 1 : after].tolist(), **options)
            for before, after in pairwise([-1, *places, len(ids)])
        ]
        return interleave(texts, [render(float(numbers[place]), digits) for place in places])

    def batch_decode(self, token_ids: Any, values: Any = None, **options: Any) -> list[str]:
        """One text for every row."""
        rows = list(_to_array(token_ids))
        value_rows = [None] * len(rows) if values is None else list(_to_array(values))
        pairs = zip(rows, value_rows, strict=True)
        return [self.decode(ids, numbers, **options) for ids, numbers in pairs]

    def ask(self, text: str) -> str:
        """The text up to where its next number would begin: with the space that comes before it.

        Numbers are tokens of their own, and the space before one is too: "is 5" is encoded as `is`,
        ` `, `<NUM>`. After a currency symbol, a bracket or a CJK letter there is none.
        """
        return text + " " if NEEDS_SPACE.search(text) else text

    def check(self, config: Any) -> None:
        """Raise if a model's tokens differ from the tokenizer's."""
        if config.num_token_id != self.num_token_id or len(self.tokenizer) > config.vocab_size:
            raise ValueError(
                f"This processor's tokenizer has {len(self.tokenizer)} tokens and <NUM> at "
                f"{self.num_token_id}; the model has {config.vocab_size} and <NUM> at "
                f"{config.num_token_id}: load the processor from the model's own directory."
            )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """From a directory or hub name that has a tokenizer, and `encode_numbers` if saved."""
        encode_numbers = kwargs.pop("encode_numbers", None)
        kwargs.setdefault("trust_remote_code", False)
        processor = super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        if encode_numbers is not None:
            check_choice("encode_numbers", encode_numbers, NUMBER_READINGS)
            processor.encode_numbers = encode_numbers
        return processor

    def _encode(
        self, text: str, encode_numbers: str, add_special_tokens: bool, limit: int | None
    ) -> list[Token]:
        """The tokens of one text, at most `limit`."""
        tokens: list[Token] = []
        for piece, start, value in split_at_numbers(text, encode_numbers):
            if value is not None:
                tokens.append((self.num_token_id, 1, value, (start, start + len(piece))))
            elif piece:
                found = self._plain.encode(piece, add_special_tokens=False)
                spans = [(start + a, start + b) for a, b in found.offsets]
                tokens += [(i, 1, 0.0, span) for i, span in zip(found.ids, spans, strict=True)]
        affixes = self._affixes if add_special_tokens else ([], [])
        before, after = ([(i, 1, 0.0, (0, 0)) for i in ids] for ids in affixes)
        if limit is not None:
            room = max(limit - len(before) - len(after), 0)
            is_left = self.tokenizer.truncation_side == "left"
            tokens = tokens[max(len(tokens) - room, 0) :] if is_left else tokens[:room]
        return [*before, *tokens, *after][:limit]

    def _pad(
        self,
        rows: list[list[Token]],
        padding: bool | str,
        side: str | None,
        longest: int | None,
    ) -> dict[str, list[list[Any]]]:
        width = max(map(len, rows), default=0)
        if padding == "max_length":
            width = max(width, longest or 0)
        side = check_choice("padding_side", side or self.tokenizer.padding_side, SIDES)
        pad = self.tokenizer.pad_token_id
        columns: dict[str, list[list[Any]]] = {name: [] for name in COLUMNS}
        for tokens in rows:
            missing = 0 if padding in (False, "do_not_pad") else width - len(tokens)
            if missing and pad is None:
                raise ValueError(
                    "The tokenizer has no padding token: set processor.tokenizer.pad_token first."
                )
            fill = [(pad, 0, 0.0, (0, 0))] * missing
            padded = fill + tokens if side == "left" else tokens + fill
            for place, name in enumerate(COLUMNS):
                columns[name].append([token[place] for token in padded])
        return columns


# ---------------------------------------------------------------- the token <NUM>


def install_number_token(tokenizer: Any, vocab_size: int | None = None) -> int:
    """Give `<NUM>` an id: a reserved one, that of an unused special token, or a new one.

    `vocab_size` is the model's: ids from the tokenizer's size up to it are reserved. Returns the
    id; it is beyond `vocab_size` only if no reserved id and no unused token exist.
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(
            f"{type(tokenizer).__name__} is not a fast tokenizer; <NUM> needs one (tokenizer.json)."
        )
    added = tokenizer.get_added_vocab()
    if PLACEHOLDER in added:
        return int(added[PLACEHOLDER])
    has_reserved = vocab_size is not None and len(tokenizer) < vocab_size
    if (named := _reserved_name(tokenizer)) is not None:
        _rename(tokenizer, named)
    elif not has_reserved and (unused := _unused_token(tokenizer)) is not None:
        _rename(tokenizer, unused)
    tokenizer.add_tokens([AddedToken(PLACEHOLDER, special=False, normalized=False)])
    return int(tokenizer.convert_tokens_to_ids(PLACEHOLDER))


def _saved_vocab_size(tokenizer: Any) -> int | None:
    """vocab_size of the model in the tokenizer's directory, if there is one."""
    if PLACEHOLDER in tokenizer.get_added_vocab() or not tokenizer.name_or_path:
        return None
    try:
        fields, _ = PreTrainedConfig.get_config_dict(tokenizer.name_or_path)
    except (OSError, ValueError):
        return None
    size: int | None = fields.get("vocab_size")
    return size


def _reserved_name(tokenizer: Any) -> str | None:
    """The first row that is named after its own id and has no other token."""
    named = ((RESERVED.fullmatch(token), k) for token, k in tokenizer.get_vocab().items())
    reserved = {k for match, k in named if match is not None and int(match[1]) == k}
    return f"[PAD{min(reserved)}]" if reserved else None


def _unused_token(tokenizer: Any) -> str | None:
    """A special token that neither the tokenizer's settings nor the chat template use."""
    used = {token for token in tokenizer.special_tokens_map.values() if isinstance(token, str)}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    candidates = sorted((i, t.content) for i, t in tokenizer.added_tokens_decoder.items())
    unused = (t for _, t in candidates if UNUSED_TOKEN.fullmatch(t) and t not in used)
    return next((t for t in unused if t not in template), None)


def _rename(tokenizer: Any, old: str) -> None:
    """Give `<NUM>` the id of another token."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in state["added_tokens"]:
        if token["content"] == old:
            token |= {"content": PLACEHOLDER, "special": False, "normalized": False}
    vocabulary = state["model"]["vocab"]
    if isinstance(vocabulary, dict) and old in vocabulary:
        vocabulary[PLACEHOLDER] = vocabulary.pop(old)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    # Otherwise the old token is saved as a special one, and gets a new id when loaded.
    tokenizer.extra_special_tokens = [t for t in tokenizer.extra_special_tokens if t != old]


# ---------------------------------------------------------------- small parts


def _tensors(columns: dict[str, list[list[Any]]], kind: str) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    widths = {len(row) for row in columns["input_ids"]}
    if len(widths) > 1:
        raise ValueError(
            f"Rows of {min(widths)} to {max(widths)} tokens cannot form a tensor; use padding=True."
        )
    count, width = len(columns["input_ids"]), max(widths, default=0)
    for name, column in columns.items():
        dtype = np.float64 if name == "numeric_values" else np.int64
        shape = (count, width, 2) if name == "offset_mapping" else (count, width)
        arrays[name] = np.asarray(column, dtype=dtype).reshape(shape)
    if check_choice("return_tensors", kind, TENSORS) == "np":
        return arrays
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _to_array(values: Any) -> Any:
    """Tensors of any device as NumPy arrays; lists unchanged."""
    return values.detach().cpu().numpy() if hasattr(values, "detach") else values


AutoProcessor.register(CausalQwen2Config, CausalQwenProcessor, exist_ok=True)
