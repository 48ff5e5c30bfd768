"""Texts of a model, and measures of texts, for `liveliness` and `individuals`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from causal_qwen.analysis import gumbel
from causal_qwen.analysis.gumbel import GumbelIndividual
from causal_qwen.conversion.calibration import pad_left
from causal_qwen.individuals.individual import Individual

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
SOFTMAX: dict[str, Any] = {"causal_mode": "compatible", "do_sample": True, "top_k": 0}


def prompt_ids(tokenizer: Any) -> list[torch.Tensor]:
    """Token ids of all openings, then of all questions, through the chat template if any."""
    texts = [*PROMPTS]
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        texts.append(
            question
            if tokenizer.chat_template is None
            else tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        )
    return [torch.tensor(tokenizer(text).input_ids) for text in texts]


# ---------------------------------------------------------------- noise


def restore_untruncated_gains(model: Any) -> Any:
    """Set the noise settings of version 0.3.0, in whose units the pages state temperatures.

    Later conversions save `min_density`, and gains for truncated noise: the shared one 4 times,
    the fresh one 87 times (8.1 / 0.093, measured on the embedded model) the untruncated gain.
    """
    saved = model.generation_config
    if getattr(saved, "min_density", None):
        saved.noise_gain /= 4
        saved.fresh_noise_gain *= 0.093 / 8.1
        saved.min_density = 0.0
    return model


def noise(
    temperature: float, min_density: float = 0.0, mode: str = "causal", fresh: bool = False
) -> dict[str, Any]:
    """Options of `generate_texts` for noise that does not depend on the saved defaults."""
    options = {"causal_mode": mode, "temperature": temperature, "min_density": min_density}
    return options | ({"fresh_noise": True} if fresh else {})


def draw_individual(
    model: Any, seed: int, temperature: float = 1.0, fresh: bool = False, min_density: float = 0.0
) -> Individual:
    return Individual.draw(
        model,
        seed=seed,
        fresh=fresh,
        temperature=temperature,
        min_density=min_density,
    )


# ---------------------------------------------------------------- texts


class Texts(NamedTuple):
    """New tokens of every row up to end-of-text, and the base model's log-probability of each."""

    tokens: list[list[int]]
    log_probs: list[np.ndarray]

    @property
    def mean_log_probs(self) -> np.ndarray:
        """(B,)"""
        return np.array([row.mean() for row in self.log_probs])


def end_tokens(model: Any) -> set[int]:
    eos = model.generation_config.eos_token_id
    return set() if eos is None else set(np.atleast_1d(eos).tolist())


class LogProbRecorder(LogitsProcessor):
    """Records the base model's log-probability of each chosen token; does not change the scores."""

    def __init__(self, prompt_length: int, eos: set[int]) -> None:
        self.prompt_length = prompt_length
        self.eos = torch.tensor(sorted(eos) or [-1])
        self.previous: torch.Tensor | None = None
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.record(input_ids)
        self.previous = scores.log_softmax(-1)
        return scores

    def record(self, input_ids: torch.Tensor) -> None:
        if self.previous is not None:
            self.log_probs.append(self.previous.gather(-1, input_ids[:, -1:]).squeeze(-1))

    def per_row(self, sequences: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum and number of log-probabilities up to and including end-of-text. -> (B,), (B,)"""
        self.record(sequences)
        log_probs = torch.stack(self.log_probs, dim=-1).double()  # (B, new tokens)
        is_eos = torch.isin(sequences[:, self.prompt_length :], self.eos.to(sequences.device))
        is_valid = (is_eos.cumsum(-1) - is_eos.long()) == 0
        return log_probs.where(is_valid, 0.0).sum(-1), is_valid.sum(-1)


@torch.no_grad()
def generate_texts(
    model: Any,
    prompts: Sequence[torch.Tensor],
    tokens: int,
    seed: int = 0,
    speakers: Sequence[Individual | GumbelIndividual] | None = None,
    **options: Any,
) -> Texts:
    """Continue every prompt, in one batch; `speakers` are one per row."""
    batch = pad_left(prompts, model)
    start = batch["input_ids"].shape[1]
    recorder = LogProbRecorder(start, end_tokens(model))
    options |= {**batch, "max_new_tokens": tokens}
    options["logits_processor"] = LogitsProcessorList([recorder])
    torch.manual_seed(seed)
    if speakers is not None and isinstance(speakers[0], GumbelIndividual):
        ids = gumbel.generate(model, speakers, **options)
    else:
        if speakers is not None:
            options |= {"causal_mode": "causal", "individual": speakers}
        ids = model.generate(**options)
    count = recorder.per_row(ids)[1].tolist()
    log_probs = torch.stack(recorder.log_probs, dim=-1).double().numpy()  # (B, new tokens)
    rows = zip(ids[:, start:].tolist(), log_probs, count, strict=True)
    return Texts(*map(list, zip(*((row[:n], lp[:n]) for row, lp, n in rows), strict=True)))


def repetition(tokens: list[int]) -> float:
    """The share of trigrams that occur more than once."""
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
