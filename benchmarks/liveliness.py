"""Are individuals alive and fluent? Noise at T = 1 beside softmax sampling, on the embedded model.

    python benchmarks/liveliness.py [--model DIR] [--output docs/results/liveliness.md]

For 20 prompts: the mean log-probability per token that the base model gives to 40 new tokens,
with a bootstrap interval over texts. For 5 prompts x 20 speakers: how many texts are distinct,
and the mean normalised word edit distance between them. Three more columns guard against a
log-probability that is good because the text goes round in circles, which is likely text: the
first 12 tokens alone, the share of repeated trigrams, and the share of different tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _results import save
from transformers import AutoTokenizer, LogitsProcessorList

from causal_qwen import CausalQwenForCausalLM
from causal_qwen.conversion.calibration import LogProbRecorder, pad_left
from causal_qwen.conversion.checkpoint_io import quiet
from causal_qwen.conversion.convert import default_model
from causal_qwen.generation.streaming import end_ids

PROMPTS = (  # none of these was used to choose the stored gains
    "The carpenter measured the plank twice and",
    "Far from the coast, the fishermen",
    "One of the oldest instruments in the world",
    "The orchestra had just begun when",
    "Without electricity, a modern hospital",
    "Our cat refuses to",
    "The map showed a road that",
    "Children learn to read when",
    "The engineer who designed the tunnel",
    "By the time the guests arrived,",
)
QUESTIONS = (  # asked through the chat template
    "What makes a good teacher?",
    "Tell me something about volcanoes.",
    "How do I repair a flat tyre?",
    "Write the opening of a detective story.",
    "Why is the sky blue?",
    "What should I see in Rome?",
    "Describe the taste of coffee.",
    "How do birds find their way?",
    "Give me three tips for saving money.",
    "Who invented the printing press?",
)
NEW_TOKENS, EARLY = 40, 12
SPEAKERS, DIVERSITY_PROMPTS = 20, 5
SOFTMAX = {"causal_mode": "compatible", "do_sample": True, "top_k": 0}
PEERS: dict[str, dict[str, Any]] = {
    "softmax T=1 top-p 0.9": {**SOFTMAX, "top_p": 0.9},
    "softmax T=1": SOFTMAX,
    "greedy": {"causal_mode": "compatible"},
    "causal T=1": {"causal_mode": "causal"},
    "causal T=0.3": {"causal_mode": "causal", "temperature": 0.3},
    "causal T=4 min_density=0.05": {
        "causal_mode": "causal",
        "temperature": 4.0,
        "min_density": 0.05,
    },
    "sampling T=1": {"causal_mode": "sampling"},
    "sampling T=0.3": {"causal_mode": "sampling", "temperature": 0.3},
}


def asked(tokenizer: Any, question: str) -> str:
    """A question through the chat template, if there is one."""
    if tokenizer.chat_template is None:
        return question
    chat = [{"role": "user", "content": question}]
    text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return text


def speak(
    model: Any, batch: dict[str, Any], **options: Any
) -> tuple[list[list[int]], np.ndarray, float]:
    """What every row says; its sum of log-probabilities and token count; the mean of the first."""
    start = batch["input_ids"].shape[1]
    eos = end_ids(model)
    recorder = LogProbRecorder(start, eos)
    torch.manual_seed(0)
    ids = model.generate(
        **batch,
        max_new_tokens=NEW_TOKENS,
        logits_processor=LogitsProcessorList([recorder]),
        **options,
    )
    total, count = recorder.per_row(ids)
    early = torch.stack(recorder.log_probs[:EARLY], dim=-1)  # (B, EARLY)
    is_said = torch.arange(early.shape[1]) < count.unsqueeze(-1)
    said = [[token for token in row if token not in eos] for row in ids[:, start:].tolist()]
    return said, np.stack([total.numpy(), count.numpy()]), float(early[is_said].mean())


def repetition(tokens: list[int]) -> float:
    grams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return 1 - len(set(grams)) / max(len(grams), 1)


def word_distance(first: str, second: str) -> float:
    """Levenshtein distance over words, divided by the longer text's length."""
    a, b = first.split(), second.split()
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1] / max(len(a), len(b), 1)


@torch.no_grad()
def measure(
    model: Any,
    tokenizer: Any,
    options: dict[str, Any],
    groups: int = DIVERSITY_PROMPTS,
    speakers: int = SPEAKERS,
) -> dict[str, Any]:
    texts = [*PROMPTS, *(asked(tokenizer, question) for question in QUESTIONS)]
    prompts = [torch.tensor(tokenizer(text).input_ids) for text in texts]
    rows = [prompt for prompt in prompts for _ in range(2)]
    said, (total, count), early = speak(model, pad_left(rows, model), **options)
    rng = np.random.default_rng(0)
    draws = rng.integers(len(total), size=(2000, len(total)))
    low, high = np.quantile(total[draws].sum(1) / count[draws].sum(1), (0.025, 0.975))

    said_of: list[list[str]] = []
    for prompt in prompts[:: len(prompts) // groups]:
        many, _, _ = speak(model, pad_left([prompt] * speakers, model), **options)
        said_of.append(tokenizer.batch_decode(many, skip_special_tokens=True))
    pairs = [two for group in said_of for two in itertools.combinations(group, 2)]
    return {
        "log_prob": float(total.sum() / count.sum()),
        "low": float(low),
        "high": float(high),
        "early": early,
        "repetition": float(np.mean([repetition(row) for row in said])),
        "variety": float(np.mean([len(set(row)) / max(len(row), 1) for row in said])),
        "distinct": min(len(set(group)) for group in said_of),
        "distance": float(np.mean([word_distance(*two) for two in pairs])),
        "example": said_of[0][0].strip().replace("\n", " ")[:90],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--output", type=Path, default=Path("docs/results/liveliness.md"))
    options = parser.parse_args()
    path = options.model or default_model()
    with quiet():
        model = CausalQwenForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)

    results = {}
    for name, peer in PEERS.items():
        results[name] = measure(model, tokenizer, peer)
        print(name, json.dumps(results[name]), flush=True)
    lines = [
        "# Alive and fluent",
        "",
        f"`python benchmarks/liveliness.py`: {len(PROMPTS)} openings and {len(QUESTIONS)} "
        f"questions x 2 texts of {NEW_TOKENS} tokens for the log-probability (95% bootstrap "
        f"interval over texts; the first {EARLY} tokens alone), repeated trigrams and different "
        f"tokens; {DIVERSITY_PROMPTS} prompts x {SPEAKERS} speakers for diversity (fewest distinct "
        "texts of a prompt, mean normalised word edit distance). Prompts that were not used to "
        "choose the stored gains.",
        "",
        f"| speaker | log-prob/token | 95% interval | first {EARLY} | repetition "
        "| different tokens | distinct | distance | says |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {r['log_prob']:.2f} | {r['low']:.2f} to {r['high']:.2f} "
        f"| {r['early']:.2f} | {r['repetition']:.2f} | {r['variety']:.2f} "
        f"| {r['distinct']} of {SPEAKERS} | {r['distance']:.2f} "
        f"| {r['example'].replace('|', '/')} |"
        for name, r in results.items()
    ]
    save(lines, results, options.output)


if __name__ == "__main__":
    main()
