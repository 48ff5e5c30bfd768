"""A GGUF file as a causal model on llama.cpp, beside llama.cpp itself and beside torch.

    python benchmarks/llama.py model.gguf [--rounds 9] [--tokens 48] [--torch]

decode: every mode beside llama.cpp's own greedy loop (llama_decode and its greedy sampler), in one
run, in turns, in one context of the same size and threads; first: a prompt and its first token;
rows: eight texts at once beside eight sequences of llama.cpp; memory: of a process with each.
`--torch` also compares the texts of individuals with those of torch in float32, on one text.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp as cpp
import numpy as np
from _results import RESULTS, Row, log, page_path, paired_ratio, save, span, table

from causal_qwen.engines import engine as rows
from causal_qwen.engines.llama import LlamaEngine
from causal_qwen.numpy_engine.fast import THREADS

PROMPT = "Write a long story about a carpenter, his daughter and a ship that never left."
MODES: dict[str, dict[str, Any]] = {
    "standard": {"causal_mode": "standard"},
    "causal": {"causal_mode": "causal", "individual": 7},
    "sampling": {"causal_mode": "sampling", "individual": 7},
    "compatible": {"causal_mode": "compatible", "do_sample": True},
}
ROWS = 8


def greedy(engine: LlamaEngine, ids: list[int], count: int, copies: int = 1) -> tuple[float, float]:
    """llama.cpp's own loop. -> seconds of the prompts with their first tokens, and of the others"""
    context = engine.model
    sampler = cpp.llama_sampler_init_greedy()
    begin = time.perf_counter()
    last = []
    for row in range(copies):
        for start in range(0, len(ids), 512):
            part = [(row, place, ids[place]) for place in range(start, min(start + 512, len(ids)))]
            is_last = start + 512 >= len(ids)
            context._decode(part, (len(part) - 1,) if is_last else (), False)
        last.append(cpp.llama_sampler_sample(sampler, context.context, -1))
    middle = time.perf_counter()
    for step in range(count - 1):
        context._decode([(k, len(ids) + step, t) for k, t in enumerate(last)], range(copies), False)
        last = [cpp.llama_sampler_sample(sampler, context.context, k) for k in range(copies)]
    end = time.perf_counter()
    cpp.llama_sampler_free(sampler)
    for row in range(copies):
        context.forget(row)
    return middle - begin, end - middle


def decode(
    engine: LlamaEngine, ids: list[int], count: int, options: dict[str, Any], copies: int = 1
) -> tuple[float, float]:
    """The same as individuals: every row has its own."""
    batch = engine.new_batch()
    them = []
    for row in range(copies):
        own = dict(options, individual=row) if copies > 1 else options
        prompt = rows.Tokens(list(ids), [0.0] * len(ids))
        them.append(rows.Row(prompt, own, 0, count))
    begin = time.perf_counter()
    for row, choice in zip(them, batch.join(them), strict=True):
        row.append(_whole(choice))
    middle = time.perf_counter()
    for _ in range(count - 1):
        for row, choice in batch.step():
            row.append(_whole(choice))
    end = time.perf_counter()
    for row in them:
        batch.leave(row)
    return middle - begin, end - middle


def _whole(choice: Any) -> Any:
    if isinstance(choice, Exception):
        raise choice
    return choice


def compare(engine: LlamaEngine, rounds: int, count: int) -> list[Row]:
    """Every mode and eight rows, beside llama.cpp in the same round."""
    ids = engine.encode_chat([{"role": "user", "content": PROMPT}]).ids
    peers = {"llama.cpp": lambda: greedy(engine, ids, count)}
    for mode, options in MODES.items():
        peers[f"`{mode}`"] = lambda options=options: decode(engine, ids, count, options)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    for turn in range(-1, rounds):
        names = list(peers)[turn % len(peers) :] + list(peers)[: turn % len(peers)]
        for name in names:
            seconds = peers[name]()
            if turn >= 0:
                found[name].append(seconds)
    base = np.array(found["llama.cpp"])
    lines = []
    for name, pairs in found.items():
        own = np.array(pairs)
        lines.append(
            {
                "what": name,
                "rate": (count - 1) / float(np.median(own[:, 1])),
                "ratio": paired_ratio(base[:, 1], own[:, 1]),
                "first": paired_ratio(own[:, 0], base[:, 0]),
            }
        )
        log(lines[-1])
    together: dict[str, list[float]] = {"llama.cpp": [], "individuals": []}
    for turn in range(-1, max(rounds // 3, 1)):
        pair = {
            "llama.cpp": greedy(engine, ids, count, ROWS)[1],
            "individuals": decode(engine, ids, count, MODES["causal"], ROWS)[1],
        }
        for name, seconds in pair.items():
            if turn >= 0:
                together[name].append(seconds)
    for name, seconds in together.items():
        rate = ROWS * (count - 1) / float(np.median(seconds))
        ratio = paired_ratio(together["llama.cpp"], seconds)
        title = f"{ROWS} texts, {name}"
        lines.append({"what": title, "rate": rate, "ratio": ratio})
        log(lines[-1])
    return lines


MEMORY = {
    "llama.cpp": "context = llama.Context({path!r}, llama.MEMORY, 0, llama.THREADS)\n"
    "context.read_prompt(0, list(range(1000, 1400)), False)",
    "individuals": "engine = llama.LlamaEngine.open({path!r})\n"
    "from causal_qwen.session import Session\n"
    "Session(engine).generate('The king ' * 200, 7, max_new_tokens=8)",
}


def memory(path: Path) -> Row:
    """MB of a process that has read some 400 tokens, file included."""
    found = {}
    for name, code in MEMORY.items():
        parts = (
            "import sys; sys.path.insert(0, {place!r})",
            "from causal_qwen.engines import llama",
        )
        lines = "\n".join((*parts, code, "from _results import resident_bytes"))
        text = lines.format(place=str(Path(__file__).parent), path=str(path))
        done = subprocess.run(
            [sys.executable, "-c", f"{text}\nprint(resident_bytes(peak=True))"],
            capture_output=True,
            text=True,
            check=True,
        )
        found[name] = int(done.stdout.split()[-1]) / 1e6
    return {name: round(size) for name, size in found.items()}


def same_tokens(path: Path, engine: LlamaEngine, count: int) -> Row:
    """Along texts that torch writes in float32: how many tokens llama.cpp would choose, too."""
    from causal_qwen.session import Session
    from causal_qwen.session import open as open_session

    torch_session, ours = open_session(str(path), "torch", dtype="float32"), Session(engine)
    equal = total = 0
    for prompt in ("Write two sentences about the sea.", "用三句话讲一个关于猫的故事。"):
        for who in (1, 2, 3):
            text = torch_session.chat(prompt, who, max_new_tokens=count)
            begun = ours.encode([{"role": "user", "content": prompt}])
            told = torch_session.engine.encode(text.text).ids
            batch = engine.new_batch()
            row = rows.Row(begun, {"causal_mode": "causal", "individual": who}, None, count)
            choice = _whole(batch.join([row])[0])
            state = batch.states[row]
            for place, token in enumerate(told):
                equal, total = equal + (choice.id == token), total + 1
                state.chooser.ids[-1] = token  # the text is torch's
                row.append(choice._replace(id=token))
                if place + 1 < len(told):
                    choice = _whole(batch.step()[0][1])
            batch.leave(row)
    return {"equal": equal, "tokens": total}


COLUMNS = {
    "what": "{what}",
    "tokens/s": "{rate:.1f}",
    "of llama.cpp's own": span("ratio", 3),
    "first token, times llama.cpp's": span("first"),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--torch", action="store_true", help="texts beside torch, too")
    parser.add_argument("--output", type=page_path("llama"), default=RESULTS / "llama.md")
    options = parser.parse_args(arguments)
    engine = LlamaEngine.open(options.model)
    lines = compare(engine, options.rounds, options.tokens)
    mb, same = memory(options.model), None
    text = (
        f"`python benchmarks/llama.py {options.model.name}{' --torch' * options.torch}`: "
        f"{options.tokens} new tokens, in turns with llama.cpp's own greedy loop, "
        f"{options.rounds} rounds, {platform.machine()}, {THREADS} threads; medians with 95% "
        f"intervals. Memory at its peak, the file included: {mb['individuals']} MB, "
        f"{mb['llama.cpp']} MB without individuals."
    )
    if options.torch:
        same = same_tokens(options.model, engine, options.tokens)
        text += (
            f" Along six texts that individuals wrote in torch (float32), {same['equal']} of "
            f"{same['tokens']} tokens are torch's."
        )
    results = {"model": options.model.name, "rows": lines, "memory": mb, "same": same}
    save(["# llama.cpp", "", text, "", *table(COLUMNS, lines)], results, options.output)


if __name__ == "__main__":
    main()
