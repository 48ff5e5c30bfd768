"""A second judge of texts: a word trigram model of other text than the model was trained on."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

DISCOUNT = 0.75
WORD = re.compile(r"\w+|[^\w\s]")


class TrigramModel:
    """Interpolated absolute discounting over words; unknown words share one unit of count."""

    def __init__(self, texts: list[str]) -> None:
        self.counts: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(3)]
        for text in texts:
            words = _words(text)
            for order in range(3):
                spans = (tuple(words[i : i + order + 1]) for i in range(len(words) - order))
                self.counts[order].update(spans)
        self.totals: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(3)]
        self.kinds: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(3)]
        for order, counts in enumerate(self.counts):
            for words, count in counts.items():
                self.totals[order][words[:-1]] += count
                self.kinds[order][words[:-1]] += 1

    @classmethod
    def read(cls, path: Path) -> TrigramModel:
        """Of a text file, or of the strings of a .jsonl file."""
        lines = path.read_text(encoding="utf-8").splitlines()
        if path.suffix != ".jsonl":
            return cls(lines)
        rows = (json.loads(line) for line in lines if line.strip())
        return cls([text for row in rows for text in row.values() if isinstance(text, str)])

    def log_prob(self, text: str) -> float:
        """The mean log-probability of a word."""
        words = _words(text)
        total = sum(
            math.log(self._probability(tuple(words[max(i - 2, 0) : i]), word))
            for i, word in enumerate(words)
        )
        return total / max(len(words), 1)

    def _probability(self, before: tuple[str, ...], word: str) -> float:
        order = len(before)
        shorter = 1 / (len(self.counts[0]) + 1)
        if order:
            shorter = self._probability(before[1:], word)
        total = self.totals[order][before]
        if not total:
            return shorter
        own = max(self.counts[order][(*before, word)] - DISCOUNT, 0)
        return (own + DISCOUNT * self.kinds[order][before] * shorter) / total


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())
