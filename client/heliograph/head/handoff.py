"""Tensors that one daemon gives to another, without their bytes passing through this client."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from contextlib import contextmanager

from heliograph._base.streams import make_stream
from heliograph.core.effects import Procedure, ask
from heliograph.core.future import Deadline, Pending
from heliograph.core.methods import PROBE, ProbeRequest
from heliograph.device import Stream
from heliograph.procedures.transfer import arrive, observe, wait_for
from heliograph.session import Session
from heliograph.tensor import Tensor
from heliograph_proto import EXCHANGE
from heliograph_proto import commands as c
from heliograph_proto.devices import ProbeResult
from heliograph_proto.errors import HeliographError, InvalidArgumentError, UnsupportedError
from heliograph_proto.plans import EDGE_BYTES, SECRET_BYTES, Edge, PeerSource

#: Each edge is used once, so there is one run.
_RUN = 1
#: What a daemon may need beyond the time that a probe may take.
_MORE_SECONDS = 5.0
_WHAT = "copying a tensor from daemon to daemon"


def new_edge() -> Edge:
    """One that nobody has used before."""
    return Edge(secrets.token_bytes(EDGE_BYTES), secrets.token_bytes(SECRET_BYTES))


def probe(session: Session, address: str, bandwidth_bytes: int = 0, seconds: float = 5.0) -> ProbeResult:
    """Has a session's daemon measure its way to another one, within `seconds`.

    Raises InvalidArgumentError, UnsupportedError where the daemon exchanges nothing with others.
    """
    if EXCHANGE not in session.info.features:
        raise UnsupportedError(f"{session.address} exchanges nothing with other daemons", advice="upgrade it")

    asking = ask(PROBE, ProbeRequest(address, bandwidth_bytes, max(1, int(seconds * 1000))))
    return session._shell.drive(asking, seconds + _MORE_SECONDS, f"measuring the way to {address}")


def hand_over(
    source: Tensor,
    destination: Tensor,
    address: str,
    devices: tuple[str, str] = ("", ""),
    timeout: float | None = None,
) -> None:
    """Copies a tensor of one daemon to a tensor of another, which fetches it; returns when it is written.
    `address`: where the destination's daemon finds the source's; `devices`: where each of them lies.

    Raises InvalidArgumentError where the types differ, MemberLostError, DeadlineExceededError (nothing goes
    on then), and the error of what was to compute the source.
    """
    if source.type != destination.type:
        raise InvalidArgumentError(f"copy of {source.type} to {destination.type}: the types differ")
    deadline, edge = Deadline(timeout, _WHAT), new_edge()
    whence = PeerSource(address, source._shell.info.incarnation)
    fetch = c.FetchTensor(destination._live_handle, edge, _RUN, whence)
    with _offered(source, edge, devices[0], deadline) as pending:
        shell = destination._shell
        # Streams for these alone: nothing else waits until they are done.
        stream = make_stream(shell, devices[1], Stream)

        def fetching() -> Procedure[None]:
            sent = shell.core.send(fetch, stream=stream._live_handle, observed=True)
            yield from observe(shell.core, sent)

        shell.drive(fetching(), deadline.remaining(), _WHAT)
        giver = source._shell
        giver.drive(wait_for(giver.core, pending), deadline.remaining(), _WHAT)


@contextmanager
def _offered(source: Tensor, edge: Edge, device: str, deadline: Deadline) -> Generator[Pending]:
    """While a tensor may be fetched. If that fails, it is offered no more."""
    shell = source._shell
    stream = make_stream(shell, device, Stream)
    offer = c.OfferTensor(source._live_handle, edge, _RUN)
    pending = shell.advance(lambda: shell.core.send(offer, stream=stream._live_handle, observed=True))
    try:
        # The edge is open once the command has been received.
        shell.drive(arrive(shell.core), deadline.remaining(), _WHAT)
        yield pending
    except BaseException as error:
        if isinstance(error, HeliographError) and pending.error is not None:
            # Why the other side got nothing.
            raise pending.error.at(pending.error.origin) from None
        shell.advance(lambda: shell.core.cancel(pending))
        raise
