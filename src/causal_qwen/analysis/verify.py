"""Verify: the NumPy engine against torch in float32, and both against torch in float64.

Layer by layer on a text, then token by token of a greedy generation: maximum, mean and 80th
percentile of the differences, and whether torch chooses the same tokens. The three systems run one
after the other, because memory may not hold a large model twice.

Bounds: of the logit differences to float64, NumPy's 80th percentile is at most 1.5 times torch's
own (or 2e-5; two largest differences are noise), the largest to torch in float32 is at most 2e-4;
every token agrees wherever the two best logits differ by more than
1e-4; cached = uncached, batched = alone, read in blocks = read at once.

With int8 weights, torch computes with the same weights, widened: these bounds are about arithmetic.
What rounding the weights changes is measured beside them (`precision`), and may change the
perplexity by 0.5%.
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

from causal_qwen.analysis.precision import RATIO as LOSS
from causal_qwen.analysis.precision import Precision, compare_precision, scores
from causal_qwen.backbones import base_class
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.engine import Engine, KeyValueCache, read_tensors
from causal_qwen.engine.quantization import dequantized, is_quantized, write_model
from causal_qwen.families import family_of, is_causal
from causal_qwen.model import CausalQwenForCausalLM

PROMPT = "The history of bread begins in the fields of the Levant, where people gathered wild grain"
RATIO = 1.5  # NumPy's error to float64, in units of torch's
ROUNDING = 2e-5  # below it, the ratio of the largest errors of a short text is chance
TOLERANCE = 2e-4  # logits, NumPy to torch float32
SAME = 1e-4  # between cached, batched and blockwise reading; or RATIO x the error of float32
MARGIN = 1e-4  # top-two differences below which rounding of float32 may change the token
PAIRS = ("numpy_float32", "numpy_float64", "float32_float64")

Stages = dict[str, NDArray[Any]]  # stage -> (T, width)


@dataclass(frozen=True)
class Difference:
    """|a - b| of one pair of systems."""

    maximum: float
    mean: float
    percentile_80: float

    @classmethod
    def of(cls, a: NDArray[Any], b: NDArray[Any]) -> Difference:
        gap = np.abs(np.asarray(a, np.float64) - b)
        return cls(float(gap.max()), float(gap.mean()), float(np.percentile(gap, 80)))


@dataclass
class Row:
    """One stage (embedding, layer, norm, logits) or one generated token."""

    name: str
    differences: dict[str, Difference] = field(default_factory=dict)  # by pair
    tokens: tuple[int, int, int] | None = None  # chosen by NumPy, float32 and float64
    margin: float | None = None  # of the two best logits, in float64


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
    precision: Precision | None = None  # of int8 weights, where the model before is known

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

    def to_json(self) -> str:
        fields = asdict(self)
        for check, saved in zip(self.checks, fields["checks"], strict=True):
            saved["is_met"] = check.is_met
        if self.precision is not None:
            fields["precision"]["perplexity_ratio"] = self.precision.perplexity_ratio
        return json.dumps({**fields, "is_passed": self.is_passed}, indent=1)


def verify(
    path: str | Path,
    prompt: str | list[int] = PROMPT,
    max_new_tokens: int = 32,
    tolerance: float = TOLERANCE,
    progress: Callable[[str, Verification], None] = lambda what, so_far: None,
    *,
    dtype: str | None = None,
    kernel: str = "numpy",
    original: str | Path | None = None,
) -> Verification:
    """Compare the systems on one checkpoint; `progress` is called after every part.

    `dtype` and `kernel` are those of `Engine.from_pretrained`; `original` is the model from which a
    directory of int8 weights was made.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1.")
    engine = Engine.from_pretrained(path, dtype, kernel)
    result = Verification(str(path), [], [], [])
    progress("NumPy", result)
    ids, steps = _generate(engine, prompt, max_new_tokens)
    start = len(ids) - len(steps)
    ours = _numpy_stages(engine, ids)
    result.checks += _own_checks(engine, ids, steps, ours["logits"][start - 1 : -1])
    result.stages = [Row(name) for name in ours]
    result.tokens = [Row(str(token)) for token in ids[start:]]

    theirs: dict[str, Stages] = {}
    with _as_floats(path, engine) as readable:
        is_text = engine.reader is not None
        del engine
        for name, kind in (("float32", torch.float32), ("float64", torch.float64)):
            progress(f"torch {name}", result)
            theirs[name] = _torch_stages(readable, ids, kind)
            _compare(result, ours, theirs, np.stack(steps), start)
    _conclude(result, tolerance)
    if original is None and dtype == "int8" and not is_quantized(read_tensors(Path(path))):
        original = path
    if original is not None:
        progress("int8 beside float32", result)
        result.precision = compare_precision(original, path)
        if is_text:  # the perplexity of random ids says nothing
            off = abs(result.precision.perplexity_ratio - 1)
            result.checks.append(Check("perplexity of int8, relative difference", off, LOSS))
    progress("done", result)
    return result


@contextmanager
def _as_floats(path: str | Path, engine: Engine) -> Iterator[str | Path]:
    """A directory of the engine's weights that torch can read."""
    if not is_quantized(engine.parameters):
        yield path
        return
    with TemporaryDirectory() as temporary:
        write_model(Path(temporary), *dequantized(engine.fields, engine.parameters))
        yield temporary


def _generate(
    engine: Engine, prompt: str | list[int], count: int
) -> tuple[list[int], list[NDArray[Any]]]:
    """Greedy tokens, with the logits of every cached step."""
    if isinstance(prompt, str):
        vocabulary = engine.model.config.vocab_size
        if engine.reader is None:  # a random model: use random ids
            generator = np.random.default_rng(0)
            prompt = generator.integers(0, vocabulary, 24).tolist()
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
    fields = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    has_heads = is_causal(fields.get("model_type"))
    kind: Any = CausalQwenForCausalLM if has_heads else base_class(family_of(fields["model_type"]))
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
    """The engine against itself: cached, blockwise and batched reading agree."""
    bar = SAME
    yield Check("cached = uncached", float(np.abs(np.stack(steps) - whole).max()), bar)
    model, row = engine.model, np.array([ids])
    at_once = _read(engine, row)[0, -1]
    cut = max(len(ids) // 5, 1)
    cache = KeyValueCache(model.config, 1, len(ids))
    in_blocks = scores(engine, model.forward(model.embed(row), cache, block=cut)[0, -1])
    yield Check("in blocks = at once", float(np.abs(in_blocks - at_once).max()), bar)
    hidden = min(len(ids) - 1, 3)
    padding = np.zeros((2, len(ids)), bool)
    padding[0, :hidden] = True
    short = _read(engine, row[:, hidden:])[0, -1]
    both = _read(engine, np.repeat(row, 2, axis=0), padding)[:, -1]
    gap = np.abs(both - np.stack([short, at_once])).max()
    yield Check("batched = alone", float(gap), bar)


def _read(
    engine: Engine, ids: NDArray[Any], padding: NDArray[np.bool_] | None = None
) -> NDArray[Any]:
    cache = KeyValueCache(engine.model.config, len(ids), ids.shape[1])
    cache.padding = padding
    return scores(engine, engine.model.forward(engine.model.embed(ids), cache)[:, -1:])


def _compare(
    result: Verification, ours: Stages, theirs: dict[str, Stages], steps: NDArray[Any], start: int
) -> None:
    """Fill in every pair of systems that have both run."""
    systems = {"numpy": ours, **theirs}
    for pair in PAIRS:
        one, other = pair.split("_")
        if other not in systems or one not in systems:
            continue
        for row in result.stages:
            difference = Difference.of(systems[one][row.name], systems[other][row.name])
            row.differences[pair] = difference
        first = steps if one == "numpy" else systems[one]["logits"][start - 1 : -1]
        second = systems[other]["logits"][start - 1 : -1]
        for row, a, b in zip(result.tokens, first, second, strict=True):
            row.differences[pair] = Difference.of(a, b)
    if len(theirs) == 2:
        single = theirs["float32"]["logits"][start - 1 : -1]
        double = theirs["float64"]["logits"][start - 1 : -1]
        for row, a, b, c in zip(result.tokens, steps, single, double, strict=True):
            row.tokens = (int(a.argmax()), int(b.argmax()), int(c.argmax()))
            low, high = np.partition(c, -2)[-2:]
            row.margin = float(high - low)


def _conclude(result: Verification, tolerance: float) -> None:
    rows = [row for row in result.stages if row.name == "logits"] + result.tokens
    largest = {pair: max(row.differences[pair].maximum for row in rows) for pair in PAIRS}
    usual = {
        pair: float(np.median([row.differences[pair].percentile_80 for row in rows]))
        for pair in PAIRS
    }
    disagreed = sum(
        len(set(row.tokens or ())) > 1 and (row.margin or 0) > MARGIN for row in result.tokens
    )
    for check in result.checks:
        check.bar = max(check.bar, RATIO * largest["float32_float64"])
    result.checks[:0] = [
        Check(
            "logits, NumPy to float64 (80%)",
            usual["numpy_float64"],
            max(RATIO * usual["float32_float64"], ROUNDING),
        ),
        Check("logits, NumPy to torch float32", largest["numpy_float32"], tolerance),
        Check("tokens that differ", disagreed, 0),
    ]


# ---------------------------------------------------------------- tables and plots


def table(result: Verification, width: int = 12) -> Any:
    """The comparison as a rich table; long ones show every n-th token and the worst."""
    from rich.table import Table

    shown = Table(title=f"NumPy and torch: {result.model}")
    for column in ("", "NumPy - f32: max", "mean", "80%", "NumPy - f64: max", "f32 - f64: max", ""):
        shown.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for row in result.stages:
        shown.add_row(row.name, *_cells(row))
    step = max(len(result.tokens) // width, 1)
    worst = max(result.tokens, key=_error, default=None)
    for index, row in enumerate(result.tokens):
        if index % step == 0 or row is worst:
            shown.add_row(f"token {row.name}", *_cells(row))
    return shown


def _error(row: Row) -> float:
    """NumPy's largest difference to float64; 0 before it is measured."""
    found = row.differences.get("numpy_float64")
    return 0.0 if found is None else found.maximum


@contextmanager
def live(quiet: bool = False) -> Iterator[Callable[[str, Verification], None]]:
    """A progress callback that keeps a colour table on the terminal, and prints the checks."""
    from rich.console import Console, Group
    from rich.live import Live

    if quiet:
        yield lambda what, so_far: None
        return
    console = Console()
    with Live(console=console, refresh_per_second=4) as screen:

        def show(what: str, so_far: Verification) -> None:
            lines = [
                f"[{'green' if check.is_met else 'red'}]{check.name}: {check.value:.3g} "
                f"(at most {check.bar:.3g})[/]"
                for check in so_far.checks
            ]
            shown = [table(so_far)] if so_far.stages else []
            screen.update(Group(*shown, *lines, "" if what == "done" else f"{what} ..."))

        try:
            yield show
        except BaseException:  # clear the screen: the caller prints the error
            screen.update("")
            raise


def _cells(row: Row) -> list[str]:
    near, ours, theirs = (row.differences.get(pair) for pair in PAIRS)
    cells = ["", "", ""]
    if near is not None:
        cells = [f"{near.maximum:.1e}", f"{near.mean:.1e}", f"{near.percentile_80:.1e}"]
    colour = "white"
    if ours is not None and theirs is not None:
        is_close = ours.maximum <= RATIO * theirs.maximum
        colour = "green" if is_close else "yellow"
    cells.append("" if ours is None else f"[{colour}]{ours.maximum:.1e}[/{colour}]")
    cells.append("" if theirs is None else f"{theirs.maximum:.1e}")
    if row.tokens is None:
        return [*cells, ""]
    is_one = len(set(row.tokens)) == 1
    return [*cells, "[green]same[/green]" if is_one else f"[red]{row.tokens}[/red]"]


def plot(result: Verification, path: Path) -> None:
    """The largest difference by layer and by token, of every pair of systems."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for panel, rows, title in zip(
        panels, (result.stages, result.tokens), ("stage", "generated token"), strict=True
    ):
        for pair in PAIRS:
            one, other = pair.split("_")
            heights = [max(row.differences[pair].maximum, 1e-12) for row in rows]
            panel.semilogy(range(len(rows)), heights, label=f"{one} - {other}")
        panel.set_xlabel(title)
    panels[0].set_ylabel("largest difference")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
