"""Whole tensors from daemon to daemon, by a command at each end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from daemon_threads import thread_daemon
from pool_daemons import Daemon, daemons

import heliograph as hg
from heliograph.core.future import Pending
from heliograph.head.handoff import hand_over, new_edge, probe
from heliograph.procedures.transfer import arrive, wait_for
from heliograph_proto import commands as c
from heliograph_proto.plans import Edge, PeerSource

SECONDS = 20.0
#: After so long without a sign a source is lost.
SILENCE_SECONDS = 1.0


@pytest.fixture
def sessions() -> Iterator[tuple[hg.Session, hg.Session]]:
    with thread_daemon() as one, thread_daemon() as two, hg.connect(one.url) as a, hg.connect(two.url) as b:
        yield a, b


@pytest.mark.parametrize("count", [0, 1, 1000, 3_000_000])
def test_a_tensor_is_copied_and_no_byte_of_it_passes_through_the_client(
    sessions: tuple[hg.Session, hg.Session], count: int
) -> None:
    a, b = sessions
    array = np.arange(count, dtype=np.float32)
    source, target = a.put(array), b.empty((count,), "f32")
    before = [one.statistics().traffic for one in sessions]
    hand_over(source, target, a.address)
    assert [one.statistics().traffic for one in sessions] == before
    sent, received = (one.server_traffic().peers for one in sessions)
    assert sent.sent_bytes == received.received_bytes == array.nbytes
    assert np.array_equal(target.get(), array)


def test_a_probe_tells_who_answers_and_how_fast(sessions: tuple[hg.Session, hg.Session]) -> None:
    a, b = sessions
    found = probe(a, b.address, 2**20)
    assert found.error is None and found.incarnation == b.info.incarnation
    assert 0 < found.round_trip_seconds < 5 and found.bytes_per_second > 0
    missing = probe(a, "grpc://127.0.0.1:1")
    assert isinstance(missing.error, hg.MemberLostError) and "127.0.0.1:1" in str(missing.error)
    with pytest.raises(hg.InvalidArgumentError):
        probe(a, "local:")


def test_a_head_copies_between_its_members_without_touching_the_bytes() -> None:
    with (
        thread_daemon() as one,
        thread_daemon() as two,
        hg.connect(one.url) as a,
        hg.connect(two.url) as b,
        hg.connect([one.url, two.url]) as head,
    ):
        left, right = head.devices
        array = np.arange(100_000, dtype=np.float32)
        source, target = head.put(array, left), head.empty(array.shape, "f32", right)
        before = [one.server_traffic() for one in (a, b)]
        assert source.copy_and_wait(target) is hg.CopyPath.DESTINATION
        assert np.array_equal(target.get(), array)
        assert before[0].peers.sent_bytes == before[1].peers.received_bytes == 0
        assert a.server_traffic().peers.sent_bytes == array.nbytes
        assert b.server_traffic().peers.received_bytes == array.nbytes


# Ends that are no copies


def sent(tensor: hg.Tensor, command: c.CommandKind, stream: hg.Stream | None = None) -> Pending:
    """Sends a command of a tensor's session, and returns when the server has received it."""
    shell = tensor._shell
    number = None if stream is None else stream._live_handle
    pending = shell.advance(lambda: shell.core.send(command, stream=number, observed=True))
    shell.drive(arrive(shell.core), SECONDS)
    return pending


def result(tensor: hg.Tensor, pending: Pending) -> None:
    """Waits for a command. Raises its error."""
    tensor._shell.drive(wait_for(tensor._shell.core, pending), SECONDS)


def offer(tensor: hg.Tensor, edge: Edge, stream: hg.Stream | None = None) -> Pending:
    return sent(tensor, c.OfferTensor(tensor._live_handle, edge, 1), stream)


def fetch(tensor: hg.Tensor, edge: Edge, source: hg.Session, **other: Any) -> Pending:
    whence = PeerSource(source.address, other.get("incarnation", source.info.incarnation))
    return sent(tensor, c.FetchTensor(tensor._live_handle, edge, 1, whence))


def cancel(tensor: hg.Tensor, pending: Pending) -> None:
    tensor._shell.advance(lambda: tensor._shell.core.cancel(pending))


def test_cancelling_either_command_ends_both(sessions: tuple[hg.Session, hg.Session]) -> None:
    a, b = sessions
    source, target = a.put(np.ones(1000, np.float32)), b.empty((1000,), "f32")
    waiting, edge = new_edge(), new_edge()
    stream = a.stream()
    # The second one does not begin before the first one is over.
    held, behind = offer(source, waiting, stream), offer(source, edge, stream)
    fetching = fetch(target, edge, a)
    cancel(source, behind)
    # Whether it came for the tensor before that or after.
    refusals = hg.CancelledError, hg.PermissionDeniedError
    with pytest.raises(hg.CancelledError):
        result(source, behind)
    with pytest.raises(refusals):
        result(target, fetching)
    cancel(source, held)
    with pytest.raises(hg.CancelledError):
        result(source, held)
    # The tensor is as after any write that failed, and good once it is written.
    with pytest.raises(refusals):
        target.get()
    hand_over(source, target, a.address)
    assert (target.get() == 1).all()


def test_a_tensor_that_is_offered_no_more_is_denied(sessions: tuple[hg.Session, hg.Session]) -> None:
    a, b = sessions
    source, target = a.empty((4,), "f32"), b.empty((4,), "f32")
    edge = new_edge()
    pending = offer(source, edge)
    cancel(source, pending)
    with pytest.raises(hg.CancelledError):
        result(source, pending)
    with pytest.raises(hg.PermissionDeniedError):
        result(target, fetch(target, edge, a))
    # Nor is one whose bytes are those of a failed write.
    with pytest.raises(hg.PermissionDeniedError):
        hand_over(target, source, b.address)


def test_what_is_forged_reused_or_for_another_life_is_refused(
    sessions: tuple[hg.Session, hg.Session],
) -> None:
    a, b = sessions
    source, target = a.put(np.ones(4, np.float32)), b.empty((4,), "f32")
    edge = new_edge()
    pending = offer(source, edge)
    for bad in (Edge(edge.name, b"?" * 32), Edge(b"?" * 16, edge.secret)):
        with pytest.raises(hg.PermissionDeniedError):
            result(target, fetch(target, bad, a))
    with pytest.raises(hg.MemberLostError):
        result(target, fetch(target, edge, a, incarnation=b"another life"))
    result(target, fetch(target, edge, a))
    result(source, pending)
    with pytest.raises(hg.PermissionDeniedError):
        result(target, fetch(target, edge, a))
    streams = a.stream(), a.stream()
    again = offer(source, edge, streams[0])
    with pytest.raises(hg.HandleExistsError):
        result(source, offer(source, edge, streams[1]))
    cancel(source, again)


def test_tensors_of_other_sizes_are_not_written(sessions: tuple[hg.Session, hg.Session]) -> None:
    a, b = sessions
    for count in (5, 100_000):
        edge = new_edge()
        pending = offer(a.put(np.ones(count, np.float32)), edge)
        target = b.empty((4,), "f32")
        with pytest.raises(hg.ProtocolError):
            result(target, fetch(target, edge, a))
        with pytest.raises(hg.InvalidArgumentError, match="differ"):
            hand_over(a.put(np.ones(count, np.float32)), target, a.address)
        del pending


def lose(one: Daemon, how: str) -> None:
    {"kill": one.kill, "stop": one.stop, "restart": one.restart}[how]()


@pytest.mark.parametrize("how", ["kill", "stop", "restart"])
def test_a_source_that_is_lost_is_named_by_whoever_waits_and_whoever_comes_later(how: str) -> None:
    with (
        daemons(1, "--device", "cpu:threads=1,memory=64MiB") as (one,),
        thread_daemon(pool_silence_seconds=SILENCE_SECONDS) as two,
        hg.connect(two.url) as b,
    ):
        a = hg.connect(one.url)
        source, stream = a.put(np.ones(100_000, np.float32)), a.stream()
        targets = [b.empty((100_000,), "f32"), b.empty((10,), "f32")]
        held = offer(source, new_edge(), stream)
        edges = [new_edge(), new_edge()]
        offers = [
            offer(tensor, edge, stream) for tensor, edge in zip((source, source[:10]), edges, strict=True)
        ]
        streams = [b.stream() for _ in targets]
        waits = []
        for target, edge, own in zip(targets, edges, streams, strict=True):
            whence = PeerSource(a.address, a.info.incarnation)
            waits.append(sent(target, c.FetchTensor(target._live_handle, edge, 1, whence), own))
        begun = time.monotonic()
        lose(one, how)
        for target, pending in zip(targets, waits, strict=True):
            with pytest.raises(hg.MemberLostError, match=one.url):
                result(target, pending)
        print(f"{how}: noticed after {time.monotonic() - begun:.2f} s")
        with pytest.raises(hg.MemberLostError, match=one.url):
            result(targets[0], fetch(targets[0], edges[0], a))
        del held, offers
        one.end()
        a.close()
