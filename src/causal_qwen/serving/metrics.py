"""Metrics: counters and durations in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Mapping

PREFIX = "causal_qwen_"
BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds, of the histograms' buckets
HELP = {
    "requests_total": "Requests by route and status.",
    "rejected_requests_total": "Requests answered with 429.",
    "cancelled_texts_total": "Texts whose client had gone.",
    "prompt_tokens_total": "Tokens read in prompts.",
    "generated_tokens_total": "Tokens generated.",
    "first_token_seconds": "From a request to the first token of its text.",
    "running_texts": "Texts that are decoded now.",
    "waiting_texts": "Texts that wait for a place.",
}


class Metrics:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        names = [name for name in HELP if name.endswith("_total") and name != "requests_total"]
        self._counts: dict[str, float] = dict.fromkeys(names, 0)
        self._buckets: dict[str, list[int]] = {"first_token_seconds": [0] * (len(BOUNDS) + 1)}
        self._sums: dict[str, float] = {"first_token_seconds": 0.0}

    def add(self, name: str, count: float = 1, **labels: object) -> None:
        """Increase a counter."""
        shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
        key = f"{name}{{{shown}}}" if shown else name
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + count

    def observe(self, name: str, seconds: float) -> None:
        """Count a duration in its bucket."""
        place = sum(seconds > bound for bound in BOUNDS)
        with self._lock:
            self._buckets[name][place] += 1
            self._sums[name] += seconds

    def render(self, gauges: Mapping[str, float]) -> str:
        """Everything, and gauges as they are now."""
        with self._lock:
            counts = dict(self._counts)
            buckets = {name: list(found) for name, found in self._buckets.items()}
            sums = dict(self._sums)
        lines = []
        for name, words in HELP.items():
            kind = "histogram" if name in buckets else "gauge" if name in gauges else "counter"
            lines += [f"# HELP {PREFIX}{name} {words}", f"# TYPE {PREFIX}{name} {kind}"]
            if name in buckets:
                lines += _histogram(name, buckets[name], sums[name])
            for key, count in (counts | dict(gauges)).items():
                if key.partition("{")[0] == name:
                    lines.append(f"{PREFIX}{key} {count:g}")
        return "\n".join(lines) + "\n"


def _histogram(name: str, buckets: list[int], total: float) -> list[str]:
    lines, below = [], 0
    for bound, count in zip((*BOUNDS, "+Inf"), buckets, strict=True):
        below += count
        lines.append(f'{PREFIX}{name}_bucket{{le="{bound}"}} {below}')
    return [*lines, f"{PREFIX}{name}_sum {total:g}", f"{PREFIX}{name}_count {below}"]
