"""Verify: the NumPy engine against torch in float32, and both against torch in float64.

Layer by layer on a text and its greedy continuation, which NumPy generates with a cache. The three
systems run one after the other, because memory may not hold a large model twice.

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
from dataclasses import asdict, dataclass
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
CACHED = "generated"  # the logits of the cached steps
PAIRS = ("numpy_float32", "numpy_float64", "float32_float64")

Stages = dict[str, NDArray[Any]]  # stage -> (T, width)


@dataclass
class Row:
    """The differences of one stage: embedding, layer, norm, logits or generated."""

    name: str
    maximum: dict[str, float]  # of |a - b|, by pair
    percentile_80: dict[str, float]


def compare(name: str, systems: dict[str, NDArray[Any]]) -> Row:
    row = Row(name, {}, {})
    for pair in PAIRS:
        one, other = pair.split("_")
        gap = np.abs(np.asarray(systems[one], np.float64) - systems[other])
        row.maximum[pair] = float(gap.max())
        row.percentile_80[pair] = float(np.percentile(gap, 80))
    return row


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
        """Titles and cells: every stage, then the checks."""
        rows = [[row.name, *(f"{row.maximum[p]:.1e}" for p in PAIRS), ""] for row in self.stages]
        rows += [
            [one.name, f"{one.value:.1e}", "at most", f"{one.bar:.1e}", "✓" if one.is_met else "✗"]
            for one in self.checks
        ]
        return ("", "NumPy - f32", "NumPy - f64", "f32 - f64", ""), rows


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
    new = slice(len(ids) - len(steps) - 1, -1)  # the positions whose logits chose the new tokens
    systems = {"numpy": _numpy_stages(engine, ids)}
    cached = float(np.abs(steps - systems["numpy"]["logits"][new]).max())
    blockwise = _blockwise_error(engine, ids)
    with _as_floats(path, engine) as readable:
        del engine
        for name, kind in (("float32", torch.float32), ("float64", torch.float64)):
            progress(f"torch {name}")
            systems[name] = _torch_stages(readable, ids, kind)
    logits = {name: stages["logits"][new] for name, stages in systems.items()} | {"numpy": steps}
    rows = [
        compare(stage, {name: stages[stage] for name, stages in systems.items()})
        for stage in systems["numpy"]
    ]
    rows.append(compare(CACHED, logits))
    chosen = np.stack([one.argmax(-1) for one in logits.values()])  # (3, N)
    second, best = np.partition(logits["float64"], -2, axis=-1)[:, -2:].T
    differs = (chosen != chosen[0]).any(0) & (best - second > MARGIN)
    checks = checks_of(rows, int(differs.sum()), cached, blockwise)
    return Verification(str(path), rows, checks)


def checks_of(rows: list[Row], disagreed: int, cached: float, blockwise: float) -> list[Check]:
    read = [row for row in rows if row.name in ("logits", CACHED)]
    largest = {pair: max(row.maximum[pair] for row in read) for pair in PAIRS}
    usual = {pair: max(row.percentile_80[pair] for row in read) for pair in PAIRS}
    same = max(SAME, RATIO * largest["float32_float64"])
    bar = max(RATIO * usual["float32_float64"], ROUNDING)
    return [
        Check("logits, NumPy to float64 (80%)", usual["numpy_float64"], bar),
        Check("logits, NumPy to torch float32", largest["numpy_float32"], TOLERANCE),
        Check("tokens that differ", disagreed, 0),
        Check("cached = uncached", cached, same),
        Check("in blocks = at once", blockwise, same),
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
) -> tuple[list[int], NDArray[Any]]:
    """Prompt and greedy tokens, and the logits of every cached step. -> (T,), (N, V)"""
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
    return ids, np.stack(steps)


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


def _blockwise_error(engine: Engine, ids: list[int]) -> float:
    """How far the last logits move when the text is read in blocks."""
    model, row = engine.model, np.array([ids])
    read = []
    for block in (None, max(len(ids) // 5, 1)):
        cache = KeyValueCache(model.config, 1, len(ids))
        read.append(scores(engine, model.forward(model.embed(row), cache, block=block)[0, -1]))
    return float(np.abs(read[1] - read[0]).max())
