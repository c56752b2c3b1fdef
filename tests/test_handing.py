"""Whole tensors from daemon to daemon, by a command at each end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from daemon_threads import thread_daemon

import heliograph as hg
from heliograph._handing import hand_over, probe


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
        assert source.copy_and_wait(target) is hg.CopyRoad.DESTINATION
        assert np.array_equal(target.get(), array)
        assert before[0].peers.sent_bytes == before[1].peers.received_bytes == 0
        assert a.server_traffic().peers.sent_bytes == array.nbytes
        assert b.server_traffic().peers.received_bytes == array.nbytes
