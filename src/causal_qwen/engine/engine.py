"""Engine: a checkpoint's directory -> text, in a line.

engine = Engine.from_pretrained("my-model")
print(engine.generate("The train was late, so").text)
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.decoding.settings import DEFAULTS, SOFTMAX, DecodingSettings, resolve_settings
from causal_qwen.engine.generation import DecodeStep, Generator, Limits
from causal_qwen.engine.heads import Cauchy, CausalHeads, warn_if_clamped
from causal_qwen.engine.qwen2 import Ints, KeyValueCache, Observer, Qwen2, Qwen2Config
from causal_qwen.engine.sampling import softmax
from causal_qwen.engine.tokenization import TextReader
from causal_qwen.engine.weights import (
    Float32,
    Stored,
    find_not_finite,
    read_json,
    read_tensors,
    widen,
)
from causal_qwen.individuals.individual import Individual, first_given
from causal_qwen.text.segmentation import stable_prefix

DTYPES = (None, "float32")
OPTIONS = tuple(name for name in (*DEFAULTS, *SOFTMAX) if name != "causal_mode")
TORCH_ONLY = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Step:
    """One token being born."""

    id: int
    text: str  # what the text has gained; nothing while a character is incomplete
    value: float | None  # of a number
    probability: float  # softmax(loc_S) of the token, before anything was cut or moved
    runners_up: list[tuple[str, float]]  # the likeliest other tokens and their probabilities
    token: str = ""  # the token itself, as it is shown
    summary: dict[str, float] | None = None  # of U, S, P and Y, when asked for


@dataclass(frozen=True)
class Generation:
    """What one call of `generate` said; rows are the prompts'."""

    ids: Ints  # (B, prompt + new)
    numeric_values: NDArray[np.float64]  # beside the ids
    new: slice  # where the new tokens stand
    texts: list[str]  # of the new tokens; empty without a tokenizer
    mode: str
    individual: list[Individual] | None  # one per row, in the modes with noise
    settings: DecodingSettings | None = None

    @property
    def text(self) -> str:
        return self.texts[0]


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
        config = Qwen2Config.from_dict(fields)
        is_causal = fields.get("model_type") == "causal_qwen2"
        self.model = Qwen2(config, parameters, where, fields.get("causal_size"))
        self.heads = CausalHeads(fields, parameters, self.model.head, where) if is_causal else None

    @property
    def own_mode(self) -> str:
        """The mode of a call that names none."""
        return self.resolve().mode

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], dtype: str | None = None) -> Engine:
        """A directory with config.json and safetensors, memory-mapped.

        Weights stay as they are stored, and where: in the mapped file. `dtype="float32"` keeps a
        copy of them in memory instead, widened: 16-bit weights run faster then.
        """
        if dtype not in DTYPES:
            raise ValueError(
                f"dtype={dtype!r} is unknown; choose 'float32', or None for as stored."
            )
        directory = Path(path)
        if not directory.is_dir():
            raise FileNotFoundError(f"{directory} is no directory: give that of a saved model.")
        fields = read_json(directory / "config.json")
        Qwen2Config.from_dict(fields)  # refuse other architectures before reading their weights
        parameters = read_tensors(directory)
        if dtype == "float32":
            parameters = {name: np.array(widen(stored)) for name, stored in parameters.items()}
        generation = directory / "generation_config.json"
        return cls(
            fields,
            parameters,
            TextReader.from_directory(directory, fields),
            read_json(generation) if generation.exists() else {},
            str(directory),
        )

    # ------------------------------------------------------------ generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        numeric_values: Sequence[Any] | None = None,
        encode_numbers: str | None = None,
        chat: bool = False,
        **options: Any,
    ) -> Generation:
        """Continue one prompt or several, given as text or as token ids.

        `chat` puts texts into the model's chat template, as a user's message.

        Options: mode, max_new_tokens, min_new_tokens, eos_token_id, seed (of softmax sampling), and
        those of `DecodingSettings`: individual, exogenous, temperature, min_density, noise_gain,
        fresh_noise_gain, fresh_noise, top_k, top_p, min_p, do_sample, repetition_penalty,
        normalization, value_field. Those left out come from generation_config.json.
        """
        call = self._call(prompts, numeric_values, encode_numbers, chat, options, None)
        start = call.ids.shape[1]
        for _ in self._steps(call):
            pass
        texts = []
        if self.reader is not None:
            decode = self.reader.decode
            rows = zip(call.ids[:, start:], call.values[:, start:], strict=True)
            texts = [decode(ids, values) for ids, values in rows]
        return Generation(
            call.ids,
            call.values,
            slice(start, call.ids.shape[1]),
            texts,
            call.settings.mode,
            call.noise.individuals or None,
            call.settings,
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        numeric_values: Sequence[float] | None = None,
        encode_numbers: str | None = None,
        chat: bool = False,
        runners_up: int = 3,
        summarize: bool = False,
        observe: Observer | None = None,
        **options: Any,
    ) -> Iterator[Step]:
        """Continue one prompt, and show every token as it is chosen.

        `summarize` adds figures of U, S, P and Y (it computes every scale_S: slower); `observe` is
        called with every layer's output and attention weights.
        """
        beside = None if numeric_values is None else [numeric_values]
        call = self._call([prompt], beside, encode_numbers, chat, options, observe)
        start, said = call.ids.shape[1], ""
        for step in self._steps(call):
            text = ""
            if self.reader is not None:
                text = self.reader.decode(call.ids[0, start:], call.values[0, start:])
                text = text if step.is_last else stable_prefix(text)
            yield self._step(step, text[len(said) :], runners_up, summarize)
            said = text

    def _call(
        self,
        prompts: Prompt | Sequence[Prompt],
        numeric_values: Sequence[Any] | None,
        encode_numbers: str | None,
        chat: bool,
        given: dict[str, Any],
        observe: Observer | None,
    ) -> Generator:
        rows = _rows(prompts)
        if not rows:
            raise ValueError("There is no prompt: give a text, or a list of texts.")
        beside: list[Any] = [None] * len(rows) if numeric_values is None else list(numeric_values)
        if len(rows) == 1 and beside and np.ndim(beside[0]) == 0 and beside[0] is not None:
            beside = [beside]
        if len(beside) != len(rows):
            raise ValueError(
                f"numeric_values has {len(beside)} rows and there are {len(rows)} prompts: give "
                "one row beside each."
            )
        read = [
            self._encode(row, told, encode_numbers, chat)
            for row, told in zip(rows, beside, strict=True)
        ]
        limits = self._limits(given)
        seed = given.pop("seed", None)
        settings = self.resolve(**given)
        if not all(ids for ids, _ in read):
            raise ValueError("A prompt has no token: write a few words.")
        width = max(len(ids) for ids, _ in read)
        ids = np.full((len(read), width), limits.pad, np.int64)
        values, padding = np.zeros((len(read), width)), np.ones((len(read), width), bool)
        for row, (own, told) in enumerate(read):  # on the left: the last column is every row's
            first = width - len(own)
            ids[row, first:], values[row, first:], padding[row, first:] = own, told, False
        return Generator(
            self.model,
            self.heads,
            self.fields,
            settings,
            limits,
            ids,
            values,
            padding=padding,
            seed=seed,
            observe=observe,
        )

    def resolve(self, mode: str | None = None, **options: Any) -> DecodingSettings:
        """The settings that a call with these options decides by."""
        unknown = [name for name in options if name not in (*DEFAULTS, *SOFTMAX)]
        if unknown:
            raise TypeError(
                f"Unknown option {', '.join(unknown)}; there are mode, {', '.join(OPTIONS)}."
            )
        unsupported = [name for name in TORCH_ONLY if self.saved.get(name) is not None]
        if unsupported:
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

    def _limits(self, given: dict[str, Any]) -> Limits:
        """Take out of the options when a text ends."""
        stops = given.pop("eos_token_id", None)
        if stops is None:
            stops = self.saved.get("eos_token_id", self.fields.get("eos_token_id"))
        stops = () if stops is None else tuple(np.atleast_1d(stops).tolist())
        pad = first_given(
            self.saved.get("pad_token_id"), self.fields.get("pad_token_id"), *stops[:1], 0
        )
        names = ("max_new_tokens", "min_new_tokens")
        lengths = {name: given.pop(name) for name in names if given.get(name) is not None}
        return Limits(**lengths, stops=stops, pad=pad)

    def _steps(self, call: Generator) -> Iterator[DecodeStep]:
        """The call, step by step; overflow becomes an error that names the damaged weight."""
        try:
            for step in call:
                warn_if_clamped(step.values)
                yield step
        except FloatingPointError:
            name = find_not_finite(self.parameters)
            raise ValueError(
                "Logits or scales overflow float32: these weights cannot be run."
                if name is None
                else f"{name} holds NaN or infinity: fetch the checkpoint again."
            ) from None

    def _encode(
        self, prompt: Prompt, values: Sequence[float] | None, way: str | None, chat: bool
    ) -> tuple[list[int], list[float]]:
        if isinstance(prompt, str):
            if self.reader is None:
                raise ValueError("This checkpoint has no tokenizer.json: give token ids.")
            if values is not None:
                raise ValueError(
                    "numeric_values stand beside token ids; a text's numbers are read from the "
                    "text (encode_numbers='value')."
                )
            text = self.reader.as_chat(prompt) if chat else prompt
            return self.reader.encode(text, way, is_framed=not chat)
        ids = [int(token) for token in prompt]
        number = self.fields.get("num_token_id")
        if values is None:
            if self.heads is not None and number in ids:
                raise ValueError(
                    f"The prompt's token {ids.index(number)} is <NUM> and has no value; give "
                    "numeric_values beside it."
                )
            return ids, [0.0] * len(ids)
        beside = [float(value) for value in values]
        stray = [i for i, v in enumerate(beside) if not np.isfinite(v)]
        stray += [i for i, (t, v) in enumerate(zip(ids, beside, strict=False)) if v and t != number]
        if len(beside) != len(ids) or stray:
            raise ValueError(
                f"numeric_values must stand beside the prompt's {len(ids)} ids, finite, and 0 "
                "wherever the token is not <NUM>."
            )
        return ids, beside

    def _step(self, step: DecodeStep, text: str, runners_up: int, summarize: bool) -> Step:
        token, value = int(step.tokens[0]), float(step.values[0])
        likely = softmax(step.loc_scores[0])  # (V,)
        count = min(runners_up + 1, len(likely))
        best = np.argpartition(-likely, count - 1)[:count] if count else np.zeros(0, int)
        others = [int(k) for k in best[np.argsort(-likely[best])] if k != token][:runners_up]
        is_number = self.heads is not None and token == self.fields.get("num_token_id")
        said = float(step.y[0]) if step.y is not None else 0.0
        return Step(
            id=token,
            text=text,
            value=value if is_number else None,
            probability=float(likely[token]),
            runners_up=[(self._shown(k, said), float(likely[k])) for k in others],
            token=self._shown(token, value),
            summary=self._summary(step, token) if summarize else None,
        )

    def _shown(self, token: int, value: float) -> str:
        return str(token) if self.reader is None else self.reader.show(token, value)

    def _summary(self, step: DecodeStep, token: int) -> dict[str, float]:
        """Figures of the chain at one step, in the scale-noise regime."""
        if self.heads is None or step.u is None:
            raise ValueError("Only a causal checkpoint has U, S and P to summarise.")
        u = self.heads.widen(Cauchy(step.u.loc[0], step.u.scale[0]))
        scale = self.heads.score_scale(u.scale)
        chance = Cauchy(step.loc_scores[0], scale).sf(self.heads.threshold)
        y = self.heads.number(u)
        return {
            "U_loc_median": float(np.median(step.u.loc[0])),
            "U_loc_iqr": float(np.subtract(*np.percentile(step.u.loc[0], [75, 25]))),
            "U_scale_median": float(np.median(step.u.scale[0])),
            "S_loc_chosen": float(step.loc_scores[0, token]),
            "S_scale_chosen": float(scale[token]),
            "P_chosen": float(chance[token]),
            "P_sum": float(chance.sum()),
            "Y_loc": float(y.loc),
            "Y_scale": float(y.scale),
        }

    # ------------------------------------------------------------ looking inside

    def logits(self, ids: Sequence[int] | Ints, observe: Observer | None = None) -> Float32:
        """loc_S of every position of one or several texts of equal length. (T,) or (B, T) -> V more

        A causal checkpoint's are its action's; until training moves W_loc they are the base's.
        """
        rows = np.atleast_2d(np.asarray(ids, np.int64))
        cache = KeyValueCache(self.model.config, len(rows), rows.shape[1])
        z = self.model.forward(self.model.embed(rows), cache, observe)
        if self.heads is None:
            scores = self.model.logits(z)
        else:
            scores = self.heads.score(self.heads.abduct(z).loc)
        return scores[0] if np.ndim(ids) == 1 else scores


def _rows(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """One prompt, text or ids, is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    rows = list(prompts)
    return [rows] if rows and isinstance(rows[0], numbers.Integral) else rows
