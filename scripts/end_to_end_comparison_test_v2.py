"""Side by side with the base model: the outputs of both for the same text.

    python scripts/end_to_end_comparison_test_v2.py [--model DIR] [--seed N]

The base model is the same directory, read as a plain Qwen2ForCausalLM.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import typer
from _report import Checks, ModelOption, SeedOption, console, load_subject, show_table
from rich.markup import escape
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

NEW = 12
LONG, EARLY = 40, 12  # tokens whose likelihoods are compared; the first ones are shown apart
SOFTMAX = "softmax, min-p 0.1"
SPEAKERS = 3  # of every prompt
MARGIN = 0.8  # the bar is 0.5; the standard error of a difference over 24 texts is about 0.2
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "My neighbour's dog has a habit of",
    "The recipe calls for flour, butter and",
    "In the year 1969 two astronauts",
    "A good teacher knows that",
    "The train to the coast leaves at",
    "She opened the letter and read:",
)
PASSAGES = (
    "The garden behind the house had been left alone for years. Nettles grew where the roses once "
    "stood, and a pear tree leaned on the wall as if it were tired. On the first day of spring "
    "we carried out the chairs, cut a path to the well and found, under the leaves, a stone bench "
    "with two names and a date on it that nobody in the village could explain.",
    "A bakery sells 120 loaves a day from Monday to Friday and 200 on Saturday. It is closed on "
    "Sunday. If each loaf costs 3 dollars, how much does the bakery earn in a week? On weekdays it "
    "sells 5 * 120 = 600 loaves, with Saturday 800 loaves, so it earns 800 * 3 = 2400 dollars.",
    "def greatest_common_divisor(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n\n"
    "print(greatest_common_divisor(48, 36))  # 12\n",
)


def main(model: ModelOption = None, seed: SeedOption = 0) -> None:
    """Compare with the base model; exits with 1 when a check fails."""
    subject = load_subject(model)
    checks = Checks("Side by side with the base model", subject)
    if subject.model.config.causal_size != subject.model.config.hidden_size:
        checks.check("the checkpoint loads as plain Qwen2", False, "causal_size is not hidden_size")
        checks.finish()
    with torch.no_grad():
        base, _ = subject.base()
        every_position(checks, base)
        greedy_texts(checks, base, seed)
        fluency(checks, base, seed)
        cost(checks, base)
    checks.finish()


def every_position(checks: Checks, base: Any) -> None:
    checks.section("the same text: every position")
    subject, model = checks.subject, checks.subject.model
    positions, largest, same = 0, 0.0, dict.fromkeys(("standard", "sampling", "causal"), 0)
    for passage in (*PASSAGES, *PROMPTS):
        ids = subject.ids(passage)
        expected, logits = base(ids).logits, model(ids, output_scale_S=False).logits
        largest = max(largest, float((logits - expected).abs().max()))
        positions += ids.numel()
        for mode in same:
            still = {} if mode == "standard" else {"temperature": 0.0, "individual": 0}
            same[mode] += int((model.inference(ids, mode, **still) == expected.argmax(-1)).sum())
    checks.check(
        "the logits are the base model's, bit for bit",
        largest == 0,
        f"largest difference {largest:.3g} at {positions} positions",
        unless=subject.why_other_logits,
    )
    for mode, count in same.items():
        checks.check(
            f"{mode} chooses what the base model would"
            + ("" if mode == "standard" else " at T = 0"),
            count == positions,
            f"{count} of {positions}",
            unless=subject.why_other_choices,
        )


def greedy_texts(checks: Checks, base: Any, seed: int) -> None:
    checks.section("the same prompt: whole texts")
    subject, model = checks.subject, checks.subject.model
    settings: dict[str, dict[str, Any]] = {
        "compatible": {"causal_mode": "compatible", "do_sample": False},
        "standard": {"do_sample": False},
        "causal, T = 0": {"causal_mode": "causal", "temperature": 0.0},
        "causal, T = 1": {"causal_mode": "causal", "individual": seed},
        "sampling, T = 1": {"do_sample": True, "individual": seed},
    }
    agreeing = dict.fromkeys(settings, 0)
    shown = PROMPTS[:2]
    for prompt in shown:
        ids = subject.ids(prompt)
        expected = generate(base, NEW, ids, do_sample=False)
        rows = [("base model", subject.text(expected[0, ids.shape[1] :]))]
        for name, options in settings.items():
            text = generate(model, NEW, ids, **options)
            agreeing[name] += int(torch.equal(text, expected))
            rows.append((name, subject.text(text[0, ids.shape[1] :])))
        console.print(f"  [dim]{escape(subject.text(ids[0]))} …[/]")
        show_table("", "continuation", rows=rows)
    for name in ("compatible", "standard", "causal, T = 0"):
        unless = subject.why_other_logits if name == "compatible" else subject.why_other_choices
        checks.check(
            f"{name}: the base model's greedy text, token by token",
            agreeing[name] == len(shown),
            f"{agreeing[name]} of {len(shown)} texts of {NEW} tokens",
            unless,
        )


def fluency(checks: Checks, base: Any, seed: int) -> None:
    checks.section(
        "calibrated noise: as likely as softmax sampling with min-p under the base model"
    )
    subject, model = checks.subject, checks.subject.model
    prompts = [subject.ids(prompt)[0] for prompt in PROMPTS for _ in range(SPEAKERS)]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    masks = [torch.ones_like(ids) for ids in prompts]
    batch = {"input_ids": pad(prompts), "attention_mask": pad(masks)}
    texts, start = batch["input_ids"].shape
    seeds = list(range(seed, seed + texts))
    greedy = generate(base, LONG, **batch, do_sample=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        soft = generate(base, LONG, **batch, do_sample=True, temperature=1.0, min_p=0.1, top_k=0)
    noise = {"temperature": 1.0, "individual": seeds}
    generated = {
        SOFTMAX: soft,
        "sampling": generate(model, LONG, **batch, do_sample=True, **noise),
        "causal": generate(model, LONG, **batch, causal_mode="causal", **noise),
        "greedy": greedy,
    }
    likely = {name: log_probability(base, text, batch) for name, text in generated.items()}
    other = {name: int((text != greedy).any(-1).sum()) for name, text in generated.items()}
    show_table(
        "",
        f"log-probability per token, {LONG} tokens",
        f"the first {EARLY}",
        "different tokens",
        "not the greedy text",
        rows=[
            (
                name,
                f"{likely[name].mean():.2f}",
                f"{likely[name][:, :EARLY].mean():.2f}",
                f"{variety(text[:, start:]):.0%}",
                f"{other[name]} of {texts}",
            )
            for name, text in generated.items()
        ],
    )
    unless = subject.why_uncalibrated or subject.why_other_logits
    for mode in ("sampling", "causal"):
        checks.at_most(
            f"{mode}: per token as likely as softmax sampling, within",
            abs(float(likely[mode].mean() - likely[SOFTMAX].mean())),
            MARGIN,
            unless,
        )
        checks.check(
            f"{mode}: at least half of the texts are not the greedy one",
            2 * other[mode] >= texts,
            f"{other[mode]} of {texts}",
            unless,
        )


def cost(checks: Checks, base: Any) -> None:
    checks.section("cost")
    subject, model = checks.subject, checks.subject.model
    ids = subject.ids(PROMPTS[0])
    ours, theirs = (sum(w.numel() for w in m.state_dict().values()) for m in (model, base))
    rows = [("numbers in the checkpoint", f"{theirs / 1e6:.2f}M", f"{ours / 1e6:.2f}M")]
    times = {name: [] for name in ("base", "model")}
    for _ in range(2):  # interleaved: other load disturbs both
        for name, net in (("base", base), ("model", model)):
            start = time.perf_counter()
            generate(net, NEW, ids, do_sample=False)
            times[name].append((time.perf_counter() - start) / NEW * 1000)
    best = {name: min(values) for name, values in times.items()}
    rows.append(("ms per token, greedy, best of 2", f"{best['base']:.1f}", f"{best['model']:.1f}"))
    show_table("", "base model", "causal model", rows=rows)
    size, vocabulary = model.config.causal_size, model.config.vocab_size
    hidden = model.config.hidden_size
    added = 2 * (hidden * size + size) + size + 3 * vocabulary + (size + 1) + hidden
    added += vocabulary if model.config.head_bias else 0
    checks.check(
        "it adds two maps of U, three numbers per token and a few vectors only",
        ours - theirs == added,
        f"{ours - theirs:,} numbers",
    )


def generate(model: Any, tokens: int, input_ids: Tensor, **options: Any) -> Tensor:
    """Exactly `tokens` new tokens: texts of one length are compared token by token."""
    options.setdefault("attention_mask", torch.ones_like(input_ids))
    text: Tensor = model.generate(
        input_ids, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, **options
    )
    return text


def log_probability(base: Any, text: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """log-probability of every new token under the base model's softmax. -> (B, new)"""
    start = batch["input_ids"].shape[1]
    mask = torch.cat([batch["attention_mask"], torch.ones_like(text[:, start:])], dim=-1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits = base(text, attention_mask=mask, position_ids=positions).logits[:, start - 1 : -1]
    log_p: Tensor = logits.float().log_softmax(-1)
    return log_p.gather(-1, text[:, start:].unsqueeze(-1)).squeeze(-1)


def variety(ids: Tensor) -> float:
    """The share of different tokens in a text, which is low for loops. (B, new)"""
    return sum(len(row.unique()) for row in ids) / ids.numel()


if __name__ == "__main__":
    typer.run(main)
