"""Weights of a graph that runs on other daemons' devices: they go there straight, or through the head."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import ge
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon_urls import DaemonUrls
from forked_daemons import running_daemon
from middlemen import Middleman, middleman
from two_matrices import DEVICE, SECONDS, X, compiled, expected, graph, weights

import heliograph as hg
import heliograph.aio
from heliograph.core.methods import COMPILE, FIND_MISSING, PLACE_CONTENTS, Method

#: What a connection takes beside the bytes of contents.
BESIDE = 200_000


class Pool:
    """A head with a device of its own and one of each of two members, reached by ways that tests may cut."""

    def __init__(self, head: str, members: list[str], links: list[Middleman]) -> None:
        self.head, self.members, self.links = head, members, links
        self._connections = [len(way.passed_bytes) for way in links]

    @staticmethod
    def devices(session: Any) -> list[str]:
        return [one.name for one in session.devices]

    def straight_bytes(self) -> list[int]:
        """Towards each member, on connections that are not the head's: those since the test began."""
        pairs = zip(self.links, self._connections, strict=True)
        return [sum(way.passed_bytes[count:]) for way, count in pairs]


@contextmanager
def pooled(*arguments: str, members: int = 2) -> Iterator[Pool]:
    with ExitStack() as stack:
        urls = [stack.enter_context(running_daemon("--device", DEVICE)) for _ in range(members)]
        links = [stack.enter_context(middleman(url)) for url in urls]
        remote = [word for way in links for word in ("--device", f"remote:url={way.url}")]
        head = stack.enter_context(running_daemon("--device", DEVICE, *remote, *arguments))
        yield Pool(head, urls, links)


@pytest.fixture(scope="module")
def daemons() -> Iterator[Pool]:
    with pooled() as made:
        with hg.connect(made.head) as session:
            # So that the head and the members have all of their connections.
            compiled(session, weights(0)).run(x=X)
        yield made


@pytest.fixture
def pool(daemons: Pool) -> Iterator[Pool]:
    """With ways that are whole."""
    yield Pool(daemons.head, daemons.members, daemons.links)
    for way, url in zip(daemons.links, daemons.members, strict=True):
        way.lead_to(url)
        way.refuse(False)


def free_bytes(url: str) -> int:
    with hg.connect(url) as session:
        return session.devices[0].memory().free_bytes


def test_weights_go_straight_to_the_members_that_need_them(pool: Pool) -> None:
    arrays = weights(1)
    done: list[int] = []
    with hg.connect(pool.head, progress=lambda now, whole: done.append(whole - now)) as session:
        before = session.devices[0].memory()
        plan = compiled(session, arrays)
        traffic = session.server_traffic()
        assert (traffic.content_bytes, traffic.relayed_bytes, traffic.written_bytes) == (0, 0, 0)
        assert session.devices[0].memory() == before
        assert all(2**20 < passed < 2**20 + BESIDE for passed in pool.straight_bytes())
        assert np.array_equal(plan.run(x=X)["y"], expected(arrays))
    assert min(done) == 0


async def by_asyncio(pool: Pool, arrays: list[np.ndarray[Any, Any]]) -> tuple[Any, hg.Traffic]:
    """What a run gives, and what the head has carried for it."""
    async with heliograph.aio.connect(pool.head) as session:
        _, first, second = Pool.devices(session)
        pins = {"front/*": first, "behind/*": second}
        plan = await session.compile(graph(arrays), [first, second], pins=pins, timeout=SECONDS)
        return (await plan.run(x=X))["y"], await session.server_traffic()


def test_the_same_with_asyncio(pool: Pool) -> None:
    arrays = weights(2)
    found, traffic = asyncio.run(by_asyncio(pool, arrays))
    assert np.array_equal(found, expected(arrays)) and traffic.content_bytes == 0
    assert all(2**20 < passed < 2**20 + BESIDE for passed in pool.straight_bytes())


def test_with_asyncio_what_breaks_goes_on_where_it_was(pool: Pool) -> None:
    arrays = weights(18, 24 * 2**20)
    pool.links[0].cut_after(16 * 2**20)
    found, traffic = asyncio.run(by_asyncio(pool, arrays))
    assert np.array_equal(found, expected(arrays)) and pool.links[0].was_cut.is_set()
    assert traffic.content_bytes == traffic.relayed_bytes == 0
    # What was on its way when it was cut goes once more, but not all that had gone: 16 MiB.
    assert 24 * 2**20 < pool.straight_bytes()[0] < 38 * 2**20


def test_with_asyncio_what_cannot_be_reached_goes_through_the_head(pool: Pool) -> None:
    arrays = weights(19, 24 * 2**20)
    pool.links[1].refuse(True)
    found, traffic = asyncio.run(by_asyncio(pool, arrays))
    assert np.array_equal(found, expected(arrays))
    assert traffic.content_bytes == traffic.relayed_bytes == arrays[1].nbytes
    assert 24 * 2**20 < pool.straight_bytes()[0] < 24 * 2**20 + BESIDE


def test_a_second_session_of_the_tenant_and_a_second_compile_upload_nothing(pool: Pool) -> None:
    arrays = weights(3)
    with hg.connect(pool.head) as session, hg.connect(pool.head) as other:
        compiled(session, arrays)
        straight = pool.straight_bytes()
        calls = recorded(other)
        assert np.array_equal(compiled(other, arrays).run(x=X)["y"], expected(arrays))
        assert calls == [FIND_MISSING, COMPILE]
        assert other.server_traffic().content_bytes == 0
        # But for what connections say of themselves.
        pairs = zip(pool.straight_bytes(), straight, strict=True)
        assert all(now - then < BESIDE for now, then in pairs)


def recorded(session: hg.Session) -> list[Method[Any, Any]]:
    """Which questions a session asks its server, as it asks them."""
    calls: list[Method[Any, Any]] = []
    shell: Any = session._shell
    call: Callable[..., Any] = shell._call
    shell._call = lambda one, deadline: (calls.append(one.method), call(one, deadline))[1]
    return calls


def test_what_the_client_cannot_reach_is_passed_on_and_never_stored(pool: Pool) -> None:
    arrays = weights(4, 8 * 2**20)
    free: list[int] = []
    with (
        hg.connect(pool.head) as watcher,
        hg.connect(pool.head, progress=_watching(watcher, free)) as session,
    ):
        before = session.devices[0].memory()
        for way in pool.links:
            way.refuse(True)
        calls = recorded(session)
        plan = compiled(session, arrays)
        traffic = session.server_traffic()
        whole = sum(one.nbytes for one in arrays)
        assert (traffic.content_bytes, traffic.relayed_bytes) == (whole, whole)
        assert session.devices[0].memory() == before and set(free) == {before.free_bytes}
        assert session._shell.core.unreachable == {way.url for way in pool.links}
        assert calls.count(PLACE_CONTENTS) == 1
        assert np.array_equal(plan.run(x=X)["y"], expected(arrays))
        # Found out once: another graph's weights go that way from the start.
        compiled(session, weights(5))
        assert session.server_traffic().relayed_bytes == whole + 2 * 2**20


def _watching(watcher: hg.Session, free: list[int]) -> Callable[[int, int], None]:
    """Notes the free memory of the head's own device while weights are uploaded."""
    return lambda _now, _whole: free.append(watcher.devices[0].memory().free_bytes)


def test_an_upload_that_breaks_goes_on_where_it_was(pool: Pool) -> None:
    arrays = weights(6, 24 * 2**20)
    pool.links[0].cut_after(16 * 2**20)
    with hg.connect(pool.head) as session:
        plan = compiled(session, arrays)
        assert pool.links[0].was_cut.is_set()
        assert session.server_traffic().content_bytes == 0
        # What was on its way when it was cut goes once more, but not all that had gone: 16 MiB.
        assert 24 * 2**20 < pool.straight_bytes()[0] < 38 * 2**20
        assert np.array_equal(plan.run(x=X)["y"], expected(arrays))


def test_another_daemon_at_a_members_address_gets_nothing(pool: Pool) -> None:
    arrays = weights(7)
    with hg.connect(pool.head) as session:
        pool.links[0].lead_to(pool.members[1])
        plan = compiled(session, arrays)
        assert session.server_traffic().relayed_bytes == arrays[0].nbytes
        assert pool.straight_bytes()[0] < BESIDE
        assert np.array_equal(plan.run(x=X)["y"], expected(arrays))


def test_weights_whose_rows_lie_over_members_go_to_one_of_them_first(pool: Pool) -> None:
    arrays = weights(17)
    with hg.connect(pool.head) as session:
        before = session.devices[0].memory()
        _, first, second = Pool.devices(session)
        split = hg.SplitBufferType(first, {first: 1, second: 1})
        plan = session.compile(graph(arrays), [first, second], split={"*": split})
        assert session.server_traffic().content_bytes == 0
        assert session.devices[0].memory() == before
        assert np.array_equal(plan.run(x=X)["y"], expected(arrays))


def test_what_runs_on_the_heads_own_device_is_sent_to_the_head(pool: Pool) -> None:
    arrays = weights(8)
    with hg.connect(pool.head) as session:
        own = session.devices[0]
        plan = session.compile(graph(arrays), own)
        traffic = session.server_traffic()
        assert (traffic.content_bytes, traffic.relayed_bytes) == (2 * 2**20, 0)
        assert pool.straight_bytes() == [0, 0]
        assert np.array_equal(plan.run(x=X)["y"], expected(arrays))


def test_all_memory_comes_back_when_a_session_ends_also_in_mid_upload(pool: Pool) -> None:
    urls = (pool.head, *pool.members)
    before = [free_bytes(url) for url in urls]
    with hg.connect(pool.head) as session:
        compiled(session, weights(9))
    with (
        hg.connect(pool.head, progress=_interrupting()) as session,
        pytest.raises(hg.HeliographError, match="Interrupted"),
    ):
        compiled(session, weights(10, 8 * 2**20))
    # Something of the tests before may have come back meanwhile.
    assert any(all(map(ge, map(free_bytes, urls), before)) for _ in range(500))


class Interrupted(Exception):
    """What a client's own code raised."""


def _interrupting() -> Callable[[int, int], None]:
    def told(now: int, whole: int) -> None:
        # Before one of both is whole: that would stay for a while, for whoever tries again.
        if now > whole // 4:
            raise Interrupted

    return told


def test_a_member_that_dies_during_an_upload_is_a_typed_error() -> None:
    command = [sys.executable, "-m", "heliograph.cli", "serve", "--listen", "grpc://127.0.0.1:0"]
    member = subprocess.Popen([*command, "--device", DEVICE], stdout=subprocess.PIPE, text=True)
    assert member.stdout is not None
    try:
        url = member.stdout.readline().removeprefix("listening on ").strip()
        with running_daemon("--device", DEVICE, "--device", f"remote:url={url}") as head:

            def kill(now: int, whole: int) -> None:
                if now > whole // 2:
                    member.kill()

            with hg.connect(head, progress=kill) as session:
                remote = session.devices[1]
                with pytest.raises(hg.HeliographError) as caught:
                    session.compile(graph(weights(11, 32 * 2**20)), remote, timeout=SECONDS)
                assert not isinstance(caught.value, hg.DeadlineExceededError | hg.InternalError)
                # The head goes on.
                session.compile(graph(weights(12)), session.devices[0]).run(x=X)
    finally:
        member.kill()
        member.wait(SECONDS)
        member.stdout.close()


def test_the_heads_cache_has_no_copy_of_what_lies_on_members(tmp_path: Path) -> None:
    with pooled("--cache", str(tmp_path), members=1) as pool, hg.connect(pool.head) as session:
        session.compile(graph(weights(13)), session.devices[1])
        session.compile(graph(weights(14)), session.devices[0])
    # Its end waits for what is still to be written.
    assert len([one for one in tmp_path.rglob("*") if one.is_file() and one.stat().st_size >= 2**20]) == 2


def test_a_client_that_is_the_head_itself_sends_weights_to_the_member(daemon: DaemonUrls) -> None:
    arrays = weights(15)
    with middleman(daemon.tcp) as way, hg.connect(f"local:#remote:url={way.url}") as session:
        plan = session.compile(graph(arrays))
        assert session.server_traffic().relayed_bytes == 2 * 2**20
        assert len(way.passed_bytes) == 2
        assert np.array_equal(plan.run(x=X)["y"], expected(arrays))


@pytest.mark.parametrize("where", ["local:", "daemon"])
def test_servers_without_such_devices_are_asked_nothing_more(where: str, daemon: DaemonUrls) -> None:
    arrays = weights(16)
    with hg.connect(daemon.tcp if where == "daemon" else where) as session:
        assert "direct-weights" not in session.info.features and "tickets" in session.info.features
        calls = recorded(session)
        session.compile(graph(arrays))
        assert calls == [FIND_MISSING, COMPILE]
        assert session.server_traffic().content_bytes == 2 * 2**20
