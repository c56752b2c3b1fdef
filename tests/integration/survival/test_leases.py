"""Leases as a daemon keeps them, seen through clients that speak the protocol themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from cutting import cut_proxy
from daemon_threads import ThreadDaemon, thread_daemon
from surviving import ONE, counting
from waiting import until

import heliograph as hg
from heliograph.transport.handshake import typed_error
from heliograph_proto import FEATURES, VERSION_MAX
from heliograph_proto import commands as c
from heliograph_proto.addresses import parse_address
from heliograph_proto.codec.inline_runs import CompletionReader, encode_commands, encode_first
from heliograph_proto.v1 import session_pb2

SECONDS = 30.0


@pytest.fixture
def daemon() -> Iterator[ThreadDaemon]:
    with thread_daemon() as made:
        yield made


class Raw:
    """A client of one session, stream by stream."""

    def __init__(self, daemon: ThreadDaemon, lease_ms: int = 60_000) -> None:
        self.daemon = daemon
        self._channels: list[Any] = []
        self._streams: list[RawStream] = []
        opening: Any = self.channel().unary_unary("/heliograph.v1.SessionService/Open")
        request = session_pb2.OpenRequest(
            version_min=1, version_max=VERSION_MAX, features=FEATURES, lease_ms=lease_ms
        )
        self.opened = session_pb2.OpenResponse.FromString(opening(request.SerializeToString()))
        self.session = self.opened.session

    def channel(self) -> Any:
        made = grpc.insecure_channel(
            self.daemon.url.removeprefix("grpc://"), [("grpc.use_local_subchannel_pool", 1)]
        )
        self._channels.append(made)
        return made

    def stream(self, attach: c.Attach | None = None, session: bytes | None = None) -> RawStream:
        made = RawStream(self, attach, self.session if session is None else session)
        self._streams.append(made)
        return made

    def close(self) -> None:
        for stream in self._streams:
            stream.cut()
        for one in self._channels:
            one.close()


class RawStream:
    """One command stream, on a channel of its own."""

    def __init__(self, client: Raw, attach: c.Attach | None, session: bytes) -> None:
        from queue import SimpleQueue

        self._channel = client.channel()
        self._sent: SimpleQueue[bytes | None] = SimpleQueue()
        self._sent.put(encode_first(session, attach=attach))
        execute: Any = self._channel.stream_stream("/heliograph.v1.CommandService/Execute")
        self._call = execute(iter(self._sent.get, None), timeout=SECONDS)
        self._reader = CompletionReader()
        self._address = parse_address(client.daemon.url)

    def send(self, first: int, last: int, told: c.Acknowledged | None = None) -> None:
        """Send commands that have to be listed."""
        numbers = range(first, last + 1)
        commands = [c.Command(one, c.Synchronize(), notify=True) for one in numbers]
        self._sent.put(encode_commands(commands, told))

    def read(self) -> c.CompletionBatch:
        try:
            return self._reader.read(next(self._call))
        except grpc.RpcError as error:
            raise typed_error(error, self._address, "read") from None

    def through(self, sequence: int) -> int:
        """Read until a command is acknowledged; return the number of messages."""
        count = 0
        while True:
            count += 1
            if self.read().completed_through >= sequence:
                return count

    def cut(self) -> None:
        self._channel.close()
        self._sent.put(None)

    def half_close(self) -> None:
        self._sent.put(None)


@pytest.fixture
def client(daemon: ThreadDaemon) -> Iterator[Raw]:
    made = Raw(daemon)
    yield made
    made.close()
    daemon.host.lease_seconds = 0.0


def detached(client: Raw) -> None:
    until(lambda: any(one.is_detached for one in client.daemon.host.sessions))


def gone(client: Raw) -> None:
    until(lambda: not client.daemon.host.sessions)


@pytest.mark.parametrize(("wish", "granted"), [(0, 0), (5_000, 5_000), (10**9, 60_000)])
def test_a_client_gets_what_it_wishes_for_and_the_operator_allows(
    daemon: ThreadDaemon, wish: int, granted: int
) -> None:
    client = Raw(daemon, wish)
    assert client.opened.lease_ms == granted
    client.close()


def test_an_operator_changes_the_lease_of_later_sessions(daemon: ThreadDaemon) -> None:
    before = Raw(daemon)
    daemon.change(lease=7.0)
    after = Raw(daemon)
    assert (before.opened.lease_ms, after.opened.lease_ms) == (60_000, 7_000)
    before.close()
    after.close()


def attached(stream: RawStream) -> c.Attached:
    """The answer to an attach, of a daemon that was not restarted."""
    found = stream.read().attached
    assert found is not None and found.incarnation and not found.restored
    return replace(found, incarnation=b"")


def test_what_was_not_received_comes_again_byte_for_byte(client: Raw) -> None:
    first = client.stream()
    first.send(1, 3)
    received = first.through(3)
    first.send(4, 6)
    first.through(6)
    first.cut()
    detached(client)
    second = client.stream(c.Attach(received))
    assert attached(second) == c.Attached(6, received + 1)
    second.through(6)
    second.send(7, 7)
    second.through(7)


def test_commands_are_taken_once(client: Raw) -> None:
    first = client.stream()
    first.send(1, 2)
    first.through(2)
    first.cut()
    detached(client)
    second = client.stream(c.Attach(0))
    assert attached(second) == c.Attached(2, 1)
    second.send(2, 2)
    with pytest.raises(hg.ProtocolError, match="command 2 came after command 2"):
        for _ in range(10):
            second.read()
    gone(client)


def test_an_attach_ends_the_stream_that_is_there(client: Raw) -> None:
    first = client.stream()
    first.send(1, 1)
    received = first.through(1)
    second = client.stream(c.Attach(received))
    assert second.read().attached is not None
    with pytest.raises(hg.HandleExistsError, match="another connection has attached"):
        first.read()
    second.send(2, 2)
    second.through(2)
    assert not client.daemon.host.sessions[0].is_detached


@pytest.mark.parametrize("received", [2, 10**6])
def test_completions_that_never_were_cannot_be_claimed(client: Raw, received: int) -> None:
    first = client.stream()
    first.send(1, 1)
    assert first.through(1) == 1
    first.cut()
    detached(client)
    with pytest.raises(hg.ProtocolError, match="1 were written"):
        client.stream(c.Attach(received)).read()
    assert attached(client.stream(c.Attach(1))) == c.Attached(1, 2)


def test_acknowledged_completions_cannot_be_had_again(client: Raw) -> None:
    first = client.stream()
    first.send(1, 1)
    received = first.through(1)
    first.send(2, 2, c.Acknowledged(received))
    first.through(2)
    first.cut()
    detached(client)
    with pytest.raises(hg.ProtocolError, match="has acknowledged"):
        client.stream(c.Attach(0)).read()
    assert client.stream(c.Attach(received)).read().attached is not None


def test_a_claim_of_unwritten_completions_ends_the_session(client: Raw) -> None:
    stream = client.stream()
    stream.send(1, 1, c.Acknowledged(50))
    with pytest.raises(hg.ProtocolError, match="50 completion messages"):
        for _ in range(3):
            stream.read()
    gone(client)


@pytest.mark.parametrize("secret", [b"", b"x" * 16, b"x" * 1000])
def test_a_wrong_secret_attaches_to_nothing(client: Raw, secret: bytes) -> None:
    client.stream().send(1, 1)
    with pytest.raises(hg.SessionClosedError):
        client.stream(c.Attach(0), session=secret).read()
    assert len(client.daemon.host.sessions) == 1


def test_a_session_that_never_had_a_stream_may_begin_with_an_attach(client: Raw) -> None:
    # The first connection broke before the server saw its first message.
    with pytest.raises(hg.ProtocolError):
        client.stream(c.Attach(1)).read()
    stream = client.stream(c.Attach(0))
    stream.send(1, 1)
    stream.through(1)


def test_a_session_without_a_lease_ends_with_its_connection(daemon: ThreadDaemon) -> None:
    client = Raw(daemon, lease_ms=0)
    stream = client.stream()
    stream.send(1, 1)
    stream.through(1)
    with pytest.raises(hg.ProtocolError, match="no lease"):
        client.stream(c.Attach(0)).read()
    stream.send(2, 2)
    stream.through(2)
    stream.cut()
    gone(client)
    client.close()


def test_half_closing_ends_the_session_after_its_work(client: Raw) -> None:
    stream = client.stream()
    stream.send(1, 3)
    stream.half_close()
    stream.through(3)
    gone(client)


def test_a_second_stream_that_does_not_attach_is_refused(client: Raw) -> None:
    first = client.stream()
    first.send(1, 1)
    first.through(1)
    with pytest.raises(hg.HandleExistsError):
        client.stream().read()
    first.send(2, 2)
    first.through(2)


def test_the_end_of_the_lease_frees_everything(daemon: ThreadDaemon) -> None:
    daemon.host.lease_seconds = 0.3
    with cut_proxy(daemon.url) as proxy:
        session = hg.connect(proxy.url)
        session.compile(counting()).run(step=ONE)
        tensor = session.put(np.ones(1000, np.float32))
        proxy.refuse()
        proxy.cut()
        until(lambda: not daemon.host.sessions)
        assert daemon.host.statistics().storages == 0
        proxy.go_on()
        with pytest.raises((hg.SessionClosedError, hg.UnavailableError)):
            tensor.get()
        session.close()


def test_a_detached_session_is_listed_counted_and_can_be_ended(client: Raw) -> None:
    from heliograph_server.runtime.status import list_sessions

    host = client.daemon.host
    client.stream().send(1, 1)
    until(lambda: list_sessions(host)[0].attached)
    client.close()
    detached(client)
    (listed,) = list_sessions(host)
    assert not listed.attached and listed.lease_seconds == 60
    assert listed.lease_left_seconds is not None and 0 < listed.lease_left_seconds <= 60
    assert host.tenants()[0].sessions == 1
    host.sessions[0].close(hg.SessionClosedError("an operator ended it"))
    gone(client)


def test_a_drain_lets_clients_of_running_sessions_come_back(client: Raw) -> None:
    first = client.stream()
    first.send(1, 1)
    received = first.through(1)
    first.cut()
    detached(client)
    client.daemon.host.drain()
    second = client.stream(c.Attach(received))
    assert second.read().attached is not None
    client.daemon.host.close_sessions(hg.DrainingError("the daemon ends"))
    with pytest.raises(hg.DrainingError):
        for _ in range(5):
            second.read()


def test_a_lease_cannot_be_had_by_another_tenant(daemon: ThreadDaemon) -> None:
    from heliograph_proto.sessions import Quota
    from heliograph_server.resources.principals import Principal

    host = daemon.host
    owner, other = Principal("a", quota=Quota()), Principal("b", quota=Quota())
    info = host.open_session("owner", principal=owner, lease_ms=60_000)
    with pytest.raises(hg.SessionClosedError):
        host.session(info.session, other)
    host.session(info.session, owner).close()


def test_memory_of_a_detached_session_is_bounded_by_what_was_not_acknowledged(client: Raw) -> None:
    stream = client.stream()
    sent = received = 0
    for _ in range(200):
        told = c.Acknowledged(received) if received else None
        stream.send(sent + 1, sent + 20, told)
        sent += 20
        received += stream.through(sent)
    (service,) = _command_services()
    (conversation,) = service._conversations.values()
    log = conversation.outbox.log
    assert log is not None and log.written == received
    assert log.size_bytes < 4096
    stream.cut()
    detached(client)


def _command_services() -> list[Any]:
    import gc

    from heliograph_server.rpc.command_service import CommandService

    gc.collect()
    found = [one for one in gc.get_objects() if isinstance(one, CommandService)]
    return [one for one in found if one._conversations]
