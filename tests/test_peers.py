"""Values between daemons, over sockets: two of this process that exchange, and a raw client of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from daemon_threads import SECONDS, ThreadDaemon, thread_daemon

from heliograph_backends.contract import Abort, Tensor
from heliograph_proto.limits import Limits
from heliograph_proto.portions import Arrival, Departure, Edge, Portion
from heliograph_proto.types import TensorType, tensor_type
from heliograph_server.core.exchange import Ports

SMALL = tensor_type("f32", (3, 4))
LARGE = tensor_type("f32", (700, 1000))
EDGE = Edge(b"e" * 16, b"s" * 32)
LIMITS = Limits(in_flight_bytes=4 * 2**20, chunk_bytes=2**18)


@pytest.fixture
def producer() -> Iterator[ThreadDaemon]:
    with thread_daemon(LIMITS) as made:
        yield made


@pytest.fixture
def consumer() -> Iterator[ThreadDaemon]:
    with thread_daemon(LIMITS) as made:
        yield made


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def ends(producer: ThreadDaemon, consumer: ThreadDaemon, edge: Edge = EDGE) -> tuple[Ports, Ports]:
    """Both ends of an edge that is pulled."""
    out = producer.exchange.open(Portion(departures=(Departure(0, edge),)))
    return out, consumer.exchange.open(Portion((Arrival(0, edge, producer.source),)))


def numbered(daemon: ThreadDaemon, type: TensorType) -> Tensor:
    tensor = daemon.tensor(type)
    tensor.array[:] = np.arange(type.size, dtype="f4").reshape(type.shape)
    return tensor


@pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("asks_first", [True, False])
def test_a_value_is_pulled_whoever_comes_first(
    producer: ThreadDaemon,
    consumer: ThreadDaemon,
    threads: ThreadPoolExecutor,
    type: TensorType,
    asks_first: bool,
) -> None:
    out, into = ends(producer, consumer)
    for run in (1, 2, 3):
        source, target = numbered(producer, type), consumer.tensor(type)
        waiting = None
        if asks_first:
            waiting = threads.submit(into.expect(run, [target]).wait, 0, Abort())
        out.offer(0, run, source, Abort())
        if waiting is None:
            waiting = threads.submit(into.expect(run, [target]).wait, 0, Abort())
        waiting.result(SECONDS)
        assert np.array_equal(target.array, source.array)
        out.end(run)
        into.end(run)
    assert producer.exchange.traffic.sent_bytes == 3 * type.nbytes
    assert consumer.exchange.traffic.received_bytes == 3 * type.nbytes
    assert producer.exchange.traffic.received_bytes == consumer.exchange.traffic.sent_bytes == 0
    out.close()
    into.close()
