"""Events: marks that streams and the host wait for."""

from __future__ import annotations

import numpy as np

from heliograph_backends.conformance.contract_checks.common import (
    ContractPart,
    held,
    require_raises,
    stream_of,
)
from heliograph_backends.conformance.harness.bench import Bench, Reports
from heliograph_backends.conformance.harness.outcome import require
from heliograph_proto.errors import DeadlineExceededError

CASES = ContractPart("event")


@CASES
def never_recorded(bench: Bench, random: np.random.Generator) -> None:
    """An event that was never recorded is reached."""
    event = bench.device.event()
    require(event.is_reached(), "it is not")
    event.synchronize(0)
    with stream_of(bench) as stream:
        event.wait(stream)
        stream.synchronize(bench.seconds)


@CASES
def host_waits(bench: Bench, random: np.random.Generator) -> None:
    """The host waits for the work before the mark, until a deadline."""
    with held(bench) as ((stream,), hold):
        event = bench.device.event()
        event.record(stream)
        require(not event.is_reached(), "the event was reached before the work that it marks the end of")
        require_raises(DeadlineExceededError, lambda: event.synchronize(0.01), "synchronize")
        hold.release()
        event.synchronize(bench.seconds)
        require(event.is_reached(), "the event is not reached after synchronize")
        hold.reports.wait(bench.seconds)


@CASES
def stream_waits(bench: Bench, random: np.random.Generator) -> None:
    """A stream's later work waits for the mark of another stream, and the host does not."""
    with held(bench, 2) as (streams, hold):
        event = bench.device.event()
        event.record(streams[0])
        before, after = Reports(), Reports()
        streams[1].submit(lambda: None, before)
        event.wait(streams[1])
        streams[1].submit(lambda: None, after)
        before.wait(bench.seconds)
        require(not after.ended(0.02), "work behind the event was done before the event was reached")
        hold.release()
        after.wait(bench.seconds)
        require(event.is_reached(), "work behind the event was done, but the event is not reached")


@CASES
def moved(bench: Bench, random: np.random.Generator) -> None:
    """Recording again moves the mark."""
    with held(bench, 2) as (streams, hold):
        event = bench.device.event()
        event.record(streams[1])
        event.synchronize(bench.seconds)
        event.record(streams[0])
        require(not event.is_reached(), "the event is still reached after it was recorded anew")
        hold.release()
        event.synchronize(bench.seconds)


@CASES
def old_mark(bench: Bench, random: np.random.Generator) -> None:
    """A stream that waits for a mark does not wait for a later one of the same event."""
    with held(bench, 2) as (streams, hold):
        event = bench.device.event()
        event.record(streams[1])
        event.synchronize(bench.seconds)
        event.wait(streams[1])
        event.record(streams[0])
        free = Reports()
        streams[1].submit(lambda: None, free)
        free.wait(bench.seconds)


@CASES
def closed_stream(bench: Bench, random: np.random.Generator) -> None:
    """An event recorded on a closed stream is reached, so that no wait for it hangs."""
    stream = bench.device.stream()
    stream.close()
    event = bench.device.event()
    event.record(stream)
    event.synchronize(bench.seconds)
