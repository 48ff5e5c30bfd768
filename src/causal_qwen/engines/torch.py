"""Torch: rows of different lengths, individuals and modes in one batch.

    join    new prompts, (N, P) -> their keys and values, and the first tokens
    step    the last token of every row, (B, 1) -> the next tokens
    leave   the last row takes the place of the one that leaves

Rows end in the same column: shorter ones have unused columns to their left, which attention masks.
Each row keeps the processors that `generate` would apply to it, so a row's choice is that of
`generate` for the same loc_S and U. Hazard: a product of B rows may round otherwise than that of
one row, in the last bits; a choice between scores that differ by as little may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from causal_qwen.conversion.opening import open_model
from causal_qwen.decoding.noise import UNoise, stack_noise
from causal_qwen.decoding.settings import DecodingSettings, context_of, end_ids
from causal_qwen.engines.engine import Choice, Row, Tokens, View
from causal_qwen.generation.logits import ModelLaw, to_tensors
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.modeling.value_space import field_space
from causal_qwen.text.numerals import render

COLUMNS = 128  # by which the cache grows, and unused columns that it keeps


class TorchEngine:
    """A causal model and its processor."""

    kind = "torch"
    rows: int | None = None

    def __init__(self, model: CausalModel, processor: Processor) -> None:
        kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
        # Gemma, Mistral and Phi-3 have layers with a window, Qwen3.5 with linear attention
        self.has_row_cache = kinds <= {DynamicLayer}
        self.model, self.processor = model, processor
        self.size: int = model.config.causal_size  # type: ignore[assignment]
        self.context = context_of(model)
        self.ends = frozenset(end_ids(model))
        self.default_mode = self.resolve().mode
        self.num_token_id = model.config.num_token_id

    @classmethod
    def open(
        cls,
        path: str | Path,
        device: str = "cpu",
        dtype: str = "auto",
        progress: Callable[[str], None] = lambda _: None,
    ) -> TorchEngine:
        processor, model = open_model(str(path), device, dtype, progress)
        return cls(model, processor)

    def encode(self, text: str, special: bool = True) -> Tokens:
        return _tokens(self.processor(text, return_tensors="np", add_special_tokens=special))

    def encode_chat(self, messages: list[dict[str, str]]) -> Tokens:
        return _tokens(chat_inputs(self.processor, messages))

    def decode(self, tokens: Tokens) -> str:
        return self.processor.decode(*map(np.asarray, tokens), skip_special_tokens=True)

    def show(self, token: int, value: float = 0.0) -> str:
        if token == self.processor.num_token_id:
            return render(value)
        text: str = self.processor.tokenizer.decode([token])
        return text

    def resolve(self, **options: Any) -> DecodingSettings:
        return self.model.resolve_settings(**options)

    @torch.no_grad()
    def look(self, prompt: Tokens) -> View:
        model, cache = self.model, DynamicCache(config=self.model.config)
        u = model.abduct(TorchBatch(self).read_prompts([prompt], [len(prompt.ids)], cache))
        scores = model.lm_head(u.loc)[0, 0].float()
        law, y = ModelLaw(model, scores.device, u.loc.dtype), model.action.number(u).loc[0]

        @torch.no_grad()
        def move(noise: UNoise) -> tuple[Tensor, Tensor]:
            shift, shift_y = model.displace(u, to_tensors(noise, u.scale))  # (N, 1, C), (N, 1)
            values = field_space(model.config).clamped(y + shift_y[:, 0])
            return shift[:, 0] / law.divisor, values

        return View(scores, law, move)

    def new_batch(self) -> TorchBatch:
        return TorchBatch(self) if self.has_row_cache else TakingTurns(self)


def chat_inputs(processor: Processor, messages: list[dict[str, str]]) -> Any:
    """Messages in the model's chat template, up to where the answer begins."""
    if processor.chat_template is None:
        raise ValueError("This model has no chat template; continue texts with `generate`.")
    return processor.apply_chat_template(
        messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


def _tokens(inputs: Any) -> Tokens:
    return Tokens(inputs["input_ids"][0].tolist(), inputs["numeric_values"][0].tolist())


class _Layer(DynamicLayer):
    """Keys and values (rows, heads, columns, size) with room for more columns."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values  # room included
        self.rows, self.end = 0, 0
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        end = self.end + key_states.shape[-2]
        self.keys[: self.rows, :, self.end : end] = key_states
        self.values[: self.rows, :, self.end : end] = value_states
        self.end = end
        return self.keys[: self.rows, :, :end], self.values[: self.rows, :, :end]

    def get_seq_length(self) -> int:
        return self.end


class RowCache(Cache):
    """The keys and values of all rows; every row ends in column `end`."""

    layers: list[Any]

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.starts: list[int] = []  # the first used column of every row

    @property
    def end(self) -> int:
        return self.layers[0].end if self.layers else 0

    def join(self, prompts: Cache, lengths: Sequence[int], copies: Sequence[int]) -> None:
        """Add rows with the keys and values of prompts, which end in the same column: `copies` of
        each. What is left of a prompt's length is padding, and not copied."""
        rows = len(self.starts) + sum(copies)
        before = self.end if self.starts else 0
        end = max(before, *lengths)
        if not self.layers:
            self.layers = [_Layer(layer.keys[:0], layer.values[:0]) for layer in prompts.layers]
        self._reserve(rows, end + COLUMNS, end - before)
        self.starts = [start + end - before for start in self.starts]
        for prompt, (length, count) in enumerate(zip(lengths, copies, strict=True)):
            here = slice(len(self.starts), len(self.starts) + count)
            for layer, new in zip(self.layers, prompts.layers, strict=True):
                layer.keys[here, :, end - length : end] = new.keys[prompt, :, -length:]
                layer.values[here, :, end - length : end] = new.values[prompt, :, -length:]
            self.starts += [end - length] * count
        for layer in self.layers:
            layer.rows, layer.end = rows, end

    def leave(self, row: int) -> None:
        """The last row takes the place of `row`."""
        last = len(self.starts) - 1
        for layer in self.layers:
            if row != last:
                layer.keys[row] = layer.keys[last].clone()
                layer.values[row] = layer.values[last].clone()
            layer.rows = last
        self.starts[row] = self.starts[last]
        self.starts.pop()

    def make_room(self) -> None:
        """One more column for every row; columns that no row uses are dropped from time to time."""
        if (unused := min(self.starts)) >= COLUMNS:
            self._reserve(len(self.starts), self.end - unused + COLUMNS, -unused)
            for layer in self.layers:
                layer.end -= unused
            self.starts = [start - unused for start in self.starts]
        elif self.end == self.layers[0].keys.shape[2]:
            self._reserve(len(self.starts), self.end + COLUMNS, 0)

    def _reserve(self, rows: int, columns: int, shift: int) -> None:
        """Room for rows and columns, the used ones `shift` columns further to the right."""
        used = len(self.starts)
        for layer in self.layers:
            have = layer.keys.shape
            if shift == 0 and have[0] >= rows and have[2] >= columns - COLUMNS + 1:
                continue
            room = have[0] if rows <= have[0] else max(rows, 2 * have[0])
            shape = (room, have[1], columns, have[3])
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_zeros(shape)  # masked columns must be finite
                if used:
                    first = max(-shift, 0)
                    part = old[:used, :, first : layer.end]
                    new[:used, :, first + shift : first + shift + part.shape[2]] = part
                setattr(layer, name, new)


class _RowState:
    """A row, and what `generate` would keep of it."""

    def __init__(self, row: Row, model: CausalModel) -> None:
        self.row = row
        self.ids = torch.tensor([row.prompt.ids], device=model.device)  # (1, T)
        options = {name: value for name, value in row.options.items() if value is not None}
        self.processors, kept, is_drawn = model.prepare_row(self.ids, **options)
        self.decision = kept.get("decision_processor")  # None where softmax decides
        self.tracker = kept.get("tracker")
        self.generator = torch.Generator(model.device) if is_drawn else None
        if self.generator is not None and row.seed is not None:
            self.generator.manual_seed(row.seed)

    @property
    def has_few_candidates(self) -> bool:
        return self.decision is not None and bool(self.decision.settings.min_p)

    def noise(self) -> UNoise | None:
        """At the position of the row's last token. -> (1, C)"""
        return None if self.decision is None else self.decision.noise.at([self.row.length - 1])

    def choose(self, outputs: Any, num_token_id: int | None) -> Choice:
        """From the outputs of the last position of this row."""
        if self.decision is not None:
            self.decision.positions = [self.row.length - 1]
            self.decision.observe(outputs)
        scores = self.processors(self.ids, outputs.logits[:, -1].to(torch.float32, copy=True))
        if self.generator is None:
            token = int(scores.argmax(-1))
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))
        value = 0.0
        if token == num_token_id and self.tracker is not None:
            value = float(self.tracker.next_value(outputs))
        self.ids = torch.cat([self.ids, self.ids.new_tensor([[token]])], dim=-1)
        return Choice(token, value)


class TorchBatch:
    def __init__(self, engine: TorchEngine) -> None:
        self.engine, self.model = engine, engine.model
        self.num_token_id = engine.model.config.num_token_id
        self.states: list[_RowState] = []
        self.cache = RowCache()

    @torch.no_grad()
    def join(self, rows: Sequence[Row]) -> list[Choice | Exception]:
        states = [_RowState(row, self.model) for row in rows]
        groups = [list(same) for _, same in groupby(rows, key=lambda row: id(row.prompt))]
        prompts, copies = [group[0].prompt for group in groups], [len(group) for group in groups]
        lengths = [len(prompt.ids) for prompt in prompts]
        cache = DynamicCache(config=self.model.config)
        z = self.read_prompts(prompts, lengths, cache)  # (N, 1, H)
        self.cache.join(cache, lengths, copies)
        self.states += states
        try:
            return self._choose(states, z.repeat_interleave(torch.tensor(copies).to(z.device), 0))
        except Exception:  # of these rows alone: the others go on
            for row in rows:
                self.leave(row)
            raise

    @torch.no_grad()
    def step(self) -> list[tuple[Row, Choice | Exception]]:
        rows = [state.row for state in self.states]
        self.cache.make_room()
        mask = None
        if max(self.cache.starts):
            columns, starts = torch.arange(self.cache.end + 1), torch.tensor(self.cache.starts)
            mask = (columns >= starts[:, None]).long().to(self.model.device)  # (B, columns)
        z = self._read(
            torch.tensor([[row.new.ids[-1]] for row in rows]),
            [[row.new.values[-1]] for row in rows],
            self.cache,
            attention_mask=mask,
            position_ids=torch.tensor([[row.length - 1] for row in rows]).to(self.model.device),
        )
        return list(zip(rows, self._choose(self.states, z), strict=True))

    def leave(self, row: Row) -> None:
        place = next(i for i, state in enumerate(self.states) if state.row is row)
        self.cache.leave(place)
        last = self.states.pop()
        if place < len(self.states):
            self.states[place] = last

    def read_prompts(self, prompts: list[Tokens], lengths: list[int], cache: Cache) -> Tensor:
        """The states after prompts, which are padded on the left to one length. -> (N, 1, H)"""
        if len(prompts) == 1:  # bit for bit what `generate` computes
            return self._read(torch.tensor([prompts[0].ids]), [prompts[0].values], cache)
        longest = max(lengths)
        padding = 1 if self.num_token_id == 0 else 0  # masked; <NUM> would need a value
        missing = [longest - length for length in lengths]
        pairs = list(zip(prompts, missing, strict=True))
        mask = torch.arange(longest) >= torch.tensor(missing)[:, None]  # (N, P)
        return self._read(
            torch.tensor([[padding] * empty + prompt.ids for prompt, empty in pairs]),
            [[0.0] * empty + prompt.values for prompt, empty in pairs],
            cache,
            attention_mask=mask.long().to(self.model.device),
            position_ids=(mask.cumsum(-1) - 1).clamp_min(0).to(self.model.device),
        )

    def _read(self, ids: Tensor, values: list[list[float]], cache: Cache, **more: Any) -> Tensor:
        """The backbone's state after the last tokens. (B, T) -> (B, 1, H)"""
        device, numbers = self.model.device, None
        if self.num_token_id is not None and bool((ids == self.num_token_id).any()):
            numbers = torch.tensor(values, dtype=torch.float64, device=device)
        read = self.model.model(
            input_ids=ids.to(device),
            past_key_values=cache,
            use_cache=True,
            numeric_values=numbers,
            **more,
        )
        z: Tensor = read.last_hidden_state[:, -1:]
        return z

    def _choose(self, states: list[_RowState], z: Tensor) -> list[Choice | Exception]:
        """The next token of every row: heads and noise together, then each by its own rules.
        (B, 1, H) -> B choices; a row that cannot choose gets its error"""
        model = self.model
        u = model.abduct(z)
        noises = [state.noise() for state in states]
        moved = [place for place, noise in enumerate(noises) if noise is not None]
        shift_u = shift = shift_y = None
        if (stacked := stack_noise([noises[place] for place in moved])) is not None:
            moving = Cauchy(u.loc[moved], u.scale[moved])
            shift_u, shift_y = model.displace(moving, to_tensors(stacked, u.scale))
        if shift_u is None or all(states[place].has_few_candidates for place in moved):
            loc = model.lm_head(u.loc)  # (B, 1, V)
        else:
            loc, shift = model.score_moved(u, shift_u)
        y = model.action.number(model.action.widen(u)).loc  # (B, 1)
        choices: list[Choice | Exception] = []
        for place, state in enumerate(states):
            row = slice(place, place + 1)
            at = moved.index(place) if place in moved else None
            shifts = {"shift_U": shift_u, "shift_S": shift, "shift_Y": shift_y}
            outputs = SimpleNamespace(
                logits=loc[row], loc_U=u.loc[row], scale_U=u.scale[row], loc_Y=y[row]
            )
            for name, part in shifts.items():
                own = None if part is None or at is None else part[at : at + 1]
                setattr(outputs, name, own)
            try:
                choice = state.choose(outputs, self.num_token_id)
                choices.append(self._with_log_probs(state.row, choice, loc[place, -1]))
            except (ValueError, ArithmeticError, RuntimeError) as error:
                choices.append(error)
        return choices

    def _with_log_probs(self, row: Row, choice: Choice, loc: Tensor) -> Choice:
        """log softmax(loc_S), before candidates are cut and noise is added."""
        if row.alternatives is None:
            return choice
        log_probs = loc.float().log_softmax(-1)
        best = log_probs.topk(min(row.alternatives, len(log_probs)))
        shown = [self.engine.show(token, choice.value) for token in best.indices.tolist()]
        top = tuple(zip(shown, best.values.tolist(), strict=True))
        return choice._replace(log_prob=float(log_probs[choice.id]), top=top)


class TakingTurns(TorchBatch):
    """Rows with a cache of their own, for layers that `RowCache` does not know."""

    def __init__(self, engine: TorchEngine) -> None:
        super().__init__(engine)
        self.caches: dict[Row, Cache] = {}

    @torch.no_grad()
    def join(self, rows: Sequence[Row]) -> list[Choice | Exception]:
        for row in rows:
            self.states.append(_RowState(row, self.model))
            self.caches[row] = DynamicCache(config=self.model.config)
        return [self._next(state, *state.row.prompt) for state in self.states[-len(rows) :]]

    @torch.no_grad()
    def step(self) -> list[tuple[Row, Choice | Exception]]:
        last = ((state, state.row.new) for state in self.states)
        return [(s.row, self._next(s, new.ids[-1:], new.values[-1:])) for s, new in last]

    def _next(self, state: _RowState, ids: list[int], values: list[float]) -> Choice | Exception:
        z = self._read(torch.tensor([ids]), [values], self.caches[state.row])
        return self._choose([state], z)[0]

    def leave(self, row: Row) -> None:
        self.states = [state for state in self.states if state.row is not row]
        del self.caches[row]
