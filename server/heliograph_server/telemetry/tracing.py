"""Traces: the spans of runs and calls that a client traces, to a collector of OpenTelemetry.

    run_ended(record) ─▸ queue of the SDK's batch processor ─▸ its thread: records become spans ─▸ OTLP, gRPC

Whoever ends a run puts its record into the queue, and nothing else. The queue is bounded, and what has no
room is counted and dropped; so is what a collector does not take. The end waits for a collector so long and
no longer.

Imports OpenTelemetry's SDK, the extra `otel`: not to be imported before a configuration asks for it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from heliograph_proto import __version__
from heliograph_proto.trace_context import below, sampled
from heliograph_server.session.run_timeline import RunRecord
from heliograph_server.telemetry.spans import CallRecord, Clock, SpanWriter

logger = logging.getLogger(__name__)

#: Records that wait to be exported at most, and how many go at once.
QUEUE, BATCH = 4096, 512
#: How long a record waits for others, in milliseconds.
DELAY_MS = 500
#: How long a collector may take for a batch, in seconds.
EXPORT_SECONDS = 5
#: How long the end waits for it at most, in seconds.
FLUSH_SECONDS = 2.0

#: All that the processor looks at: whether it is sampled.
_SAMPLED = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


class _Recorded(ReadableSpan):
    """What the processor takes for a span, and the exporter makes some of."""

    def __init__(self, record: RunRecord | CallRecord) -> None:
        self.record = record

    @property
    def context(self) -> SpanContext:
        return _SAMPLED


@dataclass(slots=True)
class TraceCounts:
    """What became of what was traced: runs and calls."""

    exported: int = 0
    #: There was no room.
    dropped: int = 0
    #: The collector did not take them.
    failed: int = 0


class _Exporter(OTLPSpanExporter):
    """Writes records as spans, which the SDK's own encoder takes ten times as long for."""

    def __init__(self, endpoint: str, writer: SpanWriter) -> None:
        super().__init__(endpoint, timeout=EXPORT_SECONDS)
        self._writer = writer

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        return self._writer.request([one.record for one in data if isinstance(one, _Recorded)])


class _Counting(SpanExporter):
    """Counts what comes out of the queue, and what becomes of it."""

    def __init__(self, inner: SpanExporter, counts: TraceCounts) -> None:
        self._inner = inner
        self._counts = counts
        self._is_over = False
        #: How many came out of the queue.
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        found = SpanExportResult.FAILURE
        try:
            if not self._is_over:
                found = self._inner.export(spans)
        finally:
            if found is SpanExportResult.SUCCESS:
                self._counts.exported += len(spans)
            else:
                self._counts.failed += len(spans)
        return found

    def shutdown(self) -> None:
        """Also breaks off what is under way. Idempotent."""
        is_over, self._is_over = self._is_over, True
        if not is_over:
            self._inner.shutdown()


class TraceExporter:
    """Makes spans of runs and calls of one host: an observer of its runs. Thread-safe."""

    def __init__(
        self, endpoint: str, life: bytes, instance: str, exporter: SpanExporter | None = None
    ) -> None:
        """`life`: the host's incarnation; `instance`: the daemon's name among others; `exporter`: another
        than that of the endpoint."""
        self.life = life
        self.counts = TraceCounts()
        # Names of the service and other attributes may also come from OTEL_RESOURCE_ATTRIBUTES.
        resource = Resource.create(
            {
                "service.name": "heliograph",
                "service.version": __version__,
                "service.instance.id": instance,
            }
        )
        writer = SpanWriter(life, dict(resource.attributes), Clock())
        self._out = _Counting(_Exporter(endpoint, writer), self.counts)
        self._given = 0
        self._processor = BatchSpanProcessor(
            self._out, max_queue_size=QUEUE, schedule_delay_millis=DELAY_MS, max_export_batch_size=BATCH
        )

    def __repr__(self) -> str:
        return f"<TraceExporter {self.counts}>"

    def run_ended(self, run: RunRecord) -> None:
        """Takes its record if it is traced."""
        if run.trace_parent:
            self._put(run)

    @contextmanager
    def call(self, name: str, trace_parent: str, session: int) -> Iterator[str]:
        """The span of a call, while it is answered; gives its traceparent."""
        if not sampled(trace_parent):
            yield ""
            return
        span, began = secrets.token_hex(8), time.monotonic()
        error: BaseException | None = None
        try:
            yield below(trace_parent, span)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._put(CallRecord(name, span, trace_parent, session, began, time.monotonic(), error))

    def _put(self, record: RunRecord | CallRecord) -> None:
        # Looked at without a lock: threads that do so at once may pass the bound by one each, at which the
        # processor would drop the oldest.
        if self._given - self._out.taken >= QUEUE:
            self.counts.dropped += 1
            return
        self._given += 1
        self._processor.on_end(_Recorded(record))

    def close(self) -> None:
        """Exports what there is, for FLUSH_SECONDS at most. Idempotent."""
        flushing = threading.Thread(target=self._processor.shutdown, name="heliograph-traces", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        if flushing.is_alive():
            # Breaks off the call that it waits for.
            self._out.shutdown()
            flushing.join(FLUSH_SECONDS)
        if self.counts.dropped or self.counts.failed:
            logger.warning(
                "of what clients traced, %d were exported, %d were dropped and %d the collector did not take",
                self.counts.exported,
                self.counts.dropped,
                self.counts.failed,
            )
