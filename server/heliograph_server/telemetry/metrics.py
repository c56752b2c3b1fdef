"""A daemon's metrics for Prometheus, collected during a scrape from the state of the host.

Only `histograms.RunCounter` does work on every run; all else is looked up during a scrape, in a
thread of its own. Labels are devices, tenants (named by the operator), reasons and phases, never
text of a client.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from heliograph_proto import __version__
from heliograph_proto.devices import MemberState
from heliograph_proto.errors import Reason
from heliograph_proto.sessions import TenantUsage
from heliograph_server.runtime.host import Host, HostStatistics
from heliograph_server.runtime.keeper import KeeperFigures
from heliograph_server.session.statistics import SessionCounts
from heliograph_server.state.snapshots import SnapshotFigures
from heliograph_server.telemetry.device_memory import MemoryWatch
from heliograph_server.telemetry.histograms import RunCounter
from heliograph_server.telemetry.telemetry import DaemonFacts, ModelFigures

Kind: TypeAlias = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric family. Names of counters lack the `_total` that Prometheus adds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The name in Prometheus."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


BUILD = Metric(
    "heliograph_build_info", "gauge", "Always 1; the labels have the versions.", ("version", "python")
)
SERVING = Metric("heliograph_serving", "gauge", "1 while new sessions are accepted, else 0.")
DRAINING = Metric("heliograph_draining", "gauge", "1 while the daemon drains, else 0.")
LAG = Metric(
    "heliograph_event_loop_lag_seconds", "gauge", "Largest lag of the event loop in the last half minute."
)
MEMORY = Metric(
    "heliograph_device_memory_bytes",
    "gauge",
    "Memory of a device that Heliograph may use, free or used.",
    ("device", "state"),
)
SILENT = Metric(
    "heliograph_device_silent",
    "gauge",
    "1 if a device did not report its memory in time; its last report is shown.",
    ("device",),
)
SESSIONS = Metric("heliograph_sessions", "gauge", "Open sessions, by tenant.", ("tenant",))
DETACHED = Metric(
    "heliograph_sessions_detached",
    "gauge",
    "Sessions among them whose connection broke, and whose lease runs.",
    ("tenant",),
)
TENANT_MEMORY = Metric(
    "heliograph_tenant_device_memory_bytes", "gauge", "Device memory in use by a tenant.", ("tenant",)
)
TENANT_RUNS = Metric("heliograph_tenant_runs_in_flight", "gauge", "Runs of a tenant in flight.", ("tenant",))
TENANT_SECONDS = Metric(
    "heliograph_tenant_device_seconds", "counter", "Device time used by a tenant.", ("tenant",)
)
TENANT_REFUSED = Metric(
    "heliograph_tenant_refused", "counter", "Requests that a tenant's quota refused.", ("tenant",)
)
PLANS = Metric("heliograph_plans", "gauge", "Compiled plans of all sessions.")
TENSORS = Metric("heliograph_tensors", "gauge", "Tensors of all sessions.")
CONTENT = Metric(
    "heliograph_content_bytes", "gauge", "Weights of all sessions; shared ones count for each session."
)
STAGED = Metric("heliograph_staged_bytes", "gauge", "Bytes of transfers in the host's memory.")
COMMANDS = Metric("heliograph_commands_in_flight", "gauge", "Commands that have arrived and are not done.")
IN_FLIGHT = Metric("heliograph_runs_in_flight", "gauge", "Runs that have started and not ended.")
QUEUED = Metric("heliograph_runs_queued", "gauge", "Runs that wait for their turn.")
RUNS = Metric(
    "heliograph_runs",
    "counter",
    "Runs that have ended: ok, cancelled (also by a deadline) or failed.",
    ("tenant", "outcome"),
)
RUN_SECONDS = Metric(
    "heliograph_run_seconds",
    "histogram",
    "Time of runs by phase: waiting for their turn (queue) and their inputs (input), computing (compute), "
    "delivering their outputs (output). Time that cannot be attributed counts as computing.",
    ("phase",),
)
BYTES = Metric(
    "heliograph_bytes",
    "counter",
    "Bytes of tensors by direction and transport: messages of the command stream (inline), calls of their "
    "own (bulk), memory that both sides map (shared_memory), uploads of weights (content), other daemons "
    "(peer).",
    ("direction", "transport"),
)
RELAYED = Metric(
    "heliograph_relayed_bytes",
    "counter",
    "Bytes of forwarded contents, and of values between two daemons that cannot reach each other.",
    ("kind",),
)
COMMAND_ERRORS = Metric(
    "heliograph_command_errors", "counter", "Commands, runs among them, that failed.", ("reason",)
)
CALL_ERRORS = Metric("heliograph_call_errors", "counter", "Calls that were refused.", ("reason",))
CONTENTS = Metric(
    "heliograph_content_lookups",
    "counter",
    "Contents that clients requested: present (hit), or to be uploaded (miss).",
    ("outcome",),
)
MEMBERS = Metric("heliograph_members", "gauge", "Members of the pool, by state.", ("state",))
LOST_MEMBERS = Metric("heliograph_members_lost", "counter", "Losses of members that were ready.")
LINK_RELAYED = Metric(
    "heliograph_link_relayed_seconds",
    "gauge",
    "Time for which a member (reader) has not reached another one (source), so that values between them are "
    "relayed; absent where it reaches it.",
    ("reader", "source"),
)
SNAPSHOTS = Metric(
    "heliograph_snapshots",
    "counter",
    "Snapshots of durable sessions: written (ok), or not (failed).",
    ("outcome",),
)
SNAPSHOT_BYTES = Metric("heliograph_snapshot_bytes", "counter", "Bytes that snapshots have written.")
SNAPSHOT_SECONDS = Metric(
    "heliograph_snapshot_seconds",
    "counter",
    "Time of the snapshots that were written: with the session held still (still), and all of it (whole).",
    ("phase",),
)
SNAPSHOT_AGE = Metric(
    "heliograph_snapshot_age_seconds",
    "gauge",
    "Time since the last snapshot of the durable session whose last one is the oldest; 0 without one.",
)
RESTORED = Metric(
    "heliograph_sessions_restored",
    "counter",
    "Sessions that were kept when the daemon started: restored (ok), or broken (failed).",
    ("outcome",),
)
STATE_REACHABLE = Metric(
    "heliograph_state_reachable",
    "gauge",
    "0 while the place of the sessions' state does not answer, or another daemon has taken it over, else 1.",
)
STATE_LOSSES = Metric(
    "heliograph_state_losses",
    "counter",
    "How often the daemon that keeps the state was found to have lost it; whole snapshots follow.",
)
KEPT_BYTES = Metric(
    "heliograph_kept_state_bytes", "gauge", "Host memory that the state of other daemons takes here."
)
TENANT_KEPT = Metric(
    "heliograph_tenant_kept_state_bytes", "gauge", "The part of it of one tenant's daemons.", ("tenant",)
)
KEPT_SPARE = Metric(
    "heliograph_kept_state_spare_bytes", "gauge", "Host memory that waits for the next files of such states."
)
KEPT_LIMIT = Metric("heliograph_kept_state_limit_bytes", "gauge", "The most that it may take.")
KEPT_STATES = Metric(
    "heliograph_kept_states",
    "gauge",
    "States of other daemons in memory: with their owner (held), or waiting for it (waiting).",
    ("owner",),
)
KEPT_FORGOTTEN = Metric(
    "heliograph_kept_state_forgotten", "counter", "States whose owner did not come back in time."
)
KEPT_REFUSED = Metric(
    "heliograph_kept_state_refused", "counter", "Files of states for which there was no room."
)
RELOADS = Metric(
    "heliograph_reloads",
    "counter",
    "Reloads of changed files (configuration, tokens, certificates): applied (ok), or rejected (failed).",
    ("kind", "outcome"),
)
RELOAD_FAILING = Metric(
    "heliograph_reload_failing",
    "gauge",
    "1 while a changed file is unusable and its previous content stays in use, else 0.",
    ("kind",),
)
CERTIFICATE = Metric(
    "heliograph_certificate_expiry_timestamp_seconds",
    "gauge",
    "Expiry of the daemon's certificate, in seconds since 1970; absent without one.",
)
MODEL_REQUESTS = Metric(
    "heliograph_model_requests",
    "counter",
    "Requests of a served model that have ended since it was loaded: ok or failed.",
    ("model", "version", "outcome"),
)
MODEL_WAITING = Metric(
    "heliograph_model_requests_waiting",
    "gauge",
    "Requests of a served model that wait for their run.",
    ("model", "version"),
)
MODEL_SECONDS = Metric(
    "heliograph_model_seconds",
    "histogram",
    "Time of a served model by phase: whole requests (request), waiting for their run (queue), and runs: "
    "joining inputs (input), computing (compute), parting outputs (output).",
    ("model", "version", "phase"),
)
MODEL_ROWS = Metric(
    "heliograph_model_batch_rows", "histogram", "Rows of a served model's runs.", ("model", "version")
)
SCRAPES = Metric(
    "heliograph_scrapes", "counter", "Requests for metrics: answered (ok), or refused.", ("outcome",)
)

#: The most relayed links with a value each.
MOST_RELAYED = 1000

METRICS: tuple[Metric, ...] = (
    BUILD, SERVING, DRAINING, LAG, MEMORY, SILENT, SESSIONS, DETACHED, TENANT_MEMORY, TENANT_RUNS,
    TENANT_SECONDS, TENANT_REFUSED, PLANS, TENSORS, CONTENT, STAGED, COMMANDS, IN_FLIGHT, QUEUED, RUNS,
    RUN_SECONDS, BYTES, RELAYED, COMMAND_ERRORS, CALL_ERRORS, CONTENTS, MEMBERS, LOST_MEMBERS, LINK_RELAYED,
    SNAPSHOTS, SNAPSHOT_BYTES, SNAPSHOT_SECONDS, SNAPSHOT_AGE, RESTORED, STATE_REACHABLE,
    STATE_LOSSES, KEPT_BYTES, TENANT_KEPT, KEPT_SPARE, KEPT_LIMIT, KEPT_STATES, KEPT_FORGOTTEN,
    KEPT_REFUSED, RELOADS, RELOAD_FAILING,
    CERTIFICATE, MODEL_REQUESTS, MODEL_WAITING, MODEL_SECONDS, MODEL_ROWS, SCRAPES,
)  # fmt: skip


_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


def family(metric: Metric) -> Family:
    """An empty family of a metric."""
    made: Family = _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
    return made


def gauge(metric: Metric, values: Mapping[tuple[str, ...], float]) -> Family:
    """A family of gauges or counters, by the values of their labels."""
    made = family(metric)
    assert isinstance(made, GaugeMetricFamily | CounterMetricFamily)
    for labels, value in values.items():
        made.add_metric(labels, value)
    return made


def single(metric: Metric, value: float) -> Family:
    """A gauge or counter without labels."""
    return gauge(metric, {(): value})


class DaemonCollector(Collector):
    """The metrics of a daemon. One `collect` at a time."""

    def __init__(self, facts: DaemonFacts, runs: RunCounter) -> None:
        self._facts, self._runs = facts, runs
        self._memory: MemoryWatch | None = None

    def __repr__(self) -> str:
        return f"<DaemonCollector of {self._facts.host()}>"

    def describe(self) -> Iterable[Family]:
        """The families without values."""
        return map(family, METRICS)

    def collect(self) -> Iterator[Family]:
        """Collect all values. Blocks for at most `device_memory.ANSWER_SECONDS`."""
        host, facts = self._facts.host(), self._facts
        serving = host is not None and not host.is_draining
        yield gauge(BUILD, {(__version__, platform.python_version()): 1})
        yield single(SERVING, serving)
        yield single(DRAINING, host is not None and host.is_draining)
        yield single(LAG, facts.lag_seconds())
        yield gauge(CALL_ERRORS, by_reason(facts.refused()))
        yield gauge(RELOADS, {(*labels,): count for labels, count in facts.reloads().items()})
        yield gauge(RELOAD_FAILING, by_label(facts.failing()))
        yield gauge(SCRAPES, by_label(facts.scrapes))
        if (expiry := facts.certificate_expiry()) is not None:
            yield single(CERTIFICATE, expiry)
        yield from self._of_runs()
        yield from _of_models(tuple(facts.models()))
        yield from _of_kept(facts.kept())
        if host is not None:
            yield from self._of_memory(host)
            yield from _of_sessions(host, host.statistics())
            yield from self._of_counts(host, host.counts())
            yield from _of_pool(host)
            yield from _of_snapshots(host)

    def _of_runs(self) -> Iterator[Family]:
        totals = self._runs.totals()
        yield gauge(RUNS, {(*labels,): count for labels, count in totals.runs.items()})
        seconds = family(RUN_SECONDS)
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
        yield gauge(MEMORY, values)
        yield gauge(SILENT, {(name,): name in silent for name in {*found, *silent}})

    def _of_counts(self, host: Host, counts: SessionCounts) -> Iterator[Family]:
        yield single(IN_FLIGHT, counts.runs_running)
        yield single(QUEUED, counts.runs_waiting)
        yield gauge(COMMAND_ERRORS, by_reason(counts.failures))
        totals, peers = self._runs.totals(), host.exchange.traffic
        carried: dict[tuple[str, ...], float] = {(*key,): size for key, size in counts.by_transport.items()}
        for direction, more in (("received", totals.received_bytes), ("sent", totals.sent_bytes)):
            carried[direction, "inline"] = carried.get((direction, "inline"), 0) + more
        carried["received", "content"] = counts.traffic.content_bytes
        carried["received", "peer"], carried["sent", "peer"] = peers.received_bytes, peers.sent_bytes
        yield gauge(BYTES, carried)
        yield gauge(
            RELAYED, by_label({"content": counts.traffic.relayed_bytes, "value": peers.relayed_bytes})
        )
        yield gauge(CONTENTS, by_label({"hit": host.store.hits, "miss": host.store.misses}))

    def close(self) -> None:
        """End without waiting for pending queries."""
        if self._memory is not None:
            self._memory.close()


def _of_models(models: Sequence[ModelFigures]) -> Iterator[Family]:
    seconds, rows = family(MODEL_SECONDS), family(MODEL_ROWS)
    assert isinstance(seconds, HistogramMetricFamily) and isinstance(rows, HistogramMetricFamily)
    requests: dict[tuple[str, ...], float] = {}
    for one in models:
        requests.update({(one.model, one.version, how): count for how, count in one.requests.items()})
        for phase, (buckets, total) in one.seconds.items():
            seconds.add_metric((one.model, one.version, phase), buckets, total)
        rows.add_metric((one.model, one.version), *one.rows)
    yield gauge(MODEL_REQUESTS, requests)
    yield gauge(MODEL_WAITING, {(one.model, one.version): one.waiting for one in models})
    yield seconds
    yield rows


def _of_sessions(host: Host, held: HostStatistics) -> Iterator[Family]:
    tenants = host.tenants() or (TenantUsage(""),)
    yield gauge(SESSIONS, {(one.tenant,): one.sessions for one in tenants})
    detached = Counter(one.principal.tenant for one in host.sessions if one.is_detached)
    yield gauge(DETACHED, {(one.tenant,): detached[one.tenant] for one in tenants})
    yield gauge(TENANT_MEMORY, {(one.tenant,): one.device_memory_bytes for one in tenants})
    yield gauge(TENANT_RUNS, {(one.tenant,): one.runs_in_flight for one in tenants})
    yield gauge(TENANT_SECONDS, {(one.tenant,): one.device_seconds for one in tenants})
    yield gauge(TENANT_REFUSED, {(one.tenant,): one.refused for one in tenants})
    yield single(PLANS, held.plans)
    yield single(TENSORS, held.tensors)
    yield single(CONTENT, held.content_bytes)
    yield single(STAGED, held.staged_bytes)
    yield single(COMMANDS, held.commands_in_flight)


def _of_pool(host: Host) -> Iterator[Family]:
    states = Counter(one.state for one in host.members)
    yield gauge(MEMBERS, {(state.name.lower(),): states[state] for state in MemberState})
    yield single(LOST_MEMBERS, host.lost_members)
    yield gauge(LINK_RELAYED, {(one.a, one.b): one.seconds for one in host.relayed[:MOST_RELAYED]})


def _of_snapshots(host: Host) -> Iterator[Family]:
    found = SnapshotFigures() if host.snapshots is None else host.snapshots.figures()
    counts = found.counts
    yield gauge(SNAPSHOTS, by_label({"ok": counts.taken, "failed": counts.failed}))
    yield single(SNAPSHOT_BYTES, found.written_bytes)
    yield gauge(SNAPSHOT_SECONDS, {("still",): counts.still_seconds, ("whole",): counts.seconds})
    yield single(SNAPSHOT_AGE, found.oldest_seconds)
    yield gauge(RESTORED, by_label({"ok": counts.restored, "failed": counts.broken}))
    yield single(STATE_REACHABLE, found.is_reachable)
    yield single(STATE_LOSSES, found.losses)


def _of_kept(found: KeeperFigures) -> Iterator[Family]:
    yield single(KEPT_BYTES, found.used_bytes)
    yield gauge(TENANT_KEPT, by_label(found.by_tenant))
    yield single(KEPT_SPARE, found.spare_bytes)
    yield single(KEPT_LIMIT, found.limit_bytes)
    yield gauge(KEPT_STATES, by_label({"held": found.held, "waiting": found.waiting}))
    yield single(KEPT_FORGOTTEN, found.forgotten)
    yield single(KEPT_REFUSED, found.refused)


def by_label(values: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    """Values by one label."""
    return {(name,): float(value) for name, value in values.items()}


def by_reason(values: Mapping[int, int]) -> dict[tuple[str, ...], float]:
    """Values by the names of error reasons."""
    return {(reason_name(reason),): float(value) for reason, value in dict(values).items()}


def reason_name(reason: int) -> str:
    """The name of an error's reason, such as "out_of_memory"."""
    return Reason.Name(Reason.ValueType(reason)).removeprefix("REASON_").lower()


class Exposition:
    """The text of a registry with the metrics of the daemon and its process."""

    def __init__(self, facts: DaemonFacts, runs: RunCounter) -> None:
        self._collector = DaemonCollector(facts, runs)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)

    def __repr__(self) -> str:
        return f"<Exposition by {self._collector}>"

    def text(self, accept: str) -> tuple[str, bytes]:
        """Return the content type for an Accept header, and the text. Blocks for a moment."""
        encode, kind = choose_encoder(accept)
        return kind, encode(self._registry)

    def close(self) -> None:
        """End without waiting for pending queries."""
        self._collector.close()
