"""The exchange of one daemon: edges that are open, who waits at them, and what is held for others.

Any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TypeAlias, TypeVar
from weakref import WeakSet

from heliograph_backends.contract import Abort, Tensor, access
from heliograph_proto.codec.bulk import encode_download
from heliograph_proto.errors import (
    CancelledError,
    HandleExistsError,
    HeliographError,
    InternalError,
    UnavailableError,
)
from heliograph_proto.plans import Edge, Partition, PeerSource
from heliograph_proto.sessions import Limits, PeerTraffic
from heliograph_server.exchange.incoming import Done, IncomingValue, PeerLinks, RunIncomingValues, Sink
from heliograph_server.exchange.ledger import (
    Disposition,
    EdgeRefusal,
    Ledger,
    Payload,
    RefusalReason,
    Waiter,
    ended,
    refusal,
)
from heliograph_server.exchange.outgoing import (
    SMALL_BYTES,
    OutgoingBudget,
    OutgoingValue,
    PeerCounter,
    copy_out,
    parts_of,
)
from heliograph_server.exchange.prefetch import PrefetchedValue, Prefetches, cancel, claimed
from heliograph_server.exchange.relay import RelayedValue, no_link

logger = logging.getLogger(__name__)

#: The most bytes of a tensor that are between being read and being sent, where it is given by itself.
HANDED_BYTES = 16 * 2**20

Wanted = TypeVar("Wanted", bound="IncomingValue | PrefetchedValue")

#: Who asks for a value is given it, or told why not, once, from any thread.
PullCallback: TypeAlias = Callable[[OutgoingValue | HeliographError], None]
#: Who brings one is told where it belongs, or why not.
PushCallback: TypeAlias = Callable[[IncomingValue | HeliographError], None]


class LiveExchange:
    """An `Exchange`. Thread-safe. `peers`: how values are fetched and brought. No more than
    `Limits.in_flight_bytes` are held for others, but for the oldest run of each partition."""

    def __init__(self, limits: Limits | None = None, peers: PeerLinks | None = None) -> None:
        limits = limits or Limits()
        self.chunk_bytes = limits.chunk_bytes
        self.budget = OutgoingBudget(limits.in_flight_bytes)
        self._peers = peers
        self._lock = threading.Lock()
        self._departures: dict[bytes, Ledger[OutgoingValue, PullCallback]] = {}
        self._arrivals: dict[bytes, Ledger[IncomingValue, PushCallback]] = {}
        self._ports: set[LivePorts] = set()
        self.counter = PeerCounter()
        self._told: set[RefusalReason] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<LiveExchange of {self.open_edges} ends, {self.budget}>"

    def use(self, peers: PeerLinks) -> None:
        """From now on values are fetched and brought by these, which are closed with the exchange."""
        self._peers = peers

    @property
    def traffic(self) -> PeerTraffic:
        """All so far."""
        return self.counter.now

    @property
    def open_edges(self) -> int:
        """How many ends of edges are open."""
        return len(self._departures) + len(self._arrivals)

    def open(self, partition: Partition, copies: int = 1) -> LivePorts:
        """As `Exchange.open`. `copies`: how many runs may be under way at once."""
        pushed = [one.edge for one in partition.arrivals if one.source is None]
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the exchange is closed", advice="the daemon is shutting down")
            _check_free(self._departures, [one.edge for one in partition.departures])
            _check_free(self._arrivals, pushed)
            self._departures |= {one.edge.name: Ledger(one.edge) for one in partition.departures}
            self._arrivals |= {edge.name: Ledger(edge) for edge in pushed}
            ports = LivePorts(self, partition, copies)
            self._ports.add(ports)
        return ports

    # Other daemons, by way of the service

    def ask(self, name: bytes, run: int, capability: bytes, on_value: PullCallback) -> None:
        """Somebody wants the value of an edge and run. He is told, perhaps before this returns."""
        with self._lock:
            found = self._show(self._departures.get(name), run, capability, on_value)
        if found is not None:
            on_value(found)

    def withdraw(self, name: bytes, run: int, on_value: PullCallback, *, again: bool = False) -> bool:
        """Who asked waits no more. Whether he did, and will not be told anything now. `again`: he may come
        back."""
        with self._lock:
            ledger = self._departures.get(name)
            return ledger is not None and ledger.withdraw(run, on_value, again=again)

    def bring(self, name: bytes, run: int, capability: bytes, on_place: PushCallback) -> None:
        """Somebody brings the value of an edge and run. He is told where it belongs, perhaps before this
        returns."""
        with self._lock:
            found = self._show(self._arrivals.get(name), run, capability, on_place)
        if found is not None:
            on_place(found)

    def leave(self, name: bytes, run: int, on_place: PushCallback, *, again: bool = False) -> None:
        """Who brought one does not wait for its place any more. `again`: he may come back."""
        with self._lock:
            if (ledger := self._arrivals.get(name)) is not None:
                ledger.withdraw(run, on_place, again=again)

    def _show(
        self, ledger: Ledger[Payload, Waiter] | None, run: int, capability: bytes, waiter: Waiter
    ) -> Payload | HeliographError | None:
        found = refusal(RefusalReason.UNKNOWN) if ledger is None else ledger.show(run, capability, waiter)
        if not isinstance(found, EdgeRefusal):
            return found
        if found.why is not None:
            self._note(found.why)
        return found.error

    def _note(self, why: RefusalReason) -> None:
        """Once for each reason: whoever guesses fills no log."""
        self.counter.refused()
        if why not in self._told:
            self._told.add(why)
            logger.warning(
                "another daemon showed a capability that is %s; more of these are not logged", why.value
            )

    # The ports' side

    def give(self, edge: Edge, run: int, value: OutgoingValue) -> None:
        """A value is there for whoever asks."""
        with self._lock:
            ledger = self._departures.get(edge.name)
            on_value = ledger.give(run, value) if ledger is not None else Disposition.REFUSED
            late = ledger.expired() if ledger is not None else ([], [])
        _expire(late)
        if on_value is Disposition.REFUSED:
            value.drop()
        elif not isinstance(on_value, Disposition):
            on_value(value)

    def shed(self, edge: Edge, most: int) -> None:
        """Values of an edge that nobody came for are given up, but for the newest."""
        with self._lock:
            ledger = self._departures.get(edge.name)
            old = ledger.shed(most) if ledger is not None else []
        for value in old:
            value.drop()

    def await_pushed(self, landing: IncomingValue) -> None:
        """A place is there for whoever brings its value."""
        with self._lock:
            ledger = self._arrivals.get(landing.edge.name)
            on_place = ledger.give(landing.run, landing) if ledger is not None else Disposition.REFUSED
            late = ledger.expired() if ledger is not None else ([], [])
        _expire(late)
        if on_place is Disposition.REFUSED:
            landing.fail(CancelledError("the run is over"))
        elif not isinstance(on_place, Disposition):
            on_place(landing)

    def pull(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """Begins to fetch values."""
        if self._peers is None:
            for sink in sinks:
                sink.fail(no_link())
        else:
            self._peers.pull(source, sinks)

    def forget(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """Nobody waits for these."""
        if self._peers is not None:
            self._peers.forget(source, sinks)

    # Whoever takes values to others

    def forward(self, edge: Edge, run: int, destination: PeerSource, done: Done) -> Callable[[], None]:
        """Brings the value of a departure of this exchange, once it is offered, to a daemon that does not
        reach this one. `done` is called once, from any thread. Gives what ends it early."""

        def answer(found: OutgoingValue | HeliographError) -> None:
            if isinstance(found, HeliographError):
                done(found)
            else:
                self._push(destination, edge, run, found, done)

        def cancel() -> None:
            if self.withdraw(edge.name, run, answer):
                done(CancelledError("nobody waits for this value any more"))

        self.ask(edge.name, run, edge.capability(run), answer)
        return cancel

    def relay(
        self, edge: Edge, run: int, size_bytes: int, source: PeerSource, destination: PeerSource, done: Done
    ) -> Callable[[], None]:
        """Takes a value of so many bytes from one daemon to another, which cannot reach each other. `done` is
        called once, from any thread. Gives what ends it early."""

        def relayed(error: HeliographError | None) -> None:
            if error is None:
                self.counter.relayed(size_bytes)
            done(error)

        carried = RelayedValue(edge, run, size_bytes, partial(self._push_on, destination, edge, run), relayed)

        def cancel() -> None:
            self.forget(source, [carried])
            carried.fail(CancelledError("nobody waits for this value any more"))

        self.pull(source, [carried])
        return cancel

    def _push(self, destination: PeerSource, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        size_bytes = value.size_bytes

        def pushed(error: HeliographError | None) -> None:
            if error is None:
                self.counter.sent(size_bytes)
            done(error)

        self._push_on(destination, edge, run, value, pushed)

    def _push_on(
        self, destination: PeerSource, edge: Edge, run: int, value: OutgoingValue, done: Done
    ) -> None:
        if self._peers is None:
            value.drop()
            done(no_link())
        else:
            self._peers.push(destination, edge, run, value, done)

    def end(self, partition: Partition, run: int, error: HeliographError | None) -> None:
        """A run of a partition is over."""
        with self._lock:
            found: list[object] = []
            late: list[tuple[Sequence[object], Sequence[object]]] = []
            for ledger in self._departing(partition):
                found.append(ledger.end(run, error, keeps=True))
                late.append(ledger.expired())
            for other in self._arriving(partition):
                found.append(other.end(run, error, keeps=False))
                late.append(other.expired())
        for one in found:
            _tell(one, ended(error))
        for waiters, payloads in late:
            _expire((waiters, payloads))

    def close_ports(self, ports: LivePorts, partition: Partition, error: HeliographError | None) -> None:
        """A partition is gone."""
        with self._lock:
            if ports not in self._ports:
                return
            self._ports.discard(ports)
            found: list[tuple[Sequence[object], Sequence[object]]]
            found = [one.close() for one in self._departing(partition)]
            found += [one.close() for one in self._arriving(partition)]
            for departure in partition.departures:
                self._departures.pop(departure.edge.name, None)
            for arrival in partition.arrivals:
                if arrival.source is None:
                    self._arrivals.pop(arrival.edge.name, None)
        gone = error or CancelledError("what was to make this value is gone")
        for waiters, payloads in found:
            for one in (*waiters, *payloads):
                _tell(one, gone)

    def _departing(self, partition: Partition) -> list[Ledger[OutgoingValue, PullCallback]]:
        known = self._departures
        return [known[one.edge.name] for one in partition.departures if one.edge.name in known]

    def _arriving(self, partition: Partition) -> list[Ledger[IncomingValue, PushCallback]]:
        known = self._arrivals
        pushed = [one.edge.name for one in partition.arrivals if one.source is None]
        return [known[name] for name in pushed if name in known]

    def close(self) -> None:
        """Closes all ports and all ways to other daemons. Idempotent."""
        with self._lock:
            self._is_closed = True
            everyone = tuple(self._ports)
        for ports in everyone:
            ports.close()
        if self._peers is not None:
            self._peers.close()


def _check_free(known: Container[bytes], edges: Sequence[Edge]) -> None:
    names = [edge.name for edge in edges]
    for name in names:
        if name in known or names.count(name) > 1:
            raise HandleExistsError(f"edge {name.hex()[:8]} is open already", advice="make up a new one")


def _expire(late: tuple[Sequence[object], Sequence[object]]) -> None:
    """Tells waiters of runs that are too old, and gives up what lies there for others."""
    waiters, payloads = late
    for one in waiters:
        _tell(one, refusal(RefusalReason.EXPIRED).error)
    for one in payloads:
        _tell(one, CancelledError("the run is too old"))


def _tell(one: object, error: HeliographError) -> None:
    """Whoever waits is told why nothing comes; what nobody gets is given up."""
    if isinstance(one, OutgoingValue):
        one.drop()
    elif isinstance(one, IncomingValue):
        one.fail(error)
    elif callable(one):
        one(error)


class LivePorts:
    """A `Ports` of a live exchange."""

    def __init__(self, exchange: LiveExchange, partition: Partition, copies: int = 1) -> None:
        self._exchange = exchange
        self._partition = partition
        self._copies = copies
        self._lock = threading.Lock()
        #: Runs that have begun and not ended.
        self._runs: set[int] = set()
        #: What is asked for ahead of the runs that want it.
        self._asked = Prefetches()
        #: What is on its way, of runs that have not been closed.
        self._incoming: dict[int, RunIncomingValues] = {}
        #: Large values that somebody may be taking.
        self._values: WeakSet[OutgoingValue] = WeakSet()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<LivePorts {len(self._partition.arrivals)} in, {len(self._partition.departures)} out>"

    def expect(self, run: int, targets: Sequence[Tensor]) -> RunIncomingValues:
        """As `Ports.expect`."""
        pairs = list(zip(self._partition.arrivals, targets, strict=True))
        received = self._exchange.counter.received
        landings = [IncomingValue(arrival, run, target, received) for arrival, target in pairs]
        incoming = RunIncomingValues(landings, self._forget, partial(self._ask_ahead, run, landings))
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._runs.add(run)
                self._incoming[run] = incoming
                mine, old = self._asked.begin(run)
        if is_closed:
            incoming.close()
            return incoming
        missing = claimed(landings, mine)
        self._pull(missing)
        for landing in missing:
            if landing.source is None:
                self._exchange.await_pushed(landing)
        self._drop(old)
        return incoming

    def _ask_ahead(self, run: int, landings: Sequence[IncomingValue]) -> None:
        with self._lock:
            ahead = [] if self._is_closed else self._asked.ahead(run, landings)
        self._pull(ahead)

    def _pull(self, wanted: Sequence[Wanted]) -> None:
        for source, group in _by_source(wanted).items():
            if source is not None:
                self._exchange.pull(source, group)

    def _forget(self, landings: Sequence[IncomingValue]) -> None:
        for source, group in _by_source(landings).items():
            if source is not None:
                self._exchange.forget(source, [one.asked_as for one in group])

    def _drop(self, foretold: Sequence[PrefetchedValue]) -> None:
        """Nobody will claim these."""
        for source, group in _by_source(foretold).items():
            if source is not None:
                self._exchange.forget(source, group)
        cancel(foretold)

    def offer(self, place: int, run: int, tensor: Tensor, abort: Abort) -> None:
        """As `Ports.offer`."""
        edge = self._partition.departures[place].edge
        size_bytes = tensor.type.nbytes
        with self._lock:
            self._runs.add(run)
        budget = self._exchange.budget
        if budget.is_full_for(size_bytes):
            # The oldest run passes all the same, so what runs before it left behind must not pile up. Of
            # those that nobody came for yet, somebody may come for as many as are under way.
            self._exchange.shed(edge, self._copies)
        budget.reserve(size_bytes, abort, partial(self._is_oldest, run))
        if size_bytes <= SMALL_BYTES:
            self._offer_small(edge, run, tensor)
            return
        value = OutgoingValue(size_bytes, budget.give)
        with self._lock:
            self._values.add(value)
        self._exchange.give(edge, run, value)
        try:
            copy_out(tensor, value, self._exchange.chunk_bytes)
        except BaseException as error:
            failed = (
                error if isinstance(error, HeliographError) else InternalError(f"reading failed: {error}")
            )
            value.fail(failed)
            raise

    def offer_now(self, place: int, run: int, tensor: Tensor) -> bool:
        """As `Ports.offer_now`."""
        size_bytes = tensor.type.nbytes
        if size_bytes > SMALL_BYTES or not self._exchange.budget.reserve_now(size_bytes):
            return False
        with self._lock:
            self._runs.add(run)
        self._offer_small(self._partition.departures[place].edge, run, tensor)
        return True

    def _offer_small(self, edge: Edge, run: int, tensor: Tensor) -> None:
        try:
            data = bytes(access.read_whole(tensor))
        except BaseException:
            self._exchange.budget.give(tensor.type.nbytes)
            raise
        self._exchange.give(edge, run, OutgoingValue.of(data, self._exchange.budget.give))

    def hand_over(self, place: int, run: int, tensor: Tensor, abort: Abort) -> None:
        """Gives a departure straight from its tensor, of which little is held at a time, and returns when all
        was taken. Raises CancelledError after an abort, and when who asked has left."""
        window = OutgoingBudget(HANDED_BYTES)
        edge, size_bytes = self._partition.departures[place].edge, tensor.type.nbytes
        if size_bytes <= SMALL_BYTES:
            value = OutgoingValue.of(bytes(access.read_whole(tensor)), window.give)
            window.reserve(size_bytes, abort, bool)
            self._exchange.give(edge, run, value)
        else:
            value = OutgoingValue(size_bytes, window.give)
            with self._lock:
                self._values.add(value)
            self._exchange.give(edge, run, value)
            self._hand_pieces(tensor, value, window, abort)
        try:
            window.wait_until(lambda: value.is_taken or value.is_dropped, abort)
        except CancelledError:
            value.drop()
            raise
        if not value.is_taken:
            raise CancelledError("the other daemon left before it had taken the tensor")

    def _hand_pieces(
        self, tensor: Tensor, value: OutgoingValue, window: OutgoingBudget, abort: Abort
    ) -> None:
        try:
            for offset, data in parts_of(tensor, self._exchange.chunk_bytes):
                window.reserve(data.nbytes, abort, partial(getattr, value, "is_dropped"))
                value.put(encode_download(offset, value.size_bytes, data), data.nbytes)
                if value.is_dropped:
                    return
        except BaseException as error:
            value.fail(error if isinstance(error, HeliographError) else InternalError(f"reading: {error}"))
            raise

    def _is_oldest(self, run: int) -> bool:
        with self._lock:
            return self._is_closed or run <= min(self._runs, default=run)

    def end(self, run: int, error: HeliographError | None = None) -> None:
        """As `Ports.end`."""
        with self._lock:
            self._runs.discard(run)
            incoming = self._incoming.pop(run, None)
        if incoming is not None:
            incoming.close()
        self._exchange.end(self._partition, run, error)
        self._exchange.budget.poke()

    def close(self, error: HeliographError | None = None) -> None:
        """As `Ports.close`; `error`: what whoever still waits is told."""
        with self._lock:
            self._is_closed = True
            incoming, self._incoming = tuple(self._incoming.values()), {}
            values = tuple(self._values)
            ahead = self._asked.close()
        for one in incoming:
            one.close()
        self._drop(ahead)
        self._exchange.close_ports(self, self._partition, error)
        for value in values:
            # Also one that somebody has begun to take, and may never end to.
            value.drop()
        self._exchange.budget.poke()


def _by_source(landings: Sequence[Wanted]) -> dict[PeerSource | None, list[Wanted]]:
    found: dict[PeerSource | None, list[Wanted]] = {}
    for landing in landings:
        found.setdefault(landing.source, []).append(landing)
    return found
