"""Traces: exports the spans of runs and calls that a client traces to a collector of OpenTelemetry.

    run_ended(record) ─▸ queue of the SDK's batch processor ─▸ its thread: records to spans ─▸ OTLP

The end of a run only puts its record into the queue. The queue is bounded; records beyond it are
counted and dropped, and so are those that a collector does not accept. The end of the daemon waits
for a collector for a bounded time.

Imports OpenTelemetry's SDK, the extra `otel`, so it is imported only if traces are configured.
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

#: The most records in the queue, and in a batch.
QUEUE, BATCH = 4096, 512
#: How long a record waits for others, in milliseconds.
DELAY_MS = 500
#: The timeout of a collector for a batch, in seconds.
EXPORT_SECONDS = 5
#: The timeout of the final export, in seconds.
FLUSH_SECONDS = 2.0

#: The processor checks only the flag "sampled".
_SAMPLED = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


class _Recorded(ReadableSpan):
    """A record in the form of a span, for the processor. The exporter makes spans of it."""

    def __init__(self, record: RunRecord | CallRecord) -> None:
        self.record = record

    @property
    def context(self) -> SpanContext:
        return _SAMPLED


@dataclass(slots=True)
class TraceCounts:
    """Counts of traced runs and calls."""

    exported: int = 0
    #: The queue was full.
    dropped: int = 0
    #: The collector did not accept them.
    failed: int = 0


class _Exporter(OTLPSpanExporter):
    """Writes records as spans. The SDK's own encoder takes ten times as long."""

    def __init__(self, endpoint: str, writer: SpanWriter) -> None:
        super().__init__(endpoint, timeout=EXPORT_SECONDS)
        self._writer = writer

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        return self._writer.request([one.record for one in data if isinstance(one, _Recorded)])


class _Counting(SpanExporter):
    """Counts the records from the queue, by outcome."""

    def __init__(self, inner: SpanExporter, counts: TraceCounts) -> None:
        self._inner = inner
        self._counts = counts
        self._is_over = False
        #: The number of records from the queue.
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
        """Shut down, and cancel a running export. Idempotent."""
        is_over, self._is_over = self._is_over, True
        if not is_over:
            self._inner.shutdown()


class TraceExporter:
    """Exports spans of the runs and calls of a host; an observer of its runs. Thread-safe."""

    def __init__(
        self, endpoint: str, life: bytes, instance: str, exporter: SpanExporter | None = None
    ) -> None:
        """`life`: the host's incarnation; `instance`: the daemon's unique name; `exporter`:
        replaces that of the endpoint."""
        self.life = life
        self.counts = TraceCounts()
        # OTEL_RESOURCE_ATTRIBUTES may override the service name, and add attributes.
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
        """Queue the record of a traced run."""
        if run.trace_parent:
            self._put(run)

    @contextmanager
    def call(self, name: str, trace_parent: str, session: int) -> Iterator[str]:
        """Trace a call while it is answered. Gives the traceparent of its span."""
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
        # Checked without a lock: concurrent threads may exceed the bound by one each, and the
        # processor then drops the oldest records.
        if self._given - self._out.taken >= QUEUE:
            self.counts.dropped += 1
            return
        self._given += 1
        self._processor.on_end(_Recorded(record))

    def close(self) -> None:
        """Export pending records, for at most FLUSH_SECONDS. Idempotent."""
        flushing = threading.Thread(target=self._processor.shutdown, name="heliograph-traces", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        if flushing.is_alive():
            # Cancels the call that it waits for.
            self._out.shutdown()
            flushing.join(FLUSH_SECONDS)
        if self.counts.dropped or self.counts.failed:
            logger.warning(
                "traced runs and calls: %d exported, %d dropped, %d not accepted by the collector",
                self.counts.exported,
                self.counts.dropped,
                self.counts.failed,
            )
