"""A daemon's metrics for Prometheus: collected when somebody asks, from what the host knows anyway.

What happens on every run is counted by `histograms.RunCounter` alone; everything else is looked up during a
scrape, in a thread of its own. Labels are devices, tenants (which the operator names), reasons, phases:
never what a client chose.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from heliograph_proto import __version__
from heliograph_proto.errors import Reason
from heliograph_proto.membership import MemberState
from heliograph_proto.quotas import TenantUsage
from heliograph_server.core.host import Host, HostStatistics
from heliograph_server.core.session_counts import SessionCounts
from heliograph_server.telemetry import names
from heliograph_server.telemetry.devices import MemoryWatch
from heliograph_server.telemetry.facts import DaemonFacts
from heliograph_server.telemetry.histograms import RunCounter
from heliograph_server.telemetry.names import METRICS, Metric

_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


def family(metric: Metric) -> Family:
    """An empty one."""
    made: Family = _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
    return made


def gauge(metric: Metric, values: Mapping[tuple[str, ...], float]) -> Family:
    """Gauges or counters, by the values of their labels."""
    made = family(metric)
    assert isinstance(made, GaugeMetricFamily | CounterMetricFamily)
    for labels, value in values.items():
        made.add_metric(labels, value)
    return made


def single(metric: Metric, value: float) -> Family:
    """One without labels."""
    return gauge(metric, {(): value})


class DaemonCollector(Collector):
    """All that a daemon exports. One `collect` at a time."""

    def __init__(self, facts: DaemonFacts, runs: RunCounter) -> None:
        self._facts, self._runs = facts, runs
        self._memory: MemoryWatch | None = None

    def __repr__(self) -> str:
        return f"<DaemonCollector of {self._facts.host()}>"

    def describe(self) -> Iterable[Family]:
        """What there can be; asks nobody."""
        return map(family, METRICS)

    def collect(self) -> Iterator[Family]:
        """What there is. Blocks for `devices.ANSWER_SECONDS` at most."""
        host, facts = self._facts.host(), self._facts
        serving = host is not None and not host.is_draining
        yield gauge(names.BUILD, {(__version__, platform.python_version()): 1})
        yield single(names.SERVING, serving)
        yield single(names.DRAINING, host is not None and host.is_draining)
        yield single(names.LAG, facts.lag_seconds())
        yield gauge(names.CALL_ERRORS, by_reason(facts.refused()))
        yield gauge(names.RELOADS, by_label({"ok": 0, "failed": 0} | dict(facts.reloads())))
        yield gauge(names.SCRAPES, by_label(facts.scrapes))
        if (expiry := facts.certificate_expiry()) is not None:
            yield single(names.CERTIFICATE, expiry)
        yield from self._of_runs()
        if host is not None:
            yield from self._of_memory(host)
            yield from _of_sessions(host, host.statistics())
            yield from self._of_counts(host, host.counts())
            yield from _of_pool(host)

    def _of_runs(self) -> Iterator[Family]:
        totals = self._runs.totals()
        yield gauge(names.RUNS, {(*labels,): count for labels, count in totals.runs.items()})
        seconds = family(names.RUN_SECONDS)
        assert isinstance(seconds, HistogramMetricFamily)
        for phase, (buckets, sum_seconds) in totals.phases.items():
            seconds.add_metric((phase,), buckets, sum_seconds)
        yield seconds

    def _of_memory(self, host: Host) -> Iterator[Family]:
        if self._memory is None:
            self._memory = MemoryWatch(host.memory)
        found, silent = self._memory.look([one.name for one in host.devices if one.lost is None])
        values: dict[tuple[str, ...], float] = {}
        for name, memory in found.items():
            values[name, "free"] = memory.free_bytes
            values[name, "used"] = memory.total_bytes - memory.free_bytes
        yield gauge(names.MEMORY, values)
        yield gauge(names.SILENT, {(name,): name in silent for name in {*found, *silent}})

    def _of_counts(self, host: Host, counts: SessionCounts) -> Iterator[Family]:
        yield single(names.IN_FLIGHT, counts.runs_running)
        yield single(names.QUEUED, counts.runs_waiting)
        yield gauge(names.COMMAND_ERRORS, by_reason(counts.failures))
        totals, peers = self._runs.totals(), host.exchange.traffic
        carried: dict[tuple[str, ...], float] = {(*way,): size for way, size in counts.by_road.items()}
        for direction, more in (("received", totals.received_bytes), ("sent", totals.sent_bytes)):
            carried[direction, "inline"] = carried.get((direction, "inline"), 0) + more
        carried["received", "content"] = counts.traffic.content_bytes
        carried["received", "peer"], carried["sent", "peer"] = peers.received_bytes, peers.sent_bytes
        yield gauge(names.BYTES, carried)
        yield gauge(
            names.RELAYED, by_label({"content": counts.traffic.relayed_bytes, "value": peers.relayed_bytes})
        )
        yield gauge(names.CONTENTS, by_label({"hit": host.store.hits, "miss": host.store.misses}))

    def close(self) -> None:
        """Waits for nobody."""
        if self._memory is not None:
            self._memory.close()


def _of_sessions(host: Host, held: HostStatistics) -> Iterator[Family]:
    tenants = host.tenants() or (TenantUsage(""),)
    yield gauge(names.SESSIONS, {(one.tenant,): one.sessions for one in tenants})
    yield gauge(names.TENANT_MEMORY, {(one.tenant,): one.device_memory_bytes for one in tenants})
    yield gauge(names.TENANT_RUNS, {(one.tenant,): one.runs_in_flight for one in tenants})
    yield gauge(names.TENANT_SECONDS, {(one.tenant,): one.device_seconds for one in tenants})
    yield gauge(names.TENANT_REFUSED, {(one.tenant,): one.refused for one in tenants})
    yield single(names.PLANS, held.plans)
    yield single(names.TENSORS, held.tensors)
    yield single(names.CONTENT, held.content_bytes)
    yield single(names.STAGED, held.staged_bytes)
    yield single(names.COMMANDS, held.commands_in_flight)


def _of_pool(host: Host) -> Iterator[Family]:
    states = Counter(one.state for one in host.members)
    yield gauge(names.MEMBERS, {(state.name.lower(),): states[state] for state in MemberState})
    yield single(names.LOST_MEMBERS, host.lost_members)


def by_label(values: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    """By one label."""
    return {(name,): float(value) for name, value in values.items()}


def by_reason(values: Mapping[int, int]) -> dict[tuple[str, ...], float]:
    """By the names of errors' reasons."""
    return {(reason_name(reason),): float(value) for reason, value in dict(values).items()}


def reason_name(reason: int) -> str:
    """Of an error, such as "out_of_memory"."""
    return Reason.Name(Reason.ValueType(reason)).removeprefix("REASON_").lower()


class Exposition:
    """A registry of a daemon's own, with what there is to know of the process, as text."""

    def __init__(self, facts: DaemonFacts, runs: RunCounter) -> None:
        self._collector = DaemonCollector(facts, runs)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)

    def __repr__(self) -> str:
        return f"<Exposition by {self._collector}>"

    def text(self, accept: str) -> tuple[str, bytes]:
        """The type of the text that an Accept header asks for, and the text. Blocks for a moment."""
        encode, kind = choose_encoder(accept)
        return kind, encode(self._registry)

    def close(self) -> None:
        """Waits for nobody."""
        self._collector.close()
