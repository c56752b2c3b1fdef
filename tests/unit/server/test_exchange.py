"""Values between exchanges of one process: who gets what, once, in whatever order both ends come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from tests.support.exchange_links import NearPuller

from heliograph_backends.contract import Abort, Tensor, host_bytes
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    HandleExistsError,
    HeliographError,
    MemberLostError,
    PermissionDeniedError,
    ProtocolError,
)
from heliograph_proto.plans import Arrival, Departure, Edge, Partition, PeerSource
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType, tensor_type
from heliograph_server.exchange.edges import EdgePorts, IncomingValues
from heliograph_server.exchange.exchange import LiveExchange, PullCallback
from heliograph_server.exchange.incoming import IncomingValue
from heliograph_server.exchange.ledger import WINDOW_RUNS
from heliograph_server.exchange.outgoing import OutgoingValue

#: Every wait of these tests ends after this.
SECONDS = 10.0
SMALL = tensor_type("f32", (3, 4))
LARGE = tensor_type("f32", (700, 1000))
A = PeerSource("grpc://a:7070", b"a" * 16)
EDGES = [Edge(bytes([number]) * 16, bytes([number + 100]) * 32) for number in range(4)]


@dataclass
class World:
    """Two daemons' exchanges, and memory for tensors."""

    producer: LiveExchange
    consumer: LiveExchange
    device: CpuDevice
    threads: ThreadPoolExecutor

    def tensor(self, type: TensorType, value: float = 0.0) -> Tensor:
        tensor = Tensor(type, self.device.buffer_type.allocate(type.nbytes))
        tensor.array[:] = value
        return tensor

    def numbered(self, type: TensorType) -> Tensor:
        tensor = self.tensor(type)
        tensor.array[:] = np.arange(type.size, dtype="f4").reshape(type.shape)
        return tensor

    def waiting(self, incoming: IncomingValues, abort: Abort | None = None) -> Future[None]:
        """Somebody waits for the first arrival."""
        return self.threads.submit(incoming.wait, 0, abort or Abort())

    def ends(self, *edges: Edge) -> tuple[EdgePorts, EdgePorts]:
        """Both ends of edges that are pulled."""
        out = Partition(departures=tuple(Departure(number, edge) for number, edge in enumerate(edges)))
        into = Partition(tuple(Arrival(number, edge, A) for number, edge in enumerate(edges)))
        return self.producer.open(out), self.consumer.open(into)


@pytest.fixture
def world() -> Iterator[World]:
    producer = LiveExchange(Limits(in_flight_bytes=4 * 2**20, chunk_bytes=2**18))
    device = CpuDevice(threads=1, native=False)
    with ThreadPoolExecutor(8) as threads:
        made = World(producer, LiveExchange(peers=NearPuller({A: producer})), device, threads)
        yield made
        made.consumer.close()
        made.producer.close()
    assert made.producer.budget.held_bytes == 0
    assert made.producer.open_edges == made.consumer.open_edges == 0
    device.close()


def test_the_protocols_are_kept(world: World) -> None:
    exchange: LiveExchange = world.producer
    ports: EdgePorts = exchange.open(Partition())
    incoming: IncomingValues = ports.expect(1, [])
    incoming.close()
    ports.close()


@pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("asks_first", [True, False])
def test_a_value_arrives_whoever_comes_first(world: World, type: TensorType, asks_first: bool) -> None:
    out, into = world.ends(EDGES[0])
    source, target = world.numbered(type), world.tensor(type)
    incoming = into.expect(1, [target]) if asks_first else None
    waiting = world.waiting(incoming) if incoming is not None else None
    out.offer(0, 1, source, Abort())
    if incoming is None:
        incoming = into.expect(1, [target])
    (waiting or world.waiting(incoming)).result(SECONDS)
    assert np.array_equal(target.array, source.array)
    assert world.producer.traffic.sent_bytes == world.consumer.traffic.received_bytes == type.nbytes
    assert world.producer.budget.held_bytes == 0


def test_a_small_value_of_the_next_run_comes_before_that_run_begins(world: World) -> None:
    out, into = world.ends(EDGES[0])
    source, target = world.numbered(SMALL), world.tensor(SMALL)
    first = into.expect(1, [world.tensor(SMALL)])
    first.ask_ahead()
    out.offer(0, 2, source, Abort())
    assert world.producer.budget.held_bytes == 0 and world.producer.traffic.sent_bytes == SMALL.nbytes
    second = into.expect(2, [target])
    second.wait(0, Abort())
    assert np.array_equal(target.array, source.array)
    assert world.consumer.traffic.received_bytes == SMALL.nbytes
    out.offer(0, 1, source, Abort())
    first.wait(0, Abort())


def test_a_run_that_failed_elsewhere_before_it_began_here_says_why(world: World) -> None:
    out, into = world.ends(EDGES[0])
    into.expect(1, [world.tensor(SMALL)]).ask_ahead()
    out.end(2, ComputeFailedError("it broke"))
    with pytest.raises(ComputeFailedError, match="it broke"):
        into.expect(2, [world.tensor(SMALL)]).wait(0, Abort())


def test_runs_that_begin_out_of_order_ask_for_each_value_once(world: World) -> None:
    out, into = world.ends(EDGES[0])
    targets = {run: world.tensor(SMALL) for run in (2, 1, 4, 3)}
    coming = {}
    for run, target in targets.items():
        coming[run] = into.expect(run, [target])
        coming[run].ask_ahead()
    for run in (1, 2, 3, 4):
        out.offer(0, run, world.tensor(SMALL, run), Abort())
    for run, incoming in coming.items():
        incoming.wait(0, Abort())
        assert (targets[run].array == run).all()
    assert world.producer.traffic.refused == 0


def test_what_was_offered_is_what_arrives_though_its_tensor_is_written_again(world: World) -> None:
    for type in (SMALL, LARGE):
        edge = EDGES[type is LARGE]
        out, into = world.ends(edge)
        source, target = world.tensor(type, 1), world.tensor(type)
        out.offer(0, 1, source, Abort())
        source.array[:] = 2
        into.expect(1, [target]).wait(0, Abort())
        assert (target.array == 1).all()


def test_a_view_with_gaps_is_sent_and_received_as_its_elements(world: World) -> None:
    out, into = world.ends(EDGES[0])
    source, target = world.numbered(LARGE), world.tensor(tensor_type("f32", (700, 2000)))
    half = tensor_type("f32", (700, 500))
    out.offer(0, 1, source.view(half, 0, LARGE.strides), Abort())
    into.expect(1, [target.view(half, 400, (8000, 8))]).wait(0, Abort())
    assert np.array_equal(target.array[:, 100:1100:2], source.array[:, :500])
    assert not target.array[:, 101:1100:2].any()


def test_runs_and_edges_keep_their_values_apart(world: World) -> None:
    out, into = world.ends(*EDGES[:2])
    targets = {run: [world.tensor(SMALL), world.tensor(SMALL)] for run in (1, 2)}
    incoming = {run: into.expect(run, targets[run]) for run in (1, 2)}
    for run in (2, 1):
        for place in (1, 0):
            out.offer(place, run, world.tensor(SMALL, 10 * run + place), Abort())
    for run in (1, 2):
        for place in (0, 1):
            incoming[run].wait(place, Abort())
            assert (targets[run][place].array == 10 * run + place).all()


def test_everybody_who_waits_for_a_value_is_woken(world: World) -> None:
    out, into = world.ends(EDGES[0])
    incoming = into.expect(1, [world.tensor(SMALL)])
    waits = [world.waiting(incoming) for _ in range(4)]
    out.offer(0, 1, world.tensor(SMALL), Abort())
    for wait in waits:
        wait.result(SECONDS)


# Ends that are no values


def test_a_failed_run_tells_whoever_asks_before_and_after(world: World) -> None:
    out, into = world.ends(EDGES[0])
    early = world.waiting(into.expect(1, [world.tensor(SMALL)]))
    out.end(1, ComputeFailedError("it burst"))
    with pytest.raises(ComputeFailedError, match="it burst"):
        early.result(SECONDS)
    out.end(2, ComputeFailedError("again"))
    with pytest.raises(ComputeFailedError, match="again"):
        into.expect(2, [world.tensor(SMALL)]).wait(0, Abort())


def test_a_run_that_ends_without_a_value_is_cancelled_for_whoever_asks(world: World) -> None:
    out, into = world.ends(EDGES[0])
    out.end(1)
    with pytest.raises(CancelledError):
        into.expect(1, [world.tensor(SMALL)]).wait(0, Abort())


def test_what_was_offered_can_be_had_after_the_run_but_not_after_it_failed(world: World) -> None:
    out, into = world.ends(EDGES[0])
    for run in (1, 2):
        out.offer(0, run, world.tensor(SMALL, run), Abort())
    out.end(1)
    out.end(2, ComputeFailedError("it burst"))
    target = world.tensor(SMALL)
    into.expect(1, [target]).wait(0, Abort())
    assert (target.array == 1).all()
    with pytest.raises(ComputeFailedError):
        into.expect(2, [target]).wait(0, Abort())
    assert world.producer.budget.held_bytes == 0


def test_closing_the_producers_partition_ends_every_wait(world: World) -> None:
    out, into = world.ends(EDGES[0])
    wait = world.waiting(into.expect(1, [world.tensor(SMALL)]))
    out.close()
    out.close()
    with pytest.raises(CancelledError):
        wait.result(SECONDS)
    with pytest.raises(PermissionDeniedError):
        into.expect(2, [world.tensor(SMALL)]).wait(0, Abort())


def test_an_abort_ends_a_wait_and_nothing_is_written_after_close(world: World) -> None:
    out, into = world.ends(EDGES[0])
    target, abort = world.tensor(SMALL), Abort()
    incoming = into.expect(1, [target])
    wait = world.waiting(incoming, abort)
    abort.set()
    with pytest.raises(CancelledError):
        wait.result(SECONDS)
    incoming.close()
    out.offer(0, 1, world.tensor(SMALL, 1), Abort())
    assert not target.array.any()


def test_closing_the_consumers_partition_ends_its_waits(world: World) -> None:
    _, into = world.ends(EDGES[0])
    incoming = into.expect(1, [world.tensor(SMALL)])
    wait = world.waiting(incoming)
    into.close()
    with pytest.raises(CancelledError):
        wait.result(SECONDS)
    with pytest.raises(CancelledError):
        into.expect(2, [world.tensor(SMALL)]).wait(0, Abort())


def test_another_incarnation_of_the_source_is_a_lost_member(world: World) -> None:
    other = PeerSource(A.address, b"b" * 16)
    into = world.consumer.open(Partition((Arrival(0, EDGES[0], other),)))
    with pytest.raises(MemberLostError, match=A.address):
        into.expect(1, [world.tensor(SMALL)]).wait(0, Abort())


def test_a_value_of_another_size_is_an_error_and_writes_nothing_outside(world: World) -> None:
    out, into = world.ends(EDGES[0])
    space = world.tensor(tensor_type("f32", (12,)))
    for run, columns in ((1, 5), (2, 3)):
        target = space.view(tensor_type("f32", (4,)), 16)
        incoming = into.expect(run, [target])
        out.offer(0, run, world.tensor(tensor_type("f32", (columns,)), 7), Abort())
        with pytest.raises(ProtocolError):
            world.waiting(incoming).result(SECONDS)
        assert not space.array[:4].any() and not space.array[8:].any()


# Capabilities


def told(ask: Callable[[PullCallback], None]) -> OutgoingValue | HeliographError | None:
    found: list[OutgoingValue | HeliographError] = []
    ask(found.append)
    return found[0] if found else None


def test_a_capability_is_good_for_its_edge_and_run_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    out, _ = world.ends(*EDGES[:2])
    one, two = EDGES[:2]
    ask = world.producer.ask
    out.offer(0, 5, world.tensor(SMALL), Abort())
    tries = {
        "forged": (one.name, 5, b"x" * 16),
        "short": (one.name, 5, b""),
        "of another run": (one.name, 5, one.capability(6)),
        "of another edge": (one.name, 5, two.capability(5)),
        "of an unknown edge": (b"?" * 16, 5, one.capability(5)),
        "of no edge": (b"", 5, one.capability(5)),
    }
    errors = {what: told(partial(ask, *it)) for what, it in tries.items()}
    good = told(partial(ask, one.name, 5, one.capability(5)))
    assert isinstance(good, OutgoingValue) and good.whole is not None
    errors["reused"] = told(partial(ask, one.name, 5, one.capability(5)))
    waiting = told(partial(ask, one.name, 6, one.capability(6)))
    errors["reused while it waits"] = told(partial(ask, one.name, 6, one.capability(6)))
    out.offer(0, 5 + WINDOW_RUNS, world.tensor(SMALL), Abort())
    errors["expired"] = told(partial(ask, one.name, 4, one.capability(4)))
    assert waiting is None
    for what, error in errors.items():
        assert isinstance(error, PermissionDeniedError), what
    assert len({str(error) for error in errors.values()}) == 1
    assert world.producer.traffic.refused == len(errors)
    assert len(caplog.records) == 4


def test_many_forged_capabilities_fill_no_memory_and_no_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    out, _ = world.ends(EDGES[0])
    for run in range(5000):
        found = told(partial(world.producer.ask, EDGES[0].name, run, b"x" * 16))
        assert isinstance(found, PermissionDeniedError)
    assert len(caplog.records) == 1
    out.close()


def test_a_value_that_nobody_fetches_goes_when_its_run_is_old(world: World) -> None:
    out, _ = world.ends(EDGES[0])
    for run in range(1, 2 * WINDOW_RUNS):
        out.offer(0, run, world.tensor(SMALL), Abort())
        out.end(run)
    assert world.producer.budget.held_bytes <= (WINDOW_RUNS + 1) * SMALL.nbytes


def test_an_edge_is_open_once(world: World) -> None:
    out, _ = world.ends(EDGES[0])
    with pytest.raises(HandleExistsError):
        world.producer.open(Partition(departures=(Departure(0, EDGES[0]),)))
    out.close()
    world.producer.open(Partition(departures=(Departure(0, EDGES[0]),))).close()


# Memory


def test_an_offer_waits_for_room_but_never_that_of_the_oldest_run(world: World) -> None:
    """The bound is 4 MiB, and a value has 2.7."""
    out, into = world.ends(*EDGES[:2])
    for place in (0, 1):
        out.offer(place, 1, world.tensor(LARGE, place), Abort())
    begun = threading.Event()

    def offer() -> None:
        begun.set()
        out.offer(0, 2, world.tensor(LARGE, 2), Abort())

    waiting = world.threads.submit(offer)
    assert begun.wait(SECONDS)
    assert world.producer.budget.held_bytes == 2 * LARGE.nbytes and not waiting.done()
    targets = [world.tensor(LARGE), world.tensor(LARGE)]
    incoming = into.expect(1, targets)
    for place in (0, 1):
        incoming.wait(place, Abort())
    waiting.result(SECONDS)
    out.end(1)
    out.offer(1, 2, world.tensor(LARGE), Abort())


def test_an_offer_that_waits_for_room_is_aborted_and_goes_on_when_it_is_the_oldest(world: World) -> None:
    out, _ = world.ends(*EDGES[:3])
    for place in (0, 1):
        out.offer(place, 1, world.tensor(LARGE), Abort())
    abort = Abort()
    aborted = world.threads.submit(out.offer, 0, 2, world.tensor(LARGE), abort)
    other = world.threads.submit(out.offer, 2, 2, world.tensor(LARGE), Abort())
    abort.set()
    with pytest.raises(CancelledError):
        aborted.result(SECONDS)
    out.end(1)
    other.result(SECONDS)


def test_steps_of_a_loop_keep_what_slower_daemons_have_not_requested(world: World) -> None:
    """The bound is 4 MiB, and a value has 2.7: three steps of a loop, and then runs."""
    out, into = world.ends(EDGES[0])
    out.expect_runs(3)
    for run in (1, 2, 3):
        out.offer(0, run, world.tensor(LARGE, run), Abort())
        out.end(run)
    for run in (1, 2, 3):
        target = world.tensor(LARGE)
        into.expect(run, [target]).wait(0, Abort())
        assert (target.array == run).all()
    out.expect_runs(0)
    for run in (4, 5, 6):
        out.offer(0, run, world.tensor(LARGE), Abort())
        out.end(run)
    assert world.producer.budget.held_bytes == 2 * LARGE.nbytes


# Values that are pushed


def landing_of(world: World, edge: Edge, run: int) -> list[IncomingValue | HeliographError]:
    found: list[IncomingValue | HeliographError] = []
    world.consumer.bring(edge.name, run, edge.capability(run), found.append)
    return found


@pytest.mark.parametrize("brings_first", [True, False])
def test_a_pushed_value_lands_whoever_comes_first(world: World, brings_first: bool) -> None:
    into = world.consumer.open(Partition((Arrival(0, EDGES[0]),)))
    target = world.tensor(SMALL)
    found = landing_of(world, EDGES[0], 1) if brings_first else []
    incoming = into.expect(1, [target])
    found = found or landing_of(world, EDGES[0], 1)
    (landing,) = found
    assert isinstance(landing, IncomingValue)
    landing.write(0, host_bytes(np.full(12, 3, "f4")))
    landing.finish()
    incoming.wait(0, Abort())
    assert (target.array == 3).all()
    (again,) = landing_of(world, EDGES[0], 1)
    assert isinstance(again, PermissionDeniedError)


def test_what_is_pushed_for_a_run_that_is_over_has_no_place(world: World) -> None:
    into = world.consumer.open(Partition((Arrival(0, EDGES[0]),)))
    early = landing_of(world, EDGES[0], 1)
    into.end(1, ComputeFailedError("it burst"))
    (error,) = early
    assert isinstance(error, ComputeFailedError)
    incoming = into.expect(2, [world.tensor(SMALL)])
    into.end(2)
    (late,) = landing_of(world, EDGES[0], 2)
    assert isinstance(late, CancelledError)
    with pytest.raises(CancelledError):
        incoming.wait(0, Abort())
