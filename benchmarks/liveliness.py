"""Are individuals alive and fluent? Noise at T = 1 beside softmax sampling, on the embedded model.

    python benchmarks/liveliness.py [--model DIR] [--quick] [--output docs/results/liveliness.md]

For 20 prompts: the mean log-probability per token that the base model gives to 40 new tokens,
with a bootstrap interval over texts. For 5 prompts x 20 speakers: how many texts are distinct,
and the mean normalised word edit distance between them. Three more columns guard against a
log-probability that is high because the text repeats itself, which is likely text: the first 12
tokens alone, the share of repeated trigrams, and the share of different tokens.

Temperatures of shared noise count the gain that was calibrated without truncation as 1.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from _results import log, make_parser, parse, save, table
from _texts import (
    PROMPTS,
    QUESTIONS,
    SOFTMAX,
    end_tokens,
    generate_texts,
    noise,
    prompt_ids,
    repetition,
    restore_untruncated_gains,
    word_distance,
)

from causal_qwen.conversion.convert import default_model, open_model

NEW_TOKENS, EARLY = 40, 12
PEERS: dict[str, dict[str, Any]] = {
    "softmax T=1 top-p 0.9": {**SOFTMAX, "top_p": 0.9},
    "softmax T=1": SOFTMAX,
    "greedy": {"causal_mode": "compatible"},
    "causal T=1": noise(1.0),
    "causal T=0.3": noise(0.3),
    "causal T=4 min_density=0.05": noise(4.0, 0.05),
    "sampling T=1": noise(1.0, mode="sampling"),
    "sampling T=0.3": noise(0.3, mode="sampling"),
}


def measure(
    model: Any,
    tokenizer: Any,
    options: dict[str, Any],
    groups: int,
    speakers: int,
    tokens: int = NEW_TOKENS,
) -> dict[str, Any]:
    """Fluency over all prompts, diversity over `speakers` texts of `groups` prompts each."""
    prompts = prompt_ids(tokenizer)
    texts = generate_texts(model, [p for p in prompts for _ in range(2)], tokens, **options)
    total, count = np.array([(row.sum(), len(row)) for row in texts.log_probs]).T
    draws = np.random.default_rng(0).integers(len(total), size=(2000, len(total)))
    low, high = np.quantile(total[draws].sum(1) / count[draws].sum(1), (0.025, 0.975))
    end = end_tokens(model)
    rows = [[token for token in row if token not in end] for row in texts.tokens]

    by_prompt: list[list[str]] = []
    for prompt in prompts[:: len(prompts) // groups]:
        group = generate_texts(model, [prompt] * speakers, tokens, **options).tokens
        by_prompt.append(tokenizer.batch_decode(group, skip_special_tokens=True))
    pairs = [pair for group in by_prompt for pair in itertools.combinations(group, 2)]
    return {
        "log_prob": float(total.sum() / count.sum()),
        "low": float(low),
        "high": float(high),
        "early": float(np.concatenate([row[:EARLY] for row in texts.log_probs]).mean()),
        "repetition": float(np.mean([repetition(row) for row in rows])),
        "variety": float(np.mean([len(set(row)) / max(len(row), 1) for row in rows])),
        "distinct": min(len(set(group)) for group in by_prompt),
        "distance": float(np.mean([word_distance(*pair) for pair in pairs])),
        "example": by_prompt[0][0].strip().replace("\n", " ")[:90],
    }


def page(results: dict[str, dict[str, Any]], options: Any) -> list[str]:
    columns = {
        "speaker": "{name}",
        "log-prob/token": "{log_prob:.2f}",
        "95% interval": "{low:.2f} to {high:.2f}",
        f"first {EARLY}": "{early:.2f}",
        "repetition": "{repetition:.2f}",
        "different tokens": "{variety:.2f}",
        "distinct": f"{{distinct}} of {options.speakers}",
        "distance": "{distance:.2f}",
        "says": "{example}",
    }
    return [
        "# Alive and fluent",
        "",
        f"`python benchmarks/liveliness.py`: {len(PROMPTS)} openings and {len(QUESTIONS)} "
        f"questions x 2 texts of {options.tokens} tokens for the log-probability (95% bootstrap "
        f"interval over texts; the first {EARLY} tokens alone), repeated trigrams and different "
        f"tokens; {options.groups} prompts x {options.speakers} speakers for diversity (fewest "
        "distinct texts of a prompt, mean normalised word edit distance). Prompts that were not "
        "used to choose the stored gains.",
        "",
        *table(columns, results),
    ]


def main() -> None:
    parser = make_parser(__doc__, "liveliness", "few, short texts: does it run")
    parser.add_argument("--model", type=Path, help="a converted model; the embedded one if none")
    parser.add_argument("--groups", type=int, default=5, help="prompts whose texts are compared")
    parser.add_argument("--speakers", type=int, default=20, help="texts of each of these prompts")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="new tokens of a text")
    options = parse(parser, groups=1, speakers=3, tokens=4)
    processor, model = open_model(options.model or default_model())
    restore_untruncated_gains(model)
    results = {}
    for name, peer in PEERS.items():
        sizes = options.groups, options.speakers, options.tokens
        results[name] = measure(model, processor.tokenizer, peer, *sizes)
        log(name, results[name])
    save(page(results, options), results, options.output)


if __name__ == "__main__":
    main()
