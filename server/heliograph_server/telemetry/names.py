"""Every metric of a daemon: its name, kind, labels and meaning. What is not in this table is not exported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. Counters are named without the `_total` that Prometheus shows."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """Its name as Prometheus has it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


BUILD = Metric("heliograph_build_info", "gauge", "Always 1; the labels say what runs.", ("version", "python"))
SERVING = Metric("heliograph_serving", "gauge", "1 while new sessions are taken, else 0.")
DRAINING = Metric("heliograph_draining", "gauge", "1 while the daemon only lets running work end, else 0.")
LAG = Metric(
    "heliograph_event_loop_lag_seconds",
    "gauge",
    "By how much the event loop was late at most, in the last half minute.",
)
MEMORY = Metric(
    "heliograph_device_memory_bytes",
    "gauge",
    "Memory of a device that Heliograph may use, which is free or used.",
    ("device", "state"),
)
SILENT = Metric(
    "heliograph_device_silent",
    "gauge",
    "1 where a device did not say in time how much memory it has; then what it said last is shown.",
    ("device",),
)
SESSIONS = Metric("heliograph_sessions", "gauge", "Open sessions, by tenant.", ("tenant",))
TENANT_MEMORY = Metric(
    "heliograph_tenant_device_memory_bytes", "gauge", "Memory of devices that a tenant has.", ("tenant",)
)
TENANT_RUNS = Metric("heliograph_tenant_runs_in_flight", "gauge", "Runs of a tenant under way.", ("tenant",))
TENANT_SECONDS = Metric(
    "heliograph_tenant_device_seconds", "counter", "For how long a tenant had devices.", ("tenant",)
)
TENANT_REFUSED = Metric(
    "heliograph_tenant_refused", "counter", "What a tenant's quota had no room for.", ("tenant",)
)
PLANS = Metric("heliograph_plans", "gauge", "Compiled plans that sessions hold.")
TENSORS = Metric("heliograph_tensors", "gauge", "Tensors that sessions hold.")
CONTENT = Metric(
    "heliograph_content_bytes", "gauge", "Weights that sessions hold; shared ones count for each."
)
STAGED = Metric("heliograph_staged_bytes", "gauge", "Transfers that wait in the host's memory.")
COMMANDS = Metric("heliograph_commands_in_flight", "gauge", "Commands that came and are not done.")
IN_FLIGHT = Metric("heliograph_runs_in_flight", "gauge", "Runs whose turn has come and that have not ended.")
QUEUED = Metric("heliograph_runs_queued", "gauge", "Runs that wait for their turn.")
RUNS = Metric(
    "heliograph_runs",
    "counter",
    "Runs that ended: ok, cancelled (also for want of time) or failed.",
    ("tenant", "outcome"),
)
RUN_SECONDS = Metric(
    "heliograph_run_seconds",
    "histogram",
    "How long runs waited for their turn (queue), for their inputs (input), computed (compute), and took to "
    "hand out what they made (output). What is not told apart counts as computing.",
    ("phase",),
)
BYTES = Metric(
    "heliograph_bytes",
    "counter",
    "Bytes of tensors by direction, and by what carried them: messages of the command stream (inline), calls "
    "of their own (bulk), memory that both map (shared_memory), uploads of weights (content), other daemons "
    "(peer).",
    ("direction", "road"),
)
RELAYED = Metric(
    "heliograph_relayed_bytes",
    "counter",
    "Of contents that were passed on, and of values between two daemons that cannot reach each other.",
    ("kind",),
)
COMMAND_ERRORS = Metric(
    "heliograph_command_errors", "counter", "Commands, runs among them, that failed.", ("reason",)
)
CALL_ERRORS = Metric("heliograph_call_errors", "counter", "Calls that were refused.", ("reason",))
CONTENTS = Metric(
    "heliograph_content_lookups",
    "counter",
    "Contents that clients asked for: here already (hit), or to be uploaded (miss).",
    ("outcome",),
)
MEMBERS = Metric("heliograph_members", "gauge", "Members of the pool, by state.", ("state",))
LOST_MEMBERS = Metric("heliograph_members_lost", "counter", "How often a member that was ready was lost.")
RELOADS = Metric(
    "heliograph_reloads",
    "counter",
    "How often the configuration was to be read again: it was (ok), or the old one stayed (failed).",
    ("outcome",),
)
CERTIFICATE = Metric(
    "heliograph_certificate_expiry_timestamp_seconds",
    "gauge",
    "When the certificate that the daemon shows ends, as seconds since 1970; absent without one.",
)
SCRAPES = Metric(
    "heliograph_scrapes", "counter", "Requests for metrics: answered (ok), or refused.", ("outcome",)
)

METRICS: tuple[Metric, ...] = (
    BUILD, SERVING, DRAINING, LAG, MEMORY, SILENT, SESSIONS, TENANT_MEMORY, TENANT_RUNS, TENANT_SECONDS,
    TENANT_REFUSED, PLANS, TENSORS, CONTENT, STAGED, COMMANDS, IN_FLIGHT, QUEUED, RUNS, RUN_SECONDS, BYTES,
    RELAYED, COMMAND_ERRORS, CALL_ERRORS, CONTENTS, MEMBERS, LOST_MEMBERS, RELOADS, CERTIFICATE, SCRAPES,
)  # fmt: skip
