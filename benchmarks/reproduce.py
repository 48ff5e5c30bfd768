"""The headline results of docs/results on any base model, beside those of SmolLM2-135M.

    make reproduce MODEL=Qwen/Qwen2.5-0.5B        # a hub name, a directory, a GGUF file
    python benchmarks/reproduce.py --model my-qwen --parts promise engine

The model is converted (once; kept in the cache directory), and every benchmark is run in a short
form: about a quarter of an hour for 135M parameters. docs/results/reproduced/<name>.md holds the
figures beside those of the embedded model, which come from this very command; the pages one level
up are the long forms. Everything runs in float32.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bench_numbers
import decode
import individuals
import liveliness
import numpy as np
import torch
from _numbers_heads import GAUSSIAN, MSE, OURS
from _results import paired_ratio, save
from engine import take_turns
from transformers import Qwen2ForCausalLM

from causal_qwen.analysis.verify import verify
from causal_qwen.conversion.base_models import as_qwen2, load_base
from causal_qwen.conversion.calibration import PROMPTS, TEXTS
from causal_qwen.conversion.checkpoint_io import encode_texts, quiet
from causal_qwen.conversion.convert import compare, convert, default_model, open_model
from causal_qwen.engine import Engine
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.paths import EMBEDDED, cache_directory

OURS_NAME = EMBEDDED
OUTPUT = Path(__file__).parents[1] / "docs" / "results" / "reproduced"
Figures = dict[str, str]  # what -> the figure, as it is shown


class Size(NamedTuple):
    """How much of every benchmark is run."""

    tokens: int = 50  # of a text that is compared with the base model's
    rounds: int = 3  # of what is timed
    groups: int = 2  # prompts whose texts are compared with each other
    speakers: int = 10  # of each of these
    tables: tuple[str, ...] = ("diamonds", "concrete")
    rows: int = 300
    people: int = 3  # of the parts about individuals
    said: int = 16  # tokens of their texts
    draws: int = 20_000


SMALLEST = Size(
    tokens=8, rounds=1, groups=1, speakers=3, tables=("concrete",), rows=60, people=2, said=4
)


class Subject(NamedTuple):
    """The base model, and what was made of it."""

    base: Any
    path: Path
    processor: Any
    model: Any


def prepare(name: str) -> Subject:
    """Convert the base model, unless that was done before or it is converted already."""
    if name == EMBEDDED:
        path = default_model(progress=say)
    elif _is_converted(Path(name)):
        path = Path(name)
    else:
        path = cache_directory() / "reproduce" / label(name)
        if not (path / "config.json").is_file():
            convert(name, path, dtype="float32", progress=say)
    processor, model = open_model(path)
    model = model.float()
    with quiet():
        if path == Path(name):
            base = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32)
        else:
            base = as_qwen2(load_base(name, torch.float32))
    return Subject(base.eval(), path, processor, model)


def _is_converted(path: Path) -> bool:
    config = path / "config.json"
    if not config.is_file():
        return False
    kind = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    return bool(kind == CausalQwen2Config.model_type)


def label(name: str) -> str:
    """A file's name for a model: the last part of its own."""
    return re.sub(r"[^\w.-]+", "-", Path(name).name.removesuffix(".gguf")).strip("-.") or "model"


def say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the parts


@torch.no_grad()
def promise(subject: Subject, size: Size) -> Figures:
    """Before training it is its base model."""
    tokenizer = subject.processor.tokenizer
    subject.model.calibration = None
    report = compare("", subject.base, subject.model, encode_texts(tokenizer, TEXTS))
    same = {"standard": 0, "compatible": 0}
    for ids in encode_texts(tokenizer, PROMPTS[:3]) or []:
        common = {"max_new_tokens": size.tokens, "pad_token_id": 0}
        common["attention_mask"] = torch.ones_like(ids[None])
        expected = subject.base.generate(ids[None], do_sample=False, **common)
        for mode in same:
            said = subject.model.generate(ids[None], causal_mode=mode, **common)
            same[mode] += torch.equal(said, expected)
    return {
        "largest difference of logits to the base model": f"{report.max_logit_difference:.3g}",
        "`standard` chooses what the base model would": f"{report.standard_agreement:.1%} "
        f"of {report.positions} positions",
        **{
            f"`{mode}` says the same {size.tokens} tokens": f"{count} of 3 texts"
            for mode, count in same.items()
        },
    }


@torch.no_grad()
def speed(subject: Subject, size: Size) -> Figures:
    """Time per token of every mode, relative to the base model's greedy decoding."""
    times = decode.measure(subject.base, subject.model, size.rounds)
    base = times["Qwen2 greedy"]
    figures = {"Qwen2 greedy, ms per token": f"{1e3 * float(np.median(base)):.1f}"}
    for mode in decode.MODES:
        figures[f"`{mode}`, times that"] = "{:.2f} ({:.2f} to {:.2f})".format(
            *paired_ratio(times[mode], base)
        )
    return figures


def alive(subject: Subject, size: Size) -> Figures:
    """Are individuals as lively as softmax sampling, and do they differ?"""
    figures = {}
    for name in (
        "softmax T=1 top-p 0.9",
        "sampling T=1",
        "causal T=1",
        "causal T=4 min_density=0.05",
    ):
        found = liveliness.measure(
            subject.model,
            subject.processor.tokenizer,
            liveliness.PEERS[name],
            size.groups,
            size.speakers,
        )
        figures[f"{name}: log-probability per token"] = f"{found['log_prob']:.2f}"
        figures[f"{name}: repeated trigrams"] = f"{found['repetition']:.0%}"
        figures[f"{name}: distinct texts"] = f"{found['distinct']} of {size.speakers}"
    return figures


def numbers(subject: Subject, size: Size) -> Figures:
    """The Cauchy head beside others on the same frozen features."""
    where = ["--model", str(subject.path), "--tables", *size.tables]
    options = bench_numbers.arguments().parse_args(
        ["--quick", "--seeds", "1", "--rows", str(size.rows), *where]
    )
    results = bench_numbers.frozen(options)
    figures = {}
    for table in size.tables:
        for kind, share in dict.fromkeys((r["kind"], r["share"]) for r in results):
            where = f"{table}, {kind}" + (f" {share:.0%}" if share else "")
            for other in (GAUSSIAN, MSE):
                mine, theirs = (
                    bench_numbers.pooled(results, table, kind, share, head)
                    for head in (OURS, other)
                )
                figures[f"{where}: median error, times that of {other}"] = f"{mine / theirs:.2f}"
        covered = bench_numbers.pooled(
            results, table, *bench_numbers.CLEAN, OURS, "conformal_coverage_0.9"
        )
        figures[f"{table}: calibrated 90% intervals hold"] = f"{covered:.0%}"
    return figures


def people(subject: Subject, size: Size) -> Figures:
    """Who wrote it, what a small edit does, and closed forms against draws."""
    sizes = {
        "speakers": size.people,
        "prompts": size.people,
        "monte-carlo": size.draws,
        "positions": 2,
        "individuals": 100,
    }
    settings = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    options = individuals.arguments().parse_args(["all", *settings])
    stage = individuals.Stage(subject.path, 2 * size.people, size.said)
    who = individuals.persona(stage, options)["kinds"]
    edits = individuals.stability(stage, options)["kinds"]
    closed = individuals.analytic(stage, options)
    figures = {
        f"{kind}: speaker recognised (chance {1 / size.people:.0%})": f"{k['accuracy'][0]:.0%}"
        for kind, k in who.items()
    }
    for kind in ("shared e, pearl", "Gumbel"):
        one = edits[kind]
        figures[f"{kind}: an unchanged prompt gives the same text"] = f"{one['replay']:.0%}"
        figures[f"{kind}: share of a text before an edit shows"] = f"{one['prefix'][0]:.2f}"
        count = one["stability"]
        against = f"{count['violations']} of {count['changed']}"
        figures[f"{kind}: choices changed against the odds"] = against
    figures["P_k within 3 standard errors of draws"] = f"{closed['within']:.1%} of tokens"
    return figures


@torch.no_grad()
def numpy_engine(subject: Subject, size: Size) -> Figures:
    """Qwen2 in NumPy against torch: the same numbers, and how fast."""
    found = verify(subject.path, max_new_tokens=min(size.tokens, 32))
    figures = {check.name: f"{check.value:.3g} (bar {check.bar:.3g})" for check in found.checks}
    figures["`causal-qwen verify`"] = "passed" if found.is_passed else "failed"
    engine = Engine.from_pretrained(subject.path)
    ids = torch.arange(8)[None] + 100
    options = {"min_new_tokens": decode.NEW_TOKENS, "max_new_tokens": decode.NEW_TOKENS}

    def ours() -> float:
        start = time.perf_counter()
        engine.generate(ids[0].tolist(), mode="compatible", **options)
        return time.perf_counter() - start

    def theirs() -> float:
        start = time.perf_counter()
        mask = torch.ones_like(ids)
        subject.base.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **options)
        return time.perf_counter() - start

    times = take_turns({"ours": ours, "theirs": theirs}, size.rounds)
    ratio, low, high = paired_ratio(times["theirs"], times["ours"])
    figures["decoding, times torch's speed"] = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
    return figures


PARTS: dict[str, tuple[str, Callable[[Subject, Size], Figures], str]] = {
    "promise": ("It starts as its base model", promise, ""),
    "decode": ("Decoding speed", speed, "decode"),
    "liveliness": ("Alive and fluent", alive, "liveliness"),
    "numbers": ("Numbers", numbers, "numbers"),
    "individuals": ("Individuals and counterfactuals", people, "individuals"),
    "engine": ("The NumPy engine", numpy_engine, "engine"),
}


# ---------------------------------------------------------------- the page


def page(name: str, found: dict[str, Figures], ours: dict[str, Figures]) -> list[str]:
    is_ours = name == OURS_NAME
    heads = ["", "SmolLM2-135M"] if is_ours else ["", "ours (SmolLM2-135M)", f"this model ({name})"]
    lines = [
        f"# {name}",
        "",
        f"`make reproduce MODEL={name}`: short forms of the benchmarks; threads: "
        f"{torch.get_num_threads()}, torch {torch.__version__}, float32. Figures of time compare "
        "peers of one run on one machine.",
        "",
    ]
    for part, figures in found.items():
        title, _, long_form = PARTS[part]
        lines += [f"## {title}", ""]
        lines += [f"The long form: [{long_form}](../{long_form}.md).", ""] if long_form else []
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for what, figure in figures.items():
            known = [] if is_ours else [ours.get(part, {}).get(what, "not measured")]
            lines.append(f"| {' | '.join([what.replace('|', '/'), *known, figure])} |")
        lines.append("")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=EMBEDDED, help="a hub name, a directory or a GGUF file")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the directory of the page")
    parser.add_argument("--quick", action="store_true", help="the smallest form: does it run")
    options = parser.parse_args()
    subject = prepare(options.model)
    name = label(options.model)
    reference = OUTPUT / f"{OURS_NAME}.json"
    ours = json.loads(reference.read_text(encoding="utf-8")) if reference.is_file() else {}
    output = options.output / f"{name}.md"
    saved = output.with_suffix(".json")
    found = json.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else {}
    for part in options.parts:
        say(part)
        start = time.perf_counter()
        found[part] = PARTS[part][1](subject, SMALLEST if options.quick else Size())
        say(f"{part}: {time.perf_counter() - start:.0f} s")
        in_order = {known: found[known] for known in PARTS if known in found}
        save(page(name, in_order, ours), in_order, output)


if __name__ == "__main__":
    main()
