"""Copies of sessions that go ahead of a move: only what changed since is sent while the session is still."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from daemon_threads import ThreadDaemon, thread_daemon
from moving_programs import InThread
from waiting import until

import heliograph as hg
from heliograph_proto.errors import UnavailableError
from heliograph_proto.sessions import Limits
from heliograph_server.runtime.moves import Handing

#: A tensor that is worth sending ahead, of more pieces than one.
LARGE = np.arange(2_500_000, dtype=np.float32)
ONES = np.ones(1_200_000, np.float32)
#: A session that nobody attaches to ends soon.
SOON = Limits(attach_timeout_ms=1000)


@dataclass
class Sent:
    """What went from a daemon to another one."""

    #: The bytes of the copies that went ahead, and of the sessions themselves.
    ahead: list[int] = field(default_factory=list)
    itself: list[int] = field(default_factory=list)
    #: Called before a copy goes.
    before: Callable[[], None] = lambda: None


@pytest.fixture
def pair() -> Iterator[tuple[ThreadDaemon, ThreadDaemon]]:
    with thread_daemon() as one, thread_daemon() as other:
        yield one, other


@pytest.fixture
def sent(pair: tuple[ThreadDaemon, ThreadDaemon]) -> Sent:
    """The bytes that the first daemon sends."""
    moves, found = pair[0].host.moves, Sent()
    give = moves.give

    def counting(address: str, image: bytes, read: Any, limits: Any, how: Handing) -> None:
        counts = [0]

        def counted(digest: bytes) -> Iterator[memoryview]:
            for piece in read(digest):
                counts[0] += piece.nbytes
                yield piece

        if how.is_ahead:
            found.before()
        give(address, image, counted, limits, how)
        (found.ahead if how.is_ahead else found.itself).append(counts[0])

    moves.give = counting
    return found


def summing() -> hg.Graph:
    """A large variable that each run adds to."""
    g = hg.Graph()
    total = g.variable("total", (len(ONES),), "f32")
    g.output("last", hg.assign(total, total + g.input("x", (1,), "f32"))[-1:])
    return g


def free_bytes(daemon: ThreadDaemon) -> int:
    return int(daemon.host.devices[0].memory().free_bytes)


def until_more(found: list[float]) -> None:
    """Wait until a list has grown by two."""
    count = len(found)
    until(lambda: len(found) >= count + 2)


def test_only_what_changed_is_sent_while_the_session_is_still(
    pair: tuple[ThreadDaemon, ThreadDaemon], sent: Sent
) -> None:
    one, other = pair
    before = free_bytes(other)
    with hg.connect(one.url, progress=None) as session:
        tensor, changed = session.put(LARGE), session.put(ONES)
        plan = session.compile(summing())
        plan.run(x=[2.0])
        sent.before = lambda: changed.set(2 * ONES)
        used = free_bytes(one)
        went = session.move(other.url)
        # Not in the copy: the tensor that was written meanwhile.
        assert sum(sent.ahead) >= LARGE.nbytes + ONES.nbytes > sum(sent.itself) >= ONES.nbytes
        assert went.sent_bytes == sum(sent.ahead) + sum(sent.itself)
        # Nothing of the copy is left there.
        assert abs((before - free_bytes(other)) - (free_bytes(one) - used)) < 4096
        assert len(other.host.sessions) == 1
        assert tensor.get().tobytes() == LARGE.tobytes()
        assert changed.get().tobytes() == (2 * ONES).tobytes()
        assert plan.run(x=[3.0])["last"] == [5.0]
    until(lambda: free_bytes(other) == before)


def test_a_program_that_changes_everything_meanwhile_has_its_last_bits(
    pair: tuple[ThreadDaemon, ThreadDaemon],
) -> None:
    with hg.connect(pair[0].url, progress=None) as session:
        tensor, plan = session.put(LARGE), session.compile(summing())
        found: list[float] = []

        def step() -> None:
            found.append(float(plan.run(x=[1.0])["last"][0]))

        step()
        with InThread(step):
            for number in range(4):
                session.move(pair[(number + 1) % 2].url)
                until_more(found)
        assert found == [float(number + 1) for number in range(len(found))]
        assert tensor.get().tobytes() == LARGE.tobytes()
        assert sum(len(daemon.host.sessions) for daemon in pair) == 1


def test_tensors_that_are_freed_or_made_meanwhile_are_so_afterwards(
    pair: tuple[ThreadDaemon, ThreadDaemon], sent: Sent
) -> None:
    with hg.connect(pair[0].url, progress=None) as session:
        tensor, freed = session.put(LARGE), session.put(ONES)
        made: list[hg.Tensor] = []

        def change() -> None:
            freed.free()
            made.append(session.put(-ONES))

        sent.before = change
        session.move(pair[1].url)
        assert tensor.get().tobytes() == LARGE.tobytes()
        assert made[0].get().tobytes() == (-ONES).tobytes()
        assert free_bytes(pair[0]) - free_bytes(pair[1]) < 3 * ONES.nbytes + LARGE.nbytes


def test_a_move_does_without_a_copy_that_could_not_go(
    pair: tuple[ThreadDaemon, ThreadDaemon], sent: Sent
) -> None:
    def fail() -> None:
        raise UnavailableError("the copy cannot go")

    sent.before = fail
    with hg.connect(pair[0].url, progress=None) as session:
        tensor = session.put(LARGE)
        session.move(pair[1].url)
        assert not sent.ahead and sum(sent.itself) >= LARGE.nbytes
        assert tensor.get().tobytes() == LARGE.tobytes()


def test_weights_that_went_ahead_do_not_go_again(pair: tuple[ThreadDaemon, ThreadDaemon], sent: Sent) -> None:
    """Also those of a session without a tenant, which no other session finds."""
    g = hg.Graph()
    g.output("y", g.input("x", (1,), "f32") + hg.sum(g.weight("w", LARGE)))
    one, other = pair
    before = free_bytes(other)
    with hg.connect(one.url, progress=None) as session:
        plan, tensor = session.compile(g), session.put(ONES)
        expected = plan.run(x=[1.0])["y"]
        session.move(other.url)
        assert sum(sent.ahead) >= LARGE.nbytes + ONES.nbytes and sum(sent.itself) < 4096
        assert plan.run(x=[1.0])["y"] == expected and tensor.get().tobytes() == ONES.tobytes()
        assert before - free_bytes(other) < LARGE.nbytes + ONES.nbytes + 4096
    until(lambda: free_bytes(other) == before)


def test_a_tensor_stays_in_memory_of_its_buffer_type() -> None:
    """Though another one with the same bytes lies elsewhere."""
    with thread_daemon() as one, thread_daemon() as other, hg.connect(one.url, progress=None) as session:
        types = [None, "shared"]
        tensors = [session.empty(len(ONES), "f32", buffer_type=one) for one in types]
        for tensor in tensors:
            tensor.set(ONES)
        session.move(other.url)
        (there,) = other.host.sessions
        names = [
            (storage.buffer_type, storage.buffer.buffer_type.name)
            for storage in there.inside.core.resources.storages
        ]
        assert len({name for name, _ in names}) == 2
        assert all(wished in ("", found) for wished, found in names)


def test_a_restore_that_lasts_longer_than_the_lease_is_awaited(
    pair: tuple[ThreadDaemon, ThreadDaemon], sent: Sent
) -> None:
    """The time of its client begins with the end of the restore."""
    with thread_daemon(SOON, lease=0.5) as slow, hg.connect(pair[0].url, progress=None) as session:
        tensor = session.put(LARGE)
        moves = pair[0].host.moves
        give = moves.give

        def late(address: str, image: bytes, read: Any, limits: Any, how: Handing) -> None:
            end = time.monotonic() + 1.2

            def read_late(digest: bytes) -> Iterator[memoryview]:
                until(lambda: time.monotonic() > end)
                yield from read(digest)

            give(address, image, read_late, limits, how)

        moves.give = late
        session.move(slow.url)
        assert tensor.get().tobytes() == LARGE.tobytes()


def test_bytes_that_are_wrong_leave_nothing(pair: tuple[ThreadDaemon, ThreadDaemon]) -> None:
    one, other = pair
    before = free_bytes(other)
    with hg.connect(one.url, progress=None) as session:
        tensors = [session.put(LARGE), session.put(ONES)]
        moves = one.host.moves
        give = moves.give

        def wrong(address: str, image: bytes, read: Any, limits: Any, how: Handing) -> None:
            def changed(digest: bytes) -> Iterator[memoryview]:
                for piece in read(digest):
                    yield memoryview(bytes(piece.nbytes)) if piece.nbytes == ONES.nbytes % 2**22 else piece

            give(address, image, changed, limits, how)

        moves.give = wrong
        with pytest.raises(hg.SnapshotFailedError, match="changed on their way"):
            session.move(other.url)
        assert tensors[0].get().tobytes() == LARGE.tobytes()
        until(lambda: not other.host.sessions and free_bytes(other) == before)


def test_another_attempt_sends_only_what_changed_since(
    pair: tuple[ThreadDaemon, ThreadDaemon], sent: Sent
) -> None:
    one, other = pair
    before = free_bytes(other)
    with hg.connect(one.url, progress=None) as session:
        tensor, changed = session.put(LARGE), session.put(ONES)
        (here,) = one.host.sessions
        one.host.moves.prepare(here, other.url)
        changed.set(3 * ONES)
        session.move(other.url)
        first, second = sent.ahead
        assert first >= LARGE.nbytes + ONES.nbytes > 2 * second >= 2 * ONES.nbytes and sent.itself == [0]
        assert before - free_bytes(other) < LARGE.nbytes + ONES.nbytes + 4096
        assert tensor.get().tobytes() == LARGE.tobytes()
        assert changed.get().tobytes() == (3 * ONES).tobytes()


def test_a_small_session_sends_nothing_ahead(pair: tuple[ThreadDaemon, ThreadDaemon], sent: Sent) -> None:
    with hg.connect(pair[0].url, progress=None) as session:
        tensor = session.put(ONES[:1000])
        session.move(pair[1].url)
        assert not sent.ahead and tensor.get().tobytes() == ONES[:1000].tobytes()


def test_a_copy_without_its_session_ends_with_its_lease() -> None:
    """No client can use it, and a move to a third daemon does without it."""
    with thread_daemon() as one, thread_daemon(SOON, lease=1.0) as other, thread_daemon() as third:
        before = free_bytes(other)
        with hg.connect(one.url, progress=None) as session:
            tensor = session.put(LARGE)
            (here,) = one.host.sessions
            assert one.host.moves.prepare(here, other.url) >= LARGE.nbytes
            assert len(other.host.sessions) == 1 and free_bytes(other) < before
            session.move(third.url)
            assert tensor.get().tobytes() == LARGE.tobytes()
            until(lambda: not other.host.sessions and free_bytes(other) == before)
