"""GGUF files, memory-mapped: metadata, tokenizer, and rows of weights in float32.

The reader of the `gguf` package takes seconds for a vocabulary of 150,000 tokens; this one reads
the same header in a fraction of one. Weights are widened by `gguf.quants`.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from causal_qwen.numpy_engine.quantization import quantize_rows
from causal_qwen.numpy_engine.qwen2 import check_architecture
from causal_qwen.numpy_engine.tokenization import TextReader
from causal_qwen.numpy_engine.weights import SCALE, Float32
from causal_qwen.options import PLACEHOLDER

MAGIC = b"GGUF"
VERSIONS = (2, 3)
FORMATS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # of numbers, by their type
TEXT, ARRAY = 8, 9
TOKENS = "tokenizer.ggml.tokens"
SPECIAL = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}  # as in templates
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # types of tokens
TILE = 1024  # rows that are widened at once
KEPT = 4096  # rows that are kept widened: the candidates of a text come again
LETTERS_AND_REST = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {  # how a pre-tokenizer of llama.cpp splits text before byte pairs are merged
    "qwen2": LETTERS_AND_REST % "",
    "deepseek-r1-qwen": LETTERS_AND_REST % "",
    "llama-bpe": LETTERS_AND_REST % "{1,3}",
    "smollm": None,
    "gpt-2": None,
}


class Stored(NamedTuple):
    """A tensor in the file."""

    kind: int  # a GGMLQuantizationType
    shape: tuple[int, ...]  # rows first
    start: int


class GgufFile:
    """`fields` are the metadata, `tensors` where the weights are."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"GGUF file {path} does not exist; check the path.")
        with self.path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ValueError(f"{path} is not a GGUF file.")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._place = 4
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
            raise ValueError(f"{path} is damaged ({error}); download it again.") from error

    def _read_header(self) -> None:
        version, tensors, fields = self._numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"{self.path} is GGUF version {version}; versions 2 and 3 are read.")
        self.fields: dict[str, Any] = {}
        for _ in range(fields):
            name = self._text()
            self.fields[name] = self._value(*self._numbers("I"))
        self.tensors: dict[str, Stored] = {}
        for _ in range(tensors):
            name = self._text()
            (dimensions,) = self._numbers("I")
            shape = self._numbers(f"{dimensions}Q")
            kind, offset = self._numbers("IQ")
            self.tensors[name] = Stored(kind, shape[::-1], offset)
        step = self.fields.get("general.alignment", 32)
        start = -(-self._place // step) * step
        for name, (kind, shape, offset) in self.tensors.items():
            self.tensors[name] = Stored(kind, shape, start + offset)
            if start + offset + self._bytes_of(name) > len(self._data):
                raise ValueError(f"{self.path} is cut off at {name}; download it again.")

    def _numbers(self, format: str) -> Any:
        found = struct.unpack_from(f"<{format}", self._data, self._place)
        self._place += struct.calcsize(f"<{format}")
        return found

    def _text(self) -> str:
        (length,) = self._numbers("Q")
        self._place += length
        return self._data[self._place - length : self._place].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            return self._numbers(FORMATS[kind])[0]
        item, count = self._numbers("IQ")
        if item in (TEXT, ARRAY):
            return [self._value(item) for _ in range(count)]
        return list(self._numbers(f"{count}{FORMATS[item]}"))

    @property
    def architecture(self) -> str:
        return str(self.fields["general.architecture"])

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the architecture, such as `context_length`."""
        return self.fields.get(f"{self.architecture}.{name}", default)

    def _bytes_of(self, name: str) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        kind, shape, _ = self.tensors[name]
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        return int(np.prod(shape)) // block * size

    def stored(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor. -> (rows, bytes of a row)"""
        _, shape, start = self.tensors[name]
        data = np.frombuffer(self._data, np.uint8, self._bytes_of(name), start)
        return data.reshape(int(np.prod(shape[:-1])), -1)

    def rows(self, name: str, rows: Any) -> Float32:
        """Rows of a matrix in float32."""
        from gguf import GGMLQuantizationType, quants

        kind = GGMLQuantizationType(self.tensors[name].kind)
        data = np.ascontiguousarray(self.stored(name)[rows])
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            data = data.view(np.float32 if kind == GGMLQuantizationType.F32 else np.float16)
            return data.astype(np.float32)
        found: Float32 = quants.dequantize(data, kind)
        return found


class GgufHead:
    """W of a GGUF file, of which only some rows are widened at a time."""

    def __init__(self, file: GgufFile, norms: Float32 | None = None) -> None:
        self.file = file
        self.name = next(n for n in ("output.weight", "token_embd.weight") if n in file.tensors)
        self.shape: Any = file.tensors[self.name].shape
        self._norms = norms
        self._kept: dict[int, Float32] = {}  # rows that were widened lately

    def __call__(self, x: Float32) -> Float32:
        """W x. (..., C) -> (..., V)"""
        parts = [x @ self.rows(part).T for part in tiles_of(self.shape[0])]
        return np.concatenate(parts, -1)

    def rows(self, ids: Any) -> Float32:
        if isinstance(ids, slice):
            return self.file.rows(self.name, ids)
        kept = self._kept
        if new := [k for k in ids.tolist() if k not in kept]:
            if len(kept) > KEPT:
                kept.clear()
                new = ids.tolist()
            kept.update(zip(new, self.file.rows(self.name, new), strict=True))
        return np.stack([kept[k] for k in ids.tolist()])

    def absolute(self, scale: Float32, rows: NDArray[np.integer] | None = None) -> Float32:
        """|W| scale. (C,) -> (V,)"""
        tiles = [rows] if rows is not None else tiles_of(self.shape[0])
        return np.concatenate([np.abs(self.rows(part)) @ scale for part in tiles])

    def row_norms(self) -> Float32:
        """||W_k||_1. -> (V,)"""
        if self._norms is None:
            self._norms = self.absolute(np.ones(self.shape[1], np.float32))
        return self._norms


LAYER_TENSORS = {  # of a layer: here, and in a checkpoint
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    **{
        f"attn_{k}.{part}": f"self_attn.{k}_proj.{part}"
        for k in "qkv"
        for part in ("weight", "bias")
    },
}
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def read_checkpoint(file: GgufFile, dtype: str = "int8") -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of config.json and the tensors of a Qwen2 or Qwen3, in int8 or float32."""
    is_tied = "output.weight" not in file.tensors
    fields = {
        "model_type": file.architecture,
        "vocab_size": len(file.fields[TOKENS]),
        "hidden_size": file.get("embedding_length"),
        "intermediate_size": file.get("feed_forward_length"),
        "num_hidden_layers": file.get("block_count"),
        "num_attention_heads": file.get("attention.head_count"),
        "num_key_value_heads": file.get("attention.head_count_kv"),
        "head_dim": file.get("attention.key_length"),
        "rms_norm_eps": file.get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": file.get("context_length"),
        "rope_theta": file.get("rope.freq_base"),
        "eos_token_id": file.fields.get("tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": dtype != "int8" and is_tied,
    }
    check_architecture(fields)
    if file.get("rope.scaling.type", "none") != "none":
        raise ValueError(f"{file.path} scales its rotation; use llama.cpp, or convert --merge.")
    tensors: dict[str, Any] = {}
    for own, (_, shape, _) in file.tensors.items():
        block, _, part = own.removeprefix("blk.").partition(".")
        name = TENSORS.get(own) or f"model.layers.{block}.{LAYER_TENSORS[part]}"
        if own == "token_embd.weight" and dtype == "int8":
            tensors[name] = np.concatenate(
                [file.rows(own, part).astype(np.float16) for part in tiles_of(shape[0])]
            )
            if not is_tied:
                continue
            name = "lm_head.weight"  # in int8 a tied head has weights of its own
        if len(shape) == 2 and dtype == "int8":
            parts = [quantize_rows(file.rows(own, part)) for part in tiles_of(shape[0])]
            tensors[name], tensors[name + SCALE] = map(np.concatenate, zip(*parts, strict=True))
        else:
            tensors[name] = file.rows(own, slice(None)).reshape(shape)
    return {k: v for k, v in fields.items() if v is not None}, tensors


def tiles_of(rows: int) -> list[slice]:
    return [slice(start, min(start + TILE, rows)) for start in range(0, rows, TILE)]


def text_reader(file: GgufFile) -> TextReader:
    """The tokenizer, with <NUM> at the first id that no token uses, if there is one."""
    tokenizer, number = read_tokenizer(file), None
    if tokenizer.get_vocab_size() < len(file.fields[TOKENS]):
        tokenizer.add_tokens([AddedToken(PLACEHOLDER, special=False, normalized=False)])
        number = tokenizer.token_to_id(PLACEHOLDER)
    template, tokens = file.fields.get("tokenizer.chat_template"), file.fields[TOKENS]
    places = {name: file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in SPECIAL}
    special = {SPECIAL[name]: tokens[k] for name, k in places.items() if k is not None}
    return TextReader(tokenizer, number, "text", template, special)


def read_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of byte pairs in a GGUF file, without the unused tokens at its end."""
    fields = {name: file.fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre")}
    if fields["model"] != "gpt2" or fields["pre"] not in SPLITS:
        raise ValueError(
            f"{file.path} has a tokenizer {fields['pre'] or fields['model']!r}; those of "
            f"{', '.join(SPLITS)} are read. Convert the model's directory instead."
        )
    tokens: list[str] = file.fields[TOKENS]
    kinds: list[int] = file.fields["tokenizer.ggml.token_type"]
    used = max(k for k, kind in enumerate(kinds) if kind != UNUSED) + 1
    vocabulary = {token: k for k, token in enumerate(tokens[:used])}
    merges = [tuple(pair.split(" ")) for pair in file.fields["tokenizer.ggml.merges"]]
    is_llama = fields["pre"] == "llama-bpe"
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=is_llama))
    split = SPLITS[fields["pre"]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    parts: list[Any] = [byte_level]
    if split is not None:
        parts.insert(0, pre_tokenizers.Split(Regex(split), "isolated"))
        tokenizer.normalizer = None if is_llama else normalizers.NFC()
    elif fields["pre"] == "smollm":
        parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    added = [k for k in range(used) if kinds[k] in (CONTROL, USER_DEFINED)]
    special = [AddedToken(tokens[k], special=kinds[k] == CONTROL, normalized=False) for k in added]
    tokenizer.add_tokens(special)
    if file.fields.get("tokenizer.ggml.add_bos_token"):
        first = file.fields["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[first], "$A"], special_tokens=[(tokens[first], first)]
        )
    return tokenizer
