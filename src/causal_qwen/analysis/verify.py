"""Verify: the NumPy engine against torch in float32, and both against torch in float64.

Layer by layer on a text, then token by token of a greedy generation. The three systems run one
after the other, because memory may not hold a large model twice.

Bounds: of the logit differences to float64, NumPy's 80th percentile is at most 1.5 times torch's
own (or 2e-5; two largest differences are noise), the largest to torch in float32 is at most 2e-4;
every token agrees wherever the two best logits differ by more than 1e-4; cached = uncached,
read in blocks = read at once. With int8 weights, torch computes with the same
weights, widened: these bounds are about arithmetic.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from causal_qwen.backbones import base_class
from causal_qwen.conversion.checkpoint_io import load_gguf, quiet
from causal_qwen.engines.numpy import NumpyEngine
from causal_qwen.families import family_of, is_causal
from causal_qwen.layer import is_gguf
from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.numpy_engine import Engine, KeyValueCache
from causal_qwen.numpy_engine.quantization import dequantized, is_quantized, write_model

PROMPT = "The history of bread begins in the fields of the Levant, where people gathered wild grain"
RATIO = 1.5  # NumPy's error to float64, in units of torch's
ROUNDING = 2e-5  # below it, the ratio of the errors of a short text is chance
TOLERANCE = 2e-4  # logits, NumPy to torch float32
SAME = 1e-4  # between cached and blockwise reading; or RATIO x the error of float32
MARGIN = 1e-4  # top-two differences below which rounding of float32 may change the token
PAIRS = ("numpy_float32", "numpy_float64", "float32_float64")
SHOWN = 12  # tokens in the table

Stages = dict[str, NDArray[Any]]  # stage -> (T, width)


@dataclass
class Row:
    """One stage (embedding, layer, norm, logits) or one generated token."""

    name: str
    maximum: dict[str, float] = field(default_factory=dict)  # of |a - b|, by pair
    percentile_80: dict[str, float] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()  # chosen by NumPy, float32 and float64

    def compare(self, systems: dict[str, NDArray[Any]]) -> None:
        for pair in PAIRS:
            one, other = pair.split("_")
            gap = np.abs(np.asarray(systems[one], np.float64) - systems[other])
            self.maximum[pair] = float(gap.max())
            self.percentile_80[pair] = float(np.percentile(gap, 80))


@dataclass
class Check:
    """One measured value and its upper bound."""

    name: str
    value: float
    bar: float

    @property
    def is_met(self) -> bool:
        return self.value <= self.bar


@dataclass
class Verification:
    """All comparisons of one checkpoint."""

    model: str
    stages: list[Row]
    tokens: list[Row]
    checks: list[Check]

    @property
    def is_passed(self) -> bool:
        return all(check.is_met for check in self.checks)

    @property
    def sentence(self) -> str:
        missed = ", ".join(check.name for check in self.checks if not check.is_met)
        if missed:
            return f"The NumPy engine does not compute what torch computes: {missed}."
        return (
            f"The NumPy engine computes what torch computes: all {len(self.checks)} bounds are met."
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_passed": self.is_passed}

    def table(self) -> tuple[tuple[str, ...], list[list[str]]]:
        """Titles and cells: every stage, some of the tokens and the worst, the checks."""
        step = max(len(self.tokens) // SHOWN, 1)
        worst = max(self.tokens, key=lambda row: row.maximum["numpy_float64"], default=None)
        shown = [r for i, r in enumerate(self.tokens) if i % step == 0 or r is worst]
        rows = [[row.name, *_cells(row)] for row in self.stages]
        rows += [[f"token {row.name}", *_cells(row)] for row in shown]
        rows += [
            [one.name, f"{one.value:.1e}", "at most", f"{one.bar:.1e}", "✓" if one.is_met else "✗"]
            for one in self.checks
        ]
        return ("", "NumPy - f32", "NumPy - f64", "f32 - f64", ""), rows


def _cells(row: Row) -> list[str]:
    same = "" if not row.tokens else "same" if len({*row.tokens}) == 1 else str(row.tokens)
    return [*(f"{row.maximum[pair]:.1e}" for pair in PAIRS), same]


def verify(
    path: str | Path,
    prompt: str | list[int] = PROMPT,
    max_new_tokens: int = 32,
    progress: Callable[[str], None] = lambda stage: None,
    *,
    dtype: str | None = None,
    kernel: str = "numpy",
) -> Verification:
    """Compare the systems on one checkpoint; `dtype`, `kernel`: `Engine.from_pretrained`'s."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1.")
    progress("NumPy")
    if is_gguf(path):
        engine = NumpyEngine.open(path, dtype or "float32", kernel).model
    else:
        engine = Engine.from_pretrained(path, dtype, kernel)
    ids, steps = _generate(engine, prompt, max_new_tokens)
    start = len(ids) - len(steps)
    systems = {"numpy": _numpy_stages(engine, ids)}
    checks = list(_own_checks(engine, ids, steps, systems["numpy"]["logits"][start - 1 : -1]))
    with _as_floats(path, engine) as readable:
        del engine
        for name, kind in (("float32", torch.float32), ("float64", torch.float64)):
            progress(f"torch {name}")
            systems[name] = _torch_stages(readable, ids, kind)
    result = Verification(str(path), [Row(name) for name in systems["numpy"]], [], checks)
    for row in result.stages:
        row.compare({name: stages[row.name] for name, stages in systems.items()})
    disagreed = 0
    for place, token in enumerate(ids[start:]):
        logits = {name: stages["logits"][start - 1 + place] for name, stages in systems.items()}
        logits["numpy"] = steps[place]
        row = Row(str(token), tokens=tuple(int(one.argmax()) for one in logits.values()))
        row.compare(logits)
        low, high = np.partition(logits["float64"], -2)[-2:]
        disagreed += len({*row.tokens}) > 1 and high - low > MARGIN
        result.tokens.append(row)
    conclude(result, disagreed)
    return result


def conclude(result: Verification, disagreed: int) -> None:
    """Add the checks of what was compared, before those of the engine against itself."""
    rows = [row for row in result.stages if row.name == "logits"] + result.tokens
    largest = {pair: max(row.maximum[pair] for row in rows) for pair in PAIRS}
    usual = {pair: float(np.median([row.percentile_80[pair] for row in rows])) for pair in PAIRS}
    for check in result.checks:
        check.bar = max(check.bar, RATIO * largest["float32_float64"])
    bar = max(RATIO * usual["float32_float64"], ROUNDING)
    result.checks[:0] = [
        Check("logits, NumPy to float64 (80%)", usual["numpy_float64"], bar),
        Check("logits, NumPy to torch float32", largest["numpy_float32"], TOLERANCE),
        Check("tokens that differ", disagreed, 0),
    ]


@contextmanager
def _as_floats(path: str | Path, engine: Engine) -> Iterator[str | Path]:
    """A directory of the engine's weights that torch can read."""
    if not is_quantized(engine.parameters):
        yield path
        return
    with TemporaryDirectory() as temporary:
        write_model(Path(temporary), *dequantized(engine.fields, engine.parameters))
        yield temporary


def scores(engine: Engine, z: NDArray[Any]) -> NDArray[Any]:
    """The logits of a plain model, loc_S of a causal one. (..., H) -> (..., V)"""
    heads = engine.heads
    return engine.model.logits(z) if heads is None else heads.score(heads.abduct(z).loc)


def _generate(
    engine: Engine, prompt: str | list[int], count: int
) -> tuple[list[int], list[NDArray[Any]]]:
    """Greedy tokens, with the logits of every cached step."""
    if isinstance(prompt, str):
        if engine.reader is None:  # a random model: use random ids
            rng = np.random.default_rng(0)
            prompt = rng.integers(0, engine.model.config.vocab_size, 24).tolist()
        else:
            prompt = engine.reader.encode(prompt, "text")[0]
    if not prompt:
        raise ValueError("The prompt is empty; write a few words.")
    ids = [int(token) for token in prompt]
    new, steps = ids, list[NDArray[Any]]()
    cache = KeyValueCache(engine.model.config, 1, len(ids) + count)
    for _ in range(count):
        z = engine.model.forward(engine.model.embed(np.array([new])), cache)[0, -1]
        steps.append(scores(engine, z))
        new = [int(steps[-1].argmax())]
        ids = ids + new
    return ids, steps


def _numpy_stages(engine: Engine, ids: list[int]) -> Stages:
    parts: dict[str, list[NDArray[Any]]] = {}

    def keep(name: str, array: NDArray[Any]) -> None:
        if not name.startswith("attention"):
            parts.setdefault(name, []).append(array[0])

    logits = engine.logits(ids, observe=keep)
    last = f"layer.{engine.model.config.num_hidden_layers - 1}"  # torch shows it only normed
    stages = {name: np.concatenate(part) for name, part in parts.items() if name != last}
    return {**stages, "logits": logits}


@torch.no_grad()
def _torch_stages(path: str | Path, ids: list[int], dtype: torch.dtype) -> Stages:
    if is_gguf(path):  # of the base alone: its scores are those of the causal model
        fields, has_heads = {}, False
        model = load_gguf(Path(path), dtype).eval()
    else:
        fields = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        has_heads = is_causal(fields.get("model_type"))
        family = CausalQwenForCausalLM if has_heads else base_class(family_of(fields["model_type"]))
        kind: Any = family
        with quiet():
            model = kind.from_pretrained(path, dtype=dtype).eval()
    own: dict[str, Any] = {}
    if has_heads:
        own = {"output_scale_S": False}
        if fields.get("num_token_id") in ids:  # every number is read as 0, as on the NumPy side
            own["numeric_values"] = torch.zeros(1, len(ids))
    output = model(torch.tensor([ids]), output_hidden_states=True, **own)
    hidden = [state[0].numpy() for state in output.hidden_states]
    names = ["embedding", *(f"layer.{i}" for i in range(len(hidden) - 2)), "norm"]
    stages = dict(zip(names, hidden, strict=True)) | {"logits": output.logits[0].numpy()}
    del model, output
    gc.collect()
    return stages


def _own_checks(
    engine: Engine, ids: list[int], steps: list[NDArray[Any]], whole: NDArray[Any]
) -> Iterator[Check]:
    """The engine against itself: cached and blockwise reading agree."""
    yield Check("cached = uncached", float(np.abs(np.stack(steps) - whole).max()), SAME)
    model, row = engine.model, np.array([ids])
    cache = KeyValueCache(model.config, 1, len(ids))
    at_once = scores(engine, model.forward(model.embed(row), cache)[0, -1])
    cache = KeyValueCache(model.config, 1, len(ids))
    z = model.forward(model.embed(row), cache, block=max(len(ids) // 5, 1))[0, -1]
    yield Check("in blocks = at once", float(np.abs(scores(engine, z) - at_once).max()), SAME)
