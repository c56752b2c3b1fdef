"""Records of runs and calls as OTLP spans, written directly: a run is a span with a few children.

    heliograph.run            session, devices, tenant, error
    ├── queue                 until its turn
    ├── input                 until its inputs are ready
    ├── compute               until the devices have computed
    │   ├── exchange | move   until a split has its inputs, from other daemons or other devices
    │   └── split             on a device
    └── output                until its outputs are delivered

A phase without duration has no span.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from heliograph_proto import __version__
from heliograph_proto.errors import HeliographError
from heliograph_proto.trace_context import error_type, trace_of
from heliograph_server.session.run_timeline import RunRecord, span_of_run

_SERVER, _INTERNAL, _ERROR = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_INTERNAL, Status.STATUS_CODE_ERROR
#: Flags: sampled, with a parent in another process or in this one.
_FLAGS_OF_SERVER, _FLAGS = 0x301, 0x101
#: The most sessions and devices whose common attributes are cached.
MOST_KNOWN = 256
#: The number of records after which other threads get a turn.
SLICE = 8
#: The longest text of an error.
MOST_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class CallRecord:
    """An answered call. Times are those of `time.monotonic()`, in seconds."""

    name: str
    #: The id of its span, in hexadecimal digits.
    span: str
    #: The traceparent of its caller.
    trace_parent: str
    session: int
    began: float
    ended: float
    #: The error of a refused call.
    error: BaseException | None = None


class Clock:
    """Converts times of `time.monotonic()` to the time of day."""

    def __init__(self) -> None:
        self._offset_ns = 0
        self.look()

    def look(self) -> None:
        """Update the offset, as the time of day may have been set."""
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def ns(self, seconds: float) -> int:
        """Nanoseconds since 1970."""
        return round(seconds * 1e9) + self._offset_ns


class SpanWriter:
    """Makes export requests of records. For one thread at a time."""

    def __init__(self, life: bytes, resource: Mapping[str, object], clock: Clock) -> None:
        self._life = life
        self._clock = clock
        self._resource = Resource(attributes=[_pair(key, value) for key, value in resource.items()])
        self._scope = InstrumentationScope(name="heliograph", version=__version__)
        #: The common attributes of runs of a session on the same devices; making them is much of a
        #: span's cost.
        self._common: dict[tuple[object, ...], list[KeyValue]] = {}

    def request(self, records: Sequence[RunRecord | CallRecord]) -> ExportTraceServiceRequest:
        """A request with the spans of all records."""
        self._clock.look()
        spans: list[Span] = []
        for number, one in enumerate(records):
            if not number % SLICE:
                # Threads that answer clients must not wait for the whole batch.
                time.sleep(0)
            if isinstance(one, RunRecord):
                spans.extend(self._of_run(one))
            else:
                spans.append(self._of_call(one))
        found = ScopeSpans(scope=self._scope, spans=spans)
        return ExportTraceServiceRequest(
            resource_spans=[ResourceSpans(resource=self._resource, scope_spans=[found])]
        )

    def _of_call(self, call: CallRecord) -> Span:
        trace, parent = map(bytes.fromhex, trace_of(call.trace_parent))
        return Span(
            trace_id=trace,
            span_id=bytes.fromhex(call.span),
            parent_span_id=parent,
            name=call.name,
            kind=_SERVER,
            flags=_FLAGS_OF_SERVER,
            start_time_unix_nano=self._clock.ns(call.began),
            end_time_unix_nano=self._clock.ns(call.ended),
            attributes=[_pair("heliograph.session", call.session), *_error_pairs(call.error)],
            status=_status(call.error),
        )

    def _of_run(self, run: RunRecord) -> Iterator[Span]:
        trace, parent = map(bytes.fromhex, trace_of(run.trace_parent))
        own = bytes.fromhex(span_of_run(self._life, run.session, run.sequence))
        times = [
            self._clock.ns(one) for one in (run.came, run.began, run.had_inputs, run.computed, run.ended)
        ]
        yield Span(
            trace_id=trace,
            span_id=own,
            parent_span_id=parent,
            name="heliograph.run",
            kind=_SERVER,
            flags=_FLAGS_OF_SERVER,
            start_time_unix_nano=times[0],
            end_time_unix_nano=times[-1],
            attributes=self._pairs_of(run),
            status=_status(run.error),
        )
        below = _Below(trace, own)
        for place, name in enumerate(("queue", "input", "compute", "output")):
            if times[place] == times[place + 1]:
                continue
            span = below.span(own, name, times[place], times[place + 1])
            yield span
            if name == "compute" and run.splits:
                yield from self._of_splits(run, span.span_id, below)

    def _pairs_of(self, run: RunRecord) -> list[KeyValue]:
        key = run.session, run.devices, run.principal.tenant
        common = self._common.get(key)
        if common is None:
            if len(self._common) >= MOST_KNOWN:
                self._common.clear()
            common = self._common[key] = _common_pairs(*key)
        pairs = [*common, _pair("heliograph.sequence", run.sequence)]
        if run.exchange_run:
            pairs.append(_pair("heliograph.exchange_run", run.exchange_run))
        return pairs if run.error is None else [*pairs, *_error_pairs(run.error)]

    def _of_splits(self, run: RunRecord, parent: bytes, below: _Below) -> Iterator[Span]:
        waiting = "exchange" if run.exchange_run else "move"
        for one in run.splits:
            start = self._clock.ns(one.began)
            computing = self._clock.ns(one.computing)
            if computing > start:
                yield below.span(parent, waiting, start, computing, one.device)
            yield below.span(parent, "split", computing, self._clock.ns(one.ended), one.device)


class _Below:
    """Makes spans below that of a run, in the same process."""

    def __init__(self, trace: bytes, run: bytes) -> None:
        self._trace = trace
        self._run = int.from_bytes(run)
        self._numbers = count(1)

    def span(self, parent: bytes, name: str, start: int, end: int, device: str = "") -> Span:
        # Differs from the run's id, and is not 0; a collision with others is as unlikely as for
        # random ids.
        number = (self._run + next(self._numbers)) % 2**64 or 2**63
        return Span(
            trace_id=self._trace,
            span_id=number.to_bytes(8),
            parent_span_id=parent,
            name=name,
            kind=_INTERNAL,
            flags=_FLAGS,
            start_time_unix_nano=start,
            end_time_unix_nano=end,
            attributes=[_pair("heliograph.device", device)] if device else None,
        )


def _common_pairs(session: int, devices: tuple[str, ...], tenant: str) -> list[KeyValue]:
    pairs = [_pair("heliograph.session", session), _pair("heliograph.devices", devices)]
    return [*pairs, _pair("heliograph.tenant", tenant)] if tenant else pairs


def _error_pairs(error: BaseException | None) -> list[KeyValue]:
    return [] if error is None else [_pair("error.type", error_type(error))]


def _status(error: BaseException | None) -> Status | None:
    if error is None:
        return None
    text = error.message if isinstance(error, HeliographError) else type(error).__name__
    return Status(code=_ERROR, message=text[:MOST_CHARACTERS])


def _pair(key: str, value: object) -> KeyValue:
    return KeyValue(key=key, value=_value(value))


def _value(value: object) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case tuple() | list():
            return AnyValue(array_value=ArrayValue(values=[_value(one) for one in value]))
    return AnyValue(string_value=str(value))
