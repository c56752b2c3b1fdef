"""The figures of a server of language models, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from heliograph.llm.current_session import CurrentSession
from heliograph.llm.serving.answering import Answering
from heliograph.llm.serving.engine import Server
from heliograph.llm.serving.scheduler import Scheduler

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics(Collector):
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
            "Tokens: of prompts, those of them that a cache had, of answers, proposed ones, and those of "
            "them that were right.",
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
            "Time between two tokens of an answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._scheduler: Scheduler | None = None
        self._session: CurrentSession | None = None
        self.registry.register(self)

    def watch(self, server: Server) -> None:
        """Show the state of a server."""
        self._scheduler, self._session = server.scheduler, server.session

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of the server's state; called by Prometheus' registry."""
        scheduler, session = self._scheduler, self._session
        if session is not None:
            yield _counter("sessions_reopened", "Sessions opened in the place of lost ones.", session.number)
        if scheduler is None:
            return
        pages = scheduler.pages
        yield _gauge("waiting", "Requests that wait.", scheduler.waiting)
        yield _gauge("answers", "Answers in progress.", len(scheduler.jobs))
        yield _gauge("answers_limit", "The most answers at a time.", scheduler.bounds.answers)
        states = _gauge("pages", "Pages of the cache: used by answers, kept for later ones, and free.")
        for state, count in (("used", pages.used), ("kept", pages.kept), ("free", pages.free)):
            states.add_metric((state,), count)
        yield states
        yield _gauge("pages_shared", "Pages that several answers use.", pages.shared)
        yield _counter("page_evictions", "Pages that were kept and then given to others.", pages.evictions)
        yield _counter("put_back", "Answers that waited again, since there was no page.", scheduler.puts_back)

    def count(self, answering: Answering) -> None:
        """Count an answer that ended, also early."""
        result = answering.result
        self._tokens.labels("prompt").inc(result.prompt_tokens)
        self._tokens.labels("reused").inc(result.reused_tokens)
        self._tokens.labels("answer").inc(len(result.tokens))
        if result.tokens:
            self._first.observe(result.prompt_seconds)
        if result.speculation is not None:
            self._tokens.labels("proposed").inc(result.speculation.proposed)
            self._tokens.labels("accepted").inc(result.speculation.accepted)
        for gap in answering.gaps:
            self._next.observe(gap)


def _gauge(name: str, help: str, value: float | None = None) -> GaugeMetricFamily:
    """Return a figure; without a value, one for each state."""
    labels = ("state",) if value is None else None
    return GaugeMetricFamily(f"heliograph_llm_{name}", help, value, labels)


def _counter(name: str, help: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"heliograph_llm_{name}", help, value)
