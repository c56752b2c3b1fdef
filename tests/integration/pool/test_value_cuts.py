"""Cuts of the connections by which values go from daemon to daemon: each arrives once, with its bits."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from cutting import CutProxy, cut_proxy, cuts_by_bytes
from daemon_threads import ThreadDaemon, thread_daemon
from waiting import until

from heliograph_backends.contract import Abort, Tensor
from heliograph_proto.codec.bulk import encode_download
from heliograph_proto.errors import (
    CancelledError,
    HeliographError,
    MemberLostError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from heliograph_proto.plans import Arrival, Departure, Edge, Partition, PeerSource
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType, tensor_type
from heliograph_server.auth.tokens import hash_of, new_token
from heliograph_server.daemon.daemon import Daemon
from heliograph_server.exchange.exchange import LiveExchange, LivePorts
from heliograph_server.exchange.outgoing import OutgoingValue, parts_of
from heliograph_server.links.blocking import BlockingPeers
from heliograph_server.links.links import PoolCredentials

SECONDS = 30.0
SMALL = tensor_type("f32", (3, 4))
LARGE = tensor_type("f32", (700, 1000))
EDGE = Edge(b"e" * 16, b"s" * 32)
#: The most bytes between two cuts.
MOST = 4 * LARGE.nbytes
LIMITS = Limits(in_flight_bytes=8 * 2**20, chunk_bytes=2**16)
LEASE = {"pool_silence_seconds": 0.5, "pool_lease_seconds": 20.0}
both_sizes = pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
both_kinds = pytest.mark.parametrize("consumer", ["loop", "threads"], indirect=True)


@pytest.fixture
def producer() -> Iterator[ThreadDaemon]:
    with thread_daemon(LIMITS, **LEASE) as made:
        yield made
        assert made.exchange.budget.held_bytes == 0, "what was not acknowledged is held after its plan"


@pytest.fixture
def way(producer: ThreadDaemon) -> Iterator[CutProxy]:
    with cut_proxy(producer.url) as made:
        yield made


@pytest.fixture
def consumer(request: pytest.FixtureRequest) -> Iterator[ThreadDaemon]:
    """A daemon whose links are on its loop, or on threads as those of a pool in a program."""
    with thread_daemon(LIMITS, **LEASE) as made:
        if getattr(request, "param", "loop") == "threads":
            made.exchange.use(BlockingPeers(0.5))
        yield made


class Ends:
    """An edge whose values go by a way that can be cut."""

    def __init__(self, producer: ThreadDaemon, consumer: ThreadDaemon, way: CutProxy) -> None:
        source = PeerSource(way.url, producer.host.incarnation)
        self.out: LivePorts = producer.exchange.open(Partition(departures=(Departure(0, EDGE),)))
        self.into: LivePorts = consumer.exchange.open(Partition((Arrival(0, EDGE, source),)))
        self.exchange: LiveExchange = producer.exchange

    def close(self) -> None:
        self.out.close()
        self.into.close()


@pytest.fixture
def ends(producer: ThreadDaemon, consumer: ThreadDaemon, way: CutProxy) -> Iterator[Ends]:
    made = Ends(producer, consumer, way)
    yield made
    made.close()


def numbered(daemon: ThreadDaemon, type: TensorType, first: int) -> Tensor:
    tensor = daemon.tensor(type)
    tensor.array[:] = np.arange(first, first + type.size, dtype="f4").reshape(type.shape)
    return tensor


@both_kinds
@both_sizes
@pytest.mark.parametrize("reset", [False, True], ids=["cut", "reset"])
def test_a_value_that_is_waited_for_arrives_after_a_cut(
    producer: ThreadDaemon, consumer: ThreadDaemon, way: CutProxy, ends: Ends, type: TensorType, reset: bool
) -> None:
    for run in (1, 2):
        source, target = numbered(producer, type, run), consumer.tensor(type)
        incoming = ends.into.expect(run, [target])
        # It is asked for before the cut in one of the runs at least.
        until(lambda: way.passed_bytes or not way.cuts)
        way.cut(reset=reset)
        ends.out.offer(0, run, source, Abort())
        incoming.wait(0, Abort())
        assert np.array_equal(target.array, source.array)
        ends.out.end(run)
        ends.into.end(run)


@both_kinds
@both_sizes
def test_a_value_is_whole_wherever_its_connection_is_cut(
    producer: ThreadDaemon, consumer: ThreadDaemon, way: CutProxy, ends: Ends, type: TensorType
) -> None:
    """Before, in and after the answer: the bytes of a call that was not cut are counted first."""

    def once(run: int, cut_at: int | None) -> None:
        source, target = numbered(producer, type, run), consumer.tensor(type)
        if cut_at is not None:
            way.cut_after(cut_at)
        ends.out.offer(0, run, source, Abort())
        ends.into.expect(run, [target]).wait(0, Abort())
        assert np.array_equal(target.array, source.array)
        ends.out.end(run)
        ends.into.end(run)

    once(1, None)
    passed = way.passed_bytes
    once(2, None)
    each = way.passed_bytes - passed
    for run in range(3, 15):
        once(run, max(1, each * (run - 2) // 12))
    assert way.cuts
    assert producer.exchange.traffic.refused == 0


@both_kinds
def test_a_large_value_goes_on_behind_what_arrived(
    producer: ThreadDaemon, consumer: ThreadDaemon, way: CutProxy, ends: Ends
) -> None:
    source, target = numbered(producer, LARGE, 1), consumer.tensor(LARGE)
    value, pieces = OutgoingValue(LARGE.nbytes), list(parts_of(source, LIMITS.chunk_bytes))
    ends.exchange.give(EDGE, 1, value)
    incoming = ends.into.expect(1, [target])
    for offset, data in pieces[:-2]:
        value.put(encode_download(offset, LARGE.nbytes, data), data.nbytes)
    # They arrive in order, so those before the last one are there.
    until(lambda: target.array.reshape(-1)[pieces[-3][0] // 4])
    way.cut()
    for offset, data in pieces[-2:]:
        value.put(encode_download(offset, LARGE.nbytes, data), data.nbytes)
    incoming.wait(0, Abort())
    assert np.array_equal(target.array, source.array) and way.cuts == 1
    # The count leaves out the bytes of the call that was cut.
    until(lambda: producer.exchange.traffic.sent_values)
    assert producer.exchange.traffic.sent_bytes < LARGE.nbytes, "it was sent from the beginning"
    assert consumer.exchange.traffic.received_values == 1


@both_kinds
@both_sizes
def test_every_value_arrives_once_however_often_the_way_is_cut(
    producer: ThreadDaemon, consumer: ThreadDaemon, way: CutProxy, ends: Ends, type: TensorType
) -> None:
    seed, count = secrets.randbits(30), 60 if type is SMALL else 15
    print(f"seed {seed}")
    with cuts_by_bytes(way, seed, 4 * type.nbytes + 4000):
        for run in range(1, count + 1):
            source, target = numbered(producer, type, run), consumer.tensor(type)
            incoming = ends.into.expect(run, [target])
            incoming.ask_ahead()
            ends.out.offer(0, run, source, Abort())
            incoming.wait(0, Abort())
            assert np.array_equal(target.array, source.array), f"run {run}"
            ends.out.end(run)
            ends.into.end(run)
    assert consumer.exchange.traffic.received_values == count
    assert producer.exchange.traffic.refused == 0


def test_values_that_are_pushed_and_relayed_survive_cuts_of_both_ways(
    producer: ThreadDaemon, consumer: ThreadDaemon, way: CutProxy
) -> None:
    """A third daemon pulls them from the one and brings them to the other."""
    seed = secrets.randbits(30)
    print(f"seed {seed}")
    with thread_daemon(LIMITS, **LEASE) as head, cut_proxy(consumer.url) as there:
        source = PeerSource(way.url, producer.host.incarnation)
        destination = PeerSource(there.url, consumer.host.incarnation)
        own = Edge(b"o" * 16, b"o" * 32)
        out = producer.exchange.open(Partition(departures=(Departure(0, EDGE),)))
        mine = head.exchange.open(Partition(departures=(Departure(0, own),)))
        into = consumer.exchange.open(Partition((Arrival(0, EDGE), Arrival(1, own))))
        ended: SimpleQueue[HeliographError | None] = SimpleQueue()
        with cuts_by_bytes(way, seed, MOST), cuts_by_bytes(there, seed + 1, MOST):
            for run in range(1, 16):
                type = LARGE if run % 2 else SMALL
                relayed, pushed = numbered(producer, type, run), numbered(head, type, run + 1)
                targets = [consumer.tensor(type), consumer.tensor(type)]
                head.exchange.relay(EDGE, run, type.nbytes, source, destination, ended.put)
                head.exchange.forward(own, run, destination, ended.put)
                out.offer(0, run, relayed, Abort())
                mine.offer(0, run, pushed, Abort())
                incoming = into.expect(run, targets)
                for place, made in enumerate((relayed, pushed)):
                    incoming.wait(place, Abort())
                    assert np.array_equal(targets[place].array, made.array), f"run {run}"
                assert [ended.get(timeout=SECONDS) for _ in range(2)] == [None, None]
                for ports in (out, mine, into):
                    ports.end(run)
        for ports in (out, mine, into):
            ports.close()
        assert head.exchange.budget.held_bytes == 0


def test_pushes_of_links_on_threads_survive_cuts(producer: ThreadDaemon, consumer: ThreadDaemon) -> None:
    seed = secrets.randbits(30)
    print(f"seed {seed}")
    producer.exchange.use(BlockingPeers(0.5))
    out = producer.exchange.open(Partition(departures=(Departure(0, EDGE),)))
    into = consumer.exchange.open(Partition((Arrival(0, EDGE),)))
    ended: SimpleQueue[HeliographError | None] = SimpleQueue()
    with cut_proxy(consumer.url) as there, cuts_by_bytes(there, seed, MOST):
        destination = PeerSource(there.url, consumer.host.incarnation)
        for run in range(1, 16):
            type = LARGE if run % 2 else SMALL
            source, target = numbered(producer, type, run), consumer.tensor(type)
            producer.exchange.forward(EDGE, run, destination, ended.put)
            out.offer(0, run, source, Abort())
            into.expect(run, [target]).wait(0, Abort())
            assert np.array_equal(target.array, source.array), f"run {run}"
            assert ended.get(timeout=SECONDS) is None
            out.end(run)
            into.end(run)
    out.close()
    into.close()


@both_kinds
@both_sizes
def test_a_tensor_that_is_handed_over_survives_cuts_and_its_giver_knows(
    producer: ThreadDaemon, consumer: ThreadDaemon, way: CutProxy, type: TensorType
) -> None:
    seed = secrets.randbits(30)
    print(f"seed {seed}")
    with ThreadPoolExecutor(1) as threads, cuts_by_bytes(way, seed, 4 * type.nbytes + 4000):
        for run in range(1, 8):
            ends = Ends(producer, consumer, way)
            source, target = numbered(producer, type, run), consumer.tensor(type)
            giving = threads.submit(ends.out.hand_over, 0, run, source, Abort())
            ends.into.expect(run, [target], is_awaited=True).wait(0, Abort())
            giving.result(SECONDS)
            assert np.array_equal(target.array, source.array)
            ends.close()


@both_kinds
@both_sizes
def test_what_arrived_is_held_no_longer(
    producer: ThreadDaemon, consumer: ThreadDaemon, ends: Ends, type: TensorType
) -> None:
    for run in range(1, 4):
        ends.out.offer(0, run, producer.tensor(type, run), Abort())
        ends.into.expect(run, [consumer.tensor(type)]).wait(0, Abort())
    until(lambda: ends.exchange.budget.held_bytes == 0)


@both_kinds
@both_sizes
def test_a_cancelled_wait_ends_at_once_also_while_the_connection_is_gone(
    producer: ThreadDaemon, consumer: ThreadDaemon, way: CutProxy, ends: Ends, type: TensorType
) -> None:
    target, abort = consumer.tensor(type), Abort()
    incoming = ends.into.expect(1, [target])
    way.refuse()
    way.cut()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(incoming.wait, 0, abort)
        abort.set()
        with pytest.raises(CancelledError):
            waiting.result(SECONDS)
    incoming.close()
    way.go_on()
    ends.out.offer(0, 1, producer.tensor(type, 1), Abort())
    ends.out.end(1, CancelledError("the run was cancelled"))
    second = consumer.tensor(type)
    ends.out.offer(0, 2, producer.tensor(type, 2), Abort())
    ends.into.expect(2, [second]).wait(0, Abort())
    assert (second.array == 2).all() and not target.array.any()


# Losses


@both_kinds
@both_sizes
def test_a_source_whose_port_refuses_is_lost_at_once(
    producer: ThreadDaemon, consumer: ThreadDaemon, way: CutProxy, ends: Ends, type: TensorType
) -> None:
    incoming = ends.into.expect(1, [consumer.tensor(type)])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(incoming.wait, 0, Abort())
        until(lambda: way.passed_bytes)
        way.close()
        with pytest.raises(MemberLostError, match="refused"):
            waiting.result(SECONDS)


@both_kinds
@both_sizes
def test_another_incarnation_behind_a_cut_is_lost_at_once(
    producer: ThreadDaemon, consumer: ThreadDaemon, way: CutProxy, ends: Ends, type: TensorType
) -> None:
    incoming = ends.into.expect(1, [consumer.tensor(type)])
    with ThreadPoolExecutor(1) as threads, thread_daemon(LIMITS) as other:
        waiting = threads.submit(incoming.wait, 0, Abort())
        until(lambda: way.passed_bytes)
        way.lead_to(other.url)
        way.cut()
        with pytest.raises(MemberLostError, match="another incarnation"):
            waiting.result(SECONDS)


@both_sizes
@pytest.mark.parametrize("kind", ["loop", "threads"])
def test_a_source_that_stays_away_is_lost_at_the_lease_s_end(
    producer: ThreadDaemon, way: CutProxy, type: TensorType, kind: str
) -> None:
    with thread_daemon(LIMITS, pool_silence_seconds=0.3, pool_lease_seconds=0.5) as consumer:
        if kind == "threads":
            consumer.exchange.use(BlockingPeers(0.3, lease_seconds=0.5))
        ends = Ends(producer, consumer, way)
        incoming = ends.into.expect(1, [consumer.tensor(type)])
        until(lambda: way.passed_bytes)
        way.refuse()
        way.cut()
        late = threading.Timer(SECONDS, (abort := Abort()).set)
        late.start()
        with pytest.raises(MemberLostError, match=way.url):
            incoming.wait(0, abort)
        late.cancel()
        late.join()
        # Another run dials anew.
        way.go_on()
        target = consumer.tensor(type)
        ends.out.offer(0, 2, producer.tensor(type, 2), Abort())
        ends.into.expect(2, [target]).wait(0, Abort())
        assert (target.array == 2).all()
        ends.close()


class Tokens:
    """The token of one daemon and the table of another, which change one after the other."""

    def __init__(self, folder: Path) -> None:
        self.table, self.file, self._now = folder / "tokens.toml", folder / "token", ""
        self.renew_table()
        self.renew_file()

    def renew_table(self) -> None:
        """Lets the table know another token only."""
        self._now = new_token()
        row = f'[[token]]\nname = "pool"\nrights = ["use", "pool"]\nhash = "{hash_of(self._now)}"\n'
        self.table.write_text(row)
        self.table.chmod(0o600)

    def renew_file(self) -> None:
        """Gives the daemon the token of the table."""
        self.file.write_text(self._now)


def read_table(daemon: ThreadDaemon) -> None:
    async def look(inside: Daemon) -> None:
        inside.watch.look(at_once=True)

    assert daemon._daemon is not None
    daemon.call(look(daemon._daemon))


def refusals(daemon: ThreadDaemon) -> int:
    """The calls that it refused for their token."""
    assert daemon._daemon is not None
    found: int = daemon._daemon._slot.refused[UnauthenticatedError.reason]
    return found


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path)


def users_of(consumer: ThreadDaemon, tokens: Tokens, kind: str, lease_seconds: float) -> None:
    if kind == "threads":
        shown = PoolCredentials(str(tokens.file))
        consumer.exchange.use(BlockingPeers(0.5, shown=shown, lease_seconds=lease_seconds))


@pytest.mark.parametrize("kind", ["loop", "threads"])
@pytest.mark.parametrize("type", [SMALL, LARGE], ids=["small", "large"])
def test_a_connection_is_made_again_with_the_token_of_that_time(
    tokens: Tokens, type: TensorType, kind: str
) -> None:
    """The table changes first: what is refused meanwhile is tried again."""
    with (
        thread_daemon(LIMITS, **LEASE, tokens=str(tokens.table)) as producer,
        thread_daemon(LIMITS, **LEASE, pool_token=str(tokens.file)) as consumer,
        cut_proxy(producer.url) as way,
    ):
        users_of(consumer, tokens, kind, 20.0)
        ends = Ends(producer, consumer, way)
        for run in (0, 1, 2, 3):
            source, target = numbered(producer, type, run), consumer.tensor(type)
            if run:
                tokens.renew_table()
                read_table(producer)
            before = refusals(producer)
            incoming = ends.into.expect(run, [target])
            incoming.ask_ahead()
            if run:
                # Without a cut, a call on the connection with the old token is refused.
                if type is SMALL or run == 2:
                    way.cut()
                until(lambda: refusals(producer) >= before + 2)  # noqa: B023
                tokens.renew_file()
            ends.out.offer(0, run, source, Abort())
            incoming.wait(0, Abort())
            assert np.array_equal(target.array, source.array)
            ends.out.end(run)
            ends.into.end(run)
        ends.close()


@pytest.mark.parametrize("kind", ["loop", "threads"])
def test_a_token_that_stays_unknown_is_the_error_at_the_lease_s_end(tokens: Tokens, kind: str) -> None:
    with (
        thread_daemon(LIMITS, **LEASE, tokens=str(tokens.table)) as producer,
        thread_daemon(
            LIMITS, pool_silence_seconds=0.5, pool_lease_seconds=0.5, pool_token=str(tokens.file)
        ) as consumer,
        cut_proxy(producer.url) as way,
    ):
        users_of(consumer, tokens, kind, 0.5)
        ends = Ends(producer, consumer, way)
        ends.out.offer(0, 1, numbered(producer, SMALL, 1), Abort())
        ends.into.expect(1, [consumer.tensor(SMALL)]).wait(0, Abort())
        tokens.renew_table()
        read_table(producer)
        incoming = ends.into.expect(2, [consumer.tensor(SMALL)])
        incoming.ask_ahead()
        way.cut()
        with pytest.raises(PermissionDeniedError, match="refuses to exchange.*does not know this token"):
            incoming.wait(0, Abort())
        assert refusals(producer) > 1
        ends.close()


def test_a_token_that_a_new_link_shows_in_vain_is_an_error_at_once(tokens: Tokens) -> None:
    tokens.renew_table()
    with (
        thread_daemon(LIMITS, **LEASE, tokens=str(tokens.table)) as producer,
        thread_daemon(LIMITS, **LEASE, pool_token=str(tokens.file)) as consumer,
        cut_proxy(producer.url) as way,
    ):
        ends = Ends(producer, consumer, way)
        with pytest.raises(PermissionDeniedError, match="refuses to exchange values"):
            ends.into.expect(1, [consumer.tensor(SMALL)]).wait(0, Abort())
        assert refusals(producer) == 1
        ends.close()
