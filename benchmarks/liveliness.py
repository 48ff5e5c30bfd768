"""Are individuals alive and fluent? Noise at T = 1 beside softmax sampling, on the embedded model.

    python benchmarks/liveliness.py [--model DIR] [--output docs/results/liveliness.md]

For 20 prompts: the mean log-probability per token that the base model gives to 40 new tokens,
with a bootstrap interval over texts. For 5 prompts x 20 speakers: how many texts are distinct,
and the mean normalised word edit distance between them. Repetition (the share of repeated
trigrams) guards against a log-probability that is good because the text goes round in circles.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LogitsProcessorList

from causal_qwen import CausalQwenForCausalLM
from causal_qwen.calibrate import LogProbRecorder, pad_left
from causal_qwen.convert import default_model, quiet

PROMPTS = (
    "The train was late again, so",
    "In the year 2150, people",
    "A good friend is someone who",
    "The dog barked at",
    "The capital of the old kingdom was",
    "He never expected that the letter",
    "The robot asked the child",
    "Every winter the village",
    "The doctor closed her notebook and",
    "It is often said that mathematics",
    "The recipe calls for two eggs,",
    "Nobody on the ship knew why",
    "The museum's newest painting shows",
    "After the war, the farmers",
    "My first computer was",
    "The law states that every",
    "She opened the window because",
    "The experiment failed when",
    "Under the bridge there was",
    "The king's youngest daughter",
)
NEW_TOKENS = 40
SPEAKERS, DIVERSITY_PROMPTS = 20, 5
SOFTMAX = {"causal_mode": "compatible", "do_sample": True, "top_k": 0}
PEERS: dict[str, dict[str, Any]] = {
    "softmax T=1 top-p 0.9": {**SOFTMAX, "top_p": 0.9},
    "softmax T=1": SOFTMAX,
    "greedy": {"causal_mode": "compatible"},
    "causal T=1": {"causal_mode": "causal"},
    "causal T=0.3": {"causal_mode": "causal", "temperature": 0.3},
    "causal T=3 min_density=0.05": {
        "causal_mode": "causal",
        "temperature": 3.0,
        "min_density": 0.05,
    },
    "sampling T=1": {"causal_mode": "sampling"},
    "sampling T=0.3": {"causal_mode": "sampling", "temperature": 0.3},
}


def speak(model: Any, batch: dict[str, Any], **options: Any) -> tuple[torch.Tensor, np.ndarray]:
    """New tokens, and the sum of log-probabilities and the token count of every row."""
    start = batch["input_ids"].shape[1]
    eos = {model.generation_config.eos_token_id}
    recorder = LogProbRecorder(start, eos)
    torch.manual_seed(0)
    ids = model.generate(
        **batch,
        max_new_tokens=NEW_TOKENS,
        logits_processor=LogitsProcessorList([recorder]),
        **options,
    )
    total, count = recorder.per_row(ids)
    return ids[:, start:], np.stack([total.numpy(), count.numpy()])


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
def measure(model: Any, tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0] for text in PROMPTS]
    rows = [prompt for prompt in prompts for _ in range(2)]
    ids, (total, count) = speak(model, pad_left(rows, model), **options)
    rng = np.random.default_rng(0)
    draws = rng.integers(len(total), size=(2000, len(total)))
    low, high = np.quantile(total[draws].sum(1) / count[draws].sum(1), (0.025, 0.975))

    texts: list[list[str]] = []
    for prompt in prompts[:DIVERSITY_PROMPTS]:
        said, _ = speak(model, pad_left([prompt] * SPEAKERS, model), **options)
        texts.append(tokenizer.batch_decode(said, skip_special_tokens=True))
    distances = [word_distance(*two) for group in texts for two in itertools.combinations(group, 2)]
    eos = model.generation_config.eos_token_id
    return {
        "log_prob": float(total.sum() / count.sum()),
        "low": float(low),
        "high": float(high),
        "repetition": float(
            np.mean([repetition([t for t in r if t != eos]) for r in ids.tolist()])
        ),
        "distinct": min(len(set(group)) for group in texts),
        "distance": float(np.mean(distances)),
        "example": texts[0][0].strip().replace("\n", " ")[:90],
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
        f"`python benchmarks/liveliness.py`: {len(PROMPTS)} prompts x 2 texts of {NEW_TOKENS} "
        f"tokens for the log-probability (95% bootstrap interval over texts); "
        f"{DIVERSITY_PROMPTS} prompts x {SPEAKERS} speakers for diversity (fewest distinct texts "
        "of a prompt, mean normalised word edit distance).",
        "",
        "| speaker | log-prob/token | 95% interval | repetition | distinct | distance | says |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {r['log_prob']:.2f} | {r['low']:.2f} to {r['high']:.2f} "
        f"| {r['repetition']:.2f} | {r['distinct']} of {SPEAKERS} | {r['distance']:.2f} "
        f"| {r['example'].replace('|', '/')} |"
        for name, r in results.items()
    ]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options.output.with_suffix(".json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
