"""Texts of a model, and measures of texts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import _gumbel as gumbel
import numpy as np
import torch
from _gumbel import GumbelIndividual
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList

from causal_qwen.conversion.calibration import read_texts
from causal_qwen.conversion.checkpoint_io import encode_texts
from causal_qwen.conversion.opening import open_model
from causal_qwen.decoding.step import cut_by_text, keep_min_p
from causal_qwen.individuals import Individual
from causal_qwen.numpy_engine.calibration import TEXTS, equal_gain

PROMPTS = (  # none of these took part in the choice of a default
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
TUNING_PROMPTS = (  # of the grid that chose the saved defaults
    "The old lighthouse keeper opened the door and",
    "My grandmother's recipe for soup begins with",
    "The best way to learn a new language is",
    "On Monday morning the whole office",
    "Deep in the forest there lived",
    "The history of chess begins",
    "If I could travel anywhere in the world,",
    "The mayor promised the citizens that",
    "When the rain finally stopped,",
    "To build a small wooden boat, you first",
    "Scientists announced yesterday that",
    "She looked at the painting for a long time and",
)
TUNING_QUESTIONS = (
    "What makes a good friend?",
    "How does a bicycle stay upright?",
    "Tell me about the planet Mars.",
    "What should I cook tonight?",
)
MIN_P = 0.1
LOOP = 6  # tokens
SOFTMAX: dict[str, Any] = {"causal_mode": "compatible", "do_sample": True, "top_k": 0}


def prompt_ids(
    tokenizer: Any, openings: Sequence[str] = PROMPTS, questions: Sequence[str] = QUESTIONS
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Token ids of openings, and of questions through the chat template if there is one."""

    def ask(question: str) -> str:
        chat = [{"role": "user", "content": question}]
        if tokenizer.chat_template is None:
            return question
        text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return text

    texts = [*openings], [ask(question) for question in questions]
    first, second = ([torch.tensor(tokenizer(text).input_ids) for text in part] for part in texts)
    return first, second


def in_turn(first: list[torch.Tensor], second: list[torch.Tensor]) -> list[torch.Tensor]:
    """One of each in turn; the rest of the longer list comes last."""
    pairs = itertools.zip_longest(first, second)
    return [one for pair in pairs for one in pair if one is not None]


# ---------------------------------------------------------------- a random bias of the logits


@dataclass(frozen=True, eq=False)
class BiasIndividual(GumbelIndividual):
    """The same Gaussian bias of the logits at all positions."""

    strength: float = 1.0

    def at(self, position: int) -> np.ndarray:
        bias: np.ndarray = np.random.default_rng(self.seed).normal(size=self.size) * self.strength
        return bias


@functools.lru_cache(maxsize=1)
@torch.no_grad()
def bias_strength(model: Any, draws: int = 64) -> float:
    """The strength at which a Gaussian bias changes as many choices of real text as softmax with
    min-p."""
    tokenizer = open_model(model.name_or_path)[0].tokenizer
    logits = model.lm_head(read_texts(model, encode_texts(tokenizer, TEXTS))[::2]).numpy()
    rng = np.random.default_rng(0)
    return equal_gain(logits, lambda _, keep: rng.standard_normal((len(keep), draws)))


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


class CandidateProcessor(LogitsProcessor):
    """min-p, whole words, no n tokens said again: the candidates of individuals for others.

    `edges` are the model's `word_edges`, `padding` the padding tokens on the left of every row.
    """

    def __init__(
        self, min_p: float, n: int, edges: torch.Tensor | None, padding: Sequence[int]
    ) -> None:
        self.min_p, self.n, self.edges, self.padding = min_p, n, edges, padding

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = zip(input_ids.numpy(), self.padding, strict=True)
        texts = [row[pad:] for row, pad in rows]
        count, scores = len(texts), keep_min_p(scores, self.min_p)
        kept: torch.Tensor = cut_by_text(
            scores, texts, [True] * count, [self.n] * count, self.edges
        )
        return kept


@torch.no_grad()
def pad_left(prompts: Sequence[torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """One batch of prompts of different lengths."""
    masks = [torch.ones_like(ids) for ids in prompts]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    ids = pad(list(prompts), padding_value=model.generation_config.pad_token_id or 0)
    return {"input_ids": ids.to(model.device), "attention_mask": pad(masks).to(model.device)}


def generate_texts(
    model: Any,
    prompts: Sequence[torch.Tensor],
    tokens: int,
    seed: int = 0,
    speakers: Sequence[Individual | GumbelIndividual] | None = None,
    **options: Any,
) -> Texts:
    """Continue every prompt, in one batch; `speakers` are one per row.

    `avoid_repeats` beside `min_p` gives softmax and Gumbel noise the candidates of individuals.
    """
    batch = pad_left(prompts, model)
    start = batch["input_ids"].shape[1]
    recorder = LogProbRecorder(start, end_tokens(model))
    options |= {**batch, "max_new_tokens": tokens}
    processors: list[LogitsProcessor] = [recorder]
    is_gumbel = speakers is not None and isinstance(speakers[0], GumbelIndividual)
    if "avoid_repeats" in options and (is_gumbel or options.get("causal_mode") == "compatible"):
        padding = (batch["attention_mask"] == 0).sum(-1).tolist()
        cut = options.pop("min_p"), options.pop("avoid_repeats")
        edges = model.decision.word_edges if options.pop("whole_words", False) else None
        processors.append(CandidateProcessor(*cut, edges, padding))
    options["logits_processor"] = LogitsProcessorList(processors)
    torch.manual_seed(seed)
    if is_gumbel:
        ids = gumbel.generate(model, speakers, **options)
    else:
        if speakers is not None:
            options = {"causal_mode": "causal", **options, "individual": speakers}
        ids = model.generate(**options)
    count = recorder.per_row(ids)[1].tolist()
    log_probs = torch.stack(recorder.log_probs, dim=-1).double().numpy()  # (B, new tokens)
    rows = zip(ids[:, start:].tolist(), log_probs, count, strict=True)
    return Texts(*map(list, zip(*((row[:n], lp[:n]) for row, lp, n in rows), strict=True)))


def repetition(tokens: list[int]) -> float:
    """The share of trigrams that occur more than once."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return 1 - len(set(grams)) / max(len(grams), 1)


def has_loop(tokens: list[int]) -> bool:
    """A phrase said again as soon as it ends: at least LOOP tokens in a row, and at least as many
    as the phrase has, are those of n positions before, for some n."""

    def longest(n: int) -> int:
        is_same = [a == b for a, b in zip(tokens, tokens[n:], strict=False)]
        runs = [len(list(run)) for same, run in itertools.groupby(is_same) if same]
        return max(runs, default=0)

    return any(longest(n) >= max(n, LOOP) for n in range(1, len(tokens) // 2 + 1))


def broken_share(log_probs: Sequence[np.ndarray]) -> float:
    """The share of tokens whose base probability is below 1e-4."""
    return float((np.concatenate(log_probs) < math.log(1e-4)).mean())


def word_distance(first: str, second: str) -> float:
    """Levenshtein distance over words, divided by the longer text's length."""
    a, b = first.split(), second.split()
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1] / max(len(a), len(b), 1)
