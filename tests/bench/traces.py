"""What traces cost: a plan of one op, 64 bytes in and 64 out by gRPC, with some of its runs traced or all.

Client and daemon export to a collector, in a process of its own. The caller's span stands for a request of
its own that many runs belong to: making that is not counted, the client's span of each run is. Blocks are so
long that most of what they give to export is exported within them; then some time passes for the rest.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
from figures import Figure, shared
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from peer_process import PeerProcess

import heliograph as hg
from heliograph.testing import running_daemon

VALUE = np.ones(16, np.float32)
ROUNDS, RUNS = 8, 1000
#: What is left to export is, after a block.
SETTLE_SECONDS = 0.8
#: Each how many runs one is traced, and the most that a run may take then, times one of a block without.
ARMS = {"1 %": (100, 1.05), "all": (1, 1.35)}
#: The seconds of a run, on average, where each so many one is traced; 0: none.
Block = Callable[[int], float]


def figures() -> Iterator[Figure]:
    """Microseconds of a run, on average over each block, and the median of pairs of blocks."""
    with PeerProcess("peer_collector.py") as collector:
        endpoint = str(collector.ready)
        provider = TracerProvider()
        delay_ms = int(SETTLE_SECONDS * 500)
        exporter = OTLPSpanExporter(endpoint)
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=delay_ms))
        trace.set_tracer_provider(provider)
        with running_daemon("--log-level", "warning", "--traces", endpoint) as url:
            for name, measured in (("aio", _aio), ("blocking", _blocking)):
                found = measured(url)
                note = f"{collector.ask('count'):,} spans so far"
                yield from _figures_of(name, found, note)
        provider.shutdown()


def _figures_of(name: str, found: dict[str, list[float]], note: str) -> Iterator[Figure]:
    none = statistics.median(found["none"]) * 1e6
    for arm, (_, bar) in ARMS.items():
        ratio = statistics.median(one / two for one, two in zip(found[arm], found["none"], strict=True))
        yield Figure(
            f"deploy-traces/{name}, {arm}", ratio * none, none, bar, "us", "the same, none traced", note
        )


def _blocking(url: str) -> dict[str, list[float]]:
    with hg.connect(url, shared_memory=False, direct=False) as session:
        plan = session.compile(_one_op())

        def block(each: int) -> float:
            seconds = 0.0
            for run in range(RUNS):
                with _span(run, each):
                    start = time.perf_counter()
                    plan.run(x=VALUE)
                    seconds += time.perf_counter() - start
            return seconds / RUNS

        return _interleaved(block)


def _aio(url: str) -> dict[str, list[float]]:
    with asyncio.Runner() as runner:
        session = runner.run(_opened(url))
        plan = runner.run(session.compile(_one_op()))

        async def block(each: int) -> float:
            seconds = 0.0
            for run in range(RUNS):
                with _span(run, each):
                    start = time.perf_counter()
                    await plan.run(x=VALUE)
                    seconds += time.perf_counter() - start
            return seconds / RUNS

        found = _interleaved(lambda each: runner.run(block(each)))
        runner.run(session.close())
        return found


def _interleaved(block: Block) -> dict[str, list[float]]:
    """Seconds of a run, block by block, in turn and back again, so that a drift of the machine meets all."""
    found: dict[str, list[float]] = {"none": [], **{arm: [] for arm in ARMS}}
    for number in range(-1, shared(ROUNDS)):
        for arm in list(found) if number % 2 else reversed(found):
            seconds = block(ARMS[arm][0] if arm in ARMS else 0)
            time.sleep(SETTLE_SECONDS)
            # The first ones warm both sides up.
            if number >= 0:
                found[arm].append(seconds)
    return found


def _span(run: int, each: int) -> AbstractContextManager[object]:
    """The caller's span of a run, sampled or not."""
    flags = trace.TraceFlags(int(bool(each) and run % each == 0))
    context = trace.SpanContext(2**100 + run, 2**50 + 1, is_remote=True, trace_flags=flags)
    return trace.use_span(trace.NonRecordingSpan(context))


def _one_op() -> hg.Graph:
    graph = hg.Graph()
    graph.output("y", graph.input("x", VALUE.shape, "f32") + 1.0)
    return graph


async def _opened(url: str) -> hg.aio.Session:
    return await hg.aio.connect(url, shared_memory=False, direct=False)
