"""Decoding speed: every mode of CausalQwen beside plain Qwen2's greedy decoding, in one run.

    python benchmarks/decode.py [--quick] [--rounds 15] [--output docs/results/decode.md]

Machines are noisy, so nothing is compared across time: each round decodes the same prompt once
with every peer, in an order that rotates, and what is reported is the median over rounds of the
*paired ratio* to the base model, with a bootstrap confidence interval.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _results import paired_ratio, save
from transformers import Qwen2Config, Qwen2ForCausalLM

from causal_qwen import CausalQwenForCausalLM
from causal_qwen.conversion.calibration import set_decision_noise
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import default_model, graft
from causal_qwen.engine.random_checkpoint import QWEN_0_5B
from causal_qwen.modeling.abduction import inverse_activation
from causal_qwen.modeling.action import row_norms
from causal_qwen.options import MODES

VARIATION = {"constant": 0.0, "mild": 0.3, "strong": 1.0}  # std of log scale_U
PROMPT_TOKENS, NEW_TOKENS = 8, 12


def real_model(dtype: torch.dtype) -> tuple[Any, Any]:
    """The embedded 135M model and its base, sharing their weights."""
    path = default_model()
    with quiet():
        base = Qwen2ForCausalLM.from_pretrained(path, dtype=dtype).eval()
        model = CausalQwenForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return base, model


def random_model(dtype: torch.dtype) -> tuple[Any, Any]:
    """A random model of Qwen2.5-0.5B's shape whose logits spread like a trained model's."""
    torch.manual_seed(0)
    base = Qwen2ForCausalLM(Qwen2Config(**QWEN_0_5B)).eval()
    base.model.norm.weight.data *= 10  # std of the logits about 6, as in the 135M model
    base = base.to(dtype)
    model = graft(base, CausalQwenForCausalLM, None, {})
    set_decision_noise(model)
    scores = model(torch.arange(1000, 1064)[None], output_scale_S=False).logits.float()
    threshold = float(scores.amax(-1).quantile(0.9))
    gamma = (
        np.pi * threshold / (2 * scores.shape[-1] * float(row_norms(model.lm_head.weight).max()))
    )
    model.decision.threshold.data.fill_(threshold)
    model.abduction.scale.bias.data.fill_(inverse_activation(gamma, "exp"))
    model.action.b_noise.data.fill_(gamma)
    model.generation_config.noise_gain = (
        0.2 * 6 / (gamma * float(row_norms(model.lm_head.weight).mean()))
    )
    return base, model


def vary_scale(model: Any, spread: float) -> None:
    """Make log scale_U vary over coordinates and positions with the given standard deviation."""
    z = model.model(torch.arange(1000, 1064)[None]).last_hidden_state.float()
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(model.abduction.scale.weight.shape, generator=generator)
    model.abduction.scale.weight.data.copy_(spread * weight / z.norm(dim=-1).mean())


def measure(base: Any, model: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds per generated token of every peer, round by round."""
    ids = min(1000, model.config.vocab_size // 2), min(20_000, model.config.vocab_size)
    prompt = torch.randint(*ids, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(2))
    common = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    common |= {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
    calls = {"Qwen2 greedy": lambda: base.generate(prompt, do_sample=False, **common)}
    for mode in MODES:
        noise = {"individual": 1} if mode in ("sampling", "causal") else {}
        calls[mode] = lambda mode=mode, noise=noise: model.generate(
            prompt, causal_mode=mode, **noise, **common
        )
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # warm up: caches, row norms, allocator
        calls[name]()
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            calls[name]()
            times[name].append((time.perf_counter() - start) / NEW_TOKENS)
    return times


def measure_load(rounds: int) -> dict[str, list[float]]:
    """Seconds to load the embedded model, as plain Qwen2 and as CausalQwen, round by round."""
    path = default_model()
    times: dict[str, list[float]] = {"Qwen2 load": [], "CausalQwen load": []}
    classes = dict(zip(times, (Qwen2ForCausalLM, CausalQwenForCausalLM), strict=True))
    for turn in range(rounds + 1):
        for name in list(classes)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            with quiet():
                classes[name].from_pretrained(path)
            if turn:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return times


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="the 135M model in float32 only")
    parser.add_argument("--only", default="", help="e.g. '0.5B bfloat16 mild': renew these rows")
    parser.add_argument("--output", type=Path, default=Path("docs/results/decode.md"))
    options = parser.parse_args()
    wanted = options.only.split()

    rows: list[dict[str, Any]] = []

    def add(where: tuple[str, str, str], times: dict[str, list[float]]) -> None:
        reference = next(iter(times.values()))
        for name, seconds in times.items():
            ratio, low, high = paired_ratio(seconds, reference)
            row = dict(zip(("model", "dtype", "scale_U"), where, strict=True)) | {"mode": name}
            row |= {"rounds": options.rounds, "ms": 1e3 * float(np.median(seconds))}
            rows.append(row | {"ratio": ratio, "low": low, "high": high})
            print(json.dumps(rows[-1]), flush=True)

    def is_wanted(*where: str) -> bool:
        return all(word in " ".join(where) for word in wanted)

    if is_wanted("SmolLM2-135M", "float32", "load"):
        add(("SmolLM2-135M", "float32", "load"), measure_load(options.rounds))
    shapes = {"SmolLM2-135M": real_model, "random Qwen2.5-0.5B shape": random_model}
    for shape, make in list(shapes.items())[: 1 if options.quick else None]:
        for dtype in (torch.float32,) if options.quick else (torch.float32, torch.bfloat16):
            precision = str(dtype).removeprefix("torch.")
            scales = [v for v in VARIATION if is_wanted(shape, precision, v)]
            if not scales:
                continue
            base, model = make(dtype)
            for variation in scales:
                vary_scale(model, VARIATION[variation])
                add((shape, precision, variation), measure(base, model, options.rounds))
            del base, model
            gc.collect()
    write(renewed(rows, options) if wanted else rows, options)


def renewed(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the last whole run, with these in their places."""
    place = {tuple(row[k] for k in ("model", "dtype", "scale_U", "mode")): row for row in rows}
    old = json.loads(options.output.with_suffix(".json").read_text(encoding="utf-8"))
    kept = {tuple(row[k] for k in ("model", "dtype", "scale_U", "mode")): row for row in old}
    return list((kept | place).values())


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    lines = [
        "# Decoding speed",
        "",
        f"`python benchmarks/decode.py --rounds N`: {PROMPT_TOKENS} prompt tokens, "
        f"{NEW_TOKENS} new ones, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{platform.machine()}. Ratio: median over rounds of the paired ratio to plain Qwen2 "
        "greedy decoding of the same weights, with its 95% bootstrap interval.",
        "",
        "| model | dtype | scale_U | mode | rounds | ms/token, ms/load | ratio | 95% interval |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['model']} | {r['dtype']} | {r['scale_U']} | {r['mode']} | {r['rounds']} "
        f"| {r['ms']:.1f} | {r['ratio']:.3f} | {r['low']:.3f} to {r['high']:.3f} |"
        for r in rows
    ]
    save(lines, rows, options.output)


if __name__ == "__main__":
    main()
