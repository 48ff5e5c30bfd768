"""Metrics: counters and durations for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    import prometheus_client as prometheus
except ModuleNotFoundError:  # files of prompts are answered without a web server, and not counted
    prometheus = None  # type: ignore[assignment]

BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds, of the histogram's buckets
COUNTERS = {
    "requests_total": "Requests by route and status.",
    "rejected_requests_total": "Requests answered with 429.",
    "cancelled_texts_total": "Texts whose client had gone.",
    "prompt_tokens_total": "Tokens read in prompts.",
    "generated_tokens_total": "Tokens generated.",
}
HISTOGRAMS = {"first_token_seconds": "From a request to the first token of its text."}
GAUGES = {
    "running_texts": "Texts that are decoded now.",
    "waiting_texts": "Texts that wait for a place.",
}


class Metrics:
    def __init__(self) -> None:
        if prometheus is None:
            return
        self.registry = prometheus.CollectorRegistry()
        own: Any = {"namespace": "causal_qwen", "registry": self.registry}
        self._counters = {
            name: prometheus.Counter(
                name, about, ("route", "status") if name == "requests_total" else (), **own
            )
            for name, about in COUNTERS.items()
        }
        self._histograms = {
            name: prometheus.Histogram(name, about, buckets=BOUNDS, **own)
            for name, about in HISTOGRAMS.items()
        }
        self._gauges = {
            name: prometheus.Gauge(name, about, **own) for name, about in GAUGES.items()
        }

    def add(self, name: str, count: float = 1, **labels: object) -> None:
        """Increase a counter."""
        if prometheus is not None:
            counter = self._counters[name]
            (counter.labels(**labels) if labels else counter).inc(count)

    def observe(self, name: str, seconds: float) -> None:
        """Count a duration in its bucket."""
        if prometheus is not None:
            self._histograms[name].observe(seconds)

    def render(self, gauges: Mapping[str, float]) -> str:
        """Everything, and gauges as they are now, in the text format of Prometheus."""
        for name, value in gauges.items():
            self._gauges[name].set(value)
        return prometheus.generate_latest(self.registry).decode()
