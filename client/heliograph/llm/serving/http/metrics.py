"""The figures of a server of language models, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from heliograph.llm.serving.answering import Answering
from heliograph.llm.serving.engine import Server

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The figures of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "heliograph_llm_requests",
            "Requests by path and status.",
            ("path", "status"),
            registry=self.registry,
        )
        self._tokens = Counter(
            "heliograph_llm_tokens",
            "Tokens: of prompts, those of them that a cache had, and of answers.",
            ("kind",),
            registry=self.registry,
        )
        self._first = Histogram(
            "heliograph_llm_first_token_seconds",
            "Time from a request to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._next = Histogram(
            "heliograph_llm_next_token_seconds",
            "Mean time between the tokens of an answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._gauges = [
            Gauge(f"heliograph_llm_{name}", help, registry=self.registry)
            for name, help in (
                ("waiting", "Requests that wait for a slot."),
                ("slots_used", "Slots with an answer in progress."),
                ("slots", "Slots."),
            )
        ]

    def watch(self, server: Server) -> None:
        """Show the state of a server."""
        scheduler = server.scheduler
        waiting, used, slots = self._gauges
        waiting.set_function(lambda: scheduler.waiting)
        used.set_function(lambda: len(scheduler.jobs))
        slots.set(scheduler.bounds.slots)

    def count(self, answering: Answering) -> None:
        """Count an answer that ended, also early."""
        result = answering.result
        self._tokens.labels("prompt").inc(result.prompt_tokens)
        self._tokens.labels("reused").inc(result.reused_tokens)
        self._tokens.labels("answer").inc(len(result.tokens))
        if result.tokens:
            self._first.observe(result.prompt_seconds)
        if len(result.tokens) > 1:
            self._next.observe(result.seconds / (len(result.tokens) - 1))
