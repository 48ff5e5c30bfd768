"""llama.cpp: GGUF files, at its speed. Needs `llama-cpp-python` (extra `llama`).

    read     tokens of some rows -> loc_S, and z where the layer is trained, of their last positions
    choose   a `Chooser` for every row: candidates, noise, the token

A row is one of llama.cpp's sequences. The rows of W that noise needs are widened from the file.
llama.cpp rounds activations to 8 bits, so a text may differ from torch's where scores nearly tie.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp as cpp
import numpy as np

from causal_qwen.decoding.settings import DecodingSettings, resolve_settings
from causal_qwen.engines.engine import Choice, Row, Tokens, View
from causal_qwen.engines.numpy import ReadsTexts, choice_of, view_of
from causal_qwen.layer import (
    NORMS,
    CausalLayer,
    calibrated_layer,
    fingerprint,
    is_layer,
    kept_layer,
)
from causal_qwen.numpy_engine.fast import THREADS
from causal_qwen.numpy_engine.generation import Chooser, Limits
from causal_qwen.numpy_engine.gguf import GgufFile, GgufHead, text_reader
from causal_qwen.numpy_engine.heads import CausalHeads, with_defaults
from causal_qwen.numpy_engine.weights import Float32

KEPT = 4  # first tokens of a text that are never forgotten
ROWS = 16  # sequences that are decoded at once
MEMORY = 8192  # tokens of all rows that are kept, unless the model reads fewer
BLOCK = 512  # tokens of a prompt that are read at once


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _silent(level: int, text: bytes, user: Any) -> None:
    """llama.cpp's log."""


class Last(NamedTuple):
    """The last position of a row."""

    scores: Float32  # loc_S (V,)
    z: Float32  # (H,); 0 where it is not needed


class Context:
    """A loaded GGUF file and the keys and values of its rows."""

    def __init__(self, path: Path, memory: int, gpu_layers: int, threads: int) -> None:
        cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        options = cpp.llama_model_default_params()
        options.n_gpu_layers = gpu_layers
        self.model = cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}; download it again, or use torch.")
        self.trained = cpp.llama_model_n_ctx_train(self.model)
        own = cpp.llama_context_default_params()
        own.n_ctx = self.memory = min(memory, self.trained)
        own.n_batch = own.n_ubatch = BLOCK
        own.n_seq_max, own.n_outputs_max, own.kv_unified = ROWS + 1, ROWS + 1, True
        own.n_threads = own.n_threads_batch = threads
        own.embeddings, own.pooling_type = True, cpp.LLAMA_POOLING_TYPE_NONE
        self.context = cpp.llama_init_from_model(self.model, own)
        if not self.context:
            raise MemoryError(f"llama.cpp has no memory for {own.n_ctx} tokens; use fewer: n_ctx=.")
        cpp.llama_set_embeddings(self.context, False)
        self.cells = cpp.llama_get_memory(self.context)
        vocabulary = cpp.llama_model_get_vocab(self.model)
        self.vocabulary = cpp.llama_vocab_n_tokens(vocabulary)
        self.ends = frozenset(
            k for k in range(self.vocabulary) if cpp.llama_vocab_is_eog(vocabulary, k)
        )
        self.width = cpp.llama_model_n_embd(self.model)
        self.batch = cpp.llama_batch_init(BLOCK, 0, 1)
        self.seen: list[int] = []  # tokens of the sequence that `look` reads
        weakref.finalize(self, _free, self.batch, self.context, self.model)

    def look(self, ids: Sequence[int], needs_z: bool) -> Last:
        """The end of a text beside all rows; the beginning that it shares with the last is kept."""
        pairs = enumerate(zip(ids[:-1], self.seen, strict=False))
        same = next((k for k, (a, b) in pairs if a != b), min(len(ids) - 1, len(self.seen)))
        cpp.llama_memory_seq_rm(self.cells, ROWS, same, -1)
        self.seen = []  # if reading fails
        last = self.read_prompt(ROWS, ids, needs_z, same)
        self.seen = [*ids]
        return last

    def read_prompt(self, row: int, ids: Sequence[int], needs_z: bool, start: int = 0) -> Last:
        """A row's prompt. With z, every token of a call is computed as an output: so the last token
        has a call of its own."""
        edges = [*range(start, len(ids), BLOCK), len(ids)]
        if needs_z and len(ids) - start > 1:
            edges = [*range(start, len(ids) - 1, BLOCK), len(ids) - 1, len(ids)]
        for start, end in pairwise(edges):
            tokens = [(row, place, ids[place]) for place in range(start, end)]
            is_last = end == len(ids)
            self._decode(tokens, (end - start - 1,) if is_last else (), needs_z and is_last)
        return self._last(-1, needs_z)

    def read(self, tokens: Sequence[tuple[int, int, int]], needs_z: bool) -> list[Last]:
        """One (row, position, token) of every row."""
        self._decode(tokens, range(len(tokens)), needs_z)
        return [self._last(place, needs_z) for place in range(len(tokens))]

    def score_text(self, ids: Sequence[int]) -> Float32:
        """loc_S at every position of a short text. -> (T, V)"""
        tokens = [(0, place, token) for place, token in enumerate(ids)]
        parts = [tokens[first : first + ROWS] for first in range(0, len(tokens), ROWS)]
        found = [last.scores.copy() for part in parts for last in self.read(part, needs_z=False)]
        self.forget(0)
        return np.stack(found)

    def drop_look(self) -> None:
        self.seen = []
        self.forget(ROWS)

    def forget(self, row: int) -> None:
        cpp.llama_memory_seq_rm(self.cells, row, -1, -1)

    def copy(self, row: int, other: int) -> None:
        cpp.llama_memory_seq_cp(self.cells, row, other, -1, -1)

    def drop(self, row: int, keep: int, count: int) -> None:
        """Forget `count` tokens after the first `keep`; later ones move up."""
        cpp.llama_memory_seq_rm(self.cells, row, keep, keep + count)
        cpp.llama_memory_seq_add(self.cells, row, keep + count, -1, -count)

    def _decode(
        self, tokens: Sequence[tuple[int, int, int]], outputs: Sequence[int], needs_z: bool
    ) -> None:
        batch, marked = self.batch, {*outputs}
        batch.n_tokens = len(tokens)
        for place, (row, position, token) in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
            batch.logits[place] = place in marked
        cpp.llama_set_embeddings(self.context, needs_z)
        if (code := cpp.llama_decode(self.context, batch)) != 0:
            what = "has no room for more tokens; open the model with a larger n_ctx="
            raise ValueError(f"llama.cpp {what if code == 1 else f'failed with code {code}'}.")

    def _last(self, place: int, needs_z: bool) -> Last:
        logits = cpp.llama_get_logits_ith(self.context, place)
        scores = np.ctypeslib.as_array(logits, (self.vocabulary,))  # until the next call
        if not needs_z:
            return Last(scores, np.zeros(self.width, np.float32))
        states = cpp.llama_get_embeddings_ith(self.context, place)
        return Last(scores, np.ctypeslib.as_array(states, (self.width,)).copy())


def _free(batch: Any, context: Any, model: Any) -> None:
    cpp.llama_batch_free(batch)
    cpp.llama_free(context)
    cpp.llama_model_free(model)


class LlamaEngine(ReadsTexts):
    """A GGUF file and its causal layer."""

    kind = "llama.cpp"
    rows: int | None = ROWS

    def __init__(self, file: GgufFile, layer: CausalLayer, context: Context) -> None:
        super().__init__(text_reader(file))
        self.model, self.layer = context, layer
        self.context, self.ends = context.trained, context.ends
        head = GgufHead(file, layer.tensors.get(NORMS))
        self.heads = CausalHeads(layer.fields, with_defaults(layer.fields, layer.tensors), head)
        if not self.heads.is_plain:
            raise ValueError(
                "This layer is trained: W_loc is not 1, and llama.cpp cannot apply it. Use "
                "engine='torch', or `causal-qwen export --to gguf`, which folds it into the head."
            )
        self.needs_z = self.heads.scale is not None
        self.size = self.heads.size
        self.default_mode = self.resolve().mode

    @classmethod
    def open(
        cls,
        model: str | Path,
        device: str = "auto",
        progress: Callable[[str], None] = lambda _: None,
        n_ctx: int | None = None,
        n_gpu_layers: int | None = None,
    ) -> LlamaEngine:
        """A GGUF file, whose layer is made at the first use and kept in the cache, or a layer.

        All layers of the network are on the GPU where llama.cpp was built for one, unless
        `n_gpu_layers` says how many, or `device` is "cpu".
        """
        layer = CausalLayer.load(model) if is_layer(model) else None
        path = Path(model if layer is None else layer.base)
        file = GgufFile(path)
        progress("loading the model, for llama.cpp")
        if n_gpu_layers is None:
            n_gpu_layers = 0 if device == "cpu" else -1
        context = Context(file.path, n_ctx or MEMORY, n_gpu_layers, THREADS)
        if layer is not None:
            layer.check_base(path)
        elif (layer := kept_layer(mark := fingerprint(path))) is None:
            reader = text_reader(file)
            tools = reader.tokenizer, context.score_text, reader.num_token_id, progress
            layer = calibrated_layer(str(path.resolve()), mark, GgufHead(file), *tools)
            layer.keep()
        return cls(file, layer, context)

    def resolve(self, **options: Any) -> DecodingSettings:
        own = self.layer.fields.get("inference_mode", "standard")
        return resolve_settings(options, self.layer.generation, default_mode=own)

    def look(self, prompt: Tokens) -> View:
        if len(prompt.ids) >= self.model.memory:
            raise ValueError(too_long(len(prompt.ids), self.model.memory))
        last = self.model.look(prompt.ids, self.needs_z)
        return view_of(self.heads, self.layer.fields, last.z, last.scores.copy())

    def new_batch(self) -> LlamaBatch:
        return LlamaBatch(self)


def too_long(tokens: int, memory: int) -> str:
    return (
        f"The prompt has {tokens} tokens, and {memory} are kept; open the model with a larger "
        "n_ctx=."
    )


class _State:
    """A row: its sequence, its chooser, and what was dropped of its text."""

    def __init__(self, sequence: int, row: Row, engine: LlamaEngine) -> None:
        self.sequence, self.dropped = sequence, 0
        limits = Limits(row.max_new_tokens, stops=tuple(engine.ends))
        settings = engine.resolve(**row.options)
        heads, fields = engine.heads, engine.layer.fields
        self.chooser = Chooser(heads, fields, settings, limits, *row.prompt, row.seed)

    @property
    def length(self) -> int:
        return len(self.chooser.ids) - self.dropped


class LlamaBatch:
    def __init__(self, engine: LlamaEngine) -> None:
        self.engine, self.model = engine, engine.model
        self.states: dict[Row, _State] = {}
        self._last: Last  # of the prompt that was read last

    def join(self, rows: Sequence[Row]) -> list[Choice | Exception]:
        found: list[Choice | Exception] = []
        read: Row | None = None  # whose prompt was read last
        for row in rows:
            found.append(self._join(row, read))
            read = row if row in self.states else None
        return found

    def _join(self, row: Row, read: Row | None) -> Choice | Exception:
        used = {state.sequence for state in self.states.values()}
        sequence = next((k for k in range(ROWS) if k not in used), None)
        if sequence is None:
            return ValueError(f"llama.cpp decodes at most {ROWS} texts at once.")
        try:
            if len(row.prompt.ids) >= self.model.memory:
                raise ValueError(too_long(len(row.prompt.ids), self.model.memory))
            self.states[row] = _State(sequence, row, self.engine)
            self._make_room(len(row.prompt.ids))
            if read is not None and read.prompt is row.prompt and not self.states[read].dropped:
                self.model.copy(self.states[read].sequence, sequence)
            else:
                needs_z = self.engine.needs_z
                self._last = self.model.read_prompt(sequence, row.prompt.ids, needs_z)
            return self._choose(row, self._last)
        except (ValueError, ArithmeticError) as error:
            self.leave(row)
            return error

    def step(self) -> list[tuple[Row, Choice | Exception]]:
        self._make_room(len(self.states))
        states = self.states.items()
        tokens = [(s.sequence, s.length - 1, s.chooser.ids[-1]) for _, s in states]
        lasts = self.model.read(tokens, self.engine.needs_z)
        return [(row, self._choose(row, one)) for (row, _), one in zip(states, lasts, strict=True)]

    def leave(self, row: Row) -> None:
        if (state := self.states.pop(row, None)) is not None:
            self.model.forget(state.sequence)

    def _choose(self, row: Row, last: Last) -> Choice | Exception:
        try:
            step = self.states[row].chooser.choose(last.z, last.scores)
        except (ValueError, ArithmeticError) as error:
            return error
        return choice_of(step, row, self.engine.show)

    def _used(self) -> int:
        return sum(state.length for state in self.states.values()) + len(self.model.seen)

    def _make_room(self, tokens: int) -> None:
        """Where the memory is full, forget the older half of the longest text."""
        if self._used() + tokens > self.model.memory:
            self.model.drop_look()
        while self._used() + tokens > self.model.memory:
            longest = max(self.states.values(), key=lambda state: state.length)
            half = (longest.length - 1) // 2
            self.model.drop(longest.sequence, KEPT, half - KEPT)
            longest.dropped += half - KEPT
