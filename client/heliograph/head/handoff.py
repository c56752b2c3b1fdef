"""Copies of tensors from one daemon to another, without passing the bytes through this client."""

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
#: The time that a daemon may need beyond that of a probe.
_MORE_SECONDS = 5.0
_WHAT = "copying a tensor from daemon to daemon"


def new_edge() -> Edge:
    """Return an edge that was never used before."""
    return Edge(secrets.token_bytes(EDGE_BYTES), secrets.token_bytes(SECRET_BYTES))


def probe(session: Session, address: str, bandwidth_bytes: int = 0, seconds: float = 5.0) -> ProbeResult:
    """Make a session's daemon measure its link to another daemon, within `seconds`.

    Raises InvalidArgumentError, and UnsupportedError if the daemon exchanges no values with others.
    """
    if EXCHANGE not in session.info.features:
        raise UnsupportedError(f"{session.address} does not exchange values with others", advice="upgrade it")

    asking = ask(PROBE, ProbeRequest(address, bandwidth_bytes, max(1, int(seconds * 1000))))
    return session._shell.drive(asking, seconds + _MORE_SECONDS, f"measuring the link to {address}")


def hand_over(
    source: Tensor,
    destination: Tensor,
    address: str,
    devices: tuple[str, str] = ("", ""),
    timeout: float | None = None,
) -> None:
    """Copy a tensor of one daemon to a tensor of another, which fetches it, and wait for that.

    Args:
        address: The address of the source's daemon for the destination's daemon.
        devices: The devices of the two tensors.

    Raises InvalidArgumentError if the types differ, MemberLostError, DeadlineExceededError (the
    copy is cancelled then), and the error of the work that computes the source.
    """
    if source.type != destination.type:
        raise InvalidArgumentError(f"cannot copy {source.type} to {destination.type}: the types differ")
    deadline, edge = Deadline(timeout, _WHAT), new_edge()
    peer = PeerSource(address, source._shell.info.incarnation)
    fetch = c.FetchTensor(destination._live_handle, edge, _RUN, peer)
    with _offered(source, edge, devices[0], deadline) as pending:
        shell = destination._shell
        # A stream of its own, so that nothing else waits for the copy.
        stream = make_stream(shell, devices[1], Stream)

        def fetching() -> Procedure[None]:
            sent = shell.core.send(fetch, stream=stream._live_handle, observed=True)
            yield from observe(shell.core, sent)

        shell.drive(fetching(), deadline.remaining(), _WHAT)
        giver = source._shell
        giver.drive(wait_for(giver.core, pending), deadline.remaining(), _WHAT)


@contextmanager
def _offered(source: Tensor, edge: Edge, device: str, deadline: Deadline) -> Generator[Pending]:
    """Offer a tensor within the context. If that fails, the offer is withdrawn."""
    shell = source._shell
    stream = make_stream(shell, device, Stream)
    offer = c.OfferTensor(source._live_handle, edge, _RUN)
    pending = shell.advance(lambda: shell.core.send(offer, stream=stream._live_handle, observed=True))
    try:
        # The edge is open once the server has received the command.
        shell.drive(arrive(shell.core), deadline.remaining(), _WHAT)
        yield pending
    except BaseException as error:
        if isinstance(error, HeliographError) and pending.error is not None:
            # The reason why the destination got nothing.
            raise pending.error.at(pending.error.origin) from None
        shell.advance(lambda: shell.core.cancel(pending))
        raise
