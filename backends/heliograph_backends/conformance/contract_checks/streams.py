"""Streams: order, ends, closing."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np

from heliograph_backends.conformance.contract_checks.common import (
    ContractPart,
    Hold,
    held,
    require_raises,
    stream_of,
)
from heliograph_backends.conformance.harness.bench import Bench, Reports
from heliograph_backends.conformance.harness.outcome import require
from heliograph_backends.contract import Stream
from heliograph_proto.errors import CancelledError, ComputeFailedError, DeadlineExceededError

CASES = ContractPart("stream")

COUNT = 200


def _note(ended: list[tuple[int, BaseException | None]], number: int, error: BaseException | None) -> None:
    ended.append((number, error))


@CASES
def order(bench: Bench, random: np.random.Generator) -> None:
    """Work is done in the order in which it was submitted, and each piece is reported once."""
    done: list[int] = []
    ended: list[tuple[int, BaseException | None]] = []
    with stream_of(bench) as stream:
        for number in range(COUNT):
            stream.submit(partial(done.append, number), partial(_note, ended, number))
        stream.synchronize(bench.seconds)
    require(done == list(range(COUNT)), f"the order was {done[:20]}...")
    require(
        ended == [(number, None) for number in range(COUNT)], f"{len(ended)} of {COUNT} ends were reported"
    )


@CASES
def at_once(bench: Bench, random: np.random.Generator) -> None:
    """submit returns before the work is done."""
    with held(bench) as ((stream,), hold):
        later = Reports()
        stream.submit(lambda: None, later)
        require(not later.errors and not hold.reports.errors, "submit waited until the work was done")
        hold.release()
        hold.reports.wait(bench.seconds)
        later.wait(bench.seconds)


@CASES
def errors(bench: Bench, random: np.random.Generator) -> None:
    """Work that raises is done with its error, and the stream continues."""
    error = ComputeFailedError("a failure on purpose")

    def fail() -> None:
        raise error

    with stream_of(bench) as stream:
        first, second = Reports(), Reports()
        stream.submit(fail, first)
        stream.submit(lambda: None, second)
        found = require_raises(ComputeFailedError, lambda: first.wait(bench.seconds), "work that failed")
        require(found is error, f"the work was done with {found!r}, another error than it raised")
        second.wait(bench.seconds)


@CASES
def exits(bench: Bench, random: np.random.Generator) -> None:
    """Work that raises even SystemExit is done with it."""

    def leave() -> None:
        raise SystemExit(3)

    with stream_of(bench) as stream:
        first, second = Reports(), Reports()
        stream.submit(leave, first)
        stream.submit(lambda: None, second)
        require_raises(SystemExit, lambda: first.wait(bench.seconds), "work that exits")
        second.wait(bench.seconds)


@CASES
def many_threads(bench: Bench, random: np.random.Generator) -> None:
    """Work submitted by several threads is done exactly once, each thread's in its order."""
    done: list[tuple[int, int]] = []

    def submit(thread: int) -> None:
        for number in range(COUNT):
            pair = (thread, number)
            stream.submit(partial(done.append, pair), lambda error: None)

    with stream_of(bench) as stream:
        threads = [threading.Thread(target=submit, args=(one,)) for one in range(3)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(bench.seconds)
        stream.synchronize(bench.seconds)
    for thread in range(3):
        own = [number for who, number in done if who == thread]
        require(
            own == list(range(COUNT)),
            f"of a thread's work {len(own)} of {COUNT} pieces were done, or not in order",
        )


@CASES
def independent(bench: Bench, random: np.random.Generator) -> None:
    """A stream does not wait for another that is busy."""
    with held(bench, 2) as (streams, hold):
        free = Reports()
        streams[1].submit(lambda: None, free)
        free.wait(bench.seconds)
        require(not hold.reports.errors, "the busy stream was not busy any more")


@CASES
def here(bench: Bench, random: np.random.Generator) -> None:
    """A submitter's own work is done in its thread and in the stream's order, or not taken."""
    with held(bench) as ((stream,), hold):
        require(stream.submit_here(lambda: None, Reports()) is None, "a busy stream took work to do here")
        hold.release()
        hold.reports.wait(bench.seconds)
        done: list[object] = []
        own, later = Reports(), Reports()
        perform = stream.submit_here(lambda: done.append(threading.get_ident()), own)
        stream.submit(partial(done.append, "later"), later)
        if perform is not None:
            require(not later.ended(0.01), "later work did not wait for that of its submitter")
            perform()
            own.wait(bench.seconds)
        later.wait(bench.seconds)
    expected = [] if perform is None else [threading.get_ident()]
    require(done == [*expected, "later"], f"the work was done as {done!r:.100}")


@CASES
def deadline(bench: Bench, random: np.random.Generator) -> None:
    """Synchronizing with a busy stream ends at its deadline."""
    with held(bench) as ((stream,), hold):
        require_raises(DeadlineExceededError, lambda: stream.synchronize(0.01), "synchronize")
        hold.release()
        stream.synchronize(bench.seconds)


@CASES
def closing(bench: Bench, random: np.random.Generator) -> None:
    """Closing waits for the running work, and ends what is queued with CancelledError."""
    stream = bench.device.stream()
    hold, queued = Hold(bench, stream), [Reports() for _ in range(3)]
    closer = threading.Thread(target=stream.close, daemon=True)
    try:
        hold.wait_until_begun()
        for one in queued:
            stream.submit(lambda: None, one)
        closer.start()
        _wait_until_closed(stream, bench.seconds / 5)
        require(closer.is_alive() and not hold.reports.errors, "close did not wait for the running work")
    finally:
        hold.release()
    closer.join(bench.seconds)
    require(not closer.is_alive(), "close did not return after the running work had ended")
    hold.reports.wait(bench.seconds)
    for one in queued:
        require_raises(CancelledError, partial(one.wait, bench.seconds), "work that was queued")


def _wait_until_closed(stream: Stream, seconds: float) -> None:
    """Wait until the stream refuses work, at most this long. From then on queued work is
    cancelled."""
    for _ in range(50):
        probe = Reports()
        stream.submit(lambda: None, probe)
        if probe.ended(seconds / 50):
            return


@CASES
def closed(bench: Bench, random: np.random.Generator) -> None:
    """Work for a closed stream is done with CancelledError, and closing again does nothing."""
    stream = bench.device.stream()
    stream.close()
    late = Reports()
    stream.submit(lambda: None, late)
    require_raises(CancelledError, lambda: late.wait(bench.seconds), "work for a closed stream")
    stream.close()
