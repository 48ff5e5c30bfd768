"""The headline results of docs/results on any base model, beside those of SmolLM2-135M.

    make reproduce MODEL=Qwen/Qwen2.5-0.5B        # a hub name or a directory
    python benchmarks/reproduce.py --model my-qwen --parts promise engine

The model is converted (once; kept in the cache directory), and every benchmark is run in a short
form: about a quarter of an hour for 135M parameters. docs/results/reproduced/<name>.md holds the
figures beside those of the embedded model, which come from the same command; the pages one level
up are the long forms. Everything runs in float32.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import decode
import individuals
import numpy as np
import torch
from _numbers_tables import ALL, mistake
from _results import load, make_parser, paired_ratio, parse, save, span, table, time_peers
from _texts import TUNING_PROMPTS
from engine import NumPyPeer, TorchPeer
from transformers import Qwen2ForCausalLM

from causal_qwen import CausalTextRegressor
from causal_qwen.analysis.verify import verify
from causal_qwen.conversion.checkpoint_io import as_qwen2, encode_texts, load_base, quiet
from causal_qwen.conversion.convert import compare_logits, convert, default_model
from causal_qwen.conversion.opening import open_model
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.numpy_engine.calibration import TEXTS
from causal_qwen.paths import EMBEDDED, cache_directory

OUTPUT = Path(__file__).parents[1] / "docs" / "results" / "reproduced"
Figures = dict[str, str]  # what -> the figure as shown


class Size(NamedTuple):
    """How much of every benchmark is run."""

    tokens: int = 50  # of a text that is compared with the base model's
    rounds: int = 3  # of what is timed
    tables: tuple[str, ...] = ("diamonds", "concrete")
    rows: int = 300
    speakers: int = 6  # individuals, and prompts, of the parts about them
    new_tokens: int = 32  # of their texts
    edits: int = 3  # of a prompt, by as many individuals
    draws: int = 20_000


SMALLEST = Size(
    tokens=8, rounds=1, tables=("concrete",), rows=60, speakers=2, new_tokens=4, edits=2
)


class Subject(NamedTuple):
    """The base model and its conversion."""

    base: Any
    path: Path
    processor: Any
    model: Any


def prepare(name: str) -> Subject:
    """Convert the base model, unless it is converted already."""
    if name == EMBEDDED:
        path = default_model(progress=report)
    elif is_converted(Path(name)):
        path = Path(name)
    else:
        path = cache_directory() / "reproduce" / file_name(name)
        if not (path / "config.json").is_file():
            convert(name, path, dtype="float32", progress=report)
    processor, model = open_model(path)
    with quiet():
        if path == Path(name):
            base = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32)
        else:
            base = as_qwen2(load_base(name, torch.float32))
    return Subject(base.eval(), path, processor, model.float())


def is_converted(path: Path) -> bool:
    config = path / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return bool(fields.get("model_type") == CausalQwen2Config.model_type)


def file_name(name: str) -> str:
    """The last part of a model's name, as a file name."""
    return re.sub(r"[^\w.-]+", "-", Path(name).name.removesuffix(".gguf")).strip("-.") or "model"


def report(stage: str) -> None:
    print(f"{stage} ...", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the parts


@torch.no_grad()
def promise(subject: Subject, size: Size) -> Figures:
    """Before training it is its base model."""
    tokenizer = subject.processor.tokenizer
    texts = encode_texts(tokenizer, TEXTS)
    difference, _, agreement, positions = compare_logits(subject.model, subject.base, texts)
    same = {"standard": 0, "compatible": 0}
    for ids in encode_texts(tokenizer, TUNING_PROMPTS[:3]):
        common = {"max_new_tokens": size.tokens, "pad_token_id": 0}
        common["attention_mask"] = torch.ones_like(ids[None])
        expected = subject.base.generate(ids[None], do_sample=False, **common)
        for mode in same:
            text = subject.model.generate(ids[None], causal_mode=mode, **common)
            same[mode] += torch.equal(text, expected)
    return {
        "largest difference of logits to the base model": f"{difference:.3g}",
        "`standard` chooses what the base model would": f"{agreement:.1%} of {positions} positions",
        **{
            f"`{mode}` says the same {size.tokens} tokens": f"{count} of 3 texts"
            for mode, count in same.items()
        },
    }


@torch.no_grad()
def decoding_speed(subject: Subject, size: Size) -> Figures:
    """Time per token of every mode, relative to the base model's greedy decoding."""
    times, _ = decode.measure(subject.base, subject.model, size.rounds, texts=1)
    base = times.pop("Qwen2 greedy")
    figures = {"Qwen2 greedy, ms per token": f"{1e3 * float(np.median(base)):.1f}"}
    for mode, seconds in times.items():
        figures[f"`{mode}`, times that"] = span("r").format(r=paired_ratio(seconds, base))
    return figures


def numbers(subject: Subject, size: Size) -> Figures:
    """A regressor that reads rows with this model alone, beside the median of the labels."""
    figures = {}
    for name in size.tables:
        frame, values = ALL[name].read(2 * size.rows)
        rows = len(values) // 2
        wrong, _ = mistake(values[:rows], "mixed", 0)
        for what, labels in (("clean", values[:rows]), ("20% wrong", wrong)):
            regressor = CausalTextRegressor(
                model=subject.path, sources=["model"], verbose=False
            ).fit(frame[:rows], labels)
            truth = values[rows:]
            found = regressor.predict(frame[rows:]), np.median(labels)
            ours, constant = (np.median(np.abs(one - truth)) for one in found)
            low, high = regressor.predict_interval(frame[rows:], 0.9)
            inside = np.mean((low <= truth) & (truth <= high))
            of_constant = f"{name}, {what}: median error, times that of a constant"
            figures[of_constant] = f"{ours / constant:.2f}"
            figures[f"{name}, {what}: 90% intervals hold"] = f"{inside:.0%}"
    return figures


def individual_texts(subject: Subject, size: Size) -> Figures:
    """Individuals beside softmax sampling, small edits, and closed forms against draws."""
    count = str(size.edits)
    sizes = ["--speakers", count, "--prompts", count, "--noops", "1"]
    sizes += ["--monte-carlo", str(size.draws), "--positions", "2", "--individuals", "100"]
    options = individuals.arguments().parse_args(["all", *sizes])
    texts = individuals.Subject(subject.path, size.speakers, size.new_tokens)
    figures = {}
    for name in (individuals.BASELINE, "`sampling`", "individuals (`causal`)"):
        found = individuals.measure(texts, individuals.KINDS[name], texts.prompts, size.speakers)
        figures[f"{name}: log-probability per token"] = f"{found['log_prob'][0]:.2f}"
        figures[f"{name}: repeated trigrams"] = f"{found['repetition'][0]:.1%}"
        figures[f"{name}: texts that loop"] = f"{found['loops'][0]:.1%}"
        figures[f"{name}: broken tokens"] = f"{found['broken'][0]:.2%}"
        figures[f"{name}: speaker recognised (chance {1 / size.speakers:.0%})"] = (
            f"{found['words'][0]:.0%}"
        )
    edited = individuals.stability(texts, options, ("individuals", "Gumbel, T = 1"))
    closed = individuals.analytic(texts, options)
    for kind, k in edited["kinds"].items():
        changed = "{violations} of {changed}".format_map(k["stability"])
        figures[f"{kind}: an unchanged prompt gives the same text"] = f"{k['replay']:.0%}"
        figures[f"{kind}: share of a text before an edit shows"] = f"{k['prefix'][0]:.2f}"
        figures[f"{kind}: choices changed against the odds"] = changed
    figures["P_k within 3 standard errors of draws"] = f"{closed['within']:.1%} of tokens"
    return figures


@torch.no_grad()
def numpy_engine(subject: Subject, size: Size) -> Figures:
    """Qwen2 in NumPy against torch: the same numbers, and how fast."""
    found = verify(subject.path, max_new_tokens=min(size.tokens, 32))
    figures = {check.name: f"{check.value:.3g} (bar {check.bar:.3g})" for check in found.checks}
    figures["`causal-qwen verify`"] = "passed" if found.is_passed else "failed"
    ours, theirs = NumPyPeer(subject.path), TorchPeer(subject.path, "float32")
    peers = {
        "ours": lambda: ours.generate(decode.NEW_TOKENS),
        "torch": lambda: theirs.generate(decode.NEW_TOKENS),
    }
    times = time_peers(peers, size.rounds)
    ratio = paired_ratio(times["torch"], times["ours"])
    figures["decoding, times torch's speed"] = span("r").format(r=ratio)
    return figures


PARTS: dict[str, tuple[str, Callable[[Subject, Size], Figures]]] = {
    "promise": ("It starts as its base model", promise),
    "decode": ("Decoding speed", decoding_speed),
    "numbers": ("Numbers", numbers),
    "individuals": ("Individuals and counterfactuals", individual_texts),
    "engine": ("The NumPy engine", numpy_engine),
}


# ---------------------------------------------------------------- the page


def page(name: str, found: dict[str, Figures], ours: dict[str, Figures]) -> list[str]:
    columns = {"": "{what}", "SmolLM2-135M": "{figure}"}
    if name != EMBEDDED:
        columns = {
            "": "{what}",
            "ours (SmolLM2-135M)": "{ours}",
            f"this model ({name})": "{figure}",
        }
    lines = [
        f"# {name}",
        "",
        f"`make reproduce MODEL={name}`: short forms of the benchmarks; threads: "
        f"{torch.get_num_threads()}, torch {torch.__version__}, float32. Figures of time compare "
        "peers of one run on one machine.",
        "",
    ]
    for part, figures in found.items():
        lines += [f"## {PARTS[part][0]}", ""]
        lines += [f"The long form: [{part}](../{part}.md).", ""] if part != "promise" else []
        rows = [
            {"what": what, "figure": figure, "ours": ours.get(part, {}).get(what, "not measured")}
            for what, figure in figures.items()
        ]
        lines += [*table(columns, rows), ""]
    return lines


def main() -> None:
    parser = make_parser(__doc__, "", "the smallest form: does it run")
    parser.add_argument("--model", default=EMBEDDED, help="a hub name, a directory or a GGUF file")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.set_defaults(output=OUTPUT)
    options = parse(parser)
    subject = prepare(options.model)
    name = file_name(options.model)
    output = options.output / f"{name}.md"
    ours, found = load(OUTPUT / f"{EMBEDDED}.md", {}), load(output, {})
    for part in options.parts:
        start = time.perf_counter()
        report(part)
        found[part] = PARTS[part][1](subject, SMALLEST if options.quick else Size())
        report(f"{part}: {time.perf_counter() - start:.0f} s")
        in_order = {known: found[known] for known in PARTS if known in found}
        save(page(name, in_order, ours), in_order, output)


if __name__ == "__main__":
    main()
