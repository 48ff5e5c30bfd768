"""Decoding speed: every mode of CausalQwen beside plain Qwen2's greedy decoding, in one run.

    python benchmarks/decode.py [--quick] [--rounds 15] [--texts 8] [--check] [--output PAGE]

Machines are noisy, so nothing is compared across time: each round decodes the same prompt once
with every peer, in rotating order. Reported is the median over rounds of the *paired ratio* to the
base model, with a bootstrap confidence interval. `--texts 8` decodes eight texts at once, each with
an individual of its own; `--threads 1` keeps the waking of threads, which is noisy, out of the
ratios. A run renews its rows of the page; `--check` compares them with it.
"""

from __future__ import annotations

import gc
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _history import MACHINE_COLUMNS, Speeds, conclude, faster, time_beside_memory
from _random_checkpoint import QWEN_0_5B
from _results import Row, log, make_parser, paired_ratio, parse, table
from transformers import Qwen2Config, Qwen2ForCausalLM

from causal_qwen import CausalQwenForCausalLM
from causal_qwen.conversion.calibration import calibrate_gains, set_decision_noise
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import default_model, graft
from causal_qwen.modeling.abduction import inverse_activation
from causal_qwen.modeling.action import row_norms
from causal_qwen.options import MODES

VARIATION = {"constant": 0.0, "mild": 0.3, "strong": 1.0}  # std of log scale_U
PROMPT_TOKENS, NEW_TOKENS = 8, 12
REAL, RANDOM = "SmolLM2-135M", "random Qwen2.5-0.5B shape"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASE = ("model", "dtype", "scale_U", "texts", "threads")
Times = tuple[dict[str, list[float]], Row]  # seconds round by round, the machine


def real_model(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """A converted model and its base, sharing their weights."""
    with quiet():
        base = Qwen2ForCausalLM.from_pretrained(path, dtype=dtype).eval()
        model = CausalQwenForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return base, model


def random_model(dtype: torch.dtype) -> tuple[Any, Any]:
    """A random model of Qwen2.5-0.5B's shape whose logits spread like a trained model's, with the
    candidates and noise of a converted one."""
    torch.manual_seed(0)
    base = Qwen2ForCausalLM(Qwen2Config(**QWEN_0_5B)).eval()
    base.model.norm.weight.data *= 10  # std of the logits about 6, as in the 135M model
    base = base.to(dtype)
    model = graft(base, CausalQwenForCausalLM, None, {})
    set_decision_noise(model)
    scores = model(torch.arange(1000, 1064)[None], output_scale_S=False).logits.float()
    threshold, norms = float(scores.amax(-1).quantile(0.9)), row_norms(model.lm_head.weight)
    gamma = np.pi * threshold / (2 * scores.shape[-1] * float(norms.max()))
    model.decision.threshold.data.fill_(threshold)
    model.abduction.scale.bias.data.fill_(inverse_activation(gamma, "exp"))
    model.action.b_noise.data.fill_(gamma)
    calibrate_gains(model, model.model(torch.arange(1000, 1064)[None]).last_hidden_state[0])
    return base, model


def vary_scale(model: Any, spread: float) -> None:
    """Make log scale_U vary over coordinates and positions with the given standard deviation."""
    ids = torch.arange(1000, 1064)[None] % (model.config.vocab_size // 2)
    z = model.model(ids).last_hidden_state.float()
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(model.abduction.scale.weight.shape, generator=generator)
    model.abduction.scale.weight.data.copy_(spread * weight / z.norm(dim=-1).mean())


def measure(base: Any, model: Any, rounds: int, texts: int) -> Times:
    """Seconds per step of every peer, round by round; a step adds a token to every text."""
    ids = min(1000, model.config.vocab_size // 2), min(20_000, model.config.vocab_size)
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(*ids, (texts, PROMPT_TOKENS), generator=generator)
    common = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    common |= {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
    noise = {"individual": list(range(1, texts + 1)), "temperature": 1.0, "min_density": 0.0}

    def peer(decoder: Any, **options: Any) -> Any:
        return lambda: decoder.generate(prompt, **common, **options)

    peers = {"Qwen2 greedy": peer(base, do_sample=False)}
    for mode in MODES:
        peers[mode] = peer(
            model, causal_mode=mode, **(noise if mode in ("sampling", "causal") else {})
        )
    times, machine = time_beside_memory(peers, rounds)
    return {name: [s / NEW_TOKENS for s in seconds] for name, seconds in times.items()}, machine


def measure_load(path: Path, rounds: int) -> Times:
    """Seconds to load a converted model, as plain Qwen2 and as CausalQwen, round by round."""

    def load(cls: Any) -> None:
        with quiet():
            cls.from_pretrained(path)

    peers = {
        "Qwen2 load": lambda: load(Qwen2ForCausalLM),
        "CausalQwen load": lambda: load(CausalQwenForCausalLM),
    }
    return time_beside_memory(peers, rounds)


@torch.no_grad()
def main() -> None:
    parser = make_parser(__doc__, "decode", "the 135M model in float32 only", 15, has_check=True)
    parser.add_argument("--model", type=Path, help="measure this converted model, not the embedded")
    parser.add_argument("--only", default="", help="e.g. '0.5B bfloat16 mild': renew these rows")
    parser.add_argument("--texts", type=int, default=1, help="decoded at once")
    parser.add_argument("--threads", type=int, help="of torch; one is the least disturbed")
    options = parse(parser)
    if options.threads:
        torch.set_num_threads(options.threads)
    path = options.model or default_model()
    rows: list[Row] = []

    def is_wanted(*where: str) -> bool:
        return all(word in " ".join(where) for word in options.only.split())

    def add(where: tuple[str, str, str], measured: Times) -> None:
        times, machine = measured
        base = next(iter(times.values()))
        for name, seconds in times.items():
            case = (*where, options.texts, torch.get_num_threads())
            row: Row = dict(zip(CASE, case, strict=True)) | machine
            row |= {
                "mode": name,
                "rounds": options.rounds,
                "ms": 1e3 * float(np.median(seconds)),
            }
            row |= zip(("ratio", "low", "high"), paired_ratio(seconds, base), strict=True)
            rows.append(row)
            log(row)

    if options.texts == 1 and is_wanted(REAL, "float32", "load"):
        add((REAL, "float32", "load"), measure_load(path, options.rounds))
    for shape in (REAL,) if options.quick else (REAL, RANDOM):
        for precision, dtype in list(DTYPES.items())[: 1 if options.quick else None]:
            variations = [v for v in VARIATION if is_wanted(shape, precision, v)]
            if not variations:
                continue
            base, model = real_model(path, dtype) if shape == REAL else random_model(dtype)
            for variation in variations:
                vary_scale(model, VARIATION[variation])
                add(
                    (shape, precision, variation),
                    measure(base, model, options.rounds, options.texts),
                )
            del base, model
            gc.collect()
    conclude(rows, options, page, CASE, speeds, ("mode",))


def speeds(row: Row) -> Speeds:
    return {row["mode"]: faster((row["ratio"], row["low"], row["high"]))}


def page(rows: list[Row]) -> list[str]:
    columns = {key: f"{{{key}}}" for key in CASE} | MACHINE_COLUMNS | {"mode": "{mode}"}
    columns |= {"rounds": "{rounds}", "ms/step, ms/load": "{ms:.1f}", "ratio": "{ratio:.3f}"}
    columns["95% interval"] = "{low:.3f} to {high:.3f}"
    return [
        "# Decoding speed",
        "",
        f"`python benchmarks/decode.py --rounds N`: {PROMPT_TOKENS} prompt tokens, "
        f"{NEW_TOKENS} new ones, torch {torch.__version__}, {platform.machine()}. Ratio: median "
        "over rounds of the paired ratio to plain Qwen2 "
        "greedy decoding of the same weights, with its 95% bootstrap interval.",
        "",
        *table(columns, rows),
    ]


if __name__ == "__main__":
    main()
