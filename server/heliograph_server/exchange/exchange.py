"""The exchange of one daemon: open edges, the requests that wait at them, and the values held for
other daemons.

Everything here may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

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
from heliograph_server.exchange import outgoing
from heliograph_server.exchange.edges import LATE_STEPS
from heliograph_server.exchange.incoming import Done, IncomingValue, PeerLinks, RunIncomingValues, Sink
from heliograph_server.exchange.ledger import (
    KEPT_RUNS,
    Disposition,
    EdgeRefusal,
    Ledger,
    Payload,
    RefusalReason,
    Superseded,
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
from heliograph_server.exchange.prefetch import PrefetchedValue, Prefetches, claimed
from heliograph_server.exchange.relay import RelayedValue, no_link
from heliograph_server.resources.peer_rules import ANY, PeerRules

logger = logging.getLogger(__name__)

#: The most bytes of a tensor between being read and being sent, when it is handed over by itself.
HANDED_BYTES = 16 * 2**20

Pulled = TypeVar("Pulled", bound="IncomingValue | PrefetchedValue")

#: Receives the requested value, or an error, once, from any thread.
PullCallback: TypeAlias = Callable[[OutgoingValue | HeliographError], None]
#: Receives the place for a value that another daemon pushes, or an error, once, from any thread.
PushCallback: TypeAlias = Callable[[IncomingValue | HeliographError], None]


class LiveExchange:
    """The edges of one daemon. Thread-safe.

    At most `Limits.in_flight_bytes` are held for other daemons, except for the oldest run of each
    partition. `peers` are the links that fetch and push values.
    """

    def __init__(self, limits: Limits | None = None, peers: PeerLinks | None = None) -> None:
        limits = limits or Limits()
        self.chunk_bytes = limits.chunk_bytes
        self.budget = OutgoingBudget(limits.in_flight_bytes)
        self._peers = peers
        #: The daemons that sessions may name.
        self.rules: PeerRules = ANY
        self._lock = threading.Lock()
        self._departures: dict[bytes, Ledger[OutgoingValue, PullCallback]] = {}
        self._arrivals: dict[bytes, Ledger[IncomingValue, PushCallback]] = {}
        self._ports: set[LivePorts] = set()
        self.counter = PeerCounter()
        self._logged_reasons: set[RefusalReason] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<LiveExchange of {self.open_edges} ends, {self.budget}>"

    def use(self, peers: PeerLinks) -> None:
        """Fetch and push values by these links from now on. They are closed with the exchange."""
        self._peers = peers

    @property
    def traffic(self) -> PeerTraffic:
        """The totals so far."""
        return self.counter.now

    @property
    def open_edges(self) -> int:
        """The number of open ends of edges."""
        return len(self._departures) + len(self._arrivals)

    def open(self, partition: Partition, copies: int = 1) -> LivePorts:
        """Open the edges of a partition, of which `copies` runs may be in progress at once.

        Raises HandleExistsError for an edge that is open already, and UnavailableError after
        `close`.
        """
        pushed = [arrival.edge for arrival in partition.arrivals if arrival.source is None]
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the exchange is closed", advice="the daemon is shutting down")
            _check_free(self._departures, [one.edge for one in partition.departures])
            _check_free(self._arrivals, pushed)
            kept_runs = max(copies, KEPT_RUNS)
            self._departures |= {one.edge.name: Ledger(one.edge, kept_runs) for one in partition.departures}
            self._arrivals |= {edge.name: Ledger(edge) for edge in pushed}
            ports = LivePorts(self, partition, copies)
            self._ports.add(ports)
        return ports

    # Called by the service, for other daemons

    def ask(self, name: bytes, run: int, capability: bytes, on_value: PullCallback, attempt: int = 0) -> None:
        """Register a request for the value of an edge in a run. The callback may be called before
        this returns. A request with a larger attempt takes the place of an earlier one."""
        with self._lock:
            found = self._show(self._departures.get(name), run, capability, on_value, attempt)
            if isinstance(found, OutgoingValue) and found.is_taken:
                found = self._refused(RefusalReason.USED)
        _answer(found, on_value)

    def received(
        self, name: bytes, run: int, capability: bytes, received_bytes: int, *, unneeded: bool = False
    ) -> None:
        """Note that another daemon has so many bytes of a value; and `unneeded`, that it needs no
        more. Ignored unless it may have the value."""
        found: object = None
        with self._lock:
            ledger = self._departures.get(name)
            value = ledger.matched(run, capability) if ledger is not None else None
            if ledger is not None and unneeded:
                found = ledger.abandon(run, capability)
        if value is not None:
            value.acknowledge(received_bytes)
        _settle(found, outgoing.unneeded())

    def withdraw(self, name: bytes, run: int, on_value: PullCallback, *, again: bool = False) -> bool:
        """Cancel a request. Return True if it was waiting; then its callback is not called.

        `again`: the same daemon may ask again.
        """
        with self._lock:
            ledger = self._departures.get(name)
            return ledger is not None and ledger.withdraw(run, on_value, again=again)

    def bring(
        self, name: bytes, run: int, capability: bytes, on_place: PushCallback, attempt: int = 0
    ) -> None:
        """Register another daemon's offer of a value. The callback receives its place, perhaps
        before this returns. An offer with a larger attempt takes the place of an earlier one."""
        with self._lock:
            found = self._show(self._arrivals.get(name), run, capability, on_place, attempt)
        _answer(found, on_place)

    def leave(self, name: bytes, run: int, on_place: PushCallback, *, again: bool = False) -> None:
        """Cancel an offer that waits for its place. `again`: the same daemon may offer it again."""
        with self._lock:
            if (ledger := self._arrivals.get(name)) is not None:
                ledger.withdraw(run, on_place, again=again)

    def _show(
        self,
        ledger: Ledger[Payload, Waiter] | None,
        run: int,
        capability: bytes,
        waiter: Waiter,
        attempt: int,
    ) -> Payload | HeliographError | Superseded[Waiter] | None:
        if ledger is None:
            return self._refused(RefusalReason.UNKNOWN)
        found = ledger.show(run, capability, waiter, attempt)
        if not isinstance(found, EdgeRefusal):
            return found
        return found.error if found.reason is None else self._refused(found.reason)

    def _refused(self, reason: RefusalReason) -> HeliographError:
        self.counter.refused()
        # Each reason is logged once, so that guesses cannot fill the log.
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            logger.warning(
                "another daemon presented a capability that is %s; further ones are not logged",
                reason.value,
            )
        return refusal(reason).error

    # Called by the ports

    def give(self, edge: Edge, run: int, value: OutgoingValue) -> None:
        """Make a value available to the daemon that requests it."""
        with self._lock:
            ledger = self._departures.get(edge.name)
            on_value = ledger.give(run, value) if ledger is not None else Disposition.REFUSED
        if on_value is Disposition.REFUSED:
            value.drop()
        elif not isinstance(on_value, Disposition):
            on_value(value)
        # The value goes first: the other daemon may wait for it.
        if ledger is not None:
            with self._lock:
                late = ledger.expired()
            _expire(late)

    def shed(self, edge: Edge, most: int) -> None:
        """Drop the values of an edge that were not requested, except for the newest `most`."""
        with self._lock:
            ledger = self._departures.get(edge.name)
            old = ledger.shed(most) if ledger is not None else []
        for value in old:
            value.drop()

    def await_pushed(self, value: IncomingValue) -> None:
        """Make a place available to the daemon that pushes its value."""
        with self._lock:
            ledger = self._arrivals.get(value.edge.name)
            on_place = ledger.give(value.run, value) if ledger is not None else Disposition.REFUSED
            late = ledger.expired() if ledger is not None else ([], [])
        _expire(late)
        if on_place is Disposition.REFUSED:
            value.fail(CancelledError("the run is over"))
        elif not isinstance(on_place, Disposition):
            on_place(value)

    def pull(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """Begin to fetch values."""
        if self._peers is None:
            for sink in sinks:
                sink.fail(no_link())
        else:
            self._peers.pull(source, sinks)

    def forget(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """Cancel the fetching of values."""
        if self._peers is not None:
            self._peers.forget(source, sinks)

    # Called by the service, to carry values to other daemons

    def forward(self, edge: Edge, run: int, destination: PeerSource, done: Done) -> Callable[[], None]:
        """Push the value of a departure, once it is offered, to a daemon that cannot reach this
        one.

        `done` is called once, from any thread. Return a function that cancels the push.
        """

        def answer(found: OutgoingValue | HeliographError) -> None:
            if isinstance(found, HeliographError):
                done(found)
            else:
                size_bytes = found.size_bytes
                self._push(destination, edge, run, found, partial(pushed, size_bytes))

        def pushed(size_bytes: int, error: HeliographError | None) -> None:
            if error is None:
                self.counter.sent(size_bytes)
            done(error)

        def cancel() -> None:
            if self.withdraw(edge.name, run, answer):
                done(outgoing.unneeded())

        self.ask(edge.name, run, edge.capability(run), answer)
        return cancel

    def relay(
        self, edge: Edge, run: int, size_bytes: int, source: PeerSource, destination: PeerSource, done: Done
    ) -> Callable[[], None]:
        """Carry a value of `size_bytes` between two daemons that cannot reach each other.

        `done` is called once, from any thread. Return a function that cancels the relay.
        """

        def relayed(error: HeliographError | None) -> None:
            if error is None:
                self.counter.relayed(size_bytes)
            done(error)

        value = RelayedValue(edge, run, size_bytes, partial(self._push, destination, edge, run), relayed)

        def cancel() -> None:
            self.forget(source, [value])
            value.fail(outgoing.unneeded())

        self.pull(source, [value])
        return cancel

    def _push(self, destination: PeerSource, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        if self._peers is None:
            value.drop()
            done(no_link())
        else:
            self._peers.push(destination, edge, run, value, done)

    def end(self, partition: Partition, run: int, error: HeliographError | None) -> None:
        """End a run of a partition."""
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
            _settle(one, ended(error))
        for waiters, payloads in late:
            _expire((waiters, payloads))

    def close_ports(self, ports: LivePorts, partition: Partition, error: HeliographError | None) -> None:
        """Close the ends of a partition's edges. Requests that wait receive `error`."""
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
        gone = error or CancelledError("the plan that makes this value is gone")
        for waiters, payloads in found:
            for one in (*waiters, *payloads):
                _settle(one, gone)

    def _departing(self, partition: Partition) -> list[Ledger[OutgoingValue, PullCallback]]:
        known = self._departures
        return [known[one.edge.name] for one in partition.departures if one.edge.name in known]

    def _arriving(self, partition: Partition) -> list[Ledger[IncomingValue, PushCallback]]:
        known = self._arrivals
        pushed = [one.edge.name for one in partition.arrivals if one.source is None]
        return [known[name] for name in pushed if name in known]

    def close(self) -> None:
        """Close all ports, and all links to other daemons. Idempotent."""
        with self._lock:
            self._is_closed = True
            open_ports = tuple(self._ports)
        for ports in open_ports:
            ports.close()
        if self._peers is not None:
            self._peers.close()


def _answer(found: object, waiter: Callable[[Any], None]) -> None:
    """Give a waiter what it gets at once. An earlier one whose place it takes gets an error."""
    if isinstance(found, Superseded):
        found.earlier(refusal(RefusalReason.USED).error)
    elif found is not None:
        waiter(found)


def _check_free(known: Container[bytes], edges: Sequence[Edge]) -> None:
    names = [edge.name for edge in edges]
    for name in names:
        if name in known or names.count(name) > 1:
            raise HandleExistsError(f"edge {name.hex()[:8]} is open already", advice="create a new one")


def _expire(late: tuple[Sequence[object], Sequence[object]]) -> None:
    """Fail the requests of runs that are too old, and drop their values."""
    waiters, payloads = late
    for one in waiters:
        _settle(one, refusal(RefusalReason.EXPIRED).error)
    for one in payloads:
        _settle(one, CancelledError("the run is too old"))


def _settle(one: object, error: HeliographError) -> None:
    """Fail a request or a place, or drop a value."""
    if isinstance(one, OutgoingValue):
        one.drop()
    elif isinstance(one, IncomingValue):
        one.fail(error)
    elif callable(one):
        one(error)


class LivePorts:
    """The `EdgePorts` of a `LiveExchange`."""

    def __init__(self, exchange: LiveExchange, partition: Partition, copies: int = 1) -> None:
        self._exchange = exchange
        self._partition = partition
        self._copies = copies
        self._lock = threading.Lock()
        #: Runs in progress.
        self._runs: set[int] = set()
        #: The last run that is known to follow; see `EdgePorts.expect_runs`.
        self._last_run = 0
        #: Requests sent ahead of their runs.
        self._prefetches = Prefetches()
        #: The arrivals of runs in progress.
        self._incoming: dict[int, RunIncomingValues] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<LivePorts {len(self._partition.arrivals)} in, {len(self._partition.departures)} out>"

    def expect(
        self,
        run: int,
        targets: Sequence[Tensor],
        places: Sequence[int] | None = None,
        *,
        is_awaited: bool = False,
    ) -> RunIncomingValues:
        """As `EdgePorts.expect`. `is_awaited`: see `Sink.is_awaited`."""
        arrivals = self._partition.arrivals
        asked = arrivals if places is None else [arrivals[place] for place in places]
        if not asked:
            with self._lock:
                self._runs.add(run)
            return RunIncomingValues((), self._forget, lambda: None)
        pairs = list(zip(asked, targets, strict=True))
        received = self._exchange.counter.received
        values = [IncomingValue(one, run, target, received, is_awaited=is_awaited) for one, target in pairs]
        incoming = RunIncomingValues(values, self._forget, partial(self._ask_ahead, run, values))
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._runs.add(run)
                self._incoming[run] = incoming
                prefetched, old = self._prefetches.begin(run)
        if is_closed:
            incoming.close()
            return incoming
        missing = claimed(values, prefetched)
        self._pull(missing)
        for value in missing:
            if value.source is None:
                self._exchange.await_pushed(value)
        self._drop(old)
        return incoming

    def _ask_ahead(self, run: int, values: Sequence[IncomingValue]) -> None:
        with self._lock:
            ahead = [] if self._is_closed else self._prefetches.ahead(run, values, self._last_run)
        self._pull(ahead)

    def _pull(self, values: Sequence[Pulled]) -> None:
        for source, group in _by_source(values).items():
            self._exchange.pull(source, group)

    def _forget(self, values: Sequence[IncomingValue]) -> None:
        for source, group in _by_source(values).items():
            self._exchange.forget(source, [one.asked_as for one in group])

    def _drop(self, prefetched: Sequence[PrefetchedValue]) -> None:
        for source, group in _by_source(prefetched).items():
            self._exchange.forget(source, group)
        for one in prefetched:
            one.fail(outgoing.unneeded())

    def offer(self, place: int, run: int, tensor: Tensor, abort: Abort) -> None:
        """As `EdgePorts.offer`."""
        edge = self._partition.departures[place].edge
        size_bytes = tensor.type.nbytes
        with self._lock:
            self._runs.add(run)
        budget = self._exchange.budget
        if budget.is_full_for(size_bytes):
            # The oldest run never waits, so the values that earlier runs left behind must not pile
            # up. Keep as many as there are runs in progress, or steps between the daemons of a
            # loop: others may still request those.
            self._exchange.shed(edge, self._copies if run > self._last_run else LATE_STEPS)
        budget.reserve(size_bytes, abort, partial(self._is_oldest, run))
        if size_bytes <= SMALL_BYTES:
            self._offer_small(edge, run, tensor)
            return
        value = OutgoingValue(size_bytes, budget.give)
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
        """As `EdgePorts.offer_now`."""
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
        """Hand over a departure straight from its tensor, and return when all of it is there.

        At most HANDED_BYTES are held at a time. Raises CancelledError after an abort, or when the
        other daemon leaves.
        """
        window = OutgoingBudget(HANDED_BYTES)
        edge, size_bytes = self._partition.departures[place].edge, tensor.type.nbytes
        if size_bytes <= SMALL_BYTES:
            value = OutgoingValue.of(bytes(access.read_whole(tensor)), window.give)
            window.reserve(size_bytes, abort, bool)
            self._exchange.give(edge, run, value)
        else:
            value = OutgoingValue(size_bytes, window.give)
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

    def expect_runs(self, last: int) -> None:
        """As `EdgePorts.expect_runs`."""
        with self._lock:
            self._last_run = last

    def leave(self, run: int) -> None:
        """As `EdgePorts.leave`."""
        with self._lock:
            self._runs.discard(run)
            incoming = self._incoming.pop(run, None)
        if incoming is not None:
            incoming.close()

    def end(self, run: int, error: HeliographError | None = None) -> None:
        """As `EdgePorts.end`."""
        self.leave(run)
        self._exchange.end(self._partition, run, error)
        self._exchange.budget.poke()

    def close(self, error: HeliographError | None = None) -> None:
        """As `EdgePorts.close`. Requests that still wait receive `error`."""
        with self._lock:
            self._is_closed = True
            incoming, self._incoming = tuple(self._incoming.values()), {}
            ahead = self._prefetches.close()
        for one in incoming:
            one.close()
        self._drop(ahead)
        self._exchange.close_ports(self, self._partition, error)
        self._exchange.budget.poke()


def _by_source(values: Sequence[Pulled]) -> dict[PeerSource, list[Pulled]]:
    """Values by the daemon to fetch them from. Omits those that the other daemon pushes."""
    found: dict[PeerSource, list[Pulled]] = {}
    for value in values:
        if value.source is not None:
            found.setdefault(value.source, []).append(value)
    return found
