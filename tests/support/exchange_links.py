"""Links between exchanges of one process: pulling and pushing without a network.

The thread that has a piece carries it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from heliograph_proto.codec.bulk import decode_download
from heliograph_proto.errors import HeliographError, InternalError, MemberLostError
from heliograph_proto.plans import Edge, PeerSource
from heliograph_server.exchange.incoming import Done, IncomingValue, Sink
from heliograph_server.exchange.outgoing import OutgoingValue

if TYPE_CHECKING:
    from heliograph_server.exchange.exchange import LiveExchange


class NearPuller:
    """A `PeerLinks` between exchanges of one process, by address and incarnation.

    The thread that has a value carries it, also to a sink that is not ready.
    """

    def __init__(self, exchanges: Mapping[PeerSource, LiveExchange]) -> None:
        #: May change during use.
        self.exchanges = exchanges
        self._lock = threading.Lock()
        self._asked: dict[Sink, Callable[[OutgoingValue | HeliographError], None]] = {}

    def __repr__(self) -> str:
        return f"<NearPuller of {len(self.exchanges)}, {len(self._asked)} asked for>"

    def pull(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """As `PeerLinks.pull`."""
        found = self.exchanges.get(source)
        for sink in sinks:
            if found is None:
                sink.fail(MemberLostError(f"no daemon of this incarnation is at {source.address}"))
                continue
            answer = partial(self._answer, found, sink)
            with self._lock:
                self._asked[sink] = answer
            found.ask(sink.edge.name, sink.run, sink.edge.capability(sink.run), answer)

    def _answer(self, exchange: LiveExchange, sink: Sink, found: OutgoingValue | HeliographError) -> None:
        with self._lock:
            self._asked.pop(sink, None)
        if isinstance(found, HeliographError):
            sink.fail(found)
        else:
            carry(found, sink, partial(exchange.counter.sent, found.size_bytes))

    def forget(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """As `PeerLinks.forget`."""
        found = self.exchanges.get(source)
        for sink in sinks:
            with self._lock:
                answer = self._asked.pop(sink, None)
            if found is not None and answer is not None:
                found.withdraw(sink.edge.name, sink.run, answer)

    def push(self, destination: PeerSource, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        """As `PeerLinks.push`."""
        found = self.exchanges.get(destination)
        if found is None:
            value.drop()
            done(MemberLostError(f"no daemon of this incarnation is at {destination.address}"))
            return

        def bring(landing: IncomingValue | HeliographError) -> None:
            if isinstance(landing, HeliographError):
                value.drop()
                done(landing)
            else:
                carry(value, landing, lambda: done(landing.error))

        found.bring(edge.name, run, edge.capability(run), bring)

    def close(self) -> None:
        """As `PeerLinks.close`: there is nothing to close."""


def carry(value: OutgoingValue, sink: Sink, ended: Callable[[], None]) -> None:
    """Carry a value to its sink as far as it is available; the thread that makes the next piece
    goes on. What arrived is acknowledged at once.

    `ended` is called at the end, also after a failure.
    """
    try:
        while not value.is_taken:
            piece = value.piece(sink.received_bytes, partial(carry, value, sink, ended))
            if piece is None:
                return
            found = decode_download(piece.message)
            if not sink.write(found.offset_bytes, found.data):
                value.drop()
                break
            value.acknowledge(found.offset_bytes + found.data.nbytes)
        else:
            sink.finish()
    except HeliographError as error:
        value.drop()
        sink.fail(error)
    except Exception as error:
        value.drop()
        sink.fail(InternalError(f"a value could not be carried: {error}"))
    ended()
