"""Traces: what a caller's span becomes in the client and in the daemon, and that nobody else pays for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from collectors import Collector, Received, Tracer, collector, tracer
from daemon_threads import ThreadDaemon, thread_daemon

import heliograph as hg
from heliograph.core import tracing
from heliograph_proto import commands as c
from heliograph_proto.codec import decode_command
from heliograph_proto.errors import CancelledError, ConfigurationError, OutOfRangeError
from heliograph_proto.trace_context import parent_of, sampled, trace_in
from heliograph_proto.v1 import command_pb2
from heliograph_server.config.config import ServerConfig
from heliograph_server.resources.principals import Principal
from heliograph_server.session.run_timeline import RunRecord, span_of_run
from heliograph_server.telemetry.traces import Traces
from heliograph_server.telemetry.tracing import QUEUE, TraceExporter

__all__ = ["tracer"]

X = np.ones(16, np.float32)
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = parent_of(TRACE, SPAN)
#: What others may send in place of a traceparent.
MALFORMED = (
    "garbage",
    "x" * 10_000,
    parent_of("0" * 32, SPAN),
    parent_of(TRACE, "0" * 16),
    "ff" + PARENT[2:],
    PARENT.upper(),
    PARENT + "\n",
    PARENT[:-1] + "0",
    "",
)
PHASES = ("queue", "input", "compute", "output")


@pytest.fixture
def gathering() -> Iterator[Collector]:
    with collector() as made:
        yield made


@pytest.fixture
def daemon(gathering: Collector) -> Iterator[ThreadDaemon]:
    """One that exports its traces, when it ends at the latest."""
    with thread_daemon(traces=gathering.url) as made:
        yield made


def one_op() -> hg.Graph:
    g = hg.Graph()
    g.output("y", g.input("x", X.shape, "f32") + 1.0)
    return g


def choosing() -> hg.Graph:
    """It fails where the index is outside."""
    g = hg.Graph()
    table = g.input("table", (4, 4), "f32")
    g.output("y", hg.take(table, g.input("index", (1,), "i32"), axis=0))
    return g


def named(spans: list[Received], name: str) -> list[Received]:
    return [one for one in spans if one.name == name]


def run_in(daemon: ThreadDaemon, tracer: Tracer, times: int = 1) -> str:
    """Runs of a plan, traced; the number of their trace."""
    with hg.connect(daemon.url) as session:
        plan = session.compile(one_op())
        with tracer.request() as number:
            for _ in range(times):
                plan.run(x=X)
    return number


def test_a_run_of_the_daemon_is_below_that_of_the_client_which_is_below_the_callers(
    gathering: Collector, daemon: ThreadDaemon, tracer: Tracer
) -> None:
    with tracer.request() as number, hg.connect(daemon.url) as session:
        plan = session.compile(one_op())
        plan.run(x=X)
        tensor = session.put(X)
        plan.run(x=tensor, fetch=False)
        tensor.get()
    daemon.stop()
    here, there = tracer.made(number), gathering.of_trace(number)
    (caller,) = named(here, "request")
    names = [one.name for one in here if one.parent == caller.span]
    assert names == [f"heliograph.{one}" for one in ("connect", "compile", "run", "set", "run", "get")]
    for name in ("heliograph.run", "heliograph.compile"):
        mine = named(here, name)
        assert {one.parent for one in named(there, name)} == {one.span for one in mine}
        assert len(named(there, name)) == len(mine)


def test_phases_are_below_their_run_and_add_up_to_it(
    gathering: Collector, daemon: ThreadDaemon, tracer: Tracer
) -> None:
    number = run_in(daemon, tracer, 3)
    daemon.stop()
    spans = gathering.of_trace(number)
    runs = named(spans, "heliograph.run")
    assert len(runs) == 3
    for run in runs:
        phases = sorted((one for one in spans if one.parent == run.span), key=lambda one: one.begin_ns)
        assert [one.name for one in phases] == [one for one in PHASES if named(phases, one)]
        assert named(phases, "compute")
        assert phases[0].begin_ns == run.begin_ns and phases[-1].end_ns == run.end_ns
        assert all(a.end_ns == b.begin_ns for a, b in zip(phases, phases[1:], strict=False))


def test_a_run_says_of_which_session_on_which_devices_and_by_which_daemon(
    gathering: Collector, daemon: ThreadDaemon, tracer: Tracer
) -> None:
    number = run_in(daemon, tracer)
    daemon.stop()
    (run,) = named(gathering.of_trace(number), "heliograph.run")
    assert run.attributes["heliograph.session"] == 1
    assert run.attributes["heliograph.devices"] == [daemon.device.name]
    assert run.service == "heliograph" and run.resource["service.version"] == hg.__version__
    assert run.resource["service.instance.id"].startswith(daemon.url)
    assert not run.error and "error.type" not in run.attributes


def test_what_fails_is_an_error_on_both_sides(
    gathering: Collector, daemon: ThreadDaemon, tracer: Tracer
) -> None:
    table = np.zeros((4, 4), np.float32)
    with hg.connect(daemon.url) as session:
        plan = session.compile(choosing())
        with tracer.request() as number, pytest.raises(OutOfRangeError):
            plan.run(table=table, index=np.array([7], np.int32))
    daemon.stop()
    (there,) = named(gathering.of_trace(number), "heliograph.run")
    (here,) = named(tracer.made(number), "heliograph.run")
    assert there.attributes["error.type"] == here.attributes["error.type"] == "out_of_range"
    assert "7" in there.error and "OutOfRangeError" in here.error


def test_asyncio_and_submitted_runs_and_loops_are_traced_as_well(
    gathering: Collector, daemon: ThreadDaemon, tracer: Tracer
) -> None:
    async def work() -> str:
        async with await hg.aio.connect(daemon.url) as session:
            with tracer.request() as number:
                plan = await session.compile(one_op())
                await asyncio.gather(*(plan.run(x=X) for _ in range(3)))
                await plan.submit(x=X, fetch=False).result()
                await plan.loop(x=X, steps=5, carry={"y": "x"}).result()
        return number

    number = asyncio.run(work())
    daemon.stop()
    here, there = tracer.made(number), gathering.of_trace(number)
    mine = {one.span for one in here if one.name in ("heliograph.run", "heliograph.loop")}
    assert len(mine) == 5 and len(named(here, "heliograph.loop")) == 1
    assert {one.parent for one in named(there, "heliograph.run")} == mine


def test_what_is_not_sampled_sends_nothing(
    gathering: Collector, daemon: ThreadDaemon, tracer: Tracer
) -> None:
    with tracer.unsampled() as number, hg.connect(daemon.url) as session:
        plan = session.compile(one_op())
        plan.run(x=X)
        session.put(X).get()
        assert tracing.begin("heliograph.run") is None and tracing.call_metadata() == ()
    daemon.stop()
    assert not tracer.made(number) and not gathering.spans


def test_no_span_is_made_without_one_of_the_caller(gathering: Collector, daemon: ThreadDaemon) -> None:
    with hg.connect(daemon.url) as session:
        session.compile(one_op()).run(x=X)
    daemon.stop()
    assert not gathering.spans


def test_the_library_imports_no_opentelemetry() -> None:
    program = """
import sys, numpy, heliograph as hg
from heliograph_server.daemon.daemon import Daemon
from heliograph_server.config.config import ServerConfig
Daemon(ServerConfig())
with hg.connect("local:") as session:
    g = hg.Graph()
    g.output("y", g.input("x", (4,), "f32") + 1.0)
    session.compile(g).run(x=numpy.ones(4, numpy.float32))
assert not any(name.startswith("opentelemetry") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


# What others send


@pytest.mark.parametrize("trace", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_no_traceparent_is_as_none(trace: str) -> None:
    assert sampled(trace) == "" and trace_in([("traceparent", trace)]) == ""
    message = command_pb2.Command(sequence=1)
    message.run.plan, message.run.trace_parent = 1, trace
    kind = decode_command(message).kind
    assert isinstance(kind, c.RunCommand) and kind.trace_parent == ""


def test_a_traceparent_is_read_from_metadata() -> None:
    assert sampled(PARENT) == PARENT
    assert trace_in([("user-agent", "x"), ("traceparent-bin", b"x"), ("traceparent", PARENT)]) == PARENT


@pytest.mark.parametrize("trace", ["garbage", "x" * 4_000, *MALFORMED[2:5]], ids=range(5))
def test_a_daemon_answers_calls_and_runs_with_malformed_traceparents(
    trace: str, daemon: ThreadDaemon, gathering: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heliograph.transport.blocking_grpc.call_metadata", lambda: (("traceparent", trace),))
    inline = f"{trace:.55}".ljust(55)
    monkeypatch.setattr("heliograph._base.plan.begin", lambda _name: tracing.CallSpan(None, inline))
    monkeypatch.setattr("heliograph.procedures.run.begin", lambda _name: tracing.CallSpan(None, trace * 3))
    with hg.connect(daemon.url) as session:
        plan = session.compile(one_op())
        assert (plan.run(x=X, timeout=10)["y"] == 2).all()
        assert (plan.run(x=session.put(X), timeout=10)["y"] == 2).all()
    daemon.stop()
    assert not gathering.spans


# Collectors that do not take what they are sent


def record(sequence: int = 1) -> RunRecord:
    return RunRecord(3, sequence, ("cpu0",), 1.0, 2.0, 3.0, 4.0, 5.0, Principal("blue"), trace_parent=PARENT)


def test_a_run_on_behalf_of_a_tenant_has_its_name(gathering: Collector) -> None:
    exporter = TraceExporter(gathering.url, b"life", "here")
    exporter.run_ended(record())
    exporter.close()
    (run,) = named(gathering.spans, "heliograph.run")
    assert run.attributes["heliograph.tenant"] == "blue"
    assert (run.trace, run.parent, run.span) == (TRACE, SPAN, span_of_run(b"life", 3, 1))
    assert exporter.counts.exported == 1


def test_a_collector_that_hangs_holds_nobody_up_and_what_has_no_room_is_counted(
    gathering: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heliograph_server.telemetry.tracing.FLUSH_SECONDS", 0.2)
    gathering.hang()
    exporter = TraceExporter(gathering.url, b"life", "here")
    for sequence in range(2 * QUEUE):
        exporter.run_ended(record(sequence))
    gathering.wait_for_call()
    assert exporter.counts.dropped >= QUEUE - 512
    closing = threading.Thread(target=exporter.close)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert exporter.counts.exported == 0
    assert exporter.counts.failed + exporter.counts.dropped == 2 * QUEUE


def test_a_daemon_whose_collector_is_gone_serves_and_ends(tracer: Tracer) -> None:
    with collector() as gone:
        url = gone.url
    with thread_daemon(traces=url) as daemon:
        run_in(daemon, tracer, 20)
        exporter = daemon.host.tracing
        assert isinstance(exporter, TraceExporter)
    assert exporter.counts.failed == 21 - 1 and exporter.counts.exported == 0


@pytest.mark.parametrize(
    "endpoint", ["collector:4317", "grpc://a:4317", "http://:4317", "http://a", "http://a:x"]
)
def test_an_endpoint_that_is_none_is_refused_before_anything_starts(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="traces") as caught:
        Traces(ServerConfig(traces=endpoint).traces)
    assert "4317" in caught.value.advice


def test_a_call_that_is_broken_off_is_an_error(gathering: Collector) -> None:
    exporter = TraceExporter(gathering.url, b"life", "here")
    with pytest.raises(CancelledError), exporter.call("heliograph.compile", PARENT, 3) as own:
        assert own.startswith(f"00-{TRACE}-") and own != PARENT
        raise CancelledError("enough")
    exporter.close()
    (call,) = gathering.spans
    assert (call.error, call.attributes["error.type"]) == ("enough", "cancelled")
