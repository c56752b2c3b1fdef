"""Sessions that go from host to host, without a network: exactly one of the two has a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from core_client import CoreClient
from state_hosts import F4, PLAN, TENSOR, X, adder
from waiting import until

from heliograph_backends.cpu.backend import CpuDevice
from heliograph_backends.registry import Registry
from heliograph_proto import FEATURES, MOVE
from heliograph_proto import commands as c
from heliograph_proto.digests import moved_secret
from heliograph_proto.errors import (
    InvalidArgumentError,
    MovedError,
    SessionClosedError,
    SnapshotFailedError,
    UnavailableError,
    UnsupportedError,
)
from heliograph_proto.sessions import Limits
from heliograph_server.resources.principals import ANYBODY
from heliograph_server.runtime.host import Host
from heliograph_server.runtime.moves import Handing
from heliograph_server.state.image import decode_image

THERE = "grpc://other:1"


class Contents:
    """The contents of a session, as the other host reads them."""

    def __init__(self, read: Callable[[bytes], Iterator[memoryview]]) -> None:
        self.read = read

    def read_all(self, digests: Sequence[bytes]) -> Iterator[memoryview]:
        return chain.from_iterable(map(self.read, digests))

    def whole(self, digest: bytes) -> bytes:
        return b"".join(map(bytes, self.read(digest)))


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, of which the first hands sessions to the second."""
    made = [Host(Registry.of(CpuDevice(threads=1, native=False))) for _ in range(2)]
    one, other = made
    for host in made:
        host.lease_seconds = 60.0

    def give(address: str, image: bytes, read: Any, limits: Limits, how: Handing) -> None:
        assert address == THERE
        other.moves.receive(decode_image(image, "here"), limits, Contents(read), how)

    one.moves.give = give
    yield one, other
    for host in made:
        host.close()


def opened(host: Host, lease_ms: int = 60_000, features: tuple[str, ...] = FEATURES) -> CoreClient:
    token = host.open_session("test", lease_ms=lease_ms, features=features).session
    return CoreClient(host=host, token=token)


def prepared(client: CoreClient) -> None:
    """Make a tensor with bytes, and a plan with a variable that was assigned."""
    client.wait(client.send(c.Allocate(TENSOR, F4)))
    client.wait(client.send(c.SetTensor(TENSOR, 0, X.tobytes())))
    client.compile(PLAN, adder())


def test_the_session_is_there_under_a_secret_that_its_client_alone_can_make(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    client = opened(one)
    prepared(client)
    went = one.moves.move(client.session, client.token, THERE)
    assert went.sequence == client.session.commands and went.sent_bytes >= X.nbytes
    with pytest.raises(MovedError) as told:
        one.session(client.token, ANYBODY)
    assert told.value.url == THERE
    with pytest.raises(SessionClosedError, match="unknown"):
        one.session(client.token, replace(ANYBODY, tenant="another"))
    for wrong in (client.token, moved_secret(client.token, b"wrong" * 4), told.value.proof):
        with pytest.raises(SessionClosedError):
            other.session(wrong, ANYBODY)
    there = CoreClient(host=other, token=moved_secret(client.token, told.value.proof))
    found = there.wait(there.send(c.GetTensor(TENSOR, 0, F4.nbytes)))
    assert np.frombuffer(found.data, np.float32).tolist() == X.tolist()
    assert there.session.has_moved_here and client.session.closed is not None


def test_a_session_that_is_not_taken_goes_on_with_the_commands_sent_meanwhile(
    hosts: tuple[Host, Host],
) -> None:
    one, other = hosts
    client = opened(one)
    prepared(client)
    sent: list[int] = []

    def give(*_: Any, **__: Any) -> None:
        sent.append(client.send(c.SetTensor(TENSOR, 0, (2 * X).tobytes())))
        with pytest.raises(UnavailableError, match="on its way"):
            one.moves.check(client.session)
        with pytest.raises(UnavailableError, match="already"):
            one.moves.move(client.session, client.token, THERE)
        raise SnapshotFailedError("no room")

    one.moves.give = give
    with pytest.raises(SnapshotFailedError, match="no room"):
        one.moves.move(client.session, client.token, THERE)
    client.wait(sent[0])
    found = client.wait(client.send(c.GetTensor(TENSOR, 0, F4.nbytes)))
    assert np.frombuffer(found.data, np.float32).tolist() == (2 * X).tolist()
    one.moves.check(client.session)
    assert not other.sessions


def test_a_command_that_comes_while_a_session_goes_is_not_done_here(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    client = opened(one)
    prepared(client)
    give = one.moves.give

    def late(*given: Any, **named: Any) -> None:
        give(*given, **named)
        client.send(c.SetTensor(TENSOR, 0, (2 * X).tobytes()))

    one.moves.give = late
    went = one.moves.move(client.session, client.token, THERE)
    assert went.sequence == client.session.commands
    with pytest.raises(MovedError) as told:
        one.session(client.token)
    there = CoreClient(host=other, token=moved_secret(client.token, told.value.proof))
    assert there.session.commands == went.sequence, "the client sends the command again"


def test_a_session_that_is_closed_while_it_goes_is_nowhere(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    client = opened(one)
    give = one.moves.give

    def closing(*given: Any, **named: Any) -> None:
        give(*given, **named)
        client.session.end()

    one.moves.give = closing
    with pytest.raises(SessionClosedError, match="on its way"):
        one.moves.move(client.session, client.token, THERE)
    assert client.session.closed is not None and one.moves.where(client.token, None) is None


def test_the_place_of_a_session_is_told_for_its_lease(hosts: tuple[Host, Host]) -> None:
    client = opened(hosts[0], lease_ms=50)
    hosts[0].moves.move(client.session, client.token, THERE)
    with pytest.raises(MovedError):
        hosts[0].session(client.token)
    until(lambda: hosts[0].moves.where(client.token, None) is None)
    with pytest.raises(SessionClosedError, match="unknown"):
        hosts[0].session(client.token)


@pytest.mark.parametrize(("lease_ms", "features"), [(0, FEATURES), (60_000, tuple(set(FEATURES) - {MOVE}))])
def test_sessions_of_older_clients_and_without_a_lease_stay(
    hosts: tuple[Host, Host], lease_ms: int, features: tuple[str, ...]
) -> None:
    client = opened(hosts[0], lease_ms, features)
    with pytest.raises(UnsupportedError, match="belongs to its connection"):
        hosts[0].moves.move(client.session, client.token, THERE)
    hosts[0].moves.send_to(THERE)
    assert hosts[0].moves.send_all(0.0)
    (found,) = hosts[0].moves.outcomes
    assert not found.moved and "belongs to its connection" in found.why


def test_an_operator_names_a_plain_address(hosts: tuple[Host, Host]) -> None:
    moves = hosts[0].moves
    for wrong in ("local:", "grpcs://other:1?token=secret", "gopher://other"):
        with pytest.raises(InvalidArgumentError) as refused:
            moves.send_to(wrong)
        assert "secret" not in str(refused.value)
    moves.send_to("other:1#cpu0")
    assert moves.target == THERE
