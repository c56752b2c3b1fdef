"""A collector of traces: OTLP over gRPC, on loopback, in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry.sdk.trace", reason="needs OpenTelemetry: pip install heliograph[otel]")

from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

#: How long something expected may take to come.
SECONDS = 20.0


@dataclass(frozen=True)
class Received:
    """A span as it came."""

    name: str
    trace: str
    span: str
    parent: str
    begin_ns: int
    end_ns: int
    #: Of the span, and of who sent it.
    attributes: dict[str, Any]
    resource: dict[str, Any]
    #: Empty: it went well.
    error: str = ""

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What daemons and clients exported. While it `hangs` it answers nothing."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[Received] = []
        self._goes_on = threading.Event()
        self._goes_on.set()
        self.calls = 0
        self.url = ""

    def Export(self, request: Any, context: Any) -> Any:
        with self._changed:
            self.calls += 1
            self._changed.notify_all()
        if not self._goes_on.wait(SECONDS):
            context.abort(grpc.StatusCode.UNAVAILABLE, "it hung")
        with self._changed:
            self._spans.extend(_spans_of(request))
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def hang(self) -> None:
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    @property
    def spans(self) -> list[Received]:
        with self._changed:
            return list(self._spans)

    def of_trace(self, trace: str) -> list[Received]:
        return [one for one in self.spans if one.trace == trace]

    def wait_for(self, found: Any) -> None:
        """Until this is true of the spans. Fails when it is not for long."""
        with self._changed:
            assert self._changed.wait_for(lambda: found(self._spans), SECONDS), self._spans

    def wait_for_call(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.calls, SECONDS)


@contextmanager
def collector() -> Iterator[Collector]:
    """One that listens, until then."""
    made = Collector()
    threads = ThreadPoolExecutor(4, "collector")
    server = grpc.server(threads, options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)
    made.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield made
    finally:
        made.go_on()
        server.stop(None).wait(SECONDS)
        threads.shutdown()


def _spans_of(request: Any) -> Iterator[Received]:
    for group in request.resource_spans:
        resource = _plain(group.resource.attributes)
        for scope in group.scope_spans:
            for one in scope.spans:
                yield Received(
                    one.name,
                    one.trace_id.hex(),
                    one.span_id.hex(),
                    one.parent_span_id.hex(),
                    one.start_time_unix_nano,
                    one.end_time_unix_nano,
                    _plain(one.attributes),
                    resource,
                    one.status.message if one.status.code == 2 else "",
                )


def _plain(pairs: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


class Tracer:
    """What a caller has who traces: spans of their own, and what this process' library made below them."""

    def __init__(self) -> None:
        self._made = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._made))
        trace.set_tracer_provider(provider)
        assert trace.get_tracer_provider() is provider, "another test has made one"

    @contextmanager
    def request(self) -> Iterator[str]:
        """A span of the caller's; gives the number of its trace."""
        with trace.get_tracer("caller").start_as_current_span("request") as span:
            yield f"{span.get_span_context().trace_id:032x}"

    @contextmanager
    def unsampled(self) -> Iterator[str]:
        """As `request`, of a caller who has it not sampled."""
        context = trace.SpanContext(2**100, 2**50, is_remote=True, trace_flags=trace.TraceFlags(0))
        with trace.use_span(trace.NonRecordingSpan(context)):
            yield f"{context.trace_id:032x}"

    def made(self, trace: str) -> list[Received]:
        """The spans of this process that have ended, of a trace."""
        return [one for one in map(_received, self._made.get_finished_spans()) if one.trace == trace]


@pytest.fixture(scope="session")
def tracer() -> Tracer:
    return the_tracer()


@cache
def the_tracer() -> Tracer:
    """A process has one."""
    return Tracer()


def _received(span: ReadableSpan) -> Received:
    assert span.context is not None and span.start_time is not None and span.end_time is not None
    return Received(
        span.name,
        f"{span.context.trace_id:032x}",
        f"{span.context.span_id:016x}",
        f"{span.parent.span_id:016x}" if span.parent else "",
        span.start_time,
        span.end_time,
        dict(span.attributes or {}),
        {},
        span.status.description or "",
    )
